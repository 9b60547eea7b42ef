"""Samples of evaluations and rollouts of training: read with bounds, and packed for the page."""

import base64
import gzip
import json
import math
from collections.abc import Iterable
from typing import Any

TEXT_LENGTH = 20_000  # characters of one prompt or response
SAMPLE_BYTES = 1 << 24  # all texts of one file of one run
COLUMNS_LENGTH = 2_000  # characters of the data set's columns of one sample
ANSWER_LENGTH = 500


Number = int | float | None


def finite(value: Any) -> Number:
    """Return the number, or None if the value is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond the range of float64
        return None


def text_of(value: Any, most: int | None = None) -> tuple[str, int]:
    """Return a value as text of at most `most` characters, and the original length."""
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value)
    return text[: TEXT_LENGTH if most is None else most], len(text)


class Thinned:
    """Keeps every item while they fit, then every second, every fourth, and so on."""

    def __init__(self, most: int):
        self.every = 1
        self.seen = 0
        self.kept = list[tuple[int, Any]]()
        self._most = most
        self._size = 0

    def add(self, size: int, item: Any) -> None:
        if self.seen % self.every == 0:
            self.kept.append((size, item))
            self._size += size
            while self._size > self._most and len(self.kept) > 1:
                self.kept, self.every = self.kept[::2], self.every * 2
                self._size = sum(size for size, _ in self.kept)
        self.seen += 1

    @property
    def items(self) -> list[Any]:
        return [item for _, item in self.kept]


def read_samples(samples: Iterable[dict[str, Any]]) -> Thinned:
    """Return an even selection of what `sample_of` returned."""
    thinned = Thinned(SAMPLE_BYTES)
    for sample in samples:
        texts = ("prompt", "response", "answer", "columns")
        thinned.add(200 + 2 * sum(len(sample[key]) for key in texts), sample)
    return thinned


def sample_of(record: Any) -> dict[str, Any]:
    """Return what the page shows of a record of samples.jsonl or rollouts.jsonl."""
    prompt, prompt_length = text_of(record["prompt"])
    response, response_length = text_of(record["response"])
    parts = record.get("components", {})
    return {
        **{key: record.get(key) for key in ("step", "id", "tokens", "turns")},
        "prompt": prompt,
        "response": response,
        "reward": finite(record.get("reward")),
        "truncated": record.get("truncated", False),
        "left_out": prompt_length - len(prompt) + response_length - len(response),  # characters
        "advantage": finite(record.get("advantage")),
        "components": {name: finite(value) for name, value in parts.items()},
        "answer": text_of(record.get("answer"), ANSWER_LENGTH)[0],
        "columns": text_of(record.get("columns") or None, COLUMNS_LENGTH)[0],
    }


def in_columns(samples: list[dict[str, Any]], texts: dict[str, int]) -> dict[str, list[Any]]:
    """Return the samples by column, each prompt as its number in `texts`, which grows."""
    numbered = [
        sample | {"prompt": texts.setdefault(sample["prompt"], len(texts))} for sample in samples
    ]
    return {key: [sample[key] for sample in numbered] for key in numbered[0]} if numbered else {}


def packed(content: dict[str, Any]) -> str:
    """Return JSON as base64 of gzip, which the page unpacks when it is needed: texts of samples
    become about 20 times smaller. The letters of base64 have no meaning in HTML."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(text.encode(), compresslevel=9, mtime=0)).decode()
