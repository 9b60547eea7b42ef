"""The kernels of token losses: one call from the caller's tensors to sums and gradient. Values are
checked in C++, on a CPU; a GPU would wait. csrc/token_loss.h has the records."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, NamedTuple, NoReturn, get_args

import torch
from torch import Tensor
from typing_extensions import Self

from maxrl_fast import _C
from maxrl_fast.algorithms.arguments import (
    INTEGER_DTYPES,
    REAL_DTYPES,
    check_choice,
    check_flag,
    check_number,
    check_tensor,
    is_host_readable,
)
from maxrl_fast.algorithms.losses import LOSSES, TokenLoss, find_loss
from maxrl_fast.ops import dispatch
from maxrl_fast.ops.dispatch import (
    KernelLaunch,
    check_fields,
    choices,
    cpu_plan,
    dtype_name,
)

KL_ESTIMATORS = ("k1", "k2", "k3", "k3+")
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_constant"]
AGGREGATIONS = get_args(Aggregation)
FUSED = tuple(name for name, loss in LOSSES.items() if loss.fused)
# Of logits; float16 is computed as float32.
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS, REALS = frozenset(INTEGER_DTYPES), frozenset(REAL_DTYPES)
_ABOVE_0 = "a finite number above 0", lambda x: 0 < x < math.inf


class LossSums(NamedTuple):
    """LossSums of csrc/token_loss.h: scalar tensors."""

    loss: Tensor  # weighted
    tokens: Tensor  # not masked
    dropped_tokens: Tensor  # tokens with zero gradient; the sums below are over the others
    ratio: Tensor
    ratio_clamped: Tensor  # tokens whose ratio to the sampling or reference policy was clamped
    clipped_low: Tensor
    clipped_high: Tensor
    kl: Tensor
    entropy: Tensor
    logprob_diff: Tensor  # |logp - old|


NUM_SUMS = len(LossSums._fields)
check_fields("LossSums", LossSums._fields)
check_fields("Loss", FUSED)
_NUMBERS = (  # fields of csrc/token_loss.h
    *("advantages", "importance_weights", "old_logprobs", "ref_logprobs", "denominator"),
    *("counts", "sequence_log_ratio"),
)


@dataclass(frozen=True)
class LossTerms:
    """The arguments of policy_gradient_loss that are the same for all tokens, checked. The trainer
    makes them once for a run."""

    loss: str | Callable[..., Tensor] = "ppo"
    aggregation: str = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl: str = "k3"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    loss_options: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        spec = self.spec
        spec.resolve(self.loss_options)
        check_choice("aggregation", self.aggregation, AGGREGATIONS)
        if self.aggregation != (needed := spec.aggregation or self.aggregation):
            wanted = f"{needed} for {self.loss}, whose loss it is a part of"
            raise ValueError(f"aggregation must be {wanted}, got {self.aggregation}")
        check_choice("kl", self.kl, KL_ESTIMATORS)
        for name, (wanted, holds) in _LIMITS.items():
            given = getattr(self, name)
            if given is not None or name != "dual_clip":
                # as floats, whatever kind of number was given
                object.__setattr__(self, name, check_number(name, given, wanted, holds))

    @cached_property
    def spec(self) -> TokenLoss:
        return find_loss(self.loss)

    @cached_property
    def options(self) -> tuple[tuple[str, float], ...]:
        return tuple(self.spec.resolve(self.loss_options).items())

    @property
    def clips(self) -> dict[str, float]:
        dual_clip = math.inf if self.dual_clip is None else self.dual_clip
        return {"clip_low": self.clip_low, "clip_high": self.clip_high, "dual_clip": dual_clip}

    @property
    def needs_every_token(self) -> bool:
        """Whether tokens with advantage 0 have a gradient too."""
        own = self.spec.is_users if self.spec.all_tokens is None else self.spec.all_tokens
        return bool(self.kl_coef or self.entropy_coef or own)

    @property
    def of_masked(self) -> Self:
        """The terms of the loss whose tokens this loss masks."""
        return replace(self, loss=self.spec.masks, loss_options=None)

    @property
    def of_kernel(self) -> dict[str, Any]:
        """LossTerms of csrc/token_loss.h."""
        coefs = {"kl_coef": self.kl_coef, "entropy_coef": self.entropy_coef}
        divides = self.aggregation == "seq_mean_token_mean"
        own = {"loss": self.spec.name, "kl": self.kl, "divides_responses": divides}
        return {**own, **self.clips, **coefs}


_NOT_NEGATIVE = "a number of at least 0", lambda x: x >= 0
_LIMITS: dict[str, tuple[str, Callable[[float], bool]]] = {
    **{"clip_low": _NOT_NEGATIVE, "clip_high": _NOT_NEGATIVE},
    "dual_clip": ("a number above 1", lambda x: x > 1),
    **dict.fromkeys(("kl_coef", "entropy_coef"), ("a finite number", math.isfinite)),
}


_SCALARS = {torch.float32: torch.empty(()), torch.float64: torch.empty((), dtype=torch.float64)}
_SUMS = torch.empty(NUM_SUMS, dtype=torch.float64)


def by_plan(
    terms: tuple[Any, ...],
    logits: Tensor,
    targets: Tensor,
    cu_seqlens: Tensor,
    advantages: Tensor,
    *optional: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor] | None:
    """Return the loss [], its gradient and LossSums, from a call whose tensors C++ checks; None for
    all that needs another way, or an error. terms: those of LossTerms, and a temperature. optional:
    old and reference log-probs, and importance weights."""
    is_tensor = isinstance(logits, Tensor)
    if not is_tensor or terms[0] not in FUSED or dispatch.is_gpu(logits.device):
        return None
    try:
        plan = _plan(logits.dtype, optional[1] is None, *terms)
    except TypeError:  # of what cannot be a key
        return None
    if plan is None:
        return None
    # empty_like is the fastest way to make a tensor
    total, sums, gradient = (
        torch.empty_like(_SCALARS[real_dtype(logits.dtype)]),
        torch.empty_like(_SUMS),
        None,
    )
    if logits.requires_grad and torch.is_grad_enabled():
        gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    tensors = logits, targets, cu_seqlens, advantages, *optional, gradient, sums, total
    row = plan.run(tensors, torch.get_num_threads())
    return (total, gradient, sums) if row == -1 else None


@lru_cache(maxsize=256, typed=True)  # True is not a number
def _plan(dtype: torch.dtype, lacks_reference: bool, *given: Any) -> _C.CpuPlan | None:
    """Return the plan of a loss with logits of this dtype; None for what needs another way."""
    terms, temperature = LossTerms(*given[:-1]), given[-1]
    if (
        (terms.kl_coef and lacks_reference)
        or terms.spec.by_sequence
        or terms.aggregation == "seq_sum_constant"
        or dtype not in (torch.bfloat16, *_SCALARS)
        or type(temperature) is not float
        or not 0 < temperature < math.inf
    ):
        return None
    slots = [
        *("logits:M.TV", "targets:PqT ", "cu_seqlens:Pqs ", "advantages:NxA "),
        *("advantages_by_token:? A ", "old_logprobs:nxT ", "ref_logprobs:nxT "),
        *("importance_weights:nxA ", "weights_by_token:? A ", "gradient:m.TV"),
        *("sums:Pd  ", "total:Pr  ", "num_rows:= T ", "num_tokens:= T ", "vocab_size:= V "),
        *(
            "num_sequences:= S ",
            f"denominator:/ {'T' if terms.aggregation == 'token_mean' else 'S'} ",
        ),
    ]
    fields: dict[str, Any] = dict.fromkeys(choices("token_loss"), 0)
    fields |= dict.fromkeys(("logits", "gradient"), (0, 0))
    fields |= dict.fromkeys(_NUMBERS, (0, False, 1.0))
    fields |= {"temperature": (0, False, temperature), **terms.of_kernel}
    return cpu_plan("token_loss", dtype, fields, slots)


class TokenRows:
    """Targets and temperatures of T tokens, whose rows of logits a kernel reads. shape: T and the
    vocabulary's size. mask: bool [T]; nothing else of tokens with False is read."""

    def __init__(
        self,
        shape: tuple[int, int],
        device: torch.device,
        targets: Tensor,
        temperature: float | Tensor,
        mask: Tensor | None = None,
    ):
        (self.num_tokens, self.vocab_size), self.device = shape, device
        self.targets = checked("targets", targets, shape[0], device)
        self.temperature = check_temperature(temperature, shape[0], device)
        self.mask = optional("mask", mask, shape[0], device)

    def launch(
        self,
        kernel: str,
        logits: Tensor,
        first: int,
        index: Tensor | None,
        numbers: Mapping[str, float | Tensor | None] = {},
        **fields: Any,
    ) -> None:
        """Run a kernel on logits [C, V] of the tokens first, first + 1, ..., or index[first], ...

        numbers, fields: what else is in the kernel's record, the gradient as a matrix or None.
        Raises ValueError for values that are not allowed."""
        call, variant, numbers = KernelLaunch(self.device), "", dict(numbers)
        if "gradient" in fields:
            gradient, fields["gradient"] = fields["gradient"], (0, 0)
            if gradient is not None:
                fields["gradient"] = call.matrix("gradient", gradient)
                variant = variant_for(logits, gradient)
        numbers["temperature"] = self.temperature
        row = call.launch(
            kernel + variant,
            dtype=logits.dtype,
            logits=call.matrix("logits", logits),
            num_rows=len(logits),
            first=first,
            index=index,
            vocab_size=self.vocab_size,
            num_tokens=self.num_tokens,
            targets=self.targets,
            mask=self.mask,
            **{name: call.number(x) for name, x in numbers.items()},
            **fields,
        )
        if row is not None and row >= 0:
            self.refuse()
            raise ValueError(f"{kernel} refuses a value at row {row}, which Python's checks allow")

    def refuse(self) -> None:
        """Raise ValueError for a value that a kernel does not take."""
        self.temperatures()
        wrong = (self.targets < 0) | (self.targets >= self.vocab_size)
        wanted = f"in [0, {self.vocab_size})"
        check_values("targets", self.targets, wanted, wrong, self.mask, "token ")

    def temperatures(self) -> Tensor:
        """Return them as [T] float64; check their values on a CPU."""
        return token_temperature(self.temperature, self.num_tokens, self.device, self.mask)

    def logprobs(
        self, logits: Tensor, to: Sequence[Tensor], first: int = 0, index: Tensor | None = None
    ) -> None:
        """Write log-probs and entropies [C]; of a masked token any number."""
        self.launch("token_logprobs", logits, first, index, logprobs=to[0], entropy=to[1])

    def save(self, ctx: Any, *tensors: Tensor) -> None:
        """Save tensors for a backward pass, which raises where these, targets or temperatures have
        been changed."""
        own = [x for x in (self.targets, self.temperature) if isinstance(x, Tensor)]
        ctx.save_for_backward(*tensors, *own)
        ctx.rows = self


