"""From flags and the folder of a run to the resolved configuration of an evaluation."""

import dataclasses
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from maxrl_fast.config import parse as training
from maxrl_fast.config.checks import check_reward_weights, check_task, refuse_inapplicable
from maxrl_fast.config.evaluation_options import (
    EvaluationConfig,
    ResolvedEvaluationConfig,
    ResolvedMeasure,
    ResolvedPlace,
    ResolvedSampling,
)
from maxrl_fast.config.metadata import check_limits
from maxrl_fast.config.options import Config
from maxrl_fast.config.resolve import num_held_out, resolve_place, response_limit
from maxrl_fast.errors import InputError
from maxrl_fast.evaluation.coverage import powers_of_two
from maxrl_fast.model.hub import check_model, directory_of, find_model
from maxrl_fast.rollout.names import check_engine_name
from maxrl_fast.runtime.files import read_json
from maxrl_fast.tasks import Task


@dataclass(frozen=True)
class Source:
    """The location of a policy's weights."""

    checkpoint: Path  # a Hugging Face directory, absolute, links followed
    name: str  # for tables and file names
    run: Path | None = None  # the folder of the run that it lies in


def find_source(name: str, flag: str = "CHECKPOINT") -> Source:
    """Return the checkpoint that a user's path or name of the hub means, downloaded from the hub if it is not in the cache.

    Raises:
        InputError: where it is neither a checkpoint nor the folder of a run with one, or cannot be downloaded.
    """
    wanted, path = f"{flag} must be a Hugging Face checkpoint directory or the folder of a run", Path(name)
    if check_model(name, wanted) is not None:
        pinned = find_model(name, lambda sentence: print(f"warning: {sentence}", file=sys.stderr, flush=True))
        return Source(directory_of(pinned, with_weights=True), pinned.rpartition("@")[0].rpartition("/")[2])
    if not (path / "config.json").exists():
        raise InputError(f"{wanted}, got {path}, which has no config.json")
    if _is_run(path):
        found = next((path / link for link in ("best", "latest") if (path / link).is_dir()), None)
        if found is None:
            raise InputError(f"{path} is the folder of a run without a checkpoint: neither best nor latest is there")
        path = found
    path = path.resolve()
    run = next((folder for folder in list(path.parents)[:2] if _is_run(folder)), None)
    return Source(path, path.name if run is None else f"{run.name}-{path.name}", run)


def _is_run(folder: Path) -> bool:
    """Return whether a folder holds the config.json of a run, not of a model."""
    try:
        options = read_json(folder / "config.json")
    except InputError:
        return False
    return "objective" in options and "model_type" not in options


def parse(arguments: Sequence[str]) -> tuple[EvaluationConfig, Source | None]:
    """Return what flags and the run's folder give. A flag that is wrong in itself exits with code 2.

    Raises:
        InputError: where CHECKPOINT is missing or is none, on a flag that does not exist, and on an option that the task does
            not take.
    """
    if flag := next((argument for argument in arguments if argument.partition("=")[0] in ("--model", "--checkpoint")), None):
        raise InputError(f"CHECKPOINT is given without a flag, as in `{PROG} DIR`, got {flag:.80}")
    training.refuse_unknown(EvaluationConfig(), arguments)
    arguments = _checkpoint_first(arguments)
    asks_for_help = bool({"-h", "--help"} & {*arguments})
    hidden = training.hidden_options({}, arguments) if asks_for_help else {}
    given = training.parse_shown(EvaluationConfig, arguments, hidden, PROG)
    if given.measure.compare:
        if given.checkpoint is not None or given.measure.baseline is not None:
            raise InputError("--compare compares finished evaluations and takes no CHECKPOINT and no --baseline")
        return given, None
    if given.checkpoint is None:
        raise InputError("CHECKPOINT is missing: a Hugging Face checkpoint directory or the folder of a run (or --compare)")
    source = find_source(given.checkpoint)
    run = Config() if source.run is None else training.parse(["--resume", str(source.run)])
    config = training.parse_shown(
        EvaluationConfig, arguments, (), PROG, default=EvaluationConfig(task=run.task, reward=run.reward)
    )
    if config.task.task != run.task.task:  # another task takes none of its options
        config = given
    max_new_tokens, place = config.sampling.max_new_tokens, config.place
    if max_new_tokens is None and config.task == run.task:
        max_new_tokens = run.rollout.max_new_tokens
    seed = run.run.seed if config.sampling.seed is None else config.sampling.seed
    task_seed = run.run.seed if place.task_seed is None else place.task_seed
    sampling = dataclasses.replace(config.sampling, max_new_tokens=max_new_tokens, seed=seed)
    return dataclasses.replace(
        config, checkpoint=str(source.checkpoint), sampling=sampling, place=dataclasses.replace(place, task_seed=task_seed)
    ), source


