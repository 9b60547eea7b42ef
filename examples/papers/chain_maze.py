"""A maze that rewards a habit: REINFORCE, EI and EI + L2O with a tabular policy (MaxPO, appendix
G.2, Figure 7).

The maze is a chain of 1000 states (`ChainTask`). One of two actions leads on (the habitual one in
nine states of ten), and the other ends the episode. The policy has the logits theta[s, a] + b[a].
In a state that it has never visited it acts by the softmax of b alone, so the probability that b
gives to the rarer action is its tendency to explore. The figure shows the return, this probability,
and the ratio of the gradient variances of EI + L2O and EI on the same episodes.

Our copy of the paper lacks its batch sizes, K, learning rate, optimiser and share of the habit. All
of them are settings here, except the optimiser, which is plain gradient ascent from zero. For each
K and batch size, every method uses the learning rate of a common grid with the largest final return
on separate mazes.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from runner import Settings, check_least, rounded, run, tracked
from torch import Tensor
from torch.nn.functional import pad, softplus

from maxrl_fast.errors import InputError
from maxrl_fast.ops import group_advantage

sys.path.append(str(Path(__file__).parents[2]))

from examples.chain import HABIT, LEFT, ChainTask

METHODS = {
    "REINFORCE": "rloo",
    "REINFORCE + entropy": "rloo",
    "EI": "expected_improvement",
    "EI + L2O": "maxpo",
}
ENTROPY_BONUS = 0.01  # the paper's


@dataclass(frozen=True)
class ChainMaze(Settings):
    __doc__ = f"{__doc__}\nIt takes under 6 minutes on two cores."

    length: int = 1000
    """States of the chain, and the largest return."""
    habit: float = HABIT
    """Share of the states in which the habitual action leads on."""
    iterations: int = 3000
    """Gradient steps."""
    batch_sizes: tuple[int, ...] = (8, 16, 32)
    """N, the episodes of one gradient, which form one group."""
    ks: tuple[int, ...] = (2, 4, 8)
    """K of max@K; values of N or more are skipped."""
    learning_rates: tuple[float, ...] = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
    """Grid of learning rates."""
    search_seeds: int = 15
    """Mazes for the search of the learning rates, different from those of the results."""
    seeds: int = 20
    """Mazes for the results, each with its own episodes."""
    records: int = 50
    """Points per curve."""
    variance_batches: int = 64
    """Batches under one policy for each estimate of a gradient's variance."""


@dataclass(frozen=True)
class Arm:
    """A method with its N and K; k is None for REINFORCE."""

    method: str
    n: int
    k: int | None

    def weights(self, returns: Tensor) -> Tensor:
        """Return the weights of the episodes' scores in the gradient estimate, for returns [...,
        N].
        """
        return group_advantage(returns, METHODS[self.method], k=self.k) / self.n


@dataclass(frozen=True)
class Mazes:
    """One chain per seed."""

    sign: Tensor  # [S, L], 1 if the rarer action leads on, -1 if the habitual one does
    dead_end: Tensor  # [S, L+1], 1 if the wrong action is also a step; 0 at the goal


def mazes_of(length: int, seeds: range, habit: float = HABIT) -> Mazes:
    """Return the chains of ChainTask for these seeds."""
    tasks = [ChainTask(length, seed, habit) for seed in seeds]
    sign = torch.stack([torch.where(task.actions == LEFT, 1.0, -1.0) for task in tasks])
    return Mazes(sign, pad(torch.stack([task.has_dead_end for task in tasks]).float(), (0, 1)))


def hazard(log_odds: Tensor, sign: Tensor) -> Tensor:
    """Return -log P(pass states 0..s), [..., L], from the log-odds of the rarer action."""
    return softplus(-log_odds * sign).cumsum(-1)


def walk(hazards: Tensor, episodes: int, generator: torch.Generator) -> Tensor:
    """Sample the steps forward before the wrong action, [..., E], by inverting their distribution:
    one draw per episode.
    """
    draws = torch.empty(*hazards.shape[:-1], episodes, dtype=hazards.dtype).exponential_(
        generator=generator
    )
    return torch.searchsorted(hazards, draws)


def returns_of(forward: Tensor, dead_end: Tensor) -> Tensor:
    """Return the returns [..., E]: the steps forward, plus one into a dead end."""
    return forward + dead_end.expand(*forward.shape[:-1], -1).gather(-1, forward)


