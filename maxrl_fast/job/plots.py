from pathlib import Path
from statistics import fmean
from typing import Any

from maxrl_fast.evaluation import PASS, score_of


def draw_curves(
    metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]], path: Path, title: str = ""
) -> None:
    """Plot metrics, as means of a twentieth of the steps too, and the first and last evaluation."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    figure.suptitle(title, parse_math=False)
    steps, width = [record["step"] for record in metrics], max(1, len(metrics) // 20)
    reward, passes, entropy, length = figure.subplots(2, 2).flat
    for axes, key, title, unit in (
        (reward, "reward_mean", "reward in training", "mean over rollouts"),
        (entropy, "entropy", "entropy of the sampling policy", "nats per token"),
        (length, "response_length_mean", "response length", "tokens"),
    ):
        values = [record[key] for record in metrics]
        means = [fmean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]
        axes.plot(steps, values, color="tab:blue", alpha=0.25)
        axes.plot(steps, means, color="tab:blue")
        axes.set(title=title, xlabel="step", ylabel=unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    # those on a part of the prompts are not comparable
    whole = [x for x in evaluations if x["num_prompts"] == evaluations[0]["num_prompts"]]
    score = score_of(whole)
    for record, shade in zip([*whole[:1], *whole[1:][-1:]], ("0.65", "tab:blue"), strict=False):
        ks = [*map(int, record[score])]
        label = f"step {record['step']}"
        passes.plot(ks, [*record[score].values()], marker="o", color=shade, label=label)
        passes.set_xscale("log", base=2)
        passes.set_xticks(ks, [str(k) for k in ks])
    name = "pass@k" if score == PASS else "max@k"
    passes.set(title=f"{name} on held-out prompts", xlabel="k", ylabel=name)
    if evaluations:
        passes.legend(loc="lower right")
    for axes in (reward, passes, entropy, length):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, format="png")
