"""The command `python -m maxrl_fast.evaluate CHECKPOINT`: sample a policy and report, or compare
finished evaluations."""

from maxrl_fast.runtime.output import run_command

if __name__ == "__main__":
    run_command("evaluate")

from collections.abc import Sequence
from pathlib import Path

import torch

from maxrl_fast.config.read import parse_evaluation
from maxrl_fast.errors import FAILURES, InputError, UserCodeError
from maxrl_fast.job.evaluate import compare_evaluations, evaluate_checkpoint
from maxrl_fast.job.screen import Screen
from maxrl_fast.runtime.loading import naming_user_code
from maxrl_fast.runtime.output import command
from maxrl_fast.runtime.ranks import Ranks


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
