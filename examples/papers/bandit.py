"""Bias and variance of max@K gradients on bandits: MaxPO, section 5.1 and appendix G.1, Figures 1,
4 and 5.

Each seed is a bandit with rewards ~ N(0, 1) and a softmax policy with logits ~ N(0, 1). Three
estimators of (1/K) grad max@K are compared on batches of N draws, ghat = (1/N) sum_i A_i grad log
pi(a_i): EI, EI + L2O (which is MaxPO) and EI + L1O.

- Error: |mean of M batches - exact gradient| against M. For the unbiased estimators it falls as
  M^-1/2. For EI + L1O it falls to the bias, which is computed exactly, also for other K and N.
- Variance (the trace of ghat's covariance) of EI and EI + L2O, against the number of actions and
against K.

Our copy of the paper lacks the numbers of actions, K, N and M of its panels; we chose ours, and
sweep them.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from runner import Settings, check_least, rounded, run, tracked
from torch import Tensor
from torch.nn.functional import pad

from maxrl_fast.errors import InputError
from maxrl_fast.ops import group_advantage

LABELS = {"expected_improvement": "EI", "maxpo": "EI + L2O (MaxPO)", "ei_l1o": "EI + L1O"}
UNBIASED = ("expected_improvement", "maxpo")
COLOURS = {"expected_improvement": "tab:orange", "maxpo": "tab:blue", "ei_l1o": "tab:red"}
COLOURS_OF_N = ("tab:green", "tab:purple", "tab:brown", "tab:pink", "tab:olive", "tab:cyan")
CHUNK = 1_000_000  # draws that are processed at once


@dataclass(frozen=True)
class BanditSettings(Settings):
    """Bias and variance of EI, EI + L2O (MaxPO) and EI + L1O on bandits (MaxPO, Figures 1, 4, 5).
    It takes 4 minutes on two cores."""

    seeds: int = 20
    """Number of bandits; standard errors are over bandits."""
    num_actions: int = 100
    """Number of actions when it is not swept."""
    num_rollouts: int = 16
    """N for the error against the number of batches."""
    k: int = 4
    """K when it is not swept."""
    bias_batches: int = 1_000_000
    """Largest M for the error against the number of batches."""
    variance_batches: int = 20_000
    """Batches for each estimate of a variance."""
    rollouts_swept: tuple[int, ...] = (8, 16, 32)
    """N for the variances; K goes from 2 to N - 1."""
    actions_swept: tuple[int, ...] = (2, 3, 5, 10, 20, 50, 100, 200, 500, 1000)
    """Numbers of actions for the variances."""


@dataclass(frozen=True)
class Bandits:
    """One bandit per row. Actions are sorted by reward, which changes nothing else."""

    rewards: Tensor  # [S, A] float64, ascending
    probabilities: Tensor  # [S, A] action probabilities of the policy

    @classmethod
    def draw(cls, seeds: int, num_actions: int, generator: torch.Generator) -> "Bandits":
        rewards, logits = torch.randn(
            2, seeds, num_actions, dtype=torch.float64, generator=generator
        )
        return cls(rewards.sort(-1).values, logits.softmax(-1))

    def sample(self, num_batches: int, n: int, generator: torch.Generator) -> "Batches":
        draws = self.probabilities.multinomial(
            num_batches * n, replacement=True, generator=generator
        )
        return Batches(self, draws.view(-1, num_batches, n).sort(-1).values)

    def score_mean(self, weights: Tensor) -> Tensor:
        """Return sum_a w_a grad log pi(a) = w - pi sum_a w_a for weights [..., S, A]."""
        return weights - self.probabilities * weights.sum(-1, keepdim=True)

    def gaps(self) -> tuple[Tensor, Tensor]:
        """Return the gaps d_j = r_(j+1) - r_(j) between sorted rewards, and F_j, the probability of
        a reward below gap j.
        """
        return self.rewards.diff(dim=-1), self.probabilities.cumsum(-1)[:, :-1]

    def exact_gradient(self, k: int) -> Tensor:
        """Return (1/K) grad max@K [S, A]: each action's score weighted by h(r) = E[(r - max of K-1
        draws)_+].

        The max is below gap j with probability F_j^(K-1), so h is the sum of d_j F_j^(K-1) over the
        gaps below r.
        """
        gaps, below = self.gaps()
        improvement = pad((gaps * below ** (k - 1)).cumsum(-1), (1, 0))
        return self.score_mean(self.probabilities * improvement)

    def exact_bias(self, k: int, n: int) -> Tensor:
        """Return the bias of EI + L1O, E[ghat] - (1/K) grad max@K, [S, A].

        A fraction (K-1)/(N-1) of the subsets in EI_j contains rollout i. Through them the baseline
        depends on i: the expected EI_j over them is the sum of d_j (1 - F_j) F_j^(K-2) over the
        gaps above r_i.
        """
        gaps, below = self.gaps()
        terms = gaps * (1 - below) * below ** (k - 2)
        above = pad(terms.flip(-1).cumsum(-1).flip(-1), (0, 1))
        return -(k - 1) / (n - 1) * self.score_mean(self.probabilities * above)


@dataclass(frozen=True)
class Batches:
    """M batches of N draws from each of S bandits."""

    bandits: Bandits
    actions: Tensor  # [S, M, N], sorted in each batch: no estimator depends on the order

    @cached_property
    def rewards(self) -> Tensor:
        return self.bandits.rewards.gather(1, self.actions.flatten(1)).view_as(self.actions)

    @cached_property
    def probabilities(self) -> Tensor:
        return self.bandits.probabilities.gather(1, self.actions.flatten(1)).view_as(self.actions)

    @cached_property
    def occurrences(self) -> Tensor:
        """Count how often each draw's action occurs in its batch."""
        return torch.searchsorted(self.actions, self.actions, right=True) - torch.searchsorted(
            self.actions, self.actions
        )

    def mean_gradient(self, advantages: Tensor) -> Tensor:
        """Return the mean of ghat over the M batches, [S, A]."""
        sums = torch.zeros_like(self.bandits.probabilities).scatter_add_(
            1, self.actions.flatten(1), advantages.flatten(1)
        )
        return self.bandits.score_mean(sums / self.actions[0].numel())

    def squared_norms(self, advantages: Tensor) -> Tensor:
        """Return |ghat|^2 of each batch, [S, M], in O(N) instead of O(A).

        ghat = v - c pi, where v_a is (1/N) times the sum of A_i over the draws of a, and c = sum_a
        v_a. Draws of one action have equal advantages, so N^2 |v|^2 is the sum of A_i^2 times the
        number of draws of a_i.
        """
        centre = advantages.mean(-1)
        own = (advantages.square() * self.occurrences).mean(-1) / advantages.shape[-1]
        cross = (advantages * self.probabilities).mean(-1)
        return (
            own
            - 2 * centre * cross
            + centre.square() * self.bandits.probabilities.square().sum(-1, keepdim=True)
        )


