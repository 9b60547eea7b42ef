"""Rewards from several sources, as a weighted sum, and from a vote of the responses."""

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from maxrl_fast.errors import InputError
from maxrl_fast.rewards import Failure, Progress, RewardSource, Rows, Scores, no_progress
from maxrl_fast.rewards.function import result_of


class WeightedRewards(RewardSource):
    """The weighted sum of several rewards.

    A reward that is NaN does not apply to its response and is left out of the sum, as in TRL. A
    response to which none applies, or for which one fails, has no reward: it counts as a failure.

    Args:
        sources: in the order of `weights`.
    """

    def __init__(self, sources: Sequence[RewardSource], weights: Sequence[float]) -> None:
        self._sources = [
            *zip(short_names([source.name for source in sources]), sources, weights, strict=True)
        ]
        self.name = " ".join(source.name for source in sources)
        # by the names that the components have
        self.weights = {name: weight for name, _, weight in self._sources}
        self._seconds = [0.0] * len(sources)  # of each, so far
        self.wants_raw = any(source.wants_raw for source in sources)

    def score(
        self,
        rows: Rows,
        max_failures: int | None = None,
        on_progress: Progress = no_progress,
        group: int = 1,
    ) -> Scores:
        """Return the sums. The components are each source's value, by its name, and its components,
        by NAME.COMPONENT.
        """
        sums, components = [math.nan] * len(rows), [dict[str, float]() for _ in rows]
        failures = dict[int, Failure]()  # by row
        for s, (name, source, weight) in enumerate(self._sources):
            start = time.perf_counter()
            scores = source.score(rows, max_failures, on_progress, group)
            self._seconds[s] += time.perf_counter() - start
            own = [
                replace(failure, message=f"{name}: {failure.message}")
                for failure in scores.failures
            ]
            if scores.num_left:
                return Scores([0.0] * len(rows), own, scores.num_left, components)
            failures = {failure.index: failure for failure in own} | failures
            for i, reward in enumerate(scores.rewards):
                if i not in failures and not math.isnan(reward):
                    sums[i] = weight * reward + (0.0 if math.isnan(sums[i]) else sums[i])
                    components[i][name] = reward
                    components[i] |= {
                        f"{name}.{part}": x for part, x in scores.components[i].items()
                    }
        none = "no reward applies to this response: all are None or NaN"
        for i, reward in enumerate(sums):
            result = {"message": none} if math.isnan(reward) else result_of(reward)
            if "message" in result:
                failures.setdefault(i, Failure(i, "invalid", result["message"]))
        rewards = [0.0 if i in failures else reward for i, reward in enumerate(sums)]
        return Scores(rewards, [failures[i] for i in sorted(failures)], 0, components)

    def check(self, row: dict[str, Any]) -> None:
        for _, source, _ in self._sources:
            source.check(row)

    def lines(self) -> list[str]:
        lines = [line for _, source, _ in self._sources for line in source.lines()]
        return [
            *dict.fromkeys(lines),
            "reward: " + " + ".join(f"{weight:g} {name}" for name, _, weight in self._sources),
        ]

    def faster(self, factor: float) -> str:
        return self._sources[self._seconds.index(max(self._seconds))][1].faster(factor)

    def close(self) -> None:
        for _, source, _ in self._sources:
            source.close()


def short_names(names: Sequence[str]) -> list[str]:
    """Return the function or model of each reward, with its file or a number if two are equal."""
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"--reward must name each function once, got {name} twice")
    short = [name.rpartition(":")[2].rpartition("/")[2] for name in names]
    if len(set(short)) < len(short):
        short = [
            f"{Path(name.rpartition(':')[0]).stem}.{last}"
            for name, last in zip(names, short, strict=True)
        ]
    return (
        short
        if len(set(short)) == len(short)
        else [f"{last}_{i}" for i, last in enumerate(short, start=1)]
    )


class MajorityVote(RewardSource):
    """Reward 1 for the most frequent answer among the responses to a prompt, 0 for the others (SRT,
    Shafayat et al. 2025; TTRL, Zuo et al. 2025).

    Answers are compared as text. Responses without an answer do not vote; a tie goes to the answer
    that was sampled first.

    Args:
        answer: returns the answer in a response, "" if it has none, such as Task.answer.
    """

    name = "majority vote"

    def __init__(self, answer: Callable[[str], str]) -> None:
        self._answer = answer

    def score(
        self,
        rows: Rows,
        max_failures: int | None = None,
        on_progress: Progress = no_progress,
        group: int = 1,
    ) -> Scores:
        answers, rewards = [self._answer(row["response"]) for row in rows], list[float]()
        for start in range(0, len(answers), group):
            of_prompt = answers[start : start + group]
            # of a tie, the first
            votes = Counter(answer for answer in of_prompt if answer).most_common(1)
            rewards += [float(bool(votes) and answer == votes[0][0]) for answer in of_prompt]
            on_progress()
        return Scores(rewards, [], components=[{} for _ in rows])

    def lines(self) -> list[str]:
        return [
            "reward: 1 for the answer that most responses to the prompt give; evaluation has labels"
        ]
