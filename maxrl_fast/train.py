"""The command `python -m maxrl_fast.train --objective maxpo --k 4`: parse, build, run. The step is
training/trainer.py.
"""

import sys
import time
from collections.abc import Callable, Sequence

import torch

from maxrl_fast.config.checks import check, objective_of
from maxrl_fast.config.estimates import estimate
from maxrl_fast.config.options import Config
from maxrl_fast.config.parse import parse, source_location
from maxrl_fast.config.resolve import resolve
from maxrl_fast.errors import EngineError, InputError, StorageError
from maxrl_fast.job.build_policy import build_policy, build_reference, find_policy
from maxrl_fast.job.build_task import build_run_task
from maxrl_fast.job.launch import Job
from maxrl_fast.job.screen import Screen
from maxrl_fast.runtime.device import Machine, resolve_device
from maxrl_fast.runtime.output import protect_output
from maxrl_fast.runtime.ranks import FIRST_RANK_GRACE_SECONDS, Ranks, exit_process, rank0_reports
from maxrl_fast.runtime.version import FLAG, version_text
from maxrl_fast.training.sharding import is_sharded


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return 0; 1 on non-finite values, failing rewards, a full disk or a
    failing engine; 2 on bad input; 129 on SIGHUP, 130 on Ctrl-C and 143 on SIGTERM. A process of
    torchrun ends instead of returning."""
    protect_output()
    arguments = sys.argv[1:] if arguments is None else arguments
    ranks, code = Ranks.of_environment(), 0
    screen = Screen(is_quiet=not ranks.is_first)
    if FLAG in arguments:
        screen.info(version_text())
        return 0
    try:
        with rank0_reports(ranks):
            config = parse(arguments)
        check(config)
        if config.run.dry_run:
            machine = Machine.named(config.run.dry_run)
            screen.info(
                estimate_elsewhere(
                    find_policy(config, Ranks(), screen.warning), machine, screen.warning
                )
            )
            return 0
        device = resolve_device(config.run.device)
        with ranks.connected(device) as watch:
            config = find_policy(config, ranks, screen.warning)
            task = build_run_task(config)
            ending, _ = Job(
                resolve(config, task, ranks, warn=screen.warning),
                task,
                ranks,
                screen,
                device,
                watch,
            ).run()
        if ending.error:
            screen.error(str(ending.error))
        code = ending.code
    except KeyboardInterrupt:
        code = 130
    except (StorageError, EngineError) as error:
        Screen().error(str(error))
        code = 1
    except torch.OutOfMemoryError as error:
        needs_less = (
            "a lower --token-budget or --kv-cache-gb, --checkpoint-activations or --sharding full "
            "needs less"
        )
        Screen().error(
            f"{str(error).partition('. ')[0]}; {needs_less}; --resume resumes from the last "
            "checkpoint"
        )
        code = 1
    except InputError as error:
        # Under torchrun all ranks find the same; once the first has said so and ended, torchrun
        # ends the others.
        time.sleep(0 if ranks.is_first else FIRST_RANK_GRACE_SECONDS)
        sentence = f"{error}{source_location(error, arguments)}"
        Screen().error(sentence if ranks.size == 1 else f"rank {ranks.rank}: {sentence}")
        code = 2
    return code if ranks.size == 1 else exit_process(code)


def estimate_elsewhere(config: Config, machine: Machine, warn: Callable[[str], None]) -> str:
    """Return what --dry-run prints for a machine with GPUs, each with a process of torchrun; this
    machine needs none.
    """
    task = build_run_task(config)
    resolved = resolve(config, task, Ranks(0, machine.processes), has_gpus=True, warn=warn)
    model, needs = build_policy(resolved, task, is_empty=True), objective_of(resolved).needs
    is_full = is_sharded(resolved.run.sharding, model, machine, needs.critic)
    resolved = resolved.replace(sharding="full" if is_full else "none")
    teacher = build_reference(resolved, task, is_empty=True)
    return estimate(resolved, task, model, machine, teacher)


if __name__ == "__main__":
    sys.exit(main())
