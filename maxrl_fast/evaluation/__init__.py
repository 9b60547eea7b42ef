"""Evaluation of a policy's samples. Shown is pass@k, or max@k, which is the same where all rewards
are 0 or 1."""

from collections.abc import Iterable, Mapping
from typing import Any

PASS, MAX = "pass_at_k", "max_at_k"  # keys of eval.jsonl and eval.json


def score_of(records: Iterable[Mapping[str, Any]]) -> str:
    """Return MAX if any of these evaluations has a reward other than 0 and 1, else PASS."""
    return PASS if all(x.get(MAX, x.get(PASS)) == x.get(PASS) for x in records) else MAX


def label_of(score: str, k: int | str) -> str:
    if score == PASS:
        return f"pass@{k}"
    return "mean reward" if int(k) == 1 else f"max@{k}"
