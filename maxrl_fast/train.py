"""The command `python -m maxrl_fast.train --objective maxpo --k 4`: parse, build, run. The step is
training/trainer.py."""

from maxrl_fast.runtime.output import run_command

if __name__ == "__main__":
    run_command("train")

import signal
import time
from collections.abc import Callable, Sequence

import torch

from maxrl_fast.config.options import Config
from maxrl_fast.config.read import located, parse
from maxrl_fast.errors import EngineError, InputError, StorageError, UserCodeError
from maxrl_fast.job.build import RunContext, prepare
from maxrl_fast.job.build_parts import closing_task
from maxrl_fast.job.describe import estimate
from maxrl_fast.job.launch import train
from maxrl_fast.job.screen import Screen
from maxrl_fast.runtime.device import Machine, resolve_device
from maxrl_fast.runtime.loading import naming_user_code
from maxrl_fast.runtime.output import command
from maxrl_fast.runtime.ranks import FIRST_RANK_GRACE_SECONDS, Ranks, exit_process, rank0_reports


@command
def main(arguments: Sequence[str]) -> int:
    """Return 0; 1 on non-finite values, failing rewards, a full disk, or a failing engine or code
    of the user's; 2 on bad input, or if such code fails before step 1; 129 on SIGHUP, 130 on Ctrl-C
    and 143 on SIGTERM. A process of torchrun ends instead of returning."""
    ranks, code = Ranks.of_environment(), 0
    screen = Screen(not ranks.is_first)
    try:
        with naming_user_code():
            with rank0_reports(ranks):
                config = parse(arguments)
            if config.run.dry_run is None:
                ending = train(config, ranks, screen)
                if ending.error:
                    screen.error(str(ending.error))
                code = ending.code
            else:
                with located(config.places):
                    screen.info(dry_run(config, ranks.size, screen.warning))
    except KeyboardInterrupt as error:
        code = 128 + getattr(error, "signal", signal.SIGINT)
        if type(error) is KeyboardInterrupt:  # otherwise the loop has said it
            screen.error("stopped by Ctrl-C")
    except (StorageError, EngineError, UserCodeError) as error:
        Screen().error(str(error))
        code = getattr(error, "code", 1)
    except torch.OutOfMemoryError as error:
        Screen().error(
            f"{str(error).partition('. ')[0]}; a lower --token-budget or --kv-cache-gb, "
            "--checkpoint-activations or --sharding full needs less; --resume resumes from the "
            "last checkpoint"
        )
        code = 1
    except InputError as error:
        # all ranks find the same; when the first has said so and ended, torchrun ends the others
        time.sleep(0 if ranks.is_first else FIRST_RANK_GRACE_SECONDS)
        Screen().error(str(error) if ranks.size == 1 else f"rank {ranks.rank}: {error}")
        code = 2
    return code if ranks.size == 1 else exit_process(code)


def dry_run(config: Config, processes: int, warn: Callable[[str], None]) -> str:
    """Return what --dry-run prints, for this machine with so many processes, or for one with GPUs,
    each with a process of torchrun."""
    name, place = config.run.dry_run, config.run.device
    machine = Machine.named(name) if name else Machine.here(resolve_device(place), processes)
    config, task = prepare(config, Ranks(), warn, processes=machine.processes)
    with closing_task(task):
        return estimate(RunContext.begin(config, task, Ranks(), machine=machine), machine)
