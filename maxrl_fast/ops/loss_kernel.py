"""The kernels of token losses: one call from the caller's tensors to sums and gradient. Values are
checked in C++, on a CPU; a GPU would wait. csrc/token_loss.h has the records."""

import math
from collections.abc import Callable, Mapping
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
from maxrl_fast.algorithms.tokens import sequence_sums
from maxrl_fast.ops import dispatch
from maxrl_fast.ops.dispatch import check_fields, choices, dtype_name, make_plan

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


@dataclass(frozen=True)
class LossTerms:
    """The arguments of policy_gradient_loss that are the same for all tokens, checked."""

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

    @cached_property
    def of_plan(self) -> tuple[str, tuple[tuple[str, Any], ...]]:
        """By what the loss is divided without a denominator, T or S, and fields of its record."""
        coefs = {"kl_coef": self.kl_coef, "entropy_coef": self.entropy_coef}
        divides = self.aggregation == "seq_mean_token_mean"
        own = {"loss": self.spec.name, "kl": self.kl, "divides_responses": divides}
        size = "T" if self.aggregation == "token_mean" else "S"
        return size, tuple({**own, **self.clips, **coefs}.items())


_NOT_NEGATIVE = "a number of at least 0", lambda x: x >= 0
_LIMITS: dict[str, tuple[str, Callable[[float], bool]]] = {
    **{"clip_low": _NOT_NEGATIVE, "clip_high": _NOT_NEGATIVE},
    "dual_clip": ("a number above 1", lambda x: x > 1),
    **dict.fromkeys(("kl_coef", "entropy_coef"), ("a finite number", math.isfinite)),
}


def terms_of(*given: Any) -> LossTerms:
    """Return LossTerms from a cache, if they can be its key."""
    try:
        return _terms_of(*given) if isinstance(given[0], str) else LossTerms(*given)
    except TypeError:
        return LossTerms(*given)


_terms_of = lru_cache(maxsize=256)(LossTerms)


# A kernel's arguments, in order, as make_plan takes them: C rows of T tokens, of S responses.
_ROWS = "logits:M.{C}V first:I index:pqR targets:PqT temperature:NxT mask:pbT "
_SIZES = " num_rows:=-{C} num_tokens:=-T vocab_size:=-V"
_SLOTS = {
    "token_logprobs": "logprobs:Pr{C} entropy:Pr{C}",
    "token_logprobs_backward": "grad_logprobs:Pr{C} grad_entropy:Pr{C} gradient:Mg{C}V",
    "token_loss": "cu_seqlens:Pqs advantages:Nx{A} advantages_by_token:?-{A} "
    "importance_weights:nx{W} weights_by_token:?-{W} old_logprobs:nxT ref_logprobs:nxT "
    "denominator:/-{D} denominator:nx counts:nxS sums:Pd total:pr "
    "gradient:mg{C}V num_sequences:=-S",
}
_PER_TOKEN = {True: "T", False: "S", None: "A"}


@lru_cache(maxsize=256)
def plan_rows(
    kernel: str,
    on_gpu: bool,
    dtype: torch.dtype,
    of_gradient: torch.dtype,
    rows: str,
    size: str = "T",
    terms: tuple[tuple[str, Any], ...] = (),
    advantages_per_token: bool | None = None,
    weights_per_token: bool | None = None,
) -> _C.Plan:
    """Return the plan of a kernel for logits of this dtype. rows: C or T, their number. A GPU's
    gradient of float32 logits may be bfloat16, in the first half of each of their rows."""
    letters = {"A": _PER_TOKEN[advantages_per_token], "W": _PER_TOKEN[weights_per_token]}
    slots = (_ROWS + _SLOTS[kernel] + _SIZES).format(C=rows, D=size, **letters).split()
    fields: dict[str, Any] = dict.fromkeys(choices(kernel), 0)
    for slot in slots:
        name, _, code = slot.partition(":")
        if code[0] in "MmNn":
            fields[name] = (0, 0) if code[0] in "Mm" else (0, False, 1.0)
    if of_gradient is not dtype:
        kernel += f"_in_{dtype_name(of_gradient)}"
    return make_plan(kernel, on_gpu, dtype, fields | dict(terms), slots, of_gradient)


