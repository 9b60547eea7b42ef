"""The command `python -m maxrl_fast.train --objective maxpo --k 4`: parse, build, run. The step is training/trainer.py."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from maxrl_fast.build import (
    build_collector,
    build_evaluator,
    build_fingerprints,
    build_policy,
    build_policy_files,
    build_run_engine,
    build_run_task,
    build_scorer,
    build_trainer,
    compare_engine,
    compare_policy,
    dtype_of,
)
from maxrl_fast.config.changes import own_options
from maxrl_fast.config.checks import check, objective_of
from maxrl_fast.config.estimates import describe_run, estimate
from maxrl_fast.config.options import Config, ResolvedConfig
from maxrl_fast.config.parse import parse, places
from maxrl_fast.config.resolve import resolve
from maxrl_fast.distributed.ranks import LATECOMER, Ranks, leave, said_by_first
from maxrl_fast.distributed.watch import Watch
from maxrl_fast.errors import InputError, RewardError, ServerError, StorageError
from maxrl_fast.files.durable import locked
from maxrl_fast.hardware import Machine, resolve_device
from maxrl_fast.model.flash_choice import choose
from maxrl_fast.model.hub import HUB, find_model
from maxrl_fast.output import protect_output
from maxrl_fast.rewards.scoring import Scorer
from maxrl_fast.rollout import Engine
from maxrl_fast.run.checkpoints import Checkpoints
from maxrl_fast.run.control import StopSignal, Watchdog
from maxrl_fast.run.loop import RunLoop
from maxrl_fast.run.progress import Progress
from maxrl_fast.run.resume import check_same, find_saved
from maxrl_fast.run.run_files import RunFiles
from maxrl_fast.run.screen import Screen
from maxrl_fast.run.supervise import close, supervise
from maxrl_fast.tasks import Task
from maxrl_fast.training.rehearsal import rehearse
from maxrl_fast.training.sharding import fills_half, is_sharded
from maxrl_fast.training.stopwatch import Stopwatch
from maxrl_fast.version import FLAG, version_text

LOCK_LIMIT = 60.0  # seconds to wait for the process that has used the folder before, which may still be ending


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Return 0; 1 on non-finite values, failing rewards, a full disk or a failing server; 2 on bad input;
    129 on SIGHUP, 130 on Ctrl-C and 143 on SIGTERM. A process of torchrun ends instead of returning."""
    protect_output()
    arguments = sys.argv[1:] if arguments is None else arguments
    ranks = Ranks.of_environment()
    code = run_command(sys.argv[1:] if arguments is None else arguments, ranks)
    return code if ranks.size == 1 else leave(code)


def run_command(arguments: Sequence[str], ranks: Ranks) -> int:
    """Parse, build and run. Return the exit code."""
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
            screen.say(estimate_elsewhere(find_policy(config, Ranks(), screen), machine, screen.warn))
            return 0
        device = resolve_device(config.run.device)
        with ranks.connected(device) as watch:
            config = find_policy(config, ranks, screen)
            task = build_run_task(config)
            return run(resolve(config, task, ranks, warn=screen.warn), task, ranks, screen, device, watch)
    except KeyboardInterrupt:
        return 130
    except (StorageError, ServerError) as error:
        Screen().complain(str(error))
        return 1
    except torch.OutOfMemoryError as error:
        needs_less = "a lower --token-budget or --kv-cache-gb, --checkpoint-activations or --sharding full needs less"
        Screen().complain(f"{str(error).partition('. ')[0]}; {needs_less}; --resume resumes from the last checkpoint")
        return 1
    except InputError as error:
        # Under torchrun all ranks find the same; once the first has said so and ended, torchrun ends the others.
        time.sleep(0 if ranks.is_first else LATECOMER)
        sentence = f"{error}{places(str(error), arguments)}"
        Screen().complain(sentence if ranks.size == 1 else f"rank {ranks.rank}: {sentence}")
        return 2


