"""The command: sample a checkpoint, estimate, show and write; or lay finished evaluations over each other."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import maxrl_fast
from maxrl_fast.config.evaluation_options import (
    EvaluationConfig,
    Source,
    as_training,
    check,
    find_source,
    free_folder,
    parse,
    resolve,
)
from maxrl_fast.distributed.ranks import Ranks
from maxrl_fast.errors import InputError, NonFiniteError, RewardError, StorageError
from maxrl_fast.evaluation.coverage import powers_of_two
from maxrl_fast.evaluation.diversity import Diversity, EmbeddingDiversity, NGramDiversity
from maxrl_fast.evaluation.evaluator import Evaluation, evaluate, is_correct
from maxrl_fast.evaluation.outcome import (
    RESULTS,
    Outcome,
    Resampling,
    contents_of,
    differences,
    is_finished,
    read_outcome,
    settings_of,
)
from maxrl_fast.evaluation.summary import Report
from maxrl_fast.evaluation.tables import comparison_table, draw_coverage, numbers_table, outcome_rows
from maxrl_fast.evaluation.tally import Collector
from maxrl_fast.files.durable import locked, replaced
from maxrl_fast.hardware import versions
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.model.policy import build_policy
from maxrl_fast.rewards.scoring import Scorer
from maxrl_fast.rollout import Engine, Sampling
from maxrl_fast.rollout.engines import build_engine
from maxrl_fast.run.control import Stopwatch
from maxrl_fast.run.screen import Screen
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.registry import build_task

SAMPLES, PICTURE = "samples.jsonl", "coverage.png"
ROLLOUTS = {"cpu": 4096, "cuda": 16384}  # sampled between two reports of progress


@dataclass(frozen=True)
class Policy:
    """What is sampled."""

    source: Source
    task: Task  # with the policy's tokenizer
    model: Decoder
    engine: Engine


@contextlib.contextmanager
def stored(path: Path) -> Iterator[Path]:
    """A result to write aside, which becomes `path` at the end.

    Raises:
        StorageError: where the disk does not take it.
    """
    try:
        with replaced(path) as aside:
            yield aside
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns 0; 1 on failing rewards, non-finite values or a full disk; 2 on bad input; 130 on Ctrl-C."""
    screen = Screen()
    try:
        config, source = parse(sys.argv[1:] if arguments is None else arguments)
        check(config)
        if (size := Ranks.of_environment().size) > 1:
            raise InputError(f"an evaluation runs in one process, got {size}")
        return compare(config, screen) if source is None else run(config, source, screen)
    except KeyboardInterrupt:
        screen.warn("stopped; nothing was kept")
        return 130
    except torch.OutOfMemoryError as error:
        screen.complain(f"{str(error).partition('. ')[0]}; a lower --kv-cache-gb needs less")
        return 1
    except (NonFiniteError, RewardError, StorageError) as error:
        screen.complain(f"{error}; nothing was kept")
        return 1
    except InputError as error:
        screen.complain(str(error))
        return 2


