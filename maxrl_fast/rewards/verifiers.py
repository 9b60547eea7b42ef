"""Built-in reward functions: boxed answers, programs, and the scores of reasoning-gym. They run in
worker processes, where a response that exceeds the time limit is wrong, not a failed reward."""

import importlib
import json
import re
from functools import lru_cache
from typing import Any

from maxrl_fast.rewards.mathematics import equal
from maxrl_fast.rewards.programs import run_tests

# What a box without braces holds: to the end of the formula or the line, or to the next word.
BARE = re.compile(
    r"(?![A-Za-z]{2})(?:(?![$\n]|\\[\])]|[.,;]?(?:\s+[A-Za-z]{2}|\s*$)).)+", re.MULTILINE
)


def __getattr__(name: str) -> Any:
    """Import a function's library, which takes seconds, before the limits of a call."""
    if name == "mathematics":
        for library in ("math_verify", "sympy.physics.units"):
            importlib.import_module(library)
        return _score_mathematics
    if name == "gym":
        importlib.import_module("reasoning_gym")
        return _score_gym
    if name == "code":
        return run_tests
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def boxed(text: str) -> str:
    """Return the content of the last \\boxed{...}, or \\fbox{...} if there is none, stripped; "" if
    there is no box, or the last one is not closed. A box inside another is part of its content. A
    box may have no braces, such as \\boxed 5."""
    found, end = "", 0
    name = "boxed" if "\\boxed" in text else "fbox"
    while box := re.compile(rf"\\{name}(?![A-Za-z])\s*(\{{)?").search(text, end):
        end = start = box.end()
        if not box[1]:
            if bare := BARE.match(text, start):
                found, end = bare[0].strip(), bare.end()
            continue
        depth = 1
        while end < len(text) and depth:
            if text[end] == "\\":
                end += 1
            elif text[end] in "{}":
                depth += 1 if text[end] == "{" else -1
            end += 1
        found = "" if depth else text[start : end - 1].strip()
    return found


def _score_mathematics(response: str, answer: str, given: str | None = None) -> float:
    """Return 1 if what the last box holds, which the trainer has found, equals the answer."""
    given = boxed(response) if given is None else given
    return float(bool(given) and equal(answer, given))


@lru_cache(64)
def gym_dataset(name: str, config: str, seed: int) -> Any:
    """Return a data set of reasoning-gym. `config` is a JSON object of its options; "datasets" of
    composite lists name, weight and config."""
    import reasoning_gym
    from reasoning_gym import composite

    options = json.loads(config)
    if name == "composite":
        options["datasets"] = [
            composite.DatasetSpec(**part) for part in options.get("datasets", [])
        ]
    return reasoning_gym.create_dataset(name, seed=seed, **options)


@lru_cache(1024)
def gym_entry(name: str, config: str, seed: int, index: int) -> dict[str, Any]:
    found: dict[str, Any] = gym_dataset(name, config, seed)[index]
    return found


def gym_answer(response: str) -> str:
    """Return the content of the last <answer>, else of the last box, else the whole response."""
    from reasoning_gym.utils import extract_answer

    tagged: str | None = extract_answer(response)
    return tagged if tagged is not None else boxed(response) or response.strip()


def _score_gym(
    response: str, question: str, name: str, config: str, seed: int, index: int
) -> float:
    expected = gym_entry(name, config, seed, index)
    if expected["question"] != question:
        raise ValueError(
            f"reasoning-gym's {name} must repeat its question for seed {seed} and index {index}, "
            "got another one"
        )
    return float(gym_dataset(name, config, seed).score_answer(gym_answer(response), expected))
