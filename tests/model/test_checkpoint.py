import json
import math
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from maxrl_fast.errors import InputError
from maxrl_fast.model.checkpoint import (
    SHARD_BYTES,
    find_model,
    find_tensors,
    kept_files,
    load_checkpoint,
)
from maxrl_fast.model.policy import load_huggingface, load_policy
from maxrl_fast.model.tokenizer import load_tokenizer, tokenizer_files
from maxrl_fast.records import Rollouts
from maxrl_fast.runtime.files import atomic_file, temporary_path
from maxrl_fast.tasks.conversation import Conversation
from maxrl_fast.tasks.maze import WORDS, MazeTask, encode_maze
from tests.batches import one_batch
from tests.models import response_logits, save_checkpoint, tiny_decoder
from tests.tables import refused, table

TASK = MazeTask(5)
BACKENDS = load_checkpoint, lambda path: load_huggingface(path, 64)


def save(directory, shard_bytes=SHARD_BYTES, **changes):
    model = tiny_decoder(**changes)
    save_checkpoint(
        directory, model.config, model.weights(), TASK.tokenizer_files(), TASK.stop_ids, shard_bytes
    )
    return model


def check_equal_logits(ours, theirs):
    prompts = TASK.prompts("train", 0, 2)
    rollouts = Rollouts.given([[13, 15, 7], [16, 16, 16, 14, 7], [14, 7], [7]])
    logits = response_logits(ours, one_batch(prompts, rollouts), torch.float32)
    for s, response in enumerate(rollouts.tokens.split(rollouts.lengths.tolist())):
        prompt = prompts.take(s // 2, 1).tokens
        start, stop = rollouts.cu_seqlens[s : s + 2].tolist()
        with torch.no_grad():
            expected = theirs(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        assert expected.std() > 0.1
        torch.testing.assert_close(logits[start:stop], expected, rtol=0, atol=1e-4)


SIZES = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
SIZES |= {"initializer_range": 0.3}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 64
UNTIED = {"tie_word_embeddings": False}
THEIRS = {
    "qwen2": transformers.Qwen2Config(**SIZES, tie_word_embeddings=True, rope_theta=1e6),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=16, **UNTIED),
    "llama 3": transformers.LlamaConfig(
        **SIZES, **UNTIED, rope_parameters={**LLAMA3, "rope_theta": 500000.0}
    ),
    "smollm2": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, rms_norm_eps=1e-5),
}


@pytest.mark.parametrize("family", THEIRS)
def test_checkpoints_of_transformers_load_and_save_back(tmp_path, family):
    shards = "5GB" if family == "qwen3" else "20KB"
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(THEIRS[family])
    # biases and norms start at 0 and 1, which would hide them
    for name, parameter in theirs.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 0.7 if "norm" in name else 0.0, 0.2)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size=shards)
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists() == (shards == "20KB")
    model, ours = load_checkpoint(tmp_path / "theirs"), tmp_path / "ours"
    check_equal_logits(model, theirs)
    shard_bytes = SHARD_BYTES if "qwen3" in family else 10_000
    save_checkpoint(ours, model.config, model.weights(), {}, (2,), shard_bytes)
    assert (ours / "model.safetensors.index.json").exists() == (shard_bytes < SHARD_BYTES)
    back = AutoModelForCausalLM.from_pretrained(ours)
    check_equal_logits(model, back)
    for (name, a), b in zip(theirs.state_dict().items(), back.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert json.loads((ours / "config.json").read_text())["architectures"] == [type(back).__name__]
    loaded = load_checkpoint(ours)
    assert loaded.config == model.config
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, loaded.state_dict()[name]), name


@pytest.mark.parametrize("stored", ["the head", "both", "different"])
def test_tied_weights_are_stored_under_either_name(tmp_path, stored):
    model, file = save(tmp_path), tmp_path / "model.safetensors"
    tensors, (head, embedding) = load_file(file), ("lm_head.weight", "model.embed_tokens.weight")
    tensors[head] = tensors[embedding] * 1
    if stored == "the head":
        del tensors[embedding]
    elif stored == "different":
        tensors[head] = tensors[head].flip(0).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    if stored == "different":  # transformers would use both
        for load in BACKENDS:
            with refused('lm_head.weight that differs .* "tie_word_embeddings": false'):
                load(tmp_path)
        edit_config(tmp_path, tie_word_embeddings=False)
        assert torch.equal(load_checkpoint(tmp_path).lm_head.weight, tensors[head])
        save_file(tensors | {head: tensors[head][1:]}, file, metadata={"format": "pt"})
        with refused("does not fit qwen2: mismatched keys .*lm_head.weight"):
            BACKENDS[1](tmp_path)
        return
    for policy in [load(tmp_path) for load in BACKENDS]:
        name = "hf." * (policy.backend != "native") + embedding
        assert policy.lm_head.weight is dict(policy.named_parameters())[name]
        assert torch.equal(policy.lm_head.weight, model.lm_head.weight)


