"""Options of `python -m maxrl_fast.evaluate`: help, defaults, those of a run's folder, and every check without work."""

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from maxrl_fast.config import parse as training
from maxrl_fast.config.checks import check as check_training
from maxrl_fast.config.options import Config, ModelOptions, RolloutOptions, RunOptions, TaskOptions, unset
from maxrl_fast.errors import InputError
from maxrl_fast.evaluation.coverage import powers_of_two
from maxrl_fast.files.untrusted import read_json
from maxrl_fast.hardware import resolve_device, resolve_dtype
from maxrl_fast.tasks import Task


@dataclass(frozen=True)
class MeasureOptions:
    """What is measured."""

    prompts: Annotated[int | None, unset("INT", "256, or all that are held out")] = None
    """Prompts, the first of the split."""
    samples: int = 256
    """Responses to each (n)."""
    k: Annotated[tuple[int, ...], unset("INT ...", "1 2 4 ... up to --samples")] = ()
    """Sizes at which pass@k, max@k and maj@k are reported, each from 1 to --samples."""
    split: Literal["test", "train"] = "test"
    """Held-out prompts, or those of training (which begin anew where a file has fewer)."""
    baseline: Annotated[Path | None, unset("DIR", "none")] = None
    """Compare with this: another checkpoint, which is then sampled too, or the folder of a finished evaluation of the same
    prompts, samples and sampling."""
    bootstrap: int = 1000
    """Times that prompts are drawn again for the intervals."""
    confidence: float = 0.95
    """Of the intervals."""
    embeddings: Annotated[Path | None, unset("DIR", "none, counts of token n-grams")] = None
    """Local embedding model (transformers, safetensors) by which diversity is measured: its mean last hidden state."""
    compare: Annotated[tuple[Path, ...], unset("RUN ...", "none")] = ()
    """Folders of finished evaluations to lay over each other, in a table and a picture; takes no CHECKPOINT."""


@dataclass(frozen=True)
class SamplingOptions:
    """How responses are sampled. The papers evaluate language models with --temperature .6 --top-p .95."""

    temperature: float = 1.0
    """Sampling temperature; 0, the likeliest tokens, with one sample."""
    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the fewest likeliest tokens that have this much of the probability."""
    min_p: float = 0.0
    """Sample from tokens with at least this fraction of the likeliest one's probability."""
    max_new_tokens: Annotated[int | None, unset("INT", "the run's, else the task's")] = None
    """Longest response, in tokens."""
    rollout: Literal["native", "vllm"] = "native"
    """Rollout engine: native, or vllm where that is installed."""
    kv_cache_gb: Annotated[float | None, unset("FLOAT", "an eighth of the memory, a quarter of a GPU's")] = None
    """Most memory for keys and values, in 1e9 bytes; samples that do not fit wait for others to end."""
    seed: Annotated[int | None, unset("INT", "the run's, else 0")] = None
    """Seed of the sampling and the bootstrap: a sample depends on it, its prompt and its number alone (vllm: on the batch)."""


