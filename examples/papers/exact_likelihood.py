"""MaxRL, Figures 2, 8 and 9: with enough rollouts MaxRL is maximum likelihood; REINFORCE does not
learn from low pass rates.

Classification as reinforcement learning: a rollout is a class drawn from the softmax, and its
reward is 1 if the class is the label. The likelihood is known, so cross-entropy can be compared
with MaxRL, GRPO and REINFORCE, and MaxRL of order T with its own gradient without sampling. The
paper trains a ResNet-50 on ImageNet; here a convolutional net of three layers learns 100
classes of generated images. As there, all objectives share one learning rate; a sweep shows the
effect of others. Finished runs are kept in --work, and the same command continues with those that
are missing.
"""

import math
import sys
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from runner import Settings, TokenRun, check_least, measure_all, rounded, run, standard_error
from torch import Generator, Tensor, nn
from torch.nn import functional

from maxrl_fast.errors import InputError
from maxrl_fast.ops import effective_weight, group_advantage

EXACT, ORDER = "cross-entropy", "exact order"  # of these two the gradient is computed, not sampled
# maxrl_ratio equals maxrl for binary rewards and needs no sort. The paper's GRPO (D.1) uses
# the population std.
ESTIMATORS = {"MaxRL": "maxrl_ratio", "GRPO": "grpo", "REINFORCE": "reinforce"}
OPTIONS: dict[str, dict[str, Any]] = {"MaxRL": {}, "GRPO": {"ddof": 0}, "REINFORCE": {}}
METRICS = {
    "pass@1": "pass@1",
    "pass@128": "pass@128",
    "accuracy": "accuracy of the likeliest class",
}
COVERAGE = [2**i for i in range(11)]  # values of k for pass@k
EVALUATIONS = 10  # points per curve after the first
SHOWN = 200  # held-out images whose gradients are drawn
SIDE, TEMPLATE = 32, 24  # pixels along one side of an image, and of the pattern of its class
COLOURS = {
    EXACT: "black",
    ORDER: "tab:purple",
    "MaxRL": "tab:blue",
    "GRPO": "tab:orange",
    "REINFORCE": "tab:green",
}


@dataclass(frozen=True)
class ExactLikelihood(Settings):
    """Cross-entropy against MaxRL, GRPO and REINFORCE on images (MaxRL, Figures 2, 8 and 9): 9
    minutes on one core. --threads is the number of simultaneous runs, each with one thread."""

    rollouts: tuple[int, ...] = (4, 16, 64)
    """Rollouts per image, N; the sweep of learning rates uses the largest."""
    steps: int = 400
    """Updates."""
    batch: int = 256
    """Images per update, drawn again for each update; MaxRL, appendix D.2, has 256."""
    learning_rate: float = 0.1
    """Highest learning rate of SGD with momentum .9: linear warm-up over the first twentieth of the
    updates, then a cosine to 0 (D.2: .1, one epoch of 20)."""
    sweep: tuple[float, ...] = (1.0, 10.0)
    """Other learning rates to try."""
    classes: int = 100
    """Classes, each with a random smooth pattern."""
    clutter: float = 0.7
    """Standard deviation of the smooth background, next to a pattern's."""
    noise: float = 0.7
    """Standard deviation of the noise of each pixel."""
    test_images: int = 1000
    """Held-out images."""
    seeds: int = 3
    """Repetitions, each with its own patterns."""
    work: Path = Path("runs/exact_likelihood")
    """Folder of the finished runs."""


@dataclass(frozen=True)
class Job:
    """A way to train; `count` is the number of rollouts, or the order, or 0 for cross-entropy."""

    objective: str
    count: int
    learning_rate: float

    def __str__(self) -> str:
        if self.objective == ORDER:
            return f"order {self.count}, exact"
        return f"{self.objective}, N = {self.count}" if self.count else self.objective


