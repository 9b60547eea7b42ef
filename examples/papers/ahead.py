"""Objectives whose samples are of older weights (--ahead): mazes at lag 0, 1 and 4, at an equal
number of sampled tokens.

    python examples/papers/ahead.py

All runs of a seed start from the same warm start. Finished runs are kept in --work, and the same
command continues with those that are missing. It measures what the lag costs, not what it saves.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.table import Table
from runner import check_methods, run, show_table, standard_error
from stopping import KS, StoppingSettings, compare
from torch import Tensor

from maxrl_fast.errors import InputError

METHODS: dict[str, dict[str, Any]] = {
    "maxrl": {"objective": "maxrl"},
    "maxrl-off-policy": {"objective": "maxrl_off_policy"},
    "maxrl-tis": {"objective": "maxrl", "loss": "reinforce"},  # from lag 1 on with tis
    "maxpo": {"objective": "maxpo", "k": 4},
    "maxpo-off-policy": {"objective": "maxpo_off_policy", "k": 4},
    "grpo": {"objective": "grpo"},
    "rloo": {"objective": "rloo", "loss": "ppo"},
}
SHOWN = (0, 1)  # pass@1 and pass@16, of KS
# A step beyond --steps is not sampled ahead.
COMMON = {"rollouts": 16, "steps": 100_000}


@dataclass(frozen=True)
class AheadSettings(StoppingSettings):
    """Seven methods at lag 0, 1 and 4: about 20 minutes on two cores. --threads is the number of
    simultaneous runs, each with one thread."""

    methods: tuple[str, ...] = tuple(METHODS)
    """Of maxrl, maxrl-off-policy, maxrl-tis, maxpo, maxpo-off-policy, grpo and rloo."""
    lags: tuple[int, ...] = (0, 1, 4)
    """Values of --ahead; differences are from the first."""
    tokens: int = 500_000
    eval_samples: int = 16
    evaluations: int = 4
    work: Path = Path("runs/ahead")


def experiment(settings: AheadSettings) -> dict[str, Any]:
    check_methods(settings.methods, METHODS, settings)
    if any(lag not in range(5) for lag in settings.lags):
        raise InputError(f"--lags must be 0 to 4, got {settings.lags}")
    keys = [(name, lag) for name in settings.methods for lag in settings.lags]
    methods = {f"{name}-lag{lag}": {**METHODS[name], **COMMON, "ahead": lag} for name, lag in keys}
    found = compare(settings, methods)
    runs = [
        {
            "method": name,
            "lag": lag,
            **{key: one[key] for key in ("tokens", "passes")},
            "steps": len(one["draws"]),
            "logprob_diff": sum(one["logprob_diff"]) / len(one["logprob_diff"]),
        }
        for (name, lag), one in zip(keys * settings.seeds, found, strict=True)
    ]
    show(runs)
    return {"runs": runs}


def passes(runs: Sequence[dict[str, Any]], name: str, lag: int) -> Tensor:
    """Return pass@k of each seed and evaluation, [seeds, evaluations, ks]."""
    own = [one for one in runs if (one["method"], one["lag"]) == (name, lag)]
    return torch.tensor([one["passes"] for one in own])


def show(runs: Sequence[dict[str, Any]]) -> None:
    """Print means over seeds with their standard errors, and differences paired by seed."""
    keys = dict.fromkeys((one["method"], one["lag"]) for one in runs)
    first, ks = runs[0]["lag"], KS[: len(runs[0]["passes"][0])]
    table = Table("", "lag", *(f"pass@{k}" for k in ks), *(f"pass@{k} - lag {first}" for k in ks))
    for column in ("log-prob diff", "steps"):
        table.add_column(column)
    for name, lag in keys:
        ends = passes(runs, name, lag)[:, -1]
        more = ends - passes(runs, name, first)[:, -1]
        cells = [
            f"{mean:{sign}.3f} ± {error:.3f}"
            for values, sign in ((ends, ""), (more, "+"))
            for mean, error in zip(values.mean(0), standard_error(values), strict=True)
        ]
        own = [one for one in runs if (one["method"], one["lag"]) == (name, lag)]
        means = [sum(one[key] for one in own) / len(own) for key in ("logprob_diff", "steps")]
        table.add_row(name, str(lag), *cells, f"{means[0]:.4f}", f"{means[1]:.0f}")
    show_table(table)


def draw(record: dict[str, Any]) -> Figure:
    """Draw pass@1 and pass@16 by sampled tokens, a line for each lag; errors are over seeds."""
    runs = record["results"]["runs"]
    names = list(dict.fromkeys(one["method"] for one in runs))
    figure = Figure(figsize=(1 + 2.3 * len(names), 5.4), layout="constrained")
    shown = [which for which in SHOWN if which < len(runs[0]["passes"][0])]
    panels = figure.subplots(len(shown), len(names), sharex=True, sharey="row", squeeze=False)
    for which, row in zip(shown, panels, strict=True):
        for name, axes in zip(names, row, strict=True):
            for lag in dict.fromkeys(one["lag"] for one in runs):
                values = passes(runs, name, lag)[..., which]
                own = [one for one in runs if (one["method"], one["lag"]) == (name, lag)]
                tokens = torch.tensor([one["tokens"] for one in own]).double().mean(0) / 1000
                axes.errorbar(tokens, values.mean(0), standard_error(values), label=f"lag {lag}")
            axes.grid(alpha=0.3)
        row[0].set_ylabel(f"pass@{KS[which]} of held-out mazes")
    for name, axes in zip(names, panels[0], strict=True):
        axes.set_title(name)
    for axes in panels[-1]:
        axes.set_xlabel("thousand tokens")
    panels[0, 0].legend()
    return figure


main = partial(run, "ahead", AheadSettings, experiment, draw)

if __name__ == "__main__":
    sys.exit(main())
