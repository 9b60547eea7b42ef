"""MaxRL for continuous rewards, which no paper has: maxrl of order T, an estimator of grad
sum_{k<=T} (1/k) max@k.

MaxRL (section 8) "does not directly extend to continuous or arbitrarily valued rewards". For binary
rewards its advantage is the sum over k of MaxPO's advantages, and that sum is defined for any
reward. The naive extension is the paper's formula (r - mu)/mu, unchanged. The experiment has three
parts:

(a) A bandit that can be enumerated: the bias, the error against the number of groups, and the
    effect of a constant added to all rewards.
(b) Bandits learned with each T: max@k against k. (c) The trainer on mazes with partial credit
(`--reward maze_progress.py:fraction_of_the_way`): maxrl against maxpo, GRPO and
    RLOO from one warm start.
"""

import itertools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from partial_credit import MazeSettings, check_mazes, draw_mazes, mazes, show_mazes, style
from runner import check_least, rounded, run, standard_error, tracked
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.evaluation.coverage import powers_of_two
from maxrl_fast.ops import group_advantage

NAIVE = "naive"  # (r - mu)/mu, MaxRL's Algorithm 1, on rewards that are not binary
POSITIVE = "naive, all rewards positive"  # by adding a constant, which changes no gradient of max@k
GROUPS_LIMIT = 500_000  # largest number of groups to enumerate


@dataclass(frozen=True)
class ContinuousMaxRL(MazeSettings):
    """MaxRL of order T on continuous rewards: bandits with closed forms, and mazes with partial
    credit. It takes 9 minutes on two cores."""

    arms: int = 6
    """Arms of the enumerated bandit. Rewards and logits are standard normal; the first two arms
    have the same reward.
    """
    groups: int = 2**16
    """M, the largest number of groups over which the estimate is averaged."""
    repeats: int = 16
    """Repetitions of this average."""
    prompts: int = 8
    """Prompts of a learned bandit. One policy serves all of them and cannot tell them apart; with
    one prompt, one arm would be best for every T."""
    learned_arms: int = 16
    """Arms of a learned bandit."""
    learned: int = 64
    """Number of learned bandits."""
    updates: int = 2000
    """Updates of each learned bandit, each from one group per prompt."""
    rate: float = 0.2
    """Step size of the gradient ascent; advantages of order T are first divided by 1 + 1/2 + ... +
    1/T.
    """


def best_of_k(probabilities: Tensor, rewards: Tensor, largest: int) -> Tensor:
    """Return max@k = r_(A) - sum_j d_j F_j^k for k = 1..largest: [..., A], [..., A] -> [...,
    largest].
    """
    values, order = rewards.sort(-1)
    # P(r <= r_(j)), j < A
    below = probabilities.expand_as(values).gather(-1, order).cumsum(-1)[..., :-1, None]
    sizes = torch.arange(1, largest + 1, dtype=values.dtype)
    return values[..., -1:] - (values.diff()[..., None] * below**sizes).sum(-2)


def target(logits: Tensor, rewards: Tensor, order: int) -> Tensor:
    """Return the gradient [..., A] of sum_{k <= order} (1/k) max@k with respect to the logits of a
    softmax policy.
    """
    logits = logits.detach().requires_grad_()
    weights = 1 / torch.arange(1, order + 1, dtype=logits.dtype)
    (gradient,) = torch.autograd.grad(
        (best_of_k(logits.softmax(-1), rewards, order) * weights).sum(), logits
    )
    return gradient


def advantages_of(estimator: int | str, rewards: Tensor) -> Tensor:
    """Return maxrl advantages of order `estimator`, or those of the naive extension, for rewards
    [..., N].
    """
    if isinstance(estimator, int):
        return group_advantage(rewards, "maxrl", order=estimator)
    return group_advantage(rewards, "maxrl_ratio")


