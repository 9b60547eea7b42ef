from pathlib import Path
from typing import Any

from torch import Tensor

from maxrl_fast.evaluation.scores import PASS, score_of


def draw_curves(
    metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]], path: Path
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    reward, passes, entropy, length = figure.subplots(2, 2).flat
    steps = [record["step"] for record in metrics]
    for axes, key, title, unit in (
        (reward, "reward_mean", "reward in training", "mean over rollouts"),
        (entropy, "entropy", "entropy of the sampling policy", "nats per token"),
        (length, "response_length_mean", "response length", "tokens"),
    ):
        axes.plot(steps, [record[key] for record in metrics], color="tab:blue")
        axes.set(title=title, xlabel="step", ylabel=unit)
    length.set_ylim(bottom=0)
    entropy.set_ylim(bottom=0)

    shades = ("0.65", "tab:blue")
    # those on a part of the prompts are not comparable
    whole = [x for x in evaluations if x["num_prompts"] == evaluations[0]["num_prompts"]]
    first_and_last, score = [*whole[:1], *whole[1:][-1:]], score_of(whole)
    for record, shade in zip(first_and_last, shades, strict=False):
        values = record[score]
        ks = [*map(int, values)]
        when = f"step {record['step']}"
        passes.plot(ks, list(values.values()), marker="o", color=shade, label=when)
        passes.set_xscale("log", base=2)
        passes.set_xticks(ks, [str(k) for k in ks])
    if score == PASS:
        solved = [record["frac_prompts_solved"] for record in metrics]
        reward.plot(steps, solved, color="tab:orange", label="prompts solved at least once")
        reward.lines[0].set_label("rollouts solved")
        reward.set(ylabel="fraction", ylim=(0, 1))
        reward.legend()
        passes.set(title="pass@k on held-out prompts", xlabel="k", ylabel="fraction", ylim=(0, 1))
    else:
        passes.set(title="max@k on held-out prompts", xlabel="k", ylabel="mean of the best reward")
    if evaluations:
        passes.legend(loc="lower right")
    for axes in (reward, passes, entropy, length):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, format="png")


def draw_weights(curves: dict[str, tuple[Tensor, Tensor]], num_rollouts: int, path: Path) -> None:
    """Plot W_N(p) of estimators, and 1/p of maximum likelihood (MaxRL, Figure 1). `curves` has pass
    rates p and weights W_N(p)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for name, (pass_rates, weights) in curves.items():
        axes.plot(pass_rates, weights, label=name)
    pass_rates = next(iter(curves.values()))[0]
    axes.plot(
        pass_rates, 1 / pass_rates, color="0.5", linestyle="--", label="1/p, maximum likelihood"
    )
    largest = max(float(weights.max()) for _, weights in curves.values())
    axes.set(
        xscale="log",
        yscale="log",
        ylim=(1e-2, 3 * max(largest, 1.0)),
        xlim=(float(pass_rates[0]), 1),
        title=f"Weight of a prompt's gradient, N = {num_rollouts}",
        xlabel="pass rate p",
        ylabel="W_N(p)",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
