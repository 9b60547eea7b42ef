"""Samples as records of samples.jsonl and rollouts.jsonl."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.errors import printable
from maxrl_fast.records import Samples, unpack
from maxrl_fast.rollout import check_finite
from maxrl_fast.tasks import Task, response_texts, shown_text

MOST_SAMPLES, MOST_OF_A_PROMPT = 32, 4  # kept by an evaluation during training
MOST_PROMPTS, PROMPT_LENGTH = 512, 2_000  # held-out prompts kept as text, and their characters
# Columns are repeated with every response, and a line of a data set may have a megabyte.
MOST_COLUMNS, COLUMN_LENGTH = 32, 1000  # columns, and characters of each as JSON
Components = Sequence[Mapping[str, float]]


def sample_records(
    task: Task,
    samples: Samples,
    rewards: Tensor,
    components: Components,
    chosen: Sequence[int] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield a JSON object for each response, or the chosen ones; a reward [S] of NaN becomes null.
    Texts show special tokens; long columns of the data set are cut."""
    prompts, rollouts, num = samples.prompts, samples.rollouts, samples.num_rollouts
    chosen = range(len(rollouts)) if chosen is None else chosen
    rollouts = rollouts.select(torch.tensor(chosen, device=rewards.device, dtype=torch.int64))
    tokens, ids = unpack(prompts.tokens, prompts.lengths), prompts.ids.tolist()
    scores, cut = rewards.tolist(), rollouts.truncated.tolist()

    @cache  # of each prompt once
    def of_prompt(g: int) -> tuple[str, dict[str, Any]]:
        line = prompts.columns[g] if prompts.columns else {}
        others = [name for name in line if name not in ("prompt", "answer")][:MOST_COLUMNS]
        columns = {name[:COLUMN_LENGTH]: _cut(line[name]) for name in others}
        own = {"answer": _cut(line.get("answer")), "columns": columns}
        return task.decode(tokens[g], with_special=True), own

    for s, turns, is_truncated in zip(chosen, rollouts.turns(), cut, strict=True):
        text, own = of_prompt(s // num)
        yield {
            "id": ids[s // num],
            "prompt": text,
            "response": shown_text(task, turns),
            "reward": finite(scores[s]),
            "truncated": is_truncated,
            **({"turns": (len(turns) + 1) // 2} if len(turns) > 1 else {}),
            "tokens": sum(map(len, turns[::2])),
            "components": {name: finite(value) for name, value in components[s].items()},
            **own,
        }


def prompt_records(task: Task, split: str, num_prompts: int) -> Iterator[dict[str, Any]]:
    prompts = task.prompts(split, 0, min(num_prompts, MOST_PROMPTS))
    parts = unpack(prompts.tokens, prompts.lengths)
    for i, tokens in zip(prompts.ids.tolist(), parts, strict=True):
        yield {"id": i, "prompt": task.decode(tokens, with_special=True)[:PROMPT_LENGTH]}


def finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _cut(value: Any) -> Any:
    """Return a JSON value, or the start of its text; other values as text."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        text = value = str(value)
    return value if len(text) <= COLUMN_LENGTH else f"{text[:COLUMN_LENGTH]}..."


def sample_lines(record: Mapping[str, Any], width: int) -> Iterator[str]:
    """Yield lines that show a sample: its reward, and the ends of its prompt and response, where
    the question and the answer stand."""
    reward = "failed" if record["reward"] is None else f"{record['reward']:g}"
    yield f"  sample    prompt {record['id']}, reward {reward}"
    for name in ("prompt", "response"):
        text = " ".join(record[name].split())[-max(width - 12, 20) :]
        # a text of a model may hold what a terminal would obey
        yield f"  {name:<10}{printable(text)}"


class KeptSamples:
    """Keeps the first 32 responses of an evaluation, at most 4 per prompt."""

    def __init__(self, task: Task, step: int):
        self._task, self._step = task, step
        self.records: list[dict[str, Any]] = []

    def take(self, samples: Samples, rewards: Tensor, components: Components) -> None:
        first = [s for s in range(len(rewards)) if s % samples.num_rollouts < MOST_OF_A_PROMPT]
        chosen = first[: MOST_SAMPLES - len(self.records)]
        for record in sample_records(self._task, samples, rewards, components, chosen):
            self.records.append({"step": self._step, **record})


class SampleTally:
    """Numbers the answers to each prompt, and writes each line of samples.jsonl."""

    def __init__(self, task: Task, write: Callable[[str], object]) -> None:
        self._task, self._write = task, write
        self.answers: list[list[int]] = []  # to each prompt, equal where they are; -1: none

    def take(self, samples: Samples, rewards: Tensor, components: Components) -> None:
        num_samples, answer = samples.num_rollouts, self._task.answer
        check_finite(samples.rollouts, samples.prompts, step=0)
        for record in sample_records(self._task, samples, rewards, components):
            self._write(json.dumps(record) + "\n")
        responses = response_texts(self._task, samples.rollouts)
        for start in range(0, len(responses), num_samples):
            numbers = {"": -1}  # by answer, counted from 0
            own = map(answer, responses[start : start + num_samples])
            self.answers.append([numbers.setdefault(text, len(numbers) - 1) for text in own])
