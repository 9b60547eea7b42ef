"""The steps around the kernel of the rows of estimators.py: gains and biases from options, and what comes before and after."""

from collections.abc import Mapping

import torch
from torch import Tensor

from maxrl_fast.ops.estimator import Inputs

_QUARTER = 0.25  # of the centred rewards, exactly: a difference of rewards may be too large for their dtype


def minus_one(_: Mapping[str, float]) -> tuple[float, float]:
    return 1.0, -1.0


def weighted_reinforce(options: Mapping[str, float]) -> tuple[float, float]:
    return 1 + options["correct_weight"], -1.0


def of_noisy_rewards(options: Mapping[str, float]) -> tuple[float, float]:
    return 1 / (1 - options["false_positive_rate"] - options["false_negative_rate"]), 0.0


def minus_correct(options: Mapping[str, float]) -> tuple[float, float]:
    return 1.0, options["false_negative_rate"] - 1


def times_beta(options: Mapping[str, float]) -> tuple[float, float]:
    return options["beta"], 0.0


def quarter(_: Mapping[str, float]) -> tuple[float, float]:
    return _QUARTER, 0.0


def standardised(advantages: Tensor, inputs: Inputs, options: Mapping[str, float]) -> Tensor:
    """Return quarters of advantages as advantages, divided by their standard deviation over the batch.

    With lengths, mean and deviation are over the tokens; without, over the rollouts, whose mean is 0 already.
    """
    valid, lengths = (None if x is None else x.view(1, -1) for x in (inputs.groups.valid, inputs.lengths))
    row, eps, ddof = "batch_std" if lengths is None else "batch_token_std", options["eps"] * _QUARTER, int(options["ddof"])
    kernel = torch.ops.maxrl_fast.group_advantage.default
    whitened = kernel(advantages.view(1, -1), None, None, valid, lengths, row, 0.0, eps, ddof, 1.0, 0.0, 0)
    return whitened.view_as(advantages)


def over_batch_std(inputs: Inputs, options: Mapping[str, float]) -> Tensor:
    """Return the rewards divided by their standard deviation over the batch, in float64: their differences are what counts."""
    rewards, valid = (None if x is None else x.view(1, -1) for x in (inputs.rewards, inputs.groups.valid))
    assert rewards is not None
    kernel = torch.ops.maxrl_fast.group_advantage.default
    eps, ddof = options["eps"], int(options["ddof"])
    scaled = kernel(rewards.double(), None, None, valid, None, "batch_std", 0.0, eps, ddof, 1.0, 0.0, 0)
    return scaled.view_as(inputs.rewards)


def minus_greedy(inputs: Inputs, _: Mapping[str, float]) -> Tensor:
    """Return the rewards minus the reward of the prompt's greedy response, in float64."""
    assert inputs.greedy_rewards is not None
    return inputs.rewards.double() - inputs.greedy_rewards.double()


def smoothed(advantages: Tensor, inputs: Inputs, options: Mapping[str, float]) -> Tensor:
    assert inputs.logprobs is not None
    direction = 1 - 2 * inputs.rewards.to(advantages.dtype)  # -1 where correct, 1 where wrong
    return advantages + options["tau"] * direction * inputs.logprobs.to(advantages.dtype)


def penalise_likely(inputs: Inputs, options: Mapping[str, float]) -> Tensor:
    assert inputs.logprobs is not None
    groups = inputs.groups
    kernel = torch.ops.maxrl_fast.group_advantage.default
    dtype = torch.promote_types(inputs.rewards.dtype, torch.float32)
    logprobs = inputs.logprobs.to(torch.promote_types(inputs.logprobs.dtype, dtype))  # the ranks have its dtype
    ranks = kernel(
        logprobs, groups.offsets, groups.order, groups.valid, None, "rank_fraction", 0.0, 0.0, 0, 1.0, 0.0, 0
    )  # rank/N
    return inputs.rewards.to(dtype) * (1 - options["penalty"] * ranks.to(dtype))


def unless_greedy_correct(advantages: Tensor, inputs: Inputs, options: Mapping[str, float]) -> Tensor:
    assert inputs.greedy_correct is not None
    return advantages.masked_fill(inputs.greedy_correct.bool(), 0.0)
