"""The engine of docs/adding_an_engine.md: against the native engine, and what the trainer compares
at the start of a run."""

import pytest
import torch

from examples.naive_engine import NaiveEngine
from maxrl_fast.rollout import RolloutRequest, Sampling
from maxrl_fast.rollout.native import native_engine
from maxrl_fast.training.logprob_parity import check_engine
from tests.batches import make_prompts
from tests.models import adapted, tiny_decoder
from tests.tables import refused

PROMPTS = make_prompts([[5, 6, 7, 8], [9], [1, 2, 3, 4, 5, 6, 7, 12, 13, 14]])


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.3, 12, (3, 17)), Sampling(0.0, 5, (3,)), Sampling(0.8, 9, (3,), top_p=0.9)],
)
def test_it_draws_the_tokens_of_the_native_engine(sampling):
    model = adapted(tiny_decoder(), "q_proj,down_proj")
    naive, request = NaiveEngine(tiny_decoder(1), torch.float32), (PROMPTS, 5, sampling, 4, 2)
    naive.load_weights(model)
    expected = native_engine(model, torch.float32).generate(RolloutRequest(*request))
    actual = naive.generate(RolloutRequest(*request))
    assert torch.equal(actual.tokens, expected.tokens)
    assert torch.equal(actual.cu_seqlens, expected.cu_seqlens)
    assert torch.equal(actual.truncated, expected.truncated)
    torch.testing.assert_close(actual.logprobs, expected.logprobs, rtol=1e-4, atol=1e-4)


def test_an_engine_of_other_weights_is_refused_at_the_start_of_a_run():
    model = tiny_decoder()
    engine = NaiveEngine(model, torch.float32)
    engine.load_weights(model)
    told = check_engine(model, engine, "naive.py:NaiveEngine")
    assert "log-probs of the rollout engine differ from the policy's by" in told
    other = NaiveEngine(model, torch.float32)
    other.load_weights(tiny_decoder(seed=1))
    with refused(r"--rollout naive\.py:NaiveEngine samples from another model than this .*differ"):
        check_engine(model, other, "naive.py:NaiveEngine")
