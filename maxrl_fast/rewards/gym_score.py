"""Scores of reasoning-gym's data sets. They run in worker processes (rewards/pool.py), as many run code or search."""

import json
from functools import lru_cache
from typing import Any

import reasoning_gym
from reasoning_gym.composite import DatasetSpec
from reasoning_gym.utils import extract_answer

from maxrl_fast.rewards.boxed import boxed


@lru_cache(64)
def dataset(name: str, config: str, seed: int) -> Any:
    """A data set of reasoning-gym, its questions made as they are asked for.

    Args:
        config: JSON of its options; "datasets" of the data set composite are objects of a name, a weight and a config.
    """
    options = json.loads(config)
    if name == "composite":
        options["datasets"] = [DatasetSpec(**part) for part in options.get("datasets", [])]
    return reasoning_gym.create_dataset(name, seed=seed, **options)


@lru_cache(1024)
def entry(name: str, config: str, seed: int, index: int) -> dict[str, Any]:
    """Question, answer and metadata."""
    made: dict[str, Any] = dataset(name, config, seed)[index]
    return made


def answer(response: str) -> str:
    """What stands in the last <answer>...</answer>, else in the last \\boxed{}, else the whole response."""
    given: str | None = extract_answer(response)
    return given if given is not None else boxed(response) or response.strip()


def score(prompt: Any, response: str, question: str, name: str, config: str, seed: int, index: int) -> float:
    """The data set's own score in [0, 1] of the response's answer to the question with these coordinates."""
    made = entry(name, config, seed, index)
    if made["question"] != question:
        raise ValueError(f"reasoning-gym's {name} makes another question than before of seed {seed} and index {index}")
    return float(dataset(name, config, seed).score_answer(answer(response), made))
