"""The registry of group advantages: a function each, whose signature says what it takes and whose
docstring is its formula.

    @estimator(source="RLOO, Kool et al. 2019", weight="1")
    def rloo(g: Group) -> Tensor:
        \"\"\"r - mean of the others.\"\"\"

Positional parameters after the group are inputs, one number for each rollout (INPUTS); keyword-only
ones are options, and a `Size` in the annotation of one makes it the k of max@k. What else stands in
the docstring after an empty line is a note.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from inspect import Parameter
from typing import Annotated, Any

from torch import Tensor

from maxrl_fast.algorithms.group import Group
from maxrl_fast.algorithms.options import (
    Default,
    Help,
    Limit,
    NotNegative,
    Option,
    formula_of,
    notes_of,
    options_of,
    parameters_of,
)

# What estimators take besides the rewards. Tensors are [G, N], reward_parts [R, G, N]; prompts is a
# sequence of G, texts and components are one of G sequences of N.
INPUTS = (
    "lengths",
    "logprobs",
    "greedy_correct",
    "greedy_rewards",
    "reward_parts",
    "prompts",
    "log_ratios",
    "texts",
    "components",
)
# as groups have them: a function may ask for them, and nothing checks them
OBJECTS = ("prompts", "texts", "components")
ENUMERATED = "no closed form: --weights"
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
        return Option(self.name, int, None, f"{what}: {self.wanted()}.", (Default(default),))

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
    """What the kernel (csrc/group_advantage.h) computes: a table by rank, or by the number of
    correct rollouts where `binary`; without a table the rewards, minus their mean where
    `centred`, times 1, n/(n-1), 1/(std + eps) or 1/(mean + eps)."""

    table: Callable[..., Tensor] | None = None  # of n, the size and the options
    binary: bool = False
    centred: bool = False
    scale: str = "one"  # "leave_one_out", "std" or "mean"


@dataclass(frozen=True, kw_only=True, eq=False)  # rows are keys of caches
class Estimator:
    """A group advantage. Functions are not lambdas, so that Ray can pickle a row for its
    workers."""

    name: str
    function: Callable[..., Tensor]
    formula: str  # as people write it
    source: str
    weight: str = ENUMERATED  # W_N(p), as display text
    inputs: tuple[str, ...] = ()  # among INPUTS
    size: Size | None = None
    options: Mapping[str, Option] = field(default_factory=dict)
    kernel: Kernel | None = None  # where there is one, the function is its reference
    binary: bool = False  # whether rewards must be 0 or 1
    centred: bool = False  # whether the advantage in a group of one is 0 for any size
    scales_by_k: bool = False  # whether `scale_by_k` multiplies by k
    over_batch: bool = False  # whether the advantages of a group may depend on the other groups
    of_group: bool = True  # whether the function takes a Group; otherwise rewards [G, N], floating
    takes_valid: bool = True  # whether rollouts may be left out, and groups uneven
    min_rollouts: int = 2  # the smallest group that training makes sense with
    # the estimator with the same function, which may have other defaults
    alias_of: str | None = None

    @classmethod
    def of(cls, function: Callable[..., Any], **row: Any) -> "Estimator":
        """Return the row of a function of a Group, or of rewards [G, N] and what else it names."""
        name = str(getattr(function, "__name__", type(function).__name__)).rstrip("_")
        if not callable(function):
            raise ValueError(
                f"an estimator must be a function of rewards, got {type(function).__name__}"
            )
        parameters = parameters_of(function)
        if not parameters or parameters[0].kind not in (
            Parameter.POSITIONAL_ONLY,
            Parameter.POSITIONAL_OR_KEYWORD,
        ):
            raise ValueError(f"{name} must take rewards [G, N] as its first parameter")
        of_group, others = parameters[0].annotation is Group, parameters[1:]
        options = options_of(function) if of_group else {}
        size, asked = None, [parameter.name for parameter in others]
        for parameter in others:
            marks = [note for note in notes_of(parameter.annotation) if isinstance(note, Size)]
            if marks or parameter.name == "k":
                size = replace(
                    (marks or [Size(below_n=0)])[0],
                    name=parameter.name,
                    required=parameter.default is parameter.empty,
                )
                options.pop(size.name, None)
        known = ["k", "valid", *INPUTS]
        given = {*known, "reward_weights", *options, *([size.name] if size else [])}
        for parameter in others:
            is_given = parameter.name in given
            is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if not is_given and not is_variadic and parameter.default is parameter.empty:
                raise ValueError(
                    f"{name} may ask for {', '.join(known)} besides the rewards, got the parameter "
                    f"{parameter.name}"
                )
        if "reward_parts" in asked and "reward_weights" not in asked:
            raise ValueError(f"{name} asks for reward_parts, so it must ask for reward_weights too")
        row.setdefault("source", str(getattr(function, "__module__", "a plug-in")))
        return cls(
            name=name,
            formula=formula_of(function) or f"the function {name}",
            function=function,
            inputs=tuple(key for key in asked if key in INPUTS),
            size=size,
            options=options,
            of_group=of_group,
            takes_valid=of_group or "valid" in asked,
            **row,
        )

    def compute(self, group: Group, **given: Any) -> Tensor:
        if self.of_group:
            return self.function(group, **given)
        for name, value in given.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                given[name] = value.to(group.dtype)
        if self.takes_valid:
            given["valid"] = group.valid
        return self.function(group.rewards.to(group.dtype, copy=True), **given)

    def __getstate__(self) -> dict[str, Any]:
        """The limits of options are lambdas: pickle only the defaults."""
        defaults = {name: option.default for name, option in self.options.items()}
        return vars(self) | {"options": defaults}

    def __setstate__(self, state: dict[str, Any]) -> None:
        known = options_of(state["function"]) if state["options"] else {}
        defaults = state["options"].items()
        options = {name: replace(known[name], default=default) for name, default in defaults}
        vars(self).update(state | {"options": options})

    @property
    def has_weight(self) -> bool:
        """Whether W_N(p) exists: advantages depend only on the group's rewards, at equal
        lengths."""
        return not self.over_batch and set(self.inputs) <= {"lengths"}

    @property
    def needs(self) -> str:
        """What a group and a call must have, as display text."""
        needs = [self.size.wanted() if self.size else f"N >= {self.min_rollouts}", *self.inputs]
        needs += [name for name, option in self.options.items() if option.default is None]
        return ", ".join([*needs, "rewards 0 or 1"] if self.binary else needs)

    def resolve_size(self, n: int | None, k: int | None = None, order: int | None = None) -> int:
        """Return the size, 0 for the largest; raise ValueError if it does not fit groups of n
        (None: uneven)."""
        given, taken = {"k": k, "order": order}, "" if self.size is None else self.size.name
        for option, value in given.items():
            if value is not None and option != taken:
                raise ValueError(f"{self.name} does not use {option}, got {option}={value!r:.80}")
        size = given.get(taken)
        if self.size is None or (size is None and not self.size.required):
            return 0
        if size is None:
            raise ValueError(f"{self.name} needs {taken}, {self.size.wanted()}")
        self.size.check(self.name, size, n)
        return size


ESTIMATORS: dict[str, Estimator] = {}


def estimator(
    *, source: str, **row: Any
) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register the decorated function under its name. `row`: fields of Estimator."""

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        made = Estimator.of(function, source=source, **row)
        ESTIMATORS[made.name] = made
        return function

    return register


def alias(name: str, of: str, source: str, **defaults: float) -> None:
    """Register another name of an estimator, with other defaults if given."""
    row = ESTIMATORS[of]
    changes = ", ".join(f"{option} {value:g}" for option, value in defaults.items())
    changed = f" with {changes}" if changes else ""
    options = {
        key: replace(option, default=defaults.get(key, option.default))
        for key, option in row.options.items()
    }
    formula = f"{of}{changed}: {row.formula.split(';')[0]}"
    ESTIMATORS[name] = replace(
        row, name=name, formula=formula, source=source, options=options, alias_of=of
    )
