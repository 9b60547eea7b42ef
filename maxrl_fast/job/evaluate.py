"""Samples a policy and reports, or compares finished evaluations."""

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import maxrl_fast
from maxrl_fast.config.evaluation import (
    EvaluationConfig,
    resolve,
    set_configs,
)
from maxrl_fast.config.rules import own_options
from maxrl_fast.errors import InputError
from maxrl_fast.evaluation.coverage import Interval, bootstrap, powers_of_two
from maxrl_fast.evaluation.diversity import Diversity, EmbeddingDiversity, NGramDiversity
from maxrl_fast.evaluation.evaluator import Evaluation, Evaluator
from maxrl_fast.evaluation.outcome import (
    RESULTS,
    Outcome,
    Resample,
    SampleTally,
    baseline_summary,
    contents_of,
    differences,
    points,
    read_outcome,
    settings_of,
    shown_score,
    summary,
)
from maxrl_fast.evaluation.scores import PASS
from maxrl_fast.evaluation.source import Source, find_source, free_folder
from maxrl_fast.evaluation.tables import (
    comparison_table,
    draw_coverage,
    numbers_table,
    outcome_rows,
    sets_table,
    summary_tables,
)
from maxrl_fast.job.build_policy import build_engine
from maxrl_fast.job.build_task import build_scorer, build_task, closing_task
from maxrl_fast.job.screen import Screen
from maxrl_fast.model.policy import load_policy
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.rollout import Engine, Sampling
from maxrl_fast.runtime.device import versions
from maxrl_fast.runtime.files import atomic_file, locked, storing
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.scorer import Scorer
from maxrl_fast.tasks.text_codec import end_of
from maxrl_fast.training.logprob_parity import check_exact
from maxrl_fast.training.stopwatch import Stopwatch

SAMPLES, PICTURE = "samples.jsonl", "coverage.png"
ROLLOUTS = {"cpu": 4096, "cuda": 16384}  # sampled between two reports of progress


@dataclass(frozen=True)
class Policy:
    source: Source
    task: Task  # with the policy's tokenizer
    model: PolicyModel
    engine: Engine


@contextlib.contextmanager
def stored(path: Path) -> Iterator[Path]:
    """A full disk raises StorageError."""
    with storing(str(path)), atomic_file(path) as temporary:
        yield temporary


def evaluate_checkpoint(parsed: EvaluationConfig, source: Source, screen: Screen) -> int:
    """Sample the checkpoint, and the baseline if it is a checkpoint, and report."""
    task = _task(parsed, source)
    config = resolve(parsed, source, task, screen.warning)
    configs = set_configs(config, task)
    torch.set_num_threads(config.place.threads)
    diversity: Diversity = NGramDiversity()
    if config.measure.embeddings is not None:
        diversity = EmbeddingDiversity(config.measure.embeddings, torch.device(config.place.device))
    policy = _policy(max(configs, key=_batch), source, task, None)
    baseline, estimates = _baseline(configs[0], policy), []
    with _scorer(config, task) as scorer:
        for i, own in enumerate(configs):
            baseline = _baseline(own, policy) if i else baseline
            estimates.append(_evaluate_set(own, policy, baseline, diversity, scorer, screen))
    if len(configs) > 1:
        screen.console.print(sets_table(estimates, config.measure.confidence))
    return 0


def _evaluate_set(
    config: EvaluationConfig,
    policy: Policy,
    baseline: Policy | Outcome | None,
    diversity: Diversity,
    scorer: Scorer,
    screen: Screen,
) -> dict[int, Interval]:
    """Return pass@k by k."""
    source, task = policy.source, policy.task
    measure, out, clock = config.measure, config.place.out, Stopwatch()
    settings, num_distinct = _settings(config, task)
    with (
        locked(out),
        # Renamed in the reverse order: where eval.json is, everything is.
        stored(out / RESULTS) as results,
        stored(out / PICTURE) as picture,
        stored(out / SAMPLES) as samples,
    ):
        scorer.check(task.prompts(measure.split, 0, 1))
        for line in (*_introduction(config, policy, baseline, num_distinct), scorer.describe()):
            if line:
                screen.info(line)
        with open(samples, "w") as file, clock("checkpoint"):
            tally = SampleTally(task, diversity, file.write)
            evaluation = _sample(config, policy, scorer, tally, screen, "evaluate")
        own, other = Outcome.of(source.name, settings, evaluation, tally), baseline
        if isinstance(other, Policy):
            with _scorer(config, other.task) as its_scorer, clock("baseline"):
                theirs = SampleTally(other.task, diversity)
                evaluated = _sample(config, other, its_scorer, theirs, screen, "baseline")
            other = Outcome.of(other.source.name, settings, evaluated, theirs)
        with clock("estimates"):
            score = shown_score([own, *([other] if other else [])])
            resample, ks = _resample(config), measure.k
            content = summary(own, evaluation, tally, score, ks, resample, config.sampling.seed)
            if other:
                content["baseline"] = baseline_summary(own, other, score, ks, resample)
        for table in summary_tables(content, own, other, measure.confidence):
            screen.console.print(table)
        curves = {own.name: own} | ({f"{other.name} (baseline)": other} if other else {})
        _draw(config, curves, score, picture)
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
            **content,
            "num_distinct_prompts": num_distinct,
            **scorer.pop_metrics().over(Ranks()),
        }
        results.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    for name, file_name in {"results": RESULTS, "samples": SAMPLES, "coverage": PICTURE}.items():
        screen.info(f"{name:<12}{out / file_name}")
    passed: dict[int, Interval] = content[PASS]
    return passed


