import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import check_integer, check_number, check_tensor
from maxrl_fast.ops import dispatch
from maxrl_fast.ops.loss_kernel import DTYPES, real_dtype
from maxrl_fast.runtime import tuning

_MIN_CHUNK = 128  # tokens; smaller matrix multiplications are slow
# rows and columns that a multiprocessor computes at a time in cuBLAS's large kernels
_TILE = 128, 256
# elements per row of logits on a GPU: rows aligned to 128 bytes are read 16 bytes at a time
_ROW_MULTIPLE = 64


def logits_dtype(hidden: Tensor) -> torch.dtype:
    """On a GPU logits are not rounded, which would differ between sampler and trainer."""
    return real_dtype(hidden.dtype) if dispatch.is_gpu(hidden.device) else hidden.dtype


def output_product(hidden: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Return hidden [T, H] @ weight.T, both of one dtype, in logits_dtype; without a derivative."""
    dtype = logits_dtype(hidden)
    if dtype != hidden.dtype and hidden.device.type == "cuda":
        return torch.mm(hidden, weight.T, out_dtype=dtype, out=out)
    return torch.mm(hidden.to(dtype), weight.T.to(dtype), out=out)


def capped_logits(hidden: Tensor, weight: Tensor, softcap: float) -> Tensor:
    logits = hidden @ weight.to(hidden.dtype).T
    return softcap * torch.tanh(logits / softcap) if softcap else logits


def check_hidden(
    hidden: Tensor, weight: Tensor, chunk_tokens: int | None, softcap: float, prefix: str = ""
) -> tuple[int, int]:
    """Return V and chunk_tokens, 0 if absent. prefix: of the arguments' names in errors."""
    cap = f"{prefix}softcap"
    check_number(cap, softcap, "finite and at least 0", lambda x: 0 <= x < math.inf)
    for name, matrix in (("hidden", hidden), ("weight", weight)):
        check_tensor(prefix + name, matrix)
    if hidden.dtype not in DTYPES:
        wanted = ", ".join(map(dispatch.dtype_name, DTYPES))
        raise ValueError(f"{prefix}hidden must be {wanted}, got {hidden.dtype}")
    are_matrices = hidden.dim() == weight.dim() == 2 and hidden.shape[1] == weight.shape[1]
    if not are_matrices or hidden.device != weight.device:
        raise ValueError(
            f"{prefix}hidden [T, H] and {prefix}weight [V, H] must have one H and device, got "
            f"{tuple(hidden.shape)} on {hidden.device} and {tuple(weight.shape)} on {weight.device}"
        )
    if weight.dtype not in (hidden.dtype, torch.float32):
        raise ValueError(
            f"{prefix}weight must be {hidden.dtype} as {prefix}hidden is, or float32, got "
            f"{weight.dtype}"
        )
    if chunk_tokens is not None:
        check_integer("chunk_tokens", chunk_tokens, "at least 1", lambda x: x >= 1)
        chunk_tokens = min(chunk_tokens, torch.iinfo(torch.int64).max)
    return len(weight), chunk_tokens or 0


def row_stride(vocab_size: int, device: torch.device) -> int:
    multiple = _ROW_MULTIPLE if dispatch.is_gpu(device) else 1
    return -(-vocab_size // multiple) * multiple


def default_chunk(hidden: Tensor, vocab_size: int) -> int:
    device = hidden.device
    row_bytes = max(row_stride(vocab_size, device) * logits_dtype(hidden).itemsize, 1)
    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    most = tuning.chunk_bytes(device.type, 0 if gpu is None else gpu.total_memory)
    most = max(most // row_bytes, _MIN_CHUNK)
    if gpu is None:
        return most
    return chunk_tokens(len(hidden), most, hidden.shape[1], gpu.multi_processor_count)


@lru_cache(maxsize=256)
def chunk_tokens(num_tokens: int, most: int, hidden_size: int, multiprocessors: int) -> int:
    """Return how many tokens, at most `most`, to multiply at a time: the largest multiple of 128
    with the fewest waves of tiles, as the last one takes as long as a full one."""
    if num_tokens <= most:
        return max(num_tokens, 1)
    rows, columns = _TILE
    width = -(-hidden_size // columns)

    def waves(tokens: int) -> int:
        return -(-(-(-tokens // rows) * width) // multiprocessors)

    def total(size: int) -> int:
        full, rest = divmod(num_tokens, size)
        return full * waves(size) + waves(rest)

    largest = most // rows * rows
    return min(range(largest, largest // 2, -rows), key=total)


class Chunks:
    """The logits hidden @ weight.T, chunk by chunk in the same memory, and the backward pass. A
    chunk's gradient has the dtype of the hidden states and overwrites the logits, in half precision
    the first half of each row of float32."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        size: int,
        softcap: float = 0.0,
        needs: Sequence[bool] = (False, False),
    ):
        """size: tokens, 0: the default. needs: gradients of hidden and of weight."""
        self.hidden, self.weight, self.dtype = hidden, weight.to(hidden.dtype), weight.dtype
        self.size = size or default_chunk(hidden, len(weight))
        self.grad_hidden = torch.empty_like(hidden) if needs[0] else None
        # the first chunk's product replaces the values
        empty = torch.empty_like if len(hidden) else torch.zeros_like
        self.grad_weight = empty(weight, dtype=real_dtype(hidden.dtype)) if needs[1] else None
        stride = row_stride(len(weight), hidden.device)
        rows, dtype = min(self.size, len(hidden)), logits_dtype(hidden)
        self.buffer = hidden.new_empty(rows, stride, dtype=dtype)[:, : len(weight)]
        self.softcap = softcap
        self.slope = hidden.new_empty(rows, len(weight)) if softcap and any(needs) else None

    def __iter__(self) -> Any:
        """Yield (start, stop, logits [stop - start, V])."""
        for start in range(0, len(self.hidden), self.size):
            stop = min(start + self.size, len(self.hidden))
            buffer = self.buffer[: stop - start]
            logits = output_product(self.hidden[start:stop], self.weight, buffer)
            if self.softcap:
                bounded = logits.div_(self.softcap).tanh_()
                if self.slope is not None:
                    # d tanh(x) / dx
                    torch.square(bounded, out=self.slope[: stop - start]).neg_().add_(1)
                bounded.mul_(self.softcap)
            yield start, stop, logits

    def gradient(self, start: int, stop: int) -> Tensor:
        """Return the memory of the gradient of a chunk's logits, [stop - start, V]."""
        size = self.buffer.shape[1]
        return self.buffer[: stop - start].view(self.hidden.dtype)[:, :size]

    def backward(self, start: int, stop: int) -> None:
        gradient = self.gradient(start, stop)
        if self.slope is not None:
            gradient = gradient.mul_(self.slope[: stop - start])
        with _full_precision_sums():
            if self.grad_hidden is not None:
                torch.mm(gradient, self.weight, out=self.grad_hidden[start:stop])
            if self.grad_weight is not None:
                _add_product(self.grad_weight, gradient, self.hidden[start:stop], int(start > 0))

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Return them in the dtypes of hidden and weight; None if not needed."""
        weight = self.grad_weight
        return self.grad_hidden, None if weight is None else weight.to(self.dtype)


def _add_product(total: Tensor, gradient: Tensor, hidden: Tensor, beta: int) -> None:
    left, dtype = gradient.T, total.dtype
    if hidden.dtype != dtype and hidden.device.type == "cuda":
        torch.addmm(total, left, hidden, out_dtype=dtype, beta=beta, out=total)
    else:
        total.addmm_(left.to(dtype), hidden.to(dtype), beta=beta)


@contextlib.contextmanager
def _full_precision_sums() -> Iterator[None]:
    """Let cuBLAS add the parts of a split sum in float32; it may use the dtype of the result."""
    matmul = torch.backends.cuda.matmul
    names = [f"allow_{x}_reduced_precision_reduction" for x in ("bf16", "fp16")]
    allowed = [x for x in names if getattr(matmul, x)]
    for name in allowed:
        setattr(matmul, name, False)
    try:
        yield
    finally:
        for name in allowed:
            setattr(matmul, name, True)