def policy_gradient(probabilities: Tensor, actions: Tensor, advantages: Tensor) -> Tensor:
    """Return (1/N) sum_i A_i grad log pi(a_i) for the logits: [..., A], [..., N], [..., N] -> [...,
    A].
    """
    sums = torch.zeros(
        *actions.shape[:-1], probabilities.shape[-1], dtype=advantages.dtype
    ).scatter_add(-1, actions, advantages)
    return sums / actions.shape[-1] - advantages.mean(-1, keepdim=True) * probabilities


def all_groups(arms: int, rollouts: int) -> tuple[Tensor, Tensor]:
    """Return every group up to order, [C(arms + N - 1, N), N], and the count of each arm in it,
    [..., arms].
    """
    actions = torch.tensor(list(itertools.combinations_with_replacement(range(arms), rollouts)))
    return actions, torch.nn.functional.one_hot(actions, arms).sum(1)


def exact_mean(
    logits: Tensor, rewards: Tensor, estimator: int | str, actions: Tensor, counts: Tensor
) -> Tensor:
    """Return the exact mean [A] of the estimated gradient over all groups, weighted by their
    multinomial probabilities.
    """
    num = counts.double()
    chance = (
        torch.lgamma(num.sum(1) + 1) - torch.lgamma(num + 1).sum(1) + num @ logits.log_softmax(0)
    )
    return chance.exp() @ policy_gradient(
        logits.softmax(0), actions, advantages_of(estimator, rewards[actions])
    )


def bandit(settings: ContinuousMaxRL) -> tuple[Tensor, Tensor]:
    """Return the logits and rewards [A] of the enumerated bandit, float64."""
    generator = torch.Generator().manual_seed(settings.seed)
    logits, rewards = torch.randn(2, settings.arms, dtype=torch.float64, generator=generator)
    rewards[1] = rewards[0]
    return logits, rewards


