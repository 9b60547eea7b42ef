"""Corrections for a rollout engine whose probabilities are not the trainer's: weights of tokens, or a mask of responses.

The ratio w_t of a sampled token is its probability under the policy before the step's first update over its probability in the
rollout engine. Both are of the whole distribution at the sampling temperature, so that every ratio is 1 where engine and policy
compute the same, also with top-p sampling.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import check_number
from maxrl_fast.records import Samples, gather_sequences, sequence_sums
from maxrl_fast.training.learner import Learner
from maxrl_fast.transfers import to_device, to_host

AnySamples = TypeVar("AnySamples", bound=Samples)


@dataclass(frozen=True)
class CorrectionSpec:
    """What a correction is.

    Args:
        formula: of the factor of a token's advantage.
        passes: the forward passes that it adds to a step.
        source: the publication.
        options: its numbers of --correction-options, with their defaults.
        has_cap: whether --importance-cap is its upper bound.
    """

    formula: str
    passes: str
    source: str
    options: Mapping[str, float] = field(default_factory=dict)
    has_cap: bool = False


DEFAULT_CAP = 2.0
_ONE_PASS = "one, before the first update"
CORRECTIONS: dict[str, CorrectionSpec] = {
    "none": CorrectionSpec("1", "-", "-"),
    "tis": CorrectionSpec("min(w_t, cap)", _ONE_PASS, "truncated importance sampling, Yao et al. 2025", has_cap=True),
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
        "0 if A < 0 and mean_t log(pi_old / pi) > delta, else 1; pi: the policy of each update, pi_old: the engine",
        "one of the responses with A < 0, before each update",
        "off-policy sequence masking, DeepSeek-V3.2 2025, eq. 9",
        {"delta": 0.5},
    ),
}


class Correction(Protocol):
    """What the trainer asks of a correction, in this order in every step."""

    def weigh(self, samples: AnySamples, learner: Learner) -> tuple[AnySamples, dict[str, float]]:
        """Return the samples with weights of their tokens, before the first update, and metrics of them."""

    def mask(self, advantages: Tensor, samples: Samples, sequences: Tensor, learner: Learner) -> Tensor:
        """Return the advantages [S] for an update on `sequences`, with 0 for responses that it must not learn from."""

    def end(self) -> dict[str, float]:
        """Return metrics of the masks since the last call."""


class NoCorrection:
    """The engine's log-probs are taken for the policy's."""

    def weigh(self, samples: AnySamples, learner: Learner) -> tuple[AnySamples, dict[str, float]]:
        return samples, {}

    def mask(self, advantages: Tensor, samples: Samples, sequences: Tensor, learner: Learner) -> Tensor:
        return advantages

    def end(self) -> dict[str, float]:
        return {}


NO_CORRECTION = NoCorrection()


@dataclass(frozen=True)
class ImportanceWeights(NoCorrection):
    """tis, tis_sequence, icepop and mis: a weight for every token, from the ratios w_t.

    The policy's own log-probs before the first update also become the old log-probs of the loss: its ratio is then the policy's
    change within the step, and the weight is the difference between engine and policy.

    Args:
        low, high: bounds of a weight.
        of_sequence: whether a token has the product W of its response's ratios instead of its own.
        masks: whether a weight outside of the bounds becomes 0; otherwise one above `high` becomes `high`.
    """

    low: float
    high: float
    of_sequence: bool
    masks: bool

    def weigh(self, samples: AnySamples, learner: Learner) -> tuple[AnySamples, dict[str, float]]:
        """Return the samples with weights, and the policy's log-probs as the old ones.

        The metrics are means over all sampled tokens: `logprob_diff`, `importance_weight`, `importance_bounded` (fraction of
        weights that were capped or became 0) and `importance_sample_size` ((sum of weights)^2 / sum of squares, over the
        number of tokens; 0 where all weights are).
        """
        logprobs, rollouts = learner.logprobs(learner.model, samples, samples.sequences), samples.rollouts
        log_ratios = logprobs - rollouts.logprobs
        ratios = self._ratios(log_ratios, rollouts.lengths)
        is_beyond = (ratios > self.high) | (ratios < self.low)
        weights = torch.where(is_beyond, 0.0 if self.masks else self.high, ratios)
        sample_size = weights.mean().square() / weights.square().mean().clamp_min(torch.finfo(weights.dtype).tiny)
        numbers = to_host(log_ratios.abs().mean(), weights.mean(), is_beyond.float().mean(), sample_size)
        names = ("logprob_diff", "importance_weight", "importance_bounded", "importance_sample_size")
        weighted = dataclasses.replace(rollouts, logprobs=logprobs, importance_weights=weights)
        metrics = {name: float(number) for name, number in zip(names, numbers, strict=True)}
        return dataclasses.replace(samples, rollouts=weighted), metrics

    def _ratios(self, log_ratios: Tensor, lengths: Tensor) -> Tensor:
        """Return w_t or W for each token [T]."""
        if not self.of_sequence:
            return log_ratios.exp()
        sums = sequence_sums(log_ratios.double(), lengths)
        return sums.exp().to(log_ratios.dtype).repeat_interleave(lengths, output_size=len(log_ratios))


@dataclass
class SequenceMask(NoCorrection):
    """DeepSeek-V3.2's off-policy sequence masking: responses that the policy has moved away from do not push it further.

    A response has the advantage 0 where A < 0 and the mean over its tokens of log(pi_old / pi) is above delta. pi is the policy
    that the update begins with, so that with several updates in a step the mask of each is its own; pi_old is the rollout
    engine. The loss's denominator still counts the response, and its divergence and entropy terms stay.

    Args:
        delta: in nats per token.
    """

    delta: float
    _masked: list[Tensor] = field(default_factory=list, repr=False, compare=False)
    _num_sequences: int = field(default=0, repr=False, compare=False)

    def mask(self, advantages: Tensor, samples: Samples, sequences: Tensor, learner: Learner) -> Tensor:
        self._num_sequences += len(sequences)
        advantages = learner.ranks.from_first(advantages.clone())  # all ranks must compute the same responses
        (on_host,), sequences, rollouts = to_host(advantages), sequences.cpu(), samples.rollouts
        negative = sequences[on_host[sequences] < 0]
        if not len(negative):
            return advantages
        logprobs = learner.logprobs(learner.model, samples, negative)
        index, cu_seqlens, chosen = to_device(
            advantages.device, *gather_sequences(rollouts.cu_seqlens.cpu(), negative), negative
        )
        lengths = cu_seqlens.diff()
        is_far = sequence_sums((rollouts.logprobs[index] - logprobs).double(), lengths) > self.delta * lengths.double()
        self._masked.append(is_far.sum())
        return advantages.index_put((chosen,), torch.where(is_far, 0.0, advantages[chosen]))

    def end(self) -> dict[str, float]:
        """Return `frac_sequences_masked`, of the responses in all updates of the step."""
        masked, number = self._masked, self._num_sequences
        self._masked, self._num_sequences = [], 0
        return {"frac_sequences_masked": sum(int(x) for x in to_host(*masked)) / max(number, 1)}


def make_correction(name: str, cap: float | None, given: Mapping[str, float]) -> Correction:
    """Return the correction of this name.

    Args:
        cap: the upper bound of tis and tis_sequence, None for the others.
        given: numbers of --correction-options; the others have their defaults.

    Raises:
        ValueError: where an option is not one of the correction's, or a number is out of its range.
    """
    spec = CORRECTIONS[name]
    if unknown := [option for option in given if option not in spec.options]:
        wanted = f"must be among {', '.join(spec.options)}" if spec.options else "are not taken"
        raise ValueError(f"correction_options of {name} {wanted}, got {unknown[0]!r:.80}")
    if name == "none":
        return NO_CORRECTION
    if spec.has_cap:
        high = check_number(f"importance_cap of {name}", cap, "finite and above 0", lambda x: 0 < x < math.inf)
        return ImportanceWeights(0.0, high, of_sequence=name == "tis_sequence", masks=False)
    numbers = {}
    for option, default in spec.options.items():
        value = given.get(option, default)
        numbers[option] = check_number(f"{option} of {name}", value, "finite and at least 0", lambda x: 0 <= x < math.inf)
    if name == "sequence_mask":
        return SequenceMask(numbers["delta"])
    low, high = numbers["low"], numbers["high"]
    if low >= high:
        raise ValueError(f"low of {name} must be below high, got {low:g} and {high:g}")
    return ImportanceWeights(low, high, of_sequence=name == "mis", masks=True)
