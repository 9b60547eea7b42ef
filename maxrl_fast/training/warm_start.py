"""The warm start: supervised fine-tuning on solutions."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from maxrl_fast.records import Samples
from maxrl_fast.tasks import Task
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.optimizer import LearningRate


@dataclass
class WarmStart:
    """Trains the policy on one solution per prompt."""

    task: Task
    learner: Learner  # with the loss "reinforce", of advantages 1
    learning_rate: LearningRate
    batch: int  # prompts of a step
    device: torch.device
    takes_prompts: bool = True  # it uses up training prompts; the others are for what follows

    @property
    def num_steps(self) -> int:
        return self.learning_rate.steps

    @property
    def num_prompts(self) -> int:
        return self.num_steps * self.batch if self.takes_prompts else 0

    def steps(self, done: int = 0) -> Iterator[tuple[int, float]]:
        for step in range(done + 1, self.num_steps + 1):
            prompts, solutions = self.task.demonstrations((step - 1) * self.batch, self.batch)
            samples = Samples(prompts.to(self.device), solutions.to(self.device))
            ones = torch.ones(self.batch, device=self.device)
            self.learner.forward_backward(samples, ones, samples.sequences)
            lr = self.learning_rate.at(step)
            yield step, self.learner.optim_step(when=f"warm start step {step}", lr=lr).loss
