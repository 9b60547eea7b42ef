"""A run from its parsed options to its end, for train.py and api.py: folder, build, a first try of
the rewards, loop and ending."""

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from maxrl_fast.config.changes import own_options
from maxrl_fast.config.options import Config
from maxrl_fast.config.read import located
from maxrl_fast.errors import (
    FAILURES,
    InputError,
    NonFiniteError,
    RewardError,
    StorageError,
    UserCodeError,
)
from maxrl_fast.job.build import RunContext, prepare
from maxrl_fast.job.build_parts import build_run_task, closing_task
from maxrl_fast.job.checkpoints import Checkpoints
from maxrl_fast.job.control import Interrupted, StallWatchdog, StopSignal
from maxrl_fast.job.describe import describe_run
from maxrl_fast.job.loop import RunLoop
from maxrl_fast.job.run_files import RunFiles, check_same, find_saved, fingerprints
from maxrl_fast.job.screen import Screen
from maxrl_fast.rewards.pool import RewardOutput
from maxrl_fast.rollout import RolloutRequest, sample_and_score
from maxrl_fast.runtime.device import resolve_device
from maxrl_fast.runtime.files import locked
from maxrl_fast.runtime.loading import naming_user_code
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.tools import ToolTask
from maxrl_fast.training.collect import check_binary

NUM, MAX_TOKENS = 2, 256  # of check_rewards: prompts, and rollouts of each
STEP = ("rollout", "wait for samples", "advantage", "update")  # its stages
WHEN = "before the first step"
# seconds to wait for the previous process of this folder, which may still be exiting
LOCK_LIMIT = 60.0


@dataclass
class ExitStatus:
    code: int = 0  # 1: `error`; 128 + the number of the signal that stopped it
    # non-finite values, failing rewards, full disk or failing server; not printed yet
    error: RuntimeError | None = None
    run: RunContext | None = None  # with its trained policy; None: it ended before its first step


def train(
    config: Config,
    ranks: Ranks,
    screen: Screen,
    make_task: Callable[[Config], Task] = build_run_task,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    ends_process: bool = True,
) -> ExitStatus:
    """Build and train. `functions` are by their names in --reward. A run without progress for
    --stall-limit seconds ends its process if `ends_process`. The number of CPU threads is
    restored."""
    warn, device = screen.warning, resolve_device(config.run.device)
    with ExitStack() as held:
        held.enter_context(ranks.connected(device))
        held.enter_context(located(config.places))
        config, task = prepare(config, ranks, warn, make_task)
        output = (isinstance(task, ToolTask) and task.output) or RewardOutput()
        for context in (closing(output), closing_task(task)):
            held.enter_context(context)
        held.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(config.run.threads)
        out, is_resumed = find_folder(config, ranks)
        lock, saved = locked(out, LOCK_LIMIT, warn) if ranks.is_first else nullcontext(), None
        if is_resumed:
            held.enter_context(lock)
            saved = find_saved(out, ranks, warn)
            if saved and saved.progress.phase == "session":
                said = f"{out}, which Session.save wrote; --model {out} starts from it"
                raise InputError(f"--resume must be the folder of a run, got {said}")
        prints, config = fingerprints(config, task, saved), config.replace(out=out)
        run = RunContext.begin(config, task, ranks, saved, functions=functions, output=output)
        if saved:
            check_same(saved, run.config, prints, ranks, warn)
        found = run.place()
        held.enter_context(closing(run.scorer))
        _ = run.trainer  # which may refuse the task
        if not saved:
            try:
                check_rewards(run, warn)
            except RewardError as error:
                advice = "Fix the reward; the same command then starts the run."
                return ExitStatus(1, RewardError(f"{error}. {advice}"))
        if not is_resumed:  # its folder was not touched before
            held.enter_context(lock)
        options = run.config.flat()
        files = RunFiles(out, options, ranks.is_first, is_resumed, saved, warn)
        if ranks.is_first:
            output.open(out, is_resumed)
        changed = own_options(saved.options, options) if saved else ""
        for line in filter(None, (*describe_run(run), changed, *found, *run.scorer.lines())):
            screen.info(line)
        run.clock.beat()
        ending, limit = ExitStatus(run=run), config.run.stall_limit
        with StopSignal(ranks, device) as stop, StallWatchdog(run.clock, limit, ends_process):
            loop = RunLoop(run, Checkpoints(run, files, prints, stop), files, screen)
            with supervised(loop, ending):
                loop.run()
        close(loop, ending)
        return ending


