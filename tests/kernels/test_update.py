"""Whole updates on a GPU, or on a CPU another way, against those of a CPU: what no single kernel's
test covers."""

import dataclasses

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.model.attention import Forest
from maxrl_fast.records import Rollouts, Samples
from maxrl_fast.rollout import RolloutRequest, Sampling
from maxrl_fast.rollout.native import native_engine
from tests.batches import make_prompts
from tests.models import tiny_decoder, updated
from tests.training.test_learner import learner

CPU = torch.device("cpu")
PLACES = pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
PROMPTS = make_prompts([[5, 6, 7, 8], [5, 6, 7, 9, 1], [5, 6, 7, 8], [2]])
RESPONSES = [[1, 2, 3], [1, 2, 4, 5], [1, 2, 3], [6], [6], [], [9, 9], [9, 9, 9, 3]]


def after_updates(place, shares_all, **sizes):
    model, rollouts = tiny_decoder(**sizes).to(place), Rollouts.given(RESPONSES).to(place)
    trained, samples = learner(model), Samples(PROMPTS.to(place), rollouts)
    trained.passes = dataclasses.replace(trained.passes, shares_all=shares_all)
    advantages = torch.linspace(-1, 1, 8, device=place)
    for _ in range(2):
        updated(trained, samples, advantages, samples.sequences, lr=1e-3)
    return model


@PLACES
@pytest.mark.parametrize("shares_all", [True, False])
def test_forests_with_equal_prompts_and_rows(place, shares_all):
    expected, model = (after_updates(*x) for x in ((CPU, True), (torch.device(place), shares_all)))
    for own, other in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own.cpu(), other, rtol=0, atol=2e-5)


@PLACES
@pytest.mark.parametrize("sizes", [{}, {"model_type": "qwen3"}, {"tie_word_embeddings": True}])
def test_updated_weights_reach_the_sampler(place, sizes):
    """Its weights are packed: its log-probs are the trainer's after the updates, not before."""
    place = torch.device(place)
    start = tiny_decoder(head_dim=16, **sizes).to(place)
    engine, model = native_engine(start, torch.float32), start
    for step in range(3):
        rollouts = engine.generate(
            RolloutRequest(PROMPTS.to(place), 4, Sampling(1.3, 9, (3,)), 4, step)
        )
        trained = learner(model)
        trained.passes = dataclasses.replace(trained.passes, temperature=1.3)
        samples = Samples(PROMPTS.to(place), rollouts)
        own = trained.passes.logprobs(model, samples, samples.sequences)
        torch.testing.assert_close(own, rollouts.logprobs, rtol=0, atol=1e-4)
        updated(trained, samples, torch.ones(16, device=place), samples.sequences, lr=0.03)
        engine.load_weights(model)


@PLACES
def test_a_layer_with_a_state(place):
    pytest.importorskip("transformers")
    from tests.families import tiny_config, tiny_model
    from tests.model.test_recurrence import check_equal

    modules = tiny_model(tiny_config("qwen3_5_text")).modules()
    layer = next(x for x in modules if type(x).__name__.endswith("DeltaNet")).to(place)
    lengths, parents = torch.tensor([3, 4, 2, 5]), torch.tensor([-1, 0, 0, -1])
    forest = Forest(lengths, parents, torch.device(place))
    check_equal(layer, forest, 32, torch.float32, rtol=1e-3, atol=1e-4)


@PLACES
@pytest.mark.parametrize("vocab", [50257, 5003])
def test_logits_in_float32_of_rows_that_are_not_aligned(place, vocab):
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator).bfloat16() for n in (300, vocab))
    targets = torch.randint(vocab, (300,), generator=generator)
    exact = (hidden.double() @ weight.double().T).log_softmax(-1)[torch.arange(300), targets]
    given = hidden.to(place), weight.to(place), targets.to(place)
    if place == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    logprobs, _ = ops.linear_token_logprobs(*given, chunk_tokens=128)
    # of a CPU the logits, up to 30, are rounded to bfloat16
    limit = 1e-4 if place == "cuda" else 0.15
    torch.testing.assert_close(logprobs.cpu().double(), exact, rtol=0, atol=limit)
    if place == "cuda":  # one chunk, and no copy of it
        assert torch.cuda.max_memory_allocated() - before < 1.5 * 128 * (vocab + 64) * 4
