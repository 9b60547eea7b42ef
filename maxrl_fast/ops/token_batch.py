"""What the token losses are made of besides logits: the checked arguments of ops.policy_gradient_loss."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

LOSSES = ("reinforce", "ppo", "cispo", "gspo")
KL_ESTIMATORS = ("k1", "k2", "k3", "k3+")
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_constant")


@dataclass(frozen=True)
class LossOptions:
    """The choices that make a loss. Every token's loss is weighted by TokenBatch.denominator and sequence_tokens."""

    loss: str
    clip_low: float
    clip_high: float
    dual_clip: float  # infinite: not limited
    kl: str
    kl_coef: float
    entropy_coef: float

    @property
    def needs_every_row(self) -> bool:
        """Whether a token with advantage 0 has a gradient too."""
        return self.kl_coef != 0 or self.entropy_coef != 0


@dataclass(frozen=True)
class TokenBatch:
    """Tokens of packed sequences; floating tensors are float32, or float64 with float64 logits."""

    targets: Tensor  # [T] int64
    cu_seqlens: Tensor  # [S+1] int64
    advantages: Tensor  # [S] or [T]
    importance_weights: Tensor | None  # [S] or [T]
    old_logprobs: Tensor | None  # [T]
    ref_logprobs: Tensor | None  # [T]
    temperature: float | Tensor  # or [T]
    mask: Tensor | None  # [T] bool
    sequence_tokens: Tensor | None  # [S] int64, tokens that count, where the mean of each sequence is taken
    denominator: Tensor  # [] float64
    sequence_log_ratio: Tensor | None = None  # [S], for gspo

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    def is_per_token(self, values: Tensor) -> bool:
        """Whether `values` has one number a token; as many as sequences are one a sequence."""
        return len(values) != self.num_sequences

    def by_token(self, values: Tensor) -> Tensor:
        """`values` [S] or [T] as [T]."""
        if self.is_per_token(values):
            return values
        return torch.repeat_interleave(values, self.cu_seqlens.diff(), output_size=len(self))

    def rows(self, start: int, stop: int) -> "TokenBatch":
        """Tokens `start` to `stop - 1`, of all sequences: those that lie elsewhere become empty."""
        cu_seqlens = (self.cu_seqlens - start).clamp(0, stop - start)
        return self._with_tokens(lambda values: values[start:stop], cu_seqlens)

    def take(self, index: Tensor) -> "TokenBatch":
        """The tokens of an ascending `index` int64."""
        return self._with_tokens(lambda values: values[index], torch.searchsorted(index, self.cu_seqlens))

    def _with_tokens(self, choose: Any, cu_seqlens: Tensor) -> "TokenBatch":
        per_token = ["targets", "old_logprobs", "ref_logprobs", "mask"]
        for name in ("advantages", "importance_weights"):
            if (values := getattr(self, name)) is not None and self.is_per_token(values):
                per_token.append(name)
        if isinstance(self.temperature, Tensor):
            per_token.append("temperature")
        chosen = {name: choose(values) for name in per_token if (values := getattr(self, name)) is not None}
        return replace(self, cu_seqlens=cu_seqlens, **chosen)

    def can_teach(self, options: LossOptions) -> Tensor:
        """Which tokens [T] have a gradient at all."""
        keep = torch.ones_like(self.targets, dtype=torch.bool) if self.mask is None else self.mask
        if options.needs_every_row:
            return keep
        for factor in (self.advantages, self.importance_weights):
            if factor is not None:
                keep = keep & self.by_token(factor != 0)
        return keep

    def needed_rows(self, options: LossOptions) -> Tensor:
        """Which tokens [T] the loss needs: those that can teach, and for gspo the rest of their sequences that counts."""
        factors = [self.advantages] + ([] if self.importance_weights is None else [self.importance_weights])
        if options.loss == "gspo" and any(self.is_per_token(factor) for factor in factors):
            return torch.ones_like(self.targets, dtype=torch.bool) if self.mask is None else self.mask
        return self.can_teach(options)

    def mean_log_ratio(self, logprobs: Tensor) -> Tensor:
        """The mean over each sequence's tokens that count of logprobs [T] - old_logprobs: [S]."""
        assert self.old_logprobs is not None
        log_ratio = logprobs - self.old_logprobs
        keep = torch.ones_like(self.targets, dtype=torch.bool) if self.mask is None else self.mask
        # Sums by position and not by index_add, whose order of addition a GPU leaves to chance.
        sums = _sums(torch.where(keep, log_ratio, 0.0).double(), self.cu_seqlens)
        return (sums / _sums(keep.double(), self.cu_seqlens).clamp_min(1)).to(logprobs.dtype)


