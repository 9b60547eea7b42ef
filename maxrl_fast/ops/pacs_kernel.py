"""The operators behind PACS, on the CPU and on CUDA."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from maxrl_fast import _C
from maxrl_fast.ops import _gate
from maxrl_fast.ops._gate import address

# Sums of csrc/pacs.h.
PACS_SUMS = ("loss", "accurate", "proxy", "score_correct", "score_wrong", "correct")
DTYPES = {torch.float32: "float32", torch.float64: "float64"}

_SCHEMAS = {
    # group_size is not read where there are offsets
    "pacs_loss": "(Tensor proxies, Tensor labels, Tensor? offsets, int group_size, str score, bool balanced, "
    "Tensor denominator) -> (Tensor sums, Tensor cross_entropy, Tensor gradient)",
    "log_ratio_reward": "(Tensor logprobs, Tensor ref_logprobs, Tensor cu_seqlens, Tensor? mask, float beta) -> Tensor",
    "log_ratio_reward_backward": "(Tensor by_proxies, Tensor cu_seqlens, Tensor? mask, float beta, int num_tokens) -> Tensor",
}
for _name, _schema in _SCHEMAS.items():
    torch.library.define(f"maxrl_fast::{_name}", _schema, tags=(torch.Tag.pt2_compliant_tag,))


def _pacs_loss(
    proxies: Tensor,
    labels: Tensor,
    offsets: Tensor | None,
    group_size: int,
    score: str,
    balanced: bool,
    denominator: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    device, dtype, shape = proxies.device, proxies.dtype, proxies.shape
    num_groups = len(offsets) - 1 if offsets is not None else len(proxies) // group_size
    cross_entropy, gradient = torch.empty_like(proxies), torch.empty_like(proxies)
    size = _C.PACS_WORKSPACE if _gate.is_gpu(device) else len(PACS_SUMS)
    sums = torch.zeros(size, dtype=torch.float64, device=device)
    pacs = _C.Pacs(
        num_groups=num_groups,
        group_size=group_size,
        offsets=0 if offsets is None else address("offsets", offsets, torch.int64, (num_groups + 1,), device),
        proxies=address("reward_proxy", proxies, dtype, shape, device),
        labels=address("labels", labels, dtype, shape, device),
        denominator=address("denominator", denominator, torch.float64, (), device),
        score=score,
        balanced=balanced,
        cross_entropy=cross_entropy.data_ptr(),
        gradient=gradient.data_ptr(),
    )
    unusable = _gate.launch("pacs_loss", device, dtype=DTYPES[dtype], pacs=pacs, sums=sums.data_ptr())
    if unusable is not None and unusable >= 0:
        raise ValueError(f"labels must be 0 or 1, got {labels[unusable].item()} for rollout {unusable}")
    return sums[: len(PACS_SUMS)], cross_entropy, gradient


def _log_ratio(cu_seqlens: Tensor, mask: Tensor | None, beta: float, num_tokens: int) -> _C.LogRatio:
    device = cu_seqlens.device
    return _C.LogRatio(
        num_tokens=num_tokens,
        num_sequences=len(cu_seqlens) - 1,
        cu_seqlens=address("cu_seqlens", cu_seqlens, torch.int64, cu_seqlens.shape, device),
        mask=0 if mask is None else address("mask", mask, torch.bool, (num_tokens,), device),
        beta=beta,
    )


def _log_ratio_reward(logprobs: Tensor, ref_logprobs: Tensor, cu_seqlens: Tensor, mask: Tensor | None, beta: float) -> Tensor:
    device, dtype, shape = logprobs.device, logprobs.dtype, logprobs.shape
    proxies = logprobs.new_empty(len(cu_seqlens) - 1)
    _gate.launch(
        "log_ratio_reward",
        device,
        dtype=DTYPES[dtype],
        sequences=_log_ratio(cu_seqlens, mask, beta, len(logprobs)),
        logprobs=address("logprobs", logprobs, dtype, shape, device),
        ref_logprobs=address("ref_logprobs", ref_logprobs, dtype, shape, device),
        proxies=proxies.data_ptr(),
    )
    return proxies


def _log_ratio_reward_backward(
    by_proxies: Tensor, cu_seqlens: Tensor, mask: Tensor | None, beta: float, num_tokens: int
) -> Tensor:
    device, dtype = by_proxies.device, by_proxies.dtype
    gradient = by_proxies.new_empty(num_tokens)
    _gate.launch(
        "log_ratio_reward_backward",
        device,
        dtype=DTYPES[dtype],
        sequences=_log_ratio(cu_seqlens, mask, beta, num_tokens),
        by_proxies=address("by_proxies", by_proxies, dtype, (len(cu_seqlens) - 1,), device),
        gradient=gradient.data_ptr(),
    )
    return gradient


_IMPLEMENTATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "pacs_loss": (
        _pacs_loss,
        lambda proxies, *_: (
            proxies.new_empty(len(PACS_SUMS), dtype=torch.float64),
            torch.empty_like(proxies),
            torch.empty_like(proxies),
        ),
    ),
    "log_ratio_reward": (
        _log_ratio_reward,
        lambda logprobs, ref_logprobs, cu_seqlens, *_: logprobs.new_empty(cu_seqlens.shape[0] - 1),
    ),
    "log_ratio_reward_backward": (
        _log_ratio_reward_backward,
        lambda by_proxies, cu_seqlens, mask, beta, num_tokens: by_proxies.new_empty(num_tokens),
    ),
}
for _name, (_implementation, _fake) in _IMPLEMENTATIONS.items():
    for _device in ("CPU", "CUDA"):
        torch.library.impl(f"maxrl_fast::{_name}", _device, _implementation)
    torch.library.register_fake(f"maxrl_fast::{_name}", _fake)


def _save_gradient(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(output[2])


def _pacs_backward(ctx: Any, by_sums: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    (gradient,) = ctx.saved_tensors
    return gradient * by_sums[0].to(gradient.dtype), *(None,) * 6


def _save_sequences(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    logprobs, _, cu_seqlens, mask, ctx.beta = inputs
    ctx.save_for_backward(cu_seqlens, mask)
    ctx.num_tokens = logprobs.shape[0]


def _log_ratio_backward(ctx: Any, by_proxies: Tensor) -> tuple[Tensor | None, ...]:
    backward = torch.ops.maxrl_fast.log_ratio_reward_backward
    return backward(by_proxies.contiguous(), *ctx.saved_tensors, ctx.beta, ctx.num_tokens), None, None, None, None


torch.library.register_autograd("maxrl_fast::pacs_loss", _pacs_backward, setup_context=_save_gradient)
torch.library.register_autograd("maxrl_fast::log_ratio_reward", _log_ratio_backward, setup_context=_save_sequences)
