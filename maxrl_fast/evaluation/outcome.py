"""The outcome of an evaluation, computed or read from eval.json, and all its estimates."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.evaluation.coverage import (
    Interval,
    majority_at_k,
    max_at_k,
    max_curve,
    outcomes,
    powers_of_two,
    samples_to_match,
    support_classes,
)
from maxrl_fast.evaluation.diversity import Diversity
from maxrl_fast.evaluation.evaluator import Evaluation, is_correct
from maxrl_fast.evaluation.kept_samples import sample_records
from maxrl_fast.evaluation.scores import MAX, PASS
from maxrl_fast.records import Samples, unpack
from maxrl_fast.rollout import check_finite
from maxrl_fast.runtime.files import read_json
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.texts import response_texts

RESULTS = "eval.json"
RESULTS_BYTES = 1 << 28
# Options that must be equal for two evaluations to be compared prompt by prompt.
MATCHED = (
    *("eval_prompts", "samples", "split", "temperature", "top_k", "top_p", "min_p"),
    *("max_new_tokens", "task", "maze_size", "reward", "reward_threshold"),
    *("reward_weights", "environment", "max_turns"),
)
DIGEST = "prompts_sha256"  # the digest of the prompts must be equal too
NUMBERS = ("response_length_mean", "truncated", "reward_errors")  # of Evaluation.record


# values [P] by k -> their means over prompts, with intervals
Resample = Callable[[dict[int, Tensor]], dict[int, Interval]]


class SampleTally:
    """Numbers the answers to each prompt, measures the diversity of its correct responses, and
    passes each line of samples.jsonl to `write`."""

    def __init__(
        self, task: Task, diversity: Diversity, write: Callable[[str], object] | None = None
    ) -> None:
        self._task, self._diversity, self._write = task, diversity, write
        self.measure = diversity.name
        self.answers: list[Tensor] = []  # of each prompt [n] int32, equal where the answers are
        self.diversities: list[float | None] = []  # None: fewer than two correct responses

    def __call__(
        self, samples: Samples, rewards: Tensor, components: Sequence[dict[str, float]]
    ) -> None:
        rollouts, num_samples = samples.rollouts, samples.num_rollouts
        check_finite(rollouts, samples.prompts, step=0)
        if self._write:
            for record in sample_records(self._task, samples, rewards, components):
                self._write(json.dumps(record) + "\n")
        tokens = unpack(rollouts.tokens, rollouts.lengths)
        responses = response_texts(self._task, rollouts)
        right = is_correct(rewards).tolist()
        for start in range(0, len(responses), num_samples):
            own = range(start, start + num_samples)
            numbers = {"": -1}  # by answer, counted from 0; -1: no answer
            answers = [self._task.answer(responses[s]) for s in own]
            numbered = [numbers.setdefault(answer, len(numbers) - 1) for answer in answers]
            self.answers.append(torch.tensor(numbered, dtype=torch.int32))
            correct = [s for s in own if right[s]]
            chosen = [tokens[s] for s in correct], [responses[s] for s in correct]
            self.diversities.append(self._diversity(*chosen) if len(correct) >= 2 else None)


@dataclass(frozen=True)
class Outcome:
    name: str
    rewards: Tensor  # [P, n], as Evaluation.values
    settings: dict[str, Any]  # MATCHED and DIGEST
    numbers: dict[str, float | None]  # NUMBERS and diversity
    measure: str  # name of the diversity measure

    @classmethod
    def of(
        cls, name: str, settings: dict[str, Any], evaluation: Evaluation, tally: SampleTally
    ) -> "Outcome":
        """The diversity is the mean over prompts that have one; None if none has."""
        record, known = evaluation.record(), [x for x in tally.diversities if x is not None]
        numbers = {number: record[number] for number in NUMBERS}
        numbers["diversity"] = sum(known) / len(known) if known else None
        return cls(name, evaluation.values, settings, numbers, tally.measure)

    @property
    def num_samples(self) -> int:
        return self.rewards.shape[1]

    @property
    def num_correct(self) -> Tensor:  # [P] int64
        return is_correct(self.rewards).sum(1)

    @property
    def solved(self) -> float:
        """Fraction of prompts with at least one correct response."""
        return float((self.num_correct > 0).double().mean())

    def values(self, score: str) -> Tensor:
        """Return the numbers [P, n] whose max@k is the score."""
        return is_correct(self.rewards).float() if score == PASS else self.rewards

    def estimates(self, score: str, ks: Sequence[int]) -> dict[int, Tensor]:
        """Return the score of every prompt [P], by k."""
        return {k: max_at_k(self.values(score), k) for k in ks}

    def curve(self, score: str) -> Tensor:
        """Return the score's mean over prompts at every k [n]."""
        return max_curve(self.values(score))

    def gains(self, other: "Outcome", score: str, ks: Sequence[int]) -> dict[int, Tensor]:
        """Return the difference to the other's score of every prompt [P], by k."""
        theirs = other.estimates(score, ks)
        return {k: own - theirs[k] for k, own in self.estimates(score, ks).items()}


