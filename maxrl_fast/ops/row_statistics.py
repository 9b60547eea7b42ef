"""What losses need of a row of the sampling policy's logits beside the log-probability of its target."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from maxrl_fast import _C
from maxrl_fast.ops import row_statistics_kernel as kernels
from maxrl_fast.ops._gate import has_kernels, operator, register_fake
from maxrl_fast.algorithms.arguments import check_integer, check_number
from maxrl_fast.ops.logit_chunks import Chunks, capped_logits, check_hidden, rows_of
from maxrl_fast.ops.row_statistics_reference import row_statistics_reference
from maxrl_fast.ops.token_batch import check_rows, real_dtype
from maxrl_fast.ops.token_loss import contiguous_rows, shape_of
from maxrl_fast.ops.token_loss_kernel import split_temperature


class RowStatistics(NamedTuple):
    """Of T rows of logits; floating tensors are float32 (float64 for float64 logits), in nats."""

    logprobs: Tensor  # [T] of the targets
    entropy: Tensor  # [T]
    top_tokens: Tensor  # [T, K] int64: the most probable tokens, by falling probability; of equal logits the lower token first
    top_logprobs: Tensor  # [T, K]
    log_mass: Tensor  # [T] log of the probability of all tokens that have at least min_p times the greatest probability

    def log_proxy(self, min_p: float) -> Tensor:
        """Return the log-probs [T] of the targets where tokens with less than min_p times the greatest probability are left out
        and the others renormalised; minus infinity for those left out. min_p must be that of log_mass."""
        is_kept = self.logprobs >= self.top_logprobs[:, 0] + math.log(min_p)
        return torch.where(is_kept, self.logprobs - self.log_mass, -math.inf)


def row_statistics(
    logits: Tensor, targets: Tensor, *, top_k: int = 3, min_p: float = 0.02, temperature: float | Tensor = 1.0
) -> RowStatistics:
    """Return statistics of each row of softmax(logits / temperature), without a gradient.

    A CPU reads the logits once. A GPU reads each row twice, the second time from its L2 cache where one row for every
    multiprocessor fits into it: 2 or 4 bytes a logit from memory, and nothing of that size is written.

    Args:
        logits: [T, V] float32, bfloat16, float16 or float64, computed in float32 (float64 for float64).
        targets: [T] integers below V.
        top_k: K, how many of the most probable tokens to return, from 1 to 8 and at most V.
        min_p: which tokens count in log_mass, above 0 and at most 1. A token within rounding of the limit may or may not.
        temperature: a number, or [T].

    Raises:
        ValueError, TypeError: as token_logprobs does, and where top_k or min_p is out of range. A row with NaN has NaN
            everywhere but in top_tokens, which may then be any tokens.
    """
    shape = shape_of(logits)
    check_rows(shape, targets, temperature, logits.device)
    top_k, min_p = _check_sizes(top_k, min_p, shape[1])
    logits = logits.detach()
    if not has_kernels(logits.device):
        return RowStatistics(*row_statistics_reference(logits, targets.long(), _detached(temperature, logits), top_k, min_p))
    split = split_temperature(_detached(temperature, logits))
    return RowStatistics(*kernels.row_statistics(contiguous_rows(logits), targets.long().contiguous(), *split, top_k, min_p))


def linear_row_statistics(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    top_k: int = 3,
    min_p: float = 0.02,
    temperature: float | Tensor = 1.0,
    softcap: float = 0.0,
    chunk_tokens: int | None = None,
) -> RowStatistics:
    """Return row_statistics of the logits hidden @ weight.T, one chunk of tokens at a time; on a device without kernels, of all
    tokens at once.

    hidden [T, H], weight [V, H], softcap and chunk_tokens are as in linear_policy_gradient_loss, the other arguments and the
    results as in row_statistics.

    Raises:
        ValueError, TypeError: as row_statistics does, and where hidden, weight, softcap or chunk_tokens do not fit.
    """
    size, chunk = check_hidden(hidden, weight, chunk_tokens, softcap)
    check_rows((len(hidden), size), targets, temperature, hidden.device)
    top_k, min_p = _check_sizes(top_k, min_p, size)
    hidden, weight, targets = hidden.detach(), weight.detach(), targets.long().contiguous()
    temperature = _detached(temperature, hidden)
    if not has_kernels(hidden.device):
        logits = capped_logits(hidden, weight, softcap)
        return RowStatistics(*row_statistics_reference(logits, targets, temperature, top_k, min_p))
    split = split_temperature(temperature)
    return RowStatistics(*linear_statistics(hidden, weight, targets, *split, top_k, min_p, chunk, softcap))


def _check_sizes(top_k: int, min_p: float, vocab_size: int) -> tuple[int, float]:
    most = min(_C.MAX_TOP_TOKENS, vocab_size)
    wanted = f"an integer from 1 to {_C.MAX_TOP_TOKENS} and at most V = {vocab_size}"
    top_k = check_integer("top_k", top_k, wanted, lambda x: 1 <= x <= most)
    return top_k, check_number("min_p", min_p, "above 0 and at most 1", lambda x: 0 < x <= 1)


def _detached(temperature: float | Tensor, like: Tensor) -> float | Tensor:
    if isinstance(temperature, Tensor):
        return temperature.detach().to(real_dtype(like.dtype)).contiguous()
    return temperature


@operator()
def linear_statistics(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    top_k: int,
    min_p: float,
    chunk: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the fields of RowStatistics."""
    none = kernels.row_statistics(hidden.new_empty(0, len(weight)), targets[:0], None, 1.0, top_k, min_p)
    parts = [
        kernels.row_statistics(
            logits, *rows_of(targets, temperature if temperatures is None else temperatures, start, stop), top_k, min_p
        )
        for start, stop, logits in Chunks(hidden, weight, chunk, False, False, softcap)
    ]
    logprobs, entropy, top_tokens, top_logprobs, log_mass = (torch.cat(fields) for fields in zip(none, *parts, strict=True))
    return logprobs, entropy, top_tokens, top_logprobs, log_mass


@register_fake(linear_statistics)
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor | None,
    temperature: float,
    top_k: int,
    min_p: float,
    chunk: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_tokens, real = hidden.shape[0], real_dtype(hidden.dtype)
    logprobs, entropy, log_mass = (hidden.new_empty(num_tokens, dtype=real) for _ in range(3))
    top_tokens = hidden.new_empty(num_tokens, top_k, dtype=torch.int64)
    return logprobs, entropy, top_tokens, hidden.new_empty(num_tokens, top_k, dtype=real), log_mass
