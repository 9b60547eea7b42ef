"""`maxrl_fast::shared_prompt_attention` on a CPU: a prompt's keys and a response's own in one
online softmax.

csrc/cpu/attention.cpp computes what attention.py makes of three calls of FlashAttention and a
merge. Scores, probabilities and sums are in float32, in float64 for float64 inputs. Results are
bitwise the same for any number of threads.
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
def shared_prompt_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, response_lengths: Tensor, prompt_index: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the attention [U, Hq, D] and its log-sum-exp to base 2 [U, Hq], without a gradient.

    q [U, Hq, D], k and v [U, Hkv, D]; lengths [B], response_lengths [S] and prompt_index [S] int64
    as in SharedPromptLayout. Raises ValueError if lengths do not add up to U, or responses are not
    in the order of their prompts.
    """
    call, q, k, v = KernelLaunch(q.device), q.contiguous(), k.contiguous(), v.contiguous()
    o = torch.empty_like(q)
    lse = q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    call.launch(
        "shared_prompt_attention",
        **_inputs(call, q, k, v, lengths, response_lengths, prompt_index),
        o=call.keep(o),
        lse=call.keep(lse),
        **dict.fromkeys(("grad", "grad_q", "grad_k", "grad_v"), 0),
    )
    return o, lse


@operator()
def shared_prompt_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    lengths: Tensor,
    response_lengths: Tensor,
    prompt_index: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v from the gradient of o [U, Hq, D]."""
    call = KernelLaunch(q.device)
    grad, q, k, v = (x.contiguous() for x in (grad, q, k, v))
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    call.launch(
        "shared_prompt_attention_backward",
        **_inputs(call, q, k, v, lengths, response_lengths, prompt_index),
        o=call.address("o", o, q.dtype, q.shape),
        lse=call.address("lse", lse, torch.promote_types(q.dtype, torch.float32), q.shape[:2]),
        grad=call.address("grad", grad, q.dtype, q.shape),
        grad_q=call.keep(grads[0]),
        grad_k=call.keep(grads[1]),
        grad_v=call.keep(grads[2]),
    )
    return grads


def _inputs(
    call: KernelLaunch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    response_lengths: Tensor,
    prompt_index: Tensor,
) -> Any:
    if q.dtype not in DTYPES or q.dim() != 3 or k.dim() != 3:
        raise ValueError(
            f"q and k must be {', '.join(DTYPES.values())} [tokens, heads, head size], got "
            f"{q.dtype} {tuple(q.shape)} and {k.dtype} {tuple(k.shape)}"
        )
    (num_tokens, heads, head_dim), key_heads = q.shape, k.shape[1]
    shape, num_responses = (num_tokens, key_heads, head_dim), len(response_lengths)

    def integers(name: str, x: Tensor, size: int) -> int:
        return call.address(name, x.contiguous(), torch.int64, (size,))

    return {
        "dtype": DTYPES[q.dtype],
        "num_tokens": num_tokens,
        "num_sequences": len(lengths),
        "num_responses": num_responses,
        "lengths": integers("lengths", lengths, len(lengths)),
        "response_lengths": integers("response_lengths", response_lengths, num_responses),
        "answers": integers("prompt_index", prompt_index, num_responses),
        "heads": heads,
        "key_heads": key_heads,
        "head_dim": head_dim,
        "q": call.address("q", q, q.dtype, q.shape),
        "k": call.address("k", k, q.dtype, shape),
        "v": call.address("v", v, q.dtype, shape),
    }


def _save(ctx: Any, inputs: tuple[Any, ...], results: tuple[Tensor, Tensor]) -> None:
    q, k, v, *layout = inputs
    ctx.save_for_backward(q, k, v, *results, *layout)
    ctx.mark_non_differentiable(results[1])


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None
    q, k, v, o, lse, *layout = ctx.saved_tensors
    grads: tuple[Tensor, ...] = shared_prompt_attention_backward(grad, q, k, v, o, lse, *layout)
    return grads


register_backward(
    shared_prompt_attention, "shared_prompt_attention", _backward, save=_save, num_inputs=3
)