def orders_of(rollouts: int) -> list[int]:
    """Return 1, 2, 4, ... up to N/2, and N-1."""
    return sorted({*powers_of_two(rollouts // 2), rollouts - 1})


def convergence(settings: ContinuousMaxRL) -> dict[str, Any]:
    """Return the relative RMS over repeats of ||mean of M estimates - target|| for M = 16, 32, ...,
    and its slope in M.
    """
    logits, rewards = bandit(settings)
    generator = torch.Generator().manual_seed(settings.seed + 1)
    sizes = [2**i for i in range(4, settings.groups.bit_length())]
    last = torch.tensor(sizes) - 1
    names: list[int | str] = [*orders_of(settings.rollouts), NAIVE, POSITIVE]
    squares: dict[int | str, list[Tensor]] = {name: [] for name in names}
    for _ in tracked(range(settings.repeats), "bandit: error"):
        draws = torch.multinomial(
            logits.softmax(0), sizes[-1] * settings.rollouts, True, generator=generator
        )
        actions = draws.view(-1, settings.rollouts)  # [M, N]
        for name, found in squares.items():
            wanted = target(
                logits, rewards, name if isinstance(name, int) else settings.rollouts - 1
            )
            given = rewards - rewards.min() + 1 if name == POSITIVE else rewards
            # [M, A]
            estimates = policy_gradient(
                logits.softmax(0), actions, advantages_of(name, given[actions])
            )
            means = estimates.cumsum(0)[last] / torch.tensor(sizes)[:, None]
            found.append((means - wanted).square().sum(1) / wanted.square().sum())
    errors = {str(name): torch.stack(found).mean(0).sqrt() for name, found in squares.items()}
    x = torch.tensor(sizes).double().log()
    slopes = {
        name: float((x - x.mean()) @ error.log() / (x - x.mean()).square().sum())
        for name, error in errors.items()
    }
    return {
        "groups": sizes,
        "errors": {name: error.tolist() for name, error in errors.items()},
        "slopes": slopes,
    }


def shifts(settings: ContinuousMaxRL) -> dict[str, Any]:
    """Return the exact relative bias of both extensions at full order, against a constant added to
    all rewards.
    """
    logits, rewards = bandit(settings)
    actions, counts = all_groups(settings.arms, settings.rollouts)
    wanted = target(logits, rewards, settings.rollouts - 1)  # a constant changes no gradient
    constants = torch.linspace(-4, 4, 65, dtype=torch.float64).tolist()

    def bias(name: int | str, constant: float) -> float:
        return float(
            (exact_mean(logits, rewards + constant, name, actions, counts) - wanted).norm()
            / wanted.norm()
        )

    def bias_of_order(order: int) -> float:
        right = target(logits, rewards, order)
        return float(
            (exact_mean(logits, rewards, order, actions, counts) - right).norm() / right.norm()
        )

    return {
        "rewards": rewards.tolist(),
        "probabilities": logits.softmax(0).tolist(),
        "groups_enumerated": len(actions),
        "constants": constants,
        "bias": {
            str(name): [bias(name, c) for c in constants] for name in (settings.rollouts - 1, NAIVE)
        },
        "bias_by_order": {
            str(order): bias_of_order(order) for order in orders_of(settings.rollouts)
        },
    }


def learning(settings: ContinuousMaxRL) -> dict[str, Any]:
    """Return max@k after gradient ascent from the uniform policy: means over bandits, and the
    errors of the gain over T = 1.
    """
    generator = torch.Generator().manual_seed(settings.seed + 2)
    shape = (settings.learned, settings.prompts, settings.learned_arms)
    rewards = torch.randn(shape, generator=generator)
    curves: dict[str, Tensor] = {}
    names: list[int | str] = [*orders_of(settings.rollouts), NAIVE]
    for name in names:
        harmonic = sum(
            1 / k for k in range(1, name + 1 if isinstance(name, int) else settings.rollouts)
        )
        logits = torch.zeros(settings.learned, settings.learned_arms)
        draws = torch.Generator().manual_seed(settings.seed + 3)
        for _ in tracked(range(settings.updates), f"bandits: {name}"):
            probabilities = logits.softmax(-1)
            actions = torch.multinomial(
                probabilities, settings.prompts * settings.rollouts, True, generator=draws
            )
            actions = actions.view(settings.learned, settings.prompts, settings.rollouts)
            advantages = advantages_of(name, rewards.gather(-1, actions)) / harmonic
            logits += settings.rate * policy_gradient(
                probabilities[:, None], actions, advantages
            ).mean(1)
        # [bandits, k]
        curves[str(name)] = (
            best_of_k(logits.softmax(-1)[:, None], rewards, settings.rollouts).mean(1).double()
        )
    return {
        "max_at_k": {name: curve.mean(0).tolist() for name, curve in curves.items()},
        # Paired by bandit.
        "gain_error": {
            name: standard_error(curve - curves["1"]).tolist() for name, curve in curves.items()
        },
    }


def check(settings: ContinuousMaxRL) -> None:
    check_least(settings, arms=2, rollouts=4, groups=32, repeats=1, prompts=1, learned_arms=2)
    check_least(settings, learned=2, updates=1, warm_steps=1, maze_steps=0, maze_prompts=1)
    check_least(settings, seeds=2, eval_mazes=1, eval_samples=1, seed=0)
    for name in ("rate", "maze_lr"):
        if not 0 < getattr(settings, name) < math.inf:
            raise InputError(
                f"--{name.replace('_', '-')} must be above 0 and finite, got "
                f"{getattr(settings, name)}"
            )
    if (
        count := math.comb(settings.arms + settings.rollouts - 1, settings.rollouts)
    ) > GROUPS_LIMIT:
        raise InputError(
            f"--arms and --rollouts must give at most {GROUPS_LIMIT} groups to enumerate, got "
            f"{count}"
        )
    if settings.maze_steps:
        check_mazes(settings)


def experiment(settings: ContinuousMaxRL) -> dict[str, Any]:
    check(settings)
    parts = {
        "convergence": convergence(settings),
        "shifts": shifts(settings),
        "learning": learning(settings),
    }
    results: dict[str, Any] = rounded(
        parts | {"mazes": mazes(settings) if settings.maze_steps else None}
    )
    show(results)
    return results


def show(results: dict[str, Any]) -> None:
    """Print the main findings."""
    errors, slopes = results["convergence"]["errors"], results["convergence"]["slopes"]
    learned, exact = results["learning"]["max_at_k"], results["shifts"]["bias_by_order"]
    print(
        f"{'bandits':<28}exact bias  error at M  slope in M   learned: max@1   "
        f"max@{len(learned['1'])}"
    )
    for name, error in errors.items():
        after = f"{learned[name][0]:15.3f} {learned[name][-1]:8.3f}" if name in learned else ""
        bias = f"{exact[name]:.1e}" if name in exact else "-"
        print(f"{title(name):<28}{bias:>10} {error[-1]:11.2g} {slopes[name]:11.3f} {after}")
    if results["mazes"] is None:
        return
    show_mazes(results["mazes"])


def title(name: str) -> str:
    return f"T = {name}" if name.isdecimal() else name


def draw(record: dict[str, Any]) -> Figure:
    results, rollouts = record["results"], record["settings"]["rollouts"]
    figure = Figure(figsize=(17, 12 if results["mazes"] else 6), layout="constrained")
    grid = figure.subplots(2 if results["mazes"] else 1, 3, squeeze=False)
    draw_bandits(grid[0], results, rollouts)
    if results["mazes"]:
        draw_mazes(grid[1], results["mazes"])
    for axes in grid.flat:
        axes.grid(alpha=0.3)
        axes.legend(
            fontsize=9,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.12),
            ncols=2 if axes in grid[0] else 4,
        )  # below the axes, where it covers no curve
    return figure


def draw_bandits(row: Sequence[Axes], results: dict[str, Any], rollouts: int) -> None:
    error, shift, learned = row
    found = results["convergence"]
    orders = [f"maxrl-{name}" for name in found["errors"] if name.isdecimal()]
    styles = {
        name: style(f"maxrl-{name}" if name.isdecimal() else name, orders)
        for name in found["errors"]
    }
    for name, errors in found["errors"].items():
        error.plot(
            found["groups"],
            errors,
            label=f"{title(name)}: slope {found['slopes'][name]:.2f}",
            **styles[name],
        )
    error.set(
        xscale="log",
        yscale="log",
        xlabel="groups M averaged",
        ylabel="relative error of the mean gradient",
    )
    error.set_title("Bandit: error against the closed form")

    for name, biases in results["shifts"]["bias"].items():
        label = "naive, (r - μ)/μ" if name == NAIVE else f"maxrl, {title(name)}"
        shift.plot(results["shifts"]["constants"], biases, label=label, **styles[name])
    lowest = -min(results["shifts"]["rewards"])
    shift.axvline(
        lowest, color="tab:red", linewidth=1, linestyle=":", label="from here on no reward < 0"
    )
    shift.set(yscale="log", xlabel="constant added to all rewards", ylabel="relative bias, exact")
    shift.set_title(f"Bandit: bias at T = {rollouts - 1}, all groups enumerated")

    for name, curve in results["learning"]["max_at_k"].items():
        errors = results["learning"]["gain_error"][name]
        learned.errorbar(
            range(1, rollouts + 1), curve, errors, label=title(name), capsize=2, **styles[name]
        )
    learned.set(xlabel="k", ylabel="max@k, exact (bars: s.e. of the gain over T = 1)")
    learned.set_title("Learned bandits, one policy for several prompts")


main = partial(run, "continuous_maxrl", ContinuousMaxRL, experiment, draw)

if __name__ == "__main__":
    sys.exit(main())
