import copy

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from maxrl_fast.model.attention import AttentionVariant, tree_attention
from maxrl_fast.model.checkpoint import WEIGHTS, carried_tensors, kept_files, write_policy
from maxrl_fast.model.huggingface import HuggingFacePolicy, _Block
from maxrl_fast.model.policy import (
    backend_of,
    check_supported,
    load_huggingface,
    load_policy,
    read_sizes,
    sizes_of,
)
from maxrl_fast.ops import linear_token_logprobs
from maxrl_fast.records import Rollouts, Samples
from maxrl_fast.training.learner import Learner, LossSettings, make_optimizer
from maxrl_fast.training.passes import check_exact, check_head, run_batch
from tests.batches import make_prompts, one_batch
from tests.families import FAMILIES, IMAGES, tiny_config, tiny_model
from tests.model.test_checkpoint import edit_config
from tests.models import updated
from tests.tables import refused, table

PROMPTS = make_prompts([list(range(3, 15)), [7, 9, 11], [5, 6, 7, 8, 4, 3, 21, 22, 23]])
GENERATOR = torch.Generator().manual_seed(5)
# two to each prompt
RESPONSES = [torch.randint(3, 40, (n,), generator=GENERATOR).tolist() for n in (9, 1, 14, 3, 6, 2)]
ROLLOUTS = Rollouts.given(RESPONSES)
QUICK = ("gemma2", "qwen3_moe", "gpt_oss", "phi")
EVERY = [
    pytest.param(family, marks=() if family in QUICK else pytest.mark.slow)
    for family in (*FAMILIES, "phi")  # whose output layer has a bias
]
IMAGES_TOO = [
    pytest.param(family, marks=() if family == "gemma3" else pytest.mark.slow) for family in IMAGES
]


def tiny_policy(family: str, **changes) -> HuggingFacePolicy:
    config = tiny_config(family, **changes)
    return HuggingFacePolicy(tiny_model(config), sizes_of(config, config.to_dict()))


def packed_logprobs(policy, dtype=torch.float32, temperature=1.0):
    """As the learner computes them, with each prompt once."""
    batch, scaling = one_batch(PROMPTS, ROLLOUTS), policy.scaling(temperature)
    hidden = run_batch(policy, batch, dtype)
    return linear_token_logprobs(hidden, policy.output_matrix, batch.targets, **scaling)[0]


def padded_logprobs(policy, temperature=1.0):
    """By the model's own eager forward pass of all sequences, padded on the right."""
    rows = [PROMPTS.take(s // 2, 1).tokens.tolist() + x for s, x in enumerate(RESPONSES)]
    lengths = torch.tensor([*map(len, rows)])[:, None]
    tokens = torch.tensor([row + [0] * (int(lengths.max()) - len(row)) for row in rows])
    mask = (torch.arange(tokens.shape[1]) < lengths).long()
    policy.set_eager(True)
    logits = policy.hf(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    policy.set_eager(False)
    picked = (logits / temperature).log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
    ends = zip(picked, rows, RESPONSES, strict=True)
    return torch.cat([x[len(row) - len(response) - 1 : len(row) - 1] for x, row, response in ends])


def gradients(policy, logprobs, weights):
    policy.zero_grad(set_to_none=True)
    (logprobs * weights).sum().backward()
    return {name: p.grad for name, p in policy.named_parameters()}


@pytest.mark.parametrize("family", EVERY + IMAGES_TOO)
def test_logprobs_and_all_gradients_equal_the_padded_eager_passes(family):
    """With activations and recomputed, as the check before a run finds too."""
    policy = tiny_policy(family)
    assert "log-probs equal those of the model's own forward pass" in check_exact(policy)
    weights = torch.randn(len(ROLLOUTS.tokens), generator=torch.Generator().manual_seed(0))
    expected = padded_logprobs(policy, 0.7)
    wanted = gradients(policy, expected, weights)
    for policy.checkpoint_activations in (False, True):
        actual = packed_logprobs(policy, temperature=0.7)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=3e-5)
        found = gradients(policy, actual, weights)
        assert found.keys() == wanted.keys()
        for name, gradient in wanted.items():
            if gradient is not None:
                difference = float((found[name] - gradient).abs().max())
                assert difference <= 2e-4 * max(float(gradient.abs().max()), 1e-2), name
    assert sum(g is not None and bool(g.any()) for g in wanted.values()) >= len(wanted) - 2


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "gpt2"])
def test_bfloat16_casts_every_layer_and_gradients_stay_float32(family):
    policy, dtypes = tiny_policy(family), []
    exact = packed_logprobs(policy).detach()

    def watch(block, inputs, output):
        dtypes.append((output[0] if type(output) is tuple else output).dtype)

    for block in policy.blocks:
        block.register_forward_hook(watch)
    actual = packed_logprobs(policy, torch.bfloat16)
    assert set(dtypes) == {torch.bfloat16}
    assert 1e-5 < float((actual - exact).detach().abs().mean()) < 0.25
    actual.sum().backward()
    assert {p.grad.dtype for p in policy.parameters() if p.grad is not None} == {torch.float32}