def expected_return(hazards: Tensor, dead_end: Tensor) -> Tensor:
    """Return the exact expected return of the policy, [...]."""
    onward = (-hazards).exp()
    stopped = pad(onward, (1, 0), value=1.0)[..., :-1] - onward  # P(the episode ends in state s)
    return (onward + stopped * dead_end[..., :-1]).sum(-1)


def reaching(forward: Tensor, weights: Tensor, length: int) -> Tensor:
    """Return the total weight of the episodes that reach each state, [..., L+1]."""
    zeros = weights.new_zeros(*weights.shape[:-1], length + 1)
    return zeros.scatter_add(-1, length - forward, weights).cumsum(-1).flip(-1)


def score(log_odds: Tensor, sign: Tensor, forward: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum over episodes of d log pi / d theta[s, rarer], [..., L]; theta[s,
    habitual] has its negative.

    Every action of an episode except its last led on. With q the probability of the action that
    leads on in state s, each episode that passed s contributes 1 - q, and each that ended in s
    contributes -q. The sign flips if the habitual action leads on.
    """
    reached = reaching(forward, weights, sign.shape[-1])
    return sign * (reached[..., 1:] - torch.sigmoid(log_odds * sign) * reached[..., :-1])


def entropy_gradient(log_odds: Tensor, forward: Tensor) -> Tensor:
    """Return d/d theta[s, rarer] of the policy's entropy, summed over an episode's states, mean
    over episodes, [..., L].
    """
    length = log_odds.shape[-1]
    share = log_odds.new_full(forward.shape, 1 / forward.shape[-1])
    p = log_odds.sigmoid()
    return -log_odds * p * (1 - p) * reaching(forward, share, length)[..., :-1]


def variance_ratio(
    log_odds: Tensor, mazes: Mazes, arm: Arm, batches: int, generator: torch.Generator
) -> Tensor:
    """Return Var(EI + L2O) / Var(EI), [S], under the policy [S, L] and on the same batches; NaN if
    neither varies.
    """
    forward = walk(hazard(log_odds, mazes.sign), batches * arm.n, generator).view(
        -1, batches, arm.n
    )
    returns = returns_of(forward, mazes.dead_end[:, None])
    totals = []
    for method in ("EI + L2O", "EI"):
        weights = Arm(method, arm.n, arm.k).weights(returns)
        gradients = score(log_odds[:, None], mazes.sign[:, None], forward, weights)  # [S, M, L]
        # Sum over all theta[s, rarer] and b[rarer], whose gradient is their sum. The habitual
        # action would double both totals.
        totals.append(gradients.var(1).sum(-1) + gradients.sum(-1).var(1))
    return totals[0] / totals[1]


def train(
    settings: ChainMaze,
    arms: Sequence[Arm],
    rates: Tensor,
    mazes: Mazes,
    generator: torch.Generator,
    what: str,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Train every arm with its learning rates [A, P] on every maze, all in lockstep.

    Yields, at each point of a curve, the number of gradient steps, the log-odds of the rarer action
    [A, P, S, L], and the part of them that comes from b [A, P, S].
    """
    # [A, P, S, L], theta[s, rarer] - theta[s, habitual]
    theta = torch.zeros(*rates.shape, *mazes.sign.shape)
    b = torch.zeros(theta.shape[:-1])
    largest = max(arm.n for arm in arms)
    points = {
        round(i * settings.iterations / settings.records) for i in range(settings.records + 1)
    }
    for step in tracked(range(settings.iterations + 1), what):
        log_odds = theta + b[..., None]
        if step in points:
            yield step, log_odds, b
        forward = walk(hazard(log_odds, mazes.sign), largest, generator)  # [A, P, S, N]
        returns = returns_of(forward, mazes.dead_end)
        weights = torch.zeros_like(returns)  # they remain 0 beyond an arm's batch
        for a, arm in enumerate(arms):
            weights[a, ..., : arm.n] = arm.weights(returns[a, ..., : arm.n])
        gradient = score(log_odds, mazes.sign, forward, weights)
        for a, arm in enumerate(arms):
            if "entropy" in arm.method:
                gradient[a] += ENTROPY_BONUS * entropy_gradient(
                    log_odds[a], forward[a, ..., : arm.n]
                )
        # The factor 2: theta is the difference of two logits with opposite gradients.
        theta += 2 * rates[..., None, None] * gradient
        b = b + 2 * rates[..., None] * gradient.sum(-1)


def check(settings: ChainMaze) -> None:
    check_least(settings, length=2, iterations=1, search_seeds=1, seeds=2, records=1)
    check_least(settings, variance_batches=2)
    if not 0.5 <= settings.habit < 1:
        raise InputError(f"--habit must be at least 0.5 and below 1, got {settings.habit}")
    if (
        not settings.batch_sizes
        or not settings.ks
        or not 2 <= min(settings.ks) < min(settings.batch_sizes)
    ):
        raise InputError(
            "--ks must be at least 2, the smallest of them below each of --batch-sizes"
        )
    if not settings.learning_rates or not all(
        0 < rate < float("inf") for rate in settings.learning_rates
    ):
        raise InputError("--learning-rates must be above 0")


def mean_and_error(values: Tensor) -> dict[str, list[float | None]]:
    """Return the mean over mazes and its standard error, for values [T, S]."""
    return {
        "mean": rounded(values.mean(-1)),
        "error": rounded(values.std(-1) / values.shape[-1] ** 0.5),
    }


def median_and_quartiles(values: Tensor) -> dict[str, list[float | None]]:
    """Return the median and quartiles over mazes, for values [T, S], ignoring NaN.

    Values near 0 or near 0/0 in some mazes would make means useless.
    """
    quantiles = values.nanquantile(torch.tensor([0.5, 0.25, 0.75]), -1)
    return dict(zip(("median", "low", "high"), map(rounded, quantiles), strict=True))


def experiment(settings: ChainMaze) -> dict[str, Any]:
    """Search the learning rates on a grid, and train with the best."""
    check(settings)
    start = settings.seed + settings.seeds
    mazes = mazes_of(settings.length, range(settings.seed, start), settings.habit)
    others = mazes_of(settings.length, range(start, start + settings.search_seeds), settings.habit)
    generator = torch.Generator().manual_seed(settings.seed)
    sizes = {method: settings.ks if method.startswith("EI") else (None,) for method in METHODS}
    arms = [
        Arm(method, n, k)
        for method in METHODS
        for k in sizes[method]
        for n in settings.batch_sizes
        if (k or 1) < n
    ]

    grid = torch.tensor(settings.learning_rates)
    *_, (_, log_odds, _) = train(
        settings, arms, grid.expand(len(arms), -1), others, generator, "learning rates"
    )
    searched = expected_return(hazard(log_odds, others.sign), others.dead_end).mean(-1)  # [A, P]
    best = grid[searched.argmax(1)]

    # a point is [A, 3, S]: return, probability of the rarer action, ratio of variances
    steps, points = [], []
    for step, log_odds, b in train(settings, arms, best[:, None], mazes, generator, "training"):
        returns = expected_return(hazard(log_odds, mazes.sign), mazes.dead_end)
        ratios = torch.full_like(b, torch.nan)
        for a, arm in enumerate(arms):
            if arm.method == "EI + L2O":
                ratios[a] = variance_ratio(
                    log_odds[a, 0], mazes, arm, settings.variance_batches, generator
                )
        steps.append(step)
        points.append(torch.cat([returns, b.sigmoid(), ratios], 1))
    curves = torch.stack(points, 2)  # [A, 3, T, S]

    rows: list[dict[str, Any]] = []
    for a, arm in enumerate(arms):
        returns, rarer, ratios = curves[a]
        row: dict[str, Any] = {"method": arm.method, "n": arm.n, "k": arm.k}
        row |= {"learning_rate": rounded(best)[a], "searched": rounded(searched[a])}
        row["curves"] = {"return": mean_and_error(returns), "rarer": median_and_quartiles(rarer)}
        if arm.method == "EI + L2O":
            row["curves"]["ratio"] = median_and_quartiles(ratios)
            # Over the training. Under some policies almost all batches are equal, and one such
            # ratio can dominate the mean.
            row["median_ratio"] = mean_and_error(ratios.nanmedian(0, keepdim=True).values)
            row["mean_ratio"] = mean_and_error(ratios.nanmean(0, keepdim=True))
            twin = arms.index(Arm("EI", arm.n, arm.k))
            row["gain_over_ei"] = mean_and_error((returns - curves[twin, 0])[-1:])  # paired by maze
        rows.append(row)
    habit = expected_return(
        hazard(torch.full_like(mazes.sign, -1e6), mazes.sign), mazes.dead_end
    ).mean()
    results = {"steps": steps, "return_of_habit": round(float(habit), 4), "arms": rows}
    print(table(results))
    return results


def table(results: dict[str, Any]) -> str:
    """Format the results at the end of the training."""

    def cell(value: dict[str, list[float | None]] | None, form: str) -> str:
        return (
            ""
            if value is None or value["mean"][-1] is None
            else f"{value['mean'][-1]:{form}} ± {value['error'][-1]:{form}}"
        )

    lines = [
        "Mean ± standard error over mazes after training; for p(rarer) the median. The variance "
        "ratio of EI + L2O to EI is the",
        "median or the mean over the training.",
        f"Always choosing the habit returns {results['return_of_habit']:.1f}.",
        f"{'':<19}   N  K  rate          return  L2O's gain     median ratio       mean ratio  "
        "p(rarer) by b",
    ]
    for row in results["arms"]:
        lines.append(
            f"{row['method']:<19} {row['n']:>3} {row['k'] or '':>2} {row['learning_rate']:>5g}"
            f"  {cell(row['curves']['return'], '.1f'):>14}  "
            f"{cell(row.get('gain_over_ei'), '.1f'):>13}"
            f"  {cell(row.get('median_ratio'), '.3f'):>15}  "
            f"{cell(row.get('mean_ratio'), '.3f'):>15}"
            f"  {row['curves']['rarer']['median'][-1]:>13.1e}"
        )
    return "\n".join(lines)


def draw(record: dict[str, Any]) -> Figure:
    """Draw one column per batch size: return, tendency to explore, ratio of variances."""
    results = record["results"]
    sizes = sorted({row["n"] for row in results["arms"]})
    ks = sorted({row["k"] for row in results["arms"]} - {None})
    styles = dict(zip(METHODS, ("-", ":", "--", "-"), strict=True))
    figure = Figure(figsize=(4.2 * len(sizes) + 0.6, 10), layout="constrained")
    grid = figure.subplots(3, len(sizes), sharex=True, sharey="row", squeeze=False)
    for row in results["arms"]:
        label = row["method"] + (f", K = {row['k']}" if row["k"] else "")
        color = f"C{ks.index(row['k'])}" if row["k"] else "0.3"
        for axes, curve in zip(
            grid[:, sizes.index(row["n"])], row["curves"].values(), strict=False
        ):
            first, *rest = (
                torch.tensor([torch.nan if x is None else x for x in values])
                for values in curve.values()
            )
            low, high = (first - rest[0], first + rest[0]) if "error" in curve else rest
            axes.plot(
                results["steps"], first, color=color, linestyle=styles[row["method"]], label=label
            )
            axes.fill_between(results["steps"], low, high, color=color, alpha=0.12, linewidth=0)
    for n, (top, middle, bottom) in zip(sizes, grid.T, strict=True):
        top.axhline(
            results["return_of_habit"], color="0.6", linewidth=0.8, label="always the habit"
        )
        top.set(title=f"N = {n} episodes a batch")
        middle.set(yscale="log", ylim=(1e-5, 1))
        bottom.axhline(1, color="0.6", linewidth=0.8)
        bottom.set(xlabel="iteration", yscale="log", ylim=(0.1, 10))
    grid[0, 0].set_ylabel("expected return, steps\n(mean, standard error)")
    grid[1, 0].set_ylabel("probability of the rarer action\nby b alone (median, quartiles)")
    grid[2, 0].set_ylabel("gradient variance, EI + L2O / EI\n(median, quartiles)")
    for axes in grid.flat:
        axes.grid(alpha=0.3)
    handles = {
        label: handle
        for axes in grid[0]
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    labels = sorted(handles)
    figure.legend(
        [handles[label] for label in labels],
        labels,
        loc="outside upper center",
        ncols=3,
        frameon=False,
    )
    return figure


main = partial(run, "chain_maze", ChainMaze, experiment, draw)

if __name__ == "__main__":
    sys.exit(main())
