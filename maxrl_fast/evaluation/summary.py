"""All estimates of one evaluation, for the screen, the plot and eval.json."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.evaluation.coverage import (
    Interval,
    majority_at_k,
    max_at_k,
    powers_of_two,
    samples_to_match,
    support_classes,
)
from maxrl_fast.evaluation.evaluator import Evaluation, is_correct
from maxrl_fast.evaluation.outcome import NUMBERS, Outcome
from maxrl_fast.evaluation.tally import SampleTally

# values [P] by k -> their means over prompts, with intervals
Resample = Callable[[dict[int, Tensor]], dict[int, Interval]]


def points(num_samples: int, ks: Sequence[int]) -> list[int]:
    """Return the k at which coverage has intervals."""
    return sorted({*ks, *powers_of_two(num_samples), num_samples})


def summary(
    own: Outcome,
    coverage: dict[int, Interval],
    evaluation: Evaluation,
    tally: SampleTally,
    ks: Sequence[int],
    resample: Resample,
    seed: int,
) -> dict[str, Any]:
    """Return the estimates of eval.json, with pass@k, max@k and maj@k at `ks`.

    Args:
        coverage: pass@k at `points`.
        seed: of the subsets for maj@k.
    """
    rewards = evaluation.rewards.double()
    # A failed reward counts as the lowest reward or 0: no better than a wrong response on any
    # scale.
    lowest = rewards.nan_to_num().min().clamp_max(0)
    filled = torch.where(rewards.isnan(), lowest, rewards)
    right, answers = is_correct(evaluation.rewards), torch.stack(tally.answers)
    majority = majority_at_k(answers, right, ks, seed)
    values = tally.diversities
    return {
        "num_prompts": len(values),
        "num_samples": own.num_samples,
        "pass_at_k": {k: coverage[k] for k in ks},
        "max_at_k": resample({k: max_at_k(filled, k) for k in ks}),
        "maj_at_k": resample(dict(zip(ks, majority.T, strict=True))),
        "coverage": coverage,
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
        },
        "baseline": None,
    }


def baseline_summary(
    own: Outcome,
    other: Outcome,
    coverage: dict[int, Interval],
    ks: Sequence[int],
    resample: Resample,
) -> dict[str, Any]:
    """Return the entry `baseline` of eval.json; coverage: pass@k of the baseline at `points`."""
    # one sample of any policy matches a pass@k of 0
    targets = {k: target for k in ks if (target := float(other.curve[k - 1])) > 0}
    matches = {k: samples_to_match(own.num_samples, own.num_correct, x) for k, x in targets.items()}
    return {
        "name": other.name,
        "pass_at_k": {k: coverage[k] for k in ks},
        "gain": resample(own.gains(other, ks)),
        "samples_to_match": {
            k: {"samples": match, "ratio": None if match is None else k / match}
            for k, match in matches.items()
        },
        "support": support_classes(own.num_correct, other.num_correct),
        "solved": other.solved,
        **other.numbers,
        "num_correct": other.num_correct.tolist(),
    }