@dataclass(frozen=True)
class PlaceOptions:
    """Where it is computed and written."""

    out: Annotated[Path | None, unset("DIR", "evaluations/<name>-<time>")] = None
    """Folder of results, new or empty."""
    task_seed: Annotated[int | None, unset("INT", "the run's, else 0")] = None
    """Seed of the mazes and of the order of training prompts."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the computation; auto: bfloat16 on a GPU that has it, float32 elsewhere."""
    threads: Annotated[int | None, unset("INT", "those this process may use")] = None
    """CPU threads."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Sample many responses to each held-out prompt, and report pass@k, max@k, maj@k and diversity.

    CHECKPOINT is a Hugging Face directory, or the folder of a run of maxrl_fast.train: its best checkpoint, else its latest. Of
    a run, and of a checkpoint in its folder, the task's options are the run's, unless others are given.

    Examples: python -m maxrl_fast.evaluate runs/maxpo-... --samples 256

    python -m maxrl_fast.evaluate runs/maxpo-... --baseline runs/maxpo-.../checkpoints/step-000000

    python -m maxrl_fast.evaluate DIR --task dataset --data prompts.jsonl --reward reward.py:score --temperature .6 --top-p .95

    python -m maxrl_fast.evaluate --compare evaluations/one evaluations/other
    """

    checkpoint: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="CHECKPOINT", help_behavior_hint="")] = None
    """Checkpoint directory, or the folder of a run."""
    measure: MeasureOptions = field(default_factory=MeasureOptions)
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    task: TaskOptions = field(default_factory=TaskOptions)
    place: PlaceOptions = field(default_factory=PlaceOptions)

    def flat(self) -> dict[str, Any]:
        """All options by flag name, in the types of JSON."""
        groups = {"checkpoint": self.checkpoint} | vars(self.measure) | vars(self.sampling) | vars(self.task) | vars(self.place)
        return {name: _json(value) for name, value in groups.items()}


