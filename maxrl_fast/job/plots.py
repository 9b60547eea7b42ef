from pathlib import Path
from statistics import fmean
from typing import Any

from maxrl_fast.evaluation.coverage import wilson
from maxrl_fast.evaluation.scores import PASS, score_of


def draw_curves(
    metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]], path: Path, title: str = ""
) -> None:
    """Plot metrics as means of a twentieth of the steps, with each step's value pale behind, and
    evaluations with the 95% interval of a rate on so many prompts."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    figure.suptitle(title, parse_math=False)
    reward, passes, entropy, length = figure.subplots(2, 2).flat
    steps = [record["step"] for record in metrics]
    for axes, key, title, unit in (
        (reward, "reward_mean", "reward in training", "mean over rollouts"),
        (entropy, "entropy", "entropy of the sampling policy", "nats per token"),
        (length, "response_length_mean", "response length", "tokens"),
    ):
        _plot_smoothed(axes, steps, [record[key] for record in metrics], "tab:blue")
        axes.set(title=title, xlabel="step", ylabel=unit)
    length.set_ylim(bottom=0)
    entropy.set_ylim(bottom=0)
    # those on a part of the prompts are not comparable
    whole = [x for x in evaluations if x["num_prompts"] == evaluations[0]["num_prompts"]]
    first_and_last, score = [*whole[:1], *whole[1:][-1:]], score_of(whole)
    for record, shade in zip(first_and_last, ("0.65", "tab:blue"), strict=False):
        values = record[score]
        ks = [*map(int, values)]
        if score == PASS:
            bounds = [wilson(x, record["num_prompts"]) for x in values.values()]
            passes.fill_between(ks, *zip(*bounds, strict=True), color=shade, alpha=0.2, linewidth=0)
        when = f"step {record['step']}"
        passes.plot(ks, [*values.values()], marker="o", color=shade, label=when)
        passes.set_xscale("log", base=2)
        passes.set_xticks(ks, [str(k) for k in ks])
    if score == PASS:
        solved = [record["frac_prompts_solved"] for record in metrics]
        _plot_smoothed(reward, steps, solved, "tab:orange")
        reward.lines[1].set_label("rollouts solved")
        reward.lines[-1].set_label("prompts solved at least once")
        reward.set(ylabel="fraction", ylim=(0, 1))
        reward.legend()
        passes.set(title="pass@k on held-out prompts", xlabel="k", ylabel="fraction", ylim=(0, 1))
    else:
        passes.set(title="max@k on held-out prompts", xlabel="k", ylabel="mean of the best reward")
    if evaluations:
        passes.legend(loc="lower right")
    for axes in (reward, passes, entropy, length):
        axes.grid(alpha=0.3)
        if axes is not passes:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=120, format="png")


def _plot_smoothed(axes: Any, steps: list[int], values: list[float], color: str) -> None:
    width = max(1, len(values) // 20)
    means = [fmean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]
    axes.plot(steps, values, color=color, alpha=0.25, label="_")
    axes.plot(steps, means, color=color)
