"""The options of `python -m maxrl_fast.evaluate`, and the way from flags and the folder of a run to
the resolved ones.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from maxrl_fast.algorithms.options import (
    AT_LEAST_1,
    DERIVED,
    BetweenZeroAndOne,
    Count,
    CountOrZero,
    Default,
    NotNegative,
    Refusal,
    Seed,
    UnitInterval,
)
from maxrl_fast.config.checks import check_options
from maxrl_fast.config.help_page import show_help, split_help
from maxrl_fast.config.metadata import Groups, Note, options_of, read_options
from maxrl_fast.config.options import (
    CacheLimit,
    Config,
    Device,
    Dtype,
    EngineName,
    RewardOptions,
    TaskOptions,
    Threads,
    TopP,
)
from maxrl_fast.config.parse import (
    TASK_IS_MISSING,
    configure,
    convert,
    read_flags,
    read_run,
    refuse_unknown,
)
from maxrl_fast.config.resolve import (
    absolute_function,
    num_held_out,
    resolve_place,
    response_limit,
)
from maxrl_fast.errors import InputError
from maxrl_fast.evaluation.coverage import powers_of_two
from maxrl_fast.evaluation.source import Source, find_source, free_folder
from maxrl_fast.tasks import Task, held_out_sets

PROG = "python -m maxrl_fast.evaluate"
# options that an evaluation takes from the run
OF_RUN = [option.name for group in (TaskOptions, RewardOptions) for option in read_options(group)]


@dataclass(frozen=True)
class MeasureOptions:
    """What is measured."""

    checkpoint: Annotated[str | None, Note.POSITIONAL, Default("", "CHECKPOINT")] = None
    """Checkpoint directory, hf://ORG/NAME of the hub, or the folder of a run."""
    eval_prompts: Annotated[Count, Default("256, or all that are held out")] = DERIVED
    """Number of prompts: the first of the split, or of each held-out set."""
    samples: Annotated[
        int,
        AT_LEAST_1,
        Refusal(
            "greedy decoding gives one response: samples must be 1 at temperature {temperature:g}, "
            "got {samples}",
            lambda c: c["temperature"] == 0 and c["samples"] > 1,
        ),
    ] = 256
    """Responses to each prompt (n)."""
    k: Annotated[
        tuple[int, ...],
        Default("1 2 4 ... up to --samples", "INT ..."),
        Refusal(
            "k must be from 1 to the {samples} samples, got {k}",
            lambda c: any(not 1 <= k <= (k if c["compare"] else c["samples"]) for k in c["k"]),
        ),
    ] = ()
    """Sizes at which pass@k, max@k and maj@k are reported, each from 1 to --samples."""
    split: Literal["test", "train"] = "test"
    """Held-out prompts, or training prompts, which repeat where a file has fewer."""
    baseline: Annotated[str | None, Default("none", "DIR")] = None
    """Compare with this: another CHECKPOINT, which is then sampled too, or the folder of a finished
    evaluation of the same prompts, samples and sampling."""
    bootstrap: Annotated[int, AT_LEAST_1] = 1000
    """Bootstrap resamples of the prompts for the intervals."""
    confidence: BetweenZeroAndOne = 0.95
    """Confidence of the intervals."""
    embeddings: Annotated[Path | None, Default("none, counts of token n-grams", "DIR")] = None
    """Local embedding model (transformers, safetensors) by which diversity is measured."""
    compare: Annotated[tuple[Path, ...], Default("none", "RUN ...")] = ()
    """Compare these folders of finished evaluations, in a table and a picture, without
    CHECKPOINT.
    """


@dataclass(frozen=True)
class SamplingOptions:
    """How responses are sampled. The papers evaluate language models with --temperature .6 --top-p
    .95.
    """

    temperature: NotNegative = 1.0
    """Sampling temperature; 0: greedy decoding, with one sample."""
    top_k: CountOrZero = 0
    """Top-k sampling: sample from this many of the most probable tokens; 0: from all."""
    top_p: TopP = 1.0
    min_p: UnitInterval = 0.0
    """Min-p sampling: sample from tokens with at least this fraction of the most probable token's
    probability.
    """
    max_new_tokens: Annotated[Count, Default("the run's, else the task's")] = DERIVED
    """Response limit, in tokens."""
    rollout: EngineName = "native"
    kv_cache_gb: CacheLimit = None
    seed: Annotated[Seed, Default("the run's, else 0")] = DERIVED
    """Seed of the sampling and the bootstrap: a sample depends on it, its prompt and its number
    alone (vllm: on the batch).
    """


@dataclass(frozen=True)
class PlaceOptions:
    """Where it is computed and written."""

    out: Annotated[Path, Default("evaluations/<name>-<time>", "DIR")] = DERIVED
    """Folder of results, new or empty."""
    task_seed: Annotated[Seed, Default("the run's, else 0")] = DERIVED
    """Seed of the mazes and of the order of training prompts."""
    device: Device = "auto"
    dtype: Dtype = "auto"
    threads: Threads = DERIVED


