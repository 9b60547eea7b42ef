"""What `python -m maxrl_fast.evaluate` reads from responses besides their rewards."""

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
    """Numbers the answers to each prompt, measures the diversity of its correct responses, and
    passes each line of samples.jsonl to `write`.
    """

    def __init__(
        self, task: Task, diversity: Diversity, write: Callable[[str], object] | None = None
    ) -> None:
        self._task, self._diversity, self._write = task, diversity, write
        self.measure = diversity.name
        self.answers: list[Tensor] = []  # of each prompt [n] int32, equal where the answers are
        self.diversities: list[float | None] = []  # None: fewer than two correct responses

    def __call__(
        self, samples: Samples, rewards: Tensor, components: Sequence[dict[str, float]]
    ) -> None:
        """Add a chunk of samples; this is the `keep` of Evaluator.evaluate."""
        rollouts, num_samples = samples.rollouts, samples.num_rollouts
        check_finite(rollouts, samples.prompts, step=0)
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
            numbered = [numbers.setdefault(answer, len(numbers) - 1) for answer in answers]
            self.answers.append(torch.tensor(numbered, dtype=torch.int32))
            correct = [s for s in own if right[s]]
            measured = None
            if len(correct) >= 2:
                measured = self._diversity(
                    [tokens[s] for s in correct], [responses[s] for s in correct]
                )
            self.diversities.append(measured)
