"""The engine for policies of transformers: against the packed forward pass, and against the native
engine.
"""

import pytest
import torch

from maxrl_fast.model.checkpoint import load_checkpoint
from maxrl_fast.model.huggingface_checkpoint import load_huggingface
from maxrl_fast.model.linear import LoraLinear, add_adapters
from maxrl_fast.ops import linear_token_logprobs
from maxrl_fast.rollout import RolloutRequest, Sampling
from maxrl_fast.rollout.native import NativeEngine
from maxrl_fast.training.passes import run_batch
from tests.batches import make_prompts, one_batch
from tests.families import tiny_config, tiny_model
from tests.model.test_huggingface import tiny_policy

PROMPTS = make_prompts([[5, 6, 7, 8], [9], [1, 2, 3, 4, 5, 6, 7, 12, 13, 14], [9, 9], [30, 2, 4]])
SAMPLING = Sampling(1.3, 20, (3, 17))


def generate(policy, num_samples=6, sampling=SAMPLING, dtype=torch.float32, **options):
    return NativeEngine(policy, dtype, **options).generate(
        RolloutRequest(PROMPTS, num_samples, sampling, 4, 2)
    )


def logprobs(policy, rollouts, dtype=torch.float32, temperature=1.3):
    batch = one_batch(PROMPTS, rollouts)
    with torch.no_grad():
        hidden = run_batch(policy, batch, dtype)
        return linear_token_logprobs(
            hidden, policy.output_matrix, batch.targets, **policy.scaling(temperature)
        )[0]


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "cohere2", "gpt2", "phi"])
def test_logprobs_equal_the_packed_forward_pass(family):
    """With windows, soft caps, sinks, scaled logits, learned positions and an output layer with a
    bias.
    """
    policy = tiny_policy(family)
    rollouts = generate(policy)
    assert rollouts.lengths.unique().numel() > 3
    assert float((rollouts.logprobs - logprobs(policy, rollouts)).abs().max()) < 1e-4
    assert torch.equal(rollouts.truncated, (rollouts.lengths == 20) & ~last_is_stop(rollouts))


def last_is_stop(rollouts):
    return torch.isin(rollouts.tokens[rollouts.cu_seqlens[1:] - 1], torch.tensor(SAMPLING.stop_ids))


def test_bfloat16():
    policy = tiny_policy("gemma2")
    rollouts = generate(policy, dtype=torch.bfloat16)
    assert (
        float((rollouts.logprobs - logprobs(policy, rollouts, torch.bfloat16)).abs().mean()) < 0.05
    )


@pytest.mark.parametrize(
    "sampling", [Sampling(0.0, 9, (3,)), Sampling(0.8, 20, (3, 17), top_k=5, top_p=0.9)]
)
def test_the_native_engine_draws_the_same_tokens(sampling, tmp_path):
    tiny_model(tiny_config("llama")).save_pretrained(tmp_path)
    native = NativeEngine(load_checkpoint(tmp_path), torch.float32, in_cpp=False)
    expected = native.generate(RolloutRequest(PROMPTS, 6, sampling, 4, 2))
    actual = generate(load_huggingface(tmp_path, 64), sampling=sampling)
    assert torch.equal(actual.tokens, expected.tokens)
    assert torch.equal(actual.cu_seqlens, expected.cu_seqlens)
    assert torch.equal(actual.truncated, expected.truncated)
    torch.testing.assert_close(actual.logprobs, expected.logprobs, rtol=1e-4, atol=1e-4)


def test_samples_do_not_depend_on_the_size_of_a_pass():
    policy = tiny_policy("gemma2")
    expected = generate(policy)
    for options in ({"max_batch": 13}, {"cache_bytes": 40_000}):
        actual = generate(policy, **options)
        assert torch.equal(actual.tokens, expected.tokens)
        torch.testing.assert_close(actual.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)


def test_load_weights_copies_and_merges_adapters():
    policy = tiny_policy("gemma2")
    add_adapters(policy, 2, 4.0, "q_proj,down_proj", seed=0)
    engine = NativeEngine(policy, torch.float32)
    with torch.no_grad():
        for module in policy.modules():
            if isinstance(module, LoraLinear):
                module.lora_b.normal_(generator=torch.Generator().manual_seed(1))
    before = engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING, 0, 0))
    assert float((before.logprobs - logprobs(policy, before)).abs().max()) > 0.1
    engine.load_weights(policy)
    after = engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING, 0, 0))
    assert float((after.logprobs - logprobs(policy, after)).abs().max()) < 1e-4
