"""`maxrl_fast::log_ratio_reward`: the operator, its derivative, and the same in plain PyTorch."""

from typing import Any

import torch
from torch import Tensor

from maxrl_fast.ops.derivatives import register_backward
from maxrl_fast.ops.dispatch import KernelLaunch, operator

DTYPES = {torch.float32: "float32", torch.float64: "float64"}


def log_ratio_reward_reference(
    logprobs: Tensor, ref_logprobs: Tensor, cu_seqlens: Tensor, mask: Tensor | None, beta: float
) -> Tensor:
    """For devices without kernels, and for tests."""
    log_ratio = logprobs - ref_logprobs
    if mask is not None:
        log_ratio = torch.where(mask, log_ratio, 0.0)
    sequence = torch.repeat_interleave(cu_seqlens.diff(), output_size=len(logprobs))
    return beta * logprobs.new_zeros(len(cu_seqlens) - 1).index_add(0, sequence, log_ratio)


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
