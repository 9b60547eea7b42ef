"""The trainer: `python -m maxrl_fast.train --objective maxpo --k 4`.

task --prompts--> rollout engine --tokens, logprobs--> reward --[G, N]--> advantage --[S]--> packed batch
     --> model (each prompt once) --> loss --> optimizer --> weights back to the rollout engine
"""

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from maxrl_fast.config.checks import check
from maxrl_fast.config.options import Config
from maxrl_fast.config.parse import parse, resolve
from maxrl_fast.distributed.ranks import LATECOMER, Ranks, Watch, distribute, is_sharded, said_by_first
from maxrl_fast.errors import InputError, NonFiniteError, RewardError, StorageError
from maxrl_fast.evaluation.evaluator import evaluate
from maxrl_fast.evaluation.kept_samples import KeptSamples
from maxrl_fast.files.durable import locked
from maxrl_fast.hardware import resolve_device
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.model.policy import build_policy
from maxrl_fast.rewards.scoring import Scorer
from maxrl_fast.rollout import Engine, Sampling
from maxrl_fast.rollout.engines import build_engine
from maxrl_fast.rollout.native import NativeEngine
from maxrl_fast.run.checkpoints import Checkpoints
from maxrl_fast.run.control import Interrupted, StopSignal, Stopwatch, Watchdog
from maxrl_fast.run.estimates import describe_run, estimate
from maxrl_fast.run.health import Health
from maxrl_fast.run.resume import Saved, check_same, find_saved
from maxrl_fast.run.run_files import RunFiles
from maxrl_fast.run.screen import Screen
from maxrl_fast.run.state import Progress
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.registry import build_task
from maxrl_fast.training.collect import Collector
from maxrl_fast.training.diagnostics import diagnosis, prompt_gradient_norms
from maxrl_fast.training.group_objective import advantages_of
from maxrl_fast.training.learner import Learner, LossSettings, frozen_copy, learning_rate
from maxrl_fast.training.metrics import step_metrics, summary
from maxrl_fast.training.warm_start import warm_start


