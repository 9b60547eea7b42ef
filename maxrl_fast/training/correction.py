"""Corrections for a rollout engine whose probabilities differ from the trainer's: token weights,
before the first update.

The ratio w_t of a sampled token is its probability under the policy before the step's first update,
over its probability in the rollout engine. Both are of the full distribution at the sampling
temperature, also with top-p sampling, so w_t = 1 if engine and policy compute the same.

sequence_mask belongs to the loss (algorithms/losses/sequence_ratios.py), because it depends on the
policy of each update.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import check_number
from maxrl_fast.records import sequence_sums
from maxrl_fast.runtime.device import host_numbers
from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import Learner


@dataclass(frozen=True)
class CorrectionSpec:
    formula: str
    passes: str
    source: str
    options: Mapping[str, float] = field(default_factory=dict)
    has_cap: bool = False


DEFAULT_CAP = 2.0
_ONE_PASS = "one, before the first update"
CORRECTIONS: dict[str, CorrectionSpec] = {
    "none": CorrectionSpec("1", "-", "-"),
    "tis": CorrectionSpec(
        "min(w_t, cap)", _ONE_PASS, "truncated importance sampling, Yao et al. 2025", has_cap=True
    ),
    "tis_sequence": CorrectionSpec(
        "min(W, cap), W = prod_t w_t over the response",
        _ONE_PASS,
        "the same of responses, Liu, Li et al. 2025; verl, TRL",
        has_cap=True,
    ),
    "icepop": CorrectionSpec(
        "w_t if low <= w_t <= high, else 0",
        _ONE_PASS,
        "IcePop, Ring-1T, Ling Team 2025; with low = 0 masked importance sampling of tokens",
        {"low": 0.5, "high": 5.0},
    ),
    "mis": CorrectionSpec(
        "W if low <= W <= high, else 0",
        _ONE_PASS,
        "masked importance sampling of responses, Liu, Li et al. 2025; verl, TRL",
        {"low": 0.0, "high": 2.0},
    ),
    "sequence_mask": CorrectionSpec(
        "0 if A < 0 and mean_t log(pi_old / pi) > delta, else 1; pi: the policy of each update, "
        "pi_old: the engine",
        "one, before each update",
        "off-policy sequence masking, DeepSeek-V3.2 2025, eq. 9",
        {"delta": 0.5},
    ),
}


@dataclass(frozen=True)
class ImportanceWeights:
    """tis, tis_sequence, icepop and mis: a weight for every token, from the ratios w_t.

    The policy's log-probs before the first update become the old log-probs of the loss. The loss's
    ratio then measures only the policy's change within the step, and the weight the difference
    between engine and policy.

    Args:
        low, high: bounds of a weight. of_sequence: whether a token takes the product W of its
        response's ratios. masks: whether a weight outside the bounds becomes 0; otherwise a weight
        above `high` becomes `high`.
    """

    low: float
    high: float
    of_sequence: bool
    masks: bool

    def apply(self, batch: RolloutBatch, learner: Learner) -> RolloutBatch:
        """Return the batch with weights, the policy's log-probs as old log-probs, and metrics; all
        ranks must call this.

        The metrics are over all sampled tokens: the means `logprob_diff` and `importance_weight`,
        `importance_bounded` (fraction of weights that were capped or set to 0) and
        `importance_sample_size` ((sum of weights)^2 / sum of squares / number of tokens; 0 if all
        weights are 0).
        """
        logprobs = learner.passes.logprobs(learner.model, batch, batch.sequences)
        rollouts = batch.rollouts
        log_ratios = logprobs - rollouts.logprobs
        ratios = self._ratios(log_ratios, rollouts.lengths)
        is_beyond = (ratios > self.high) | (ratios < self.low)
        weights = torch.where(is_beyond, 0.0 if self.masks else self.high, ratios)
        sample_size = weights.mean().square() / weights.square().mean().clamp_min(
            torch.finfo(weights.dtype).tiny
        )
        metrics = host_numbers(
            {
                "logprob_diff": log_ratios.abs().mean(),
                "importance_weight": weights.mean(),
                "importance_bounded": is_beyond.float().mean(),
                "importance_sample_size": sample_size,
            }
        )
        weighted = dataclasses.replace(rollouts, logprobs=logprobs, importance_weights=weights)
        return dataclasses.replace(batch, rollouts=weighted, metrics=batch.metrics | metrics)

    def _ratios(self, log_ratios: Tensor, lengths: Tensor) -> Tensor:
        if not self.of_sequence:
            return log_ratios.exp()
        sums = sequence_sums(log_ratios.double(), lengths)
        return (
            sums.exp().to(log_ratios.dtype).repeat_interleave(lengths, output_size=len(log_ratios))
        )


def correction_numbers(
    name: str, cap: float | None, given: Mapping[str, float]
) -> dict[str, float]:
    """Return the numbers of a correction: low and high of its weights, or delta of sequence_mask.

    `cap` is the upper bound of tis and tis_sequence, `given` the values of --correction-options.

    Raises:
        ValueError: if the correction has no such option, or a number is out of range.
    """
    spec = CORRECTIONS[name]
    if unknown := [option for option in given if option not in spec.options]:
        wanted = f"must be among {', '.join(spec.options)}" if spec.options else "do not exist"
        raise ValueError(f"correction_options of {name} {wanted}, got {unknown[0]!r:.80}")
    if spec.has_cap:
        high = check_number(
            f"importance_cap of {name}", cap, "finite and above 0", lambda x: 0 < x < math.inf
        )
        return {"low": 0.0, "high": high}
    numbers = {}
    for option, default in spec.options.items():
        value = given.get(option, default)
        numbers[option] = check_number(
            f"{option} of {name}", value, "finite and at least 0", lambda x: 0 <= x < math.inf
        )
    if "low" in numbers and numbers["low"] >= numbers["high"]:
        raise ValueError(
            f"low of {name} must be below high, got {numbers['low']:g} and {numbers['high']:g}"
        )
    return numbers


def make_correction(name: str, numbers: Mapping[str, float]) -> ImportanceWeights | None:
    """Return a correction's token weighting; None if it has none before the first update."""
    if "low" not in numbers:
        return None
    of_sequence, masks = name in ("tis_sequence", "mis"), not CORRECTIONS[name].has_cap
    return ImportanceWeights(numbers["low"], numbers["high"], of_sequence, masks)
