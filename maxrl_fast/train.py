"""The trainer: `python -m maxrl_fast.train --objective maxpo --k 4`.

task --prompts--> rollout engine --tokens, logprobs--> reward --[G, N]--> advantage --[S]--> packed batch
     --> model (each prompt once) --> loss --> optimizer --> weights back to the rollout engine
"""

import sys
import time
from collections.abc import Sequence

import torch

from maxrl_fast.advantages import advantages_of
from maxrl_fast.config import check, parse, resolve
from maxrl_fast.control import Interrupted, StopSignal, Stopwatch
from maxrl_fast.errors import InputError, NonFiniteError
from maxrl_fast.estimates import describe_run, estimate
from maxrl_fast.evaluate import Evaluation, evaluate
from maxrl_fast.hardware import resolve_device
from maxrl_fast.learner import Learner, LossSettings, frozen_copy, learning_rate
from maxrl_fast.metrics import step_metrics, summary
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.model.policy import build_policy
from maxrl_fast.options import Config
from maxrl_fast.parallel import LATECOMER, Ranks, distribute, is_sharded, said_by_first
from maxrl_fast.rollout import Engine, Sampling, check_finite
from maxrl_fast.rollout.engines import build_engine
from maxrl_fast.run_files import RunFiles
from maxrl_fast.screen import Screen
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.registry import build_task
from maxrl_fast.warm_start import warm_start


