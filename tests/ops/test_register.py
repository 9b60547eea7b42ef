import pickle
from dataclasses import dataclass

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.algorithms.estimator import (
    ESTIMATORS,
    Estimator,
    Group,
    KBelowN,
    Kernel,
    find_estimator,
)
from maxrl_fast.algorithms.estimators import max_at_k
from maxrl_fast.algorithms.options import Positive

REWARDS = torch.tensor([[0.0, 1.0, 0.0, 3.0], [1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])


def centred(rewards):
    """r - mean."""
    return rewards - rewards.mean(-1, keepdim=True)


def test_a_function_works_with_every_layout_of_equal_groups():
    assert find_estimator(centred).formula == "r - mean"
    expected, flat = REWARDS - REWARDS.mean(-1, keepdim=True), REWARDS.flatten()
    assert torch.equal(ops.group_advantage(REWARDS.view(3, 1, 4), centred), expected.view(3, 1, 4))
    shuffle = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(3).repeat_interleave(4)[shuffle]
    actual = ops.group_advantage(flat[shuffle], centred, group_ids=ids)
    assert torch.equal(actual, expected.flatten()[shuffle])
    assert ops.group_advantage(REWARDS.long(), centred).dtype == torch.float32
    assert not ops.group_advantage(REWARDS.clone().requires_grad_(), centred).requires_grad
    with pytest.raises(ValueError, match="centred takes groups of equal size"):
        ops.group_advantage(flat, centred, group_ids=torch.arange(12) // 5)
    with pytest.raises(ValueError, match="the weight of centred is not known"):
        ops.effective_weight(centred, 4, torch.tensor(0.5))


def test_a_function_gets_the_inputs_it_asks_for():
    seen = {}

    def asking(rewards, k, lengths, logprobs, valid, prompts):
        seen.update(k=k, lengths=lengths, logprobs=logprobs, valid=valid, prompts=prompts)
        return torch.where(valid, rewards, torch.nan).nan_to_num(nan=5.0)

    valid = torch.tensor([[True, True, False, True]]).expand(3, 4)
    inputs = {"lengths": torch.arange(12).view(3, 4), "logprobs": -torch.rand(3, 4)}
    inputs |= {"prompts": ["a", "b", "c"]}
    a = ops.group_advantage(REWARDS, asking, k=3, valid=valid, **inputs)
    assert torch.equal(a, REWARDS * valid)  # 0 where not valid, whatever the function returned
    assert (seen["k"], seen["prompts"]) == (3, ["a", "b", "c"])
    assert all(torch.equal(seen[name], inputs[name] * valid) for name in ("lengths", "logprobs"))
    ops.group_advantage(REWARDS, asking, k=3, **inputs)
    assert seen["valid"].all()
    for name, given, message in (
        (asking, {"k": 3} | inputs | {"lengths": None}, "asking needs lengths"),
        (asking, inputs, "asking needs k"),
        ("rloo", {"prompts": ["a", "b", "c"]}, "rloo does not use prompts"),
        (centred, {"valid": valid}, "centred has no parameter valid, so all rewards must be there"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.group_advantage(REWARDS, name, **given)


def scaled(
    g: Group, lengths: torch.Tensor, *, k: KBelowN, tau: Positive = 0.5, floor: float
) -> torch.Tensor:
    """tau maxpo + floor.

    A note.
    """
    return tau * max_at_k.maxpo(g, k=k) + floor * (lengths > 0)


def test_a_function_of_a_group_is_like_those_that_are_built_in():
    row = find_estimator(scaled)
    assert (row.formula, row.needs) == ("tau maxpo + floor", "1 <= k <= N-1, lengths, floor")
    flat, lengths = REWARDS.flatten(), torch.arange(12) % 3
    ids = (torch.arange(12) > 4).long()
    actual = ops.group_advantage(
        flat, scaled, k=2, floor=0.25, group_ids=ids, valid=flat < 3, lengths=lengths
    )
    maxpo = ops.maxpo_advantage(flat, 2, group_ids=ids, valid=flat < 3)
    torch.testing.assert_close(actual, (0.5 * maxpo + 0.25 * (lengths > 0)) * (flat < 3))
    for given, message in (
        ({"k": 2}, "scaled needs floor, a finite number"),
        ({"k": 2, "floor": 0.1, "tau": 0}, "tau of scaled must be a finite number above 0, got 0"),
        ({"k": 4, "floor": 0.1}, "scaled needs 1 <= k <= N-1 = 3 for N = 4 rollouts, got 4"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.group_advantage(REWARDS, scaled, lengths=lengths.view(3, 4), **given)


def double_maxpo(g: Group, *, k: KBelowN) -> torch.Tensor:
    """2 S_i - 2 S_-i."""
    return 2 * max_at_k.maxpo(g, k=k)


@pytest.mark.usefixtures("estimators_as_before")
def test_a_row_with_a_table_is_computed_by_the_kernel():
    kernel = Kernel(lambda g, k: 2 * max_at_k._maxpo(g, k))
    expected = 2 * ops.maxpo_advantage(REWARDS, 2)
    row = Estimator.of(
        double_maxpo, source="a test", weight="2 (1-p)^(k-1)", kernel=kernel, centred=True
    )
    ESTIMATORS["twice"] = row
    for estimator in ("twice", row):
        torch.testing.assert_close(ops.group_advantage(REWARDS, estimator, k=2), expected)
    assert ops.effective_weight("twice", 4, torch.tensor(0.5), k=2).item() == pytest.approx(1.0)


def test_ops_are_pickled_by_name():
    for name in ops.__all__:
        assert name in ("ESTIMATORS", "LOSSES") or pickle.loads(
            pickle.dumps(getattr(ops, name))
        ) is getattr(ops, name)


@dataclass
class Scaled:
    scale: float

    def __call__(self, rewards):
        return self.scale * (rewards - rewards.mean(1, keepdim=True))


def test_an_object_that_cannot_be_a_key_is_a_function_too():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 3.0]])
    for scale in (2.0, -1.0):  # not taken for the one before
        found = ops.group_advantage(rewards, Scaled(scale))
        assert torch.equal(found, scale * torch.tensor([[0.0, -1.0, -1.0, 2.0]]))
