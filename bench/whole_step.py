"""A whole training step: prompts, rollout, reward, advantage, update, weights back to the rollout engine."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from bench.measure import milliseconds, synchronize
from maxrl_fast.config.options import Config
from maxrl_fast.config.parse import resolve
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.model.policy import build_policy
from maxrl_fast.ops import grpo_advantage
from maxrl_fast.rollout import Sampling
from maxrl_fast.rollout.engines import build_engine
from maxrl_fast.run.screen import Screen
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.registry import build_task
from maxrl_fast.training.learner import Learner, LossSettings
from maxrl_fast.training.warm_start import warm_start


class OurStep:
    """The trainer's step, callable; GRPO.

    Args:
        all_teach: every rollout is learned from, with an advantage drawn at random and a learning rate of 0. Else those of
            groups that all failed are left out, and a young policy's step has next to nothing to compute.
    """

    def __init__(self, config: Config, task: Task, model: Decoder, all_teach: bool = False):
        self.task, self.config, self.step, self.all_teach = task, config, 0, all_teach
        self.device = torch.device(config.run.device)
        self.learner = Learner.of(config, model, LossSettings.of(config))
        self.engine = build_engine(config, model, task)
        self.sampling = Sampling.of(config, task)
        self.tokens: list[int] = []
        self.teaching: list[float] = []  # share of the rollouts
        self.rewards: list[float] = []
        self.stages: dict[str, list[float]] = {}  # milliseconds, of steps called with `by_stage`

    def __call__(self, by_stage: bool = False) -> None:
        options, start = self.config.rollout, time.perf_counter()

        def lap(stage: str) -> None:
            nonlocal start
            if by_stage:
                synchronize(self.device)
                now = time.perf_counter()
                self.stages.setdefault(stage, []).append((now - start) * 1e3)
                start = now

        self.step += 1
        prompts = self.task.prompts("train", 10**6 + self.step * options.prompts, options.prompts).to(self.device)
        lap("prompts")
        rollouts = self.engine.generate(prompts, options.rollouts, self.sampling, seed=0, step=self.step)
        lap("rollout")
        rewards = self.task.score(prompts, rollouts).view(options.prompts, options.rollouts)
        lap("reward")
        advantages = grpo_advantage(rewards).flatten()
        if self.all_teach:
            advantages = torch.randn(len(advantages), device=self.device)
        lap("advantage")
        lr = 0.0 if self.all_teach else self.config.optimizer.lr
        update = self.learner.update(prompts, rollouts, advantages, torch.arange(len(advantages)), when="bench", lr=lr)
        lap("update")
        self.engine.load_weights(self.learner.model)
        lap("weights to rollout")
        self.tokens.append(len(rollouts.tokens))
        self.teaching.append(update.num_sequences / len(advantages))
        self.rewards.append(float(rewards.mean()))


def timed(config: Config, task: Task, model: Decoder, rounds: int) -> dict[str, Any]:
    """Milliseconds of the step, whole and by stage, all rollouts learned from."""
    step = OurStep(config, task, model, all_teach=True)
    for _ in range(3):  # on a GPU the first ones capture graphs
        step()
    time_of_step = milliseconds({"step": step}, rounds, step.device)["step"]
    for _ in range(rounds):
        step(by_stage=True)
    tokens = statistics.mean(step.tokens)
    return {
        "response_tokens": tokens,
        "reward_mean": statistics.mean(step.rewards),
        "share_that_teaches": statistics.mean(step.teaching),
        "step_milliseconds": time_of_step,
        "step_tokens_per_second": tokens / time_of_step * 1e3,
        "milliseconds_by_stage": {name: statistics.median(values) for name, values in step.stages.items()},
    }


def whole_step(config: Config, rounds: int) -> Iterator[dict[str, Any]]:
    """The step of a checked configuration after its warm start; on a GPU then again, with torch.compile too."""
    task = build_task(config.task, config.run.seed)
    config = resolve(config, task)
    model = build_policy(config, task).to(torch.device(config.run.device))
    warm_start(config, task, model, Screen())
    result: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "maze_size": config.task.maze_size,
        "prompts": config.rollout.prompts,
        "rollouts": config.rollout.rollouts,
    }
    result |= timed(config, task, model, rounds)
    yield result
    if config.run.device == "cuda":
        model.compile_layers()
        yield result | {"compiled": timed(config.replace(compile=True), task, model, rounds)}
