"""The folders of evaluations: what is evaluated, where results go, and finished evaluations."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.errors import InputError, warn
from maxrl_fast.evaluation import PASS
from maxrl_fast.evaluation.coverage import max_at_k, outcomes
from maxrl_fast.evaluation.evaluator import is_correct
from maxrl_fast.model.checkpoint import check_model, directory_of, find_model
from maxrl_fast.records import unpack
from maxrl_fast.runtime.files import RunFolder, read_json
from maxrl_fast.tasks import Task

RESULTS = "eval.json"
RESULTS_BYTES = 1 << 28
# Options that must be equal for two evaluations to be compared prompt by prompt.
_MATCHED = """eval_prompts samples split temperature top_k top_p min_p max_new_tokens task maze_size
reward reward_threshold reward_weights environment max_turns"""
MATCHED = _MATCHED.split()
DIGEST = "prompts_sha256"  # the digest of the prompts must be equal too


@dataclass(frozen=True)
class Outcome:
    name: str
    content: dict[str, Any]  # of eval.json
    rewards: Tensor  # [P, n], as Evaluation.values

    @classmethod
    def read(cls, folder: Path) -> "Outcome":
        try:
            content = read_json(folder / RESULTS, RESULTS_BYTES)
            counts, rewards = (content["per_prompt"][name] for name in ("num_correct", "rewards"))
            most = content["settings"]["samples"]
            if not counts or not all(type(c) is int and 0 <= c <= most for c in counts):
                raise ValueError(f"num_correct must hold a count from 0 to {most} for each prompt")
            values = torch.tensor(rewards) if rewards else outcomes(most, torch.tensor(counts))
            if values.shape != (len(counts), most) or not values.isfinite().all():
                raise ValueError(f"rewards must hold {most} numbers for each prompt")
        except (LookupError, ValueError, TypeError, RecursionError) as error:
            why = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise InputError(
                f"{folder} must be the folder of a finished evaluation: {why}"
            ) from error
        return cls(str(folder), content, values.float())

    @property
    def num_samples(self) -> int:
        return self.rewards.shape[1]

    def estimates(self, score: str, ks: Sequence[int]) -> dict[int, Tensor]:
        """The score of every prompt [P], by k."""
        values = is_correct(self.rewards).float() if score == PASS else self.rewards
        return {k: max_at_k(values, k) for k in ks}


def settings_of(options: dict[str, Any], contents: Sequence[str]) -> dict[str, Any]:
    """Return what evaluations must share to be compared by prompt."""
    settings = {name: options[name] for name in MATCHED if name in options}
    if options["split"] != "train":
        settings["split"] = "test"
    # Custom tasks, rewards and environments by the name of their file, wherever it is.
    for name in {"task", "reward", "environment"} & settings.keys():
        value = settings[name]
        if isinstance(value, list):
            settings[name] = [Path(one).name for one in value]
        elif value is not None:
            settings[name] = Path(value).name
    return settings | {DIGEST: hashlib.sha256("\n".join(contents).encode()).hexdigest()}


def contents_of(task: Task, split: str, num_prompts: int) -> list[str]:
    """Return the first prompts of a split as JSON: all columns of a data set, or else the text, as
    tokens differ from model to model."""
    prompts = task.prompts(split, 0, num_prompts)
    parts = unpack(prompts.tokens, prompts.lengths)
    # the fingerprint tells apart tasks whose prompts have the same text, such as two chains
    texts = ([task.fingerprint, task.decode(tokens)] for tokens in parts)
    return [*map(json.dumps, prompts.columns or texts)]


def differences(one: dict[str, Any], other: dict[str, Any]) -> str:
    """Return the settings in which evaluations differ, such as "samples: 16 and 256"."""
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    found = [f"{name}: {one.get(name)} and {other.get(name)}" for name in names if name != DIGEST]
    return "; ".join(found) or "the prompts themselves" * bool(names)


@dataclass(frozen=True)
class Source:
    checkpoint: Path  # a Hugging Face directory, absolute, links followed
    name: str  # for tables and file names
    run: Path | None = None  # the folder of the run that it lies in


def find_source(name: str) -> Source:
    """Return that of a path or a name of the hub, which is downloaded."""
    wanted = "CHECKPOINT must be a Hugging Face checkpoint directory or the folder of a run"
    path = Path(name)
    if check_model(name, wanted) is not None:
        pinned = find_model(name, warn)
        short = pinned.rpartition("@")[0].rpartition("/")[2]
        return Source(directory_of(pinned, with_weights=True), short)
    if not (path / "config.json").exists():
        raise InputError(f"{wanted}, got {path}, which has no config.json")
    if RunFolder(path).is_run:
        newest = RunFolder(path).newest
        if newest is None:
            raise InputError(
                f"{path} is the folder of a run without a checkpoint: wait for its first"
            )
        path = newest
    path = path.resolve()
    run = next((folder for folder in list(path.parents)[:2] if RunFolder(folder).is_run), None)
    return Source(path, path.name if run is None else f"{run.name}-{path.name}", run)