def _json(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value


@dataclass(frozen=True)
class Source:
    """Where a policy's weights are."""

    checkpoint: Path  # a Hugging Face directory, absolute, links followed
    name: str  # for tables and file names
    run: Path | None = None  # the folder of the run that it lies in


def find_source(path: Path, flag: str = "CHECKPOINT") -> Source:
    """The checkpoint that a user's path means.

    Raises:
        InputError: where it is neither a checkpoint directory nor the folder of a run with one.
    """
    wanted = f"{flag} must be a Hugging Face checkpoint directory or the folder of a run"
    if not path.is_dir():
        raise InputError(f"{wanted}, got {path}, which is {'no directory' if os.path.lexists(path) else 'not there'}")
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
    """Whether it holds the config.json of a run, not of a model."""
    try:
        options = read_json(folder / "config.json")
    except InputError:
        return False
    return "objective" in options and "model_type" not in options


def parse(arguments: Sequence[str]) -> tuple[EvaluationConfig, Source | None]:
    """What flags and the run's folder give; what is wrong with a flag exits with 2.

    Raises:
        InputError: where CHECKPOINT is missing or is none.
    """
    given = _parsed(arguments, EvaluationConfig())
    if given.measure.compare:
        if given.checkpoint is not None or given.measure.baseline is not None:
            raise InputError("--compare lays finished evaluations over each other and takes no CHECKPOINT and no --baseline")
        return given, None
    if given.checkpoint is None:
        raise InputError("CHECKPOINT is missing: a Hugging Face checkpoint directory or the folder of a run (or --compare)")
    source = find_source(given.checkpoint)
    run = Config() if source.run is None else training.parse(["--resume", str(source.run)])
    config = _parsed(arguments, EvaluationConfig(task=run.task))
    if config.task.task != run.task.task:  # another task takes none of its options
        config = given
    max_new_tokens, place = config.sampling.max_new_tokens, config.place
    if max_new_tokens is None and _prompts_of(config.task) == _prompts_of(run.task):
        max_new_tokens = run.rollout.max_new_tokens
    seed = run.run.seed if config.sampling.seed is None else config.sampling.seed
    task_seed = run.run.seed if place.task_seed is None else place.task_seed
    sampling = dataclasses.replace(config.sampling, max_new_tokens=max_new_tokens, seed=seed)
    return dataclasses.replace(
        config, checkpoint=source.checkpoint, sampling=sampling, place=dataclasses.replace(place, task_seed=task_seed)
    ), source


def _prompts_of(task: TaskOptions) -> dict[str, Any]:
    """The options that say what is asked, not how it is scored."""
    return {name: value for name, value in vars(task).items() if "reward" not in name and name != "maze_strict"}


def _parsed(arguments: Sequence[str], default: EvaluationConfig) -> EvaluationConfig:
    return tyro.cli(
        EvaluationConfig,
        args=list(arguments),
        default=default,
        prog="python -m maxrl_fast.evaluate",
        config=(tyro.conf.OmitArgPrefixes,),
    )


def as_training(config: EvaluationConfig, checkpoint: Path) -> Config:
    """The configuration of a run that would sample so from a checkpoint, for what builds policies and engines."""
    sampling, place = config.sampling, config.place
    rollout = RolloutOptions(
        rollout=sampling.rollout,
        max_new_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        kv_cache_gb=sampling.kv_cache_gb,
    )
    run = RunOptions(seed=sampling.seed or 0, device=place.device, dtype=place.dtype, threads=place.threads)
    return Config(task=config.task, rollout=rollout, model=ModelOptions(model=checkpoint), run=run)


def check(config: EvaluationConfig) -> None:
    """Everything that can be known to be wrong before any work.

    Raises:
        InputError: with a sentence that says what was wanted and what came.
    """
    measure, sampling = config.measure, config.sampling
    for name, value in (("prompts", measure.prompts), ("samples", measure.samples), ("bootstrap", measure.bootstrap)):
        if value is not None and value < 1:
            raise InputError(f"{name} must be at least 1, got {value}")
    if not 0 < measure.confidence < 1:
        raise InputError(f"confidence must be above 0 and below 1, got {measure.confidence}")
    for k in measure.k:
        if not 1 <= k <= (sys.maxsize if measure.compare else measure.samples):
            raise InputError(f"k must be from 1 to the {measure.samples} samples, got {k}")
    if sampling.temperature == 0 and measure.samples > 1:
        raise InputError(f"at temperature 0 all samples are the same: samples must be 1, got {measure.samples}")
    if config.place.task_seed is not None and not 0 <= config.place.task_seed < 2**63:
        raise InputError(f"task_seed must be in [0, 2^63), got {config.place.task_seed}")
    as_sampled = as_training(config, config.checkpoint or Path())
    # Greedy sampling is no way to train, but one to evaluate.
    check_training(as_sampled.replace(temperature=sampling.temperature or 1.0))


def resolve(config: EvaluationConfig, source: Source, task: Task) -> EvaluationConfig:
    """The checked configuration with every default worked out.

    Raises:
        InputError: where the device is absent, OUT holds something, or there are fewer prompts.
    """
    measure, place = config.measure, config.place
    held_out = task.num_test_prompts if measure.split == "test" and task.num_test_prompts else 2**63
    num_prompts = measure.prompts or min(256, held_out)
    if num_prompts > held_out:
        raise InputError(f"prompts must be at most the {held_out} prompts that are held out, got {num_prompts}")
    device = resolve_device(place.device)
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if resolve_dtype(place.dtype, device) == torch.bfloat16 else "float32"
    return dataclasses.replace(
        config,
        measure=dataclasses.replace(
            measure, prompts=num_prompts, k=tuple(sorted(set(measure.k))) or tuple(powers_of_two(measure.samples))
        ),
        sampling=dataclasses.replace(config.sampling, max_new_tokens=config.sampling.max_new_tokens or task.max_new_tokens),
        place=dataclasses.replace(
            place,
            out=free_folder(place.out, source.name),
            device="cuda" if device.type == "cuda" else "cpu",
            dtype=dtype,
            threads=place.threads or torch.get_num_threads(),
        ),
    )


def free_folder(out: Path | None, name: str) -> Path:
    """Where results go: --out, or a folder named after what is evaluated and the time.

    Raises:
        InputError: where it holds something.
    """
    out = out or Path("evaluations") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        # What a stopped evaluation leaves is not in the way.
        is_free = not out.exists() or (out.is_dir() and all(x.name == "lock" or x.suffix == ".partial" for x in out.iterdir()))
    except OSError as error:
        raise InputError(f"cannot read --out {out}: {error}") from error
    if not is_free:
        raise InputError(f"--out must be a new or empty folder, got {out}")
    return out
