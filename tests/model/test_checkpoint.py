"""Hugging Face checkpoints: transformers computes the same logits from what we write, and we say what is wrong with a file."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from maxrl_fast.errors import InputError
from maxrl_fast.model.checkpoint import load_checkpoint, save_checkpoint
from maxrl_fast.records import Rollouts
from maxrl_fast.tasks.maze import WORDS, MazeTask, encode_maze
from tests.batches import one_batch
from tests.models import response_logits, tiny_decoder

TASK = MazeTask(5)


def save(directory, **changes):
    model = tiny_decoder(**changes)
    save_checkpoint(directory, model, TASK.tokenizer_files(), TASK.stop_ids)
    return model


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": False}, {"head_dim": 16, "num_key_value_heads": 4}, {"rope_theta": 1e6}]
)
def test_transformers_computes_the_same_logits(tmp_path, changes):
    model = save(tmp_path / "checkpoint", **changes)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    prompts = TASK.prompts("train", 0, 2)
    rollouts = Rollouts.given([[13, 15, 7], [16, 16, 16, 14, 7], [14, 7], [7]])
    ours = response_logits(model, one_batch(prompts, rollouts), torch.float32)
    for s in range(4):
        prompt = prompts.take(s // 2, 1).tokens
        response = rollouts.tokens[rollouts.cu_seqlens[s] : rollouts.cu_seqlens[s + 1]]
        with torch.no_grad():
            logits = theirs(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        assert logits.std() > 0.3
        torch.testing.assert_close(ours[rollouts.cu_seqlens[s] : rollouts.cu_seqlens[s + 1]], logits, rtol=0, atol=1e-4)


def test_the_tokenizer_speaks_the_tasks_words(tmp_path):
    save(tmp_path / "checkpoint")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "checkpoint")
    ids = encode_maze(TASK.maze("train", 0))
    words = [WORDS[i] for i in ids]
    for text in (" ".join(words), "\n".join(words), tokenizer.decode(ids)):
        assert tokenizer(text)["input_ids"] == ids
    assert tokenizer("RIGHT UP DONE")["input_ids"] == [16, 13, 7]
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (0, 1, 2, 3)
    assert len(tokenizer) == TASK.vocab_size


def test_loading_gives_back_the_same_weights(tmp_path):
    for name, changes in (("tied", {}), ("untied", {"tie_word_embeddings": False})):
        model = save(tmp_path / name, **changes)
        loaded = load_checkpoint(tmp_path / name)
        assert loaded.config == model.config
        for (key, a), b in zip(model.state_dict().items(), loaded.state_dict().values(), strict=True):
            assert torch.equal(a, b), key


def test_a_checkpoint_is_whole_or_absent(tmp_path, monkeypatch):
    monkeypatch.setattr("maxrl_fast.model.checkpoint.save_file", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path / "checkpoint")
    assert not (tmp_path / "checkpoint").exists()
    monkeypatch.undo()
    save(tmp_path / "checkpoint")  # what was left aside does not get in the way
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def edit_config(directory, **changes):
    path = directory / "config.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def edit_weights(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "config.json").unlink(), "cannot read the checkpoint's .*config.json"),
        (lambda d: (d / "config.json").write_text("{"), "cannot read the checkpoint's .*config.json"),
        (lambda d: (d / "config.json").write_text("[]"), "model_type must be 'qwen2', got None"),
        (lambda d: edit_config(d, model_type="mamba"), "model_type must be 'qwen2', got 'mamba'"),
        (lambda d: edit_config(d, hidden_size=None), "lacks the key 'hidden_size'"),
        (lambda d: edit_config(d, hidden_size="32"), "hidden_size must be a whole number"),
        (lambda d: edit_config(d, num_key_value_heads=3), "multiple of num_key_value_heads, got 4 and 3"),
        (lambda d: edit_config(d, rope_parameters={"rope_type": "llama3", "rope_theta": 1e4}), "scaled rotary"),
        (lambda d: edit_config(d, rope_parameters=None, rope_scaling={"type": "yarn", "factor": 4.0}), "scaled rotary"),
        (lambda d: edit_config(d, rope_parameters="x"), "scaled rotary"),
        (lambda d: edit_config(d, hidden_act="gelu"), "hidden_act 'silu'"),
        (lambda d: (d / "model.safetensors").unlink(), "cannot read the weights .*model.safetensors"),
        (lambda d: (d / "model.safetensors").write_bytes(b"\xff" * 100), "cannot read the weights"),
        (
            lambda d: (d / "model.safetensors").write_bytes((d / "model.safetensors").read_bytes()[:-50]),
            "cannot read the weights",
        ),
        (lambda d: edit_weights(d, lambda t: t.pop("model.norm.weight")), "lacks the tensor model.norm.weight"),
        (lambda d: edit_weights(d, lambda t: t.update(extra=torch.ones(1))), "has the tensor extra, which"),
        (
            lambda d: edit_weights(d, lambda t: t.update({"model.norm.weight": torch.ones(33)})),
            r"model.norm.weight must have shape \(32,\), got \(33,\)",
        ),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(tmp_path, damage, message):
    directory = tmp_path / "checkpoint"
    save(directory)
    damage(directory)
    with pytest.raises(InputError, match=message):
        load_checkpoint(directory)