@pytest.mark.parametrize("family", EVERY)
def test_a_step_of_training_and_a_checkpoint_that_transformers_loads(family, tmp_path):
    policy, saved = tiny_policy(family), tmp_path / "saved"
    before = packed_logprobs(policy).detach()
    settings = LossSettings(loss="reinforce", aggregation="token_mean", temperature=0.8)
    learner = Learner(policy, make_optimizer(policy, 0.99, 0.01), settings, 1.0, 30, torch.float32)
    samples, advantages = Samples(PROMPTS, ROLLOUTS), torch.tensor([1.0, -1.0, 0.5, 1.0, -0.3, 0.7])
    metrics = updated(learner, samples, advantages, samples.sequences, when="step 1", lr=1e-2)
    assert metrics.grad_norm > 1e-3
    after = packed_logprobs(policy).detach()
    assert float((after - before).abs().max()) > 1e-3

    policy.hf.config.save_pretrained(tmp_path)
    saved.mkdir()
    write_policy(saved, "float32", policy.weights(), kept_files(tmp_path, [2]), shard_bytes=20_000)
    assert len(list(saved.glob("*.safetensors"))) > 1
    model, found = AutoModelForCausalLM.from_pretrained(
        saved, dtype=torch.float32, output_loading_info=True
    )
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs = dict(model.state_dict())
    for name, weight in policy.hf.state_dict().items():
        assert torch.equal(weight, theirs[name]), name
    loaded = load_huggingface(saved, 64)
    assert (loaded.logit_scale, loaded.softcap) == (policy.logit_scale, policy.softcap)
    assert torch.equal(packed_logprobs(loaded), after)


@pytest.mark.parametrize("family", IMAGES_TOO)
def test_what_a_checkpoint_has_beside_its_decoder_is_carried_through(family, tmp_path):
    """Also what transformers does not load, in the dtype that it has."""
    saved, whole = tmp_path / "saved", tiny_model(tiny_config(family))
    saved.mkdir()
    whole.save_pretrained(tmp_path)
    before = load_file(tmp_path / WEIGHTS)
    policy, change = load_huggingface(tmp_path, 64), 1.25
    save_file(before | {"mtp.norm.weight": torch.ones(3).half()}, tmp_path / WEIGHTS)
    with torch.no_grad():
        for weight in {*policy.parameters()}:
            weight.mul_(change)
        for weight in {
            *whole.get_decoder().parameters(),
            *whole.get_output_embeddings().parameters(),
        }:
            weight.mul_(change)
    carried = carried_tensors(tmp_path, policy)
    assert (len(carried) > 1) == (family != "gemma4")
    write_policy(
        saved, "float32", policy.weights(), kept_files(tmp_path, [2]), 20_000, carried=carried
    )
    after = {k: v for file in saved.glob("*.safetensors") for k, v in load_file(file).items()}
    whole.save_pretrained(tmp_path / "wanted")
    wanted = load_file(tmp_path / "wanted" / WEIGHTS)
    assert after.pop("mtp.norm.weight").dtype == torch.float16
    assert after.keys() == wanted.keys()
    assert all(torch.equal(after[name], wanted[name]) for name in wanted)


def test_the_check_refuses_an_attention_that_leaves_something_out(monkeypatch):
    policy = tiny_policy("gemma2")
    monkeypatch.setattr("maxrl_fast.training.passes.tree_attention", without_soft_cap)
    with refused(r"gemma2 of transformers cannot be trained here: .* log-probs differ by up to \d"):
        check_exact(policy)


