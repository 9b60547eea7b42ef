"""Rewards without labels: whether a response gives the answer that most responses to its prompt give."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from maxrl_fast.rewards.pool import Scores
from maxrl_fast.rewards.weighted import RewardSource


class MajorityVote(RewardSource):
    """Reward 1 for the most frequent answer among the responses to a prompt, 0 for the others (SRT, Shafayat et al. 2025; TTRL,
    Zuo et al. 2025).

    Answers are compared as text. Responses without an answer do not vote and get 0; of equally frequent answers the one that
    was sampled first wins.

    Args:
        answer: returns the answer in a response, "" if it has none, such as Task.answer.
    """

    name = "majority vote"

    def __init__(self, answer: Callable[[str], str]) -> None:
        self._answer = answer

    def score(
        self,
        rows: Sequence[dict[str, Any]],
        max_failures: int | None = None,
        on_progress: Callable[[], None] = lambda: None,
        group: int = 1,
    ) -> Scores:
        """Return the rewards of rows; each `group` of them answers one prompt."""
        answers, rewards = [self._answer(row["response"]) for row in rows], list[float]()
        for start in range(0, len(answers), group):
            of_prompt = answers[start : start + group]
            votes = Counter(answer for answer in of_prompt if answer).most_common(1)  # of a tie, the first
            rewards += [float(bool(votes) and answer == votes[0][0]) for answer in of_prompt]
            on_progress()
        return Scores(rewards, [], components=[{} for _ in rows])

    def lines(self) -> list[str]:
        """Return what the start of a run says about it."""
        return ["reward: 1 for the answer that most responses to the prompt give; evaluation has labels"]

    def faster(self, factor: float) -> str:
        """Return "": it takes no time."""
        return ""
