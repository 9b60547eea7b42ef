"""PACS (RLVR as supervised learning): reward proxies from log-ratios, and their loss."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from maxrl_fast.algorithms.arguments import (
    check_choice,
    check_finite,
    check_integer,
    check_tensor,
    is_host_readable,
)
from maxrl_fast.algorithms.tokens import sequence_sums
from maxrl_fast.ops.dispatch import KernelLaunch, check_first_order, choices, eager, has_kernels
from maxrl_fast.ops.loss_kernel import check_denominator, check_sequences, optional

DTYPES = (torch.float32, torch.float64)
SCORES = ("rloo", "grpo", "dr_grpo", "naive")
WEIGHTS = ("balanced", "none")


@eager
def log_ratio_reward(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    cu_seqlens: Tensor,
    beta: float = 1.0,
    *,
    mask: Tensor | None = None,
) -> Tensor:
    """Return r_s = beta sum_t (logp_t - ref_t) over each packed response (PACS, eq. 7).

    Args:
        logprobs: [T] float32 or float64 of the policy, differentiable.
        ref_logprobs: [T] of the reference policy, constants.
        cu_seqlens: [S+1] integers, from 0 to T.
        beta: reward per nat.
        mask: [T] bool, False for tokens to leave out.

    Returns:
        [S], of the dtype of logprobs, summed in float64."""
    check_tensor("logprobs", logprobs)
    check_tensor("ref_logprobs", ref_logprobs, logprobs.device, "logprobs are")
    for name, values in (("logprobs", logprobs), ("ref_logprobs", ref_logprobs)):
        if values.dim() != 1 or values.shape != logprobs.shape or values.dtype not in DTYPES:
            wanted = f"float32 or float64 [T] = {list(logprobs.shape)}"
            raise ValueError(f"{name} must be {wanted}, got {values.dtype} {tuple(values.shape)}")
    mask = optional("mask", mask, len(logprobs), logprobs.device)
    beta = check_finite("beta", beta)
    check_sequences(cu_seqlens, len(logprobs), logprobs.device)
    has_kernel = has_kernels(logprobs.device)
    proxies: Tensor = (_LogRatioReward.apply if has_kernel else log_ratio_reward_reference)(
        logprobs.contiguous(),
        ref_logprobs.detach().to(logprobs.dtype).contiguous(),
        cu_seqlens.to(torch.int64).contiguous(),
        mask,
        beta,
    )
    return proxies


def log_ratio_reward_reference(
    logprobs: Tensor, ref_logprobs: Tensor, cu_seqlens: Tensor, mask: Tensor | None, beta: float
) -> Tensor:
    """For devices without kernels, and for tests."""
    log_ratio = logprobs - ref_logprobs
    if mask is not None:
        log_ratio = torch.where(mask, log_ratio, 0.0)
    return beta * sequence_sums(log_ratio, cu_seqlens.diff())


class _LogRatioReward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logprobs: Tensor,
        ref_logprobs: Tensor,
        cu_seqlens: Tensor,
        mask: Tensor | None,
        beta: float,
    ) -> Tensor:
        ctx.save_for_backward(cu_seqlens, mask)
        ctx.beta, ctx.num_tokens = beta, len(logprobs)
        proxies = logprobs.new_empty(len(cu_seqlens) - 1)
        given = {"logprobs": logprobs, "ref_logprobs": ref_logprobs, "proxies": proxies}
        _launch(cu_seqlens, mask, beta, **given)
        return proxies

    @staticmethod
    def backward(ctx: Any, grad_proxies: Tensor) -> tuple[Tensor | None, ...]:
        check_first_order("log_ratio_reward")
        cu_seqlens, mask = ctx.saved_tensors
        gradient = grad_proxies.new_empty(ctx.num_tokens)
        given = {"grad_proxies": grad_proxies.contiguous(), "gradient": gradient}
        _launch(cu_seqlens, mask, ctx.beta, **given)
        return gradient, None, None, None, None


def _launch(cu_seqlens: Tensor, mask: Tensor | None, beta: float, **of_pass: Tensor) -> None:
    """Run the kernel on tensors that `log_ratio_reward` has checked, or made."""
    fields: dict[str, Any] = dict.fromkeys(choices("log_ratio_reward"))
    fields |= {"num_sequences": len(cu_seqlens) - 1, "cu_seqlens": cu_seqlens}
    fields |= {"mask": mask, "beta": beta, **of_pass}
    tensor = next(iter(of_pass.values()))
    KernelLaunch(tensor.device).launch("log_ratio_reward", dtype=tensor.dtype, **fields)


def pacs_loss(
    reward_proxy: Tensor,
    labels: Tensor,
    groups: int | Tensor,
    *,
    score: str = "rloo",
    weight: str = "balanced",
    denominator: float | Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return L = (1/B) sum_i w_i BCEWithLogits(psi_i, R_i) (PACS, eq. 8; docs/objectives/pacs.md).
    The gradient flows through the whole group: a proxy is part of the other rollouts' baseline.

    Args:
        reward_proxy: [S] float32 or float64, from log_ratio_reward.
        labels: R [S], 0 or 1: whether the rollout is correct.
        groups: N, the number of adjacent rollouts of each prompt; or offsets [G+1], integers, for
            uneven groups. Groups must be complete.
        score: psi: "rloo" (0 in a group of one), "grpo", "dr_grpo" or "naive". Where all proxies of
            a group are equal, "grpo" has 1e6 times the gradient of "dr_grpo".
        weight: w: "balanced", in groups with correct and wrong rollouts, or "none", 1.
        denominator: B. Give the number of rollouts of the whole batch, so that the losses of
            micro-batches and ranks add up. Default: S.

    Returns:
        The loss, a scalar of the dtype of reward_proxy, and detached metrics: cross_entropy [S],
        unweighted; and scalars: accuracy, the share of rollouts with psi > 0 just where R = 1;
        reward_proxy, the mean; score_correct and score_wrong, the means of psi (0 over none)."""
    check_choice("score", score, SCORES)
    check_choice("weight", weight, WEIGHTS)
    sizes = _group_sizes(reward_proxy, labels, groups)  # [G]
    size, device = len(reward_proxy), reward_proxy.device
    divisor = check_denominator(max(size, 1) if denominator is None else denominator, device)
    r, y = reward_proxy.double(), labels.double()
    is_label = (y == 0) | (y == 1)
    if is_host_readable(is_label) and not bool(is_label.all()):
        first = int((~is_label).nonzero()[0])
        raise ValueError(f"labels must be 0 or 1, got {labels[first].item()} for rollout {first}")
    group = torch.repeat_interleave(sizes, output_size=size)  # [S]
    psi = _scores(r, sizes, group, score)
    weights = _balanced(y, sizes, group) if weight == "balanced" else 1.0
    cross_entropy = binary_cross_entropy_with_logits(psi, y, reduction="none")
    cross_entropy = torch.where(is_label, cross_entropy, torch.nan)
    loss = ((weights * cross_entropy).sum() / divisor).to(reward_proxy.dtype)
    if is_host_readable(loss) and not bool(loss.isfinite()) and bool(reward_proxy.isfinite().all()):
        got = f"{float(loss)} from reward proxies of up to {float(r.detach().abs().max()):g}"
        raise ValueError(f"the loss must be finite in {loss.dtype}, got {got}")
    psi, correct = psi.detach(), y.sum()
    return loss, {
        "cross_entropy": cross_entropy.detach().to(reward_proxy.dtype),
        "accuracy": ((psi > 0) == (y > 0)).double().sum() / max(size, 1),
        "reward_proxy": r.detach().sum() / max(size, 1),
        "score_correct": (psi * y).sum() / correct.clamp_min(1),
        "score_wrong": (psi * (1 - y)).sum() / (size - correct).clamp_min(1),
    }


