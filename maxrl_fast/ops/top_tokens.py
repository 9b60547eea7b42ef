"""The tokens that the loss simko treats differently, by the entropy of the sampling policy.

Peng et al. 2025, "SimKO: Simple Pass@K Policy Optimization" (arXiv 2510.14807), and the authors' code.
"""

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import check_number, check_tensor
from maxrl_fast.ops.token_batch import check_sequences


def simko_tokens(
    entropy: Tensor,
    is_top: Tensor,
    advantages: Tensor,
    cu_seqlens: Tensor,
    mask: Tensor | None = None,
    *,
    tau: float = 0.8,
) -> Tensor:
    """Return the token_statistics of the loss simko: whether each token takes part.

    Only tokens whose entropy is above the quantile tau of their response take part: those with a positive advantage, and those
    with a negative advantage that are the most probable token.

    Args:
        entropy: [T] of the sampling policy.
        is_top: [T] bool, whether the token is the most probable one of the sampling policy.
        advantages: [T], one per token.
        cu_seqlens: [S+1] integers, from 0 to T.
        mask: [T] bool, False for tokens that count in no quantile and do not take part; their other values may be anything.
        tau: from 0 to 1; between two entropies the quantile is interpolated linearly, as torch.quantile does.

    Returns:
        [T] bool.

    Raises:
        ValueError, TypeError: if shapes, devices or tau do not fit.
    """
    tau = check_number("tau", tau, "in [0, 1]", lambda x: 0 <= x <= 1)
    check_tensor("entropy", entropy)
    given = {"is_top": is_top, "advantages": advantages} | ({} if mask is None else {"mask": mask})
    for name, values in given.items():
        check_tensor(name, values, entropy.device, "entropy is")
        if entropy.dim() != 1 or values.shape != entropy.shape:
            raise ValueError(f"{name} and entropy must be [T], got the shapes {tuple(values.shape)} and {tuple(entropy.shape)}")
        if name != "advantages" and values.dtype != torch.bool:
            raise ValueError(f"{name} must be bool, got {values.dtype}")
    check_sequences(cu_seqlens, len(entropy), entropy.device)
    keep = torch.ones_like(is_top) if mask is None else mask
    values = entropy.detach().double()
    is_high = keep & (values > sequence_quantiles(values, cu_seqlens.long(), keep, tau))
    return is_high & ((advantages > 0) | ((advantages < 0) & is_top))


def sequence_quantiles(values: Tensor, cu_seqlens: Tensor, keep: Tensor, tau: float) -> Tensor:
    """Return for each token [T] the quantile tau of the values that are kept in its sequence."""
    num_tokens = len(values)
    if not num_tokens:
        return values
    sequence = torch.repeat_interleave(cu_seqlens.diff(), output_size=num_tokens)
    # By sequence, within it the kept values first, ascending: two stable sorts.
    order = values.masked_fill(~keep, torch.inf).argsort(stable=True)
    order = order[sequence[order].argsort(stable=True)]
    ordered = values.masked_fill(~keep, torch.inf)[order]
    before = torch.nn.functional.pad(keep.long().cumsum(0), (1, 0))
    counts = before[cu_seqlens[1:]] - before[cu_seqlens[:-1]]  # [S]
    at = tau * (counts - 1).clamp_min(0).double()
    low = at.floor().long()
    high = torch.minimum(low + 1, (counts - 1).clamp_min(0))
    starts = cu_seqlens[:-1].clamp_max(num_tokens - 1)
    first, second = (ordered[(starts + i).clamp_max(num_tokens - 1)] for i in (low, high))
    return torch.where(counts > 0, first + (at - low) * (second - first), torch.inf)[sequence]
