"""Builds a run from a resolved configuration and trains it, for train.py and api.py."""

import contextlib
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from maxrl_fast.config.changes import own_options
from maxrl_fast.config.estimates import describe_run
from maxrl_fast.config.options import Config
from maxrl_fast.config.rules import objective_of
from maxrl_fast.errors import (
    FAILURES,
    InputError,
    NonFiniteError,
    RewardError,
    StorageError,
    UserCodeError,
)
from maxrl_fast.evaluation.scores import score_of
from maxrl_fast.evaluation.tables import add_scores, new_table
from maxrl_fast.job.build import (
    RunContext,
    build_collector,
    build_context,
    build_policies,
    build_trainer,
)
from maxrl_fast.job.build_policy import build_policy_files
from maxrl_fast.job.build_task import closing_task
from maxrl_fast.job.checkpoints import Checkpoints
from maxrl_fast.job.control import Interrupted, StallWatchdog, StopSignal
from maxrl_fast.job.fingerprints import fingerprints
from maxrl_fast.job.health import verdict
from maxrl_fast.job.loop import RunLoop
from maxrl_fast.job.progress import Progress
from maxrl_fast.job.resume import Saved, check_same, find_saved
from maxrl_fast.job.run_files import RunFiles
from maxrl_fast.job.screen import Screen
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.rewards.output import RewardOutput
from maxrl_fast.rollout import RolloutRequest
from maxrl_fast.rollout.sampling_and_scoring import sample_and_score
from maxrl_fast.runtime.files import locked
from maxrl_fast.runtime.loading import naming_user_code
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.tools import ToolTask
from maxrl_fast.training.collect import RolloutCollector, check_binary

NUM_PROMPTS, NUM_ROLLOUTS, MAX_TOKENS = 2, 2, 256  # of check_rewards
# stages of tokens_per_second in metrics.jsonl
STEP = ("rollout", "wait for samples", "advantage", "update")
WHEN = "before the first step"
# seconds to wait for the previous process of this folder, which may still be exiting
LOCK_LIMIT = 60.0


@dataclass
class ExitStatus:
    code: int = 0  # 1: `error`; 128 + the number of the signal that stopped it
    # non-finite values, failing rewards, full disk or failing server; not printed yet
    error: RuntimeError | None = None


