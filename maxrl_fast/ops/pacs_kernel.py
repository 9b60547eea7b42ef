from typing import Any, NamedTuple

import torch
from torch import Tensor

from maxrl_fast import _C
from maxrl_fast.ops import dispatch
from maxrl_fast.ops.derivatives import register_backward
from maxrl_fast.ops.dispatch import KernelLaunch, check_fields, operator

DTYPES = {torch.float32: "float32", torch.float64: "float64"}


class PacsMetrics(NamedTuple):
    """PacsMetrics of csrc/pacs.h: means, float64 scalars; 0 over no rollouts."""

    accuracy: Tensor  # fraction of rollouts whose score has the sign of their label
    reward_proxy: Tensor
    score_correct: Tensor  # over the rollouts with label 1
    score_wrong: Tensor


NUM_METRICS = len(PacsMetrics._fields)
check_fields("PacsMetrics", PacsMetrics._fields)


@operator()
def pacs_loss(
    proxies: Tensor,  # [S]
    labels: Tensor,
    offsets: Tensor | None,
    group_size: int,  # unused with offsets
    score: str,
    balanced: bool,
    # []; None: `denominator`, which saves the launch that would write it to a GPU
    denominators: Tensor | None,
    denominator: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The last result is the gradient of the proxies [S]."""
    device, dtype, shape = proxies.device, proxies.dtype, proxies.shape
    num_groups = len(offsets) - 1 if offsets is not None else len(proxies) // group_size
    metrics = proxies.new_empty(NUM_METRICS, dtype=torch.float64)
    loss, cross_entropy = proxies.new_empty(()), torch.empty_like(proxies)
    gradient, workspace = torch.empty_like(proxies), None
    if dispatch.is_gpu(device):
        workspace = torch.zeros(_C.PACS_WORKSPACE, dtype=torch.float64, device=device)
    call = KernelLaunch(device)
    unusable = call.launch(
        "pacs_loss",
        dtype=DTYPES[dtype],
        num_rollouts=len(proxies),
        num_groups=num_groups,
        group_size=group_size,
        offsets=call.address("offsets", offsets, torch.int64, (num_groups + 1,)),
        **call.addresses(dtype, *shape, proxies=proxies, labels=labels),
        denominators=call.address("denominator", denominators, torch.float64, ()),
        denominator=denominator,
        score=score,
        balanced=balanced,
        loss=call.keep(loss),
        metrics=call.keep(metrics),
        cross_entropy=call.keep(cross_entropy),
        gradient=call.keep(gradient),
        workspace=0 if workspace is None else call.keep(workspace),
    )
    if unusable is not None and unusable >= 0:
        raise ValueError(
            f"labels must be 0 or 1, got {labels[unusable].item()} for rollout {unusable}"
        )
    return loss, metrics, cross_entropy, gradient


def _save_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)  # otherwise autograd allocates zeros for the other results
    ctx.save_for_backward(output[3])


def _pacs_loss_backward(ctx: Any, grad_loss: Tensor | None, *_: None) -> tuple[Tensor | None]:
    (gradient,) = ctx.saved_tensors
    return (None if grad_loss is None else gradient * grad_loss,)


register_backward(pacs_loss, "pacs_loss", _pacs_loss_backward, save=_save_gradient)


@operator()
def log_ratio_reward(
    logprobs: Tensor, ref_logprobs: Tensor, cu_seqlens: Tensor, mask: Tensor | None, beta: float
) -> Tensor:
    call, dtype, shape = KernelLaunch(logprobs.device), logprobs.dtype, logprobs.shape
    proxies = logprobs.new_empty(len(cu_seqlens) - 1)
    call.launch(
        "log_ratio_reward",
        dtype=DTYPES[dtype],
        **_sequences(call, cu_seqlens, mask, beta, len(logprobs)),
        **call.addresses(dtype, *shape, logprobs=logprobs, ref_logprobs=ref_logprobs),
        proxies=call.keep(proxies),
    )
    return proxies


def _save_sequences(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logprobs, _, cu_seqlens, mask, ctx.beta = inputs
    ctx.save_for_backward(cu_seqlens, mask)
    ctx.num_tokens = logprobs.shape[0]


def _log_ratio_reward_backward(ctx: Any, grad_proxies: Tensor) -> tuple[Tensor]:
    grad = grad_proxies.contiguous()
    return (log_ratio_reward_backward(grad, *ctx.saved_tensors, ctx.beta, ctx.num_tokens),)


register_backward(
    log_ratio_reward, "log_ratio_reward", _log_ratio_reward_backward, save=_save_sequences
)


@operator()
def log_ratio_reward_backward(
    grad_proxies: Tensor, cu_seqlens: Tensor, mask: Tensor | None, beta: float, num_tokens: int
) -> Tensor:
    call, dtype = KernelLaunch(grad_proxies.device), grad_proxies.dtype
    gradient = grad_proxies.new_empty(num_tokens)
    call.launch(
        "log_ratio_reward_backward",
        dtype=DTYPES[dtype],
        **_sequences(call, cu_seqlens, mask, beta, num_tokens),
        grad_proxies=call.address("grad_proxies", grad_proxies, dtype, (len(cu_seqlens) - 1,)),
        gradient=call.keep(gradient),
    )
    return gradient


def _sequences(
    call: KernelLaunch, cu_seqlens: Tensor, mask: Tensor | None, beta: float, num_tokens: int
) -> dict[str, Any]:
    return {
        "num_tokens": num_tokens,
        "num_sequences": len(cu_seqlens) - 1,
        "cu_seqlens": call.address("cu_seqlens", cu_seqlens, torch.int64, cu_seqlens.shape),
        "mask": call.address("mask", mask, torch.bool, (num_tokens,)),
        "beta": beta,
    }
