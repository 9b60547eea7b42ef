"""The command `python -m maxrl_fast.evaluate CHECKPOINT`: sample a policy and report, or compare
finished evaluations."""

from maxrl_fast.runtime.output import run_command

if __name__ == "__main__":
    run_command("evaluate")

from collections.abc import Sequence
from pathlib import Path

import torch

from maxrl_fast.algorithms.options import options_of
from maxrl_fast.config.options import EvaluationConfig
from maxrl_fast.config.read import (
    TASK_IS_MISSING,
    Given,
    build,
    read_flags,
    read_run,
    show_help,
    split_help,
)
from maxrl_fast.config.rules import options_of_part, refuse, wrong_evaluation
from maxrl_fast.errors import FAILURES, InputError, UserCodeError
from maxrl_fast.evaluation.outcome import RESULTS, Source, find_source
from maxrl_fast.job.evaluate import compare_evaluations, evaluate_checkpoint
from maxrl_fast.job.screen import Screen
from maxrl_fast.rewards.options import Reward
from maxrl_fast.runtime.loading import naming_user_code
from maxrl_fast.runtime.output import command
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks.dataset import DatasetOptions


@command
def main(arguments: Sequence[str]) -> int:
    """Return 0; 1 on failing rewards, a failing engine, non-finite values or a full disk; 2 on bad
    input; 130 on Ctrl-C."""
    screen = Screen()
    try:
        with naming_user_code():
            config, source = parse_evaluation(arguments)
            if (size := Ranks.of_environment().size) > 1:
                raise InputError(f"an evaluation runs in one process, got {size}")
            if isinstance(source, Path):
                return compare_evaluations(config, source, screen)
            return evaluate_checkpoint(config, source, screen)
    except KeyboardInterrupt:
        screen.warning("stopped; nothing was kept")
        return 130
    except torch.OutOfMemoryError as error:
        screen.error(f"{str(error).partition('. ')[0]}; a lower --kv-cache-gb needs less")
        return 1
    except (*FAILURES, UserCodeError) as error:
        screen.error(f"{error}; nothing was kept")
        return 1


def parse_evaluation(arguments: Sequence[str]) -> tuple[EvaluationConfig, Source | Path]:
    """Return the checked options, and the checkpoint or the folder of a finished evaluation; --help
    prints those of the task, and exits."""
    words, asks_for_help = split_help(arguments)
    name = words.pop(0) if words and not words[0].startswith("--") else ""
    flags, of_run = read_flags(words), dict[str, Given]()
    if asks_for_help:
        show_help(build(EvaluationConfig, flags, {}), "evaluate")
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
    config = build(EvaluationConfig, flags, of_run)
    refuse(config.values, wrong_evaluation)
    return config, source


def _of_task(of_run: dict[str, Given], flags: dict[str, Given]) -> dict[str, Given]:
    """Return the run's options of its task and rewards; of another task only the seed."""
    seed, task = of_run.get("seed", Given(0, "seed")), of_run.get("task", Given("maze", "")).value
    seeds = {"seed": seed, "task_seed": seed}
    if "task" in flags and flags["task"].read(EvaluationConfig.options()["task"]) != task:
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