def run(config: EvaluationConfig, source: Source, screen: Screen) -> int:
    """Sample the checkpoint, and the baseline where it is one; report.

    Raises:
        InputError: where the configuration proves to be wrong, before any sampling.
    """
    assert config.place.task_seed is not None
    task = build_task(config.task, config.place.task_seed, source.checkpoint)
    config = resolve(config, source, task)
    out, device = config.place.out, torch.device(config.place.device)
    assert out is not None
    torch.set_num_threads(config.place.threads or 1)
    contents = contents_of(config, task)
    settings, num_distinct = settings_of(config, contents), len(set(contents))
    policy = _policy(config, source, task, None)
    baseline = _baseline(config, settings, policy)
    embeddings = config.measure.embeddings
    diversity: Diversity = NGramDiversity() if embeddings is None else EmbeddingDiversity(embeddings, device)
    clock = Stopwatch()
    with (
        contextlib.closing(Scorer.of(config.task, task)) as scorer,
        locked(out),
        # Last in, first renamed: where eval.json is, everything is.
        stored(out / RESULTS) as results,
        stored(out / PICTURE) as picture,
        stored(out / SAMPLES) as samples,
    ):
        for line in _introduction(config, policy, baseline, num_distinct):
            screen.say(line)
        with open(samples, "w") as file, clock("checkpoint"):
            collector = Collector(task, diversity, file.write)
            evaluation = _sample(config, policy, scorer, collector, screen, "evaluate")
        own = _outcome(source.name, config, settings, evaluation, collector)
        other = None if isinstance(baseline, Policy) else baseline
        if isinstance(baseline, Policy):
            with contextlib.closing(Scorer.of(config.task, baseline.task)) as its_scorer, clock("baseline"):
                collected = Collector(baseline.task, diversity)
                evaluated = _sample(config, baseline, its_scorer, collected, screen, "baseline")
            other = _outcome(baseline.source.name, config, settings, evaluated, collected)
        with clock("estimates"):
            report = Report.of(config, own, other, collector)
        for table in report.tables(config):
            screen.console.print(table)
        curves = [(own.name, own.curve, report.drawn)]
        curves += [(f"{other.name} (baseline)", other.curve, report.drawn_of_baseline)] if other else []
        draw_coverage(curves, config.measure.confidence, picture)
        content = {
            "checkpoint": str(source.checkpoint),
            "name": source.name,
            "run": None if source.run is None else str(source.run),
            "task": task.name,
            "options": config.flat(),
            "settings": settings,
            "versions": versions(),
            "command": sys.argv,
            "seconds": clock.seconds,
            "num_distinct_prompts": num_distinct,
            **report.content(diversity, collector, evaluation.num_tokens),
        }
        results.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    for name, file_name in {"results": RESULTS, "samples": SAMPLES, "coverage": PICTURE}.items():
        screen.say(f"{name:<12}{out / file_name}")
    return 0


def _policy(config: EvaluationConfig, source: Source, task: Task, like: Policy | None) -> Policy:
    """A checkpoint and an engine for it: that of a policy of the same sizes, where there is one."""
    assert config.measure.prompts is not None
    as_sampled = as_training(config, source.checkpoint).replace(
        prompts=min(config.measure.prompts, _chunk(config)), rollouts=config.measure.samples
    )
    model = build_policy(as_sampled, task)
    if like is not None and dataclasses.replace(like.model.config, dtype=model.config.dtype) == model.config:
        return Policy(source, task, model, like.engine)
    return Policy(source, task, model, build_engine(as_sampled, model.to(config.place.device), task))


def _baseline(config: EvaluationConfig, settings: dict[str, Any], policy: Policy) -> Policy | Outcome | None:
    """What --baseline names: a policy still to be sampled, or what an evaluation of it has found.

    Raises:
        InputError: where it is neither, or not of the same prompts, samples and sampling.
    """
    path = config.measure.baseline
    if path is None:
        return None
    assert config.place.task_seed is not None
    baseline: Policy | Outcome
    if is_finished(path):
        baseline = read_outcome(path)
        found = differences(baseline.settings, settings)
    else:
        source = find_source(path, "--baseline")
        task = build_task(config.task, config.place.task_seed, source.checkpoint)
        found = differences(settings_of(config, contents_of(config, task)), settings)
        baseline = _policy(config, source, task, policy)
    if found:
        raise InputError(
            f"--baseline {path} must be of the same prompts, samples and sampling; it differs in {'; '.join(found)}"
        )
    return baseline


def _introduction(
    config: EvaluationConfig, policy: Policy, baseline: Policy | Outcome | None, num_distinct: int
) -> Iterator[str]:
    """What is evaluated and how, said once at the start."""
    source, sampling, measure = policy.source, config.sampling, config.measure
    yield f"maxrl_fast {maxrl_fast.__version__}: {source.checkpoint}, task {policy.task.name}, seed {sampling.seed}"
    if source.run is not None:
        yield f"the task's options and seed are those of the run {source.run}, but for what flags say"
    limits = [f"{name} {value:g}" for name, value in (("top-k", sampling.top_k), ("min-p", sampling.min_p)) if value]
    limits += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    how = ", ".join([f"temperature {sampling.temperature:g}", *limits, f"at most {sampling.max_new_tokens} tokens"])
    distinct = "" if num_distinct == measure.prompts else f" ({num_distinct} distinct: intervals take all for distinct)"
    yield f"{measure.prompts} {measure.split} prompts{distinct} x {measure.samples} samples, {how}; {policy.engine.describe()}"
    if baseline is not None:
        yield f"baseline: {baseline.source.checkpoint if isinstance(baseline, Policy) else measure.baseline}"
    yield f"results in {config.place.out}"