def chunks(total: int, draws: int) -> list[int]:
    """Split `total` batches into parts of about CHUNK draws; one batch for every bandit has `draws`
    draws.
    """
    size = max(1, CHUNK // draws)
    return [min(size, total - start) for start in range(0, total, size)]


def errors(
    bandits: Bandits, n: int, k: int, checkpoints: Sequence[int], generator: torch.Generator
) -> Tensor:
    """Return |mean of the first M batches - exact gradient| for each M in checkpoints, [estimators,
    checkpoints, S].
    """
    exact = bandits.exact_gradient(k)
    sums = exact.new_zeros(len(LABELS), *exact.shape)
    found = []
    for done, checkpoint in tracked(list(pairwise([0, *checkpoints])), "error against batches"):
        for num_batches in chunks(checkpoint - done, n * len(exact)):
            batches = bandits.sample(num_batches, n, generator)
            for total, name in zip(sums, LABELS, strict=True):
                total += num_batches * batches.mean_gradient(
                    group_advantage(batches.rewards, name, k=k)
                )
        found.append((sums / checkpoint - exact).norm(dim=-1))
    return torch.stack(found, 1)


def variances(
    bandits: Bandits, n: int, ks: Sequence[int], num_batches: int, generator: torch.Generator
) -> Tensor:
    """Return the traces of ghat's sample covariance, with the same batches for all: [EI and EI +
    L2O, ks, S].
    """
    sums = bandits.rewards.new_zeros(len(UNBIASED), len(ks), *bandits.rewards.shape)
    squares = sums[..., 0].clone()
    for size in chunks(num_batches, n * len(bandits.rewards)):
        batches = bandits.sample(size, n, generator)
        for e, name in enumerate(UNBIASED):
            for i, k in enumerate(ks):
                advantages = group_advantage(batches.rewards, name, k=k)
                sums[e, i] += size * batches.mean_gradient(advantages)
                squares[e, i] += batches.squared_norms(advantages).sum(-1)
    return (squares - sums.square().sum(-1) / num_batches) / (num_batches - 1)


def over_seeds(values: Tensor) -> dict[str, Any]:
    """Return the mean over seeds (the last dimension) and its standard error; None for fewer than 2
    values.
    """
    if values.shape[-1] < 2:
        return {"mean": None, "standard_error": None}
    return {
        "mean": rounded(values.mean(-1)),
        "standard_error": rounded(values.std(-1) / values.shape[-1] ** 0.5),
    }


def compared(variance: Tensor) -> dict[str, Any]:
    """Summarize variances [EI and EI + L2O, ..., S]: both, and the ratio of EI + L2O to EI.

    The mean ratio is geometric, because a few nearly deterministic policies would dominate the
    arithmetic mean. If such a policy drew only one action, both variances are 0 and count as equal.
    """
    ratio = torch.where(variance.amin(0) > 0, variance[1] / variance[0], 1.0)
    mean, deviation = ratio.log().mean(-1).exp(), ratio.log().std(-1)
    return {
        **{name: over_seeds(of_name) for name, of_name in zip(UNBIASED, variance, strict=True)},
        "ratio": {
            "mean": rounded(mean),
            "standard_error": rounded(mean * deviation / ratio.shape[-1] ** 0.5),
        },
        "seeds_raised": (ratio > 1).sum(-1).tolist(),
    }


def slopes(num_batches: Sequence[int], found: Tensor) -> Tensor:
    """Return the least-squares slopes [S] of log error against log M, for errors [M, S]."""
    x = torch.tensor(num_batches, dtype=found.dtype).log()
    x -= x.mean()
    return x @ found.log() / x.square().sum()


def crossings(ks: Sequence[int], ratio: Tensor) -> Tensor:
    """Return the interpolated K at which each seed's ratio [ks, S] first exceeds 1, for the seeds
    in which it does.
    """
    above = ratio > 1
    k, first = torch.tensor(ks, dtype=ratio.dtype), above.int().argmax(0)
    before = (first - 1).clamp_min(0)
    low, high = ratio.gather(0, torch.stack([before, first]))
    share = torch.where(first > 0, (1 - low) / (high - low), 1.0)
    return (k[before] + share * (k[first] - k[before]))[above.any(0)]


def check(s: BanditSettings) -> None:
    """Raise InputError for settings that make no sense."""
    check_least(s, seeds=2, num_actions=2, k=2, bias_batches=10, variance_batches=2)
    if not s.rollouts_swept or min(s.actions_swept, default=0) < 2:
        raise InputError(
            "--rollouts-swept and --actions-swept must name at least one number each, of actions "
            "at least 2"
        )
    if s.k >= (fewest := min(s.num_rollouts, *s.rollouts_swept)):
        raise InputError(
            f"--k must be below every number of rollouts, for L2O leaves two out; got {s.k} and "
            f"{fewest} rollouts"
        )


def experiment(s: BanditSettings) -> dict[str, Any]:
    """Compute all results over seeds, and print the main ones."""
    check(s)
    generator = torch.Generator().manual_seed(s.seed)
    bandits = Bandits.draw(s.seeds, s.num_actions, generator)

    powers = {round(10 ** (half / 2)) for half in range(2 * len(str(s.bias_batches)))}
    checkpoints = sorted({m for m in powers if m < s.bias_batches} | {s.bias_batches})
    late = [i for i, m in enumerate(checkpoints) if 100 * m >= s.bias_batches]
    found = errors(bandits, s.num_rollouts, s.k, checkpoints, generator)
    error: dict[str, Any] = {
        "num_batches": checkpoints,
        "gradient_norm": over_seeds(bandits.exact_gradient(s.k).norm(dim=-1)),
        "exact_bias_ei_l1o": over_seeds(bandits.exact_bias(s.k, s.num_rollouts).norm(dim=-1)),
    }
    for name, of_name in zip(LABELS, found, strict=True):
        late_slopes = slopes(checkpoints[late[0] :], of_name[late])
        fits = {"slope": slopes(checkpoints, of_name), "slope_of_last_two_decades": late_slopes}
        error[name] = {
            **over_seeds(of_name),
            **{fit: over_seeds(values) for fit, values in fits.items()},
        }

    by_k: dict[str, Any] = {}
    by_actions: dict[str, Any] = {}
    bias: dict[str, Any] = {}
    for n in tracked(s.rollouts_swept, "variance against K"):
        ks = range(2, n)
        variance = variances(bandits, n, ks, s.variance_batches, generator)
        crossed = crossings(ks, variance[1] / variance[0])
        raised = {"raised_from_k": over_seeds(crossed), "seeds_crossed": len(crossed)}
        by_k[str(n)] = {"k": list(ks), **compared(variance), **raised}
        gradients = torch.stack([bandits.exact_gradient(k) for k in ks])
        biases = torch.stack([bandits.exact_bias(k, n) for k in ks])
        cosine = torch.cosine_similarity(gradients, gradients + biases, dim=-1)
        relative = over_seeds(biases.norm(dim=-1) / gradients.norm(dim=-1))
        bias[str(n)] = {"k": list(ks), **relative, "cosine_with_gradient": over_seeds(cosine)}
    of_sizes = [Bandits.draw(s.seeds, num_actions, generator) for num_actions in s.actions_swept]
    for n in tracked(s.rollouts_swept, "variance against actions"):
        variance = torch.cat(
            [variances(sized, n, [s.k], s.variance_batches, generator) for sized in of_sizes], 1
        )
        by_actions[str(n)] = {"num_actions": list(s.actions_swept), **compared(variance)}
    results = {
        "error": error,
        "variance_by_num_actions": by_actions,
        "variance_by_k": by_k,
        "relative_bias_ei_l1o": bias,
    }
    report(results, s)
    return results


def report(results: dict[str, Any], s: BanditSettings) -> None:
    """Print the main findings."""
    error, figure = results["error"], "{mean:.3g} +- {standard_error:.2g}".format_map
    print(
        f"N = {s.num_rollouts}, K = {s.k}, {s.num_actions} actions; |gradient| "
        f"{figure(error['gradient_norm'])}"
    )
    print(f"{'':20}{f'error at M = {s.bias_batches}':26}{'slope, all M':20}slope, last two decades")
    for name, label in LABELS.items():
        row = error[name]
        print(
            f"{label:20}{row['mean'][-1]:<26.3g}{figure(row['slope']):20}{figure(row['slope_of_last_two_decades'])}"
        )
    print(f"exact bias of EI + L1O: {figure(error['exact_bias_ei_l1o'])}")
    print(
        "\nRatio of the variances of EI + L2O and EI, and the number of bandits in which it is "
        "above 1"
    )
    for key in ("num_actions", "k"):
        for n, row in results[f"variance_by_{key}"].items():
            columns = list(zip(row[key], row["ratio"]["mean"], row["seeds_raised"], strict=True))
            shown = (
                columns
                if key == "num_actions"
                else [c for c in columns if c[0] & (c[0] - 1) == 0 or c == columns[-1]]
            )
            print(
                f"N = {n:3} {key:12}"
                + "  ".join(f"{x}: {ratio:.2f} ({raised})" for x, ratio, raised in shown)
            )
    for n, row in results["variance_by_k"].items():
        if row["raised_from_k"]["mean"] is not None:
            print(
                f"N = {n:3} above 1 from K = {figure(row['raised_from_k'])}, in "
                f"{row['seeds_crossed']} of {s.seeds} bandits"
            )


def band(
    axes: Axes, x: Sequence[int], values: dict[str, Any], label: str, colour: str, style: str = "-"
) -> None:
    """Plot a curve with its standard error shaded."""
    mean, error = torch.tensor(values["mean"]), torch.tensor(values["standard_error"])
    axes.plot(x, mean, style, label=label, color=colour, marker=".")
    axes.fill_between(x, mean - error, mean + error, color=colour, alpha=0.2, linewidth=0)


def draw(record: dict[str, Any]) -> Figure:
    """Draw the paper's three panels for each N (top), the exact bias of EI + L1O and the ratios of
    variances (bottom).
    """
    results, s = record["results"], record["settings"]
    figure = Figure(figsize=(16, 9.5), layout="constrained")
    (error, by_actions, by_k), (bias, ratio_by_actions, ratio_by_k) = figure.subplots(2, 3)
    figure.suptitle(
        f"Gradients of max@K on bandits; mean and standard error of {s['seeds']} bandits"
    )

    found = results["error"]
    for name, label in LABELS.items():
        slope = found[name]["slope_of_last_two_decades"]["mean"]
        band(error, found["num_batches"], found[name], f"{label}, slope {slope:.2f}", COLOURS[name])
    guide = [0.4 * found["expected_improvement"]["mean"][0] * m**-0.5 for m in found["num_batches"]]
    error.plot(found["num_batches"], guide, ":", color="0.4", label="$M^{-1/2}$")
    error.axhline(
        found["exact_bias_ei_l1o"]["mean"],
        linestyle="--",
        color="0.4",
        label="exact bias of EI + L1O",
    )
    setting = f"N = {s['num_rollouts']}, K = {s['k']}, {s['num_actions']} actions"
    error.set(
        title=f"Error of the mean gradient; {setting}",
        xlabel="batches M (slopes: last two decades)",
        ylabel="| mean gradient - exact gradient |",
    )

    for i, (n, row) in enumerate(results["relative_bias_ei_l1o"].items()):
        band(bias, row["k"], row, f"N = {n}", COLOURS_OF_N[i % 6])
    bias.set(
        title=f"Exact bias of EI + L1O; {s['num_actions']} actions",
        xlabel="K",
        ylabel="| bias | / | gradient |",
    )
    bias.set_ylim(bottom=0)

    for key, axes, ratio_axes in (
        ("num_actions", by_actions, ratio_by_actions),
        ("k", by_k, ratio_by_k),
    ):
        for i, (n, row) in enumerate(results[f"variance_by_{key}"].items()):
            band(
                axes,
                row[key],
                row["expected_improvement"],
                f"EI, N = {n}",
                COLOURS_OF_N[i % 6],
                "--",
            )
            band(axes, row[key], row["maxpo"], f"EI + L2O, N = {n}", COLOURS_OF_N[i % 6])
            band(ratio_axes, row[key], row["ratio"], f"N = {n}", COLOURS_OF_N[i % 6])
        setting, x = (
            (f"K = {s['k']}", "actions")
            if key == "num_actions"
            else (f"{s['num_actions']} actions", "K")
        )
        axes.set(
            title=f"Variance; {setting}",
            xlabel=x,
            ylabel="trace of the covariance",
            xscale="log",
            yscale="log",
        )
        ratio_axes.set(
            title=f"Variance, EI + L2O over EI; {setting}", xlabel=x, ylabel="ratio", xscale="log"
        )
        ratio_axes.axhline(1, color="0.4", linestyle="--")
    error.set(xscale="log", yscale="log")
    for axes in (bias, by_k, ratio_by_k):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


main = partial(run, "bandit", BanditSettings, experiment, draw)

if __name__ == "__main__":
    sys.exit(main())
