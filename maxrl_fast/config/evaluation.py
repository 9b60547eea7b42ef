"""The options of `python -m maxrl_fast.evaluate`, and the way from flags and the folder of a run to
the resolved ones.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from maxrl_fast.algorithms.options import (
    BetweenZeroAndOne,
    Count,
    CountOrZero,
    NotNegative,
    Seed,
    UnitInterval,
    options_of,
)
from maxrl_fast.config.help_page import show_help, split_help
from maxrl_fast.config.options import (
    DERIVED,
    Config,
    Decoding,
    Options,
    Place,
    Reward,
    TaskAndEngine,
    fields_of,
)
from maxrl_fast.config.parts import options_of_part
from maxrl_fast.config.read import (
    TASK_IS_MISSING,
    Given,
    absolute_function,
    build,
    hint,
    read_flags,
    read_run,
)
from maxrl_fast.config.resolve import num_held_out, resolve_place, response_limit
from maxrl_fast.config.rules import check_shared
from maxrl_fast.errors import InputError
from maxrl_fast.evaluation.coverage import powers_of_two
from maxrl_fast.evaluation.source import Source, find_source, free_folder
from maxrl_fast.tasks import Task, held_out_sets
from maxrl_fast.tasks.dataset import DatasetOptions

PROG = "python -m maxrl_fast.evaluate"


@dataclass(frozen=True)
class Measure:
    """What is measured."""

    eval_prompts: Count = DERIVED
    """Number of prompts: the first of the split, or of each held-out set. By default 256, or all
    that are held out."""
    samples: Count = 256
    """Responses to each prompt (n)."""
    k: tuple[int, ...] = ()
    """Sizes at which pass@k, max@k and maj@k are reported, each from 1 to --samples. By default 1 2
    4 ... up to --samples."""
    split: Literal["test", "train"] = "test"
    """Held-out prompts, or training prompts, which repeat where a file has fewer."""
    baseline: str | None = None
    """Compare with this: another CHECKPOINT, which is sampled too, or a finished evaluation of the
    same prompts, samples and sampling."""
    bootstrap: Count = 1000
    """Bootstrap resamples of the prompts for the intervals."""
    confidence: BetweenZeroAndOne = 0.95
    """Confidence of the intervals."""
    embeddings: Path | None = None
    """Local embedding model that measures diversity. By default counts of token n-grams."""
    compare: tuple[Path, ...] = ()
    """Compare these finished evaluations, in a table and a picture, without CHECKPOINT."""


@dataclass(frozen=True)
class EvaluatedDecoding(Decoding):
    """How responses are sampled; the papers' language models with --temperature .6 --top-p .95."""

    max_new_tokens: Count = DERIVED
    """Response limit, in tokens. By default the run's, else the task's."""
    temperature: NotNegative = 1.0
    """Sampling temperature; 0: greedy decoding, with one sample."""
    top_k: CountOrZero = 0
    """Top-k sampling: from this many of the most probable tokens; 0: from all."""
    min_p: UnitInterval = 0.0
    """Min-p sampling: from tokens with at least this share of the greatest probability."""
    seed: Seed = DERIVED
    """Seed of the sampling and the bootstrap. By default the run's, else 0."""


@dataclass(frozen=True)
class EvaluationPlace(Place):
    """Where it is computed and written."""

    out: Path = DERIVED
    """Folder of results, new or empty. By default evaluations/<name>-<time>."""
    task_seed: Seed = DERIVED
    """Seed of the mazes and of the order of training prompts. By default the run's, else 0."""


@dataclass(frozen=True)
class EvaluationConfig(Options):
    """Sample many responses to each held-out prompt, and report pass@k, max@k, maj@k and diversity.

    CHECKPOINT is a Hugging Face directory, hf://ORG/NAME or hf://ORG/NAME@REVISION of the hub, or
    the folder of a run: its latest checkpoint; RUN/best has the highest mean reward. The task's
    options are the run's, unless others are given.

    Examples:
        python -m maxrl_fast.evaluate runs/maxpo-... --samples 256
        python -m maxrl_fast.evaluate DIR --task gsm8k --temperature .6 --top-p .95
        python -m maxrl_fast.evaluate --compare evaluations/one evaluations/other
    """

    chosen: TaskAndEngine = field(default_factory=TaskAndEngine)
    measure: Measure = Measure()
    sampling: EvaluatedDecoding = EvaluatedDecoding()
    reward: Reward = field(default_factory=Reward)
    place: EvaluationPlace = EvaluationPlace()

    def flat(self) -> dict[str, Any]:
        """Several values are always a list, but for rewards."""
        own = {"k": [*self.measure.k], "compare": [*map(str, self.measure.compare)]}
        return super().flat() | own