def run(config: ResolvedConfig, task: Task, ranks: Ranks, screen: Screen, device: torch.device, watch: Watch | None) -> int:
    """Build what a configuration asks for, and train.

    Raises:
        InputError: where building shows the configuration to be wrong.
    """
    out = Path(ranks.text_from_first(str(config.run.out)))  # its name may hold the time
    config, is_resumed = config.replace(out=out), config.run.resume is not None
    if ranks.text_from_first(str(is_resumed)) != str(is_resumed):
        raise InputError(f"--resume auto needs a folder that all processes share, but only some of them see a run in {out}")
    torch.set_num_threads(config.run.threads)
    with contextlib.ExitStack() as held:
        if is_resumed:
            held.enter_context(locked(out, ranks.is_first, LOCK_LIMIT, screen.warn))
        saved = find_saved(out, ranks, screen.warn) if is_resumed else None
        is_dry = config.run.dry_run is not None
        model = build_policy(config, task, saved, is_empty=is_dry)
        config = config.replace(sharding="full" if is_sharded(config.run.sharding, model, ranks, device) else "none")
        fingerprints = build_fingerprints(config, task)
        if saved:
            check_same(saved, config.flat(), fingerprints, ranks, screen.warn, config.run.allow_changes)
        if is_dry:
            screen.say(estimate(config, task, model, Machine.here(device, ranks.size)))
            return 0
        model = model.to(device)
        # Before the policy is compared, so that the attention that will run is compared.
        tried = choose(device, dtype_of(config), model.head_sizes, lambda failed: ranks.any(failed, device))
        compared = compare_policy(model)
        engine = build_run_engine(config, model, task, ranks)
        has_weights = saved is None or saved.decoder is None  # else the checkpoint's are loaded later
        sampled = compare_engine(model, engine, config.rollout.rollout) if has_weights else ""
        scorer = held.enter_context(contextlib.closing(build_scorer(config.reward, task, device, dtype_of(config))))
        if not saved and not can_score(config, task, engine, scorer, ranks, screen):
            return 1
        if not is_resumed:
            held.enter_context(locked(out, ranks.is_first, LOCK_LIMIT, screen.warn))
        files = RunFiles(out, config.flat(), config.evaluation.log_to, ranks.is_first, is_resumed, saved)
        for log in files.missing:
            screen.warn(f"{log} is missing: a new one begins, without the lines from before the checkpoint")
        described = describe_run(config, task, model, ranks, saved.directory if saved else None)
        described += [own_options(saved.options, config.flat())] if saved else []
        for line in (*described, *tried, compared, sampled, f"rollout engine: {engine.describe()}", scorer.describe()):
            if line:
                screen.say(line)

        progress = saved.progress if saved else Progress()
        clock = Stopwatch(progress.seconds)
        scorer.beat = clock.beat
        if watch:
            watch.dump_workers = scorer.dump_stacks
        tell = watch.say_stuck if watch else lambda message: None
        with StopSignal(ranks, device) as stop, Watchdog(clock, config.run.stall_limit, ranks, tell, scorer.dump_stacks):
            options = config.run
            checkpoints = Checkpoints(
                files,
                build_policy_files(task, model, saved.directory if saved else config.model.directory),
                fingerprints,
                options.save_every,
                options.keep_checkpoints,
                ranks,
                stop,
                clock,
                saved,
            )
            trainer, warm_start = build_trainer(config, task, engine, scorer, model, clock, ranks)
            loop = RunLoop(
                trainer,
                warm_start,
                build_evaluator(config, task, engine, scorer, ranks),
                checkpoints,
                files,
                progress,
                screen,
                clock,
                ranks,
                config.evaluation.eval_every,
                config.evaluation.diagnose_every,
            )
            code = supervise(loop.run, checkpoints, progress, files, screen, is_alone=watch is None)
        return close(files, progress, clock, screen, code)


def find_policy(config: Config, ranks: Ranks, screen: Screen) -> Config:
    """Return the configuration with --model as the run records it, on all ranks the same: a folder, or a commit of the hub.

    Raises:
        InputError: where there is no such model.
    """
    model = config.model.model
    if model is None or (config.run.resume is not None and not model.startswith(HUB)):  # which has checkpoints of its own
        return config
    if not ranks.is_first:  # which shows the progress of a download
        os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    return config.replace(model=ranks.text_from_first(find_model(model, screen.warn) if ranks.is_first else ""))


def estimate_elsewhere(config: Config, machine: Machine, warn: Callable[[str], None]) -> str:
    """Return what --dry-run prints for a machine with GPUs, each with a process of torchrun; this machine needs none.

    Raises:
        InputError: where building shows the configuration to be wrong.
    """
    task = build_run_task(config)
    resolved = resolve(config, task, Ranks(0, machine.processes), has_gpus=True, warn=warn)
    model, sharding = build_policy(resolved, task, is_empty=True), resolved.run.sharding
    is_full = sharding == "full" or (sharding == "auto" and fills_half(model, machine.memory))
    resolved = resolved.replace(sharding="full" if is_full and machine.processes > 1 else "none")
    return estimate(resolved, task, model, machine)


def can_score(config: ResolvedConfig, task: Task, engine: Engine, scorer: Scorer, ranks: Ranks, screen: Screen) -> bool:
    """Try the rewards before anything is written. Return false, after saying why, if all fail.

    Raises:
        InputError: if they are not what the objective needs, or their parameters do not fit.
    """
    try:
        if complaint := rehearse(build_collector(config, task, engine, scorer, objective_of(config), ranks=ranks)):
            screen.warn(complaint)
    except RewardError as error:
        screen.complain(f"{error}. Fix the reward; the same command then starts the run.")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
