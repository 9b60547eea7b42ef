"""Objectives on a language model, at an equal number of sampled tokens: SmolLM2-135M learns
arithmetic in words.

    python examples/language/prepare.py        # once; its first lines say what it needs
    python examples/papers/language_objectives.py

All runs start from the same model and have the same learning rate and limit of tokens; runs of a
seed see the same prompts. Finished runs are kept in --work, and the same command continues with
those that are missing.

Few problems for many epochs, as in MaxRL's data-scarce regime (section 6.3), and MaxRL that stops:

    python examples/papers/language_objectives.py --training-problems 64 --tokens 160000 --seeds 1
        --objectives grpo maxrl grpo-dynamic maxrl-stop --eval-samples 32 --evaluations 6
        --dtype bfloat16 --out runs/papers/scarce
"""

import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import never_give_up
import torch
from matplotlib.figure import Figure
from rich.table import Table
from runner import (
    Settings,
    TokenRun,
    build,
    check_least,
    measure_all,
    run,
    show_table,
    standard_error,
    thinned,
)
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.evaluation.coverage import bootstrap, pass_at_k, powers_of_two
from maxrl_fast.evaluation.evaluator import Evaluator
from maxrl_fast.records import Prompts, pack
from maxrl_fast.rollout import RolloutRequest
from maxrl_fast.training.teacher import TeacherPrompts

REWARD = Path(__file__).parents[1] / "language/word_problems.py"
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"objective": "grpo"},
    "maxrl": {"objective": "maxrl"},
    "maxpo-4": {"objective": "maxpo", "k": 4},
    "rloo": {"objective": "rloo"},
    "pacs": {"objective": "pacs"},
    "maxpo-8": {"objective": "maxpo", "k": 8},
    "maxrl-stop": {"objective": "maxrl", "rollouts": 64, "stop_at": 4},
    "maxrl-carry": {"objective": "maxrl", "carry": 8},
    "grpo-dynamic": {"objective": "grpo", "dynamic_sampling": 4},
    "ngu-sum": {"objective": f"{never_give_up.FILE}:ngu_sum", "rollouts": 64},
    "ngu-mean": {"objective": f"{never_give_up.FILE}:ngu_mean", "rollouts": 64},
}
TAUGHT = {"kl": "full", "kl_coef": 0.05}
for x in ("grpo", "maxrl", "maxpo-4"):
    METHODS |= {
        f"{x}-{y}": METHODS[x] | TAUGHT | {"teacher_prompt": y} for y in ("answer", "sibling")
    }
NUM_READ = 32  # held-out problems, 8 samples of each
BEFORE = "before training"
COMPARED = "grpo"  # the others' differences from it are paired by prompt


@dataclass(frozen=True)
class LanguageSettings(Settings):
    """Objectives on SmolLM2-135M at an equal number of sampled tokens: about 20 minutes a run on
    one core. --threads is the number of simultaneous runs, each with one thread and 9 GB."""

    objectives: tuple[str, ...] = tuple(METHODS)[:6]
    """Of grpo, maxrl, maxpo-4, rloo, pacs, maxpo-8, maxrl-stop (4 successes of at most 64
    rollouts), maxrl-carry (--carry 8), grpo-dynamic (dynamic sampling), ngu-sum and ngu-mean (of
    never_give_up.py, at most 64 rollouts), and grpo, maxrl and maxpo-4 with -answer or -sibling
    (self-distillation)."""
    seeds: int = 2
    """Seeds from --seed on."""
    tokens: int = 24_000
    """Sampled tokens of a run, which ends with the step that reaches them."""
    problems: Path = Path("runs/language")
    """The folder that examples/language/prepare.py has written."""
    training_problems: int = 1000
    """The first of train.jsonl are trained on, in epochs."""
    prompts: int = 8
    """Prompts of a step."""
    rollouts: int = 16
    """Rollouts of a prompt."""
    max_new_tokens: int = 16
    """Tokens of a response at most."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation; the weights are float32."""
    lr: float = 1e-5
    """Learning rate, constant."""
    eval_samples: int = 64
    """Samples of each held-out prompt in an evaluation."""
    evaluations: int = 1
    """Evaluations of a run, after equal numbers of tokens; the last is at its end."""
    work: Path = Path("runs/language_objectives")
    """Folder of the finished runs."""


