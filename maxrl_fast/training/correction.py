"""Corrections for a rollout engine whose probabilities differ from the trainer's: token weights, of
the ratio w_t of a token's probability under the policy before the step's first update over that in
the engine, both of the full distribution at the sampling temperature. sequence_mask belongs to the
loss (algorithms/losses.py): it depends on the policy of each update."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor

from maxrl_fast.algorithms.method import Method, Registry
from maxrl_fast.algorithms.options import Help, Limit, NotNegative
from maxrl_fast.records import sequence_sums
from maxrl_fast.runtime.device import host_numbers
from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import Learner

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
_ONE_PASS = "one, before the first update"
_REGISTRY = Registry(Method)
CORRECTIONS, correction = _REGISTRY.methods, _REGISTRY.register


@correction("-")
def none() -> None:
    """1."""


@correction("truncated importance sampling, Yao et al. 2025", needs=_ONE_PASS)
def tis(w: Tensor, *, importance_cap: Cap = 2.0) -> Tensor:
    """min(w_t, importance_cap)."""
    return w.clamp_max(importance_cap)


@correction("the same of responses, Liu, Li et al. 2025; verl, TRL", needs=_ONE_PASS)
def tis_sequence(w: Tensor, *, importance_cap: Cap = 2.0) -> Tensor:
    """min(W, importance_cap), W = prod_t w_t over the response."""
    return w.clamp_max(importance_cap)


@correction(
    "IcePop, Ring-1T, Ling Team 2025; with low = 0 masked importance sampling of tokens",
    needs=_ONE_PASS,
)
def icepop(w: Tensor, *, low: Low = 0.5, high: High = 5.0) -> Tensor:
    """w_t if low <= w_t <= high, else 0."""
    return torch.where((w < low) | (w > high), 0.0, w)


@correction(
    "masked importance sampling of responses, Liu, Li et al. 2025; verl, TRL", needs=_ONE_PASS
)
def mis(w: Tensor, *, low: Low = 0.0, high: High = 2.0) -> Tensor:
    """W if low <= W <= high, else 0."""
    return torch.where((w < low) | (w > high), 0.0, w)


@correction(
    "off-policy sequence masking, DeepSeek-V3.2 2025, eq. 9", needs="one, before each update"
)
def sequence_mask(*, delta: NotNegative = 0.5) -> None:
    """0 if A < 0 and mean_t log(pi_old / pi) > delta, else 1; pi: the policy of each update,
    pi_old: the engine.
    """


def make_correction(
    name: str, numbers: Mapping[str, Any]
) -> Callable[[RolloutBatch, Learner], RolloutBatch] | None:
    """Return what gives a batch its weights before the first update, and metrics (docs/metrics.md)
    over all sampled tokens; None for one without. It makes the policy's log-probs the old ones of
    the loss, whose ratio then measures the policy's change within the step. All ranks must call
    it."""
    method = CORRECTIONS[name]
    if method.function in (none, sequence_mask):
        return None

    def weigh(batch: RolloutBatch, learner: Learner) -> RolloutBatch:
        rollouts = batch.rollouts
        logprobs = learner.passes.logprobs(learner.model, batch, batch.sequences)
        log_ratios = logprobs - rollouts.logprobs
        ratios = log_ratios.exp()
        if method.function in (tis_sequence, mis):
            sums = sequence_sums(log_ratios.double(), rollouts.lengths)
            ratios = rollouts.by_token(sums.exp().to(ratios.dtype))
        weights = method.function(ratios, **numbers)
        squares = weights.square().mean().clamp_min(torch.finfo(weights.dtype).tiny)
        metrics = host_numbers(
            {
                "logprob_diff": log_ratios.abs().mean(),
                "importance_weight": weights.mean(),
                "importance_bounded": (weights != ratios).float().mean(),
                "importance_sample_size": weights.mean().square() / squares,
            }
        )
        own: dict[str, Any] = {"importance_weights": weights, "sampler_weights": weights}
        weighted = replace(rollouts, logprobs=logprobs, **own)
        return replace(batch, rollouts=weighted, metrics=batch.metrics | metrics)

    return weigh