def _settings(config: EvaluationConfig, task: Task) -> tuple[dict[str, Any], int]:
    contents = contents_of(task, config.measure.split, config.measure.eval_prompts)
    return settings_of(config.flat(), contents), len(set(contents))


def _task(config: EvaluationConfig, source: Source) -> Task:
    """Build the task of a checkpoint; with held-out sets that are given no other data is read."""
    seed, is_test = config.place.task_seed or 0, config.measure.split != "train"
    own = own_options(config, "task")
    own |= dict.fromkeys({"sft_data"} & own.keys())
    named = config.chosen.task, own, seed, source.checkpoint, config.reward
    return build_task(*named, test_only=is_test)


@contextlib.contextmanager
def _scorer(config: EvaluationConfig, task: Task) -> Iterator[Scorer]:
    """Yield the scorer of a policy's responses; close it and the task."""
    device, dtype = torch.device(config.place.device), getattr(torch, config.place.dtype)
    with (
        closing_task(task),
        contextlib.closing(build_scorer(config.reward, task, device, dtype)) as scorer,
    ):
        yield scorer


def _draw(config: EvaluationConfig, outcomes: dict[str, Outcome], score: str, path: Path) -> None:
    """Plot the score of outcomes by name at every k, with intervals at the powers of two."""
    resample, confidence = _resample(config), config.measure.confidence
    curves = []
    for name, x in outcomes.items():
        estimates = x.estimates(score, points(x.num_samples, config.measure.k))
        curves.append((name, x.curve(score), resample(estimates)))
    draw_coverage(curves, score, confidence, path)


def _resample(config: EvaluationConfig) -> Resample:
    """Return the bootstrap of values [P] by k over the prompts."""
    resamples, confidence = config.measure.bootstrap, config.measure.confidence

    def resample(values: dict[int, Tensor]) -> dict[int, Interval]:
        columns = torch.stack([*values.values()], 1)
        intervals = bootstrap(columns, resamples, confidence, config.sampling.seed or 0)
        return dict(zip(values, intervals, strict=True))

    return resample


def _policy(config: EvaluationConfig, source: Source, task: Task, like: Policy | None) -> Policy:
    """Return a checkpoint's policy, with the engine of `like` if the sizes are equal."""
    sampling = config.sampling
    model = load_policy(
        source.checkpoint,
        task=config.chosen.task,
        vocab_size=task.vocab_size,
        prompt_length=task.prompt_length,
        max_new_tokens=sampling.max_new_tokens,
    )
    own = model.config
    if like is not None and dataclasses.replace(like.model.config, dtype=own.dtype) == own:
        return Policy(source, task, model, like.engine)
    check_exact(model.to(config.place.device))
    named = config.chosen.rollout, own_options(config, "rollout"), sampling
    dtype = getattr(torch, config.place.dtype)
    return Policy(source, task, model, build_engine(*named, model, task, dtype, _batch(config)))


def _baseline(config: EvaluationConfig, policy: Policy) -> Policy | Outcome | None:
    """Return the policy of --baseline, still to be sampled, or the outcome of a finished
    evaluation.
    """
    path, measure, evaluated = config.measure.baseline, config.measure, policy.source.checkpoint
    if path is None:
        return None
    baseline: Policy | Outcome
    folders = [Path(path) / measure.split, Path(path)]  # of one of several sets, of the only one
    if folder := next((x for x in folders if (x / RESULTS).exists()), None):
        baseline = read_outcome(folder)
        theirs = baseline.settings
    else:
        source = find_source(path, "--baseline")
        if source.checkpoint == evaluated:
            wanted = f"--baseline must be another checkpoint than {evaluated}"
            raise InputError(f"{wanted}, which is evaluated")
        task = _task(config, source)
        theirs, _ = _settings(config, task)
        baseline = _policy(config, source, task, policy)
        ours, other = policy.model.state_dict(), baseline.model.state_dict()
        if ours.keys() == other.keys() and all(
            x.shape == other[name].shape and torch.equal(x, other[name].to(x))
            for name, x in ours.items()
        ):
            wanted = f"--baseline must be another policy than {evaluated}"
            raise InputError(f"{wanted}, got {source.checkpoint}, which has the same weights")
    if found := differences(theirs, _settings(config, policy.task)[0]):
        raise InputError(
            f"--baseline {path} must be of the same prompts, samples and sampling; it differs in "
            f"{'; '.join(found)}"
        )
    return baseline


