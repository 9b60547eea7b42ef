"""Read the training rollouts that a run kept."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def read_rollouts(out: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of rollouts.jsonl, if the run has it."""
    path = out / "rollouts.jsonl"
    if path.exists():
        with open(path) as file:
            yield from map(json.loads, file)