def _checkpoint_first(arguments: Sequence[str]) -> list[str]:
    """Return the arguments with a CHECKPOINT behind the values of --reward moved to the front: it would be taken for one."""
    arguments = list(arguments)
    if "--reward" not in arguments:
        return arguments
    start = arguments.index("--reward") + 1
    end = next((i for i in range(start, len(arguments)) if arguments[i].startswith("--")), len(arguments))
    is_behind = end - start > 1 and ":" not in arguments[end - 1]  # each reward has a colon
    return [arguments.pop(end - 1), *arguments] if is_behind else arguments


PROG = "python -m maxrl_fast.evaluate"


def check(config: EvaluationConfig) -> None:
    """Refuse everything that can be known to be wrong before any work.

    Raises:
        InputError: with an expected/got message.
    """
    measure, sampling, options = config.measure, config.sampling, config.flat()
    check_limits(EvaluationConfig, options)
    for k in measure.k:
        if not 1 <= k <= (sys.maxsize if measure.compare else measure.samples):
            raise InputError(f"k must be from 1 to the {measure.samples} samples, got {k}")
    if sampling.temperature == 0 and measure.samples > 1:
        raise InputError(f"greedy decoding gives one response: samples must be 1 at temperature 0, got {measure.samples}")
    check_task(config.task.task)
    check_engine_name(sampling.rollout)
    refuse_inapplicable(EvaluationConfig, options)
    check_reward_weights(options)


def resolve(
    config: EvaluationConfig, source: Source, task: Task, warn: Callable[[str], None] = warnings.warn
) -> ResolvedEvaluationConfig:
    """Return the checked configuration with every default worked out.

    Args:
        warn: as of `response_limit`.

    Raises:
        InputError: where the device is absent, --out holds something, there are fewer prompts, or the policy has too few
            positions.
    """
    measure, sampling, place = config.measure, config.sampling, config.place
    available = task.num_test_prompts if measure.split == "test" else None
    prompts = num_held_out(measure.prompts, available, "prompts")
    ks = tuple(sorted(set(measure.k))) or tuple(powers_of_two(measure.samples))
    limit = response_limit(sampling.max_new_tokens, task, source.checkpoint, warn)
    device, dtype = resolve_place(place.device, place.dtype)
    resolved = {
        "out": free_folder(place.out, source.name),
        "task_seed": place.task_seed or 0,
        "device": device,
        "dtype": dtype,
        "threads": place.threads or torch.get_num_threads(),
    }
    return ResolvedEvaluationConfig(
        checkpoint=config.checkpoint,
        measure=ResolvedMeasure(**{**vars(measure), "prompts": prompts, "k": ks}),
        sampling=ResolvedSampling(**{**vars(sampling), "max_new_tokens": limit, "seed": sampling.seed or 0}),
        task=config.task,
        reward=config.reward,
        place=ResolvedPlace(**{**vars(place), **resolved}),
    )


def free_folder(out: Path | None, name: str) -> Path:
    """Return the folder of the results: --out, or one named after the policy and the time.

    Raises:
        InputError: where it holds something.
    """
    out = out or Path("evaluations") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        # The files that a stopped evaluation leaves behind are overwritten.
        is_free = not out.exists() or (out.is_dir() and all(x.name == "lock" or x.suffix == ".partial" for x in out.iterdir()))
    except OSError as error:
        raise InputError(f"cannot read --out {out}: {error}") from error
    if not is_free:
        raise InputError(f"--out must be a new or empty folder, got {out}")
    return out
