"""The outcome of an evaluation, computed or read from eval.json."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.evaluation.coverage import Interval, bootstrap, coverage_curve, pass_at_k
from maxrl_fast.records import unpack
from maxrl_fast.rewards.models import SCORE
from maxrl_fast.runtime.files import check_regular
from maxrl_fast.tasks import Task

RESULTS = "eval.json"
MOST_SAMPLES = 1 << 20  # per prompt; real evaluations have about a thousandth of this
RESULTS_BYTES = 1 << 28
# Options that must be equal for two evaluations to be compared prompt by prompt.
MATCHED = (
    *(
        "eval_prompts",
        "samples",
        "split",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "max_new_tokens",
    ),
    *("task", "maze_size", "chain_length", "gym_config", "reward", "reward_threshold"),
)
# Options that must be equal too, and are settings only where they are given.
GIVEN = ("reward_weights", "judge_score", "task_args", "environment", "max_turns")
DIGEST = "prompts_sha256"  # the digest of the prompts must be equal too


@dataclass(frozen=True)
class Resampling:
    resamples: int
    confidence: float
    seed: int

    def of_each(self, values: dict[int, Tensor]) -> dict[int, Interval]:
        """Return the means over prompts of values [P] by k, with intervals."""
        intervals = bootstrap(
            torch.stack(list(values.values()), 1), self.resamples, self.confidence, self.seed
        )
        return dict(zip(values, intervals, strict=True))


@dataclass(frozen=True)
class Outcome:
    name: str
    num_samples: int
    num_correct: Tensor  # [P] int64
    settings: dict[str, Any]  # MATCHED and DIGEST
    numbers: dict[str, float | None]  # response_length_mean, truncated, reward_errors, diversity
    measure: str = ""  # name of the diversity measure

    @cached_property
    def curve(self) -> Tensor:
        """pass@k for every k [n]."""
        return coverage_curve(self.num_samples, self.num_correct)

    @property
    def solved(self) -> float:
        """Fraction of prompts with at least one correct response."""
        return float((self.num_correct > 0).double().mean())

    def passes(self, ks: list[int]) -> dict[int, Tensor]:
        """Return pass@k of every prompt [P], by k."""
        return {k: pass_at_k(self.num_samples, self.num_correct, k) for k in ks}

    def gains(self, other: "Outcome", ks: list[int]) -> dict[int, Tensor]:
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
    # Custom tasks, rewards and environments by the name of their file, wherever it is.
    given = {name: options[name] for name in GIVEN if options[name] not in (None, SCORE, "")}
    names: dict[str, Any] = {
        name: Path(options[name]).name
        for name in ("task", "reward", "environment")
        if isinstance(options[name], str)
    }
    if isinstance(options["reward"], list):
        names["reward"] = [Path(reward).name for reward in options["reward"]]
    if options["environment"] is None:
        del given["max_turns"]
    digest = hashlib.sha256("\n".join(contents).encode()).hexdigest()
    return {name: options[name] for name in MATCHED} | given | names | {DIGEST: digest}


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the settings in which evaluations differ, such as "samples: 16 and 256"."""
    names = [
        name for name in {**one, **other} if name != DIGEST and one.get(name) != other.get(name)
    ]
    found = [f"{name}: {one.get(name)} and {other.get(name)}" for name in names]
    return found or ["the prompts themselves"] * (one[DIGEST] != other[DIGEST])


def is_finished(folder: Path) -> bool:
    return (folder / RESULTS).exists()


def read_outcome(folder: Path) -> Outcome:
    """Read the outcome from the folder of a finished evaluation.

    Raises:
        InputError: if eval.json cannot be read, or is not a result of an evaluation; it names the
        file.
    """
    path = folder / RESULTS
    try:
        check_regular(path, RESULTS_BYTES)
        fields = json.loads(path.read_bytes())
        outcome = Outcome(
            name=folder.resolve().name,
            num_samples=int(fields["num_samples"]),
            num_correct=torch.tensor(fields["per_prompt"]["num_correct"], dtype=torch.int64),
            settings={name: fields["settings"][name] for name in (*MATCHED, DIGEST)}
            | {name: fields["settings"][name] for name in GIVEN if name in fields["settings"]},
            numbers={
                name: fields[name]
                for name in ("response_length_mean", "truncated", "reward_errors")
            }
            | {"diversity": fields["diversity"]["mean"]},
            measure=str(fields["diversity"]["of"]),
        )
        for name, number in outcome.numbers.items():
            if number is not None and not isinstance(number, (int, float)):
                raise ValueError(f"{name} must be a number, got {number!r:.80}")
        if (
            not 1 <= outcome.num_samples <= MOST_SAMPLES
            or outcome.num_samples != outcome.settings["samples"]
        ):
            raise ValueError(
                f"num_samples must be 1 to {MOST_SAMPLES:,} and equal to samples, got "
                f"{outcome.num_samples:,}"
            )
        counts = outcome.num_correct
        if (
            counts.dim() != 1
            or not len(counts)
            or int(counts.min()) < 0
            or int(counts.max()) > outcome.num_samples
        ):
            raise ValueError(
                f"num_correct must hold a count from 0 to {outcome.num_samples} for each prompt"
            )
    except KeyError as error:
        raise InputError(
            f"{path} must be the result of a finished evaluation, but lacks {error}"
        ) from error
    # RuntimeError: RecursionError, torch's
    except (OSError, ValueError, TypeError, OverflowError, RuntimeError) as error:
        raise InputError(
            f"{folder} must be the folder of a finished evaluation: {error}"
        ) from error
    return outcome