def _group_sizes(reward_proxy: Tensor, labels: Tensor, groups: int | Tensor) -> Tensor:
    """Check the tensors of pacs_loss, and return how many rollouts each group has, int64 [G]."""
    check_tensor("reward_proxy", reward_proxy)
    check_tensor("labels", labels, reward_proxy.device, "reward_proxy is")
    if reward_proxy.dim() != 1 or reward_proxy.dtype not in DTYPES:
        got = f"{reward_proxy.dtype} {tuple(reward_proxy.shape)}"
        raise ValueError(f"reward_proxy must be float32 or float64 [S], got {got}")
    size = len(reward_proxy)
    if labels.shape != reward_proxy.shape:
        raise ValueError(f"labels must be [S] = [{size}], got the shape {tuple(labels.shape)}")
    if isinstance(groups, Tensor):
        check_sequences(groups, size, reward_proxy.device)
        return groups.long().diff()
    wanted = f"a number of rollouts that divides S = {size}, or offsets"
    check_integer("groups", groups, wanted, lambda n: n >= 1 and size % n == 0)
    return torch.full((size // groups,), groups, device=reward_proxy.device)


def _balanced(y: Tensor, sizes: Tensor, group: Tensor) -> Tensor:
    """Return weights [S] of labels y [S], in groups of `sizes` [G]; `group` [S] is each one's."""
    of_group, num_correct = (x[group] for x in (sizes.double(), sequence_sums(y, sizes)))  # [S]
    is_mixed = (num_correct > 0) & (num_correct < of_group)
    of_class = torch.where(y > 0, num_correct, of_group - num_correct)
    return torch.where(is_mixed, of_group / (2 * of_class), 1.0)


def _scores(r: Tensor, sizes: Tensor, group: Tensor, score: str) -> Tensor:
    """Return psi [S] of proxies r [S], in groups as above."""
    if score == "naive":
        return r
    n, centred = sizes.double()[group], _Centre.apply(r, sizes, group)
    if score == "rloo":
        return centred * torch.where(n > 1, n / (n - 1), 0.0)
    if score == "dr_grpo":
        return centred
    # Their mean, which is NaN where a square overflows: psi would be 0.
    squares = centred.square() - _Centre.apply(centred.square(), sizes, group)
    # The square root has an infinite derivative at 0, where all proxies are equal.
    std = (squares.where(squares != 0, 1.0) * n / (n - 1).clamp_min(1)).sqrt()
    return centred / (std.where(squares != 0, 0.0) + 1e-6)


class _Centre(torch.autograd.Function):
    """x [S] minus the mean of its group: a linear map that is its own adjoint.

    It takes distances from the group's first number, so that equal numbers, in scores and in
    gradients, give exactly 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Tensor, group: Tensor) -> Tensor:
        ctx.save_for_backward(sizes, group)
        distance = x - x[(sizes.cumsum(0) - sizes)[group]]
        return distance - (sequence_sums(distance, sizes) / sizes)[group]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Centre.apply(grad, *ctx.saved_tensors), None, None
