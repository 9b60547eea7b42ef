"""The registry of group advantages: a function each, whose signature says what it takes and whose docstring is its formula.

    @estimator(source="RLOO, Kool et al. 2019", weight="1")
    def rloo(g: Group) -> Tensor:
        \"\"\"r - mean of the others.\"\"\"

Positional parameters after the group are inputs, one number for each rollout (INPUTS); keyword-only ones are options, and a
`Size` in the annotation of one makes it the k of max@k. What else stands in the docstring after an empty line is a note.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, get_args, get_type_hints

import torch
from torch import Tensor

from maxrl_fast.algorithms.group import Group
from maxrl_fast.algorithms.options import Limit, Option, check_options, options_of

# What estimators take beside the rewards. Tensors are [G, N], reward_parts [R, G, N]; prompts is a sequence of G.
INPUTS = ("lengths", "logprobs", "greedy_correct", "greedy_rewards", "reward_parts", "prompts", "log_ratios")
ENUMERATED = "no closed form: --weights"
_POSITIONAL = inspect.Parameter.POSITIONAL_OR_KEYWORD
_LARGEST_SIZE = 2**53  # exact in float64; no group is larger


@dataclass(frozen=True)
class Size:
    """The k of max@k or the order of MaxRL: an integer from `smallest` to N - `below_n`."""

    smallest: int = 1
    below_n: int = 1
    name: str = "k"
    required: bool = True  # otherwise the largest size is the default

    def wanted(self, n: int | None = None) -> str:
        largest = f"N-{self.below_n}" if self.below_n else "N"
        return f"{self.smallest} <= {self.name} <= {largest}" + ("" if n is None else f" = {n - self.below_n}")

    def check(self, owner: str, size: int, n: int | None) -> None:
        """Raise ValueError with the range if the size does not fit groups of n (None: uneven, not known yet)."""
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
Ddof = Annotated[int, Limit("0 or 1", lambda x: x in (0, 1))]


@dataclass(frozen=True)
class Kernel:
    """What the kernel (csrc/group_advantage.h) computes for an estimator: a table by rank, or by the number of correct rollouts
    where `binary`; without a table the rewards, minus their mean where `centred`, times 1, n/(n-1), 1/(std + eps) or
    1/(mean + eps)."""

    table: Callable[..., Tensor] | None = None  # of n, the size and the options
    binary: bool = False
    centred: bool = False
    scale: str = "one"  # "leave_one_out", "std" or "mean"

    def table_of(self, n: int, size: Size | None, k: int, options: tuple[float, ...]) -> Tensor:
        """Return the table of groups of n for size k (0: the largest); zeros if n is too small."""
        assert self.table is not None
        if size is not None:
            k = k or n - size.below_n
            if not size.smallest <= k <= n - size.below_n:
                return torch.zeros(2, n + self.binary, dtype=torch.float64)
        return self.table(n, k, *options)


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """A group advantage. Functions are those of modules, not lambdas, so that Ray can pickle a row for its workers."""

    name: str
    function: Callable[..., Tensor]
    formula: str  # as people write it
    source: str
    weight: str = ENUMERATED  # W_N(p), for people
    inputs: tuple[str, ...] = ()  # among INPUTS
    size: Size | None = None
    options: Mapping[str, Option] = field(default_factory=dict, hash=False)
    kernel: Kernel | None = None  # where there is one, the function is its reference
    binary: bool = False  # whether rewards must be 0 or 1
    centred: bool = False  # whether the advantage in a group of one is 0 for any size
    scales_by_k: bool = False  # whether `scale_by_k` multiplies by k
    over_batch: bool = False  # whether the advantages of a group may depend on the other groups
    takes_valid: bool = True  # whether rollouts may be left out, and groups uneven
    min_rollouts: int = 2  # the smallest group that training makes sense with
    alias_of: str | None = None  # the estimator with the same function, which may have other defaults

    @classmethod
    def of(cls, function: Callable[..., Any], **row: Any) -> "Estimator":
        """Return the row of a function of a Group, or of rewards [G, N] and what else it names (OfRewards).

        Raises:
            ValueError: if it is not callable, or has a parameter that nobody can give.
        """
        name = str(getattr(function, "__name__", type(function).__name__)).rstrip("_")
        if not callable(function):
            raise ValueError(f"an estimator must be a function of rewards, got {type(function).__name__}")
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            parameters = []
        if not parameters or parameters[0].kind not in (inspect.Parameter.POSITIONAL_ONLY, _POSITIONAL):
            raise ValueError(f"{name} must take rewards [G, N] as its first parameter")
        first, *others = parameters
        try:
            hints = get_type_hints(function, include_extras=True)
        except Exception:  # of an object that is called, or of a name that is not there
            hints = {}
        of_group = hints.get(first.name) is Group
        size, options = None, {}
        for parameter in others:
            found = _size_in(hints.get(parameter.name))
            if found is not None or parameter.name == "k":
                found = found or Size(below_n=0)
                size = replace(found, name=parameter.name, required=parameter.default is parameter.empty)
        if of_group:
            options = {key: option for key, option in options_of(function).items() if size is None or key != size.name}
        names = ["k", "valid", *INPUTS]
        known = {*names, *options, "reward_weights", "" if size is None else size.name}
        for parameter in others:
            is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if parameter.name not in known and not is_variadic and parameter.default is parameter.empty:
                raise ValueError(
                    f"{name} may ask for {', '.join(names)} beside the rewards, got the parameter {parameter.name}"
                )
        asked = tuple(parameter.name for parameter in others)
        if "reward_parts" in asked and "reward_weights" not in asked:
            raise ValueError(f"{name} asks for reward_parts, so it must ask for reward_weights too")
        formula = " ".join((inspect.getdoc(function) or f"the function {name}").split("\n\n")[0].split()).rstrip(".")
        return cls(
            **{"name": name, "formula": formula, "source": str(getattr(function, "__module__", "a plug-in"))} | row,
            function=function if of_group else OfRewards(function, "valid" in asked),
            inputs=tuple(key for key in asked if key in INPUTS),
            size=size,
            options=options,
            takes_valid=of_group or "valid" in asked,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return what to pickle: the limits of options are lambdas, and stand in the signature."""
        return vars(self) | {"options": {name: option.default for name, option in self.options.items()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        known, defaults = options_of(state["function"]) if state["options"] else {}, state["options"]
        options = {name: replace(known[name], default=default) for name, default in defaults.items()}
        vars(self).update(state | {"options": options})

    @property
    def has_weight(self) -> bool:
        """Whether W_N(p) exists: the advantages depend only on the rewards of the group, at equal lengths."""
        return not self.over_batch and set(self.inputs) <= {"lengths"}

    @property
    def needs(self) -> str:
        """Return what a group and a call must have, for people."""
        needs = [self.size.wanted() if self.size else f"N >= {self.min_rollouts}", *self.inputs]
        needs += [name for name, option in self.options.items() if option.default is None]
        return ", ".join([*needs, "rewards 0 or 1"] if self.binary else needs)

    def resolve_size(self, name: str, n: int | None, k: int | None, order: int | None) -> int:
        """Return the size, 0 for the largest; raise ValueError with the range if it does not fit groups of n."""
        given = {"k": k, "order": order}
        for option, value in given.items():
            if value is not None and (self.size is None or option != self.size.name):
                raise ValueError(f"{name} takes no {option}, got {option}={value!r:.80}")
        if self.size is None:
            return 0
        size = given[self.size.name]
        if size is None:
            if self.size.required:
                raise ValueError(f"{name} needs {self.size.name}, {self.size.wanted()}")
            return 0
        self.size.check(name, size, n)
        return size

    def resolve_options(self, name: str, given: Mapping[str, float]) -> dict[str, float]:
        """Return all options; raise ValueError if one is unknown, missing or outside its range."""
        return check_options(name, self.options, given)


@dataclass(frozen=True)
class OfRewards:
    """A function of rewards [G, N], floating, as a function of a group. It names what else it takes: k, an integer; valid
    [G, N] bool; and INPUTS."""

    function: Callable[..., Tensor]
    takes_valid: bool

    def __call__(self, g: Group, **given: Any) -> Tensor:
        for name, value in given.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                given[name] = value.to(g.dtype)
        if self.takes_valid:
            given["valid"] = g.valid
        return self.function(g.rewards.to(g.dtype, copy=True), **given)


ESTIMATORS: dict[str, Estimator] = {}


def estimator(*, source: str, **row: Any) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register the decorated function under its name. `row`: fields of Estimator."""

    def register(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        made = Estimator.of(function, source=source, **row)
        ESTIMATORS[made.name] = made
        return function

    return register


def alias(name: str, of: str, source: str, **defaults: float) -> None:
    """Register another name of an estimator, with other defaults if given."""
    row = ESTIMATORS[of]
    changed = " with " + ", ".join(f"{option} {value:g}" for option, value in defaults.items()) if defaults else ""
    options = {key: replace(option, default=defaults.get(key, option.default)) for key, option in row.options.items()}
    formula = f"{of}{changed}: {row.formula.split(';')[0]}"
    ESTIMATORS[name] = replace(row, name=name, formula=formula, source=source, options=options, alias_of=of)


def _size_in(hint: Any) -> Size | None:
    for part in (hint, *get_args(hint)):  # in Python 3.10 a default of None makes the hint optional
        for extra in getattr(part, "__metadata__", ()):
            if isinstance(extra, Size):
                return extra
    return None
