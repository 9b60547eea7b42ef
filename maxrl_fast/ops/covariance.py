"""The tokens that the losses kl_cov and clip_cov treat differently, by the covariance of advantage and log-prob.

Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (arXiv 2505.22617), eqs. 10 to
13: a token's covariance is (A - mean A)(logp - mean logp), and few tokens with a great one make the entropy fall.
"""

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import check_finite, check_number, check_tensor


def kl_cov_tokens(logprobs: Tensor, advantages: Tensor, mask: Tensor | None = None, *, share: float = 2e-4) -> Tensor:
    """Return the tokens on which kl_cov has its divergence: the share of tokens with the greatest covariance.

    The result is the argument token_statistics of policy_gradient_loss. Of tokens with equal covariances the first ones are
    chosen.

    Args:
        logprobs: [T], of the whole batch over which the tokens are to be chosen.
        advantages: [T], one per token.
        mask: [T] bool, False for tokens that do not count, whose other values may be anything.
        share: of the tokens that count, above 0 and at most 1, rounded down to a number of tokens, but at least one.

    Returns:
        [T] bool. On a GPU the host waits for the number of tokens that count, if there is a mask.

    Raises:
        ValueError, TypeError: if shapes, devices or the share do not fit.
    """
    covariance, keep = _covariance(logprobs, advantages, mask)
    order = covariance.masked_fill(~keep, -torch.inf).argsort(descending=True, stable=True)
    return _chosen(order[: _count(share, keep, mask)], keep)


def clip_cov_tokens(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    *,
    share: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the tokens to which clip_cov gives no gradient, drawn from those whose covariance is between two bounds.

    The result is the argument token_statistics of policy_gradient_loss.

    Args:
        logprobs, advantages, mask: as in kl_cov_tokens.
        share: of the tokens that count, above 0 and at most 1, rounded down to a number of tokens, but at least one. If fewer
            tokens are between the bounds, all of these are chosen.
        low, high: the covariances between which tokens can be drawn, both exclusive.
        generator: of the draw, on a CPU; None: PyTorch's own.

    Returns:
        [T] bool. On a GPU the host waits for the number of tokens between the bounds.

    Raises:
        ValueError, TypeError: if shapes, devices or numbers do not fit.
    """
    low, high = check_finite("low", low), check_finite("high", high)
    if not low < high:
        raise ValueError(f"low must be below high, got {low:g} and {high:g}")
    covariance, keep = _covariance(logprobs, advantages, mask)
    candidates = (keep & (covariance > low) & (covariance < high)).nonzero()[:, 0]
    drawn = torch.randperm(len(candidates), generator=generator)[: _count(share, keep, mask)]
    return _chosen(candidates[drawn.to(candidates.device)], keep)


def _covariance(logprobs: Tensor, advantages: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the covariance of each token [T], in float64, and which tokens [T] count."""
    check_tensor("logprobs", logprobs)
    check_tensor("advantages", advantages, logprobs.device, "logprobs are")
    if logprobs.dim() != 1 or advantages.shape != logprobs.shape:
        raise ValueError(
            f"logprobs and advantages must be [T], got the shapes {tuple(logprobs.shape)} and {tuple(advantages.shape)}"
        )
    keep = torch.ones_like(logprobs, dtype=torch.bool)
    if mask is not None:
        check_tensor("mask", mask, logprobs.device, "logprobs are")
        if mask.dtype != torch.bool or mask.shape != logprobs.shape:
            raise ValueError(f"mask must be bool {tuple(logprobs.shape)}, got {mask.dtype} {tuple(mask.shape)}")
        keep = mask
    count = keep.sum().clamp_min(1)
    centred = []
    for values in (advantages, logprobs):
        kept = values.detach().double().masked_fill(~keep, 0.0)
        centred.append(kept - kept.sum() / count)
    return centred[0] * centred[1], keep


def _count(share: float, keep: Tensor, mask: Tensor | None) -> int:
    share = check_number("share", share, "a number above 0 and at most 1", lambda x: 0 < x <= 1)
    count = len(keep) if mask is None else int(keep.sum())
    return max(int(round(share * count, 6)), 1)  # .29 x 100 is 28.999999999999996


def _chosen(index: Tensor, keep: Tensor) -> Tensor:
    """Return whether each token [T] is among those of the index, and counts."""
    chosen = torch.zeros_like(keep)
    chosen[index] = True
    return chosen & keep