@dataclass(frozen=True)
class Job:
    """A resolved configuration, its task, and where it runs; `functions` are by their names in
    --reward. A run without progress for --stall-limit seconds ends its process if
    `ends_process`."""

    config: Config
    task: Task
    ranks: Ranks
    screen: Screen
    device: torch.device
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    ends_process: bool = True

    def run(self) -> tuple[ExitStatus, RunContext | None]:
        """Build and train. Return the exit status, and the run with its trained policy; None if it
        ended before its first step. The number of CPU threads is restored."""
        task, ranks, screen = self.task, self.ranks, self.screen
        with contextlib.ExitStack() as held:
            environments = task.output if isinstance(task, ToolTask) else None
            output = held.enter_context(contextlib.closing(environments or RewardOutput()))
            config, saved = self._open_folder(held)
            prints = fingerprints(config, task, saved)
            config, policy, teacher = build_policies(config, task, ranks, self.device, saved)
            if saved:
                may_change = config.run.allow_changes
                check_same(saved, config.flat(), prints, ranks, screen.warning, may_change)
            context, lines = build_context(
                config, task, policy, teacher, ranks, self.device, saved, output, self.functions
            )
            held.enter_context(contextlib.closing(context.scorer))
            if not saved:
                try:
                    if warning := check_rewards(build_collector(context)):
                        screen.warning(warning)
                except RewardError as error:
                    advice = "Fix the reward; the same command then starts the run."
                    return ExitStatus(1, RewardError(f"{error}. {advice}")), None
            files = self._open_files(context, saved, output, held)
            start = saved.directory if saved else None
            described = describe_run(context.config, task, policy, ranks, start)
            described.append(describe_files(config, policy))
            if saved:
                described.append(own_options(saved.options, config.flat()))
            for line in filter(None, (*described, *lines, context.scorer.describe())):
                screen.info(line)
            context.clock.beat()
            with (
                StopSignal(ranks, self.device) as stop,
                StallWatchdog(context.clock, config.run.stall_limit, self.ends_process),
            ):
                loop = self._build_loop(context, files, saved, prints, stop)
                ending = supervise(loop, is_alone=ranks.size == 1)
            return close(loop, ending), context

    def _open_folder(self, held: contextlib.ExitStack) -> tuple[Config, Saved | None]:
        """Return the configuration with the folder that all ranks use, and the checkpoint to
        continue from. A new run's folder is not touched yet."""
        config, ranks, warn = self.config, self.ranks, self.screen.warning
        # the same on all ranks: its name may contain the time
        out = Path(ranks.values(str(config.run.out))[0])
        is_resumed = config.run.resume is not None
        if ranks.values(is_resumed)[0] != is_resumed:
            raise InputError(
                "--resume auto needs a folder that all processes share, but only some of them see "
                f"a run in {out}"
            )
        held.enter_context(closing_task(self.task))
        held.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(config.run.threads)
        if is_resumed:
            held.enter_context(locked(out, ranks.is_first, LOCK_LIMIT, warn))
        return config.replace(out=out), find_saved(out, ranks, warn) if is_resumed else None

    def _open_files(
        self,
        context: RunContext,
        saved: Saved | None,
        output: RewardOutput,
        held: contextlib.ExitStack,
    ) -> RunFiles:
        config, is_writer, warn = context.config, self.ranks.is_first, self.screen.warning
        out, is_resumed = config.run.out, config.run.resume is not None
        if not is_resumed:
            held.enter_context(locked(out, is_writer, LOCK_LIMIT, warn))
        log_to = config.evaluation.log_to
        files = RunFiles(out, config.flat(), log_to, is_writer, is_resumed, saved, warn)
        if is_writer:
            output.open(out, is_resumed)
        return files

    def _build_loop(
        self,
        context: RunContext,
        files: RunFiles,
        saved: Saved | None,
        prints: dict[str, str],
        stop: StopSignal,
    ) -> RunLoop:
        config, task, ranks, clock = context.config, context.task, context.ranks, context.clock
        # a resumed run keeps the configuration of its checkpoint
        start = saved.directory if saved else config.model.directory
        kept = build_policy_files(task, context.policy, start)
        rhythm = config.run.save_every, config.run.keep_checkpoints
        checkpoints = Checkpoints(files, *kept, prints, *rhythm, ranks, stop, clock, saved)
        trainer, warm_start = build_trainer(context)
        # with the seconds that the clock counts
        progress = saved.progress if saved else Progress(seconds=clock.seconds)
        return RunLoop(context, trainer, warm_start, checkpoints, files, progress, self.screen)


def check_rewards(collector: RolloutCollector) -> str:
    """Score two short rollouts of each of the first two prompts; return a warning if some rewards
    fail, else "". RewardError if all fail. All ranks must call this."""
    scorer, sampling = collector.scorer.rehearsal(), collector.sampling
    if not scorer.can_fail and not collector.needs.binary:
        return ""
    prompts = collector.task.prompts("train", 0, NUM_PROMPTS).to(collector.device)
    sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, MAX_TOKENS))
    request = RolloutRequest(prompts, NUM_ROLLOUTS, sampling, collector.seed)
    rewards = sample_and_score(collector.engine, collector.task, scorer, request).rewards
    warning = scorer.failures(collector.ranks, WHEN)[1]
    if collector.needs.binary:
        check_binary(rewards.nan_to_num().view(len(prompts), NUM_ROLLOUTS), prompts, WHEN)
    return warning


