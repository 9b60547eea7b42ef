"""The options of `python -m maxrl_fast.evaluate`, from flags and a run's folder to resolved."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from maxrl_fast.algorithms.options import options_of
from maxrl_fast.config.help_page import show_help, split_help
from maxrl_fast.config.options import EvaluationConfig, Reward
from maxrl_fast.config.parts import options_of_part
from maxrl_fast.config.read import (
    TASK_IS_MISSING,
    Given,
    absolute_function,
    build,
    read_flags,
    read_run,
)
from maxrl_fast.config.resolve import num_held_out, place_of, response_limit
from maxrl_fast.config.rules import View, refuse, wrong_rewards
from maxrl_fast.errors import InputError
from maxrl_fast.evaluation.coverage import powers_of_two
from maxrl_fast.evaluation.outcome import RESULTS, Source, find_source, free_folder
from maxrl_fast.tasks import Task, held_out_sets
from maxrl_fast.tasks.dataset import DatasetOptions


def parse(arguments: Sequence[str]) -> tuple[EvaluationConfig, Source | Path]:
    """Return the checked options, and the checkpoint or the folder of a finished evaluation; --help
    prints those of the task, and exits."""
    words, asks_for_help = split_help(arguments)
    name = words.pop(0) if words and not words[0].startswith("--") else ""
    flags, of_run = read_flags(words), dict[str, Given]()
    if asks_for_help:
        show_help(*build(EvaluationConfig, flags, {}), "python -m maxrl_fast.evaluate")
    if not name:
        raise InputError(
            "CHECKPOINT is missing before the flags: a Hugging Face checkpoint directory, the "
            "folder of a run, or that of a finished evaluation, which --against compares"
        )
    source: Source | Path = Path(name)
    if not (Path(name) / RESULTS).exists():
        source = found = find_source(name)
        if found.run is not None:
            of_run = _of_task(read_run(found.run), flags)
        elif "task" not in flags:
            raise InputError(f"a checkpoint that is not in the folder of a run {TASK_IS_MISSING}")
    config, _ = build(EvaluationConfig, flags, of_run)
    refuse(config.values(), wrong_rewards, _wrong)
    return config, source


def _wrong(c: View) -> Iterator[str]:
    if c.temperature == 0 and c.samples > 1:
        yield "greedy decoding, of temperature 0, needs --samples 1, got {samples}"
    if not all(1 <= k <= c.samples for k in c.k):
        yield "k must be from 1 to the {samples} samples, got {k}"


def _of_task(of_run: dict[str, Given], flags: dict[str, Given]) -> dict[str, Given]:
    """Return the run's options of its task and rewards; of another task only the seed."""
    seed, task = of_run.get("seed", Given(0, "seed")), of_run.get("task", Given("maze", "")).value
    seeds = {"seed": seed, "task_seed": seed}
    if "task" in flags and absolute_function("".join(flags["task"].value)) != task:
        return seeds
    own = {*options_of_part("task", task)} - {"sft_data"}
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
    sampling, place, wanted = config.sampling, config.place, config.measure.eval_prompts
    is_test = config.measure.split == "test"
    return config.replace(
        eval_prompts=num_held_out(wanted, task) if is_test else wanted or 256,
        max_new_tokens=response_limit(sampling.max_new_tokens, task, source.checkpoint, warn),
        seed=sampling.seed or 0,
        out=free_folder(place.out, source.name),
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
