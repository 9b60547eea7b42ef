"""The native engine: its log-probs against the full forward pass, its distribution, and what may not change its samples."""

import pytest
import torch

from maxrl_fast.ops import token_logprobs
from maxrl_fast.rollout import Sampling
from maxrl_fast.rollout.native import NativeEngine
from maxrl_fast.rollout.random import sample_keys, uniforms
from tests.batches import make_prompts, one_batch
from tests.models import response_logits, tiny_decoder

PROMPTS = make_prompts([[5, 6, 7, 8], [9], [1, 2, 3, 4, 5, 6, 7], [9, 9], [30, 2, 4]])
STOPS = (3, 17)
# Worked out with Python's own integers.
KEYS, BITS = [-3072355124115617029, 4574412018458654984], [2083381, 13143039]


def generate(model, num_samples=6, temperature=1.3, limit=24, seed=4, step=2, prompts=PROMPTS, stops=STOPS, **options):
    engine = NativeEngine(model, options.pop("dtype", torch.float32), **options)
    return engine.generate(prompts, num_samples, Sampling(temperature, limit, stops), seed=seed, step=step)


# The logits reach 5.7, where bfloat16 numbers are .03 apart; both ways may be off by one or two of those.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-6), (torch.bfloat16, 0.1)])
def test_logprobs_equal_the_full_forward_pass(dtype, tolerance):
    model = tiny_decoder()
    rollouts = generate(model, dtype=dtype)
    logits = response_logits(model, one_batch(PROMPTS, rollouts), dtype)
    expected, _ = token_logprobs(logits, rollouts.tokens, temperature=1.3)
    assert rollouts.logprobs.dtype == torch.float32
    assert rollouts.logprobs.std() > 0.5
    assert (rollouts.logprobs - expected).abs().max() < tolerance
    assert rollouts.lengths.unique().numel() > 3  # rows finished at different times, so the caches were moved together


def test_responses_end_with_the_first_stop_token_or_at_the_limit():
    rollouts = generate(tiny_decoder(), num_samples=20)
    for s, (start, end) in enumerate(zip(rollouts.cu_seqlens, rollouts.cu_seqlens[1:], strict=False)):
        tokens = rollouts.tokens[start:end].tolist()
        stops = [t in STOPS for t in tokens]
        assert not any(stops[:-1])
        assert bool(rollouts.truncated[s]) == (not stops[-1])
        assert stops[-1] or len(tokens) == 24
    assert 0 < rollouts.truncated.float().mean() < 1
    assert generate(tiny_decoder(), limit=1).lengths.unique().tolist() == [1]


def test_temperature_0_takes_the_likeliest_token():
    model = tiny_decoder()
    rollouts = generate(model, num_samples=2, temperature=0.0)
    logits = response_logits(model, one_batch(PROMPTS, rollouts), torch.float32)
    assert torch.equal(logits.argmax(-1), rollouts.tokens)
    assert (rollouts.logprobs == 0).all()
    assert Sampling(1.3, 24, STOPS).greedy == Sampling(0.0, 24, STOPS)


def test_the_samples_of_a_prompt_do_not_depend_on_the_batch():
    model = tiny_decoder()
    whole = generate(model)
    assert torch.equal(generate(model).logprobs, whole.logprobs)  # bitwise
    for other in (generate(model, max_rows=7), generate(model, max_rows=1)):
        assert torch.equal(other.tokens, whole.tokens)
        torch.testing.assert_close(other.logprobs, whole.logprobs, rtol=0, atol=1e-4)
    alone = generate(model, prompts=PROMPTS.take(2, 1))
    assert alone.tokens.tolist() == whole.tokens[whole.cu_seqlens[12] : whole.cu_seqlens[18]].tolist()
    for changed in (generate(model, seed=5), generate(model, step=3)):
        assert changed.tokens.tolist() != whole.tokens.tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_tokens_follow_the_exact_distribution(temperature):
    """Chi-square of the first and second token of 5,000 samples; 31 degrees of freedom, so 70 is one in 10,000."""
    model = tiny_decoder(seed=1)
    prompts, n = PROMPTS.take(0, 1), 5_000
    rollouts = generate(model, n, temperature, limit=2, prompts=prompts, stops=(), max_rows=n)
    tokens = rollouts.tokens.view(n, 2)
    first_logits = response_logits(model, one_batch(prompts, first_n(rollouts, 1)), torch.float32)[0]
    for observed, logits in (
        (tokens[:, 0], first_logits),
        (tokens[:, 1][tokens[:, 0] == tokens[:, 0].mode().values], None),
    ):
        if logits is None:
            row = int((tokens[:, 0] == tokens[:, 0].mode().values).nonzero()[0])
            logits = response_logits(model, one_batch(prompts, first_n(rollouts, row + 1)), torch.float32)[2 * row + 1]
        expected = torch.softmax(logits.double() / temperature, -1) * len(observed)
        counts = torch.bincount(observed, minlength=32).double()
        common = expected > 5
        rest = (counts[~common].sum() - expected[~common].sum()) ** 2 / expected[~common].sum().clamp_min(1)
        chi_square = ((counts - expected) ** 2 / expected)[common].sum() + rest
        assert common.sum() > 2
        assert chi_square < 70


def first_n(rollouts, n):
    """The first n sequences, as rollouts of one prompt."""
    end = int(rollouts.cu_seqlens[n])
    return type(rollouts)(rollouts.tokens[:end], rollouts.cu_seqlens[: n + 1], rollouts.logprobs[:end], rollouts.truncated[:n])


def test_new_weights_are_taken_over():
    model, other = tiny_decoder(0), tiny_decoder(1)
    engine = NativeEngine(model, torch.float32)
    engine.load_weights(other)
    sampling = Sampling(1.0, 8, STOPS)
    after = engine.generate(PROMPTS, 2, sampling, seed=0, step=0)
    expected = NativeEngine(other, torch.float32).generate(PROMPTS, 2, sampling, seed=0, step=0)
    assert torch.equal(after.tokens, expected.tokens)
    assert torch.equal(after.logprobs, expected.logprobs)


def test_random_numbers_are_uniform_and_independent_across_coordinates():
    prompts, samples = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
    keys = sample_keys(7, 3, prompts, samples)
    assert keys.unique().numel() == 64 * 64
    u = torch.stack([uniforms(keys.flatten(), t) for t in range(16)])  # [16, 4096]
    assert u.min() >= 0
    assert u.max() < 1
    counts = torch.histc(u, 64, 0, 1)
    assert ((counts - 1024) ** 2 / 1024).sum() < 120  # 63 degrees of freedom, one in 100,000
    assert (torch.corrcoef(u) - torch.eye(16)).abs().max() < 0.08  # five standard deviations of 1/64
    shifted = torch.corrcoef(torch.stack([u[0].view(64, 64)[:-1].flatten(), u[0].view(64, 64)[1:].flatten()]))
    assert shifted[0, 1].abs() < 0.08


def test_random_numbers_are_the_same_on_every_machine():
    keys = sample_keys(1, 2, torch.tensor([3, 2**40]), torch.tensor([4, 5]))
    assert keys.tolist() == KEYS
    assert [round(x * 2**24) for x in uniforms(keys, 6).tolist()] == BITS
