"""All estimates of one evaluation, for the screen, the plot and eval.json."""

from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from maxrl_fast.evaluation.coverage import (
    Interval,
    Support,
    majority_at_k,
    max_at_k,
    powers_of_two,
    samples_to_match,
    support_classes,
)
from maxrl_fast.evaluation.diversity import Diversity
from maxrl_fast.evaluation.evaluator import is_correct
from maxrl_fast.evaluation.outcome import Outcome, Resampling
from maxrl_fast.evaluation.tables import baseline_table, coverage_table, numbers_table, outcome_rows
from maxrl_fast.evaluation.tally import SampleTally


@dataclass(frozen=True)
class Summary:
    """All estimates of one evaluation; dictionaries are by k."""

    own: Outcome
    other: Outcome | None
    drawn: dict[int, Interval]  # pass@k at ks and at the powers of two
    drawn_of_baseline: dict[int, Interval]
    best: dict[int, Interval]  # max@k
    majority: dict[int, Interval]  # maj@k
    gains: dict[int, Interval]  # pass@k minus the baseline's
    # number of samples that match the baseline's pass@k, if that is above 0
    matches: dict[int, int | None]
    support: Support | None
    ks: tuple[int, ...]

    @classmethod
    def of(
        cls,
        own: Outcome,
        other: Outcome | None,
        tally: SampleTally,
        ks: tuple[int, ...],
        resampling: Resampling,
    ) -> "Summary":
        """Compute the estimates; pass@k, max@k and maj@k are reported at `ks`."""
        n = own.num_samples
        points = sorted({*ks, *powers_of_two(n), n})
        rewards = tally.rewards.double()
        finite = rewards.nan_to_num()
        # A failed reward counts as the lowest reward or 0: no better than a wrong response on any
        # scale.
        rewards = torch.where(rewards.isnan(), finite.min().clamp_max(0), rewards)
        majority = majority_at_k(tally.answers, is_correct(tally.rewards), ks, resampling.seed)
        return cls(
            own=own,
            other=other,
            drawn=resampling.of_each(own.passes(points)),
            drawn_of_baseline=resampling.of_each(other.passes(points)) if other else {},
            best=resampling.of_each({k: max_at_k(rewards, k) for k in ks}),
            majority=resampling.of_each(dict(zip(ks, majority.T, strict=True))),
            gains=resampling.of_each(own.gains(other, list(ks))) if other else {},
            matches={
                k: samples_to_match(n, own.num_correct, reached)
                for k in ks
                # one sample of any policy matches 0
                if other and (reached := float(other.curve[k - 1])) > 0
            },
            support=support_classes(own.num_correct, other.num_correct) if other else None,
            ks=ks,
        )

    def tables(self, confidence: float) -> list[Table]:
        """Return the tables for the screen."""
        passes = {k: self.drawn[k] for k in self.ks}
        tables = [
            coverage_table(
                passes, self.best, self.majority, self.drawn_of_baseline or None, confidence
            )
        ]
        if self.other and self.support:
            tables.append(
                baseline_table(self.gains, self.matches, self.own.num_samples, confidence)
            )
            tables.append(numbers_table(outcome_rows([self.own, self.other]), ["this", "baseline"]))
            classes = {
                name.replace("_", " "): [count] for name, count in vars(self.support).items()
            }
            tables.append(numbers_table(classes, ["prompts"]))
        else:
            tables.append(numbers_table(outcome_rows([self.own]), [""]))
        return tables

    def curves(self) -> list[tuple[str, Tensor, dict[int, Interval]]]:
        """Return the curves of the plot: name, pass@k at every k, and intervals at some k."""
        curves = [(self.own.name, self.own.curve, self.drawn)]
        if self.other:
            curves.append(
                (f"{self.other.name} (baseline)", self.other.curve, self.drawn_of_baseline)
            )
        return curves

    def content(self, diversity: Diversity, tally: SampleTally, num_tokens: int) -> dict[str, Any]:
        """Return the estimates for eval.json."""
        values = tally.diversities
        content: dict[str, Any] = {
            "num_prompts": len(values),
            "num_samples": self.own.num_samples,
            "pass_at_k": _by_k({k: self.drawn[k] for k in self.ks}),
            "max_at_k": _by_k(self.best),
            "maj_at_k": _by_k(self.majority),
            "coverage": _by_k(self.drawn),
            "solved": self.own.solved,
            **{name: value for name, value in self.own.numbers.items() if name != "diversity"},
            "num_tokens": num_tokens,
            "diversity": {
                "of": diversity.name,
                "mean": self.own.numbers["diversity"],
                "num_prompts": sum(value is not None for value in values),
                "num_left_out": sum(value is None for value in values),
            },
            "per_prompt": {
                "id": tally.ids,
                "num_correct": self.own.num_correct.tolist(),
                "diversity": values,
            },
            "baseline": None,
        }
        if self.other and self.support:
            theirs = {k: self.drawn_of_baseline[k] for k in self.ks}
            content["baseline"] = {
                "name": self.other.name,
                "pass_at_k": _by_k(theirs),
                "gain": _by_k(self.gains),
                "samples_to_match": {
                    k: {"samples": m, "ratio": None if m is None else k / m}
                    for k, m in self.matches.items()
                },
                "support": vars(self.support),
                "solved": self.other.solved,
                **self.other.numbers,
                "num_correct": self.other.num_correct.tolist(),
            }
        return content


def _by_k(intervals: dict[int, Interval]) -> dict[int, dict[str, float]]:
    return {k: dict(vars(interval)) for k, interval in intervals.items()}