def experiment(settings: LanguageSettings) -> dict[str, Any]:
    if unknown := set(settings.objectives) - set(METHODS):
        raise InputError(f"--objectives must be of {', '.join(METHODS)}, got {min(unknown)}")
    check_least(settings, seeds=1, tokens=1, training_problems=1, eval_samples=1, evaluations=1)
    lines = (settings.problems / "train.jsonl").read_text().splitlines(keepends=True)
    if len(lines) < settings.training_problems:
        raise InputError(
            f"--training-problems must be at most {len(lines)}, the lines of train.jsonl, got "
            f"{settings.training_problems}"
        )
    settings.work.mkdir(parents=True, exist_ok=True)
    data = settings.work / f"train-{settings.training_problems}.jsonl"
    data.write_text("".join(lines[: settings.training_problems]))
    seeds = range(settings.seed, settings.seed + settings.seeds)
    runs = [language_run(settings, data, BEFORE, settings.seed)]
    runs += [
        language_run(settings, data, name, seed) for seed in seeds for name in settings.objectives
    ]
    results = {
        "runs": [
            {"method": one.name, "seed": one.seed, **outcome}
            for one, outcome in zip(runs, measure_all(measure, runs, settings.threads), strict=True)
        ],
        "eval_samples": settings.eval_samples,
    }
    show(results)
    return results


def language_run(settings: LanguageSettings, data: Path, name: str, seed: int) -> TokenRun:
    options = {
        "task": f"{REWARD}:number",
        "data": str(data),
        "test_data": str(settings.problems / "test.jsonl"),
        "model": str(settings.problems / "smollm2"),
        "seed": seed,
        "prompts": settings.prompts,
        "rollouts": settings.rollouts,
        **METHODS.get(name, METHODS[COMPARED]),
        "max_new_tokens": settings.max_new_tokens,
        "lr": settings.lr,
        "lr_schedule": "constant",
        "warmup_steps": 0,
        "eval_samples": settings.eval_samples,
        "keep_rollouts": 0,
        "threads": 1,
        "device": "cpu",
        "dtype": settings.dtype,
    }
    file = settings.work / f"{name.replace(' ', '-')}-{data.stem}-seed{seed}.json"
    tokens = 0 if name == BEFORE else settings.tokens
    return TokenRun(name, seed, options, tokens, settings.evaluations, file)


