"""The checked arguments of ops.policy_gradient_loss besides the logits."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import (
    check_choice,
    check_finite,
    check_flag,
    check_number,
    check_tensor,
    is_host_readable,
    is_integer,
)
from maxrl_fast.algorithms.losses.registry import TokenLoss, find_loss, learns_without_advantage

KL_ESTIMATORS = ("k1", "k2", "k3", "k3+")
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_constant"]
AGGREGATIONS = get_args(Aggregation)


# not frozen, like TokenBatch: each is made twice a call, and a frozen one takes 5 us longer
@dataclass
class LossTerms:
    loss: str
    clip_low: float
    clip_high: float
    dual_clip: float  # infinite: no limit
    kl: str
    kl_coef: float
    entropy_coef: float

    @property
    def needs_every_row(self) -> bool:
        """Whether tokens with advantage 0 have a gradient too."""
        return self.kl_coef != 0 or self.entropy_coef != 0


@dataclass
class TokenBatch:
    """Tokens of packed sequences. Floating tensors are float32, or float64 with float64 logits."""

    targets: Tensor  # [T] int64
    cu_seqlens: Tensor  # [S+1] int64
    advantages: Tensor  # [T] if advantages_per_token, else [S]
    advantages_per_token: bool
    importance_weights: Tensor | None  # [T] if importance_weights_per_token, else [S]
    importance_weights_per_token: bool
    old_logprobs: Tensor | None  # [T]
    ref_logprobs: Tensor | None  # [T]
    temperature: float | Tensor  # or [T]
    mask: Tensor | None  # [T] bool
    sequence_tokens: Tensor | None  # [S] int64, number of unmasked tokens, for each sequence's mean
    denominator: Tensor  # [] float64
    sequence_log_ratio: Tensor | None = None  # [S], for gspo

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    def by_token(self, per_sequence: Tensor) -> Tensor:
        """Repeat one number per sequence [S] for each of its tokens [T]."""
        return torch.repeat_interleave(per_sequence, self.cu_seqlens.diff(), output_size=len(self))

    def factors(self) -> list[Tensor]:
        factors = [self.advantages if self.advantages_per_token else self.by_token(self.advantages)]
        if self.importance_weights is not None:
            weights = self.importance_weights
            factors.append(weights if self.importance_weights_per_token else self.by_token(weights))
        return factors

    def rows(self, start: int, stop: int) -> "TokenBatch":
        """Return tokens `start` to `stop - 1`; sequences outside become empty."""
        cu_seqlens = (self.cu_seqlens - start).clamp(0, stop - start)
        return self._with_tokens(lambda values: values[start:stop], cu_seqlens)

    def take(self, index: Tensor) -> "TokenBatch":
        """Return the tokens at an ascending int64 `index`. All sequences stay."""
        return self._with_tokens(
            lambda values: values[index], torch.searchsorted(index, self.cu_seqlens)
        )

    def _with_tokens(self, choose: Callable[[Tensor], Tensor], cu_seqlens: Tensor) -> "TokenBatch":
        per_token = ["targets", "old_logprobs", "ref_logprobs", "mask"]
        per_token += ["advantages"] * self.advantages_per_token
        per_token += ["importance_weights"] * self.importance_weights_per_token
        per_token += ["temperature"] * isinstance(self.temperature, Tensor)
        chosen: dict[str, Any] = {
            name: choose(values)
            for name in per_token
            if (values := getattr(self, name)) is not None
        }
        return replace(self, cu_seqlens=cu_seqlens, **chosen)

    def counted(self) -> Tensor:
        return torch.ones_like(self.targets, dtype=torch.bool) if self.mask is None else self.mask

    def unmasked_temperature(self) -> float | Tensor:
        """Return the temperature, 1 for masked tokens, whose own may be anything."""
        tau = self.temperature
        return tau.where(self.counted(), 1.0) if isinstance(tau, Tensor) else tau

    def needed_rows(self, terms: LossTerms, by_sequence: bool) -> Tensor:
        """Return which tokens [T] the loss reads: those with a gradient.

        A sequence ratio reads all tokens of a sequence, unless all of them have zero gradient.
        """
        keep = self.counted()
        of_tokens = self.advantages_per_token or self.importance_weights_per_token
        if terms.needs_every_row or (by_sequence and of_tokens):
            return keep
        for factor in self.factors():
            keep = keep & (factor != 0)
        return keep

    def log_ratio_of_sequences(self, logprobs: Tensor) -> Tensor:
        """Return the mean log-ratio of each sequence [S] over unmasked tokens."""
        assert self.old_logprobs is not None
        keep = self.counted()
        # Not index_add, which adds in a varying order on a GPU.
        sums = _sums(torch.where(keep, logprobs - self.old_logprobs, 0.0).double(), self.cu_seqlens)
        return (sums / _sums(keep.double(), self.cu_seqlens).clamp_min(1)).to(logprobs.dtype)


def _sums(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return the sum of values [T] over each sequence [S]."""
    return torch.segment_reduce(values, "sum", offsets=cu_seqlens, initial=0.0)


