"""Tasks: where prompts come from and what a response is worth."""

from typing import Any, Protocol

from torch import Tensor

from maxrl_fast.records import Prompts, Rollouts


class Task(Protocol):
    """What the trainer asks of a task."""

    name: str  # for the report at the start of a run
    fingerprint: str  # of what the prompts come from beside the options, such as files
    vocab_size: int
    stop_ids: tuple[int, ...]  # a response ends with the first of these
    prompt_length: int  # the longest prompt, in tokens
    max_new_tokens: int  # the default limit of a response, in tokens
    num_test_prompts: int | None  # held out; None: as many as one wants
    has_demonstrations: bool
    reward: str | None  # PACKAGE.MODULE:FUNCTION that scores responses in worker processes; None: `score` does
    answer_limit: int | None  # characters of an answer; longer ones are wrong without being looked at

    def prompts(self, split: str, start: int, count: int) -> Prompts:
        """Prompts by index; split is "train" or "test"."""

    def demonstrations(self, start: int, count: int) -> tuple[Prompts, Rollouts]:
        """Training prompts by index and one right response to each, for supervised learning."""

    def score(self, prompts: Prompts, rollouts: Rollouts) -> Tensor:
        """Rewards [S] float32 of N responses to each prompt."""

    def answer(self, response: str) -> str:
        """What a response answers, for votes, where equal answers are equal text; "" where it does not."""

    def decode(self, tokens: list[int]) -> str:
        """A prompt or a response as text."""

    def tokenizer_files(self) -> dict[str, Any]:
        """JSON contents by file name, for checkpoints that `transformers` can load."""
