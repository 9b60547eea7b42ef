"""The operator behind ops.row_statistics, on the CPU and on CUDA: `maxrl_fast::row_statistics`."""

import torch
from torch import Tensor

from maxrl_fast import _C
from maxrl_fast.ops._gate import operator, register_fake
from maxrl_fast.ops.token_batch import real_dtype
from maxrl_fast.ops.token_loss_kernel import LogitsCall

Results = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _empty(logits: Tensor, top_k: int) -> Results:
    num_tokens, real = logits.shape[0], real_dtype(logits.dtype)
    return (
        logits.new_empty(num_tokens, dtype=real),
        logits.new_empty(num_tokens, dtype=real),
        logits.new_empty(num_tokens, top_k, dtype=torch.int64),
        logits.new_empty(num_tokens, top_k, dtype=real),
        logits.new_empty(num_tokens, dtype=real),
    )


@operator()
def row_statistics(
    logits: Tensor, targets: Tensor, temperatures: Tensor | None, temperature: float, top_k: int, min_p: float
) -> Results:
    """Return the fields of ops.RowStatistics."""
    call = LogitsCall(logits, targets, temperatures, temperature)
    results = logprobs, entropy, top_tokens, top_logprobs, log_mass = _empty(logits, top_k)
    statistics = _C.RowStatistics(
        top_k=top_k,
        min_p=min_p,
        logprobs=call.keep(logprobs),
        entropy=call.keep(entropy),
        top_tokens=call.keep(top_tokens),
        top_logprobs=call.keep(top_logprobs),
        log_mass=call.keep(log_mass),
    )
    call.refuse(call.run("row_statistics", statistics=statistics), targets)
    return results


@register_fake(row_statistics)
def _(logits: Tensor, targets: Tensor, temperatures: Tensor | None, temperature: float, top_k: int, min_p: float) -> Results:
    return _empty(logits, top_k)