def supervise(loop: RunLoop, is_alone: bool) -> ExitStatus:
    """Run the loop, and return how it ended. With several ranks an error that the others may not
    have is raised, so that they end too."""
    checkpoints, screen = loop.checkpoints, loop.screen
    try:
        with naming_user_code():
            loop.run()
        return ExitStatus()
    except Interrupted as error:
        screen.info(
            f"stopped by {error} after {loop.progress}, saved in {checkpoints.newest}; --resume "
            f"{loop.files.out} resumes it"
        )
        return ExitStatus(128 + error.signal)
    except KeyboardInterrupt:  # the second signal
        kept = checkpoints.newest or "not written yet"
        screen.error(f"stopped at once; the last checkpoint is {kept}")
        raise
    except BaseException as error:
        try:
            checkpoints.wait()  # for a save that started before
        except StorageError as other:
            screen.error(str(other))
        is_users = isinstance(error, UserCodeError | InputError)
        if not isinstance(error, FAILURES) and not (is_users and loop.progress.step):
            raise
        kept = "no checkpoint was written"
        if checkpoints.newest and checkpoints.newest.exists():
            kept = f"the last good checkpoint is {checkpoints.newest}"
        if isinstance(error, FAILURES):
            failed: RuntimeError = type(error)(f"{error}; {kept}. {error.advice}")
        else:
            sentence = f"{error}, after {loop.progress}; {kept}. {UserCodeError.advice}"
            failed = UserCodeError(sentence, code=1)
        if not (is_alone or isinstance(error, NonFiniteError | RewardError)):
            raise failed from error
        failed.__cause__ = error
        return ExitStatus(1, failed)


def close(loop: RunLoop, ending: ExitStatus) -> ExitStatus:
    files, screen, seconds = loop.files, loop.screen, loop.clock.seconds
    try:
        files.close(seconds)
    except StorageError as error:
        if ending.error:  # it comes first; the caller prints it
            screen.error(f"{error}. {error.advice}")
        else:
            ending = ExitStatus(1, StorageError(f"{error}. {error.advice}"))
    evaluations = sorted(loop.progress.evaluations.items())
    num_prompts = max((x["num_prompts"] for _, x in evaluations), default=0)
    whole = {n: x for n, x in evaluations if x["num_prompts"] == num_prompts}
    if len(whole) > 1:
        first, *_, last = whole.values()
        screen.console.print(evaluation_table(first, last))
        if said := verdict(whole):
            screen.warning(said)
    total = sum(seconds.values())
    shares = {name: x / total for name, x in seconds.items() if x * 99 > total}
    stages = (f"{name} {seconds[name]:.1f} s ({share:.0%})" for name, share in shares.items())
    screen.info(f"{total:.1f} s: {', '.join(stages)}")
    if trained := loop.clock.total(*STEP):
        speed = loop.progress.tokens["rollout"] / trained
        screen.info(f"{speed:,.0f} sampled tokens per second of training steps")
    for name, path in files.listing().items():
        screen.info(f"{name:<12}{path}")
    if loop.progress.tokens["rollout"]:
        screen.info(f"{'next':<12}maxrl-fast report {shlex.quote(str(files.out))}")
    return ending


def describe_files(config: Config, model: PolicyModel) -> str:
    """Return how much a run writes, for its first lines."""
    keep, every = config.run.keep_checkpoints, config.run.save_every
    number = 2 + (config.optimizer.steps // every if every else 0)
    number = min(number, keep + 2) if keep else number
    weight = getattr(torch, model.config.dtype).itemsize
    # weights in float32 and two moments; of the critic too
    state = 12 * (1 + objective_of(config).needs.critic)
    size = sum(x.numel() * (weight + state * x.requires_grad) for x in model.parameters()) / 1e9
    return f"writes up to {number} checkpoints of {size:.2g} GB, {number * size:.2g} GB in all"


def evaluation_table(before: dict[str, Any], after: dict[str, Any]) -> Table:
    score = score_of([before, after])
    table = new_table("held-out prompts", "before", "after", "change")
    means = before[score], after[score]
    change = {k: {"mean": y - before[score].get(k, y)} for k, y in after[score].items()}
    add_scores(table, score, means, [change])
    rows = ("response length, tokens", "response_length_mean", 1), ("truncated", "truncated", 3)
    for title, name, digits in rows:
        x, y = before[name], after[name]
        table.add_row(title, f"{x:.{digits}f}", f"{y:.{digits}f}", f"{y - x:+.{digits}f}")
    return table
