"""The PACS operators in plain PyTorch: for tests, and for devices without a kernel."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from maxrl_fast.ops.pacs_kernel import PacsMetrics


def log_ratio_reward_reference(
    logprobs: Tensor, ref_logprobs: Tensor, cu_seqlens: Tensor, mask: Tensor | None, beta: float
) -> Tensor:
    log_ratio = logprobs - ref_logprobs
    if mask is not None:
        log_ratio = torch.where(mask, log_ratio, 0.0)
    sequence = torch.repeat_interleave(cu_seqlens.diff(), output_size=len(logprobs))
    return beta * logprobs.new_zeros(len(cu_seqlens) - 1).index_add(0, sequence, log_ratio)


def pacs_loss_reference(
    proxies: Tensor,
    labels: Tensor,
    offsets: Tensor | None,
    group_size: int,
    score: str,
    balanced: bool,
    denominators: Tensor | None,
    denominator: float,
) -> tuple[Tensor, Tensor, Tensor]:
    r, y = proxies.double(), labels.double()
    if offsets is None:
        sizes = torch.full((len(r) // max(group_size, 1),), group_size, device=r.device)
    else:
        sizes = offsets.diff()
    group = torch.repeat_interleave(sizes, output_size=len(r))
    n = sizes[group].double()

    def group_sum(x: Tensor) -> Tensor:
        return x.new_zeros(len(sizes)).index_add(0, group, x)[group]

    centred = r - group_sum(r) / n  # [S]
    if score == "naive":
        psi = r
    elif score == "rloo":
        psi = centred * torch.where(n > 1, n / (n - 1).clamp_min(1), 0.0)
    elif score == "dr_grpo":
        psi = centred
    else:
        squares = group_sum(centred.square())
        # If all proxies are equal, the derivative of the square root is infinite, and 0 times
        # infinity would be NaN.
        variance = squares.where(squares > 0, 1.0) / (n - 1).clamp_min(1)
        psi = centred / (torch.where(squares > 0, variance.sqrt(), 0.0) + 1e-6)
    correct = group_sum(y)
    both = (correct > 0) & (correct < n) & balanced
    weight = torch.where(both, n / (2 * torch.where(y > 0, correct, n - correct)), 1.0)
    cross_entropy = torch.where((y == 0) | (y == 1), softplus(psi) - y * psi, torch.nan)
    loss = (weight * cross_entropy).sum() / (denominator if denominators is None else denominators)
    psi = psi.detach()
    size, num_correct = max(len(r), 1), y.sum()
    metrics = PacsMetrics(
        accuracy=((psi > 0) == (y > 0)).double().sum() / size,
        reward_proxy=r.detach().sum() / size,
        score_correct=(psi * y).sum() / num_correct.clamp_min(1),
        score_wrong=(psi * (1 - y)).sum() / (len(r) - num_correct).clamp_min(1),
    )
    return loss.to(proxies.dtype), torch.stack(metrics), cross_entropy.detach().to(proxies.dtype)