def _chunk(config: EvaluationConfig) -> int:
    """Prompts sampled at a time."""
    return max(1, ROLLOUTS[config.place.device] // config.measure.samples)


def _sample(
    config: EvaluationConfig, policy: Policy, scorer: Scorer, collector: Collector, screen: Screen, name: str
) -> Evaluation:
    """What `evaluate` finds, all samples handed to the collector.

    Raises:
        RewardError, NonFiniteError, StorageError.
    """
    num_prompts, device, chunk = config.measure.prompts, torch.device(config.place.device), _chunk(config)
    assert num_prompts is not None
    assert config.sampling.seed is not None
    policy.engine.load_weights(policy.model.to(device))
    with screen.stage(name, num_prompts) as stage:

        def after_chunk(done: int) -> None:
            stage.advance(done)
            if complaint := scorer.failures(Ranks(), f"prompt {done} of {num_prompts}")[1]:
                screen.warn(complaint)

        return evaluate(
            policy.engine,
            policy.task,
            scorer,
            num_prompts,
            config.measure.samples,
            Sampling.of(as_training(config, policy.source.checkpoint), policy.task),
            seed=config.sampling.seed,
            device=device,
            progress=after_chunk,
            keep=collector,
            split=config.measure.split,
            chunk=chunk,
        )


def _outcome(
    name: str, config: EvaluationConfig, settings: dict[str, Any], evaluation: Evaluation, collector: Collector
) -> Outcome:
    numbers = {key: vars(evaluation)[key] for key in ("response_length_mean", "truncated", "reward_errors")}
    return Outcome(
        name=name,
        num_samples=config.measure.samples,
        num_correct=is_correct(collector.rewards).sum(1),
        settings=settings,
        numbers=numbers | {"diversity": collector.mean_diversity},
        measure=collector.measure,
    )


def compare(config: EvaluationConfig, screen: Screen) -> int:
    """Lay finished evaluations over each other.

    Raises:
        InputError: where one is none, or they have no k in common.
    """
    folders = config.measure.compare
    if len(folders) < 2:
        raise InputError(f"--compare needs at least two finished evaluations, got {len(folders)}")
    outcomes = [read_outcome(folder) for folder in folders]
    smallest = min(outcome.num_samples for outcome in outcomes)
    ks = sorted(set(config.measure.k)) or powers_of_two(smallest)
    if ks[-1] > smallest:
        raise InputError(f"k must be from 1 to {smallest}, the fewest samples of these evaluations, got {ks[-1]}")
    out, resampling, confidence = free_folder(config.place.out, "compare"), Resampling.of(config), config.measure.confidence
    first, *others = outcomes
    letters = [chr(ord("A") + i) if i < 26 else str(i + 1) for i in range(len(outcomes))]
    passes, gains = [resampling.of_each(outcome.passes(ks)) for outcome in outcomes], []
    for letter, folder in zip(letters, folders, strict=True):
        screen.say(f"{letter}  {folder}")
    for letter, outcome in zip(letters[1:], others, strict=True):
        found = differences(first.settings, outcome.settings)
        if found:
            screen.warn(f"A and {letter} are not of the same prompts, samples and sampling; they differ in {'; '.join(found)}")
        are_paired = len(outcome.num_correct) == len(first.num_correct) and not found
        gains.append(resampling.of_each(outcome.gains(first, ks)) if are_paired else None)
    screen.console.print(comparison_table(letters, passes, gains))
    screen.console.print(numbers_table(outcome_rows(outcomes), letters))
    names = [outcome.name for outcome in outcomes]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    with locked(out), stored(out / PICTURE) as aside:
        drawn = [
            (name, outcome.curve, resampling.of_each(outcome.passes(powers_of_two(outcome.num_samples))))
            for name, outcome in zip(names, outcomes, strict=True)
        ]
        draw_coverage(drawn, confidence, aside)
    screen.say(f"{'coverage':<12}{out / PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
