"""Collects the numbers that `python -m maxrl_fast.evaluate` estimates from a policy's samples."""

import json
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from maxrl_fast.evaluation.diversity import Diversity
from maxrl_fast.evaluation.evaluator import is_correct
from maxrl_fast.evaluation.kept_samples import sample_records
from maxrl_fast.records import Samples, unpack
from maxrl_fast.rollout import check_finite
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.texts import response_texts


class SampleTally:
    """Collects numbers from chunks of samples; `write` gets each line of samples.jsonl."""

    def __init__(
        self, task: Task, diversity: Diversity, write: Callable[[str], object] | None = None
    ) -> None:
        self._task, self._diversity, self._write = task, diversity, write
        self.measure = diversity.name
        self._rewards: list[Tensor] = []
        self._answers: list[list[int]] = []
        self.ids: list[int] = []
        self.diversities: list[float | None] = []

    def __call__(
        self, samples: Samples, rewards: Tensor, components: Sequence[dict[str, float]]
    ) -> None:
        """Add a chunk of samples; this is the `keep` of Evaluator.evaluate."""
        prompts, rollouts, num_samples = samples.prompts, samples.rollouts, samples.num_rollouts
        check_finite(rollouts, prompts, step=0)
        self._rewards.append(rewards.view(-1, num_samples).cpu())
        self.ids += prompts.ids.tolist()
        if self._write:
            for record in sample_records(self._task, samples, rewards, components):
                self._write(json.dumps(record) + "\n")
        tokens = unpack(rollouts.tokens, rollouts.lengths)
        responses = response_texts(self._task, rollouts)
        right = is_correct(rewards).tolist()
        for start in range(0, len(responses), num_samples):
            own = range(start, start + num_samples)
            numbers = {"": -1}  # by answer, counted from 0; -1: no answer
            answers = [self._task.answer(responses[s]) for s in own]
            self._answers.append(
                [numbers.setdefault(answer, len(numbers) - 1) for answer in answers]
            )
            correct = [s for s in own if right[s]]
            texts = [responses[s] for s in correct]
            is_enough = len(correct) >= 2
            self.diversities.append(
                self._diversity([tokens[s] for s in correct], texts) if is_enough else None
            )

    @property
    def rewards(self) -> Tensor:  # [P, n], NaN where scoring failed
        return torch.cat(self._rewards)

    @property
    def answers(self) -> Tensor:  # [P, n] int64
        return torch.tensor(self._answers)

    @property
    def mean_diversity(self) -> float | None:
        """The mean over the prompts with at least two correct responses; None if there are none."""
        known = [value for value in self.diversities if value is not None]
        return sum(known) / len(known) if known else None