class Images:
    """Images of random smooth patterns, one for each class, at random places on a random smooth
    background, with noise."""

    def __init__(self, classes: int, clutter: float, noise: float, seed: int) -> None:
        self.generator = Generator().manual_seed(seed)
        self.clutter, self.noise = clutter, noise
        self.patterns = self.smooth(classes, 6, TEMPLATE)

    def smooth(self, count: int, points: int, side: int) -> Tensor:
        """Return fields [count, side, side] between points^2 random values."""
        values = torch.randn(count, 1, points, points, generator=self.generator)
        return functional.interpolate(values, size=(side, side), mode="bilinear")[:, 0]

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """Return images [count, 1, SIDE, SIDE] and their classes [count]."""
        labels = torch.randint(len(self.patterns), (count,), generator=self.generator)
        corner = torch.randint(SIDE - TEMPLATE + 1, (2, count, 1), generator=self.generator)
        rows, columns = corner + torch.arange(TEMPLATE)  # [count, TEMPLATE] each
        images = self.clutter * self.smooth(count, 8, SIDE)
        image = torch.arange(count)[:, None, None]
        images[image, rows[:, :, None], columns[:, None, :]] += self.patterns[labels]
        images += self.noise * torch.randn(images.shape, generator=self.generator)
        return images[:, None].contiguous(memory_format=torch.channels_last), labels


