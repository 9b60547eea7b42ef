"""Batches in a checkpoint that are sampled and not learned from: waiting/0.safetensors and, for
all but tensors, waiting/0.json of the next step, 1 of the one after it, ..."""

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from maxrl_fast.errors import StorageError
from maxrl_fast.records import Inserted, Prompts, Ragged, Rollouts
from maxrl_fast.training.collect import RolloutBatch

FOLDER = "waiting"
RECORDS: dict[str, type[Ragged]] = {x.__name__: x for x in (Prompts, Rollouts, Inserted)}


def save_batches(folder: Path, batches: Sequence[RolloutBatch]) -> None:
    for i, batch in enumerate(batches):
        (folder / FOLDER).mkdir(exist_ok=True)
        tensors: dict[str, Tensor] = {}
        try:
            text = json.dumps(_values(batch, "", tensors))
        except TypeError as error:
            raise StorageError(
                f"--ahead keeps prompts in checkpoints, whose columns must be JSON values: {error}"
            ) from error
        save_file(tensors, folder / FOLDER / f"{i}.safetensors")
        (folder / FOLDER / f"{i}.json").write_text(text)


def load_batches(folder: Path, device: torch.device) -> list[RolloutBatch]:
    paths = sorted((folder / FOLDER).glob("*.json"), key=lambda path: int(path.stem))
    batches = []
    for path in paths:
        tensors = load_file(path.with_suffix(".safetensors"), device=str(device))
        batches.append(_record(RolloutBatch, json.loads(path.read_text()), "", tensors))
    return batches


def _values(record: Ragged, prefix: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return a record's fields other than tensors, which are added to `tensors`."""
    values: dict[str, Any] = {"": type(record).__name__}
    for name in (field.name for field in fields(record)):
        value = getattr(record, name)
        if isinstance(value, Tensor):
            # a copy: safetensors refuses tensors that share memory
            tensors[prefix + name] = torch.empty(value.shape, dtype=value.dtype).copy_(value)
        elif isinstance(value, Ragged):
            values[name] = _values(value, f"{prefix}{name}.", tensors)
        else:
            values[name] = value
    return values


def _record(
    kind: type[Any], values: dict[str, Any], prefix: str, tensors: dict[str, Tensor]
) -> Any:
    given: dict[str, Any] = {}
    for name in (field.name for field in fields(kind)):
        value = values.get(name)
        if prefix + name in tensors:
            value = tensors[prefix + name]
        elif isinstance(value, list):  # of a record's own values, each is a tuple
            value = tuple(value)
        elif isinstance(value, dict) and value.get("") in RECORDS:
            value = _record(RECORDS[value[""]], value, f"{prefix}{name}.", tensors)
        given[name] = value
    return kind(**given)