def measure(one: TokenRun) -> dict[str, Any]:
    trainer, evaluator = build(one.options)
    never_give_up.set_rule(one, trainer)
    names = ("reward_mean", "entropy", "frac_prompts_solved")
    steps: dict[str, list[float]] = {name: [] for name in ("rollouts", *names)}
    passes, tokens, seconds, next_prompt = list[dict[str, Any]](), [0], 0.0, 0
    while True:
        if tokens[-1] >= (len(passes) + 1) * one.tokens / one.evaluations:
            evaluation = evaluator.evaluate()
            pass_at_k = {str(k): value for k, value in evaluation.pass_at_k.items()}
            passes.append({"tokens": tokens[-1], "seconds": seconds, "pass": pass_at_k})
        if tokens[-1] >= one.tokens:
            break
        start = time.process_time()  # of one thread, whatever else the machine does
        record = trainer.step(len(tokens), next_prompt)
        seconds += time.process_time() - start
        next_prompt += record.batch.num_sampled
        tokens.append(tokens[-1] + record.batch.num_tokens)
        known = record.batch.all_rewards.isfinite().sum()
        steps["rollouts"].append(float(known) / len(record.batch.all_rewards))
        for name in names:
            steps[name].append(record.metrics[name])
    last = steps["entropy"][-len(steps["entropy"]) // 10 :]
    return {
        "tokens": tokens,
        "reward_mean": steps["reward_mean"],
        "entropy": sum(last) / max(len(last), 1),  # at the end
        **{x: sum(steps[x]) / max(len(tokens) - 1, 1) for x in ("rollouts", "frac_prompts_solved")},
        "passes": passes,
        "num_correct": evaluation.num_correct.tolist(),  # of each held-out prompt, at the end
        "reads": {name: reads(evaluator, name) for name in ("answer", "sibling")},
        "response_length": evaluation.num_tokens / evaluation.rewards.numel(),
    }


def reads(evaluator: Evaluator, teacher: str) -> float:
    """Return how often the policy is right when it reads the answer as this teacher would."""
    task: Any = evaluator.task
    prompts, made = task.prompts("test", 0, min(NUM_READ, evaluator.num_prompts)), list[Any]()
    for columns in prompts.columns:
        made.append(TeacherPrompts(task, teacher, 0).filled(columns["prompt"], columns["answer"]))
    tokens = [task.encode_prompt(prompt, "a teacher's") for prompt in made]
    given = Prompts(*pack(tokens), prompts.ids)
    request = RolloutRequest(given, 8, evaluator.sampling, 0)
    return float(evaluator.scorer.score(prompts, evaluator.engine.generate(request)).mean())


def held_out(results: dict[str, Any], method: str) -> Tensor:
    """Return pass@k of each run and held-out prompt, for k = 1, 2, 4, ...: [seeds, prompts, ks]."""
    n = results["eval_samples"]
    counts = torch.tensor([x["num_correct"] for x in results["runs"] if x["method"] == method])
    return torch.stack([pass_at_k(n, counts, k) for k in powers_of_two(n)], -1)


def show(results: dict[str, Any]) -> None:
    """Print means over seeds with their standard errors, and differences paired by prompt."""
    ks = powers_of_two(results["eval_samples"])
    methods = list(dict.fromkeys(one["method"] for one in results["runs"]))
    table = Table("", *(f"pass@{k}" for k in ks), "entropy", "tokens", "steps")
    for column in ("rollouts of a prompt", "prompts without success", "seconds", "reads"):
        table.add_column(column)
    for name in methods:
        over_prompts = held_out(results, name).mean(1)  # [seeds, ks]
        errors = standard_error(over_prompts)
        runs = [one for one in results["runs"] if one["method"] == name]
        trained = list[str]()
        if name != BEFORE:
            means = {
                key: sum(one[key] for one in runs) / len(runs)
                for key in ("entropy", "rollouts", "frac_prompts_solved")
            }
            trained = [
                f"{means['entropy']:.2f}",
                f"{sum(one['tokens'][-1] for one in runs) / len(runs):,.0f}",
                f"{sum(len(one['reward_mean']) for one in runs) / len(runs):.0f}",
                f"{means['rollouts']:.1f}",
                f"{1 - means['frac_prompts_solved']:.3f}",
                f"{sum(one['passes'][-1]['seconds'] for one in runs) / len(runs):.0f}",
            ]
        cells = (f"{x:.3f} ± {e:.3f}" for x, e in zip(over_prompts.mean(0), errors, strict=True))
        table.add_row(name, *cells, *trained)
    show_table(table)
    if COMPARED not in methods:
        return
    paired = Table(f"minus {COMPARED}", *(f"pass@{k}" for k in ks))
    base = held_out(results, COMPARED).mean(0)  # [prompts, ks]
    for name in methods:
        if name not in (BEFORE, COMPARED):
            intervals = bootstrap(held_out(results, name).mean(0) - base, 2000, 0.95, 0)
            paired.add_row(
                name, *(f"{x['mean']:+.3f} ({x['low']:+.3f}, {x['high']:+.3f})" for x in intervals)
            )
    show_table(paired)


def draw(record: dict[str, Any]) -> Figure:
    """Draw the rewards of training by sampled tokens, a line for each run; pass@1 and the largest
    pass@k of held-out prompts by tokens; and pass@k at the end, by k. Means over seeds, with
    standard errors."""
    results = record["results"]
    ks = powers_of_two(results["eval_samples"])
    figure = Figure(figsize=(15, 4.4), layout="constrained")
    rewards, curves, passes = figure.subplots(1, 3)
    before = held_out(results, BEFORE).mean(1)[0]  # [ks]
    for i, name in enumerate(dict.fromkeys(one["method"] for one in results["runs"])):
        color = "black" if name == BEFORE else f"C{i - 1}"
        over_prompts = held_out(results, name).mean(1)
        style = {"color": color, "label": name, "marker": "."}
        passes.errorbar(ks, over_prompts.mean(0), standard_error(over_prompts), **style)
        own = [x["passes"] for x in results["runs"] if x["method"] == name and name != BEFORE]
        for at, line in ((0, "-"), (-1, ":")):
            k = str(ks[at])
            values = [[float(before[at]), *(x["pass"][k] for x in one)] for one in own]
            counts = [[0, *(x["tokens"] for x in one)] for one in own]
            if own:
                means = torch.tensor(counts).double().mean(0), torch.tensor(values).mean(0)
                curves.plot(means[0] / 1000, means[1], line, marker=".", color=color)
        for one in results["runs"]:
            if one["method"] == name and name != BEFORE:
                points = thinned(one["reward_mean"], 12)
                x = [one["tokens"][int(step)] / 1000 for step, _ in points]
                rewards.plot(x, [mean for _, mean in points], color=color, alpha=0.8)
    tokens = "thousands of sampled tokens"
    rewards.set(title="mean reward of training prompts", xlabel=tokens)
    title = f"pass@1 and (dotted) pass@{ks[-1]} of held-out prompts"
    curves.set(title=title, xlabel=tokens)
    passes.set(title="pass@k of held-out prompts", xlabel="k", xscale="log")
    passes.set_xticks(ks, [str(k) for k in ks])
    passes.legend()
    for axes in (rewards, curves, passes):
        axes.grid(alpha=0.3)
    return figure


main = partial(run, "language_objectives", LanguageSettings, experiment, draw)

if __name__ == "__main__":
    sys.exit(main())
