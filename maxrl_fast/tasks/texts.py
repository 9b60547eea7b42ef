"""Responses as text: one turn, or an episode with what environments inserted."""

from maxrl_fast.records import Rollouts
from maxrl_fast.tasks import Task

OPEN, CLOSE = "⟦", "⟧"  # around what was inserted
_PLAIN = str.maketrans({OPEN: "[[", CLOSE: "]]"})  # what they are in the texts themselves


def response_texts(task: Task, rollouts: Rollouts, with_special: bool = False) -> list[str]:
    """Return each response as rewards and answers read it, with what was inserted."""
    whole = ([x for part in parts for x in part] for parts in rollouts.turns())
    return [task.decode(tokens, with_special) for tokens in whole]


def shown_text(task: Task, parts: list[list[int]]) -> str:
    """Return a response, one of Rollouts.turns, as samples show it: with special tokens, and what
    was inserted between marks."""
    texts = [task.decode(part, with_special=True) for part in parts]
    if len(texts) == 1:
        return texts[0]
    return "".join(
        f"{OPEN}{text.translate(_PLAIN)}{CLOSE}" if i % 2 else text.translate(_PLAIN)
        for i, text in enumerate(texts)
    )