def prepare(
    logits_dtype: torch.dtype,
    device: torch.device,
    shape: tuple[int, int],
    targets: Tensor,
    advantages: Tensor,
    cu_seqlens: Tensor,
    *,
    advantages_per_token: bool | None,
    old_logprobs: Tensor | None,
    ref_logprobs: Tensor | None,
    importance_weights: Tensor | None,
    importance_weights_per_token: bool | None,
    loss: str | Callable[..., Tensor],
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    kl: str,
    kl_coef: float,
    entropy_coef: float,
    loss_options: Mapping[str, float] | None,
    temperature: float | Tensor,
    aggregation: str,
    mask: Tensor | None,
    denominator: float | Tensor | None,
) -> tuple[TokenBatch, LossTerms, TokenLoss, dict[str, float]]:
    """Check the arguments of policy_gradient_loss for T, V = shape, and convert them for the
    kernels."""
    row = find_loss(loss)
    options = row.resolve(loss_options)
    learns_without_advantage(row, tuple(options.items()))  # raises if the function fails
    terms = loss_terms(row.name, clip_low, clip_high, dual_clip, kl, kl_coef, entropy_coef)
    check_choice("aggregation", aggregation, AGGREGATIONS)
    if aggregation != (needed := row.aggregation or aggregation):
        wanted = f"{needed} for {row.name}, whose loss it is a part of"
        raise ValueError(f"aggregation must be {wanted}, got {aggregation}")
    if terms.kl_coef and ref_logprobs is None:
        raise ValueError("kl_coef is not 0, so ref_logprobs must be given")
    if aggregation == "seq_sum_constant" and denominator is None:
        raise ValueError("aggregation 'seq_sum_constant' needs a denominator")
    check_tensor("advantages", advantages, device, "the logits are")
    check_tokens(shape[0], device, mask=mask, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)
    check_rows(shape, targets, temperature, device, mask)
    check_sequences(cu_seqlens, shape[0], device)
    per_token = _is_per_token("advantages", advantages, advantages_per_token, cu_seqlens, shape[0])
    weights_per_token = False
    if importance_weights is not None:
        check_tensor("importance_weights", importance_weights, device, "the logits are")
        name, given = "importance_weights", importance_weights_per_token
        weights_per_token = _is_per_token(name, importance_weights, given, cu_seqlens, shape[0])
        if is_host_readable(importance_weights):
            of_weights = mask if weights_per_token else None
            is_below = importance_weights.float() < 0
            check_values(name, importance_weights, "at least 0", is_below, of_weights)
    real = real_dtype(logits_dtype)

    def cast(values: Tensor) -> Tensor:
        return values.detach().to(real).contiguous()

    cu_seqlens = cu_seqlens.to(torch.int64).contiguous()
    sequence_tokens = None
    if aggregation == "seq_mean_token_mean":
        lengths = cu_seqlens.diff()
        sequence_tokens = lengths if mask is None else _sums(mask.double(), cu_seqlens).long()
    batch = TokenBatch(
        targets=targets.to(torch.int64).contiguous(),
        cu_seqlens=cu_seqlens,
        advantages=cast(advantages),
        advantages_per_token=per_token,
        importance_weights=None if importance_weights is None else cast(importance_weights),
        importance_weights_per_token=weights_per_token,
        old_logprobs=None if old_logprobs is None else cast(old_logprobs),
        ref_logprobs=None if ref_logprobs is None else cast(ref_logprobs),
        temperature=cast(temperature) if isinstance(temperature, Tensor) else float(temperature),
        mask=None if mask is None else mask.contiguous(),
        sequence_tokens=sequence_tokens,
        denominator=loss_denominator(
            denominator, aggregation, shape[0], len(cu_seqlens) - 1, mask, device
        ),
    )
    return batch, terms, row, options


