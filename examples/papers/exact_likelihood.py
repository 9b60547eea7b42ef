"""MaxRL, Figures 2, 8 and 9: with enough rollouts MaxRL is maximum likelihood; REINFORCE does not
learn from low pass rates.

Classification as reinforcement learning: a rollout is a class drawn from the softmax, and its
reward is 1 if the class is the label. The likelihood is known, so cross-entropy can be compared
with MaxRL, GRPO and REINFORCE. The publication trains a ResNet-50 on ImageNet; here a linear
softmax learns 200 Gaussian classes, and scikit-learn's digits. Therefore the learning rate differs
from the publication's. As there, all objectives share one rate; a sweep shows the effect of other
rates on each.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from experiment import Settings, rounded, run, tracked
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Generator, Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.ops import effective_weight, group_advantage

EXACT = "cross-entropy"
# maxrl_ratio equals maxrl for binary rewards and needs no sort. The publication's GRPO (D.1) uses
# the population std.
ESTIMATORS = {"MaxRL": "maxrl_ratio", "GRPO": "grpo", "REINFORCE": "reinforce"}
OPTIONS: dict[str, dict[str, Any]] = {"MaxRL": {}, "GRPO": {"ddof": 0}, "REINFORCE": {}}
METRICS = {
    "pass@1": "pass@1",
    "pass@128": "pass@128",
    "accuracy": "accuracy of the likeliest class",
}
COVERAGE = [2**i for i in range(11)]  # values of k for pass@k
EVALUATIONS = 20  # points per curve after the first
SHOWN = 150  # inputs whose gradients are drawn
COLOURS = {EXACT: "black", "MaxRL": "tab:blue", "GRPO": "tab:orange", "REINFORCE": "tab:green"}


@dataclass(frozen=True)
class ExactLikelihood(Settings):
    """Cross-entropy against MaxRL, GRPO and REINFORCE on classification (MaxRL, Figures 2, 8 and
    9). It takes 8 minutes on one core."""

    rollouts: tuple[int, ...] = (16, 128, 1024)
    """Rollouts per input, N; the sweep of learning rates uses the middle one."""
    steps: int = 1500
    """Updates; the publication looks at gradients after 1500."""
    batch: int = 256
    """Inputs per update."""
    learning_rate: float = 4.0
    """Constant learning rate of plain SGD; our choice."""
    sweep: tuple[float, ...] = (32.0, 256.0, 2048.0)
    """Other learning rates to try."""
    classes: int = 200
    """Number of classes of the Gaussian data."""
    dimensions: int = 64
    """Dimensions of the Gaussian data."""
    noise: float = 0.8
    """Standard deviation around the class means, which are drawn from N(0, 1)."""
    train_inputs: int = 20_000
    """Gaussian inputs to train on, for about 20 epochs as in the publication."""
    test_inputs: int = 2000
    """Held-out Gaussian inputs."""
    test_digits: int = 497
    """Held-out digits, of 1797."""
    seeds: int = 3
    """Repetitions, each with its own data."""


@dataclass(frozen=True)
class Data:
    """Data of S seeds: T inputs to train on and H held-out inputs."""

    inputs: Tensor  # [S, T, d]
    labels: Tensor  # [S, T]
    test_inputs: Tensor  # [S, H, d]
    test_labels: Tensor  # [S, H]
    num_classes: int

    @classmethod
    def split(cls, inputs: Tensor, labels: Tensor, num_test: int, num_classes: int) -> "Data":
        return cls(
            inputs[:, num_test:],
            labels[:, num_test:],
            inputs[:, :num_test],
            labels[:, :num_test],
            num_classes,
        )


@dataclass(frozen=True)
class Job:
    """One training run; cross-entropy has 0 rollouts."""

    objective: str
    rollouts: int
    learning_rate: float

    def __str__(self) -> str:
        return f"{self.objective}, N = {self.rollouts}" if self.rollouts else self.objective


def gaussian_classes(settings: ExactLikelihood) -> Data:
    """Draw class means from N(0, 1) and inputs around them, all divided by sqrt(d)."""
    size, d = settings.train_inputs + settings.test_inputs, settings.dimensions
    inputs, labels = [], []
    for seed in range(settings.seed, settings.seed + settings.seeds):
        generator = Generator().manual_seed(seed)
        means = torch.randn(settings.classes, d, generator=generator)
        labels.append(torch.randint(settings.classes, (size,), generator=generator))
        inputs.append(
            (means[labels[-1]] + settings.noise * torch.randn(size, d, generator=generator))
            / d**0.5
        )
    return Data.split(
        torch.stack(inputs), torch.stack(labels), settings.test_inputs, settings.classes
    )


def digits(settings: ExactLikelihood) -> Data:
    """Load scikit-learn's 1797 digits of 8 x 8 pixels: shuffled by seed, centred, scaled to a mean
    squared norm of 1.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InputError("the digits come with scikit-learn: pip install scikit-learn") from None
    pixels, labels = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
    if not 1 <= settings.test_digits < len(labels):
        raise InputError(
            f"--test-digits must be from 1 to {len(labels) - 1}, got {settings.test_digits}"
        )
    centred = pixels - pixels.mean(0)
    inputs = (centred / centred.square().sum(-1).mean().sqrt()).float()
    seeds = range(settings.seed, settings.seed + settings.seeds)
    order = torch.stack(
        [torch.randperm(len(labels), generator=Generator().manual_seed(seed)) for seed in seeds]
    )
    return Data.split(inputs[order], labels[order].long(), settings.test_digits, 10)