def _introduction(
    config: EvaluationConfig,
    policy: Policy,
    baseline: Policy | Outcome | None,
    num_distinct: int,
) -> Iterator[str]:
    source, sampling, measure = policy.source, config.sampling, config.measure
    what = f"{source.describe()}; task {policy.task.name}, seed {sampling.seed}"
    yield f"maxrl_fast {maxrl_fast.__version__}: {what}"
    if source.run is not None:
        whose = f"those of the run {source.run}, unless a flag overrides them"
        yield f"the task's options and seed are {whose}"
    how = [f"temperature {sampling.temperature:g}"]
    how += [f"top-k {sampling.top_k}"] if sampling.top_k else []
    how += [f"min-p {sampling.min_p:g}"] if sampling.min_p else []
    how += [f"top-p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    how += [f"at most {sampling.max_new_tokens} tokens"]
    distinct = ""
    if num_distinct < measure.eval_prompts:
        distinct = f" ({num_distinct} distinct: intervals treat all prompts as distinct)"
    yield (
        f"{measure.eval_prompts} {measure.split} prompts{distinct} x {measure.samples} samples, "
        f"{', '.join(how)}; {policy.engine.describe()}"
    )
    if baseline is not None:
        named = baseline.source.describe() if isinstance(baseline, Policy) else measure.baseline
        yield f"baseline: {named}"
    yield f"results in {config.place.out}"


def _chunk(config: EvaluationConfig) -> int:
    return max(1, ROLLOUTS[config.place.device] // config.measure.samples)


def _batch(config: EvaluationConfig) -> int:
    return min(config.measure.eval_prompts, _chunk(config)) * config.measure.samples


def _sample(
    config: EvaluationConfig,
    policy: Policy,
    scorer: Scorer,
    tally: SampleTally,
    screen: Screen,
    name: str,
) -> Evaluation:
    measure, options, device = config.measure, config.sampling, torch.device(config.place.device)
    policy.engine.load_weights(policy.model.to(device))
    sampling = Sampling(
        options.temperature,
        options.max_new_tokens,
        policy.task.stop_ids,
        *(options.top_k, options.top_p, options.min_p),
        end_of=end_of(policy.task),
    )
    evaluator = Evaluator(
        policy.engine,
        policy.task,
        scorer,
        sampling,
        num_prompts=measure.eval_prompts,
        num_samples=measure.samples,
        seed=options.seed,
        device=device,
        split=measure.split,
        chunk=_chunk(config),
    )
    with screen.stage(name, measure.eval_prompts) as stage:

        def after_chunk(done: int) -> None:
            stage.advance(done)
            if warning := scorer.failures(Ranks(), f"prompt {done} of {measure.eval_prompts}")[1]:
                screen.warning(warning)

        return evaluator.evaluate(after_chunk, tally)


def compare_evaluations(config: EvaluationConfig, screen: Screen) -> int:
    folders = config.measure.compare
    if len(folders) < 2:
        raise InputError(f"--compare needs at least two finished evaluations, got {len(folders)}")
    outcomes = [read_outcome(folder) for folder in folders]
    smallest = min(outcome.num_samples for outcome in outcomes)
    ks = sorted(set(config.measure.k)) or powers_of_two(smallest)
    if ks[-1] > smallest:
        raise InputError(
            f"k must be from 1 to {smallest}, the fewest samples of these evaluations, got {ks[-1]}"
        )
    out, resample = free_folder(config.place.out, "compare"), _resample(config)
    letters = [chr(ord("A") + i) if i < 26 else str(i + 1) for i in range(len(outcomes))]
    for letter, folder in zip(letters, folders, strict=True):
        screen.info(f"{letter}  {folder}")
    first, gains, score = outcomes[0], [], shown_score(outcomes)
    for letter, outcome in zip(letters[1:], outcomes[1:], strict=True):
        found = differences(first.settings, outcome.settings)
        if found:
            differ = "are not of the same prompts, samples and sampling; they differ in"
            screen.warning(f"A and {letter} {differ} {'; '.join(found)}")
        are_paired = len(outcome.rewards) == len(first.rewards) and not found
        gains.append(resample(outcome.gains(first, score, ks)) if are_paired else None)
    estimates = [resample(outcome.estimates(score, ks)) for outcome in outcomes]
    screen.console.print(comparison_table(letters, score, estimates, gains))
    screen.console.print(numbers_table(outcome_rows(outcomes), letters))
    names = [outcome.name for outcome in outcomes]
    if len(set(names)) < len(names):
        names = [str(folder) for folder in folders]
    with locked(out), stored(out / PICTURE) as picture:
        _draw(config, dict(zip(names, outcomes, strict=True)), score, picture)
    screen.info(f"{'coverage':<12}{out / PICTURE}")
    return 0
