"""Rewards as a weighted sum of several, and by a vote of the responses."""

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from maxrl_fast.errors import InputError
from maxrl_fast.rewards import Outcome, Outcomes, RewardSource, Rows, failure
from maxrl_fast.rewards.function import outcome_of


class WeightedRewards(RewardSource):
    """The weighted sum of several rewards. One that is None is left out, as in TRL; a response to
    which none applies, or for which one fails, has failed. The components are each source's value,
    by its name, and its components, by NAME.COMPONENT."""

    def __init__(self, sources: Sequence[RewardSource], weights: Sequence[float]) -> None:
        names = [source.name for source in sources]
        self.name, self._sources = " ".join(names), sources
        self.weights = dict(zip(short_names(names), weights, strict=True))
        self.wants_raw = any(source.wants_raw for source in sources)

    def outcomes(self, rows: Rows, group: int) -> Outcomes:
        sums: list[float | None] = [None] * len(rows)
        components, failed = [dict[str, float]() for _ in rows], set[int]()
        for s, (name, weight) in enumerate(self.weights.items()):
            with contextlib.closing(self._sources[s].outcomes(rows, group)) as coming:
                for one in coming:
                    i, outcome = one or (-1, Outcome())
                    if outcome.has_failed and i not in failed:
                        failed.add(i)
                        yield i, failure(outcome.kind, f"{name}: {outcome.message}")
                        continue
                    yield None
                    if outcome.reward is not None:
                        sums[i] = weight * outcome.reward + (sums[i] or 0.0)
                        components[i][name] = outcome.reward
                        for part, value in outcome.components.items():
                            components[i][f"{name}.{part}"] = value
        for i in {*range(len(rows))} - failed:
            yield i, outcome_of(sums[i])._replace(components=components[i])

    def lines(self) -> list[str]:
        lines = [line for source in self._sources for line in source.lines()]
        sums = " + ".join(f"{weight:g} {name}" for name, weight in self.weights.items())
        return [*dict.fromkeys(lines), f"reward: {sums}"]

    def close(self) -> None:
        for source in self._sources:
            source.close()


def short_names(names: Sequence[str]) -> list[str]:
    """Return each function or model, with its file if two are equal."""
    short = [name.rpartition(":")[2].rpartition("/")[2] for name in names]
    if len({*short}) < len(short):
        files = [Path(name.rpartition(":")[0]).stem for name in names]
        short = [f"{file}.{last}" for file, last in zip(files, short, strict=True)]
    if len({*short}) < len(short):
        raise InputError(f"--reward must name different functions, got {', '.join(names)}")
    return short


class MajorityVote(RewardSource):
    """Reward 1 for the most frequent answer, as text, to a prompt, else 0 (SRT, Shafayat et al.
    2025; TTRL, Zuo et al. 2025). `answer` returns that of a response; "" does not vote. A tie goes
    to the answer that was sampled first."""

    name = "majority vote"

    def __init__(self, answer: Callable[[str], str]) -> None:
        self._answer = answer

    def outcomes(self, rows: Rows, group: int) -> Outcomes:
        answers = [self._answer(row["response"]) for row in rows]
        for start in range(0, len(rows), group):
            of_prompt = answers[start : start + group]
            most = Counter(filter(None, of_prompt)).most_common(1)  # of a tie, the first
            for i, answer in enumerate(of_prompt, start):
                yield i, Outcome(float([answer] == [x for x, _ in most]))

    def lines(self) -> list[str]:
        what = "1 for the answer that most responses to the prompt give"
        return [f"reward: {what}; evaluation has labels"]