def check_tokens(
    num_tokens: int, device: torch.device, *, mask: Tensor | None, **per_token: Tensor | None
) -> None:
    for name, values in per_token.items():
        if values is not None:
            check_tensor(name, values, device, "the logits are")
            if values.shape != (num_tokens,):
                raise ValueError(
                    f"{name} must be [T] = [{num_tokens}], got the shape {tuple(values.shape)}"
                )
    if mask is not None:
        check_tensor("mask", mask, device, "the logits are")
        if mask.dtype != torch.bool or mask.shape != (num_tokens,):
            got = f"{mask.dtype} of shape {tuple(mask.shape)}"
            raise ValueError(f"mask must be bool [T] = [{num_tokens}], got {got}")


def _is_per_token(
    name: str, values: Tensor, given: bool | None, cu_seqlens: Tensor, num_tokens: int
) -> bool:
    """Return whether `values` are per token [T], not per sequence [S].

    If T = S and no keyword is given, both agree only if every sequence has one token; a GPU cannot
    check that without waiting, so it is an error there.
    """
    num_sequences, keyword = len(cu_seqlens) - 1, f"{name}_per_token"
    by_sequence, by_token = f"[S] = [{num_sequences}]", f"[T] = [{num_tokens}]"
    sizes, wanted = [num_sequences, num_tokens], f"{by_sequence} or {by_token}"
    if given is not None:
        check_flag(keyword, given)
        sizes, wanted = ([num_tokens], by_token) if given else ([num_sequences], by_sequence)
    if values.dim() != 1 or len(values) not in sizes:
        raise ValueError(f"{name} must be {wanted}, got the shape {tuple(values.shape)}")
    if given is not None:
        return given
    if num_tokens == num_sequences > 0 and not (
        is_host_readable(cu_seqlens) and bool((cu_seqlens.diff() == 1).all())
    ):
        raise ValueError(
            f"{name} may have one number per token or one per response, since T = S = "
            f"{num_tokens}: give {keyword}=True or {keyword}=False"
        )
    return len(values) != num_sequences


def loss_terms(
    loss: str,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
    kl: str,
    kl_coef: float,
    entropy_coef: float,
) -> LossTerms:
    check_choice("kl", kl, KL_ESTIMATORS)
    return LossTerms(
        loss,
        check_number("clip_low", clip_low, "a number of at least 0", lambda x: x >= 0),
        check_number("clip_high", clip_high, "a number of at least 0", lambda x: x >= 0),
        math.inf
        if dual_clip is None
        else check_number("dual_clip", dual_clip, "a number above 1", lambda x: x > 1),
        kl,
        check_finite("kl_coef", kl_coef),
        check_finite("entropy_coef", entropy_coef),
    )


