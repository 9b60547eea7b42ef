"""A row of the table of group advantages (estimators.py): what the kernel computes, its steps, and what a call must give."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import check_finite, check_number
from maxrl_fast.ops.custom_advantage import CustomAdvantage
from maxrl_fast.ops.groups import Groups

STD = {"eps": 1e-6, "ddof": 1.0}  # options of a standard deviation
ENUMERATED = "no closed form: --weights"


@dataclass(frozen=True)
class Size:
    """The k of max@k or the order of MaxRL: an integer from `smallest` to N - `below_n`."""

    name: str
    smallest: int = 1
    below_n: int = 1
    required: bool = True  # otherwise the largest size is the default

    def wanted(self, n: int | None = None) -> str:
        largest = f"N-{self.below_n}" if self.below_n else "N"
        return f"{self.smallest} <= {self.name} <= {largest}" + ("" if n is None else f" = {n - self.below_n}")


@dataclass(frozen=True)
class Inputs:
    """The input of the steps around the kernel, and of functions in its place; tensors are [G, N] or [S]."""

    groups: Groups
    rewards: Tensor
    lengths: Tensor | None  # int64, tokens of each response
    logprobs: Tensor | None  # mean log-probability of each response's tokens
    greedy_correct: Tensor | None  # bool, whether the prompt's greedy response is correct
    greedy_rewards: Tensor | None  # reward of the prompt's greedy response
    prompts: Sequence[Any] | None  # [G]
    reward_parts: Tensor | None  # [R, ...], the rewards of which `rewards` is the sum; NaN where one does not apply
    reward_weights: tuple[float, ...]  # [R], empty without parts
    log_ratios: Tensor | None = None  # log of the policy's probability of each response over the sampler's
    size: int = 0  # k or the order; 0: the largest
    max_group_size: int = 0  # an upper bound of the sizes of uneven groups; 0: not known


def unchanged(_: Mapping[str, float]) -> tuple[float, float]:
    return 1.0, 0.0


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """A row of the table. `value`, `baseline` and `scale` are the choices of csrc/group_advantage.h.

    Its functions are those of modules, not lambdas, so that a row can be pickled, as Ray does to send it to its workers.
    """

    formula: str  # as people write it
    table_form: str = ""  # how the kernel computes it where `table` is given: weights omega_j by rank, or by C
    source: str
    weight: str  # W_N(p), for people
    alias_of: str | None = None  # the estimator with the same formula, which may have other defaults
    table: Callable[[int, Any], Tensor] | None = None  # of n and the size or the quantile: estimator_tables.py
    value: str = "reward"  # "rank" or "binary" with a table
    baseline: str = "zero"
    scale: str = "one"
    centred: bool = False  # whether the values of the table add up to 0 in every group
    size: Size | None = None
    scales_by_k: bool = False  # whether `scale_by_k` multiplies by k
    options: Mapping[str, float | None] = field(default_factory=dict)  # name and default; None: must be given
    inputs: tuple[str, ...] = ()  # beside the rewards: lengths, logprobs, greedy_correct, greedy_rewards, ...
    affine: Callable[[Mapping[str, float]], tuple[float, float]] = unchanged  # of the options; returns gain and bias
    before: Callable[[Inputs, Mapping[str, float]], Tensor] | None = None  # returns the rewards to take instead
    after: Callable[[Tensor, Inputs, Mapping[str, float]], Tensor] | None = None  # changes the kernel's advantages
    custom: CustomAdvantage | None = None  # a function that is called instead of the kernel
    over_batch: bool = False  # whether the advantages of a group depend on the other groups
    min_rollouts: int = 2  # the smallest group that training makes sense with

    @property
    def binary(self) -> bool:
        """Whether the table is indexed by the number of correct rollouts, not by rank: rewards must be 0 or 1."""
        return self.value == "binary"

    @property
    def is_centred(self) -> bool:
        """Whether the kernel's advantages of every group add up to 0, so that the advantage in a group of one is 0.

        A step `after` the kernel may change that.
        """
        return self.baseline == "mean" or self.centred

    @property
    def has_weight(self) -> bool:
        """Whether W_N(p) exists: the advantages depend only on the rewards of the group."""
        return self.before is None and self.after is None and self.custom is None

    @property
    def needs(self) -> str:
        """Return what a group and a call must have, for people."""
        needs = [self.size.wanted() if self.size else f"N >= {self.min_rollouts}", *self.inputs]
        needs += [name for name, default in self.options.items() if default is None]
        return ", ".join([*needs, "rewards 0 or 1"] if self.binary else needs)

    def table_of(self, n: int, parameter: float) -> Tensor:
        """Return the table of groups of n for the size (0: the largest) or the quantile; zeros if n is too small."""
        assert self.table is not None
        if self.size is not None:
            parameter = int(parameter) or n - self.size.below_n
            if not self.size.smallest <= parameter <= n - self.size.below_n:
                return torch.zeros(2, n + self.binary, dtype=torch.float64)
        return self.table(n, parameter)

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
        self.check_size(name, size, n)
        return size

    def check_size(self, name: str, size: int, n: int | None) -> None:
        """Raise ValueError with the range if the size does not fit groups of n (None: uneven, not known yet)."""
        assert self.size is not None
        if isinstance(size, bool) or not isinstance(size, int):
            raise ValueError(f"{name} needs an integer as {self.size.name}, got {size!r:.80}")
        largest = _LARGEST_SIZE if n is None else n - self.size.below_n
        if not self.size.smallest <= size <= largest:
            rollouts = "" if n is None else f" for N = {n} rollouts"
            raise ValueError(f"{name} needs {self.size.wanted(n)}{rollouts}, got {size!r:.80}")

    def resolve_options(self, name: str, given: Mapping[str, float]) -> dict[str, float]:
        """Return all options; raise ValueError if one is unknown, missing or outside its range."""
        if unknown := given.keys() - self.options.keys():
            takes = f"; it takes {', '.join(self.options)}" if self.options else ""
            raise ValueError(f"{name} takes no {', '.join(sorted(unknown))}{takes}")
        options = {**self.options, **given}
        if missing := [option for option, value in options.items() if value is None]:
            raise ValueError(f"{name} needs {' and '.join(missing)}")
        resolved = {option: _checked(option, value) for option, value in options.items()}
        if not resolved.get("false_positive_rate", 0.0) + resolved.get("false_negative_rate", 0.0) < 1:
            raise ValueError("false_positive_rate and false_negative_rate must add up to less than 1")
        return resolved


_LARGEST_SIZE = 2**53  # exact as the operator's parameter; no group is larger
_OPTIONS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "ddof": ("0 or 1", lambda x: x in (0.0, 1.0)),
    "eps": ("at least 0", lambda x: x >= 0),
    "clamp_delta": ("at least 0", lambda x: x >= 0),
    "quantile": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "false_positive_rate": ("in [0, 1)", lambda x: 0 <= x < 1),
    "false_negative_rate": ("in [0, 1)", lambda x: 0 <= x < 1),
    "score_range": ("above 0 and below .5", lambda x: 0 < x < 0.5),
}


def _checked(option: str, value: Any) -> float:
    """Return the value of an option; raise ValueError if it is outside its range."""
    number = check_finite(option, value)
    return check_number(option, value, *_OPTIONS[option]) if option in _OPTIONS else number