def parse(arguments: Sequence[str]) -> tuple[EvaluationConfig, Source | None]:
    """--help prints the options that this task uses, and exits."""
    words, asks_for_help = split_help(arguments)
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    others, flags = words[:first], read_flags(words[first:])
    if flag := flags.get("model", flags.get("checkpoint")):
        raise InputError(f"CHECKPOINT is given without a flag, as in `{PROG} DIR`, got {flag.name}")
    several = ("k", "compare", "reward", "reward_weights", "data", "hub", "test_data", "test_hub")
    for name, x in flags.items():  # CHECKPOINT after the value of a flag; rewards have a colon
        if x.value[1:] and name != "compare" and not others:
            is_path = ":" not in x.value[-1] if name == "reward" else Path(x.value[-1]).is_dir()
            others = [x.value.pop()] if is_path or name not in several else []
    for word in others[1:]:
        raise InputError(
            f"unknown option {word:.80}: options begin with two dashes{hint(word, flags)}"
        )
    if asks_for_help or "compare" in flags:
        config, known = build(EvaluationConfig, flags, {})
        if asks_for_help:
            show_help(config, known, PROG)
        if others or config.measure.baseline is not None:
            what = "--compare compares finished evaluations"
            raise InputError(f"{what}, without CHECKPOINT and --baseline")
        return config, None
    if not others:
        raise InputError(
            "CHECKPOINT is missing: a Hugging Face checkpoint directory or the folder of a run (or "
            "--compare)"
        )
    source = find_source(others[0])
    if source.run is None and "task" not in flags:
        raise InputError(f"a checkpoint that is not in the folder of a run {TASK_IS_MISSING}")
    of_run = {} if source.run is None else read_run(source.run, flags)
    shared = _of_task(of_run, flags)
    config, _ = build(EvaluationConfig, flags, shared)
    seed = of_run["seed"].value if "seed" in of_run else None
    defaults: dict[str, Any] = dict.fromkeys(("seed", "task_seed"), seed)
    # a task of another size has its own limit
    sizes = config.parts["task"].keys() - options_of(DatasetOptions).keys()
    if shared and not flags.keys() & sizes:
        limit = of_run.get("max_new_tokens")
        defaults["max_new_tokens"] = limit and int(limit.value)
    defaults = {name: value for name, value in defaults.items() if config.values()[name] is None}
    return config.replace(**defaults), source


def _of_task(of_run: dict[str, Given], flags: dict[str, Given]) -> dict[str, Given]:
    """Return the options of a run that decide its prompts and rewards; with another task none."""
    chosen = of_run.get("task", Given("maze", "task"))
    if "task" in flags and absolute_function("".join(flags["task"].value)) != chosen.value:
        return {}
    kept = {"task", *options_of(Reward), *_task_names(str(chosen.value))}
    if (sets := {"test_data", "test_hub"}) & flags.keys():  # in place of all of the run
        kept -= sets
    if {"data", "hub"} & flags.keys():  # the run's filter is about its own training sets
        kept.discard("where")
    return {name: x for name, x in of_run.items() if name in kept}


def _task_names(task: str) -> set[str]:
    return {*options_of_part("task", task, fields_of(Config))} - {"sft_data"}


def check(config: EvaluationConfig) -> None:
    """Refuse options that are wrong by themselves or do not go together."""
    measure, temperature = config.measure, config.sampling.temperature
    if temperature == 0 and measure.samples > 1:
        raise InputError(
            f"greedy decoding gives one response: samples must be 1 at temperature {temperature:g},"
            f" got {measure.samples}"
        )
    if any(not 1 <= k <= (k if measure.compare else measure.samples) for k in measure.k):
        raise InputError(f"k must be from 1 to the {measure.samples} samples, got {[*measure.k]}")
    check_shared(config)


def resolve(
    config: EvaluationConfig,
    source: Source,
    task: Task,
    warn: Callable[[str], None] = warnings.warn,
) -> EvaluationConfig:
    """Return the checked configuration with every default worked out."""
    measure, sampling, place = config.measure, config.sampling, config.place
    device, dtype = resolve_place(place.device, place.dtype)
    num_prompts = measure.eval_prompts or 256
    if measure.split == "test":
        num_prompts = num_held_out(measure.eval_prompts, task)
    derived = {
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
    return config.replace(**derived)


def set_configs(config: EvaluationConfig, task: Task) -> list[EvaluationConfig]:
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
