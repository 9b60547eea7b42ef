"""The options of `python -m maxrl_fast.evaluate`, and the way from flags and the folder of a run to
the resolved ones.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

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
    read_flags,
    read_run,
)
from maxrl_fast.config.resolve import num_held_out, resolve_place, response_limit
from maxrl_fast.config.rules import SHARED_RULES, Rules, View, refuse
from maxrl_fast.errors import InputError
from maxrl_fast.evaluation.coverage import powers_of_two
from maxrl_fast.evaluation.outcome import RESULTS
from maxrl_fast.evaluation.source import Source, find_source, free_folder
from maxrl_fast.tasks import Task, held_out_sets
from maxrl_fast.tasks.dataset import DatasetOptions

PROG = "python -m maxrl_fast.evaluate"


@dataclass(frozen=True)
class Measure:
    """What is measured."""

    eval_prompts: Count = DERIVED
    """Prompts of the split, or of each held-out set. By default 256, or all that are held out."""
    samples: Count = 256
    """Responses to each prompt (n)."""
    k: tuple[int, ...] = ()
    """Sizes at which pass@k, max@k and maj@k are reported. By default 1 2 4 ... up to --samples."""
    split: Literal["test", "train"] = "test"
    """Held-out prompts, or training prompts, which repeat where a file has fewer."""
    against: tuple[Path, ...] = ()
    """Compare with these finished evaluations, prompt by prompt where all settings are the
    same."""
    bootstrap: Count = 1000
    """Bootstrap resamples of the prompts for the intervals."""
    confidence: BetweenZeroAndOne = 0.95
    """Confidence of the intervals."""


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
    """Sample many responses to each held-out prompt, and report pass@k, max@k and maj@k.

    CHECKPOINT is a Hugging Face directory, hf://ORG/NAME or hf://ORG/NAME@REVISION of the hub, or
    the folder of a run: its latest checkpoint; RUN/best has the highest mean reward. The task's
    options are the run's, unless others are given. The folder of a finished evaluation in its place
    is only compared with those of --against.

    Examples:
        python -m maxrl_fast.evaluate runs/maxpo-... --samples 256
        python -m maxrl_fast.evaluate DIR --task gsm8k --temperature .6 --top-p .95
        python -m maxrl_fast.evaluate evaluations/one --against evaluations/other
    """

    chosen: TaskAndEngine = field(default_factory=TaskAndEngine)
    measure: Measure = Measure()
    sampling: EvaluatedDecoding = EvaluatedDecoding()
    reward: Reward = field(default_factory=Reward)
    place: EvaluationPlace = EvaluationPlace()


RULES: Rules = {
    **SHARED_RULES,
    "greedy decoding gives one response: samples must be 1 at temperature {temperature:g}, got "
    "{samples}": lambda c: c.temperature == 0 and c.samples > 1,
    "k must be from 1 to the {samples} samples, got {k}": (
        lambda c: not all(1 <= k <= c.samples for k in c.k)
    ),
}


def parse(arguments: Sequence[str]) -> tuple[EvaluationConfig, Source | Path]:
    """Return the checked options, and the checkpoint or the folder of a finished evaluation. --help
    prints the options that this task uses, and exits."""
    words, asks_for_help = split_help(arguments)
    name = words[0] if words and not words[0].startswith("--") else ""
    flags = read_flags(words[1:] if name else words)
    if asks_for_help:
        show_help(*build(EvaluationConfig, flags, {}), PROG)
    if not name:
        raise InputError(
            "CHECKPOINT is missing before the flags: a Hugging Face checkpoint directory, the "
            "folder of a run, or that of a finished evaluation, which --against compares"
        )
    source: Source | Path = Path(name)
    of_run = dict[str, Given]()
    if not (Path(name) / RESULTS).exists():
        source = found = find_source(name)
        if found.run is not None:
            of_run = _of_task(read_run(found.run), flags)
        elif "task" not in flags:
            raise InputError(f"a checkpoint that is not in the folder of a run {TASK_IS_MISSING}")
    config, _ = build(EvaluationConfig, flags, of_run)
    refuse(RULES, View(config.values()))
    return config, source


def _of_task(of_run: dict[str, Given], flags: dict[str, Given]) -> dict[str, Given]:
    """Return the options of a run that decide its prompts, their rewards and the length of
    responses; with another task only the seed."""
    seed, chosen = of_run.get("seed", Given(0, "seed")), of_run.get("task", Given("maze", "task"))
    seeds = {"seed": seed, "task_seed": seed}
    if "task" in flags and absolute_function("".join(flags["task"].value)) != chosen.value:
        return seeds
    own = {*options_of_part("task", chosen.value, fields_of(Config))} - {"sft_data"}
    kept = {"task", *own, *options_of(Reward)}
    if not flags.keys() & (own - options_of(DatasetOptions).keys()):
        kept.add("max_new_tokens")  # a task of another size has its own limit
    if (sets := {"test_data", "test_hub"}) & flags.keys():  # in place of all of the run
        kept -= sets
    if {"data", "hub"} & flags.keys():  # the run's filter is about its own training sets
        kept.discard("where")
    return {name: x for name, x in of_run.items() if name in kept} | seeds


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
