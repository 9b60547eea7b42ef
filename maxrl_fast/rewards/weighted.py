"""Several rewards as one: their weighted sum, by the convention of TRL."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from maxrl_fast.errors import InputError
from maxrl_fast.rewards.pool import Failure, Scores


class RewardSource(Protocol):
    """What gives responses a reward: a Python function, a judge, a classifier, or several of them.

    One that derives from this accepts every row, and has no processes.
    """

    name: str  # as in --reward

    def score(
        self,
        rows: Sequence[dict[str, Any]],
        max_failures: int | None = None,
        on_progress: Callable[[], None] = lambda: None,
        group: int = 1,
    ) -> Scores:
        """Return the rewards of rows, each with "prompt", "response" and columns; `group` rows have the same prompt."""

    def check(self, row: dict[str, Any]) -> None:
        """Raise InputError if it cannot take such a row."""
        return

    def lines(self) -> list[str]:
        """Return what the start of a run says about it."""

    def faster(self, factor: float) -> str:
        """Return the option that makes it about this many times as fast; "" if there is none."""

    def stacks(self) -> None:
        """Write the stacks of its processes to standard error."""
        return

    def close(self) -> None:
        """End what it has started."""
        return


class WeightedRewards:
    """The weighted sum of several rewards.

    A reward that is NaN does not apply to its response and is left out of the sum, as in TRL. A response to which none applies,
    or for which one fails, has no reward: it counts as a failure.

    Args:
        sources: in the order of `weights`.
    """

    def __init__(self, sources: Sequence[RewardSource], weights: Sequence[float]) -> None:
        self._sources = [*zip(short_names([source.name for source in sources]), sources, weights, strict=True)]
        self.name = " ".join(source.name for source in sources)
        self.weights = {name: weight for name, _, weight in self._sources}  # by the names that the components have
        self._seconds = [0.0] * len(sources)  # of each, so far

    def score(
        self,
        rows: Sequence[dict[str, Any]],
        max_failures: int | None = None,
        on_progress: Callable[[], None] = lambda: None,
        group: int = 1,
    ) -> Scores:
        """Return the sums. The components are each source's value, by its name, and its components, by NAME.COMPONENT."""
        sums, components = [math.nan] * len(rows), [dict[str, float]() for _ in rows]
        failures = dict[int, Failure]()  # by row
        for s, (name, source, weight) in enumerate(self._sources):
            start = time.perf_counter()
            scores = source.score(rows, max_failures, on_progress, group)
            self._seconds[s] += time.perf_counter() - start
            own = [replace(failure, message=f"{name}: {failure.message}") for failure in scores.failures]
            if scores.num_left:
                return Scores([0.0] * len(rows), own, scores.num_left, components)
            failures = {failure.index: failure for failure in own} | failures
            for i, reward in enumerate(scores.rewards):
                if i not in failures and not math.isnan(reward):
                    sums[i] = weight * reward + (0.0 if math.isnan(sums[i]) else sums[i])
                    components[i][name] = reward
                    components[i] |= {f"{name}.{part}": x for part, x in scores.components[i].items()}
        for i, reward in enumerate(sums):
            if math.isnan(reward):
                failures.setdefault(i, Failure(i, "invalid", "no reward applies to this response: all are None or NaN"))
        rewards = [0.0 if i in failures else reward for i, reward in enumerate(sums)]
        return Scores(rewards, [failures[i] for i in sorted(failures)], 0, components)

    def check(self, row: dict[str, Any]) -> None:
        """Raise InputError if one cannot take such a row."""
        for _, source, _ in self._sources:
            source.check(row)

    def lines(self) -> list[str]:
        """Return what the start of a run says about each, and the sum."""
        lines = [line for _, source, _ in self._sources for line in source.lines()]
        return [*dict.fromkeys(lines), "reward: " + " + ".join(f"{weight:g} {name}" for name, _, weight in self._sources)]

    def faster(self, factor: float) -> str:
        """Return the option that makes the slowest of them about this many times as fast."""
        return self._sources[self._seconds.index(max(self._seconds))][1].faster(factor)

    def stacks(self) -> None:
        """Write the stacks of all processes to standard error."""
        for _, source, _ in self._sources:
            source.stacks()

    def close(self) -> None:
        """End what they have started."""
        for _, source, _ in self._sources:
            source.close()


def short_names(names: Sequence[str]) -> list[str]:
    """Return a short name for each reward: its function or model, with its file or a number where two would be the same.

    Raises:
        InputError: if a reward is named twice.
    """
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"--reward must name each function once, got {name} twice")
    short = [name.rpartition(":")[2].rpartition("/")[2] for name in names]
    if len(set(short)) < len(short):
        short = [f"{Path(name.rpartition(':')[0]).stem}.{last}" for name, last in zip(names, short, strict=True)]
    return short if len(set(short)) == len(short) else [f"{last}_{i}" for i, last in enumerate(short, start=1)]
