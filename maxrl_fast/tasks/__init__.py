"""Tasks produce prompts and score the responses to them."""

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from maxrl_fast.records import Prompts, Rollouts


class Task(Protocol):
    """The interface between a task and the trainer; docs/adding_a_task.md explains each member."""

    name: str
    fingerprint: str  # changes with what decides the prompts besides the options
    vocab_size: int
    stop_ids: tuple[int, ...]
    prompt_length: int  # of the longest prompt, in tokens
    max_new_tokens: int
    num_test_prompts: int | None  # None: unlimited
    has_demonstrations: bool
    reward: str | None  # PACKAGE.MODULE:FUNCTION; None: `score` scores responses
    answer_limit: int | None  # in characters; None: no limit

    def prompts(self, split: str, start: int, count: int) -> Prompts:
        """Return prompts `start` to `start + count - 1` of `split`, "train", "test" or, if the task
        has it, a key of `held_out`, a dict of sizes."""

    def demonstrations(self, start: int, count: int) -> tuple[Prompts, Rollouts]:
        """Return training prompts by index and one correct response to each."""

    def score(self, prompts: Prompts, rollouts: Rollouts) -> Tensor:
        """Return rewards [S] float32 of N responses to each prompt."""

    def answer(self, response: str) -> str:
        """Return the answer in a response, "" if it has none."""

    def decode(self, tokens: list[int], with_special: bool = False) -> str:
        """Return tokens as text, as rewards read it, or as samples show it, with special tokens."""

    def tokenizer_files(self) -> dict[str, Any]:
        """Return JSON contents by file name, for checkpoints that `transformers` can load."""


def describe_task(task: Task) -> list[str]:
    """Return what the task's own `describe`, which is optional, says at the start of a run."""
    lines: list[str] = getattr(task, "describe", list)()
    return lines


def held_out_sets(task: Task, most: int, num_samples: int) -> dict[str, tuple[int, int]]:
    """Return the prompts, up to `most`, and the samples of each held-out set."""
    sizes: dict[str, int | None] = getattr(task, "held_out", {"test": task.num_test_prompts})
    samples: dict[str, int] = getattr(task, "set_samples", {})
    return {x: (min(n or most, most), samples.get(x, num_samples)) for x, n in sizes.items()}


@dataclass(frozen=True)
class ReferenceAnswer:
    """The reference answer to a prompt, as tokens that continue the reasoning of a response."""

    length: int | None  # of the reasoning, in tokens; None: it does not lead to an answer
    lead: list[int]  # tokens between a response that does not lead to an answer and the answer
    answer: list[int]  # at least one token


@runtime_checkable
class AnsweredTask(Task, Protocol):
    """A task that knows the reference answer to every prompt."""

    def reference_answers(self, prompts: Prompts, rollouts: Rollouts) -> list[ReferenceAnswer]:
        """Return the reference answer to each of the S responses, N to each prompt. Where the
        reasoning ends must not depend on the tokens that follow it: only then is the probability of
        the answer after it an unbiased estimate of that of a response that gives it."""