@dataclass(frozen=True)
class EvaluationConfig(Groups):
    """Sample many responses to each held-out prompt, and report pass@k, max@k, maj@k and diversity.

    CHECKPOINT is a Hugging Face directory, hf://ORG/NAME or hf://ORG/NAME@REVISION of the hub, or
    the folder of a run of maxrl_fast.train: its latest checkpoint; RUN/best is the one with the
    highest mean reward. Of a run, and of a checkpoint in its folder, the task's options are the
    run's, unless others are given.

    Examples:
        python -m maxrl_fast.evaluate runs/maxpo-... --samples 256
        python -m maxrl_fast.evaluate runs/A --baseline runs/A/checkpoints/step-000000
        python -m maxrl_fast.evaluate DIR --task gsm8k --temperature .6 --top-p .95
        python -m maxrl_fast.evaluate --compare evaluations/one evaluations/other
    """

    measure: MeasureOptions = MeasureOptions()
    sampling: SamplingOptions = SamplingOptions()
    task: TaskOptions = field(default_factory=TaskOptions)
    reward: RewardOptions = field(default_factory=RewardOptions)
    place: PlaceOptions = PlaceOptions()

    def flat(self) -> dict[str, Any]:
        """All options by flag name, in the types of JSON; several values are always a list, but for
        rewards.
        """
        return super().flat() | {
            "k": [*self.measure.k],
            "compare": [*map(str, self.measure.compare)],
        }


class ResolvedEvaluationConfig(EvaluationConfig):
    """A checked configuration whose defaults are all worked out."""


def parse(arguments: Sequence[str]) -> tuple[EvaluationConfig, Source | None]:
    """--help prints the options that this task uses, and exits."""
    options, (words, asks_for_help) = options_of(EvaluationConfig), split_help(arguments)
    flags, words = read_flags(words, options)
    if flag := flags.get("model", flags.get("checkpoint")):
        raise InputError(f"CHECKPOINT is given without a flag, as in `{PROG} DIR`, got {flag.name}")
    for name, x in flags.items():  # CHECKPOINT after several values; rewards have a colon
        several = isinstance(x.value, list) and name != "compare" and x.value[1:]
        if several and not words and (name != "reward" or ":" not in several[-1]):
            words = [x.value.pop()] if name == "reward" or Path(several[-1]).is_dir() else []
    refuse_unknown(flags, words[1:], options)
    if asks_for_help or "compare" in flags:
        config = configure(EvaluationConfig(), options, flags, flags)
        if asks_for_help:
            show_help(config, options, PROG)
        if words or config.measure.baseline is not None:
            what = "--compare compares finished evaluations"
            raise InputError(f"{what}, without CHECKPOINT and --baseline")
        return config, None
    if not words:
        raise InputError(
            "CHECKPOINT is missing: a Hugging Face checkpoint directory or the folder of a run (or "
            "--compare)"
        )
    source = find_source(words[0])
    if source.run is None and "task" not in flags:
        raise InputError(f"a checkpoint that is not in the folder of a run {TASK_IS_MISSING}")
    of_run = {} if source.run is None else read_run(source.run, flags)
    of_run = {name: of_run[name] for name in (*OF_RUN, "max_new_tokens", "seed") if name in of_run}
    values = {name: convert(options_of(Config)[name], x) for name, x in of_run.items()}
    run = Config().replace(**values)
    shared = {name: x for name, x in of_run.items() if name in OF_RUN}
    if (sets := {"test_data", "test_hub"}) & flags.keys():  # in place of all of the run
        shared = {name: shared[name] for name in shared.keys() - sets}
    if {"data", "hub"} & flags.keys():  # the run's filter is about its own training sets
        shared.pop("where", None)
    if "task" in flags and absolute_function(str(flags["task"].value)) != run.task.task:
        shared = {}  # another task uses none of its options
    config = configure(EvaluationConfig(), options, {**shared, **flags}, flags)
    defaults: dict[str, Any] = dict.fromkeys(("seed", "task_seed"), run.run.seed)
    # a task of another size has its own limit
    sizes = ("maze_size", "chain_length", "gym_config", "task_args")
    if shared and all(getattr(config.task, x) == getattr(run.task, x) for x in sizes):
        defaults["max_new_tokens"] = run.rollout.max_new_tokens
    flat = config.flat()
    defaults = {name: value for name, value in defaults.items() if flat[name] is None}
    return config.replace(checkpoint=str(source.checkpoint), **defaults), source


def check(config: EvaluationConfig) -> None:
    check_options(EvaluationConfig, config.flat())


def resolve(
    config: EvaluationConfig,
    source: Source,
    task: Task,
    warn: Callable[[str], None] = warnings.warn,
) -> ResolvedEvaluationConfig:
    """Return the checked configuration with every default worked out."""
    measure, sampling, place = config.measure, config.sampling, config.place
    device, dtype = resolve_place(place.device, place.dtype)
    num_prompts = measure.eval_prompts or 256
    if measure.split == "test":
        num_prompts = num_held_out(measure.eval_prompts, task)
    worked_out = {
        "eval_prompts": num_prompts,
        "k": tuple(sorted(set(measure.k))),
        "max_new_tokens": response_limit(sampling.max_new_tokens, task, source.checkpoint, warn),
        "seed": sampling.seed or 0,
        "out": free_folder(place.out, source.name),
        "task_seed": place.task_seed or 0,
        "device": device,
        "dtype": dtype,
        "threads": place.threads or torch.get_num_threads(),
    }
    return ResolvedEvaluationConfig(**vars(config.replace(**worked_out)))


def set_configs(config: ResolvedEvaluationConfig, task: Task) -> list[ResolvedEvaluationConfig]:
    """Return that of each set; of several, with its name as a folder."""
    measure = config.measure
    sets = {"train": (measure.eval_prompts, measure.samples)}
    if measure.split == "test":
        sets = held_out_sets(task, measure.eval_prompts, measure.samples)
    return [
        config.replace(
            split=name,
            eval_prompts=num_prompts,
            samples=n,
            k=tuple(k for k in measure.k if k <= n) or tuple(powers_of_two(n)),
            out=config.place.out / name if len(sets) > 1 else config.place.out,
        )
        for name, (num_prompts, n) in sets.items()
    ]