def without_soft_cap(q, k, v, forest, variant):
    return tree_attention(q, k, v, forest, AttentionVariant(variant.window))


@pytest.mark.parametrize(
    ("family", "attribute", "value"), [("gemma2", "softcap", 0.0), ("cohere2", "logit_scale", 1.0)]
)
def test_the_check_refuses_logits_that_are_changed_otherwise(family, attribute, value):
    """Also where logits are too small to show it: it compares them for large hidden states."""
    changes = {"final_logit_softcapping": 30.0} if family == "gemma2" else {}
    policy = tiny_policy(family, tie_word_embeddings=False, **changes)
    with torch.no_grad():
        policy.lm_head.weight.mul_(1e-2)
    check_head(policy, torch.arange(9))
    setattr(policy, attribute, value)
    with refused("its logits are not a soft cap or a multiple"):
        check_head(policy, torch.arange(9))


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    table("""
    deepseek_v32 |  | its layers are not all attention over earlier tokens, got indexed_attention
    llama4_text |  | it scales attention by the place in the stream
    llama4_text | attn_temperature_tuning=False, attention_chunk_size=16 | it attends within
      chunks of 16 tokens, and sequences have up to 64
    llama | rope_parameters=DYNAMIC, max_position_embeddings=32 | its dynamic rotary embedding
      changes beyond 32 tokens; sequences have up to 64
    git |  | it has no separate decoder of text
    """),
)
def test_what_cannot_be_exact_is_refused_by_name(family, changes, reason):
    config = AutoConfig.for_model(family, **eval(f"dict({changes})"))
    with refused(f"{family} of transformers is not supported: {reason}"):
        check_supported(config, 64)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0}


def test_deep_copies_run_their_own_weights():
    """The reference policy is a deep copy; a wrapper that kept the original layer would train
    against itself."""
    policy = tiny_policy("mistral")
    copied = copy.deepcopy(policy)
    assert all(isinstance(block, _Block) for block in copied.blocks)
    before = packed_logprobs(copied).detach()
    with torch.no_grad():
        for p in policy.parameters():
            p.zero_()
    assert torch.equal(packed_logprobs(copied), before)


def saved_model(family, directory, **changes):
    tiny_model(tiny_config(family, **changes)).save_pretrained(directory)
    return directory


def test_which_backend_is_taken(tmp_path):
    llama, gemma2, windowed = tmp_path / "llama", tmp_path / "gemma2", tmp_path / "windowed"
    assert backend_of(saved_model("llama", llama)) == "native"
    assert backend_of(llama, "transformers") == "transformers"
    assert backend_of(saved_model("gemma2", gemma2)) == "transformers"
    # our decoder has no windows
    assert backend_of(saved_model("qwen2", windowed)) == "transformers"
    assert [read_sizes(folder).vocab_size for folder in (llama, gemma2)] == [40, 40]
    options = {"task": "t", "vocab_size": 40, "prompt_length": 8, "max_new_tokens": 8}
    with refused("model_type must be one of qwen2, qwen3, llama, got 'gemma2'"):
        load_policy(gemma2, backend="native", **options)
    native, other = (load_policy(llama, backend=x, **options) for x in ("native", "transformers"))
    assert isinstance(other, HuggingFacePolicy)
    logprobs = packed_logprobs(native), packed_logprobs(other)
    torch.testing.assert_close(*logprobs, rtol=1e-5, atol=3e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    table("""
    num_hidden_layers=4, layer_types=["full_attention"] * 4 | does not fit gemma2: missing keys
      model.layers.3
    quantization_config={"quant_method": "mxfp4"} | weights must not be quantized
    """),
)
def test_wrong_configurations_are_refused(changes, message, tmp_path):
    saved_model("gemma2", tmp_path)
    edit_config(tmp_path, **eval(f"dict({changes})"))
    with refused(message):
        load_huggingface(tmp_path, 64)


def test_weights_that_are_no_safetensors_are_refused(tmp_path):
    file = saved_model("gemma2", tmp_path) / "model.safetensors"
    pickled = file.rename(tmp_path / "pytorch_model.bin")
    with refused("cannot read the weights"):
        load_huggingface(tmp_path, 64)
    pickled.rename(file).write_bytes(b"PK\x03\x04")
    with refused("cannot read the weights"):
        load_huggingface(tmp_path, 64)
