"""Small problems of arithmetic, half of them in words, and the reward of an answer to one.

prepare.py writes them; `word_problems.toml` trains on them.
"""

import random
import re
import zlib
from collections.abc import Iterator
from typing import Any

NAMES = ["Tom", "Ann", "Ben", "Sue", "Max", "Lily", "Sam", "Eva"]
THINGS = ["apples", "pens", "coins", "cards", "books", "shells"]
SYSTEM = "Answer with the number only."
EXAMPLE = [
    {"role": "user", "content": "Kim has 2 bags of 4 nuts. How many nuts does Kim have?"},
    {"role": "assistant", "content": "8"},
]
KINDS = ("sum", "product", "boxes", "lost")
HARD = ("crates",)
HELD_OUT = 5  # the numbers of one problem of about this many are held out


def problem(kind: str, rng: random.Random) -> tuple[str, int, tuple[int, int]]:
    """Return a question, its answer and its two numbers."""
    name, things = rng.choice(NAMES), rng.choice(THINGS)
    few, more, many = rng.randint(2, 9), rng.randint(2, 9), rng.randint(10, 30)
    if kind == "sum":
        return f"What is {many} + {few}?", many + few, (many, few)
    if kind == "product":
        return f"What is {few} * {more}?", few * more, (few, more)
    if kind in ("boxes", "crates"):
        each = more if kind == "boxes" else many
        question = f"{name} has {few} boxes of {each} {things}. How many {things} does {name} have?"
        return question, few * each, (few, each)
    question = f"{name} had {many} {things} and lost {few}. How many {things} are left?"
    return question, many - few, (many, few)


def problems(split: str, count: int, kinds: tuple[str, ...] = KINDS) -> Iterator[dict[str, Any]]:
    """Yield `count` lines of `split`, "train" or "test": `prompt`, a conversation, and `answer`.

    A conversation begins with an answered problem, from which the model takes the form of an
    answer. Numbers of the test problems of a kind are those of no training problem of that kind.
    """
    rng, written = random.Random(split), 0
    while written < count:
        kind = kinds[written % len(kinds)]
        question, answer, numbers = problem(kind, rng)
        is_held_out = zlib.crc32(f"{kind} {numbers}".encode()) % HELD_OUT == 0
        if is_held_out == (split == "test"):
            prompt = [{"role": "system", "content": SYSTEM}, *EXAMPLE]
            yield {
                "prompt": [*prompt, {"role": "user", "content": question}],
                "answer": str(answer),
            }
            written += 1


def number(prompt: str, response: str, answer: str, **columns: Any) -> float:
    """Return 1 if the last number of a response is the answer, else 0."""
    found = re.findall(r"\d+", response)
    return float(bool(found) and found[-1] == answer)
