"""What the token losses are made of besides logits: the checked arguments of ops.policy_gradient_loss."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.ops.arguments import can_look_at, check_choice, check_finite, check_number, check_tensor, is_integer

LOSSES = ("reinforce", "ppo", "cispo", "gspo")
KL_ESTIMATORS = ("k1", "k2", "k3", "k3+")
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_constant")


@dataclass(frozen=True)
class LossTerms:
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
        per_sequence = ["sequence_tokens", "sequence_log_ratio"]
        for name in ("advantages", "importance_weights"):
            values = getattr(self, name)
            (per_token if values is not None and self.is_per_token(values) else per_sequence).append(name)
        if isinstance(self.temperature, Tensor):
            per_token.append("temperature")
        chosen = {name: choose(values) for name in per_token if (values := getattr(self, name)) is not None}
        if len(chosen["targets"]) == self.num_sequences:
            # One number a token must not pass for one a sequence: an empty sequence more tells them apart.
            cu_seqlens = torch.cat([cu_seqlens, cu_seqlens[-1:]])
            for name in per_sequence:
                if (values := getattr(self, name)) is not None:
                    chosen[name] = torch.cat([values, values.new_ones(1)])
        return replace(self, cu_seqlens=cu_seqlens, **chosen)

    def has_gradient(self, terms: LossTerms) -> Tensor:
        """Which tokens [T] have a gradient at all."""
        keep = torch.ones_like(self.targets, dtype=torch.bool) if self.mask is None else self.mask
        if terms.needs_every_row:
            return keep
        for factor in (self.advantages, self.importance_weights):
            if factor is not None:
                keep = keep & self.by_token(factor != 0)
        return keep

    def needed_rows(self, terms: LossTerms) -> Tensor:
        """Which tokens [T] the loss needs: those that can teach, and for gspo the rest of their sequences that counts."""
        factors = [self.advantages] + ([] if self.importance_weights is None else [self.importance_weights])
        if terms.loss == "gspo" and any(self.is_per_token(factor) for factor in factors):
            return torch.ones_like(self.targets, dtype=torch.bool) if self.mask is None else self.mask
        return self.has_gradient(terms)

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
) -> tuple[TokenBatch, LossTerms]:
    """Check the arguments of ops.policy_gradient_loss for T, V = shape, and bring them to the kernels' types.

    Raises:
        ValueError, TypeError: as policy_gradient_loss says.
    """
    terms = _terms(loss, clip_low, clip_high, dual_clip, kl, kl_coef, entropy_coef)
    check_choice("aggregation", aggregation, AGGREGATIONS)
    if terms.kl_coef and ref_logprobs is None:
        raise ValueError("kl_coef is not 0, so ref_logprobs must be given")
    if aggregation == "seq_sum_constant" and denominator is None:
        raise ValueError("aggregation 'seq_sum_constant' needs a denominator")
    for name, values in (
        ("advantages", advantages),
        ("importance_weights", importance_weights),
        ("old_logprobs", old_logprobs),
        ("ref_logprobs", ref_logprobs),
        ("mask", mask),
    ):
        if values is not None or name == "advantages":
            check_tensor(name, values, device, "the logits are")
    real = real_dtype(logits_dtype)
    num_tokens = shape[0]
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (num_tokens,)):
        raise ValueError(f"mask must be bool [T] = [{num_tokens}], got {mask.dtype} of shape {tuple(mask.shape)}")
    check_rows(shape, targets, temperature, device, mask)
    check_sequences(cu_seqlens, num_tokens, device)
    num_sequences = len(cu_seqlens) - 1
    for name, values in (("advantages", advantages), ("importance_weights", importance_weights)):
        if values is not None and (values.dim() != 1 or len(values) not in (num_tokens, num_sequences)):
            raise ValueError(
                f"{name} must be [S] = [{num_sequences}] or [T] = [{num_tokens}], got the shape {tuple(values.shape)}"
            )
    for name, values in (("old_logprobs", old_logprobs), ("ref_logprobs", ref_logprobs)):
        if values is not None and values.shape != (num_tokens,):
            raise ValueError(f"{name} must be [T] = [{num_tokens}], got the shape {tuple(values.shape)}")
    if importance_weights is not None and can_look_at(importance_weights):
        of_tokens = mask if len(importance_weights) != num_sequences else None
        _check_values("importance_weights", importance_weights, "at least 0", importance_weights.float() < 0, of_tokens)

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
    return batch, terms


def _terms(
    loss: str,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    kl: str,
    kl_coef: float,
    entropy_coef: float,
) -> LossTerms:
    check_choice("loss", loss, LOSSES)
    check_choice("kl", kl, KL_ESTIMATORS)
    return LossTerms(
        loss,
        check_number("clip_low", clip_low, "a number of at least 0", lambda x: x >= 0),
        check_number("clip_high", clip_high, "a number of at least 0", lambda x: x >= 0),
        math.inf if dual_clip is None else check_number("dual_clip", dual_clip, "a number above 1", lambda x: x > 1),
        kl,
        check_finite("kl_coef", kl_coef),
        check_finite("entropy_coef", entropy_coef),
    )


def _check_values(name: str, values: Tensor, wanted: str, is_wrong: Tensor, mask: Tensor | None) -> None:
    """Raise ValueError for the first number that is wrong; what is masked may be anything."""
    is_wrong = is_wrong if mask is None else is_wrong & mask
    if bool(is_wrong.any()):
        first = int(is_wrong.nonzero()[0])
        raise ValueError(f"{name} must be {wanted}, got {values[first].item()} at {first}")


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """What logits of `dtype` are computed in."""
    return torch.promote_types(dtype, torch.float32)


def check_rows(
    shape: tuple[int, int],
    targets: Tensor,
    temperature: float | Tensor,
    device: torch.device,
    mask: Tensor | None = None,
) -> None:
    """Raise ValueError where targets or temperature do not go with T, V = shape."""
    check_tensor("targets", targets)
    if targets.shape != (shape[0],) or targets.is_floating_point() or targets.device != device:
        raise ValueError(
            f"targets must be whole numbers [T] = [{shape[0]}] on {device}, got {targets.dtype} of shape "
            f"{tuple(targets.shape)} on {targets.device}"
        )
    if isinstance(temperature, Tensor):
        check_tensor("temperature", temperature)
        if temperature.shape != (shape[0],) or temperature.device != device:
            raise ValueError(
                f"temperature must be a number or [T] = [{shape[0]}] on {device}, got the shape "
                f"{tuple(temperature.shape)} on {temperature.device}"
            )
        if can_look_at(temperature):
            tau = temperature.detach().double()
            is_wrong = ~((tau > 0) & (tau < math.inf))
            _check_values("temperature", temperature, "a finite number above 0", is_wrong, mask)
    else:
        check_number("temperature", temperature, "a finite number above 0", lambda x: 0 < x < math.inf)


def check_sequences(cu_seqlens: Tensor, num_tokens: int, device: torch.device) -> None:
    """Raise ValueError where cu_seqlens cannot be; its values are looked at on a CPU only, where that waits for nothing."""
    check_tensor("cu_seqlens", cu_seqlens)
    if cu_seqlens.dim() != 1 or not len(cu_seqlens) or not is_integer(cu_seqlens) or cu_seqlens.device != device:
        raise ValueError(
            f"cu_seqlens must be whole numbers [S+1] on {device}, got {cu_seqlens.dtype} of shape "
            f"{tuple(cu_seqlens.shape)} on {cu_seqlens.device}"
        )
    if not can_look_at(cu_seqlens):
        return
    bounds = cu_seqlens.to(torch.int64)
    # Compared and not subtracted: differences of numbers of few bits, or of large ones, overflow.
    falls = bounds[1:] < bounds[:-1]
    if int(bounds[0]) != 0 or int(bounds[-1]) != num_tokens or bool(falls.any()):
        got = f"{bounds[:8].tolist()}" + ("" if len(bounds) <= 8 else f" and {len(bounds) - 8} more")
        if bool(falls.any()):
            first = int(falls.nonzero()[0])
            got += f", where {int(bounds[first])} is followed by {int(bounds[first + 1])}"
        raise ValueError(f"cu_seqlens must rise from 0 to T = {num_tokens}, got {got}")


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
    return as_denominator(given, device)


def as_denominator(given: float | Tensor, device: torch.device) -> Tensor:
    """[] float64 on the device.

    Raises:
        ValueError: on what is not one number above 0.
    """
    if not isinstance(given, Tensor):
        given = check_number("denominator", given, "a finite number above 0", lambda x: 0 < x < math.inf)
        return torch.full((), given, dtype=torch.float64, device=device)
    check_tensor("denominator", given)
    if given.numel() != 1 or given.device not in (device, torch.device("cpu")):
        where = "on the logits' device or a CPU"
        raise ValueError(f"denominator must be one number {where}, got the shape {tuple(given.shape)} on {given.device}")
    if can_look_at(given) and not 0 < float(given.detach()) < math.inf:
        raise ValueError(f"denominator must be a finite number above 0, got {float(given.detach())}")
    return given.detach().to(device, torch.float64).reshape(())
