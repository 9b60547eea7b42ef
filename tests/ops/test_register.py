"""Estimators that a plug-in registers: rows of the table, and functions of rewards."""

import pickle

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.algorithms.estimator import KBelowN
from maxrl_fast.algorithms.estimators import ESTIMATORS, Estimator, Group, Kernel, max_at_k
from maxrl_fast.algorithms.options import Positive

REWARDS = torch.tensor([[0.0, 1.0, 0.0, 3.0], [1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
pytestmark = pytest.mark.usefixtures("estimators_as_before")


def centred(rewards):
    """r - mean."""
    return rewards - rewards.mean(-1, keepdim=True)


def test_a_function_works_with_every_layout_of_equal_groups():
    ops.register_estimator("mine", centred)
    assert ESTIMATORS["mine"].formula == "r - mean"
    expected, flat = REWARDS - REWARDS.mean(-1, keepdim=True), REWARDS.flatten()
    assert torch.equal(ops.group_advantage(REWARDS.view(3, 1, 4), "mine"), expected.view(3, 1, 4))
    actual = ops.group_advantage(flat, "mine", offsets=torch.tensor([0, 4, 8, 12]))
    assert torch.equal(actual, expected.flatten())
    shuffle = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(3).repeat_interleave(4)[shuffle]
    actual = ops.group_advantage(flat[shuffle], "mine", group_ids=ids)
    assert torch.equal(actual, expected.flatten()[shuffle])
    assert ops.group_advantage(REWARDS.long(), "mine").dtype == torch.float32
    assert not ops.group_advantage(REWARDS.clone().requires_grad_(), "mine").requires_grad
    with pytest.raises(ValueError, match="mine takes groups of equal size"):
        ops.group_advantage(flat, "mine", offsets=torch.tensor([0, 3, 12]))
    with pytest.raises(ValueError, match="the weight of mine is not known"):
        ops.effective_weight("mine", 4, torch.tensor(0.5))


def test_a_function_gets_the_inputs_it_asks_for():
    seen = {}

    def asking(rewards, k, lengths, logprobs, valid, prompts):
        seen.update(k=k, lengths=lengths, logprobs=logprobs, valid=valid, prompts=prompts)
        return torch.where(valid, rewards, torch.nan).nan_to_num(nan=5.0)

    ops.register_estimator("asking", asking)
    valid = torch.tensor([[True, True, False, True]]).expand(3, 4)
    inputs = {"lengths": torch.arange(12).view(3, 4), "logprobs": -torch.rand(3, 4)}
    inputs |= {"prompts": ["a", "b", "c"]}
    a = ops.group_advantage(REWARDS, "asking", k=3, valid=valid, **inputs)
    assert torch.equal(a, REWARDS * valid)  # 0 where not valid, whatever the function returned
    assert (seen["k"], seen["prompts"]) == (3, ["a", "b", "c"])
    assert all(torch.equal(seen[name], inputs[name] * valid) for name in ("lengths", "logprobs"))
    ops.group_advantage(REWARDS, "asking", k=3, **inputs)
    assert seen["valid"].all()
    ops.register_estimator("mine", centred)
    for name, given, message in (
        ("asking", {"k": 3} | inputs | {"lengths": None}, "asking needs lengths"),
        ("asking", inputs, "asking needs k"),
        ("rloo", {"prompts": ["a", "b", "c"]}, "rloo does not use prompts"),
        ("mine", {"valid": valid}, "mine has no parameter valid, so all rewards must be there"),
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
    ops.register_estimator("scaled", scaled)
    row = ESTIMATORS["scaled"]
    assert (row.formula, row.needs) == ("tau maxpo + floor", "1 <= k <= N-1, lengths, floor")
    flat, offsets, lengths = REWARDS.flatten(), torch.tensor([0, 5, 12]), torch.arange(12) % 3
    actual = ops.group_advantage(
        flat, "scaled", k=2, floor=0.25, offsets=offsets, valid=flat < 3, lengths=lengths
    )
    maxpo = ops.maxpo_advantage(flat, 2, offsets=offsets, valid=flat < 3)
    torch.testing.assert_close(actual, (0.5 * maxpo + 0.25 * (lengths > 0)) * (flat < 3))
    for given, message in (
        ({"k": 2}, "scaled needs floor, a finite number"),
        ({"k": 2, "floor": 0.1, "tau": 0}, "tau of scaled must be a finite number above 0, got 0"),
        ({"k": 4, "floor": 0.1}, "scaled needs 1 <= k <= N-1 = 3 for N = 4 rollouts, got 4"),
    ):
        with pytest.raises(ValueError, match=message):
            ops.group_advantage(REWARDS, "scaled", lengths=lengths.view(3, 4), **given)


def double_maxpo(g: Group, *, k: KBelowN) -> torch.Tensor:
    """2 S_i - 2 S_-i."""
    return 2 * max_at_k.maxpo(g, k=k)


def test_a_row_with_a_table_is_computed_by_the_kernel():
    kernel = Kernel(lambda g, k: 2 * max_at_k._maxpo(g, k))
    expected = 2 * ops.maxpo_advantage(REWARDS, 2)
    row = Estimator.of(
        double_maxpo, source="a test", weight="2 (1-p)^(k-1)", kernel=kernel, centred=True
    )
    ops.register_estimator("twice", row)
    for estimator in ("twice", row):
        torch.testing.assert_close(ops.group_advantage(REWARDS, estimator, k=2), expected)
    assert ops.effective_weight("twice", 4, torch.tensor(0.5), k=2).item() == pytest.approx(1.0)
    ops.register_estimator("twice", centred, replace=True)
    assert torch.equal(ops.group_advantage(REWARDS, "twice"), centred(REWARDS))
    bad = Estimator.of(double_maxpo, kernel=Kernel(lambda g, k: torch.zeros(1 // (k - k))))
    with pytest.raises(ValueError, match=r"bad fails on a small example: .*zero"):
        ops.register_estimator("bad", bad)
    assert "bad" not in ESTIMATORS


def test_ops_are_pickled_by_name():
    """Ray and multiprocessing send functions to other processes."""
    for name in ops.__all__:
        assert name in ("ESTIMATORS", "LOSSES") or pickle.loads(
            pickle.dumps(getattr(ops, name))
        ) is getattr(ops, name)