def network(classes: int) -> nn.Sequential:
    """Return three convolutions with batch norm, as a ResNet begins, and a linear layer that gives
    all classes the same probability."""

    def block(inputs: int, outputs: int, size: int, stride: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

    last = nn.Linear(64 * (SIDE // 16) ** 2, classes)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    blocks = [*block(1, 16, 7, 4), *block(16, 32, 3, 2), *block(32, 64, 3, 2)]
    net = nn.Sequential(*blocks, nn.Flatten(), last)
    # the faster layout of these on a CPU, which torch's types do not know
    net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return net


def ascent(logits: Tensor, labels: Tensor, job: Job, generator: Generator) -> Tensor:
    """Return the gradient of the objective for the logits [B, C] of each image."""
    p = logits.softmax(-1)
    if job.objective in ESTIMATORS:
        rollouts = torch.multinomial(p, job.count, replacement=True, generator=generator)
        return sampled_scores(p, labels, rollouts, job.objective)
    scores = functional.one_hot(labels, p.shape[-1]) - p  # grad log p(label)
    if job.objective == EXACT:
        return scores
    # MaxRL of order T weights grad p by (1 - (1-p)^T) / p
    return (1 - (1 - p.gather(-1, labels[:, None])) ** job.count) * scores


def sampled_scores(p: Tensor, labels: Tensor, rollouts: Tensor, objective: str) -> Tensor:
    """Return the gradient for the logits [B, C]: the mean of A (onehot(rollout) - p) over an
    image's rollouts [B, N].
    """
    rewards = (rollouts == labels[:, None]).to(p.dtype)
    advantages = group_advantage(rewards, ESTIMATORS[objective], **OPTIONS[objective])
    advantages = advantages / rollouts.shape[-1]
    of_classes = torch.zeros_like(p).scatter_add_(-1, rollouts, advantages)
    return of_classes - advantages.sum(-1, keepdim=True) * p


def train(one: TokenRun) -> dict[str, Any]:
    """Train from equal probabilities, on the same images for every objective of a seed; return
    metrics of held-out images by step, coverage and gradients at the end."""
    options = dict(one.options)
    job, steps = Job(**options.pop("job")), options.pop("steps")
    batch, test_images = options.pop("batch"), options.pop("test_images")
    torch.manual_seed(one.seed)
    images, model = Images(**options, seed=one.seed), network(options["classes"])
    rollouts = Generator().manual_seed(one.seed + 1)
    held_out = images.draw(test_images)
    optimizer = torch.optim.SGD(model.parameters(), lr=job.learning_rate, momentum=0.9)
    warm_up, evaluated = max(steps // 20, 1), evaluated_steps(steps)

    measured = [measure(model, *held_out)[0]]
    for step in range(1, steps + 1):
        decay = (1 + math.cos(math.pi * max(step - warm_up, 0) / max(steps - warm_up, 1))) / 2
        optimizer.param_groups[0]["lr"] = job.learning_rate * min(step / warm_up, decay)
        inputs, labels = images.draw(batch)
        logits = model(inputs)
        optimizer.zero_grad()
        logits.backward(-ascent(logits.detach(), labels, job, rollouts) / batch)
        optimizer.step()
        if step in evaluated:
            metrics, pass_rates = measure(model, *held_out)
            measured.append(metrics)
    return {
        "curves": {name: [metrics[name] for metrics in measured] for name in measured[0]},
        "coverage": [pass_at(k, pass_rates) for k in COVERAGE],
        "gradients": {
            "pass_rate": rounded(pass_rates[:SHOWN]),
            "norm": rounded(gradient_norms(model, held_out[0][:SHOWN], held_out[1][:SHOWN], job)),
        },
    }


def evaluated_steps(steps: int) -> list[int]:
    return sorted({round(i * steps / EVALUATIONS) for i in range(EVALUATIONS + 1)})


def pass_at(k: int, pass_rates: Tensor) -> float:
    """Return the exact pass@k, averaged over images."""
    return float(torch.mean(1 - torch.pow(1 - pass_rates.double(), k)))


@torch.no_grad()
def measure(model: nn.Module, inputs: Tensor, labels: Tensor) -> tuple[dict[str, float], Tensor]:
    """Return metrics on held-out images, and the pass rate of each; the accuracy is the limit of a
    majority vote of many rollouts.
    """
    logits = model.eval()(inputs)
    model.train()
    log_probs = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    metrics = {f"pass@{k}": pass_at(k, log_probs.exp()) for k in (1, 128)}
    metrics["accuracy"] = float((logits.argmax(-1) == labels).double().mean())
    metrics["nll"] = -float(log_probs.mean())
    return metrics, log_probs.exp()


def gradient_norms(model: nn.Module, inputs: Tensor, labels: Tensor, job: Job) -> Tensor:
    """Return the L2 norm of each image's expected gradient: W_N(p) p |grad log p|, and
    |grad log p| for cross-entropy.

    These are the points of the paper's scatter plot without the noise of sampled rollouts.
    """
    model.eval()
    parameters, norms = list(model.parameters()), list[Tensor]()
    for image, label in zip(inputs, labels, strict=True):
        log_p = model(image[None]).log_softmax(-1)[0, label]
        parts = torch.autograd.grad(log_p, parameters)
        p = log_p.detach().exp().clamp(max=1)
        weight = torch.ones(())
        if job.objective == ORDER:
            weight = 1 - (1 - p) ** job.count
        elif job.objective in ESTIMATORS:
            name = job.objective
            weight = p * effective_weight(ESTIMATORS[name], job.count, p[None], **OPTIONS[name])[0]
        norms.append(weight * torch.stack([part.norm() for part in parts]).norm())
    model.train()
    return torch.stack(norms)


def check(settings: ExactLikelihood) -> None:
    # one seed has no standard error
    check_least(settings, steps=1, batch=1, classes=2, test_images=1, seeds=2)
    if not settings.rollouts or not all(2 <= n <= 10_000 for n in settings.rollouts):
        raise InputError(
            f"--rollouts must be one or more numbers from 2 to 10000, got {settings.rollouts}"
        )
    if not all(0 < rate < math.inf for rate in (settings.learning_rate, *settings.sweep)):
        raise InputError("--learning-rate and --sweep must be above 0 and finite")
    if not all(0 <= x < math.inf for x in (settings.noise, settings.clutter)):
        raise InputError("--noise and --clutter must be at least 0 and finite")


def experiment(settings: ExactLikelihood) -> dict[str, Any]:
    check(settings)
    counts = sorted(set(settings.rollouts))
    rates = sorted({*settings.sweep, settings.learning_rate})
    compared = [Job(EXACT, 0, settings.learning_rate)]
    # Algorithm 1 with N rollouts has order N - 1
    orders = sorted({1, *(n - 1 for n in counts)})
    compared += [Job(ORDER, order, settings.learning_rate) for order in orders]
    compared += [Job(x, n, settings.learning_rate) for x, n in product(ESTIMATORS, counts)]
    swept = [
        Job(x, 0 if x == EXACT else counts[-1], rate)
        for x, rate in product((EXACT, *ESTIMATORS), rates)
    ]
    jobs = list(dict.fromkeys(compared + swept))  # the sweep shares some jobs
    shared = {
        name: getattr(settings, name)
        for name in ("steps", "batch", "test_images", "classes", "clutter", "noise")
    }
    runs = [
        TokenRun(
            str(job),
            seed,
            {**shared, "job": asdict(job)},
            0,  # the steps are the limit
            EVALUATIONS,
            settings.work / f"{job} at {job.learning_rate:g}, {seed}.json",
        )
        for seed in range(settings.seed, settings.seed + settings.seeds)
        for job in jobs
    ]
    settings.work.mkdir(parents=True, exist_ok=True)
    found = measure_all(train, runs, settings.threads)
    outcomes = {
        job: summary(
            job, [x for x, of in zip(found, jobs * settings.seeds, strict=True) if of == job]
        )
        for job in jobs
    }
    # Drop what is not drawn: the curves of the sweep, and the gradients of all N except the
    # largest.
    curves = [dict(outcomes[job]) for job in compared]
    for row in curves:
        if row["count"] not in (0, counts[-1]):
            del row["gradients"]
    kept = ("objective", "learning_rate", "label", "final")
    sweep = [{key: outcomes[job][key] for key in kept} for job in swept]
    print_tables(curves, sweep)
    return {
        "steps": evaluated_steps(settings.steps),
        "k": COVERAGE,
        "curves": curves,
        "sweep": sweep,
    }


def summary(job: Job, outcomes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a job's means and standard errors over seeds, and the gradients of the first seed."""
    curves = {
        name: over_seeds([outcome["curves"][name] for outcome in outcomes])
        for name in outcomes[0]["curves"]
    }
    final = {
        name: {key: values[-1] for key, values in curve.items()} for name, curve in curves.items()
    }
    return {
        **asdict(job),
        "label": str(job),
        "final": final,
        "curves": curves,
        "coverage": over_seeds([outcome["coverage"] for outcome in outcomes]),
        "gradients": outcomes[0]["gradients"],
    }


def over_seeds(values: list[list[float]]) -> dict[str, list[float]]:
    """Return means and standard errors over seeds of values [S, points]."""
    of_seeds = torch.tensor(values, dtype=torch.float64)
    return {
        "mean": rounded(of_seeds.mean(0)),
        "standard_error": rounded(standard_error(of_seeds)),
    }


def print_tables(curves: list[dict[str, Any]], sweep: list[dict[str, Any]]) -> None:
    print("\nheld-out images; mean and standard error over seeds")
    print(f"{'':<21}" + "".join(f"{name:>15}" for name in curves[0]["final"]))
    for row in curves:
        cells = (f"{x['mean']:.4f} {x['standard_error']:.4f}" for x in row["final"].values())
        print(f"{row['label']:<21}" + "".join(f"{x:>15}" for x in cells))
    rates = sorted({row["learning_rate"] for row in sweep})
    for name in ("pass@1", "pass@128", "accuracy"):
        print(f"{name + ' by learning rate':<21}" + "".join(f"{rate:>15g}" for rate in rates))
        for label in dict.fromkeys(row["label"] for row in sweep):
            finals = [row["final"][name] for row in sweep if row["label"] == label]
            cells = (f"{x['mean']:.4f} {x['standard_error']:.4f}" for x in finals)
            print(f"{label:<21}" + "".join(f"{x:>15}" for x in cells))


def draw(record: dict[str, Any]) -> Figure:
    """Draw Figure 9 (its first panel is Figure 2), Figure 8, and the sweep."""
    results, figure = record["results"], Figure(figsize=(15, 9.5), layout="constrained")
    grid, curves = figure.subplots(2, 3), results["curves"]
    for axes, name in zip(grid.flat, METRICS, strict=False):
        draw_bands(axes, results["steps"], [(curve, curve["curves"][name]) for curve in curves])
        axes.set(title=METRICS[name], xlabel="step", ylabel=f"{name}, held-out images")
    draw_bands(grid[1, 0], results["k"], [(curve, curve["coverage"]) for curve in curves])
    grid[1, 0].set(
        title="coverage after training", xlabel="k", ylabel="pass@k, held-out images", xscale="log"
    )
    shown = [curve for curve in curves if "gradients" in curve]
    draw_gradients(grid[1, 1], shown)
    count = f"N = {shown[-1]['count']}"
    grid[1, 1].set_title(f"gradients after training, {count}")
    draw_sweep(grid[1, 2], results["sweep"])
    grid[1, 2].set_title(f"learning rates, {count}")
    for axes in grid.flat:
        axes.grid(alpha=0.3)
    figure.legend(handles=grid[0, 0].lines, loc="outside upper center", ncols=7, fontsize=9)
    return figure


def draw_bands(
    axes: Axes, x: list[int], curves: list[tuple[dict[str, Any], dict[str, list[float]]]]
) -> None:
    styles = ("-", "--", ":", "-.")
    for curve, values in curves:
        objective = curve["objective"]
        counts = sorted({one["count"] for one, _ in curves if one["objective"] == objective})
        rank = len(counts) - 1 - counts.index(curve["count"])
        style: dict[str, Any] = {"linestyle": styles[rank % 4]}
        if objective == EXACT:
            style = {"linewidth": 5, "alpha": 0.3}  # wide, because other curves lie on it
        mean, error = torch.tensor(values["mean"]), torch.tensor(values["standard_error"])
        axes.plot(x, mean, color=COLOURS[objective], label=curve["label"], **style)
        axes.fill_between(
            x, mean - error, mean + error, color=COLOURS[objective], alpha=0.15, linewidth=0
        )
    axes.ticklabel_format(axis="y", useOffset=False)


def draw_gradients(axes: Axes, curves: list[dict[str, Any]]) -> None:
    """Draw rings for cross-entropy, so that points on top of it are visible."""
    for curve in curves:
        colour, points = COLOURS[curve["objective"]], curve["gradients"]
        if curve["objective"] == EXACT:
            rings: dict[str, Any] = {
                "s": 45,
                "alpha": 0.4,
                "facecolors": "none",
                "edgecolors": colour,
            }
            axes.scatter(points["pass_rate"], points["norm"], **rings)
        else:
            axes.scatter(points["pass_rate"], points["norm"], s=12, alpha=0.6, color=colour)
    axes.set(
        xlabel="pass rate of a held-out image",
        ylabel="L2 norm of its expected gradient",
        xlim=(-0.03, 1.03),
    )


def draw_sweep(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for objective in (EXACT, *ESTIMATORS):
        of = [row for row in rows if row["objective"] == objective]
        ends = [row["final"]["pass@1"] for row in of]
        means, errors = [end["mean"] for end in ends], [end["standard_error"] for end in ends]
        style = {"linewidth": 5, "alpha": 0.3} if objective == EXACT else {"capsize": 3}
        rates = [row["learning_rate"] for row in of]
        axes.errorbar(rates, means, errors, marker="o", color=COLOURS[objective], **style)
    axes.set(xlabel="learning rate", ylabel="pass@1 after training", xscale="log")


main = partial(run, "exact_likelihood", ExactLikelihood, experiment, draw)

if __name__ == "__main__":
    sys.exit(main())
