"""Samples a policy and reports, and compares finished evaluations."""

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.config.options import EvaluationConfig
from maxrl_fast.config.resolve import num_held_out, place_of, response_limit
from maxrl_fast.errors import InputError
from maxrl_fast.evaluation import MAX, PASS
from maxrl_fast.evaluation.coverage import (
    Interval,
    bootstrap,
    majority_at_k,
    max_at_k,
    mean_over_sets,
    powers_of_two,
)
from maxrl_fast.evaluation.evaluator import Evaluation, Evaluator, is_correct
from maxrl_fast.evaluation.kept_samples import SampleTally
from maxrl_fast.evaluation.outcome import (
    RESULTS,
    Outcome,
    Source,
    contents_of,
    differences,
    settings_of,
)
from maxrl_fast.evaluation.tables import add_scores, new_table, shown, summary_table
from maxrl_fast.job.build_parts import build_engine, build_task, closing_task, load_model
from maxrl_fast.job.run_files import free_folder
from maxrl_fast.job.screen import Screen
from maxrl_fast.runtime.background import Stopwatch
from maxrl_fast.runtime.device import versions
from maxrl_fast.runtime.files import TASK_OPTIONS, atomic_file, locked, storing
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task, held_out_sets
from maxrl_fast.tasks.scorer import Scorer
from maxrl_fast.training.passes import check_exact

# keys of eval.json and what the table calls them
SHOWN = {
    "solved": "prompts solved at least once",
    "response_length_mean": "response length, tokens",
    "truncated": "truncated",
    "reward_errors": "failed rewards",
    "distinct_answers": "distinct answers, share",
}
NUMBERS = "response_length_mean", "truncated", "reward_errors", "num_tokens"  # of each record
SAMPLES = "samples.jsonl"
ROLLOUTS = {"cpu": 4096, "cuda": 16384}  # sampled between two reports of progress


