"""The steps around the kernel of the rows of estimators.py: gains and biases from options, and what comes before and after."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import can_look_at
from maxrl_fast.ops.estimator import Inputs
from maxrl_fast.ops.groups import Groups

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


def sum_of_normalised(inputs: Inputs, options: Mapping[str, float]) -> Tensor:
    """Return the weighted sum of the parts, each normalised within its groups by grpo, in float64.

    A part that does not apply to a rollout is left out of the statistics and of the sum.
    """
    parts = inputs.reward_parts
    assert parts is not None
    known = ~parts.isnan()
    if inputs.groups.valid is not None:
        known &= inputs.groups.valid
    groups, values = _repeated(inputs.groups, len(parts), known), parts.double().masked_fill(~known, 0.0)
    flat = values.view(groups.shape)
    kernel = torch.ops.maxrl_fast.group_advantage.default
    eps, ddof = options["eps"], int(options["ddof"])
    normalised = kernel(flat, groups.offsets, groups.order, groups.valid, None, "grpo", 0.0, eps, ddof, 1.0, 0.0, 0)
    return _weighted_sum(normalised.view(parts.shape), inputs.reward_weights)


def _repeated(groups: Groups, times: int, valid: Tensor) -> Groups:
    """Return the layout of several tensors [times, ...] of these groups, one behind the other."""
    num_groups, shape = times * groups.num_groups, (times * groups.shape[0], *groups.shape[1:])
    if groups.offsets is None:
        return Groups(shape, num_groups, None, None, valid.view(shape))
    size = groups.shape[0]
    starts = torch.arange(times, device=valid.device)[:, None] * size
    ends = torch.full((1,), times * size, device=valid.device)
    offsets = torch.cat([(starts + groups.offsets[:-1]).flatten(), ends])
    order = None if groups.order is None else (starts + groups.order).flatten()
    return Groups(shape, num_groups, offsets, order, valid.view(shape))


def _weighted_sum(parts: Tensor, weights: Sequence[float]) -> Tensor:
    """Return the sum of weights times parts [R, ...]; the weights stay on the host, so that no copy of them is waited for."""
    total = torch.zeros_like(parts[0])
    for part, weight in zip(parts, weights, strict=True):
        total = total + weight * part
    return total


_LEAST_WEIGHT, _LARGEST_WEIGHT, _STEEPNESS = 0.5, 2.0, 5.0  # of hero's groups


def stratified(inputs: Inputs, options: Mapping[str, float]) -> Tensor:
    """Return w x in float64: x the dense score within the range of its verifier's class, w the weight of its group.

    The verifier is the first part, the dense score the weighted sum of the others.
    """
    parts, groups = inputs.reward_parts, inputs.groups
    assert parts is not None
    if len(parts) < 2 or inputs.reward_weights[0] != 1:
        got = f"{len(parts)} with the weights {' '.join(f'{weight:g}' for weight in inputs.reward_weights)}"
        raise ValueError(f"hero takes a verifier of weight 1 and one or more scores as reward_parts, got {got}")
    verified, eps = parts[0].double(), options["eps"]
    is_binary = (verified == 0) | (verified == 1)
    if groups.valid is not None:
        is_binary |= ~groups.valid
    if can_look_at(verified) and not bool(is_binary.all()):
        raise ValueError(f"the verifier of hero must give 0 or 1, got {float(verified[~is_binary][0])}")
    score = _weighted_sum(parts[1:].double().nan_to_num(0.0, torch.inf, -torch.inf), inputs.reward_weights[1:])
    is_correct = verified == 1
    largest, smallest = (groups.extreme(score, side, is_correct.long(), 2) for side in (True, False))
    width = 2 * options["score_range"]
    share = torch.where(largest == smallest, 0.0, (score - smallest) / (largest - smallest + eps))
    ranged = is_correct.double() - width / 2 + width * share
    spread, of_group = _spread_of_groups(groups, score, int(options["ddof"]))
    mean_spread = (spread * of_group).sum() / of_group.sum()  # over the groups: 1/n, n times, is 1
    weight = _LEAST_WEIGHT + (_LARGEST_WEIGHT - _LEAST_WEIGHT) * torch.sigmoid(_STEEPNESS * (spread - mean_spread))
    rewards = (weight * ranged).masked_fill(~is_binary, torch.nan)
    return rewards if groups.valid is None else rewards.masked_fill(~groups.valid, 0.0)


def _spread_of_groups(groups: Groups, values: Tensor, ddof: int) -> tuple[Tensor, Tensor]:
    """Return, like the viewed rewards, the standard deviation of the values of each rollout's group, and 1/n of its n valid
    rollouts, 0 for rollouts that are not valid.

    The kernel gives r - mean and (r - mean)/std, whose ratio is the standard deviation where it is not 0.
    """
    kernel = torch.ops.maxrl_fast.group_advantage.default
    layout, one_bucket = (groups.offsets, groups.order, groups.valid, None), torch.zeros_like(values, dtype=torch.int64)
    centred = kernel(values, *layout, "reinforce", 0.0, 0.0, 0, 1.0, 0.0, 0)
    standardised = kernel(values, *layout, "grpo", 0.0, 0.0, ddof, 1.0, 0.0, 0)
    ratios = torch.where(standardised == 0, 0.0, centred / standardised)
    share = kernel(torch.ones_like(values), *layout, "size_share", 0.0, 0.0, 0, 1.0, 0.0, 0)
    spread = groups.extreme(ratios, True, one_bucket, 1)
    return torch.where(share == 0, 0.0, spread), share


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
