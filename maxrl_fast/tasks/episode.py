"""Tasks whose responses are episodes: turns of the policy, each answered by an environment."""

from typing import Protocol, runtime_checkable

from maxrl_fast.records import Prompts
from maxrl_fast.rewards import Scores
from maxrl_fast.rollout import Environments
from maxrl_fast.tasks import Task


class Episodes(Environments, Protocol):
    """The environments of one call of generate, and what they say of their episodes."""

    def finish(self) -> Scores:
        """Wait for the calls that are due, end the environments, and return the rewards [S].

        A failed episode is a Failure; `tool_errors` is a component. Called once, after generate.
        """

    def close(self) -> None:
        """End the environments without rewards, after an error."""


@runtime_checkable
class EpisodeTask(Task, Protocol):
    """A task whose responses are episodes."""

    max_turns: int

    def environments(self, prompts: Prompts, num_samples: int) -> Episodes:
        """Return an environment for each of `num_samples` episodes of each prompt."""