class TokenBatch(NamedTuple):
    """T tokens of S packed responses for a loss that is a function: what belongs to a response, a
    mask or an average has become a float64 number of each token."""

    targets: Tensor  # [T] int64
    temperature: Tensor  # [T]
    advantages: Tensor  # [T], times the importance weights
    weights: Tensor  # [T], of the token's loss in the total; 0: masked
    old_logprobs: Tensor | None  # [T]
    ref_logprobs: Tensor | None  # [T]
    cu_seqlens: Tensor  # [S+1] int64
    importance_weights: Tensor | None = None  # [T], for losses with terms beside the advantages
    statistics: Tensor | None = None  # [T, ...], of the loss's `statistics`

    def loss_mask(self) -> Tensor:
        return self.weights != 0

    def at(self, part: slice) -> "TokenBatch":
        """Return some of the tokens. `cu_seqlens` stay those of all tokens."""
        own = {name: x[part] for name, x in self._asdict().items() if x is not None}
        return self._replace(**own | {"cu_seqlens": self.cu_seqlens})


class LossInputs(TokenRows):
    """The arguments of policy_gradient_loss for logits [T, V] = shape, checked but for values."""

    def __init__(
        self,
        terms: LossTerms,
        shape: tuple[int, int],
        device: torch.device,
        targets: Tensor,
        advantages: Tensor,
        cu_seqlens: Tensor,
        advantages_per_token: bool | None = None,
        old_logprobs: Tensor | None = None,
        ref_logprobs: Tensor | None = None,
        importance_weights: Tensor | None = None,
        importance_weights_per_token: bool | None = None,
        temperature: float | Tensor = 1.0,
        mask: Tensor | None = None,
        denominator: float | Tensor | None = None,
    ):
        super().__init__(shape, device, targets, temperature, mask)
        if terms.kl_coef and ref_logprobs is None:
            raise ValueError("kl_coef is not 0, so ref_logprobs must be given")
        if terms.aggregation == "seq_sum_constant" and denominator is None:
            raise ValueError("aggregation 'seq_sum_constant' needs a denominator")
        self.terms = terms
        self.ratio: Tensor | None = None  # [S], if the loss needs it
        self.old = optional("old_logprobs", old_logprobs, shape[0], device)
        self.ref = optional("ref_logprobs", ref_logprobs, shape[0], device)
        self.cu_seqlens = checked_bounds(cu_seqlens, shape[0], device)
        self.num_sequences = self.cu_seqlens.shape[0] - 1
        self.advantages, self.by_token = self._of_responses(
            "advantages", advantages, advantages_per_token
        )
        self.importance, self.importance_by_token = importance_weights, False
        if importance_weights is not None:
            self.importance, self.importance_by_token = self._of_responses(
                "importance_weights", importance_weights, importance_weights_per_token
            )
        self.denominator = loss_denominator(
            denominator, terms.aggregation, shape[0], self.num_sequences, self.mask, device
        )

    def _of_responses(self, name: str, x: Tensor, given: bool | None) -> tuple[Tensor, bool]:
        """Return numbers as a kernel reads them, and whether they are per token [T], not per
        response [S]. If T = S and no keyword is given, every response must have one token, which a
        GPU cannot check without waiting."""
        sizes = {False: self.num_sequences, True: self.num_tokens}
        if given is not None:
            check_flag(f"{name}_per_token", given)
            sizes = {given: sizes[given]}
        check_tensor(name, x, self.device, "the logits are")
        size = x.shape[0] if x.dim() == 1 else -1
        if size not in sizes.values():
            wanted = " or ".join(f"[{'ST'[by]}] = [{size}]" for by, size in sizes.items())
            raise ValueError(f"{name} must be {wanted}, got the shape {tuple(x.shape)}")
        if size and given is None and self.num_sequences == self.num_tokens:
            bounds = self.cu_seqlens
            if not is_host_readable(bounds) or bool((bounds.diff() != 1).any()):
                raise ValueError(
                    f"{name} may have one number per token or one per response, since T = S = "
                    f"{self.num_tokens}: give {name}_per_token=True or {name}_per_token=False"
                )
        return checked(name, x, size, self.device), size != sizes.get(False)

    def refuse(self) -> None:
        self.check_values()
        super().refuse()

    def check_values(self) -> None:
        """Raise ValueError for the first that is not allowed, but for targets; not on a GPU."""
        check_sequences(self.cu_seqlens, self.num_tokens, self.device)
        if self.importance is not None and is_host_readable(self.importance):
            mask = self.mask if self.importance_by_token else None
            is_wrong = self.importance < 0
            check_values("importance_weights", self.importance, "at least 0", is_wrong, mask)

    def counts(self) -> Tensor:
        """Return how many tokens of each response [S] are not masked."""
        check_sequences(self.cu_seqlens, self.num_tokens, self.device)
        if self.mask is None:
            return self.cu_seqlens.diff()
        return sums_of(self.mask.double(), self.cu_seqlens)

    def new_sums(self) -> Tensor:
        """Return memory for LossSums [10], the first of what a kernel needs."""
        if dispatch.is_gpu(self.device):
            return torch.zeros(_C.LOSS_WORKSPACE, dtype=torch.float64, device=self.device)
        return torch.empty_like(_SUMS)

    def loss(
        self,
        logits: Tensor,
        gradient: Tensor | None,
        sums: Tensor,
        total: Tensor | None = None,
        first: int = 0,
        index: Tensor | None = None,
    ) -> None:
        """Write LossSums to `sums`, the first of them to `total` [], and the gradient of the logits
        of the tokens that `launch` names."""
        terms = self.terms.of_kernel
        counts = self.counts() if terms["divides_responses"] and self.mask is not None else None
        given = self.advantages, self.importance, self.old, self.ref, self.denominator
        self.launch(
            *("token_loss", logits, first, index),
            dict(zip(_NUMBERS, (*given, counts, self.ratio), strict=True)),
            num_sequences=self.num_sequences,
            cu_seqlens=self.cu_seqlens,
            advantages_by_token=self.by_token,
            weights_by_token=self.importance_by_token,
            **terms,
            gradient=gradient,
            sums=sums,
            total=total,
        )

    @property
    def needs_sequence_ratio(self) -> bool:
        return self.terms.spec.by_sequence and self.old is not None

    def set_ratio(self, logprobs: Tensor, index: Tensor | None = None) -> None:
        """Compute each response's mean log-ratio over tokens that are not masked, from the
        log-probs of all tokens, or of those of an ascending index that are not masked."""
        assert self.old is not None
        old, keep, bounds = self.old.detach(), self.mask, self.cu_seqlens
        if index is not None:
            old, keep, bounds = old[index], None, torch.searchsorted(index, bounds)
        difference = (logprobs - old.to(logprobs.dtype)).double()
        keep = torch.ones_like(difference, dtype=torch.bool) if keep is None else keep
        sums = sums_of(difference.where(keep, 0.0), bounds)
        means = sums / sums_of(keep.double(), bounds).clamp_min(1)
        self.ratio = means.to(logprobs.dtype).double()

    def by_tokens(self, x: Tensor, by_token: bool = False) -> Tensor:
        """Repeat one number per response [S] for each of its tokens [T], unless it has its own."""
        if by_token:
            return x
        return torch.repeat_interleave(x, self.cu_seqlens.diff(), output_size=self.num_tokens)

    def factors(self) -> tuple[Tensor, Tensor | None]:
        """Return advantages [T] float64, times the importance weights, and these, checked."""
        self.check_values()
        factors, weights = self.by_tokens(self.advantages.detach().double(), self.by_token), None
        if self.importance is not None:
            importance = self.importance.detach().double()
            weights = self.by_tokens(importance, self.importance_by_token)
            factors = factors * weights
        return factors, weights

    def needed_rows(self) -> Tensor:
        """Return which rows of logits [T] the kernel reads: those with a gradient, and with a ratio
        of responses also the others of their response."""
        (factors, _), terms, counted = self.factors(), self.terms, self.mask
        self.temperatures()
        if counted is None:
            counted = torch.ones_like(factors, dtype=torch.bool)
        if terms.kl_coef or terms.entropy_coef:
            return counted
        needed = counted & (factors != 0)
        if self.needs_sequence_ratio:
            has_gradient = sums_of(needed.double(), self.cu_seqlens) > 0
            needed = counted & self.by_tokens(has_gradient)
        return needed

    def batch(self) -> TokenBatch:
        """Return the numbers of each token, for a loss that is a function."""
        (factors, importance), divisor = self.factors(), self.denominator
        if isinstance(divisor, Tensor):
            weights = divisor.reciprocal().expand(self.num_tokens)
        else:  # without a copy from the host, which would wait for a GPU
            weights = torch.full_like(factors, 1 / divisor)
        if self.terms.aggregation == "seq_mean_token_mean":
            weights = weights / self.by_tokens(self.counts().clamp_min(1))
        targets, tau, mask = self.targets, self.temperatures(), self.mask
        if mask is not None:  # their own may be anything
            weights, targets = weights.where(mask, 0.0), targets.where(mask, 0)
            tau = tau.where(mask, 1.0)
        old, ref = (None if x is None else x.detach().double() for x in (self.old, self.ref))
        return TokenBatch(targets, tau, factors, weights, old, ref, self.cu_seqlens, importance)