def train(
    config: Config,
    task: Task,
    scorer: Scorer,
    model: Decoder,
    engine: Engine,
    files: RunFiles,
    checkpoints: Checkpoints,
    progress: Progress,
    clock: Stopwatch,
    screen: Screen,
    ranks: Ranks,
) -> None:
    """Warm start, evaluation, reinforcement learning, evaluation: what of it `progress` says is still to be done."""
    device, dtype, seed = torch.device(config.run.device), getattr(torch, config.run.dtype), config.run.seed
    num_evaluated = config.evaluation.eval_prompts
    assert num_evaluated is not None
    advantages = advantages_of(config)
    sampling = Sampling.of(config, task)
    reference = frozen_copy(model) if config.loss.kl_coef or advantages.needs_reference else None
    module = distribute(model, reference, ranks, dtype, config.run.sharding == "full")
    collector = Collector(config, task, engine, scorer, clock, ranks, advantages.needs_greedy, advantages.needs_binary)
    health = Health()
    for record in files.history["metrics"]:
        health.observe(record)

    if progress.phase == "warm start":
        with clock("warm start"):
            next_prompt = warm_start(
                config,
                task,
                model,
                screen,
                ranks,
                module,
                progress=progress,
                restore=checkpoints.restore,
                safe_point=lambda learner: checkpoints.safe_point(progress, learner),
            )
        progress.begin_training(next_prompt)
    learner = Learner.of(config, model, LossSettings.of(config), ranks=ranks, module=module, reference=reference)
    checkpoints.restore(learner)
    engine.load_weights(model)
    if progress.step == 0:
        checkpoints.save(progress, learner)

    def evaluate_if_due() -> None:
        step, every = progress.step, config.evaluation.eval_every
        is_due = step in (0, config.optimizer.steps) or (every and step % every == 0)
        if not is_due or step in progress.evaluations:
            return
        with clock("evaluation"), screen.stage("evaluate", num_evaluated, lines=1) as stage:
            scorer.take_answers()
            kept_samples = KeptSamples(task, config.evaluation.keep_samples, step)

            def after_chunk(done: int) -> None:
                stage.advance(done)
                if complaint := scorer.failures(ranks, f"evaluation at step {step}")[1]:
                    screen.warn(complaint)
                checkpoints.stop_point(progress, learner)

            evaluation = evaluate(
                engine,
                task,
                scorer,
                num_evaluated,
                config.evaluation.eval_samples,
                sampling,
                seed=seed,
                device=device,
                progress=after_chunk,
                ranks=ranks,
                keep=kept_samples.take,
            )
        progress.evaluations[step] = evaluation
        rates = scorer.answer_rates(scorer.take_answers(), ranks)
        files.write("eval", {"step": step, **vars(evaluation), **rates})
        for sample in kept_samples.records:
            files.write("samples", sample)
        screen.say(f"step {step}: " + "  ".join(f"pass@{k} {p:.3f}" for k, p in evaluation.pass_at_k.items()))
        checkpoints.mark_best(progress, learner)

    with checkpoints.kept(progress, learner):
        evaluate_if_due()
    with (
        screen.stage("train", config.optimizer.steps, done=progress.step) as stage,
        checkpoints.kept(progress, learner),
    ):
        for step in range(progress.step + 1, config.optimizer.steps + 1):
            collected = collector.collect(step, progress.next_prompt)
            prompts, rollouts, rewards = collected.prompts, collected.rollouts, collected.rewards  # G, S, [G, N]
            corrections: dict[str, float] = {}
            if config.rollout.importance_cap:
                with clock("log-probs"):
                    rollouts, corrections = learner.corrected(prompts, rollouts, config.rollout.importance_cap)
            with clock("advantage") as begin_time:
                advantages.begin(learner, prompts, rollouts, rewards, collected.valid, collected.greedy_rewards)
            engine.sleep()
            if config.evaluation.diagnose_every and step % config.evaluation.diagnose_every == 0:
                with clock("diagnosis"):
                    everything = torch.arange(rewards.numel(), device=device)
                    known = everything if collected.valid is None else everything[collected.valid.flatten()]
                    current = advantages.at_start(everything)
                    norms = prompt_gradient_norms(learner, prompts, rollouts, current, known, clock.beat)
                files.write("diagnostics", diagnosis(step, collected, norms))
            lr = learning_rate(step, config.optimizer)
            updates, laps = [], [begin_time]
            for sequences in torch.arange(rewards.numel(), device=device).chunk(config.optimizer.updates_per_step):
                with clock("advantage") as advantage_time:
                    current = advantages.for_update(sequences)  # [S]
                with clock("update") as update_time:
                    known = sequences if collected.valid is None else sequences[collected.valid.flatten()[sequences]]
                    updates.append(learner.update(prompts, rollouts, current, known, when=f"step {step}", lr=lr))
                laps += [advantage_time, update_time]
            extra = advantages.end(step)
            with clock("weights to rollout"):
                engine.load_weights(model)

            seconds = {"rollout_seconds": collected.rollout_seconds, "train_seconds": sum(lap.seconds for lap in laps)}
            record = step_metrics(step, collected, advantages.values, updates, lr, seconds)
            record |= corrections | extra | collected.numbers
            files.write("metrics", record)
            stage.advance(step, summary(record))
            if collected.complaint:
                screen.warn(collected.complaint)
            for sign in health.observe(record):
                files.write("warnings", {"step": step, **vars(sign)})
                screen.warn(f"step {step}: {sign.message}")
            progress.step, progress.next_prompt = step, progress.next_prompt + collected.num_sampled
            progress.tokens["rollout"] += collected.num_tokens
            progress.tokens["update"] += sum(update.num_tokens for update in updates)
            checkpoints.safe_point(progress, learner)
            evaluate_if_due()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns 0; 1 on non-finite values, failing rewards or a full disk; 2 on bad input; 130 on Ctrl-C and
    143 on SIGTERM."""
    ranks = Ranks.of_environment()
    screen = Screen(is_quiet=not ranks.is_first)
    try:
        with said_by_first(ranks):
            config = parse(sys.argv[1:] if arguments is None else arguments)
        check(config)
        device = resolve_device(config.run.device)
        with ranks.connected(device) as watch:
            return run(config, ranks, screen, device, watch)
    except KeyboardInterrupt:
        return 130
    except StorageError:  # which `supervise` has said
        return 1
    except torch.OutOfMemoryError as error:
        needs_less = "a lower --token-budget or --kv-cache-gb, --checkpoint-activations or --sharding full needs less"
        Screen().complain(f"{str(error).partition('. ')[0]}; {needs_less}; --resume goes on from the last checkpoint")
        return 1
    except InputError as error:
        # Under torchrun all ranks find the same; once the first has said so and ended, torchrun ends the others.
        time.sleep(0 if ranks.is_first else LATECOMER)
        Screen().complain(str(error) if ranks.size == 1 else f"rank {ranks.rank}: {error}")
        return 2


def run(config: Config, ranks: Ranks, screen: Screen, device: torch.device, watch: Watch | None) -> int:
    """Build what a checked configuration asks for, and train.

    Raises:
        InputError: where that shows the configuration to be wrong.
    """
    task = build_task(config.task, config.run.seed, config.model.model)
    config = resolve(config, task, ranks)
    out = Path(ranks.text_from_first(str(config.run.out)))  # whose name may hold the time
    config = config.replace(out=out)
    torch.set_num_threads(config.run.threads or 1)
    with contextlib.ExitStack() as held:
        saved = None
        if config.run.resume:
            held.enter_context(locked(out, ranks.is_first))
            saved = find_saved(out, ranks, screen.warn)
        model = build_policy(config, task, saved.decoder if saved else None)
        config = config.replace(sharding="full" if is_sharded(config.run.sharding, model, ranks, device) else "none")
        if saved:
            check_same(saved, config, task, ranks, screen.warn)
        if config.run.dry_run:
            screen.say(estimate(config, task, model))
            return 0
        engine = build_engine(config, model.to(device), task)
        if isinstance(engine, NativeEngine) and device.type == "cpu":
            config = config.replace(decoder="cpp" if engine.in_cpp else "torch")
        scorer = held.enter_context(contextlib.closing(Scorer.of(config.task, task)))
        if not config.run.resume:
            held.enter_context(locked(out, ranks.is_first))
        files = RunFiles(config, ranks.is_first, saved)
        for line in describe_run(config, task, model, ranks, saved.directory if saved else None):
            screen.say(line)
        screen.say(f"rollout engine: {engine.describe()}")
        return supervise(config, task, scorer, model, engine, files, saved, screen, ranks, watch)


def supervise(
    config: Config,
    task: Task,
    scorer: Scorer,
    model: Decoder,
    engine: Engine,
    files: RunFiles,
    saved: Saved | None,
    screen: Screen,
    ranks: Ranks,
    watch: Watch | None,
) -> int:
    """Train under the watchdog; signals, and what goes wrong, become a sentence and an exit code."""
    progress, code = saved.progress if saved else Progress(), 0
    clock = Stopwatch(progress.seconds)
    scorer.beat = clock.beat
    tell = watch.say_stuck if watch else lambda message: None
    if watch:
        watch.dump_workers = scorer.dump_stacks
    with (
        StopSignal(ranks, torch.device(config.run.device)) as stop,
        Watchdog(clock, config.run.stall_limit, ranks, tell, scorer.dump_stacks),
    ):
        checkpoints = Checkpoints(config, task, ranks, stop, clock, saved, files)
        try:
            train(config, task, scorer, model, engine, files, checkpoints, progress, clock, screen, ranks)
        except Interrupted as error:
            screen.say(f"stopped by {error} after {progress}, kept in {checkpoints.newest}; --resume {files.out} goes on")
            code = 128 + error.signal
        except (NonFiniteError, RewardError, StorageError) as error:
            kept = f"the last good checkpoint is {checkpoints.newest}" if checkpoints.newest else "no checkpoint was written"
            screen.complain(f"{error}; {kept}. {error.advice}")
            if isinstance(error, StorageError) and watch:  # this rank's alone: the others are told, and end
                raise
            code = 1
        except (KeyboardInterrupt, SystemExit):  # the second signal
            screen.complain(f"stopped at once; the last checkpoint is {checkpoints.newest or 'not written yet'}")
            raise
    try:
        files.close(clock.seconds)
    except StorageError as error:
        screen.complain(f"{error}. {error.advice}")
        code = 1
    screen.closing_tables(list(progress.evaluations.values()), clock.seconds, progress.tokens, files.listing())
    return code


if __name__ == "__main__":
    sys.exit(main())