SPECIAL = {"bos_token_id": 11, "eos_token_id": [13, 14], "pad_token_id": 0}
GENERATION = {**SPECIAL, "temperature": 0.6, "top_p": 0.9, "do_sample": True}
GENERATION["transformers_version"] = "4.51.0"


def test_every_key_of_a_loaded_configuration_is_kept(tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    AutoModelForCausalLM.from_config(THEIRS["llama 3"]).save_pretrained(theirs)
    own = {"deep": [1, None, {"a": "\u00e4"}]}
    edit_config(theirs, **SPECIAL, initializer_range=0.02, its_own=own)
    (theirs / "generation_config.json").write_text(json.dumps(GENERATION))
    model = load_checkpoint(theirs)
    save_checkpoint(ours, model.config, model.weights(), kept_files(theirs, (14, 13)), (14, 13))
    for name in ("config.json", "generation_config.json"):
        assert json.loads((ours / name).read_text()) == json.loads((theirs / name).read_text())
    back = AutoModelForCausalLM.from_pretrained(ours)
    assert {name: getattr(back.config, name) for name in SPECIAL} == SPECIAL
    assert (back.generation_config.temperature, back.generation_config.pad_token_id) == (0.6, 0)


def test_bfloat16_checkpoints_stay_bfloat16_and_are_trained_in_float32(tmp_path):
    save(tmp_path, dtype="bfloat16")
    assert load_file(tmp_path / "model.safetensors")["model.norm.weight"].dtype == torch.bfloat16
    model = load_checkpoint(tmp_path)
    assert (model.config.dtype, model.model.norm.weight.dtype) == ("bfloat16", torch.float32)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    check_equal_logits(model, theirs)


CHAT = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt "
    "%}PATH_START{% endif %}"
)


def test_tokenizer_and_chat_template_come_from_the_directory(tmp_path):
    model, copied = save(tmp_path / "a"), tmp_path / "b"
    (tmp_path / "a" / "chat_template.jinja").write_text(CHAT)
    files = tokenizer_files(tmp_path / "a")
    save_checkpoint(copied, model.config, model.weights(), files, (2,))
    chat = [{"role": "START", "content": "UP DOWN"}]
    assert Conversation(load_tokenizer(copied), (2,)).prompt(chat) == [11, 13, 14, 6]
    (copied / "chat_template.jinja").unlink()
    with refused("has no chat template"):
        Conversation(load_tokenizer(copied), (2,)).prompt(chat)
    (copied / "tokenizer.json").write_text("{")
    with refused(r"cannot read the tokenizer of .*b: "):
        load_tokenizer(copied)