def check_values(
    name: str, values: Tensor, wanted: str, is_wrong: Tensor, mask: Tensor | None
) -> None:
    is_wrong = is_wrong if mask is None else is_wrong & mask
    if bool(is_wrong.any()):
        first = int(is_wrong.nonzero()[0])
        raise ValueError(f"{name} must be {wanted}, got {values[first].item()} at {first}")


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which logits of `dtype` are computed."""
    return torch.promote_types(dtype, torch.float32)


def check_rows(
    shape: tuple[int, int],
    targets: Tensor,
    temperature: float | Tensor,
    device: torch.device,
    mask: Tensor | None = None,
) -> None:
    check_tensor("targets", targets)
    if targets.shape != (shape[0],) or targets.is_floating_point() or targets.device != device:
        raise ValueError(
            f"targets must be integers [T] = [{shape[0]}] on {device}, got {targets.dtype} of "
            f"shape {tuple(targets.shape)} on {targets.device}"
        )
    check_temperature(temperature, shape[0], device, mask)


def check_temperature(
    temperature: float | Tensor, num_tokens: int, device: torch.device, mask: Tensor | None
) -> None:
    wanted = "a finite number above 0"
    if isinstance(temperature, Tensor):
        check_tensor("temperature", temperature)
        if temperature.shape != (num_tokens,) or temperature.device != device:
            raise ValueError(
                f"temperature must be a number or [T] = [{num_tokens}] on {device}, got the shape "
                f"{tuple(temperature.shape)} on {temperature.device}"
            )
        if is_host_readable(temperature):
            tau = temperature.detach().double()
            is_wrong = ~((tau > 0) & (tau < math.inf))
            check_values("temperature", temperature, wanted, is_wrong, mask)
    else:
        check_number("temperature", temperature, wanted, lambda x: 0 < x < math.inf)


def check_sequences(cu_seqlens: Tensor, num_tokens: int, device: torch.device) -> None:
    """On a GPU the values are not read."""
    check_tensor("cu_seqlens", cu_seqlens)
    is_vector = cu_seqlens.dim() == 1 and len(cu_seqlens) > 0
    if not is_vector or not is_integer(cu_seqlens) or cu_seqlens.device != device:
        raise ValueError(
            f"cu_seqlens must be integers [S+1] on {device}, got {cu_seqlens.dtype} of shape "
            f"{tuple(cu_seqlens.shape)} on {cu_seqlens.device}"
        )
    if not is_host_readable(cu_seqlens):
        return
    bounds = cu_seqlens.to(torch.int64)
    # Compared, not subtracted: differences of large or narrow integers overflow.
    falls = bounds[1:] < bounds[:-1]
    if int(bounds[0]) != 0 or int(bounds[-1]) != num_tokens or bool(falls.any()):
        got = f"{bounds[:8].tolist()}"
        got += "" if len(bounds) <= 8 else f" and {len(bounds) - 8} more"
        if bool(falls.any()):
            first = int(falls.nonzero()[0])
            got += f", where {int(bounds[first])} is followed by {int(bounds[first + 1])}"
        raise ValueError(f"cu_seqlens must rise from 0 to T = {num_tokens}, got {got}")


def loss_denominator(
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
    tensor, number = split_denominator(given, device)
    return torch.full((), number, dtype=torch.float64, device=device) if tensor is None else tensor


def split_denominator(given: float | Tensor, device: torch.device) -> tuple[Tensor | None, float]:
    """Return float64 [] on the device, or None and a number."""
    number: Any = given
    if isinstance(given, Tensor):
        check_tensor("denominator", given)
        if given.numel() != 1 or given.device not in (device, torch.device("cpu")):
            wanted = "one number on the logits' device or a CPU"
            got = f"the shape {tuple(given.shape)} on {given.device}"
            raise ValueError(f"denominator must be {wanted}, got {got}")
        if not is_host_readable(given):
            return given.detach().to(device, torch.float64).reshape(()), 1.0
        number = float(given.detach())
    wanted = "a finite number above 0"
    return None, check_number("denominator", number, wanted, lambda x: 0 < x < math.inf)