def sample(probabilities: Tensor, num_rollouts: int, generator: Generator) -> Tensor:
    """Sample independent rollouts [..., N] from policies [..., C], sorted by class.

    The order changes no advantage and makes the search faster. Sorted uniforms need no sort: they
    are the cumulative sums of N + 1 exponential gaps, divided by their total.
    """
    shape = (*probabilities.shape[:-1], num_rollouts + 1)
    gaps = torch.rand(shape, generator=generator, dtype=probabilities.dtype).neg_().log1p_().neg_()
    sums = gaps.cumsum_(-1)
    uniforms = sums[..., :-1] / sums[..., -1:]
    # Rounding can make the sum of the probabilities less than 1.
    return torch.searchsorted(probabilities.cumsum(-1), uniforms).clamp_(
        max=probabilities.shape[-1] - 1
    )


def sampled_scores(
    probabilities: Tensor, labels: Tensor, rollouts: Tensor, objective: str
) -> Tensor:
    """Return the gradient for the logits [..., C]: the mean of A (onehot(rollout) - probabilities)
    over an input's rollouts.
    """
    rewards = (rollouts == labels[..., None]).to(probabilities.dtype)  # [..., N]
    advantages = (
        group_advantage(rewards, ESTIMATORS[objective], **OPTIONS[objective]) / rollouts.shape[-1]
    )
    of_classes = torch.zeros_like(probabilities).scatter_add_(-1, rollouts, advantages)
    return of_classes - advantages.sum(-1, keepdim=True) * probabilities


def ascent(
    weights: Tensor, inputs: Tensor, labels: Tensor, job: Job, generator: Generator
) -> Tensor:
    """Return the mean gradient [S, d, C] over a batch of inputs [S, B, d]: exact for cross-entropy,
    else sampled.
    """
    probabilities = (inputs @ weights).softmax(-1)
    if job.objective == EXACT:
        scores = torch.nn.functional.one_hot(labels, weights.shape[-1]) - probabilities
    else:
        rollouts = sample(probabilities, job.rollouts, generator)
        scores = sampled_scores(probabilities, labels, rollouts, job.objective)
    return inputs.mT @ scores / inputs.shape[-2]


