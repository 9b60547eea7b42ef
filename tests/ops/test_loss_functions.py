import math
from fractions import Fraction

import pytest
import torch

from maxrl_fast.algorithms.losses import (
    clip_cov,
    greatest_covariances,
    highest_entropies,
    nucleus_entropy,
    siren,
)
from maxrl_fast.ops import Tokens
from tests.ops.loss_definitions import CU_SEQLENS, S, T, V, covariances, quantile


def tokens(logprobs, advantages, mask=None, cu_seqlens=None, entropy=None, seed=None):
    """Return Tokens of float64 vectors with a ratio of 1; without cu_seqlens of one response."""
    logprobs, advantages = (torch.as_tensor(x, dtype=torch.float64) for x in (logprobs, advantages))
    mask = torch.ones(len(logprobs), dtype=torch.bool) if mask is None else mask
    return Tokens(
        logprobs=logprobs,
        entropy=logprobs if entropy is None else entropy,
        old_logprobs=logprobs.detach(),
        ref_logprobs=logprobs.detach(),
        advantages=advantages,
        mask=mask,
        cu_seqlens=torch.tensor([0, len(logprobs)]) if cu_seqlens is None else cu_seqlens,
        generator=None if seed is None else torch.Generator().manual_seed(seed),
    )


def test_of_equal_covariances_the_first_are_chosen_and_shares_are_rounded_down():
    def chosen(t, share=2e-4):
        found = greatest_covariances(t, share)
        assert t.metrics["tokens_chosen"] == found.sum()
        return found.tolist()

    given = [-1.0, -3, -1, -3, -1], [2.0, 0, 2, 0, 2]
    assert chosen(tokens(*given), share=0.4) == [False, True, False, True, False]
    assert chosen(tokens(*given), share=0.6) == [True, True, False, True, False]
    assert chosen(tokens([-1.0] * 5, given[1])) == [True, False, False, False, False]
    values = torch.rand(100, generator=torch.Generator().manual_seed(0))
    for share, count in ((0.29, 29), (0.57, 57), (0.285, 28)):  # .29 x 100 is 28.999999999999996
        assert sum(chosen(tokens(-values, values.flip(0)), share=share)) == count


def test_clip_cov_draws_from_the_tokens_between_its_bounds():
    generator = torch.Generator().manual_seed(0)
    logprobs, advantages = (
        3 * torch.randn(200, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    mask = torch.rand(200, generator=generator) < 0.7
    counted, seen = mask.nonzero()[:, 0].tolist(), set()
    between = {
        t
        for t, x in covariances(advantages.tolist(), logprobs.tolist(), counted).items()
        if 0.1 < x < 2
    }
    for seed in range(150):
        kept = clip_cov(tokens(logprobs, advantages, mask, seed=seed), share=0.04, low=0.1, high=2)
        drawn = set((~kept).nonzero()[:, 0].tolist())
        assert len(drawn) == int(0.04 * len(counted))
        assert drawn <= between
        seen |= drawn
    assert seen == between
    exact = [-1.0, 1, -1, 1], [-1.0, 1, 1, -1]  # covariances of 1, 1, -1, -1
    for low, high, count in ((1.0, 5.0, 0), (0.5, 1.0, 0), (0.5, 5.0, 1)):
        assert (~clip_cov(tokens(*exact), low=low, high=high)).sum() == count


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 1.0])
def test_the_tokens_of_the_highest_entropies(share):
    for n in (0, 1, 15, 100):
        generator = torch.Generator().manual_seed(n)
        entropy, mask = (
            torch.rand(n, generator=generator).double(),
            torch.rand(n, generator=generator) < 0.8,
        )
        entropy[n // 2 :] = entropy[: n - n // 2] + 1e-9  # equal but for rounding
        t = tokens(-entropy, entropy, mask, entropy=entropy)
        counted = sorted((float(x) for x in entropy[mask]), reverse=True)
        count = math.ceil(Fraction(str(share)) * len(counted))
        least = counted[count - 1] if counted else 0.0
        assert highest_entropies(t, share).tolist() == [
            bool(m) and x >= least - 1e-6 for x, m in zip(entropy, mask, strict=True)
        ]
        assert not counted or t.metrics["entropy_threshold"] == least


def nucleus(p):
    """Return the entropy of the fewest most probable of the probabilities that have .8 together."""
    kept = []
    for x in sorted(p, reverse=True):
        if math.fsum(kept) < 0.8:
            kept.append(x)
    return -sum(x / math.fsum(kept) * math.log(x / math.fsum(kept)) for x in kept if x)


def test_the_term_of_siren():
    """H and its derivative by hand; the trainer's tests have its gradient."""
    logits = 2 * torch.randn(T, V, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    logits[1, 3:] = -math.inf
    logits[2, 0] = 50.0  # one token is the nucleus
    mask = torch.arange(T) % 5 != 3

    def term(entropies, anchor):
        anchor = torch.tensor([anchor], dtype=torch.float64)
        t = tokens(torch.zeros(T), torch.zeros(T), mask, CU_SEQLENS)
        slopes = siren(t, entropies, 0.7, anchor)
        return slopes, t.metrics["siren_entropy"].item(), t.metrics["siren_anchor"].item()

    entropies = [nucleus(row) for row in logits.softmax(-1).tolist()]
    z = logits.clone().requires_grad_()
    found = nucleus_entropy(z)
    torch.testing.assert_close(found, torch.tensor(entropies).double())
    (gradient,) = torch.autograd.grad(found.sum(), z)
    assert gradient.isfinite().all()
    slopes = torch.zeros(T).double()
    for start, stop in zip(CU_SEQLENS[:-1].tolist(), CU_SEQLENS[1:].tolist(), strict=True):
        own = [entropies[t] for t in range(start, stop) if mask[t]]
        least = quantile(own, 0.8) if own else 0
        above = [t for t in range(start, stop) if mask[t] and entropies[t] > least]
        slopes[above] = 1 / (S * max(len(above), 1))
    h = float((slopes * torch.tensor(entropies).double()).sum())
    same = pytest.approx(h)
    assert term(found.detach(), math.nan)[1:] == (same, same)
    assert not term(found.detach(), math.nan)[0].any()
    actual, *others = term(found.detach(), 0.1)
    torch.testing.assert_close(actual, 1.4 * (h - 0.1) * slopes)
    assert others == [same, 0.1]
