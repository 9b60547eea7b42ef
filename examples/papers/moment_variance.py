"""MaxPO's Figure 3 on mazes: the proxy for the variance of the gradient, from Adam's moments, of
MaxPO and PKPO, at the scales of their advantages and at the same scale.

    python examples/papers/moment_variance.py

The proxy is the sum over the weights of v - m^2, with Adam's bias-corrected moments, so a factor
of the advantages enters it as its square. `maxpo` and `expected_improvement` estimate the same
gradient without a factor between them; `pkpo` is K/N times the latter. Gradients are not clipped
here, because a clip gives all of them the same scale. Finished runs are kept in --work, and the
same command continues with those that are missing.
"""

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table
from runner import (
    MazeSettings,
    cell,
    check_methods,
    draw_series,
    run,
    run_steps,
    series,
    show_table,
)
from torch import Tensor

REFERENCE = "maxpo"
METHODS = (REFERENCE, "expected_improvement", "pkpo")
ROLLOUTS, K = 16, 4
EVALUATIONS = 10


@dataclass(frozen=True)
class MomentSettings(MazeSettings):
    """The moment-variance proxy of MaxPO, of expected improvement and of PKPO over training: 2
    minutes on one core. --threads is the number of simultaneous runs, each with one thread."""

    methods: tuple[str, ...] = METHODS
    """Of maxpo, expected_improvement and pkpo, with k = 4 and 16 rollouts of a maze."""
    steps: int = 60
    """Steps of one update; a multiple of 10, the evaluations besides that of the warm start."""
    prompts: int = 16
    """Prompts of a step."""
    eval_samples: int = 16
    eval_mazes: int = 32


def experiment(settings: MomentSettings) -> dict[str, Any]:
    check_methods(settings.methods, METHODS, settings)
    shared = {"rollouts": ROLLOUTS, "k": K, "clip_grad": 1e9, "updates_per_step": 1}
    methods = {f"moments-{name}": {**shared, "objective": name} for name in settings.methods}
    runs = run_steps(settings, methods, settings.steps, EVALUATIONS)
    for one in runs:
        one["method"] = one["method"].removeprefix("moments-")
    show(runs)
    return {"runs": runs}


def halves(runs: list[dict[str, Any]], method: str, key: str) -> tuple[Tensor, Tensor]:
    """Return the means of the first and of the second half of the points of `series`: [seeds]."""
    values = series(runs, method, key)
    half = values.shape[1] // 2
    return values[:, :half].mean(1), values[:, half:].mean(1)


def show(runs: list[dict[str, Any]]) -> None:
    """Print means over seeds with their standard errors; ratios are by seed."""
    names = list(dict.fromkeys(one["method"] for one in runs))
    table = Table("")
    for title in ("proxy", f"proxy / {REFERENCE}'s", "pass@1", "pass@16"):
        table.add_column(f"{title}, first half")
        table.add_column("second half")
    for name in names:
        proxies, ratios = halves(runs, name, "moment_variance"), ["", ""]
        if REFERENCE in names:
            of_reference = halves(runs, REFERENCE, "moment_variance")
            ratios = [cell(x / y) for x, y in zip(proxies, of_reference, strict=True)]
        passes = [cell(x) for key in ("pass@1", "pass@16") for x in halves(runs, name, key)]
        table.add_row(name, *(cell(x, 4) for x in proxies), *ratios, *passes)
    show_table(table)


def draw(record: dict[str, Any]) -> Figure:
    """Draw the proxy, at a linear and a logarithmic scale, and pass@16 by step."""
    figure = Figure(figsize=(14, 4), layout="constrained")
    runs, end = record["results"]["runs"], record["settings"]["steps"]
    linear, logarithmic, passes = figure.subplots(1, 3)
    draw_series(linear, [one for one in runs if one["method"] != "pkpo"], "moment_variance", end)
    linear.set(title="proxy, at the same scale", xlabel="step")
    draw_series(logarithmic, runs, "moment_variance", end)
    logarithmic.set(title="proxy, as the objectives are", xlabel="step", yscale="log")
    logarithmic.legend()
    draw_series(passes, runs, "pass@16", end)
    passes.set(title="pass@16 of held-out mazes", xlabel="step")
    return figure


main = partial(run, "moment_variance", MomentSettings, experiment, draw)

if __name__ == "__main__":
    sys.exit(main())
