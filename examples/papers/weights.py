"""The weight of a prompt's gradient by its pass rate p: MaxRL's Figure 1 and Table 2, and every
estimator.

The paper's w(p) is for infinitely many rollouts. With N rollouts an estimator has its own exact
weight W_N(p): E[(1/N) sum_i A_i grad log pi(y_i)] = W_N(p) grad p. This script computes it for
every registered estimator that has one.

    python examples/papers/weights.py
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from rich.table import Table
from runner import Settings, run, show_table
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.ops import ESTIMATORS, effective_weight

SHOWN = (0.01, 0.05, 0.2, 0.5, 0.8, 0.95)  # pass rates in the table
DRAWN = (
    "rloo",
    "grpo",
    "maxrl",
    "maxrl_conditional",
    "maxpo",
    "ei_l1o",
    "passk_training",
    "bon_mean",
)
REQUIRED = {"false_positive_rate": 0.1, "false_negative_rate": 0.1}  # options without a default


@dataclass(frozen=True)
class WeightSettings(Settings):
    """The weight of a prompt's gradient by its pass rate: MaxRL's Figure 1 and Table 2, and every
    estimator at finite N. It takes a few seconds."""

    rollouts: tuple[int, ...] = (8, 16, 128)
    """Group sizes N."""
    k: int = 4
    """k of max@k, for the estimators that have it."""
    orders: tuple[int, ...] = (1, 4, 16, 64)
    """Orders T for MaxRL's population weights."""
    points: int = 60
    """Number of pass rates per curve, from .001 to .999, evenly spaced in the logit."""


def population_weights(p: Tensor, orders: Sequence[int]) -> dict[str, Tensor]:
    """Return Table 2: w(p) of reinforcement learning, GRPO, MaxRL of each order T, and maximum
    likelihood.
    """
    maxrl = {f"MaxRL, T = {order}": -torch.expm1(order * torch.log1p(-p)) / p for order in orders}
    return {"RL": torch.ones_like(p), "GRPO": (p * (1 - p)) ** -0.5, **maxrl, "ML": 1 / p}


def estimator_weights(p: Tensor, n: int, k: int) -> dict[str, Tensor]:
    """Return W_n(p) of every registered estimator whose advantages depend only on the group's
    rewards.
    """
    weights = {}
    for name, row in ESTIMATORS.items():
        if row.has_weight:
            options: dict[str, Any] = (
                {"k": k} if row.size is not None and row.size.name == "k" else {}
            )
            options |= {key: REQUIRED[key] for key in row.options if key in REQUIRED}
            weights[name] = effective_weight(name, n, p, **options)
    return weights


def experiment(settings: WeightSettings) -> dict[str, Any]:
    if not 2 <= settings.k < min(settings.rollouts):
        raise InputError(
            f"--k must be from 2 to the smallest of --rollouts less 1, got {settings.k}"
        )
    if settings.points < 2 or min(settings.orders) < 1:
        raise InputError("--points must be at least 2 and --orders at least 1")
    grid = torch.linspace(
        math.log(0.001 / 0.999), math.log(0.999 / 0.001), settings.points, dtype=torch.float64
    ).sigmoid()
    shown = torch.tensor(SHOWN, dtype=torch.float64)
    by_n = {
        n: (estimator_weights(grid, n, settings.k), estimator_weights(shown, n, settings.k))
        for n in settings.rollouts
    }
    results = {
        "pass_rates": grid.tolist(),
        "population": {
            name: w.tolist() for name, w in population_weights(grid, settings.orders).items()
        },
        "estimators": {
            f"{n}": {name: w.tolist() for name, w in curves.items()}
            for n, (curves, _) in by_n.items()
        },
        "table_pass_rates": list(SHOWN),
        "table_population": {
            name: w.tolist() for name, w in population_weights(shown, settings.orders).items()
        },
        "without_weight": {
            name: row.weight
            for name, row in ESTIMATORS.items()
            if not (row.has_weight or row.of_run)
        },
        "table_estimators": {
            f"{n}": {name: w.tolist() for name, w in rows.items()} for n, (_, rows) in by_n.items()
        },
    }
    show(results)
    return results


def show(results: dict[str, Any]) -> None:
    """Print the tables."""
    tables = {"w(p), infinitely many rollouts": results["table_population"]}
    tables |= {f"W_N(p), N = {n}": rows for n, rows in results["table_estimators"].items()}
    for title, rows in tables.items():
        table = Table("", *(f"p = {p:g}" for p in results["table_pass_rates"]), title=title)
        for name, weights in rows.items():
            # + 0.0: no -0.000
            table.add_row(name, *(f"{round(weight, 3) + 0.0:.3f}" for weight in weights))
        show_table(table)


def draw(record: dict[str, Any]) -> Figure:
    results, k = record["results"], record["settings"]["k"]
    figure = Figure(figsize=(11, 8.5), layout="constrained")
    panels = {"Infinitely many rollouts (MaxRL, Figure 1)": results["population"]}
    for n, curves in results["estimators"].items():
        panels[f"Estimators, N = {n}, k = {k}"] = {name: curves[name] for name in DRAWN}
    places = list(figure.subplots(-(-len(panels) // 2), 2, sharey=True, squeeze=False).flat)
    for place in places[len(panels) :]:
        place.set_axis_off()
    for place, (title, curves) in zip(places, panels.items(), strict=False):
        for name, weights in curves.items():
            place.plot(
                results["pass_rates"], weights, label=name, linestyle="--" if name == "ML" else "-"
            )
        place.set(
            title=title,
            xscale="logit",
            yscale="log",
            xlabel="pass rate p",
            ylim=(1e-2, 1e3),
            xlim=(1e-3, 0.999),
        )
        place.set(ylabel="weight of the prompt's gradient")
        place.xaxis.set_minor_formatter("")
        place.grid(alpha=0.3)
        place.legend(loc="upper right", fontsize=8, ncols=2)
    return figure


main = partial(run, "weights", WeightSettings, experiment, draw)

if __name__ == "__main__":
    sys.exit(main())