@dataclass(eq=False)
class TokenRows:
    """Targets and temperatures of T tokens, whose rows of logits a kernel reads. shape: T and the
    vocabulary's size. mask: bool [T]; nothing else of tokens with False is read."""

    shape: tuple[int, int]
    device: torch.device
    targets: Tensor
    temperature: float | Tensor
    mask: Tensor | None

    def check(self) -> None:
        """Make the arguments as kernels read them, once; raise TypeError or ValueError for what
        cannot be, but for its values."""
        if not hasattr(self, "is_checked"):
            self.is_checked = True
            self.convert()

    def convert(self) -> None:
        size, device = len(self), self.device
        self.targets = checked("targets", self.targets, size, device)
        self.temperature = check_temperature(self.temperature, size, device)
        self.mask = optional("mask", self.mask, size, device)

    def __len__(self) -> int:
        return self.shape[0]

    def of_kernel(self, kernel: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Return what the plan depends on beside the logits, and further arguments."""
        return (), ()

    def run(
        self,
        kernel: str,
        logits: Tensor,
        first: int,
        index: Tensor | None,
        *made: Tensor | None,
        gradient: Tensor | None = None,
    ) -> None:
        """Run a kernel on logits [C, V] of the tokens first, first + 1, ..., or index[first], ...

        made: further arguments, such as memory for results; gradient: of the logits. A kernel gets
        the arguments as they are; C++ checks them, on a CPU with their values. Raises ValueError
        and TypeError."""
        of_gradient = logits.dtype if gradient is None else gradient.dtype
        rows = "T" if logits.shape[0] == self.shape[0] else "C"
        key = kernel, dispatch.is_gpu(self.device), logits.dtype, of_gradient, rows
        for _ in range(2):  # as they are, and as kernels read them
            of_plan, own = self.of_kernel(kernel)
            arguments = (
                *(logits, first, index, self.targets, self.temperature, self.mask),
                *own,
                *made,
                gradient,
            )
            found = dispatch.run_plan(plan_rows(*key, *of_plan), self.device, arguments)
            if found == -1:
                return
            self.check()
            if logits.stride(1) != 1 or logits.is_neg():
                logits = logits.clone(memory_format=torch.contiguous_format)
        if found >= 0:
            self.refuse()
        raise ValueError(
            f"{kernel} needs tensors with memory, and values that Python's checks allow, got "
            f"{arguments!r:.500}"
        )

    def refuse(self) -> None:
        """Raise ValueError for a value that a kernel does not take."""
        self.temperatures()
        wrong = (self.targets < 0) | (self.targets >= self.shape[1])
        wanted = f"in [0, {self.shape[1]})"
        check_values("targets", self.targets, wanted, wrong, self.mask, "token ")

    def temperatures(self) -> Tensor:
        """Return them as [T] float64, 1 for a masked token; check their values on a CPU."""
        tau = token_temperature(self.temperature, len(self), self.device, self.mask)
        return tau if self.mask is None else tau.where(self.mask, 1.0)

    def save(self, ctx: Any, *tensors: Tensor) -> None:
        """Save tensors for a backward pass, which raises where these, targets or temperatures have
        been changed."""
        own = [x for x in (self.targets, self.temperature) if isinstance(x, Tensor)]
        ctx.save_for_backward(*tensors, *own)
        ctx.rows = self


@dataclass(eq=False)
class LossInputs(TokenRows):
    """The arguments of policy_gradient_loss for logits [T, V] = shape, as they are given
    until `check`."""

    terms: LossTerms
    advantages: Tensor
    cu_seqlens: Tensor
    advantages_per_token: bool | None = None
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    importance_weights: Tensor | None = None
    importance_weights_per_token: bool | None = None
    denominator: float | Tensor | None = None

    def __post_init__(self) -> None:
        if self.terms.kl_coef and self.ref_logprobs is None:
            raise ValueError("kl_coef is not 0, so ref_logprobs must be given")
        if self.denominator is None and self.terms.aggregation == "seq_sum_constant":
            raise ValueError("aggregation 'seq_sum_constant' needs a denominator")
        if self.advantages_per_token is not None:
            check_flag("advantages_per_token", self.advantages_per_token)
        if self.importance_weights_per_token is not None:
            check_flag("importance_weights_per_token", self.importance_weights_per_token)

    def convert(self) -> None:
        super().convert()
        size, device = len(self), self.device
        self.old_logprobs = optional("old_logprobs", self.old_logprobs, size, device)
        self.ref_logprobs = optional("ref_logprobs", self.ref_logprobs, size, device)
        self.cu_seqlens = checked_bounds(self.cu_seqlens, size, device)
        self._check_responses("advantages")
        if self.importance_weights is not None:
            self._check_responses("importance_weights")
        of = self.terms.aggregation, size, len(self.cu_seqlens) - 1, self.mask, device
        self.denominator = loss_denominator(self.denominator, *of)

    def _check_responses(self, name: str) -> None:
        """Make numbers as a kernel reads them, and find whether they are per token [T] or per
        response [S]. If T = S and no keyword is given, every response must have one token, which a
        GPU cannot check without waiting."""
        x, given, bounds = getattr(self, name), getattr(self, f"{name}_per_token"), self.cu_seqlens
        sizes = {False: len(bounds) - 1, True: len(self)}
        if given is not None:
            sizes = {given: sizes[given]}
        check_tensor(name, x, self.device, "the logits are")
        size = x.shape[0] if x.dim() == 1 else -1
        if size not in sizes.values():
            wanted = " or ".join(f"[{'ST'[by]}] = [{size}]" for by, size in sizes.items())
            raise ValueError(f"{name} must be {wanted}, got the shape {tuple(x.shape)}")
        is_open = size and given is None and len(bounds) - 1 == len(self)
        if is_open and not (is_host_readable(bounds) and bool((bounds.diff() == 1).all())):
            raise ValueError(
                f"{name} may have one number per token or one per response, since T = S = {size}: "
                f"give {name}_per_token=True or {name}_per_token=False"
            )
        setattr(self, name, checked(name, x, size, self.device))
        setattr(self, f"{name}_per_token", size != sizes.get(False))

    def refuse(self) -> None:
        self.check_values()
        super().refuse()

    def check_values(self) -> None:
        """Raise ValueError for the first that is not allowed, but for targets; not on a GPU."""
        check_sequences(self.cu_seqlens, len(self), self.device)
        weights = self.importance_weights
        if weights is not None and is_host_readable(weights):
            mask = self.mask if self.importance_weights_per_token else None
            check_values("importance_weights", weights, "at least 0", weights < 0, mask)

    def counts(self) -> Tensor:
        """Return how many tokens of each response [S] are not masked."""
        check_sequences(self.cu_seqlens, len(self), self.device)
        if self.mask is None:
            return self.cu_seqlens.diff()
        return sequence_sums(self.mask.double(), self.cu_seqlens.diff())

    def of_kernel(self, kernel: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        if kernel != "token_loss":
            return (), ()
        terms, counts = self.terms, None
        if self.mask is not None:
            self.check()
            counts = self.counts() if terms.aggregation == "seq_mean_token_mean" else None
        by_token = self.advantages_per_token, self.importance_weights_per_token
        return (*terms.of_plan, *by_token), (
            *(self.cu_seqlens, self.advantages, self.importance_weights, self.old_logprobs),
            *(self.ref_logprobs, self.denominator, counts),
        )

    def by_tokens(self, x: Tensor, by_token: bool | None = False) -> Tensor:
        """Repeat one number per response [S] for each of its tokens [T], unless it has its own."""
        if by_token:
            return x
        return torch.repeat_interleave(x, self.cu_seqlens.diff(), output_size=len(self))

    def factors(self) -> tuple[Tensor, Tensor | None]:
        """Return advantages [T] float64, times the importance weights, and these, checked."""
        self.check_values()
        factors = self.by_tokens(self.advantages.detach().double(), self.advantages_per_token)
        if self.importance_weights is None:
            return factors, None
        weights = self.importance_weights.detach().double()
        weights = self.by_tokens(weights, self.importance_weights_per_token)
        return factors * weights, weights

    def needed_rows(self) -> Tensor:
        """Return which rows of logits [T] have a gradient: the kernel reads no others."""
        (factors, _), terms, counted = self.factors(), self.terms, self.mask
        self.temperatures()
        if counted is None:
            counted = torch.ones_like(factors, dtype=torch.bool)
        return counted if terms.kl_coef or terms.entropy_coef else counted & (factors != 0)


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
    if not isinstance(logits, Tensor) or logits.dtype not in DTYPES or logits.dim() != 2:
        check_tensor("logits", logits)
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
    return x.contiguous().resolve_neg()


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
        return float(max(num_tokens if aggregation == "token_mean" else num_sequences, 1))
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
