"""`maxrl_fast::tree_attention` on a CPU: keys above a segment and its own in one softmax.

csrc/cpu/attention.cpp computes what attention.py makes of several calls of FlashAttention and
merges. Scores, probabilities and sums are in float32, in float64 for float64 inputs. Results are
bitwise the same for any number of threads, and outputs for any way of sharing prefixes.
"""

from typing import Any

import torch
from torch import Tensor

from maxrl_fast.ops import dispatch
from maxrl_fast.ops.derivatives import register_backward
from maxrl_fast.ops.dispatch import KernelLaunch, operator

DTYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16"}
LARGEST_HEAD = 256


def has_kernel(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    is_cpu = device.type == "cpu" and not dispatch.is_gpu(device)
    return is_cpu and dtype in DTYPES and head_dim <= LARGEST_HEAD


@operator()
def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, parents: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the attention [U, Hq, D] and its log-sum-exp to base 2 [U, Hq], without a gradient.

    q [U, Hq, D], k and v [U, Hkv, D]; lengths [M] and parents [M] int64 as in Forest. Raises
    ValueError if lengths do not add up to U or are below 1, or segments are not in depth-first
    order.
    """
    call, q, k, v = KernelLaunch(q.device), q.contiguous(), k.contiguous(), v.contiguous()
    o = torch.empty_like(q)
    lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    call.launch(
        "tree_attention",
        **_inputs(call, q, k, v, lengths, parents),
        o=call.keep(o),
        lse=call.keep(lse),
        **dict.fromkeys(("grad", "grad_q", "grad_k", "grad_v"), 0),
    )
    return o, lse


@operator()
def tree_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    lengths: Tensor,
    parents: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from the gradient of o [U, Hq, D]."""
    call = KernelLaunch(q.device)
    grad, q, k, v = (x.contiguous() for x in (grad, q, k, v))
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    call.launch(
        "tree_attention_backward",
        **_inputs(call, q, k, v, lengths, parents),
        o=call.address("o", o, q.dtype, q.shape),
        lse=call.address("lse", lse, torch.promote_types(q.dtype, torch.float32), q.shape[:2]),
        grad=call.address("grad", grad, q.dtype, q.shape),
        grad_q=call.keep(grads[0]),
        grad_k=call.keep(grads[1]),
        grad_v=call.keep(grads[2]),
    )
    return grads


def _inputs(
    call: KernelLaunch, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, parents: Tensor
) -> Any:
    if q.dtype not in DTYPES or q.dim() != 3 or k.dim() != 3:
        raise ValueError(
            f"q and k must be {', '.join(DTYPES.values())} [tokens, heads, head size], got "
            f"{q.dtype} {tuple(q.shape)} and {k.dtype} {tuple(k.shape)}"
        )
    (num_tokens, heads, head_dim), key_heads = q.shape, k.shape[1]
    shape, num_segments = (num_tokens, key_heads, head_dim), len(lengths)

    def integers(name: str, x: Tensor) -> int:
        return call.address(name, x.contiguous(), torch.int64, (num_segments,))

    return {
        "dtype": DTYPES[q.dtype],
        "num_tokens": num_tokens,
        "num_segments": num_segments,
        "lengths": integers("lengths", lengths),
        "parents": integers("parents", parents),
        "heads": heads,
        "key_heads": key_heads,
        "head_dim": head_dim,
        "q": call.address("q", q, q.dtype, q.shape),
        "k": call.address("k", k, q.dtype, shape),
        "v": call.address("v", v, q.dtype, shape),
    }


def _save(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, Tensor]) -> None:
    q, k, v, *forest = inputs
    ctx.save_for_backward(q, k, v, *results, *forest)
    ctx.mark_non_differentiable(results[1])


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None
    q, k, v, o, lse, *forest = ctx.saved_tensors
    grads: tuple[Tensor, ...] = tree_attention_backward(grad, q, k, v, o, lse, *forest)
    return grads


register_backward(tree_attention, "tree_attention", _backward, save=_save, num_inputs=3)
