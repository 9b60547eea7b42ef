"""The progress of a run between two steps; checkpoints store it."""

from dataclasses import dataclass, field
from typing import Any, Literal

Phase = Literal["warm start", "training", "session"]  # session: of Session.save


@dataclass
class Progress:
    phase: Phase = "warm start"
    step: int = 0  # number of steps done in this phase
    next_prompt: int = 0  # index of the first unused training prompt
    tokens: dict[str, int] = field(default_factory=lambda: {"rollout": 0})  # sampled so far
    seconds: dict[str, float] = field(default_factory=dict)  # so far, by stage
    # by step, each as Evaluation.record
    evaluations: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{'warm-start' if self.phase == 'warm start' else 'step'}-{self.step:06d}"

    def __str__(self) -> str:
        return f"{'warm start step' if self.phase == 'warm start' else 'step'} {self.step}"

    def begin_training(self, next_prompt: int) -> None:
        self.phase, self.step, self.next_prompt = "training", 0, next_prompt

    def is_best(self, step: int) -> bool:
        """Whether the evaluation at `step` has a higher mean reward, for rewards of 0 and 1 pass@1,
        than every earlier one. One on a part of the prompts is never the best."""
        size, rate = self._size_and_rate(step)
        earlier = [self._size_and_rate(at) for at in self.evaluations if at < step]
        return all(size > other[0] or (size == other[0] and rate > other[1]) for other in earlier)

    def _size_and_rate(self, step: int) -> tuple[int, float]:
        record = self.evaluations[step]
        return record["num_prompts"], record.get("max_at_k", record["pass_at_k"])["1"]

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> "Progress":
        """Read the JSON of dataclasses.asdict."""
        evaluations = {int(step): record for step, record in fields["evaluations"].items()}
        return cls(**{**fields, "evaluations": evaluations})