def evaluate_checkpoint(parsed: EvaluationConfig, source: Source, screen: Screen) -> int:
    """Sample the checkpoint on each held-out set, report, and compare with --against."""
    options = {x: y for x, y in parsed.parts["task"].items() if x != "sft_data"}
    given = options, parsed.place.task_seed or 0, source.checkpoint, parsed.reward
    # with held-out sets that are given no other data is read
    task = build_task(parsed.chosen.task, *given, test_only=parsed.measure.split != "train")
    config = resolve_evaluation(parsed, source, task, screen.warning)
    place, how, configs = config.place, config.sampling, set_configs(config, task)
    torch.set_num_threads(place.threads)
    others, measures = [_read_others(own) for own in configs], [own.measure for own in configs]
    most, passes = ROLLOUTS[place.device], list[dict[int, Interval]]()
    batch = max(min(x.eval_prompts * x.samples, max(most, x.samples)) for x in measures)
    device, dtype = place.where
    model = load_model(source.checkpoint, config, task).to(device)
    check_exact(model)
    engine = build_engine(config, model, task, dtype, batch)
    engine.load_weights(model)
    sampling = how.rules(task, top_k=how.top_k, min_p=how.min_p)
    scorer = Scorer.of(config.reward, task, device, dtype)
    with closing_task(task), contextlib.closing(scorer):
        for own, x, against in zip(configs, measures, others, strict=True):
            part = x.eval_prompts, x.samples, how.seed, device, x.split, max(1, most // x.samples)
            evaluator = Evaluator(engine, task, scorer, sampling, *part)
            passes.append(_evaluate_set(own, source, evaluator, against, screen))
    if (num := len(passes)) > 1:
        interval = f"{config.measure.confidence:.0%} interval"
        table = new_table("k", f"mean pass@k of {num} sets ({interval})")
        for k in [k for k in passes[0] if all(k in x for x in passes)]:
            table.add_row(str(k), shown(mean_over_sets([x[k] for x in passes])))
        screen.console.print(table)
    return 0


def resolve_evaluation(
    config: EvaluationConfig, source: Source, task: Task, warn: Callable[[str], None]
) -> EvaluationConfig:
    sampling, place, wanted = config.sampling, config.place, config.measure.eval_prompts
    is_test = config.measure.split == "test"
    return config.replace(
        eval_prompts=num_held_out(wanted, task) if is_test else wanted or 256,
        max_new_tokens=response_limit(sampling.max_new_tokens, task, source.checkpoint, warn),
        seed=sampling.seed or 0,
        out=free_folder(place.out, "evaluations", source.name),
        task_seed=place.task_seed or 0,
        threads=place.threads or torch.get_num_threads(),
        **place_of(place),
    )


def set_configs(config: EvaluationConfig, task: Task) -> list[EvaluationConfig]:
    """Return that of each set; of several, with its name as a folder."""
    measure, out = config.measure, config.place.out
    sets = {"train": (measure.eval_prompts, measure.samples)}
    if measure.split == "test":
        sets = held_out_sets(task, *sets["train"])
    made = []
    for name, (number, n) in sets.items():
        k = tuple(sorted({k for k in measure.k if k <= n})) or tuple(powers_of_two(n))
        own = out / name if len(sets) > 1 else out
        made.append(config.replace(split=name, eval_prompts=number, samples=n, k=k, out=own))
    return made


def compare_evaluations(config: EvaluationConfig, folder: Path, screen: Screen) -> int:
    """Compare a finished evaluation with others, without sampling."""
    own, others = Outcome.read(folder), _read_others(config)
    if max(config.measure.k, default=1) > own.num_samples:
        raise InputError(f"--k must be at most {own.num_samples}, the samples of {folder}")
    _warn_of_differences(own.content["settings"], others, screen)
    _compare(config, own, others, screen)
    return 0


def _read_others(config: EvaluationConfig) -> list[Outcome]:
    """Read the evaluations of --against; of a folder of several sets, that of this set."""
    split = config.measure.split
    return [
        Outcome.read(folder / split if (folder / split / RESULTS).exists() else folder)
        for folder in config.measure.against
    ]


def _warn_of_differences(
    settings: dict[str, Any], others: Sequence[Outcome], screen: Screen
) -> None:
    for other in others:
        if found := differences(settings, other.content["settings"]):
            screen.warning(
                f"{other.name} is not of the same prompts, samples and sampling, so its difference "
                f"has no interval; it differs in {found}"
            )


def _compare(
    config: EvaluationConfig, own: Outcome, others: list[Outcome], screen: Screen
) -> dict[str, Any]:
    """Print evaluations beside each other; return the gains over the others by name, with intervals
    where the prompts are the same."""
    outcomes = [own, *others]
    is_binary = all(x.content["per_prompt"]["rewards"] is None for x in outcomes)
    score = PASS if is_binary else MAX
    smallest = min(outcome.num_samples for outcome in outcomes)
    ks = [k for k in config.measure.k or powers_of_two(smallest) if k <= smallest]
    ours, *estimates = [outcome.estimates(score, ks) for outcome in outcomes]
    gains = []
    for other, theirs in zip(others, estimates, strict=True):
        if differences(own.content["settings"], other.content["settings"]):
            gains.append({k: {"mean": float(ours[k].mean() - theirs[k].mean())} for k in ks})
        else:
            gains.append(_intervals(config, {k: ours[k] - theirs[k] for k in ks}))
    letters = [chr(ord("A") + i) for i in range(len(outcomes))]
    if others:
        for letter, outcome in zip(letters, outcomes, strict=True):
            screen.info(f"{letter}  {outcome.name}")
        table = new_table("held-out prompts", *letters, *(f"A - {x}" for x in letters[1:]))
        means = [{k: float(x.mean()) for k, x in own.items()} for own in (ours, *estimates)]
        add_scores(table, score, means, gains)
        screen.console.print(table)
    table = new_table("", *(letters if others else [""]))
    for key, name in SHOWN.items():
        table.add_row(name, *(f"{outcome.content[key]:.3f}" for outcome in outcomes))
    screen.console.print(table)
    return {other.name: gain for other, gain in zip(others, gains, strict=True)}


def _evaluate_set(
    config: EvaluationConfig,
    source: Source,
    evaluator: Evaluator,
    others: list[Outcome],
    screen: Screen,
) -> dict[int, Interval]:
    """Return pass@k by k."""
    measure, out, clock = config.measure, config.place.out, Stopwatch()
    task, scorer = evaluator.task, evaluator.scorer
    contents = contents_of(task, measure.split, measure.eval_prompts)
    settings = settings_of(config.flat(), contents)
    with (
        locked(out),
        storing(str(out)),
        # Renamed in the reverse order: where eval.json is, everything is.
        atomic_file(out / RESULTS) as results,
        atomic_file(out / SAMPLES) as samples,
    ):
        for line in _introduction(config, source, evaluator, len(set(contents))):
            screen.info(line)
        _warn_of_differences(settings, others, screen)
        with (
            open(samples, "w") as file,
            clock("checkpoint"),
            screen.stage("evaluate", measure.eval_prompts) as stage,
        ):

            def after_chunk(done: int) -> None:
                stage.advance(done)
                when = f"prompt {done} of {measure.eval_prompts}"
                if warning := scorer.failures(Ranks(), when)[1]:
                    screen.warning(warning)

            tally = SampleTally(task, file.write)
            evaluation = evaluator.evaluate(after_chunk, tally.take)
        with clock("estimates"):
            estimates = _estimates(config, evaluation, tally)
        content = {
            "checkpoint": str(source.checkpoint),
            "name": source.name,
            "run": None if source.run is None else str(source.run),
            "task": task.name,
            "options": config.flat(),
            TASK_OPTIONS: [*config.flags["task"].values()],
            "settings": settings,
            "versions": versions(),
            "command": sys.argv,
            "seconds": clock.seconds,
            "num_distinct_prompts": len(set(contents)),
            **estimates,
            **scorer.pop_metrics().over(Ranks()),
        }
        screen.console.print(summary_table(content, measure.confidence))
        own = Outcome(source.name, content, evaluation.values)
        content["against"] = _compare(config, own, others, screen)
        results.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    for name, file_name in ("results", RESULTS), ("samples", SAMPLES):
        screen.info(f"{name:<12}{out / file_name}")
    return estimates[PASS]


def _estimates(
    config: EvaluationConfig, evaluation: Evaluation, tally: SampleTally
) -> dict[str, Any]:
    ks, values, record = config.measure.k, evaluation.values, evaluation.record()
    right, answers = is_correct(evaluation.rewards), torch.tensor(tally.answers)
    is_binary = torch.equal(right.float(), values)
    score, num_samples = PASS if is_binary else MAX, values.shape[1]
    at_k = {PASS: right.float(), MAX: values}
    majority = majority_at_k(answers, right, ks, config.sampling.seed)
    points = sorted({*ks, *powers_of_two(num_samples), num_samples})
    # a float32 has 9 digits
    rewards = [[float(f"{x:.9g}") for x in row] for row in values.tolist()]
    return {
        "num_prompts": len(values),
        "num_samples": num_samples,
        "score": score,
        **{name: _intervals(config, {k: max_at_k(x, k) for k in ks}) for name, x in at_k.items()},
        "maj_at_k": _intervals(config, dict(zip(ks, majority.T, strict=True))),
        "coverage": _intervals(config, {k: max_at_k(at_k[score], k) for k in points}),
        "solved": float(right.any(1).double().mean()),
        **{name: record[name] for name in NUMBERS},
        "distinct_answers": float((answers.amax(1) + 1).double().mean()) / num_samples,
        "per_prompt": {
            "id": evaluation.ids.tolist(),
            "num_correct": evaluation.num_correct.tolist(),
            "rewards": None if is_binary else rewards,
        },
    }


def _intervals(config: EvaluationConfig, values: dict[int, Tensor]) -> dict[int, Interval]:
    """Return the means of values [P] by k over the prompts, with bootstrap intervals."""
    options = config.measure.bootstrap, config.measure.confidence, config.sampling.seed or 0
    intervals = bootstrap(torch.stack([*values.values()], 1), *options)
    return dict(zip(values, intervals, strict=True))


def _introduction(
    config: EvaluationConfig, source: Source, evaluator: Evaluator, num_distinct: int
) -> Iterator[str]:
    sampling, measure, task = config.sampling, config.measure, evaluator.task
    what = f"{source.checkpoint}; task {task.name}, seed {sampling.seed}"
    yield f"maxrl_fast {versions()['maxrl_fast']}: {what}"
    if source.run is not None:
        whose = f"those of the run {source.run}, unless a flag overrides them"
        yield f"the task's options and seed are {whose}"
    filters = {"top-k": sampling.top_k, "min-p": sampling.min_p, "top-p": sampling.top_p % 1}
    how = f"temperature {sampling.temperature:g}"
    how += "".join(f", {name} {value:g}" for name, value in filters.items() if value)
    prompts = f"{measure.eval_prompts} {measure.split} prompts"
    if num_distinct < measure.eval_prompts:
        prompts += f" ({num_distinct} distinct: intervals treat all prompts as distinct)"
    yield (
        f"{prompts} x {measure.samples} samples, {how}, at most "
        f"{sampling.max_new_tokens} tokens; {evaluator.engine.describe()}"
    )
    yield from evaluator.scorer.lines()
