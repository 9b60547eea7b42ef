"""Logits of hidden states, a chunk at a time, and losses that are functions of Tokens, which need
one more multiplication with the output matrix than fused losses."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from maxrl_fast.algorithms.arguments import check_integer, check_number, check_tensor
from maxrl_fast.algorithms.losses import checked
from maxrl_fast.algorithms.tokens import MAX_LOG_RATIO, Tokens, limited
from maxrl_fast.ops import dispatch
from maxrl_fast.ops.loss_kernel import DTYPES, LossInputs, LossSums, real_dtype
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


_COPIES = 8  # float32 copies of a chunk of logits that functions of them and gradients need


def tokens_of(inputs: LossInputs) -> Tokens:
    """Return checked arguments as Tokens whose log-probs are not known yet: what belongs to a
    response, a mask or an average is a number of each token."""
    (factors, importance), mask, divisor = inputs.factors(), inputs.mask, inputs.denominator
    if isinstance(divisor, Tensor):
        weights = divisor.reciprocal().expand(len(inputs))
    else:  # without a copy from the host, which would wait for a GPU
        assert divisor is not None, "inputs must be checked"
        weights = torch.full_like(factors, 1 / divisor)
    if inputs.terms.aggregation == "seq_mean_token_mean":
        weights = weights / inputs.by_tokens(inputs.counts().clamp_min(1))
    mask = torch.ones_like(factors, dtype=torch.bool) if mask is None else mask

    def kept(x: Tensor | None) -> Tensor:  # masked numbers may be anything
        return torch.zeros_like(factors) if x is None else x.detach().double().where(mask, 0.0)

    return Tokens(
        *(kept(None), kept(None), kept(inputs.old_logprobs), kept(inputs.ref_logprobs)),
        *(kept(factors), mask, inputs.cu_seqlens, 1.0 if importance is None else kept(importance)),
        targets=inputs.targets.where(mask, 0),
        weights=kept(weights),
    )


def with_logprobs(inputs: LossInputs, tokens: Tokens, logprobs: Tensor, entropy: Tensor) -> Tokens:
    """Return the tokens with log-probs and entropies [T], which may have a gradient."""
    logprobs, entropy = (x.double().where(tokens.mask, 0.0) for x in (logprobs, entropy))
    old = logprobs.detach() if inputs.old_logprobs is None else tokens.old_logprobs
    ref = old if inputs.ref_logprobs is None else tokens.ref_logprobs
    return replace(tokens, logprobs=logprobs, entropy=entropy, old_logprobs=old, ref_logprobs=ref)


def by_function(
    inputs: LossInputs,
    tokens: Tokens,
    logprobs: Callable[[], tuple[Tensor, Tensor]],
    of_logits: Callable[[], Tensor],
) -> Tensor:
    """Return the LossSums [10] of a loss that is a function, by log-probs and entropies, or where
    it reads logits by `of_logits`. First what it reads of all tokens is found: its statistics, or
    the mask and the loss that it is for."""
    terms, spec = inputs.terms, inputs.terms.spec
    compares = spec.over_batch and tokens.statistics is None
    if compares or not spec.reads_logits:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not spec.reads_logits):
            given = logprobs()
    if compares:
        compared = with_logprobs(inputs, tokens, *(x.detach() for x in given))
        found = spec.compare(compared, dict(terms.options))
        if spec.masks:
            inputs.terms, tokens.advantages = terms.of_masked, tokens.advantages * found
        else:
            tokens.statistics = found
    return of_logits() if spec.reads_logits else function_loss(inputs, tokens, *given)


def function_loss(
    inputs: LossInputs,
    tokens: Tokens,
    logprobs: Tensor,
    entropy: Tensor,
    logits: Tensor | None = None,
) -> Tensor:
    """Return the LossSums [10] of a loss that is a function, with the gradient of the first.
    logits: [T, V] divided by the temperature, for a loss that reads them."""
    terms, tokens = inputs.terms, with_logprobs(inputs, tokens, logprobs, entropy)
    function = terms.spec.bind(dict(terms.options), **terms.clips)
    # tokens in the loss and the metrics; the others' values may be NaN
    counts = tokens.mask
    if not terms.needs_every_token:
        counts = counts & (tokens.advantages != 0)
    values = function(tokens) if logits is None else function(tokens, logits)
    values = checked(terms.spec, values, tokens)
    difference = (tokens.logprobs - tokens.old_logprobs).detach()
    log_ratio = difference if tokens.metric_log_ratio is None else tokens.metric_log_ratio
    is_limited = log_ratio.abs() > MAX_LOG_RATIO
    divergence = torch.zeros_like(difference)
    if inputs.ref_logprobs is not None:
        to_ref = tokens.logprobs - tokens.ref_logprobs
        is_limited = is_limited | (to_ref.detach().abs() > MAX_LOG_RATIO)
        divergence = kl_estimates(limited(to_ref), terms.kl)
        values = values + terms.kl_coef * divergence if terms.kl_coef else values
    if terms.entropy_coef:
        values = values - terms.entropy_coef * tokens.entropy

    def total(x: Tensor) -> Tensor:
        return torch.where(counts, x.double(), 0.0).sum()

    sums = LossSums(
        loss=torch.where(counts, values * tokens.weights, 0.0).sum(),
        tokens=tokens.mask.sum().double(),
        dropped_tokens=(tokens.mask & ~counts).sum().double(),
        ratio=total(limited(log_ratio).exp()),
        ratio_clamped=total(is_limited),
        clipped_low=total(tokens.clipped_low),
        clipped_high=total(tokens.clipped_high),
        kl=total(divergence.detach()),
        entropy=total(tokens.entropy.detach()),
        logprob_diff=total(difference.abs()),
    )
    return torch.stack(sums)


def kl_estimates(d: Tensor, kind: str) -> Tensor:
    """Return estimates [T] of KL(policy || reference) from d = logp - ref (Schulman 2020)."""
    if kind == "k1":
        return d
    k2 = d.square() / 2
    if kind == "k2":
        return k2
    k3 = torch.expm1(-d) + d
    return k3 if kind == "k3" else k2 + (k3 - k2).detach()


def token_logprobs_reference(
    logits: Tensor, targets: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    return _logprobs(scaled(logits, temperature), targets)


def _logprobs(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(logits, -1)
    # A token masked out by -inf logits has p log p = 0, not NaN.
    entropy = -(log_p.exp() * log_p.clamp_min(torch.finfo(log_p.dtype).min)).sum(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], entropy


def scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    real = real_dtype(logits.dtype)
    return logits.to(real) / temperature[:, None].to(real)


def loss_of_logits(inputs: LossInputs, tokens: Tokens, part: slice, logits: Tensor) -> Tensor:
    """Return the LossSums [10] of a part of the tokens."""
    own = tokens.at(part)
    return function_loss(inputs, own, *_logprobs(logits, own.targets), logits)


def by_chunks(
    hidden: Tensor,
    weight: Tensor,
    function: Callable[[slice, Tensor], Tensor],
    temperature: Tensor,
    softcap: float,
) -> list[Tensor]:
    """Return function(part, logits [C, V]) of each part of the tokens, for the logits hidden @
    weight.T divided by the temperature [T]; the backward pass recomputes them."""
    copies = _COPIES * real_dtype(hidden.dtype).itemsize // logits_dtype(hidden).itemsize
    size = max(default_chunk(hidden, len(weight)) // copies, 1)

    def of_part(hidden: Tensor, weight: Tensor, part: slice) -> Tensor:
        return function(part, scaled(capped_logits(hidden, weight, softcap), temperature[part]))

    parts = [slice(a, min(a + size, len(hidden))) for a in range(0, max(len(hidden), 1), size)]
    return [checkpoint(of_part, hidden[x], weight, x, use_reentrant=False) for x in parts]
