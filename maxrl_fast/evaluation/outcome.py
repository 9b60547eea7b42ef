"""The outcome of an evaluation, computed or read from eval.json."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.evaluation.coverage import coverage_curve, pass_at_k
from maxrl_fast.evaluation.evaluator import Evaluation
from maxrl_fast.evaluation.tally import SampleTally
from maxrl_fast.records import unpack
from maxrl_fast.runtime.files import check_regular
from maxrl_fast.tasks import Task

RESULTS = "eval.json"
RESULTS_BYTES = 1 << 28
# Options that must be equal for two evaluations to be compared prompt by prompt.
MATCHED = (
    *("eval_prompts", "samples", "split", "temperature", "top_k", "top_p", "min_p"),
    *("max_new_tokens", "task", "maze_size", "chain_length", "gym_config", "reward"),
    "reward_threshold",
)
# Options that must be equal too, and are settings only where they are given.
GIVEN = ("reward_weights", "task_args", "environment", "max_turns")
DIGEST = "prompts_sha256"  # the digest of the prompts must be equal too
NUMBERS = ("response_length_mean", "truncated", "reward_errors")  # of Evaluation.record


@dataclass(frozen=True)
class Outcome:
    name: str
    num_samples: int
    num_correct: Tensor  # [P] int64
    settings: dict[str, Any]  # MATCHED, GIVEN and DIGEST
    numbers: dict[str, float | None]  # NUMBERS and diversity
    measure: str  # name of the diversity measure

    @classmethod
    def of(
        cls, name: str, settings: dict[str, Any], evaluation: Evaluation, tally: SampleTally
    ) -> "Outcome":
        """The diversity is the mean over the prompts with at least two correct responses; None if
        there are none.
        """
        record, known = evaluation.record(), [x for x in tally.diversities if x is not None]
        numbers = {number: record[number] for number in NUMBERS}
        return cls(
            name=name,
            num_samples=settings["samples"],
            num_correct=evaluation.num_correct,
            settings=settings,
            numbers=numbers | {"diversity": sum(known) / len(known) if known else None},
            measure=tally.measure,
        )

    @cached_property
    def curve(self) -> Tensor:
        """pass@k for every k [n]."""
        return coverage_curve(self.num_samples, self.num_correct)

    @property
    def solved(self) -> float:
        """Fraction of prompts with at least one correct response."""
        return float((self.num_correct > 0).double().mean())

    def passes(self, ks: Sequence[int]) -> dict[int, Tensor]:
        """Return pass@k of every prompt [P], by k."""
        return {k: pass_at_k(self.num_samples, self.num_correct, k) for k in ks}

    def gains(self, other: "Outcome", ks: Sequence[int]) -> dict[int, Tensor]:
        """Return the difference to the other's pass@k of every prompt [P], by k."""
        theirs = other.passes(ks)
        return {k: own - theirs[k] for k, own in self.passes(ks).items()}


def contents_of(task: Task, split: str, num_prompts: int) -> list[str]:
    """Return the content of the first prompts of a split as JSON: all columns of a data set, or
    else the text.

    Tokens would not identify a prompt, because another model may have another tokenizer.
    """
    prompts = task.prompts(split, 0, num_prompts)
    parts = unpack(prompts.tokens, prompts.lengths)
    # The fingerprint tells apart tasks whose prompts have the same text, such as two chains.
    return [
        json.dumps(content)
        for content in prompts.columns
        or [[task.fingerprint, task.decode(tokens)] for tokens in parts]
    ]


def settings_of(options: dict[str, Any], contents: list[str]) -> dict[str, Any]:
    """Return what evaluations must share to be compared by prompt; contents: of contents_of."""
    given = [name for name in GIVEN if options[name] not in (None, "")]
    if options["environment"] is None:
        given.remove("max_turns")
    settings = {name: options[name] for name in (*MATCHED, *given)}
    # Custom tasks, rewards and environments by the name of their file, wherever it is.
    for name in {"task", "reward", "environment"} & settings.keys():
        value = settings[name]
        if isinstance(value, list):
            settings[name] = [Path(one).name for one in value]
        elif value is not None:
            settings[name] = Path(value).name
    return settings | {DIGEST: hashlib.sha256("\n".join(contents).encode()).hexdigest()}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the settings in which evaluations differ, such as "samples: 16 and 256"."""
    names = [
        name for name in {**one, **other} if name != DIGEST and one.get(name) != other.get(name)
    ]
    found = [f"{name}: {one.get(name)} and {other.get(name)}" for name in names]
    return found or ["the prompts themselves"] * (one[DIGEST] != other[DIGEST])


def read_outcome(folder: Path) -> Outcome:
    """Read the outcome from the folder of a finished evaluation."""
    path = folder / RESULTS
    try:
        check_regular(path, RESULTS_BYTES)
        fields = json.loads(path.read_bytes())
        settings, diversity = fields["settings"], fields["diversity"]
        counts, most = fields["per_prompt"]["num_correct"], settings["samples"]
        if not counts or not all(type(c) is int and 0 <= c <= most for c in counts):
            raise ValueError(f"num_correct must hold a count from 0 to {most} for each prompt")
        numbers = {name: float(fields[name]) for name in NUMBERS}
        mean = None if diversity["mean"] is None else float(diversity["mean"])
        return Outcome(
            name=folder.resolve().name,
            num_samples=most,
            num_correct=torch.tensor(counts),
            settings={name: settings[name] for name in (*MATCHED, DIGEST)}
            | {name: settings[name] for name in GIVEN if name in settings},
            numbers={**numbers, "diversity": mean},
            measure=str(diversity["of"]),
        )
    except KeyError as error:
        wanted = "must be the result of a finished evaluation"
        raise InputError(f"{path} {wanted}, but lacks {error}") from error
    except (OSError, ValueError, TypeError, RecursionError) as error:
        wanted = "must be the folder of a finished evaluation"
        raise InputError(f"{folder} {wanted}: {error}") from error
