"""Means over runs that differ in their seeds alone: pass@k or max@k before and after training."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from maxrl_fast.evaluation.coverage import Interval
from maxrl_fast.evaluation.scores import MAX, PASS

# 97.5% quantiles of Student's t distribution of 1, 2, ... degrees of freedom
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def mean_over_seeds(values: Sequence[float]) -> Interval:
    """Return the mean of one number per seed with its 95% interval by Student's t distribution; of
    one seed the mean alone."""
    mean, free = statistics.fmean(values), len(values) - 1
    if not free:
        return {"mean": mean}
    # beyond the table, the first terms of the expansion about the normal quantile
    t = T_QUANTILES[free - 1] if free <= len(T_QUANTILES) else 1.96 + 2.372 / free + 2.82 / free**2
    half = t * statistics.stdev(values) / len(values) ** 0.5
    return {"mean": mean, "low": mean - half, "high": mean + half}


def over_seeds(ends: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """Return pass@k and max@k over seeds, at the k that all runs have: their means before and after
    training, and the mean change, whose interval is over the change of each seed.

    Args:
        ends: for each seed the first and the last record of eval.jsonl."""
    row: dict[str, Any] = {"seeds": [*ends]}
    for score in (PASS, MAX):
        pairs = [(before[score], after[score]) for before, after in ends.values()]
        sizes = [k for k in pairs[0][0] if all(k in x for pair in pairs for x in pair)]
        row[score] = {
            k: {
                "before": statistics.fmean(before[k] for before, _ in pairs),
                "after": statistics.fmean(after[k] for _, after in pairs),
                "change": mean_over_seeds([after[k] - before[k] for before, after in pairs]),
            }
            for k in sizes
        }
    return row