def evaluated_steps(settings: ExactLikelihood) -> list[int]:
    return sorted({round(i * settings.steps / EVALUATIONS) for i in range(EVALUATIONS + 1)})


def train(settings: ExactLikelihood, data: Data, job: Job) -> dict[str, Any]:
    """Train by SGD from equal probabilities, all seeds at once, on the same batches for every
    objective; return the results.
    """
    num_seeds, size, dimensions = data.inputs.shape
    batches, rollouts = (
        Generator().manual_seed(settings.seed),
        Generator().manual_seed(settings.seed + 1),
    )
    weights = torch.zeros(num_seeds, dimensions, data.num_classes)
    rows, evaluated = torch.arange(num_seeds)[:, None], evaluated_steps(settings)
    measured = [measure(weights, data)]
    for step in range(1, settings.steps + 1):
        chosen = torch.randint(size, (num_seeds, settings.batch), generator=batches)
        weights += job.learning_rate * ascent(
            weights, data.inputs[rows, chosen], data.labels[rows, chosen], job, rollouts
        )
        if step in evaluated:
            measured.append(measure(weights, data))
    pass_rates = label_log_probs(weights, data.test_inputs, data.test_labels).exp()
    shown = weights[0], data.test_inputs[0, :SHOWN], data.test_labels[0, :SHOWN]
    curves = {
        name: over_seeds(torch.stack([metrics[name] for metrics in measured], -1))
        for name in measured[0]
    }
    return {
        "objective": job.objective,
        "rollouts": job.rollouts or None,
        "learning_rate": job.learning_rate,
        "label": str(job),
        "final": {
            name: {key: values[-1] for key, values in curve.items()}
            for name, curve in curves.items()
        },
        "curves": curves,
        "coverage": over_seeds(torch.stack([pass_at(k, pass_rates) for k in COVERAGE], -1)),
        "gradients": {
            "pass_rate": rounded(pass_rates[0, :SHOWN]),
            "norm": rounded(gradient_norms(*shown, job)),
        },
    }


