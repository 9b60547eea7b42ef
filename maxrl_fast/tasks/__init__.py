"""Tasks produce prompts and score the responses to them."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from maxrl_fast.records import Prompts, Rollouts


class Task(Protocol):
    """The interface between a task and the trainer."""

    name: str  # shown at the start of a run
    # hash of what decides the prompts besides the options: lines of files, and how they are encoded
    fingerprint: str
    vocab_size: int
    stop_ids: tuple[int, ...]  # the first of these tokens ends a response
    prompt_length: int  # the longest prompt, in tokens
    max_new_tokens: int  # the default limit of a response, in tokens
    num_test_prompts: int | None  # number of held-out prompts; None: unlimited
    has_demonstrations: bool
    # PACKAGE.MODULE:FUNCTION, scores responses in worker processes; None: `score` scores them
    reward: str | None
    # in characters; longer answers get reward 0 without being scored; None: no limit
    answer_limit: int | None

    def prompts(self, split: str, start: int, count: int) -> Prompts:
        """Return prompts `start` to `start + count - 1` of `split`, "train", "test" or, if the task
        has it, a key of `held_out`, a dict of sizes."""

    def demonstrations(self, start: int, count: int) -> tuple[Prompts, Rollouts]:
        """Return training prompts by index and one correct response to each, for supervised
        learning.
        """

    def score(self, prompts: Prompts, rollouts: Rollouts) -> Tensor:
        """Return rewards [S] float32 of N responses to each prompt."""

    def answer(self, response: str) -> str:
        """Return the answer in a response, "" if it has none. Majority voting compares answers as
        text.
        """

    def decode(self, tokens: list[int], with_special: bool = False) -> str:
        """Return a prompt or a response as text: as rewards and answers read it, or as samples show
        it, with special tokens.
        """

    def tokenizer_files(self) -> dict[str, Any]:
        """Return JSON contents by file name, for checkpoints that `transformers` can load."""


def describe_task(task: Task) -> list[str]:
    """Return the lines of the task's own `describe`, which is optional, for the start of a run."""
    lines: list[str] = getattr(task, "describe", list)()
    return lines


def held_out_sets(task: Task, most: int, num_samples: int) -> dict[str, tuple[int, int]]:
    """Return the prompts, up to `most`, and the samples of each held-out set."""
    sizes: dict[str, int | None] = getattr(task, "held_out", {"test": task.num_test_prompts})
    samples: dict[str, int] = getattr(task, "set_samples", {})
    return {x: (min(n or most, most), samples.get(x, num_samples)) for x, n in sizes.items()}


@dataclass(frozen=True)
class ReferenceAnswer:
    """The reference answer to a prompt, as tokens that continue the reasoning of one response to
    it.
    """

    # tokens of the reasoning, from the start of the response; None: it does not lead to an answer
    length: int | None
    # tokens that lead to the answer, to be put after a response that does not; [] where none are
    # needed
    lead: list[int]
    answer: list[int]  # at least one token


@runtime_checkable
class AnsweredTask(Task, Protocol):
    """A task that knows the reference answer to every prompt."""

    def reference_answers(self, prompts: Prompts, rollouts: Rollouts) -> list[ReferenceAnswer]:
        """Return the reference answer to each of the S responses, N to each prompt.

        Where the reasoning ends must not depend on the tokens that follow it: the policy samples it
        up to there, and the probability of the answer after it is then an unbiased estimate of the
        probability of a response that gives it.
        """