def shown_score(outcomes: Sequence[Outcome]) -> str:
    """Return PASS, or MAX if any reward is neither 0 nor 1."""
    return PASS if all(torch.equal(x.values(PASS), x.rewards) for x in outcomes) else MAX


def points(num_samples: int, ks: Sequence[int]) -> list[int]:
    """Return the k at which coverage has intervals."""
    return sorted({*ks, *powers_of_two(num_samples), num_samples})


def summary(
    own: Outcome,
    evaluation: Evaluation,
    tally: SampleTally,
    score: str,
    ks: Sequence[int],
    resample: Resample,
    seed: int,
) -> dict[str, Any]:
    """Return the estimates of eval.json, with pass@k, max@k and maj@k at `ks`; `seed` is of the
    subsets for maj@k."""
    right, answers = is_correct(evaluation.rewards), torch.stack(tally.answers)
    majority = majority_at_k(answers, right, ks, seed)
    values, rewards = tally.diversities, own.rewards.tolist()
    return {
        "num_prompts": len(values),
        "num_samples": own.num_samples,
        "score": score,
        **{name: resample(own.estimates(name, ks)) for name in (PASS, MAX)},
        "maj_at_k": resample(dict(zip(ks, majority.T, strict=True))),
        "coverage": resample(own.estimates(score, points(own.num_samples, ks))),
        "solved": own.solved,
        **{name: own.numbers[name] for name in NUMBERS},
        "num_tokens": evaluation.num_tokens,
        "diversity": {
            "of": own.measure,
            "mean": own.numbers["diversity"],
            "num_prompts": len(values) - values.count(None),
            "num_left_out": values.count(None),
        },
        "per_prompt": {
            "id": evaluation.ids.tolist(),
            "num_correct": own.num_correct.tolist(),
            "diversity": values,
            # a float32 has 9 digits
            "rewards": None
            if score == PASS
            else [[float(f"{x:.9g}") for x in row] for row in rewards],
        },
        "baseline": None,
    }


def baseline_summary(
    own: Outcome, other: Outcome, score: str, ks: Sequence[int], resample: Resample
) -> dict[str, Any]:
    """Return the entry `baseline` of eval.json."""
    curve, theirs = own.curve(score), other.curve(score)
    # one sample of any policy matches a pass@k of 0
    targets = {k: x for k in ks if (x := float(theirs[k - 1])) > 0 or score == MAX}
    matches = {k: samples_to_match(curve, x) for k, x in targets.items()}
    return {
        "name": other.name,
        **{name: resample(other.estimates(name, ks)) for name in (PASS, MAX)},
        "gain": resample(own.gains(other, score, ks)),
        "samples_to_match": {
            k: {"samples": match, "ratio": None if match is None else k / match}
            for k, match in matches.items()
        },
        "support": support_classes(own.num_correct, other.num_correct),
        "solved": other.solved,
        **other.numbers,
        "num_correct": other.num_correct.tolist(),
    }


def contents_of(task: Task, split: str, num_prompts: int) -> list[str]:
    """Return the content of the first prompts of a split as JSON: all columns of a data set, or
    else the text; tokens differ from model to model."""
    prompts = task.prompts(split, 0, num_prompts)
    parts = unpack(prompts.tokens, prompts.lengths)
    # the fingerprint tells apart tasks whose prompts have the same text, such as two chains
    texts = ([task.fingerprint, task.decode(tokens)] for tokens in parts)
    return [*map(json.dumps, prompts.columns or texts)]


def settings_of(options: dict[str, Any], contents: list[str]) -> dict[str, Any]:
    """Return what evaluations must share to be compared by prompt; contents: of contents_of."""
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
        fields = read_json(path, RESULTS_BYTES)
        settings, diversity = fields["settings"], fields["diversity"]
        counts, most = fields["per_prompt"]["num_correct"], settings["samples"]
        if not counts or not all(type(c) is int and 0 <= c <= most for c in counts):
            raise ValueError(f"num_correct must hold a count from 0 to {most} for each prompt")
        is_binary, rewards = fields["score"] == PASS, fields["per_prompt"]["rewards"]
        values = outcomes(most, torch.tensor(counts)) if is_binary else torch.tensor(rewards or [])
        if values.shape != (len(counts), most) or not values.isfinite().all():
            raise ValueError(f"rewards must hold {most} numbers for each prompt")
        numbers = {name: float(fields[name]) for name in NUMBERS}
        mean = None if diversity["mean"] is None else float(diversity["mean"])
        return Outcome(
            name=folder.resolve().name,
            rewards=values.float(),
            settings={name: settings[name] for name in (*MATCHED, DIGEST) if name in settings},
            numbers={**numbers, "diversity": mean},
            measure=str(diversity["of"]),
        )
    except KeyError as error:
        wanted = "must be the result of a finished evaluation"
        raise InputError(f"{path} {wanted}, but lacks {error}") from error
    except (OSError, ValueError, TypeError, RecursionError) as error:
        wanted = "must be the folder of a finished evaluation"
        raise InputError(f"{folder} {wanted}: {error}") from error
