"""The numbers of each token that a loss is computed from, made of the arguments of
ops.policy_gradient_loss and checked once."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import (
    check_flag,
    check_number,
    check_tensor,
    is_host_readable,
    is_integer,
)
from maxrl_fast.ops.loss_terms import LossTerms


class TokenBatch(NamedTuple):
    """T tokens of S packed responses: what belongs to a response, a mask or an average has become a
    number of each token.

    The numbers are float64: they are small next to the logits.
    """

    targets: Tensor  # [T] int64
    temperature: Tensor  # [T]
    advantages: Tensor  # [T], times the importance weights
    weights: Tensor  # [T], of the token's loss in the total; 0: masked
    old_logprobs: Tensor | None  # [T]
    ref_logprobs: Tensor | None  # [T]
    sequence_log_ratio: Tensor | None  # [T], mean log-ratio of the token's response, for gspo
    cu_seqlens: Tensor  # [S+1] int64, for losses with a ratio of responses
    importance_weights: Tensor | None = None  # [T], for losses with terms beside the advantages
    statistics: Tensor | None = None  # [T, ...], of the loss's `statistics`

    def loss_mask(self) -> Tensor:
        return self.weights != 0

    def at(self, index: slice | Tensor) -> "TokenBatch":
        """Return some of the tokens. `cu_seqlens` stay those of all tokens."""
        tokens: dict[str, Any] = {
            name: x[index]
            for name, x in self._asdict().items()
            if x is not None and name != "cu_seqlens"
        }
        return self._replace(**tokens)

    def needed_rows(self, needs_every_token: bool, by_sequence: bool) -> Tensor:
        """Return which rows of logits [T] the loss reads: those with a gradient, and with a ratio
        of responses also the others of their response."""
        counted = self.loss_mask()
        if needs_every_token:
            return counted
        needed = counted & (self.advantages != 0)
        if by_sequence:
            has_gradient = _sums(needed.double(), self.cu_seqlens) > 0
            needed = counted & _by_token(has_gradient, self.cu_seqlens, len(needed))
        return needed

    def with_sequence_ratio(self, logprobs: Tensor) -> "TokenBatch":
        """Return the batch with each response's mean log-ratio over tokens that count. logprobs
        [T]: of the policy; any number or NaN where masked."""
        assert self.old_logprobs is not None
        keep = self.loss_mask()
        difference = logprobs - self.old_logprobs.to(logprobs.dtype)
        # Not index_add, which adds in a varying order on a GPU.
        sums = _sums(torch.where(keep, difference, 0.0).double(), self.cu_seqlens)
        means = sums / _sums(keep.double(), self.cu_seqlens).clamp_min(1)
        means = means.to(logprobs.dtype).double()  # [S]
        return self._replace(sequence_log_ratio=_by_token(means, self.cu_seqlens, len(keep)))


def _sums(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    return torch.segment_reduce(values, "sum", offsets=cu_seqlens, initial=0.0)


def _by_token(per_sequence: Tensor, cu_seqlens: Tensor, num_tokens: int) -> Tensor:
    """Repeat one number per sequence [S] for each of its tokens [T]."""
    return torch.repeat_interleave(per_sequence, cu_seqlens.diff(), output_size=num_tokens)


def token_batch(
    terms: LossTerms,
    shape: tuple[int, int],
    device: torch.device,
    targets: Tensor,
    advantages: Tensor,
    cu_seqlens: Tensor,
    *,
    advantages_per_token: bool | None = None,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    importance_weights: Tensor | None = None,
    importance_weights_per_token: bool | None = None,
    temperature: float | Tensor = 1.0,
    mask: Tensor | None = None,
    denominator: float | Tensor | None = None,
) -> TokenBatch:
    """Check these arguments of policy_gradient_loss for logits [T, V] = shape on the device, and
    return the numbers of each token."""
    num_tokens, aggregation = shape[0], terms.aggregation
    if terms.kl_coef and ref_logprobs is None:
        raise ValueError("kl_coef is not 0, so ref_logprobs must be given")
    if aggregation == "seq_sum_constant" and denominator is None:
        raise ValueError("aggregation 'seq_sum_constant' needs a denominator")
    check_tensor("advantages", advantages, device, "the logits are")
    logprobs = {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs}
    check_tokens(num_tokens, device, mask=mask, **logprobs)
    targets, tau = token_rows(shape, targets, temperature, device, mask)
    check_sequences(cu_seqlens, num_tokens, device)
    cu_seqlens = cu_seqlens.to(torch.int64).contiguous()

    def by_token(name: str, values: Tensor, given: bool | None) -> Tensor:
        is_per_token = _is_per_token(name, values, given, cu_seqlens, num_tokens)
        values = values.detach().double()
        if name == "importance_weights" and is_host_readable(values):
            check_values(name, values, "at least 0", values < 0, mask if is_per_token else None)
        return values if is_per_token else _by_token(values, cu_seqlens, num_tokens)

    factors, importance = by_token("advantages", advantages, advantages_per_token), None
    if importance_weights is not None:
        check_tensor("importance_weights", importance_weights, device, "the logits are")
        given = importance_weights_per_token
        importance = by_token("importance_weights", importance_weights, given)
        factors = factors * importance
    num_sequences = len(cu_seqlens) - 1
    divisor = loss_denominator(denominator, aggregation, num_tokens, num_sequences, mask, device)
    if isinstance(divisor, Tensor):
        weights = divisor.reciprocal().expand(num_tokens)
    else:
        weights = torch.full((num_tokens,), 1 / divisor, dtype=torch.float64, device=device)
    if aggregation == "seq_mean_token_mean":
        counts = cu_seqlens.diff() if mask is None else _sums(mask.double(), cu_seqlens)
        weights = weights / _by_token(counts.clamp_min(1), cu_seqlens, num_tokens)
    if mask is not None:
        weights = weights.where(mask, 0.0)
    old, ref = (None if x is None else x.detach().double().contiguous() for x in logprobs.values())
    factors, weights = factors.contiguous(), weights.contiguous()
    return TokenBatch(targets, tau, factors, weights, old, ref, None, cu_seqlens, importance)


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

    If T = S and no keyword is given, every sequence must have one token, which a GPU cannot check
    without waiting.
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


def token_rows(
    shape: tuple[int, int],
    targets: Tensor,
    temperature: float | Tensor,
    device: torch.device,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Check them, and return targets [T] int64 and temperatures [T] float64; 0 and 1 where masked,
    whose own may be anything."""
    check_tensor("targets", targets)
    if targets.shape != (shape[0],) or targets.is_floating_point() or targets.device != device:
        raise ValueError(
            f"targets must be integers [T] = [{shape[0]}] on {device}, got {targets.dtype} of "
            f"shape {tuple(targets.shape)} on {targets.device}"
        )
    tau = token_temperature(temperature, shape[0], device, mask)
    targets = targets.to(torch.int64)
    if mask is not None:
        targets, tau = targets.where(mask, 0), tau.where(mask, 1.0)
    return targets.contiguous(), tau.contiguous()


