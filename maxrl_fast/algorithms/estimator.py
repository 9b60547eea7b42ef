"""The registry of group advantages: functions of a Group, whose signature says what they take.

    @estimator("RLOO, Kool et al. 2019", weight="1")
    def rloo(g: Group) -> Tensor:
        \"\"\"r - mean of the others.\"\"\"

Positional parameters after the group are inputs, one number for each rollout (INPUTS); keyword-only
ones are options, and a `Size` in the annotation of one makes it the k of max@k."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from maxrl_fast.algorithms.method import AnyFunction, Method, Registry, name_of
from maxrl_fast.algorithms.options import (
    REQUIRED,
    Help,
    Limit,
    NotNegative,
    Option,
    notes_of,
    options_of,
    parameters_of,
)

GROUP, BATCH = 1, (0, 1)  # the dimensions of [G, N] that a mean or a standard deviation is over


@dataclass
class Group:
    """Rewards of G groups of up to N rollouts.

    Sums over ranks take a group's rewards in ascending order, r_(1) <= ... <= r_(n), and their gaps
    d_j = r_(j+1) - r_(j); these are exactly 0 between equal rewards, whose order has no effect."""

    rewards: Tensor  # [G, N] float64, 0 where not valid
    valid: Tensor  # [G, N] bool, False for padding and for rollouts that are left out
    dtype: torch.dtype = torch.float64  # of the advantages that are wanted

    @cached_property
    def n(self) -> Tensor:  # [G, 1] float64, how many are valid
        return self.valid.sum(1, keepdim=True).double()

    @classmethod
    def of_sizes(cls, sizes: Tensor, width: int) -> "Group":
        """Return groups of `sizes` [G], up to `width`, without rewards."""
        valid = torch.arange(width, device=sizes.device) < sizes[:, None]
        return cls(torch.zeros_like(valid, dtype=torch.float64), valid)

    def largest(self, x: Tensor) -> Tensor:  # [G, 1]
        return torch.where(self.valid, x, -torch.inf).amax(GROUP, keepdim=True)

    def smallest(self, x: Tensor, over: Any = GROUP) -> Tensor:  # [G, 1]; [1, 1] over the batch
        return torch.where(self.valid, x, torch.inf).amin(over, keepdim=True)

    def centre(self, x: Tensor, lengths: Tensor | None = None, over: Any = GROUP) -> Tensor:
        """Return x - its mean, weighted by lengths if given: exactly 0 if all x are equal."""
        weights = self._weights(lengths, over)
        distance = torch.where(self.valid, x - self.smallest(x, over), 0.0)
        total = weights.sum(over, keepdim=True).clamp_min(1)
        return distance - (weights * distance).sum(over, keepdim=True) / total

    def mean(self, x: Tensor) -> Tensor:
        return torch.where(self.valid, x, 0.0).sum(GROUP, keepdim=True) / self.n.clamp_min(1)

    def std(
        self, x: Tensor, ddof: float, lengths: Tensor | None = None, over: Any = GROUP
    ) -> Tensor:
        """Return the standard deviation; infinite for `ddof` values or fewer, so that x / std is
        0."""
        weights = self._weights(lengths, over)
        freedom = weights.sum(over, keepdim=True) - ddof
        squares = (weights * self.centre(x, lengths, over).square()).sum(over, keepdim=True)
        variance = squares / freedom.clamp_min(1)
        variance = variance + 0 * variance  # NaN, where a square overflows: x / std would be 0
        return torch.where(freedom > 0, variance.sqrt(), torch.inf)

    def _weights(self, lengths: Tensor | None, over: Any) -> Tensor:
        ones = self.valid.double()
        weights = ones if lengths is None else ones * lengths
        # if all lengths are 0
        return torch.where(weights.sum(over, keepdim=True) > 0, weights, ones)

    def rank(self, x: Tensor) -> Tensor:
        ascending = torch.where(self.valid, x, torch.inf).sort(1).values
        return torch.searchsorted(ascending, x.contiguous()).double()

    @cached_property
    def order(self) -> Tensor:  # [G, N], rewards ascending, then what is not valid
        return torch.where(self.valid, self.rewards, torch.inf).argsort(dim=1, stable=True)

    @property
    def j(self) -> Tensor:  # [N-1] = 1, 2, ...
        return self._one_to(self.rewards.shape[1] - 1)

    @property
    def gaps(self) -> Tensor:  # [G, N-1], d_j, 0 from the group's n on
        return torch.where(self.j < self.n, self.rewards.gather(1, self.order).diff(dim=1), 0.0)

    def below(self, terms: Tensor) -> Tensor:
        """Return for rollout i the sum of the terms [G, N-1] of the gaps j < i."""
        return self._unsort(pad(terms.cumsum(1), (1, 0)))

    def above(self, terms: Tensor) -> Tensor:
        """Return for rollout i the sum of the terms [G, N-1] of the gaps j >= i."""
        return self._unsort(pad(terms.flip(1).cumsum(1).flip(1), (0, 1)))

    def rank_transform(self, table: Tensor) -> Tensor:
        """Return sum_{j >= 0} offset_j d_j + sum_{1 <= j < i} slope_j d_j, where d_0 = r_(1), for
        tables [G, 2, N] of offsets and slopes (estimators/max_at_k.py)."""
        offset, slope = table.unbind(1)  # [G, N]
        lowest = self.rewards.gather(1, self.order[:, :1])
        gaps = torch.cat([lowest, self.gaps], 1)  # [G, N]
        base = (offset * gaps).sum(1, keepdim=True)
        return base + self._unsort((slope * gaps).cumsum(1))

    def within(self, size: float | Tensor, of: Tensor) -> Tensor:
        """Return C(j, size) / C(of, size) for j = 0..N, [G, N+1], by recurrence."""
        j = self._one_to(self.rewards.shape[1])
        factors = torch.where(j <= of, (j - size).clamp_min(0) / j, 1.0)
        return pad(factors.flip(1).cumprod(1).flip(1), (0, 1), value=1.0)

    def _one_to(self, last: int) -> Tensor:
        return torch.arange(1, last + 1, device=self.rewards.device, dtype=torch.float64)

    def _unsort(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x).scatter(1, self.order, x)


def ratio(x: Tensor, y: Tensor) -> Tensor:
    """Return x / y, 0 where y is 0."""
    return torch.where(y == 0, 0.0, x / y)


# What estimators take besides the rewards, and an example of each by the numbers of the rollouts
# [G, N] from 1 on. Tensors are [G, N], reward_parts [R, G, N]; prompts is a sequence of G, texts
# and components are G sequences of N. Only a run has the last five: log-ratios of responses to the
# policy before the step and to the reference policy; a function from chosen rollouts, bool [G, N],
# to the entropies [T] of their tokens, 0 for others; a dict, to which it adds metrics of the
# update; and the tensors of `Estimator.state`.
INPUTS: Mapping[str, Callable[[Tensor], Any]] = {
    "lengths": lambda number: 1 + number % 7,
    "logprobs": lambda number: -number / number.numel(),
    "greedy_correct": lambda number: torch.arange(len(number)) % 2 == 0,
    "greedy_rewards": lambda number: number.new_full((len(number),), 0.5, dtype=torch.float32),
    "reward_parts": lambda number: torch.stack([number % 2, number]).float(),
    "prompts": lambda number: list(range(len(number))),
    "log_ratios": lambda number: number / number.numel() - 0.5,
    "texts": lambda number: [[f"Response {i}." for i in group] for group in number.tolist()],
    # every component that it looks for is there
    "components": lambda number: [[defaultdict(float) for _ in group] for group in number],
    "truncated": lambda number: number % 3 == 0,
    "old_log_ratios": lambda number: number / number.numel() - 0.5,
    "ref_log_ratios": lambda number: number / number.numel() - 0.5,
    "entropies": lambda number: lambda chosen: torch.ones(int((1 + number % 7).sum())),
    "metrics": lambda number: {},
    "state": lambda number: {},
}
# as groups have them: a function may ask for them, and nothing checks them
OBJECTS = {"prompts", "texts", "components", "old_log_ratios", "ref_log_ratios", "entropies"}
OBJECTS |= {"metrics", "state"}
# They change with every update, so the advantages do.
RATIOS = ("log_ratios", "old_log_ratios", "ref_log_ratios")
ENUMERATED = "no closed form"
SCALES = ("one", "leave_one_out", "std", "mean")  # in the order of Scale of csrc/group_advantage.h
_LARGEST_SIZE = 2**53  # exact in float64; no group is larger


@dataclass(frozen=True)
class Size:
    """The k of max@k or the order of MaxRL: an integer from `smallest` to N - `below_n`."""

    smallest: int = 1
    below_n: int = 1
    name: str = "k"
    required: bool = True  # otherwise the largest size is the default

    @property
    def option(self) -> Option:
        what, default = "Order at which the series of maxrl is truncated", "N-1"
        if self.name == "k":
            what, default = "Size of max@k, in rollouts", "4, or the largest that fits N"
        return Option(self.name, int, None, f"{what}: {self.wanted()}. By default {default}.")

    def wanted(self, n: int | None = None) -> str:
        largest = f"N-{self.below_n}" if self.below_n else "N"
        number = "" if n is None else f" = {n - self.below_n}"
        return f"{self.smallest} <= {self.name} <= {largest}{number}"

    def check(self, owner: str, size: int, n: int | None) -> None:
        if isinstance(size, bool) or not isinstance(size, int):
            raise ValueError(f"{owner} needs an integer as {self.name}, got {size!r:.80}")
        if not self.smallest <= size <= (_LARGEST_SIZE if n is None else n - self.below_n):
            rollouts = "" if n is None else f" for N = {n} rollouts"
            raise ValueError(f"{owner} needs {self.wanted(n)}{rollouts}, got {size!r:.80}")


K = Annotated[int, Size(below_n=0)]
KBelowN = Annotated[int, Size()]
KOfPairs = Annotated[int, Size(smallest=2, below_n=0)]
KOfPairsBelowN = Annotated[int, Size(smallest=2)]
Order = Annotated[int | None, Size()]
Eps = Annotated[
    NotNegative, Help("Added to the divisor: the standard deviation of the rewards, or their mean.")
]
Ddof = Annotated[
    int,
    Limit("0 or 1", lambda x: x in (0, 1)),
    Help("1: sample standard deviation; 0: population standard deviation."),
]


@dataclass(frozen=True)
class Kernel:
    """What the kernel (csrc/group_advantage.h) computes: the rank transform of a table; without one
    the rewards, minus their mean where `centred`, times 1, n/(n-1), 1/(std + eps) or 1/(mean +
    eps)."""

    table: Callable[[Group, Any], Tensor] | None = None  # [G, 2, N] of the groups and the size
    centred: bool = False
    scale: str = "one"  # of SCALES


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimator(Method):
    """A group advantage: a function of a Group, or of rewards [G, N] and what else it names."""

    weight: str = ENUMERATED  # W_N(p), as display text
    inputs: tuple[str, ...] = ()  # among INPUTS
    size: Size | None = None
    kernel: Kernel | None = None  # where there is one, the function is its reference
    binary: bool = False  # whether rewards must be 0 or 1
    for_binary: bool = False  # whether it is made for such rewards, and only computable for others
    centred: bool = False  # whether the advantage in a group of one is 0 for any size
    over_batch: bool = False  # whether the advantages of a group may depend on the other groups
    of_group: bool = True  # whether the function takes a Group; otherwise rewards [G, N], floating
    takes_valid: bool = True  # whether rollouts may be left out, and groups uneven
    min_rollouts: int = 2  # the smallest group that training makes sense with
    loss: str = "ppo"  # of a run without --loss
    aggregation: str = "token_mean"  # of a run without --aggregation
    owns_loss: bool = False  # whether these two cannot be changed
    of_run: bool = False  # whether only a run has what it learns from
    # tensors by name that the input `state` has at first; the function changes them in place
    state: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    presets: Mapping[str, Any] = field(default_factory=dict)  # defaults of a run's other options
    # rules (config/rules.py) of options that it does not go with
    refuses: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)

    noun: ClassVar[str] = "estimator"
    first: ClassVar[str] = "rewards [G, N]"
    of_users: ClassVar[Mapping[str, Any]] = {
        **{"weight": "is not known", "over_batch": True, "min_rollouts": 1}
    }

    @classmethod
    def of(cls, function: Callable[..., Any], **fields: Any) -> "Estimator":
        name, parameters = name_of(function), parameters_of(function)
        of_group, others = bool(parameters) and parameters[0].annotation is Group, parameters[1:]
        options, size = options_of(function) if of_group else {}, None
        for x in others:
            marks = [note for note in notes_of(x.annotation) if isinstance(note, Size)]
            if marks or x.name == "k":
                of_size = (marks or [Size(below_n=0)])[0]
                size = replace(of_size, name=x.name, required=x.default is x.empty)
                options.pop(x.name, None)
        known = [x for x in ("k", "valid", *INPUTS) if x != "state" or "state" in fields]
        given = {*known, "reward_weights", *options, *([size.name] if size else [])}
        for x in others:
            is_named = x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)
            if x.name not in given and x.default is x.empty and is_named:
                wanted = f"{', '.join(known)} besides the rewards"
                raise ValueError(f"{name} may ask for {wanted}, got the parameter {x.name}")
        asked = [x.name for x in others]
        if "reward_parts" in asked and "reward_weights" not in asked:
            raise ValueError(f"{name} asks for reward_parts, so it must ask for reward_weights too")
        inputs = tuple(key for key in asked if key in known[2:])
        if ratios := [key for key in inputs if key in RATIOS]:
            of_ratios = {"loss": "reinforce", "aggregation": "seq_mean_token_sum"}
            fields = {**of_ratios, "owns_loss": True, **fields}
        if len(ratios) > 1:
            raise ValueError(f"{name} may ask for one kind of log-ratios, got {', '.join(ratios)}")
        needs = [size.wanted() if size else f"N >= {fields.get('min_rollouts', 2)}", *inputs]
        needs += [key for key, option in options.items() if option.default is REQUIRED]
        needs += ["rewards 0 or 1"] * fields.get("binary", False)
        needs += ["made for rewards 0 or 1"] * fields.get("for_binary", False)
        return super().of(
            function,
            inputs=inputs,
            size=size,
            options=options,
            of_group=of_group,
            takes_valid=of_group or "valid" in asked,
            **({"needs": ", ".join(needs)} | fields),
        )

    def compute(self, group: Group, **given: Any) -> Tensor:
        for name, value in given.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                given[name] = value.to(torch.float64 if self.of_group else group.dtype)
        if self.of_group:
            return self.function(group, **given)
        if self.takes_valid:
            given["valid"] = group.valid
        rewards = group.rewards.to(group.dtype, copy=True)
        return self.function(rewards, **given)

    @property
    def has_weight(self) -> bool:
        """Whether advantages depend only on the group's rewards, at equal lengths."""
        return not self.over_batch and not self.of_run and {"lengths"}.issuperset(self.inputs)

    def resolve_size(self, n: int | None, k: int | None = None, order: int | None = None) -> int:
        """Return the size, 0 for the largest, which must fit groups of n (None: uneven)."""
        given = {"k": k, "order": order}
        value = None if self.size is None else given.pop(self.size.name)
        for option, other in given.items():
            if other is not None:
                raise ValueError(f"{self.name} does not use {option}, got {option}={other!r:.80}")
        if self.size is None or (value is None and not self.size.required):
            return 0
        if value is None:
            raise ValueError(f"{self.name} needs {self.size.name}, {self.size.wanted()}")
        self.size.check(self.name, value, n)
        return value


_REGISTRY = Registry(Estimator)
ESTIMATORS, ALIASES = _REGISTRY.methods, _REGISTRY.aliases
estimator, find_estimator = _REGISTRY.register, _REGISTRY.find


def rank_estimator(source: str, **fields: Any) -> Callable[[AnyFunction], Callable[..., Tensor]]:
    """Register an estimator by the function of its rank tables [G, 2, N]."""

    def decorate(table: AnyFunction) -> Callable[..., Tensor]:
        names = [parameter.name for parameter in parameters_of(table)[1:]]  # k, order or nothing

        @wraps(table)
        def function(g: Group, **size: Any) -> Tensor:
            return g.rank_transform(table(g, **size))

        kernel = Kernel(lambda g, size: table(g, **dict.fromkeys(names, size)))
        return estimator(source, kernel=kernel, **fields)(function)

    return decorate
