"""The command `python -m maxrl_fast.train --objective maxpo --k 4`: parse, build, run. The step is training/trainer.py.

The module can be called: `maxrl_fast.train(objective="maxpo", k=4)` trains from Python, as api.py says.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from maxrl_fast import api
from maxrl_fast.builders.policy import build_policy
from maxrl_fast.builders.tasks import build_run_task
from maxrl_fast.config.checks import check, objective_of
from maxrl_fast.config.estimates import estimate
from maxrl_fast.config.options import Config
from maxrl_fast.config.parse import parse, source_location
from maxrl_fast.config.resolve import resolve
from maxrl_fast.errors import InputError, ServerError, StorageError
from maxrl_fast.launch import Job, find_policy
from maxrl_fast.run.screen import Screen
from maxrl_fast.runtime.device import Machine, resolve_device
from maxrl_fast.runtime.output import protect_output
from maxrl_fast.runtime.ranks import LATECOMER, Ranks, leave, said_by_first
from maxrl_fast.tasks import Task
from maxrl_fast.training.sharding import fills_half
from maxrl_fast.version import FLAG, version_text


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return 0; 1 on non-finite values, failing rewards, a full disk or a failing server; 2 on bad input;
    129 on SIGHUP, 130 on Ctrl-C and 143 on SIGTERM. A process of torchrun ends instead of returning."""
    protect_output()
    arguments = sys.argv[1:] if arguments is None else arguments
    ranks, code = Ranks.of_environment(), 0
    screen = Screen(is_quiet=not ranks.is_first)
    if FLAG in arguments:
        screen.say(version_text())
        return 0
    try:
        with said_by_first(ranks):
            config = parse(arguments)
        check(config)
        if config.run.dry_run:
            machine = Machine.named(config.run.dry_run)
            screen.say(estimate_elsewhere(find_policy(config, Ranks(), screen.warn), machine, screen.warn))
            return 0
        device = resolve_device(config.run.device)
        with ranks.connected(device) as watch:
            config = find_policy(config, ranks, screen.warn)
            task = build_run_task(config)
            ending, _ = Job(resolve(config, task, ranks, warn=screen.warn), task, ranks, screen, device, watch).run()
        if ending.error:
            screen.complain(str(ending.error))
        code = ending.code
    except KeyboardInterrupt:
        code = 130
    except (StorageError, ServerError) as error:
        Screen().complain(str(error))
        code = 1
    except torch.OutOfMemoryError as error:
        needs_less = "a lower --token-budget or --kv-cache-gb, --checkpoint-activations or --sharding full needs less"
        Screen().complain(f"{str(error).partition('. ')[0]}; {needs_less}; --resume resumes from the last checkpoint")
        code = 1
    except InputError as error:
        # Under torchrun all ranks find the same; once the first has said so and ended, torchrun ends the others.
        time.sleep(0 if ranks.is_first else LATECOMER)
        sentence = f"{error}{source_location(str(error), arguments)}"
        Screen().complain(sentence if ranks.size == 1 else f"rank {ranks.rank}: {sentence}")
        code = 2
    return code if ranks.size == 1 else leave(code)


def estimate_elsewhere(config: Config, machine: Machine, warn: Callable[[str], None]) -> str:
    """Return what --dry-run prints for a machine with GPUs, each with a process of torchrun; this machine needs none.

    Raises:
        InputError: where building shows the configuration to be wrong.
    """
    task = build_run_task(config)
    resolved = resolve(config, task, Ranks(0, machine.processes), has_gpus=True, warn=warn)
    model, sharding = build_policy(resolved, task, is_empty=True), resolved.run.sharding
    has_critic = objective_of(resolved).needs.critic
    is_full = sharding == "full" or (sharding == "auto" and fills_half(model, machine.memory, has_critic))
    resolved = resolved.replace(sharding="full" if is_full and machine.processes > 1 else "none")
    return estimate(resolved, task, model, machine)


class Command(ModuleType):
    """A module that can be called. Importing maxrl_fast.train makes it the package's `train`, so it has to be both."""

    main: Callable[[Sequence[str] | None], int]

    def __call__(
        self,
        config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        *,
        task: str | Task | None = None,
        reward: api.Reward | Sequence[api.Reward] | None = None,
        **options: Any,
    ) -> api.Run:
        return api.train(config, task=task, reward=reward, **options)

    __call__.__doc__ = api.train.__doc__


sys.modules[__name__].__class__ = Command

if __name__ == "__main__":
    sys.exit(main())