def find_folder(config: Config, ranks: Ranks) -> tuple[Path, bool]:
    """Return the run's, the same on all ranks: its name may contain the time; and whether it is
    resumed."""
    is_resumed = config.run.resume is not None
    folder, is_first_resumed = ranks.values([str(config.run.out), is_resumed])[0]
    if is_first_resumed != is_resumed:
        wanted = "a folder that all processes share, but only some of them see a run in"
        raise InputError(f"--resume auto needs {wanted} {folder}")
    return Path(folder), is_resumed


def check_rewards(run: RunContext, warn: Callable[[str], None]) -> None:
    """Score two short rollouts of each of the first two prompts; warn if some rewards fail.
    RewardError if all fail. All ranks must call this."""
    task, config = run.task, run.config
    # every response is scored, and only if all fail it is an error
    scorer = replace(run.scorer, max_error_rate=1.0, answer_limit=None)
    # rewards that serve only the evaluation may be any number
    is_binary = run.objective.needs.binary and config.reward.reward_source != "vote"
    if not scorer.can_fail and not is_binary:
        return
    prompts = task.prompts("train", 0, NUM).to(config.run.where[0])
    limit = min(run.sampling.max_new_tokens, MAX_TOKENS)
    sampling = replace(run.sampling, max_new_tokens=limit)
    request = RolloutRequest(prompts, NUM, sampling, config.run.seed)
    rewards = sample_and_score(run.engine, task, scorer, request).rewards
    if warning := scorer.failures(run.ranks, WHEN)[1]:
        warn(warning)
    if is_binary:
        check_binary(rewards.nan_to_num().view(len(prompts), NUM), prompts, WHEN)


@contextmanager
def supervised(loop: RunLoop, ending: ExitStatus) -> Iterator[None]:
    """Say how the loop inside ended. With several ranks an error that the others may not have is
    raised, so that they end too."""
    checkpoints, screen = loop.checkpoints, loop.screen
    try:
        with naming_user_code():
            yield
    except Interrupted as error:
        done = f"after {loop.progress}, saved in {checkpoints.newest}"
        screen.info(f"stopped by {error} {done}; --resume {loop.files.out} resumes it")
        ending.code = 128 + error.signal
    except KeyboardInterrupt:  # the second signal
        kept = checkpoints.newest or "not written yet"
        screen.error(f"stopped at once; the last checkpoint is {kept}")
        raise
    except BaseException as error:
        try:
            if isinstance(error, RewardError):  # the weights are unchanged
                checkpoints.save()
            checkpoints.wait()  # for a save that started before
        except FAILURES as other:
            screen.error(str(other))
        said = "no checkpoint was written"
        if (newest := checkpoints.newest) and newest.exists():
            said = f"the last good checkpoint is {newest}"
        if isinstance(error, FAILURES):
            failed: RuntimeError = type(error)(f"{error}; {said}. {error.advice}")
        elif isinstance(error, UserCodeError | InputError) and loop.progress.step:
            sentence = f"{error}, after {loop.progress}; {said}. {UserCodeError.advice}"
            failed = UserCodeError(sentence, code=1)
        else:
            raise
        if loop.ranks.size > 1 and not isinstance(error, NonFiniteError | RewardError):
            raise failed from error
        failed.__cause__ = error
        ending.code, ending.error = 1, failed


def close(loop: RunLoop, ending: ExitStatus) -> None:
    files, screen, seconds = loop.files, loop.screen, loop.clock.seconds
    try:
        files.close(seconds)
    except StorageError as error:
        failed = StorageError(f"{error}. {error.advice}")
        if ending.error:  # it comes first; the caller prints it
            screen.error(str(failed))
        else:
            ending.code, ending.error = 1, failed
    loop.show_change()
    total = sum(seconds.values())
    stages = (f"{x} {s:.1f} s ({s / total:.0%})" for x, s in seconds.items() if s * 99 > total)
    screen.info(f"{total:.1f} s: {', '.join(stages)}")
    sampled, out = loop.progress.tokens["rollout"], files.out
    if trained := loop.clock.total(*STEP):
        screen.info(f"{sampled / trained:,.0f} sampled tokens per second of training steps")
    for link in filter(Path.is_symlink, (out / "latest", out / "best")):
        screen.info(f"{link.name:<12}{out / link.readlink()}")
    screen.info(f"results     {out}")
    if sampled:
        screen.info(f"next        maxrl-fast report {shlex.quote(str(out))}")
