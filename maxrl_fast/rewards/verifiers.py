"""Built-in reward functions: boxed answers compared by math-verify, and the scores of
reasoning-gym's data sets.

They run in worker processes (`pool.py`), because comparing can take long, and many data sets
execute code or search.
"""

import importlib
import json
from functools import lru_cache
from typing import Any

OPEN = "\\boxed{"


def __getattr__(name: str) -> Any:
    """Import the library of a reward function where the function is loaded, before a call and its
    limits.
    """
    if name == "mathematics":
        importlib.import_module("math_verify")  # with sympy, it takes a second

        return _score_mathematics
    if name == "gym":
        importlib.import_module("reasoning_gym")

        return _score_gym
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def boxed(text: str) -> str:
    """Return the content of the last \\boxed{...}, stripped; "" if there is no box, or the last one
    is not closed.

    Braces in the content are balanced, and escaped braces are not counted. A box inside another box
    is part of its content.
    """
    found, start = "", text.find(OPEN)
    while start >= 0:
        i, depth = start + len(OPEN), 1
        while i < len(text) and depth:
            if text[i] == "\\":
                i += 1
            elif text[i] in "{}":
                depth += 1 if text[i] == "{" else -1
            i += 1
        found = "" if depth else text[start + len(OPEN) : i - 1].strip()
        start = text.find(OPEN, i)
    return found


def _score_mathematics(prompt: Any, response: str, answer: str, **line: Any) -> float:
    """Return 1 if the last \\boxed{} of the response equals the answer, as text or mathematically;
    else 0.
    """
    from math_verify import verify

    given = boxed(response)
    if not given:
        return 0.0
    if given == answer:
        return 1.0
    # The correct answer comes first: verify is not symmetric. math-verify's own time limits use
    # signals; the pool has its own.
    return float(verify(_parsed(answer), _parsed(given), timeout_seconds=None))


@lru_cache(4096)  # the rollouts of a group share the correct answer, and often wrong ones
def _parsed(answer: str) -> list[Any]:
    from math_verify import parse

    return parse(f"\\boxed{{{answer}}}", parsing_timeout=None)


@lru_cache(64)
def gym_dataset(name: str, config: str, seed: int) -> Any:
    """Return a data set of reasoning-gym.

    Args:
        config: JSON object of its options. For the data set composite, "datasets" is a list of
            objects, each with a name, a weight and a config.
    """
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
    """Return the question, answer and metadata of entry `index`."""
    found: dict[str, Any] = gym_dataset(name, config, seed)[index]
    return found


def gym_answer(response: str) -> str:
    """Return the content of the last <answer>...</answer>, else of the last \\boxed{}, else the
    whole response.
    """
    from reasoning_gym.utils import extract_answer

    tagged: str | None = extract_answer(response)
    return tagged if tagged is not None else boxed(response) or response.strip()


def _score_gym(
    prompt: Any,
    response: str,
    question: str,
    name: str,
    config: str,
    seed: int,
    index: int,
    **columns: Any,
) -> float:
    """Return the data set's own score, in [0, 1], of the response to question `index` of a data
    set.
    """
    expected = gym_entry(name, config, seed, index)
    if expected["question"] != question:
        raise ValueError(
            f"reasoning-gym's {name} must repeat its question for seed {seed} and index {index}, "
            "got another one"
        )
    return float(gym_dataset(name, config, seed).score_answer(gym_answer(response), expected))
