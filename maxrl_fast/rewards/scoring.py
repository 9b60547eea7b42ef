"""How responses are scored: by the task itself, or by a Python function in worker processes."""

from collections import Counter
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from maxrl_fast.distributed.ranks import Ranks
from maxrl_fast.errors import RewardError
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.rewards.pool import Failure, RewardPool

KINDS = ("exception", "timeout", "crash", "memory", "invalid")


class ScoredTask(Protocol):
    """What scoring asks of a task."""

    def score(self, prompts: Prompts, rollouts: Rollouts) -> Tensor:
        """Return rewards [S] float32."""

    def answer(self, response: str) -> str:
        """Return the answer that a response gives; "" where it gives none."""

    def decode(self, tokens: list[int]) -> str:
        """Return a prompt or a response as text."""


class Scorer:
    """Gives every response its reward.

    Args:
        pool: runs the function that scores in place of the task; None: the task does.
        threshold: rewards above it become 1, others 0; None: they stay as they are.
        answer_limit: characters of an answer; responses with longer ones, or with none, are wrong without a call. None: all
            responses are scored.
        max_error_rate: largest fraction of the rewards of a call of `score`, or between two of `failures`, that may fail.
        beat: is called whenever a response has been scored.
    """

    def __init__(
        self,
        task: ScoredTask,
        pool: RewardPool | None,
        max_error_rate: float = 1.0,
        threshold: float | None = None,
        answer_limit: int | None = None,
    ):
        self._task, self._pool, self._max_error_rate, self._threshold = task, pool, max_error_rate, threshold
        self._answer_limit = answer_limit
        self.beat: Callable[[], None] = lambda: None
        self._num_scored, self._failures = 0, list[Failure]()  # since the last call of `failures`
        self._broken, self._gave_up = "", False
        self._answers = Counter[str]()  # since the last call of `take_answers`

    def score(self, prompts: Prompts, rollouts: Rollouts) -> Tensor:
        """Rewards [S] float32 of N responses to each prompt; NaN where the function failed."""
        rewards = self._task.score(prompts, rollouts) if self._pool is None else self._of_pool(self._pool, prompts, rollouts)
        if self._threshold is None:
            return rewards
        return torch.where(rewards.isnan(), rewards, (rewards > self._threshold).float())

    def _of_pool(self, pool: RewardPool, prompts: Prompts, rollouts: Rollouts) -> Tensor:
        num_rollouts = len(rollouts.lengths) // len(prompts)
        columns = prompts.columns or [{"prompt": self._task.decode(x)} for x in _split(prompts.tokens, prompts.lengths)]
        responses = [self._task.decode(tokens) for tokens in _split(rollouts.tokens, rollouts.lengths)]
        rewards = torch.zeros(len(responses))
        looked_at = [s for s, response in enumerate(responses) if self._is_worth_a_look(response)]
        calls = [{**columns[s // num_rollouts], "response": responses[s]} for s in looked_at]
        known = torch.full((len(calls),), float("nan"))
        try:
            scores = pool.score(calls, most_failures=int(self._max_error_rate * len(responses)), beat=self.beat)
        except RewardError as error:  # the other ranks must hear of it: `failures` raises it on all
            self._broken = str(error)
        else:
            self._num_scored += len(responses) - scores.num_left
            self._failures += scores.failures
            self._gave_up |= scores.num_left > 0
            if not scores.num_left:
                known = torch.tensor(scores.rewards, dtype=torch.float32)
                known[[failure.index for failure in scores.failures]] = float("nan")
        rewards[looked_at] = known
        return rewards.to(rollouts.tokens.device)

    def _is_worth_a_look(self, response: str) -> bool:
        """Whether the function is to see a response; without an answer, or with one that is too long, it is wrong."""
        if self._answer_limit is None:
            return True
        length = len(self._task.answer(response))
        self._answers.update({"all": 1, "missing": length == 0, "too_long": length > self._answer_limit})
        return 0 < length <= self._answer_limit

    def take_answers(self) -> Counter[str]:
        """How many responses there were on this rank since the last call: "all", and those whose answer was "missing" or
        "too_long"; empty where there is no limit."""
        counts, self._answers = self._answers, Counter()
        return counts

    def answer_rates(self, counts: Counter[str], ranks: Ranks) -> dict[str, float]:
        """The fractions of all ranks' responses that their counts come to, by metric; none where there is no limit."""
        if self._answer_limit is None:
            return {}
        total, *kinds = ranks.sum(torch.tensor([counts[kind] for kind in ("all", "missing", "too_long")])).tolist()
        return {f"answers_{kind}": count / max(total, 1) for kind, count in zip(("missing", "too_long"), kinds, strict=True)}

    def failures(self, ranks: Ranks, when: str) -> tuple[dict[str, int], str]:
        """How many rewards failed on all ranks since the last call, by kind, and a sentence on it with an example, empty where
        none did.

        Raises:
            RewardError: where they are more than max_error_rate of all, or the function cannot be run any more.
        """
        if self._pool is None:
            return {}, ""
        num_scored, failures = self._num_scored, self._failures
        self._num_scored, self._failures = 0, []
        found = Counter(failure.kind for failure in failures)
        counts = [num_scored, bool(self._broken), self._gave_up, *(found[kind] for kind in KINDS)]
        num_scored, is_broken, gave_up, *by_kind = ranks.sum(torch.tensor(counts)).tolist()
        counted = dict(zip(KINDS, by_kind, strict=True))
        num_failed = sum(by_kind)
        if is_broken:
            raise RewardError(f"{when}: {ranks.texts(self._broken)[0]}")
        if not num_failed:
            return counted, ""
        examples = ranks.texts(failures[0].message if failures else "")
        kinds = ", ".join(f"{kind} {count}" for kind, count in counted.items() if count)
        sentence = f"{when}: {num_failed} of {num_scored} rewards failed ({kinds}), such as: {examples[0]}"
        if gave_up or num_failed > self._max_error_rate * num_scored or num_failed == num_scored:
            raise RewardError(f"{sentence}; that is more than --max-reward-error-rate {self._max_error_rate:g} allows")
        return counted, sentence

    def dump_stacks(self) -> None:
        """Let the worker processes write where they are to standard error."""
        if self._pool is not None:
            self._pool.stacks()

    def close(self) -> None:
        """End the worker processes."""
        if self._pool is not None:
            self._pool.close()


def _split(tokens: Tensor, lengths: Tensor) -> list[list[int]]:
    """Packed sequences as lists."""
    return [part.tolist() for part in tokens.cpu().split(lengths.tolist())]
