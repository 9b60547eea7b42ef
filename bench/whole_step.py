"""A whole training step of the trainer: prompts, rollout, reward, advantage, update, weights to the
rollout engine.
"""

import copy
import statistics
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bench.layouts import update_flops
from bench.measure import DeviceStopwatch, gemm_throughput, milliseconds
from maxrl_fast.config.options import Config
from maxrl_fast.config.resolve import resolve
from maxrl_fast.job.build import RunContext
from maxrl_fast.job.build_parts import build_policy, build_run_task
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.records import Prompts
from maxrl_fast.tasks import Task
from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import Learner, LearningRate
from maxrl_fast.training.objectives.group import GroupObjective, ObjectiveStep
from maxrl_fast.training.packing import Packer
from maxrl_fast.training.trainer import StepRecord, Trainer

FIRST_PROMPT = 10**6  # the warm start uses only prompts below this index


class RandomAdvantages(GroupObjective):
    """Replaces an estimator's advantages by random numbers, so that every rollout has a gradient.

    Otherwise groups of an untrained policy that all failed have none, and the update computes next
    to nothing.
    """

    def begin(self, batch: RolloutBatch, learner: Learner) -> ObjectiveStep:
        step = super().begin(batch, learner)
        return replace(step, values=torch.randn_like(step.values))


@dataclass
class TimedTrainer:
    trainer: Trainer
    records: list[StepRecord] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)  # milliseconds of each step

    def step(self) -> None:
        n, clock = len(self.records) + 1, self.trainer.clock
        before = dict(clock.seconds)
        self.records.append(
            self.trainer.step(n, FIRST_PROMPT + n * self.trainer.collector.options.prompts)
        )
        self.stages.append(
            {name: (t - before.get(name, 0.0)) * 1e3 for name, t in clock.seconds.items()}
        )

    def tokens(self, last: int = 0) -> float:
        return statistics.mean(record.batch.num_tokens for record in self.records[-last:])

    def metric(self, name: str, last: int = 0) -> float:
        return statistics.mean(record.metrics[name] for record in self.records[-last:])

    def median_stages(self, last: int) -> dict[str, float]:
        return {
            name: statistics.median(stages[name] for stages in self.stages[-last:])
            for name in self.stages[-1]
        }


def warm_started(config: Config) -> tuple[Config, Task, PolicyModel]:
    """Return the resolved configuration, its task, and its policy after the warm start, on its
    device.

    Raises:
        InputError: if the configuration is wrong.
    """
    task = build_run_task(config)
    resolved = resolve(config, task)
    model = build_policy(resolved, task).to(resolved.run.where[0])
    for _ in RunContext(resolved, task, model).warm_start.steps():
        pass
    return resolved, task, model


def timed_trainer(
    config: Config, task: Task, model: PolicyModel, *, trains: bool = True
) -> TimedTrainer:
    """Return the trainer of a run, with a clock that waits for the device and has a separate stage
    for prompts.

    Args:
        trains: False: the learning rate is 0, so that every step starts from the same weights.
    """
    clock = DeviceStopwatch(config.run.where[0])
    trainer = RunContext(config, task, model, clock=clock).trainer
    timed_task = copy.copy(task)

    def timed_prompts(split: str, start: int, count: int) -> Prompts:
        with clock("prompts"):
            return task.prompts(split, start, count)

    vars(timed_task)["prompts"] = timed_prompts
    trainer.collector = replace(trainer.collector, task=timed_task)
    if not trains:
        trainer.learning_rate = LearningRate(0.0, 1, 0, "constant")
    return TimedTrainer(trainer)


def floor_milliseconds(trainer: Trainer) -> float:
    """Return the least time of a step's matrix multiplications at the GEMM throughput measured now.

    The rollout costs the forward third of an update on all rollouts, and each prompt counts once in
    both. The rollout's memory traffic, such as reading keys, is not included.
    """
    collected, model = trainer.collector.collect(1, FIRST_PROMPT), trainer.learner.model
    rollouts = collected.rollouts
    nothing = torch.zeros(len(rollouts), device=rollouts.tokens.device)
    batch = Packer(collected.prompts, rollouts, nothing).pack(torch.arange(len(rollouts)))
    throughput = gemm_throughput(
        4096, model.config.hidden_size, trainer.learner.dtype, rollouts.tokens.device
    )
    return 4 / 3 * update_flops(model.config, batch) / throughput * 1e3


def time_steps(config: Config, task: Task, model: PolicyModel, rounds: int) -> dict[str, Any]:
    """Return the milliseconds of a GRPO step, whole and by stage; every rollout has a gradient."""
    timed = timed_trainer(config, task, model, trains=False)
    timed.trainer.objective = RandomAdvantages("grpo", {})
    for _ in range(3):  # on a GPU the first steps capture graphs
        timed.step()
    step_milliseconds = milliseconds({"step": timed.step}, rounds, config.run.where[0])["step"]
    tokens = timed.tokens(rounds)
    return {
        "response_tokens": tokens,
        "reward_mean": timed.metric("reward_mean", rounds),
        "share_with_gradient": timed.metric("num_sequences_trained", rounds)
        / (config.sampling.prompts * config.sampling.rollouts),
        "step_milliseconds": step_milliseconds,
        "floor_milliseconds": floor_milliseconds(timed.trainer),
        "step_tokens_per_second": tokens / step_milliseconds * 1e3,
        "milliseconds_by_stage": timed.median_stages(rounds),
    }


def whole_step(config: Config, rounds: int) -> dict[str, Any]:
    """Return the figures of a step after the warm start."""
    resolved, task, model = warm_started(config)
    result: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "maze_size": config.parts["task"]["maze_size"],
        "prompts": config.sampling.prompts,
        "rollouts": config.sampling.rollouts,
    }
    return result | time_steps(resolved, task, model, rounds)
