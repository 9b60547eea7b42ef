"""Corrections for a rollout engine whose probabilities differ from the trainer's: token weights,
before the first update.

The ratio w_t of a sampled token is its probability under the policy before the step's first update,
over its probability in the rollout engine. Both are of the full distribution at the sampling
temperature, also with top-p sampling, so w_t = 1 if engine and policy compute the same.

sequence_mask belongs to the loss (algorithms/losses/masks.py), because it depends on the
policy of each update.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from maxrl_fast.algorithms.method import Method, Registry
from maxrl_fast.algorithms.options import Help, Limit, NotNegative
from maxrl_fast.records import sequence_sums
from maxrl_fast.runtime.device import host_numbers
from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import Learner


@dataclass(frozen=True)
class ImportanceWeights:
    """tis, tis_sequence, icepop and mis: a weight for every token, from the ratios w_t.

    The policy's log-probs before the first update become the old log-probs of the loss, whose ratio
    then measures only the policy's change within the step.

    Args:
        low, high: bounds of a weight.
        of_sequence: whether a token takes the product W of its response's ratios.
        masks: whether a weight outside the bounds becomes 0; otherwise a weight above `high`
            becomes `high`.
    """

    low: float
    high: float
    of_sequence: bool
    masks: bool

    def apply(self, batch: RolloutBatch, learner: Learner) -> RolloutBatch:
        """Return the batch with weights, the policy's log-probs as old log-probs, and metrics; all
        ranks must call this.

        The metrics are over all sampled tokens; `importance_bounded` is the fraction of weights
        capped or set to 0, and `importance_sample_size` (sum of weights)^2 / sum of squares /
        number of tokens, 0 if all are 0.
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
        own: dict[str, Any] = {"importance_weights": weights, "sampler_weights": weights}
        weighted = dataclasses.replace(rollouts, logprobs=logprobs, **own)
        return dataclasses.replace(batch, rollouts=weighted, metrics=batch.metrics | metrics)

    def _ratios(self, log_ratios: Tensor, lengths: Tensor) -> Tensor:
        if not self.of_sequence:
            return log_ratios.exp()
        sums = sequence_sums(log_ratios.double(), lengths)
        return (
            sums.exp().to(log_ratios.dtype).repeat_interleave(lengths, output_size=len(log_ratios))
        )


Cap = Annotated[
    float,
    Limit("finite and above 0 (--correction none has no weights)", lambda x: 0 < x < math.inf),
    Help(
        "Largest importance weight, of a token for tis and of a response for tis_sequence. Given "
        "alone it switches on --correction tis."
    ),
]
Low = Annotated[NotNegative, Help("Smaller weights become 0.")]
High = Annotated[NotNegative, Help("Larger weights become 0.")]


@dataclass(frozen=True, kw_only=True, eq=False)
class Correction(Method):
    """Its function returns the weights before the first update, or None."""

    needs: str = "one, before the first update"  # forward passes

    noun: ClassVar[str] = "correction"

    @property
    def has_cap(self) -> bool:
        return "importance_cap" in self.options

    def resolve(self, given: Mapping[str, Any]) -> dict[str, Any]:
        numbers = super().resolve(given)
        if "low" in numbers and numbers["low"] >= numbers["high"]:
            raise ValueError(
                f"low of {self.name} must be below high, got {numbers['low']:g} and "
                f"{numbers['high']:g}"
            )
        return numbers


_REGISTRY = Registry(Correction)
CORRECTIONS, correction = _REGISTRY.methods, _REGISTRY.register


@correction("-", name="none", needs="-")
def no_correction() -> None:
    """1."""


@correction("truncated importance sampling, Yao et al. 2025")
def tis(*, importance_cap: Cap = 2.0) -> ImportanceWeights:
    """min(w_t, importance_cap)."""
    return ImportanceWeights(0.0, importance_cap, of_sequence=False, masks=False)


@correction("the same of responses, Liu, Li et al. 2025; verl, TRL")
def tis_sequence(*, importance_cap: Cap = 2.0) -> ImportanceWeights:
    """min(W, importance_cap), W = prod_t w_t over the response."""
    return ImportanceWeights(0.0, importance_cap, of_sequence=True, masks=False)


@correction("IcePop, Ring-1T, Ling Team 2025; with low = 0 masked importance sampling of tokens")
def icepop(*, low: Low = 0.5, high: High = 5.0) -> ImportanceWeights:
    """w_t if low <= w_t <= high, else 0."""
    return ImportanceWeights(low, high, of_sequence=False, masks=True)


@correction("masked importance sampling of responses, Liu, Li et al. 2025; verl, TRL")
def mis(*, low: Low = 0.0, high: High = 2.0) -> ImportanceWeights:
    """W if low <= W <= high, else 0."""
    return ImportanceWeights(low, high, of_sequence=True, masks=True)


@correction(
    "off-policy sequence masking, DeepSeek-V3.2 2025, eq. 9", needs="one, before each update"
)
def sequence_mask(*, delta: NotNegative = 0.5) -> None:
    """0 if A < 0 and mean_t log(pi_old / pi) > delta, else 1; pi: the policy of each update,
    pi_old: the engine.
    """
