"""Builds a run from a resolved configuration and trains it, for train.py and api.py."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from maxrl_fast.config.changes import own_options
from maxrl_fast.config.checks import objective_of
from maxrl_fast.config.estimates import describe_run, estimate
from maxrl_fast.config.options import Config, ResolvedConfig
from maxrl_fast.config.resolve import evaluation_schedule
from maxrl_fast.errors import EngineError, InputError, NonFiniteError, RewardError, StorageError
from maxrl_fast.job.build import (
    build_collector,
    build_evaluator,
    build_fingerprints,
    build_teacher_prompts,
    build_trainer,
)
from maxrl_fast.job.build_engine import build_run_engine, compare_engine
from maxrl_fast.job.build_policy import (
    build_policy,
    build_policy_files,
    build_reference,
    compare_policy,
    dtype_of,
)
from maxrl_fast.job.build_rewards import build_scorer
from maxrl_fast.job.build_task import closing_task
from maxrl_fast.job.checkpoints import Checkpoints
from maxrl_fast.job.closing_tables import closing_tables
from maxrl_fast.job.control import Interrupted, StallWatchdog, StopSignal
from maxrl_fast.job.loop import RunLoop
from maxrl_fast.job.progress import Progress
from maxrl_fast.job.resume import Saved, check_same, find_saved
from maxrl_fast.job.run_files import RunFiles
from maxrl_fast.job.screen import Screen
from maxrl_fast.model.flash_choice import choose
from maxrl_fast.model.hub import HUB, find_model
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.rewards.output import RewardOutput
from maxrl_fast.rewards.scoring import Scorer
from maxrl_fast.rollout import Engine
from maxrl_fast.rollout.scored import sample_and_score
from maxrl_fast.runtime.device import Machine
from maxrl_fast.runtime.files import locked
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.runtime.watch import RankMonitor
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.tools import ToolTask
from maxrl_fast.training.collect import RolloutCollector, check_binary
from maxrl_fast.training.sharding import is_sharded
from maxrl_fast.training.stopwatch import Stopwatch

NUM_PROMPTS, NUM_ROLLOUTS, MAX_TOKENS = 2, 2, 256  # of check_rewards
WHEN = "before the first step"
# seconds to wait for the previous process of this folder, which may still be exiting
LOCK_LIMIT = 60.0


@dataclass
class ExitStatus:
    code: int = 0  # 1: `error`; 128 + the number of the signal that stopped it
    # non-finite values, failing rewards, full disk or failing server; not printed yet
    error: RuntimeError | None = None


@dataclass(frozen=True)
class Trained:
    config: ResolvedConfig
    model: PolicyModel
    engine: Engine


@dataclass(frozen=True)
class Job:
    """A resolved configuration, its task, and where it runs.

    `watch` reports a failure to the other ranks. `functions` are by the names under which --reward
    lists them. A run without progress for --stall-limit seconds ends its process if `ends_process`.
    """

    config: ResolvedConfig
    task: Task
    ranks: Ranks
    screen: Screen
    device: torch.device
    watch: RankMonitor | None
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    ends_process: bool = True

    def run(self) -> tuple[ExitStatus, Trained | None]:
        """Build and train. Return the exit status and the trained policy; None if the run ended
        before its first step.

        The number of CPU threads is restored. Raises InputError if building shows that the
        configuration is wrong.
        """
        config, task, ranks = self.config, self.task, self.ranks
        screen, device = self.screen, self.device
        # the same on all ranks: its name may contain the time
        out = Path(ranks.text_from_first(str(config.run.out)))
        config, is_resumed = config.replace(out=out), config.run.resume is not None
        if ranks.text_from_first(str(is_resumed)) != str(is_resumed):
            raise InputError(
                "--resume auto needs a folder that all processes share, but only some of them see "
                f"a run in {out}"
            )
        with contextlib.ExitStack() as held:
            environments = task.output if isinstance(task, ToolTask) else None
            output = held.enter_context(contextlib.closing(environments or RewardOutput()))
            held.enter_context(closing_task(task))
            held.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(config.run.threads)
            if is_resumed:
                held.enter_context(locked(out, ranks.is_first, LOCK_LIMIT, screen.warning))
            saved = find_saved(out, ranks, screen.warning) if is_resumed else None
            is_dry = config.run.dry_run is not None
            model = build_policy(config, task, saved, is_empty=is_dry)
            has_critic = objective_of(config).needs.critic
            teacher = build_reference(config, task, is_empty=is_dry)
            is_full = is_sharded(config.run.sharding, model, ranks, device, has_critic)
            config = config.replace(sharding="full" if is_full else "none")
            fingerprints = build_fingerprints(config, task)
            if saved:
                options, may_change = config.flat(), config.run.allow_changes
                check_same(saved, options, fingerprints, ranks, screen.warning, may_change)
            if is_dry:
                screen.info(
                    estimate(config, task, model, Machine.here(device, ranks.size), teacher)
                )
                return ExitStatus(), None
            teacher_prompts = build_teacher_prompts(config, task, teacher or model)
            if teacher_prompts is not None and not saved:
                teacher_prompts.check()
            model = model.to(device)
            teacher = None if teacher is None else teacher.to(device)
            # Before the comparison, so that it uses the attention that will run.
            tried = choose(
                device, dtype_of(config), model.head_sizes, lambda failed: ranks.any(failed, device)
            )
            compared = compare_policy(model)
            if teacher is not None:
                compare_policy(teacher)
            engine = build_run_engine(config, model, task, ranks)
            # otherwise the checkpoint's weights are loaded later
            has_weights = saved is None or saved.decoder is None
            sampled = compare_engine(model, engine, config.rollout.rollout) if has_weights else ""
            scorer = build_scorer(
                config.reward,
                task,
                device,
                dtype_of(config),
                self.functions,
                ranks.size,
                output if ranks.is_first else None,
            )
            held.enter_context(contextlib.closing(scorer))
            if not saved and (error := self._check_rewards(config, engine, scorer)):
                return ExitStatus(1, error), None
            if not is_resumed:
                held.enter_context(locked(out, ranks.is_first, LOCK_LIMIT, screen.warning))
            files = RunFiles(
                out, config.flat(), config.evaluation.log_to, ranks.is_first, is_resumed, saved
            )
            if ranks.is_first:
                output.open(out, is_resumed)
            for log in files.missing:
                screen.warning(
                    f"{log} is missing: a new one begins, without the lines from before the "
                    "checkpoint"
                )
            described = describe_run(config, task, model, ranks, saved.directory if saved else None)
            described += [own_options(saved.options, config.flat())] if saved else []
            described += [*tried, compared, sampled, f"rollout engine: {engine.describe()}"]
            for line in filter(None, [*described, scorer.describe()]):
                screen.info(line)
            trained = Trained(config, model, engine)
            with self._supervised_loop(trained, teacher, scorer, files, saved, fingerprints) as (
                loop,
                ending,
            ):
                loop.run()
            return close(files, loop.progress, loop.clock, screen, ending), trained

    def _check_rewards(
        self, config: ResolvedConfig, engine: Engine, scorer: Scorer
    ) -> RewardError | None:
        """Try the rewards before anything is written. Return an error if all fail; raise InputError
        if they do not suit the objective."""
        collector = build_collector(
            config, self.task, engine, scorer, objective_of(config), ranks=self.ranks
        )
        # these rewards serve only the evaluation, and may be any number
        if config.shaping.reward_source == "vote":
            collector = replace(collector, needs_binary=False)
        try:
            if warning := check_rewards(collector):
                self.screen.warning(warning)
        except RewardError as error:
            return RewardError(f"{error}. Fix the reward; the same command then starts the run.")
        return None

    @contextlib.contextmanager
    def _supervised_loop(
        self,
        trained: Trained,
        teacher: PolicyModel | None,
        scorer: Scorer,
        files: RunFiles,
        saved: Saved | None,
        fingerprints: dict[str, str],
    ) -> Iterator[tuple[RunLoop, ExitStatus]]:
        """Yield the loop, under the watchdog and the signal handlers, and how it ended."""
        config, model, engine = trained.config, trained.model, trained.engine
        task, ranks, screen, watch = self.task, self.ranks, self.screen, self.watch
        options = config.run
        progress = saved.progress if saved else Progress()
        clock = Stopwatch(progress.seconds)
        scorer.beat = clock.beat
        report = watch.report_failure if watch else lambda message: None
        with (
            StopSignal(ranks, self.device) as stop,
            StallWatchdog(clock, options.stall_limit, report, self.ends_process),
        ):
            checkpoints = Checkpoints(
                files,
                build_policy_files(
                    task, model, saved.directory if saved else config.model.directory
                ),
                fingerprints,
                options.save_every,
                options.keep_checkpoints,
                ranks,
                stop,
                clock,
                saved,
            )
            trainer, warm_start = build_trainer(
                config, task, engine, scorer, model, clock, ranks, teacher
            )
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
                evaluation_schedule(config),
                config.evaluation.diagnose_every,
                config.evaluation.keep_rollouts,
            )
            with supervise(checkpoints, progress, files, screen, is_alone=watch is None) as ending:
                yield loop, ending


def check_rewards(collector: RolloutCollector) -> str:
    """Score two short rollouts of each of the first two prompts, so that a broken reward fails
    before the warm start.

    Returns a warning if some rewards failed, else "". All ranks must call this.

    Raises:
        RewardError: if all rewards fail.
        InputError: if a reward function's parameters do not fit, or rewards must be 0 or 1 and one
        is not.
    """
    scorer = collector.scorer.rehearsal()
    if not scorer.can_fail and not collector.needs_binary:
        return ""
    prompts = collector.task.prompts("train", 0, NUM_PROMPTS).to(collector.device)
    scorer.check(prompts)
    sampling = replace(
        collector.sampling, max_new_tokens=min(collector.sampling.max_new_tokens, MAX_TOKENS)
    )
    rewards = sample_and_score(
        collector.engine,
        collector.task,
        scorer,
        prompts,
        NUM_ROLLOUTS,
        sampling,
        seed=collector.seed,
        step=0,
    ).rewards
    warning = scorer.failures(collector.ranks, WHEN)[1]
    if collector.needs_binary:
        check_binary(rewards.nan_to_num().view(len(prompts), NUM_ROLLOUTS), prompts, WHEN)
    return warning


def find_policy(config: Config, ranks: Ranks, warn: Callable[[str], None]) -> Config:
    """Return the configuration with --model and --reference resolved to a folder or a hub commit,
    the same on all ranks.

    Raises InputError if one does not exist.
    """
    found, wanted = {}, {"model": config.model.model, "reference": config.loss.reference}
    # a resumed run has its own checkpoints
    if wanted["model"] and config.run.resume is not None and not wanted["model"].startswith(HUB):
        wanted["model"] = None
    for option, name in wanted.items():
        if name is None:
            continue
        if not ranks.is_first:  # only the first rank shows a download's progress
            os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
        what = f"--{option} must be the folder of a checkpoint"
        found[option] = ranks.text_from_first(
            find_model(name, warn, what) if ranks.is_first else ""
        )
    return config.replace(**found)


@contextlib.contextmanager
def supervise(
    checkpoints: Checkpoints, progress: Progress, files: RunFiles, screen: Screen, is_alone: bool
) -> Iterator[ExitStatus]:
    """Run the body, and record how it ended. With several ranks a StorageError or EngineError is
    raised, so that the others end too.
    """
    ending = ExitStatus()
    try:
        yield ending
    except Interrupted as error:
        screen.info(
            f"stopped by {error} after {progress}, saved in {checkpoints.newest}; --resume "
            f"{files.out} resumes it"
        )
        ending.code = 128 + error.signal
    except (NonFiniteError, RewardError, StorageError, EngineError) as error:
        _finish_saving(checkpoints, screen)
        kept = (
            f"the last good checkpoint is {checkpoints.newest}"
            if checkpoints.newest
            else "no checkpoint was written"
        )
        sentence = f"{error}; {kept}. {error.advice}"
        if isinstance(error, StorageError | EngineError) and not is_alone:
            raise type(error)(sentence) from error
        ending.code, ending.error = 1, type(error)(sentence)
    except (KeyboardInterrupt, SystemExit):  # the second signal
        screen.error(
            f"stopped at once; the last checkpoint is {checkpoints.newest or 'not written yet'}"
        )
        raise
    except BaseException:
        _finish_saving(checkpoints, screen)
        raise


def _finish_saving(checkpoints: Checkpoints, screen: Screen) -> None:
    """Wait for a save that started before an error, and print the save's own error."""
    try:
        checkpoints.wait()
    except StorageError as error:
        screen.error(str(error))


def close(
    files: RunFiles, progress: Progress, clock: Stopwatch, screen: Screen, ending: ExitStatus
) -> ExitStatus:
    """Finish the files and show the closing tables; return the status with the files' errors."""
    try:
        files.close(clock.seconds, is_done=ending.code == 0)
    except StorageError as error:
        if ending.error:  # it comes first; the caller prints it
            screen.error(f"{error}. {error.advice}")
        else:
            ending = ExitStatus(1, StorageError(f"{error}. {error.advice}"))
    evaluations = list(progress.evaluations.values())
    whole = max((evaluation["num_prompts"] for evaluation in evaluations), default=0)
    closing_tables(
        screen,
        [x for x in evaluations if x["num_prompts"] == whole],
        clock.seconds,
        progress.tokens,
        files.listing(),
    )
    return ending