def _sums(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """The sum of each sequence, [S], of values [T] in float64."""
    return torch.segment_reduce(values, "sum", offsets=cu_seqlens, initial=0.0)


def prepare(
    logits_dtype: torch.dtype,
    device: torch.device,
    shape: tuple[int, int],
    targets: Tensor,
    advantages: Tensor,
    cu_seqlens: Tensor,
    *,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    importance_weights: Tensor | None,
    loss: str,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    kl: str,
    kl_coef: float,
    entropy_coef: float,
    temperature: float | Tensor,
    aggregation: str,
    mask: Tensor | None,
    denominator: float | Tensor | None,
) -> tuple[TokenBatch, LossOptions]:
    """Check the arguments of ops.policy_gradient_loss for T, V = shape, and bring them to the kernels' types.

    Raises:
        ValueError: as policy_gradient_loss says.
    """
    for option, choice, allowed in (
        ("loss", loss, LOSSES),
        ("kl", kl, KL_ESTIMATORS),
        ("aggregation", aggregation, AGGREGATIONS),
    ):
        if choice not in allowed:
            raise ValueError(f"{option} must be one of {', '.join(allowed)}, got {choice!r}")
    if kl_coef and ref_logprobs is None:
        raise ValueError("kl_coef is not 0, so ref_logprobs must be given")
    if aggregation == "seq_sum_constant" and denominator is None:
        raise ValueError("aggregation 'seq_sum_constant' needs a denominator")
    real = real_dtype(logits_dtype)
    num_tokens, num_sequences = shape[0], len(cu_seqlens) - 1
    check_rows(shape, targets, temperature, device)
    check_sequences(cu_seqlens, num_tokens, device)
    for name, values in (("advantages", advantages), ("importance_weights", importance_weights)):
        if values is not None and (values.dim() != 1 or len(values) not in (num_tokens, num_sequences)):
            raise ValueError(
                f"{name} must be [S] = [{num_sequences}] or [T] = [{num_tokens}], got the shape {tuple(values.shape)}"
            )
    for name, values in (("old_logprobs", old_logprobs), ("ref_logprobs", ref_logprobs), ("mask", mask)):
        if values is not None and values.shape != (num_tokens,):
            raise ValueError(f"{name} must be [T] = [{num_tokens}], got the shape {tuple(values.shape)}")
    if mask is not None and mask.dtype != torch.bool:
        raise ValueError(f"mask must be bool, got {mask.dtype}")
    for name, values in (
        ("advantages", advantages),
        ("importance_weights", importance_weights),
        ("old_logprobs", old_logprobs),
        ("ref_logprobs", ref_logprobs),
        ("mask", mask),
    ):
        if values is not None and values.device != device:
            raise ValueError(f"{name} must be on {device} as the logits are, got {values.device}")

    def cast(values: Tensor | None) -> Tensor | None:
        return None if values is None else values.detach().to(real).contiguous()

    cu_seqlens = cu_seqlens.to(torch.int64).contiguous()
    sequence_tokens = None
    if aggregation == "seq_mean_token_mean":
        sequence_tokens = cu_seqlens.diff() if mask is None else _sums(mask.double(), cu_seqlens).long()
    advantages_ = cast(advantages)
    assert advantages_ is not None
    batch = TokenBatch(
        targets=targets.to(torch.int64).contiguous(),
        cu_seqlens=cu_seqlens,
        advantages=advantages_,
        importance_weights=cast(importance_weights),
        old_logprobs=cast(old_logprobs),
        ref_logprobs=cast(ref_logprobs),
        temperature=temperature.detach().to(real).contiguous() if isinstance(temperature, Tensor) else float(temperature),
        mask=None if mask is None else mask.contiguous(),
        sequence_tokens=sequence_tokens,
        denominator=_denominator(denominator, aggregation, num_tokens, num_sequences, mask, device),
    )
    limit = float("inf") if dual_clip is None else dual_clip
    return batch, LossOptions(loss, clip_low, clip_high, limit, kl, kl_coef, entropy_coef)


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """What logits of `dtype` are computed in."""
    return torch.promote_types(dtype, torch.float32)


def check_rows(shape: tuple[int, int], targets: Tensor, temperature: float | Tensor, device: torch.device) -> None:
    """Raise ValueError where targets or temperature do not go with T, V = shape."""
    if targets.shape != (shape[0],) or targets.is_floating_point() or targets.device != device:
        raise ValueError(
            f"targets must be whole numbers [T] = [{shape[0]}] on {device}, got {targets.dtype} of shape "
            f"{tuple(targets.shape)} on {targets.device}"
        )
    if isinstance(temperature, Tensor):
        if temperature.shape != (shape[0],) or temperature.device != device:
            raise ValueError(
                f"temperature must be a number or [T] = [{shape[0]}] on {device}, got the shape "
                f"{tuple(temperature.shape)} on {temperature.device}"
            )
    elif not 0 < temperature < float("inf"):
        raise ValueError(f"temperature must be a finite number above 0, got {temperature}")


def check_sequences(cu_seqlens: Tensor, num_tokens: int, device: torch.device) -> None:
    """Raise ValueError where cu_seqlens cannot be; its values are looked at on a CPU only, where that waits for nothing."""
    if cu_seqlens.dim() != 1 or not len(cu_seqlens) or cu_seqlens.is_floating_point() or cu_seqlens.device != device:
        raise ValueError(
            f"cu_seqlens must be whole numbers [S+1] on {device}, got {cu_seqlens.dtype} of shape "
            f"{tuple(cu_seqlens.shape)} on {cu_seqlens.device}"
        )
    if device.type != "cpu" or torch.compiler.is_compiling():
        return
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != num_tokens or bool((cu_seqlens.diff() < 0).any()):
        raise ValueError(f"cu_seqlens must rise from 0 to T = {num_tokens}, got {cu_seqlens.tolist()}")


def _denominator(
    given: float | Tensor | None,
    aggregation: str,
    num_tokens: int,
    num_sequences: int,
    mask: Tensor | None,
    device: torch.device,
) -> Tensor:
    if given is None:
        if aggregation == "token_mean" and mask is not None:
            return mask.sum().clamp_min(1).double()
        given = max(num_tokens if aggregation == "token_mean" else num_sequences, 1)
    if isinstance(given, Tensor):
        return given.detach().to(device, torch.float64).reshape(())
    return torch.full((), given, dtype=torch.float64, device=device)