def train(
    config: Config,
    task: Task,
    model: Decoder,
    engine: Engine,
    files: RunFiles,
    screen: Screen,
    stop: StopSignal,
    ranks: Ranks,
) -> int:
    """Warm start, evaluation, reinforcement learning, evaluation. Returns the exit code."""
    num_prompts, num_rollouts = config.rollout.prompts, config.rollout.rollouts
    device, dtype, seed = torch.device(config.run.device), getattr(torch, config.run.dtype), config.run.seed
    advantages = advantages_of(config)
    sampling = Sampling.of(config, task)
    reference = frozen_copy(model) if config.loss.kl_coef or advantages.needs_reference else None
    module = distribute(model, reference, ranks, dtype, config.run.sharding == "full")
    first, own = ranks.part(num_prompts)  # of each step's prompts, this rank's to sample
    clock = Stopwatch()
    evaluations: dict[int, Evaluation] = {}
    step = num_sampled = num_trained = code = 0

    def evaluate_now() -> None:
        with clock("evaluation"), screen.stage("evaluate", config.evaluation.eval_prompts, lines=1) as stage:
            evaluations[step] = evaluate(
                engine,
                task,
                config.evaluation.eval_prompts,
                config.evaluation.eval_samples,
                sampling,
                seed=seed,
                device=device,
                progress=stage.advance,
                check_stop=stop.check,
                ranks=ranks,
            )
        files.write("eval", {"step": step, **vars(evaluations[step])})
        screen.say(f"step {step}: " + "  ".join(f"pass@{k} {p:.3f}" for k, p in evaluations[step].pass_at_k.items()))

    try:
        with clock("warm start"):
            next_prompt = warm_start(config, task, model, screen, stop, ranks, module)
        engine.load_weights(model)
        files.save(step, model, task)
        evaluate_now()

        learner = Learner.of(config, model, LossSettings.of(config), ranks=ranks, module=module, reference=reference)
        with screen.stage("train", config.optimizer.steps) as stage:
            for step in range(1, config.optimizer.steps + 1):
                with clock("rollout") as rollout_time:
                    prompts = task.prompts("train", next_prompt, num_prompts).to(device)
                    part = prompts.take(first, own)
                    sampled = engine.generate(part, num_rollouts, sampling, seed=seed, step=step)
                    rollouts = ranks.concatenate_rollouts(sampled)
                    check_finite(rollouts, prompts, step)
                    next_prompt += num_prompts
                with clock("reward"):
                    rewards = ranks.concatenate(task.score(part, sampled)).view(num_prompts, num_rollouts)  # [G, N]
                corrections: dict[str, float] = {}
                if config.rollout.importance_cap:
                    with clock("log-probs"):
                        rollouts, corrections = learner.corrected(prompts, rollouts, config.rollout.importance_cap)
                greedy_correct = None
                if advantages.needs_greedy:
                    with clock("rollout"):
                        greedy = engine.generate(part, 1, sampling.greedy, seed=seed, step=step)
                    greedy_correct = ranks.concatenate(task.score(part, greedy)) > 0.5  # [G]
                with clock("advantage") as begin_time:
                    advantages.begin(learner, prompts, rollouts, rewards, greedy_correct)
                engine.sleep()
                lr = learning_rate(step, config.optimizer)
                updates, laps = [], [begin_time]
                for sequences in torch.arange(rewards.numel(), device=device).chunk(config.optimizer.updates_per_step):
                    with clock("advantage") as advantage_time:
                        current = advantages.for_update(sequences)  # [S]
                    with clock("update") as update_time:
                        updates.append(learner.update(prompts, rollouts, current, sequences, when=f"step {step}", lr=lr))
                    laps += [advantage_time, update_time]
                extra = advantages.end(step)
                with clock("weights to rollout"):
                    engine.load_weights(model)

                seconds = {"rollout_seconds": rollout_time.seconds, "train_seconds": sum(lap.seconds for lap in laps)}
                record = step_metrics(step, rewards, rollouts, advantages.values, updates, lr, seconds)
                record |= corrections | extra
                files.write("metrics", record)
                stage.advance(step, summary(record))
                num_sampled += len(rollouts.tokens)
                num_trained += sum(update.num_tokens for update in updates)
                if config.run.save_every and step % config.run.save_every == 0:
                    files.save(step, model, task)
                if config.evaluation.eval_every and step % config.evaluation.eval_every == 0:
                    evaluate_now()
                stop.check()
        files.save(step, model, task)
        if step not in evaluations:
            evaluate_now()
    except Interrupted:
        screen.say(f"stopped by Ctrl-C at step {step}; the policy is in {files.save(step, model, task)}")
        code = 130
    except NonFiniteError as error:
        kept = f"the last good checkpoint is {files.checkpoint}" if files.checkpoint else "no checkpoint was written yet"
        screen.complain(f"{error}; {kept}. A lower --lr or --clip-grad often helps; --dtype float32 rules out rounding.")
        code = 1
    stop.release()
    files.close()
    tokens = {"rollout": num_sampled, "update": num_trained}
    screen.closing_tables(list(evaluations.values()), clock.seconds, tokens, files.listing())
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns 0, 1 on non-finite values, 2 on bad input, 130 on Ctrl-C."""
    ranks = Ranks.of_environment()
    screen = Screen(is_quiet=not ranks.is_first)
    try:
        with said_by_first(ranks):
            config = parse(sys.argv[1:] if arguments is None else arguments)
        check(config)
        device = resolve_device(config.run.device)
        with ranks.connected(device):
            return run(config, ranks, screen, device)
    except KeyboardInterrupt:
        return 130
    except InputError as error:
        # Under torchrun all ranks find the same; once the first has said so and ended, torchrun ends the others.
        time.sleep(0 if ranks.is_first else LATECOMER)
        Screen().complain(str(error) if ranks.size == 1 else f"rank {ranks.rank}: {error}")
        return 2


def run(config: Config, ranks: Ranks, screen: Screen, device: torch.device) -> int:
    """Build what a checked configuration asks for, and train.

    Raises:
        InputError: where that shows the configuration to be wrong.
    """
    task = build_task(config.task, config.run.seed)
    config = resolve(config, task, ranks)
    torch.set_num_threads(config.run.threads or 1)
    model = build_policy(config, task)
    config = config.replace(sharding="full" if is_sharded(config.run.sharding, model, ranks, device) else "none")
    if config.run.dry_run:
        screen.say(estimate(config, task, model))
        return 0
    engine = build_engine(config, model.to(device), task)
    files = RunFiles(config, is_writer=ranks.is_first)
    for line in describe_run(config, model, ranks):
        screen.say(line)
    screen.say(f"rollout engine: {engine.describe()}")
    try:
        with StopSignal(ranks, device) as stop:
            return train(config, task, model, engine, files, screen, stop, ranks)
    except KeyboardInterrupt:
        screen.complain(f"stopped at once; the last checkpoint is {files.checkpoint or 'not written yet'}")
        raise


if __name__ == "__main__":
    sys.exit(main())