def label_log_probs(weights: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    return (inputs @ weights).log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def pass_at(k: int, pass_rates: Tensor) -> Tensor:
    """Return the exact pass@k, averaged over inputs."""
    return torch.mean(1 - torch.pow(1 - pass_rates.double(), k), -1)


def measure(weights: Tensor, data: Data) -> dict[str, Tensor]:
    """Return metrics on the held-out inputs, [S] each; the accuracy is the limit of a majority vote
    of many rollouts.
    """
    log_probs = label_log_probs(weights, data.test_inputs, data.test_labels)
    hits = (data.test_inputs @ weights).argmax(-1) == data.test_labels
    passes = {f"pass@{k}": pass_at(k, log_probs.exp()) for k in (1, 128)}
    return {**passes, "accuracy": hits.double().mean(-1), "nll": -log_probs.mean(-1)}


def gradient_norms(weights: Tensor, inputs: Tensor, labels: Tensor, job: Job) -> Tensor:
    """Return the L2 norm of each input's expected gradient: W_N(p) p |grad log p|, and |grad log p|
    for cross-entropy.

    These are the points of the publication's scatter plot without the noise of sampled rollouts.
    """
    residuals = torch.nn.functional.one_hot(labels, weights.shape[-1]) - (inputs @ weights).softmax(
        -1
    )
    # grad log p is their outer product
    norms: Tensor = residuals.norm(dim=-1) * inputs.norm(dim=-1)
    if job.objective == EXACT:
        return norms
    p = label_log_probs(weights, inputs, labels).exp().clamp(max=1)
    return (
        norms
        * p
        * effective_weight(ESTIMATORS[job.objective], job.rollouts, p, **OPTIONS[job.objective])
    )


def over_seeds(values: Tensor) -> dict[str, list[float]]:
    """Return means and standard errors over seeds of values [S, points]."""
    return {
        "mean": rounded(values.mean(0)),
        "standard_error": rounded(values.std(0) / len(values) ** 0.5),
    }


def check(settings: ExactLikelihood) -> None:
    for name in ("steps", "batch", "classes", "dimensions", "train_inputs", "test_inputs", "seeds"):
        least = 2 if name in ("classes", "seeds") else 1  # one seed has no standard error
        if getattr(settings, name) < least:
            raise InputError(
                f"--{name.replace('_', '-')} must be at least {least}, got "
                f"{getattr(settings, name)}"
            )
    if not settings.rollouts or not all(2 <= n <= 10_000 for n in settings.rollouts):
        raise InputError(
            f"--rollouts must be one or more numbers from 2 to 10000, got {settings.rollouts}"
        )
    if not all(0 < rate < math.inf for rate in (settings.learning_rate, *settings.sweep)):
        raise InputError("--learning-rate and --sweep must be above 0 and finite")
    if not 0 <= settings.noise < math.inf:
        raise InputError(f"--noise must be at least 0 and finite, got {settings.noise}")


def experiment(settings: ExactLikelihood) -> dict[str, Any]:
    check(settings)
    data = {"Gaussian classes": gaussian_classes(settings), "digits": digits(settings)}
    counts, rates = (
        sorted(set(settings.rollouts)),
        sorted({*settings.sweep, settings.learning_rate}),
    )
    exact = [Job(EXACT, 0, rate) for rate in rates]
    swept = exact + [
        Job(name, counts[len(counts) // 2], rate) for name, rate in product(ESTIMATORS, rates)
    ]
    compared = [job for job in exact if job.learning_rate == settings.learning_rate]
    compared += [Job(name, n, settings.learning_rate) for name, n in product(ESTIMATORS, counts)]
    jobs = list(product(data, dict.fromkeys(compared + swept)))  # the sweep shares some jobs
    done = {
        (name, job): train(settings, data[name], job) for name, job in tracked(jobs, "training")
    }
    # Drop what is not drawn: the curves of the sweep, and the gradients of all N except the
    # largest.
    curves = {name: [dict(done[name, job]) for job in compared] for name in data}
    for row in (
        row for rows in curves.values() for row in rows if row["rollouts"] not in (None, counts[-1])
    ):
        del row["gradients"]
    kept = ("objective", "learning_rate", "label", "final")
    sweep = {name: [{key: done[name, job][key] for key in kept} for job in swept] for name in data}
    print_tables(curves, sweep)
    return {"steps": evaluated_steps(settings), "k": COVERAGE, "curves": curves, "sweep": sweep}


def print_tables(curves: dict[str, Any], sweep: dict[str, Any]) -> None:
    for data, rows in curves.items():
        print(f"\n{data}, held-out; mean and standard error over seeds")
        for i, row in enumerate(rows):
            if i == 0:
                print(f"{'':<21}" + "".join(f"{name:>15}" for name in row["final"]))
            values = (
                f"{value['mean']:.4f} {value['standard_error']:.4f}"
                for value in row["final"].values()
            )
            print(f"{row['label']:<21}" + "".join(f"{value:>15}" for value in values))
        print("pass@1 and pass@128 by learning rate")
        rates = sorted({row["learning_rate"] for row in sweep[data]})
        print(f"{'':<21}" + "".join(f"{rate:>15g}" for rate in rates))
        for label in dict.fromkeys(row["label"] for row in sweep[data]):
            finals = (row["final"] for row in sweep[data] if row["label"] == label)
            values = (
                f"{final['pass@1']['mean']:.4f} {final['pass@128']['mean']:.4f}" for final in finals
            )
            print(f"{label:<21}" + "".join(f"{value:>15}" for value in values))


def draw(record: dict[str, Any]) -> Figure:
    """Draw Figure 9 for each data set (its first panel is Figure 2), Figure 8, and the sweep."""
    results, figure = record["results"], Figure(figsize=(17, 12.5), layout="constrained")
    grid = figure.subplots(3, 4)
    for row, (data, rows) in enumerate(results["curves"].items()):
        for axes, name in zip(grid[row], METRICS, strict=False):
            draw_bands(axes, results["steps"], [(curve, curve["curves"][name]) for curve in rows])
            axes.set(
                title=f"{data}: {METRICS[name]}", xlabel="step", ylabel=f"{name}, held-out inputs"
            )
        draw_bands(grid[row, 3], results["k"], [(curve, curve["coverage"]) for curve in rows])
        grid[row, 3].set(
            title=f"{data}: coverage after training",
            xlabel="k",
            ylabel="pass@k, held-out inputs",
            xscale="log",
        )
        shown = [curve for curve in rows if "gradients" in curve]
        draw_gradients(grid[2, row], shown)
        grid[2, row].set_title(
            f"{data}: gradients after training, {shown[-1]['label'].split(', ')[1]}"
        )
        swept = results["sweep"][data]
        draw_sweep(grid[2, 2 + row], swept)
        grid[2, 2 + row].set_title(f"{data}: learning rates, {swept[-1]['label'].split(', ')[1]}")
    for axes in grid.flat:
        axes.grid(alpha=0.3)
    lines = grid[0, 0].lines
    figure.legend(
        handles=lines,
        loc="outside upper center",
        ncols=min(len(lines), 10),
        columnspacing=1.2,
        fontsize=9,
    )
    return figure


def draw_bands(
    axes: Axes, x: list[int], curves: list[tuple[dict[str, Any], dict[str, list[float]]]]
) -> None:
    counts = sorted({curve["rollouts"] for curve, _ in curves if curve["rollouts"]})
    for curve, values in curves:
        colour, n = COLOURS[curve["objective"]], curve["rollouts"]
        style: dict[str, Any] = (
            {"linestyle": ("-", "--", ":", "-.")[(len(counts) - 1 - counts.index(n)) % 4]}
            if n
            else {}
        )
        style |= {} if n else {"linewidth": 5, "alpha": 0.3}  # wide, because other curves lie on it
        mean, error = torch.tensor(values["mean"]), torch.tensor(values["standard_error"])
        axes.plot(x, mean, color=colour, label=curve["label"], **style)
        axes.fill_between(x, mean - error, mean + error, color=colour, alpha=0.15, linewidth=0)
    axes.ticklabel_format(axis="y", useOffset=False)


def draw_gradients(axes: Axes, curves: list[dict[str, Any]]) -> None:
    """Draw rings for cross-entropy, so that points on top of it are visible."""
    for curve in curves:
        colour, x, y = (
            COLOURS[curve["objective"]],
            curve["gradients"]["pass_rate"],
            curve["gradients"]["norm"],
        )
        if curve["objective"] == EXACT:
            axes.scatter(x, y, s=45, alpha=0.4, facecolors="none", edgecolors=colour)
        else:
            axes.scatter(x, y, s=12, alpha=0.6, color=colour)
    axes.set(
        xlabel="pass rate of a held-out input",
        ylabel="L2 norm of its expected gradient",
        xlim=(-0.03, 1.03),
    )


def draw_sweep(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for objective, colour in COLOURS.items():
        of = [row for row in rows if row["objective"] == objective]
        ends = [row["final"]["pass@1"] for row in of]
        means, errors = [end["mean"] for end in ends], [end["standard_error"] for end in ends]
        style = {"linewidth": 5, "alpha": 0.3} if objective == EXACT else {"capsize": 3}
        axes.errorbar(
            [row["learning_rate"] for row in of], means, errors, marker="o", color=colour, **style
        )
    axes.set(xlabel="learning rate", ylabel="pass@1 after training", xscale="log")


def main(arguments: Sequence[str] | None = None) -> int:
    return run("exact_likelihood", ExactLikelihood, experiment, draw, arguments)


if __name__ == "__main__":
    sys.exit(main())
