"""Tasks whose responses are episodes: turns of the policy, each answered by an environment."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from maxrl_fast.records import Prompts
from maxrl_fast.rewards import Outcome, Progress, no_progress
from maxrl_fast.tasks import Task


@dataclass(frozen=True)
class Reply:
    """What an environment answers to a turn."""

    sample: int  # s = g N + n of the S in this call of generate
    tokens: list[int]  # that the policy reads next, at least one unless `is_last`
    is_last: bool  # the episode ends; the tokens are ignored


class Environments(Protocol):
    """The environments of the S samples of one call of generate, one each."""

    def submit(self, sample: int, turn: list[int]) -> None:
        """Take a finished turn, its stop token included."""

    def replies(self, wait: bool) -> list[Reply]:
        """Return the replies that are there; with `wait`, at least one of those that are due."""

    def finish(self) -> list[Outcome]:
        """Wait for the calls that are due, end the environments, and return the outcomes [S]."""

    def close(self) -> None:
        """End the environments without rewards, after an error."""


@runtime_checkable
class EpisodeTask(Task, Protocol):
    """A task whose responses are episodes."""

    max_turns: int

    def environments(
        self, prompts: Prompts, num_samples: int, beat: Progress = no_progress
    ) -> Environments:
        """Return an environment for each of `num_samples` episodes of each prompt, which call
        `beat` while they wait."""
