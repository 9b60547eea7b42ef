"""Scores of reasoning-gym's data sets. They run in worker processes (rewards/pool.py), because many execute code or search."""

import json
from functools import lru_cache
from typing import Any

import reasoning_gym
from reasoning_gym import composite
from reasoning_gym.utils import extract_answer

from maxrl_fast.rewards.boxed import boxed


@lru_cache(64)
def dataset(name: str, config: str, seed: int) -> Any:
    """Return a data set of reasoning-gym.

    Args:
        config: JSON object of its options. For the data set composite, "datasets" is a list of objects, each with a name, a
            weight and a config.
    """
    options = json.loads(config)
    if name == "composite":
        options["datasets"] = [composite.DatasetSpec(**part) for part in options.get("datasets", [])]
    return reasoning_gym.create_dataset(name, seed=seed, **options)


@lru_cache(1024)
def entry(name: str, config: str, seed: int, index: int) -> dict[str, Any]:
    """Return the question, answer and metadata of entry `index`."""
    found: dict[str, Any] = dataset(name, config, seed)[index]
    return found


def answer(response: str) -> str:
    """Return the content of the last <answer>...</answer>, else of the last \\boxed{}, else the whole response."""
    tagged: str | None = extract_answer(response)
    return tagged if tagged is not None else boxed(response) or response.strip()


def score(prompt: Any, response: str, question: str, name: str, config: str, seed: int, index: int, **columns: Any) -> float:
    """Return the data set's own score, in [0, 1], of the response to question `index` of a data set."""
    expected = entry(name, config, seed, index)
    if expected["question"] != question:
        raise ValueError(f"reasoning-gym's {name} must repeat its question for seed {seed} and index {index}, got another one")
    return float(dataset(name, config, seed).score_answer(answer(response), expected))