def token_temperature(
    temperature: float | Tensor, num_tokens: int, device: torch.device, mask: Tensor | None
) -> Tensor:
    """Check a temperature, one number or [T], and return it as [T] float64."""
    wanted = "a finite number above 0"
    if not isinstance(temperature, Tensor):
        number = check_number("temperature", temperature, wanted, lambda x: 0 < x < math.inf)
        return torch.full((num_tokens,), number, dtype=torch.float64, device=device)
    check_tensor("temperature", temperature)
    if temperature.shape != (num_tokens,) or temperature.device != device:
        raise ValueError(
            f"temperature must be a number or [T] = [{num_tokens}] on {device}, got the shape "
            f"{tuple(temperature.shape)} on {temperature.device}"
        )
    tau = temperature.detach().double()
    if is_host_readable(tau):
        check_values("temperature", tau, wanted, ~((tau > 0) & (tau < math.inf)), mask)
    return tau


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
) -> float | Tensor:
    if given is None:
        if aggregation == "token_mean" and mask is not None:
            return mask.sum().clamp_min(1).double()
        given = max(num_tokens if aggregation == "token_mean" else num_sequences, 1)
    return check_denominator(given, device)


def check_denominator(given: float | Tensor, device: torch.device) -> float | Tensor:
    """Return a denominator as a number where the host knows it, or as float64 [] on the device."""
    number: Any = given
    if isinstance(given, Tensor):
        check_tensor("denominator", given)
        if given.numel() != 1 or given.device not in (device, torch.device("cpu")):
            wanted = "one number on the logits' device or a CPU"
            got = f"the shape {tuple(given.shape)} on {given.device}"
            raise ValueError(f"denominator must be {wanted}, got {got}")
        if not is_host_readable(given):
            return given.detach().to(device, torch.float64).reshape(())
        number = float(given.detach())
    wanted = "a finite number above 0"
    return check_number("denominator", number, wanted, lambda x: 0 < x < math.inf)