def sums_of(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    # not index_add, which adds in a varying order on a GPU
    return torch.segment_reduce(values, "sum", offsets=cu_seqlens, initial=0.0)


def variant_for(logits: Tensor, gradient: Tensor) -> str:
    """Return the end of a kernel's name. On a GPU the gradient of float32 logits may be bfloat16,
    in the first half of each of their rows."""
    same = gradient.dtype is logits.dtype
    return "" if same else f"_in_{dtype_name(gradient.dtype)}"


# --- checks of arguments

_INT64, _BOOL = frozenset([torch.int64]), frozenset([torch.bool])
_FLOATS = frozenset([torch.float32, torch.float64])
_KINDS = {  # of lists: the allowed dtypes, those that kernels read, and both in words
    "targets": (INTEGERS, _INT64, "integers [T] = [{}]"),
    "cu_seqlens": (INTEGERS, _INT64, "integers [S+1]"),
    "mask": (_BOOL, _BOOL, "bool [T] = [{}]"),
    "temperature": (REALS, _FLOATS, "a number or [T] = [{}]"),
}
_REAL_LIST = REALS, _FLOATS, "[T] = [{}]"


def refuse(name: str, x: Any, device: torch.device, wanted: str) -> NoReturn:
    """Raise TypeError or ValueError for an argument that is not as wanted."""
    check_tensor(name, x, device, "the logits are")
    raise ValueError(f"{name} must be {wanted}, got {x.dtype} of shape {tuple(x.shape)}")


def shape_of(logits: Tensor) -> tuple[int, int]:
    check_tensor("logits", logits)
    if logits.dtype not in DTYPES or logits.dim() != 2:
        wanted = f"[T, V] of {', '.join(map(dtype_name, DTYPES))}"
        refuse("logits", logits, logits.device, wanted)
    num_tokens, vocab_size = logits.shape
    return num_tokens, vocab_size


def real_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which logits of `dtype` are computed."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def checked(name: str, x: Any, size: int, device: torch.device) -> Tensor:
    """Return x as kernels read it; raise TypeError or ValueError unless it is a dense [size] on the
    device, of a dtype that fits."""
    dtypes, read, wanted = _KINDS.get(name, _REAL_LIST)
    if (
        not isinstance(x, Tensor)
        or x.dtype not in dtypes
        or x.layout is not torch.strided
        or x.shape != (size,)
        or x.device != device
    ):
        refuse(name, x, device, wanted.format(size))
    if x.dtype not in read:
        x = x.detach().to(torch.int64 if dtypes is INTEGERS else torch.float64)
    return x if x.is_contiguous() else x.contiguous()


def optional(name: str, x: Any, size: int, device: torch.device) -> Tensor | None:
    return None if x is None else checked(name, x, size, device)


def check_values(
    name: str, values: Tensor, wanted: str, is_wrong: Tensor, mask: Tensor | None, where: str = ""
) -> None:
    is_wrong = is_wrong if mask is None else is_wrong & mask
    if bool(is_wrong.any()):
        first = int(is_wrong.nonzero()[0])
        raise ValueError(f"{name} must be {wanted}, got {values[first].item()} at {where}{first}")


def check_temperature(
    temperature: float | Tensor, num_tokens: int, device: torch.device
) -> float | Tensor:
    if not isinstance(temperature, Tensor):
        return check_number("temperature", temperature, *_ABOVE_0)
    return checked("temperature", temperature, num_tokens, device)


def token_temperature(
    temperature: float | Tensor, num_tokens: int, device: torch.device, mask: Tensor | None
) -> Tensor:
    """Check a temperature, one number or [T], and return it as [T] float64."""
    tau = check_temperature(temperature, num_tokens, device)
    if not isinstance(tau, Tensor):
        return torch.full((num_tokens,), tau, dtype=torch.float64, device=device)
    tau = tau.detach().double()
    if is_host_readable(tau):
        check_values("temperature", tau, _ABOVE_0[0], ~((tau > 0) & (tau < math.inf)), mask)
    return tau


def checked_bounds(cu_seqlens: Tensor, num_tokens: int, device: torch.device) -> Tensor:
    """Check all of them but their values, and return them as kernels read them."""
    is_list = isinstance(cu_seqlens, Tensor) and cu_seqlens.dim() == 1
    size = cu_seqlens.shape[0] if is_list else 0
    if size <= bool(num_tokens):
        refuse("cu_seqlens", cu_seqlens, device, "integers [S+1]")
    return checked("cu_seqlens", cu_seqlens, size, device)


def check_sequences(cu_seqlens: Tensor, num_tokens: int, device: torch.device) -> None:
    """On a GPU the values are not read."""
    checked_bounds(cu_seqlens, num_tokens, device)
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
    """Return a denominator as a number where the host knows it, or as float64 [] on the device."""
    if given is None and aggregation == "token_mean" and mask is not None:
        return mask.sum().clamp_min(1).double()
    if given is None:
        return max(num_tokens if aggregation == "token_mean" else num_sequences, 1)
    return check_denominator(given, device)


def check_denominator(given: float | Tensor, device: torch.device) -> float | Tensor:
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
    return check_number("denominator", number, *_ABOVE_0)
