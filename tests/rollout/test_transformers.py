import random

import pytest
import torch

from maxrl_fast.ops import linear_token_logprobs
from maxrl_fast.records import Rollouts
from maxrl_fast.rollout import RolloutRequest, Sampling
from maxrl_fast.rollout.native import native_engine
from maxrl_fast.training.passes import run_batch
from tests.batches import make_prompts, one_batch
from tests.model.test_huggingface import tiny_policy
from tests.models import adapted
from tests.rollout.test_episodes import Game, episodes_of

PROMPTS = make_prompts([[5, 6, 7, 8], [9], [1, 2, 3, 4, 5, 6, 7, 12, 13, 14], [9, 9], [30, 2, 4]])
SAMPLING = Sampling(1.3, 20, (3, 17))


def generate(policy, **options):
    request = RolloutRequest(PROMPTS, 6, SAMPLING, 4, 2)
    return native_engine(policy, torch.float32, **options).generate(request)


def logprobs(policy, rollouts):
    batch, matrix = one_batch(PROMPTS, rollouts), policy.output_matrix
    with torch.no_grad():
        hidden = run_batch(policy, batch, torch.float32)
        return linear_token_logprobs(hidden, matrix, batch.targets, **policy.scaling(1.3))[0]


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "cohere2", "phi", "qwen3_5_text", "bamba"])
def test_logprobs_equal_the_packed_forward_pass(family):
    """With windows, soft caps, sinks, learned positions, an output layer with a bias, and layers
    with a state."""
    policy = tiny_policy(family)
    rollouts = generate(policy)
    assert rollouts.lengths.unique().numel() > 3
    assert float((rollouts.logprobs - logprobs(policy, rollouts)).abs().max()) < 1e-4
    last = rollouts.tokens[rollouts.cu_seqlens[1:] - 1]
    is_stop = torch.isin(last, torch.tensor(SAMPLING.stop_ids))
    assert torch.equal(rollouts.truncated, (rollouts.lengths == 20) & ~is_stop)


def test_samples_do_not_depend_on_the_size_of_a_pass():
    policy = tiny_policy("gemma2")
    expected = generate(policy)
    for options in ({"max_batch": 13}, {"cache_bytes": 40_000}):
        actual = generate(policy, **options)
        assert torch.equal(actual.tokens, expected.tokens)
        torch.testing.assert_close(actual.logprobs, expected.logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba"])
def test_a_sample_that_waits_for_a_reply_keeps_its_state(family):
    policy, game = tiny_policy(family), Game((1, 2, 5), late=random.Random(0), vocab=40)
    sampling = Sampling(1.3, 30, (3, 17, 9, 30), max_turns=4)
    request = RolloutRequest(PROMPTS, 6, sampling, 4, 2, game)
    rollouts = native_engine(policy, torch.float32).generate(request)
    parts = [part for episode in episodes_of(rollouts) for part in episode]
    is_sampled = torch.tensor([p is not None for part, p in parts for _ in part])
    episodes = Rollouts.given([[t for x, _ in e for t in x] for e in episodes_of(rollouts)])
    assert int((~is_sampled).sum()) > 10
    difference = rollouts.logprobs - logprobs(policy, episodes)[is_sampled]
    assert float(difference.abs().max()) < 1e-4


def test_load_weights_copies_and_merges_adapters():
    engine = native_engine(tiny_policy("gemma2"), torch.float32)
    policy = adapted(tiny_policy("gemma2"), "q_proj,down_proj")
    before = engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING, 0, 0))
    assert float((before.logprobs - logprobs(policy, before)).abs().max()) > 0.1
    engine.load_weights(policy)
    after = engine.generate(RolloutRequest(PROMPTS, 2, SAMPLING, 0, 0))
    assert float((after.logprobs - logprobs(policy, after)).abs().max()) < 1e-4