@pytest.mark.parametrize("load", [*BACKENDS, load_tokenizer])
def test_no_code_of_a_checkpoint_is_run(tmp_path, load):
    """A configuration with custom classes (remote code) is read as the family that model_type
    names, or refused."""
    save(tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    code = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    code |= {"AutoTokenizer": ["evil.T", "evil.T"]}
    edit_config(tmp_path, auto_map=code, attn_implementation="a/b")
    assert "evil" not in type(getattr(load(tmp_path), "hf", None)).__module__
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_no_key_that_makes_transformers_run_code_is_kept(tmp_path, name):
    save(tmp_path)
    code = {"auto_map": {"AutoConfig": "evil.Config"}, "custom_pipelines": {"a": {}}}
    code["_attn_implementation"] = "evil/kernel"
    content = json.loads((tmp_path / name).read_text()) | code | {"own": [{**code, "kept": 1}]}
    (tmp_path / name).write_text(json.dumps(content))
    kept = kept_files(tmp_path, TASK.stop_ids)[name]
    assert kept["own"] == [{"kept": 1}]
    assert not any(key in json.dumps(kept) for key in code)


def test_the_tokenizer_encodes_the_tasks_words(tmp_path):
    save(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    ids = encode_maze(TASK.maze("train", 0))
    words = [WORDS[i] for i in ids]
    for text in (" ".join(words), "\n".join(words), tokenizer.decode(ids)):
        assert tokenizer(text)["input_ids"] == ids
    special = [getattr(tokenizer, f"{x}_token_id") for x in ("pad", "bos", "eos", "unk")]
    assert (special, len(tokenizer)) == ([0, 1, 2, 3], TASK.vocab_size)


def test_a_checkpoint_is_complete_or_absent(tmp_path):
    directory = tmp_path / "checkpoint"

    def fail():
        with atomic_file(directory) as folder:
            folder.mkdir()
            (folder / "config.json").write_text(str(1 / 0))

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not list(tmp_path.iterdir())
    (temporary_path(directory) / "left over").mkdir(parents=True)  # by a process that was killed
    with atomic_file(directory) as folder:
        folder.mkdir()
        (folder / "config.json").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoint", "config.json"]


def edit_config(directory, **changes):
    path = directory / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def refused_after(directory, message):
    with refused(message):
        load_checkpoint(directory)


def test_a_checkpoint_that_its_run_removes_meanwhile_is_a_sentence(tmp_path):
    folder, link = tmp_path / "step-1", tmp_path / "latest"
    save(folder)
    link.symlink_to(folder.name)
    with refused(r"must be .*, got .*, which has no config\.json"):
        find_model(str(tmp_path), pytest.fail)
    model = find_model(str(link), pytest.fail)
    assert model == str(folder)
    shutil.rmtree(folder)
    with refused("a run removes its older checkpoints, this one meanwhile"):
        find_tensors(Path(model))


@pytest.mark.parametrize(
    ("changes", "message"),
    table(r"""
    model_type="mamba" | model_type must be one of qwen2, qwen3, llama, got 'mamba'
    dtype="float8" | dtype must be one of float32, bfloat16, float16, got 'float8'
    layer_types=["full_attention", "sliding_attention"] | must all be full_attention
    num_key_value_heads=3 | multiple of num_key_value_heads, got 4 and 3
    rope_parameters={"rope_type": "llama3", "rope_theta": 1e4} | lacks the key 'factor'
    rope_parameters=None, rope_scaling={"type": "yarn", "factor": 4.0} | type default or llama3
    rope_parameters={"partial_rotary_factor": 0.5} | of type default or llama3, and not partial
    hidden_act="gelu" | hidden_act must be "silu", got "gelu"
    """),
)
def test_a_configuration_that_does_not_fit_is_refused(tmp_path, changes, message):
    save(tmp_path)
    edit_config(tmp_path, **eval(f"dict({changes})"))
    refused_after(tmp_path, message)


@pytest.mark.parametrize(
    ("name", "weight", "message"),
    [
        ("model.norm.weight", None, "lacks the tensor model.norm.weight"),
        ("model.norm.weight", torch.ones(32).long(), "must be F32, BF16 or F16, got I64"),
        ("model.norm.weight", torch.ones(33), r"must have shape \(32,\), got \(33,\)"),
        ("extra", torch.ones(1), "has the tensor extra, which"),
    ],
)
def test_a_damaged_tensor_is_named(tmp_path, name, weight, message):
    save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {name: weight}
    tensors = {name: x for name, x in tensors.items() if x is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    refused_after(tmp_path, message)


KEYS = """text_config rope_scaling rope_parameters layer_types num_hidden_layers hidden_size
    num_attention_heads head_dim vocab_size rope_theta dtype model_type hidden_act"""
VALUES = [True, 0, -1, 10**9, 10**400, 2.5, math.inf, "x", ["x"], [3], {"a": 1}]
VALUES += [{"num_hidden_layers": 10**9, "rope_type": "llama3", "factor": [], "rope_theta": "x"}]


@pytest.mark.parametrize("key", KEYS.split())
@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_a_key_of_any_type_loads_or_is_refused_by_a_sentence(tmp_path, key, backend):
    save(tmp_path)
    refusals = []
    sizes = {"task": "", "vocab_size": len(WORDS), "prompt_length": 1, "max_new_tokens": 1}
    signal.alarm(60)  # which ends a test that waits
    for value in VALUES:
        edit_config(tmp_path, **{key: value})
        try:
            kept_files(tmp_path, TASK.stop_ids)
            load_policy(tmp_path, backend=backend, is_empty=backend != "native", **sizes)
        except InputError as error:
            refusals.append(str(error))
    signal.alarm(0)
    assert not [x for x in refusals if "\n" in x]
    assert refusals or key == "text_config"


@pytest.mark.parametrize("load", BACKENDS)
def test_a_tensor_that_two_files_have_is_refused(tmp_path, load):
    save(tmp_path, 30_000)
    save_file({"model.norm.weight": torch.ones(32)}, tmp_path / "model.safetensors")
    with refused("both have model.norm.weight: keep the files of one checkpoint"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_pipe_is_refused(tmp_path, name):
    save(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    for load in [load_tokenizer] if name == "tokenizer.json" else BACKENDS:
        with refused(f"{name} must be a regular file"):
            load(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_a_damaged_shard_is_named(tmp_path, damage):
    save(tmp_path, 30_000)
    shard = min(tmp_path.glob("model-*.safetensors"))
    if damage == "missing":
        shard.unlink()
        refused_after(tmp_path, "lacks the tensor|cannot load|does not fit .* missing keys")
    else:
        shard.write_bytes(shard.read_bytes()[:-9])
        refused_after(tmp_path, "cannot read the weights .*model-00001-of-00003")
