"""Estimators that a plug-in registers: rows of the table, and functions of rewards."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.ops import estimator_tables as tables
from maxrl_fast.ops.custom_advantage import CustomAdvantage
from maxrl_fast.ops.estimators import ESTIMATORS, KERNEL_ROWS, Estimator, Size

REWARDS = torch.tensor([[0.0, 1.0, 0.0, 3.0], [1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
pytestmark = pytest.mark.usefixtures("estimators_as_before")
EXAMPLES = Path(__file__).parents[2] / "examples"


def centred(rewards):
    """r - mean."""
    return rewards - rewards.mean(-1, keepdim=True)


def test_a_function_works_with_every_layout_of_equal_groups():
    ops.register_estimator("mine", centred)
    assert ESTIMATORS["mine"].formula == "r - mean."
    expected = REWARDS - REWARDS.mean(-1, keepdim=True)
    assert torch.equal(ops.group_advantage(REWARDS, "mine"), expected)
    assert torch.equal(ops.group_advantage(REWARDS.view(3, 1, 4), "mine"), expected.view(3, 1, 4))
    offsets = torch.tensor([0, 4, 8, 12])
    assert torch.equal(ops.group_advantage(REWARDS.flatten(), "mine", offsets=offsets), expected.flatten())
    shuffle = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(3).repeat_interleave(4)[shuffle]
    actual = ops.group_advantage(REWARDS.flatten()[shuffle], "mine", group_ids=ids)
    assert torch.equal(actual, expected.flatten()[shuffle])
    assert ops.group_advantage(REWARDS.long(), "mine").dtype == torch.float32
    assert ops.group_advantage(REWARDS.bfloat16(), "mine").dtype == torch.bfloat16
    assert not ops.group_advantage(REWARDS.clone().requires_grad_(), "mine").requires_grad
    for bad in (torch.tensor([0, 4, 12]), torch.tensor([0, 3, 12]), torch.tensor([4, 8, 12])):
        with pytest.raises(ValueError, match="mine takes groups of equal size"):
            ops.group_advantage(REWARDS.flatten(), "mine", offsets=bad)
    with pytest.raises(ValueError, match="the weight of mine is not known"):
        ops.effective_weight("mine", 4, torch.tensor(0.5))


def test_a_function_gets_the_inputs_it_asks_for():
    seen = {}

    def asking(rewards, k, lengths, logprobs, valid, prompts):
        seen.update(k=k, lengths=lengths, logprobs=logprobs, valid=valid, prompts=prompts)
        return torch.where(valid, rewards, torch.nan).nan_to_num(nan=5.0)

    ops.register_estimator("asking", asking)
    valid = torch.tensor([[True, True, False, True]]).expand(3, 4)
    inputs = {"lengths": torch.arange(12).view(3, 4), "logprobs": -torch.rand(3, 4), "prompts": ["a", "b", "c"]}
    a = ops.group_advantage(REWARDS, "asking", k=3, valid=valid, **inputs)
    assert torch.equal(a, REWARDS * valid)  # 0 where not valid, whatever the function returned
    assert (seen["k"], seen["prompts"]) == (3, ["a", "b", "c"])
    assert all(torch.equal(seen[name], inputs[name]) for name in ("lengths", "logprobs"))
    ops.group_advantage(REWARDS, "asking", k=3, **inputs)
    assert seen["valid"].all()
    with pytest.raises(ValueError, match="asking needs lengths"):
        ops.group_advantage(REWARDS, "asking", k=3, logprobs=inputs["logprobs"], prompts=["a", "b", "c"])
    with pytest.raises(ValueError, match="asking needs k"):
        ops.group_advantage(REWARDS, "asking", **inputs)
    with pytest.raises(ValueError, match="rloo takes no prompts"):
        ops.group_advantage(REWARDS, "rloo", prompts=["a", "b", "c"])
    ops.register_estimator("mine", centred)
    with pytest.raises(ValueError, match="mine has no parameter valid, so all rewards must be there"):
        ops.group_advantage(REWARDS, "mine", valid=valid)


def test_a_row_is_computed_by_the_kernel():
    row = Estimator(
        formula="2 S_i - 2 S_-i",
        source="a test",
        weight="2 (1-p)^(k-1)",
        table=lambda n, k: 2 * tables.maxpo(n, k),
        value="rank",
        centred=True,
        size=Size("k"),
    )
    ops.register_estimator("twice", row)
    torch.testing.assert_close(ops.group_advantage(REWARDS, "twice", k=2), 2 * ops.maxpo_advantage(REWARDS, 2))
    assert ops.effective_weight("twice", 4, torch.tensor(0.5), k=2).item() == pytest.approx(1.0)
    with pytest.raises(ValueError, match="twice already"):
        ops.register_estimator("twice", row)
    ops.register_estimator("twice", Estimator(formula="r - mean", source="a test", weight="1", baseline="mean"), replace=True)
    assert torch.equal(ops.group_advantage(REWARDS, "twice"), ops.group_advantage(REWARDS, "reinforce"))


def test_rows_and_ops_are_pickled_by_name():
    """Ray and multiprocessing send functions, and what they refer to, to other processes."""
    ops.register_estimator("of_a_function", centred)
    tables_ = (ESTIMATORS, KERNEL_ROWS, ops.LOSSES)
    for table, copy in zip(tables_, pickle.loads(pickle.dumps(tables_)), strict=True):
        assert copy == table
    for name in ops.__all__:
        assert name in ("ESTIMATORS", "LOSSES") or pickle.loads(pickle.dumps(getattr(ops, name))) is getattr(ops, name)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda rewards: rewards.tolist(), "must return a tensor, got list"),
        (lambda rewards: rewards.mean(-1), r"must return a floating tensor of shape \(4, 4\) on cpu, got torch.float32 of"),
        (lambda rewards: rewards > 0, "must return a floating tensor"),
        (lambda rewards: rewards / rewards.mean(-1, keepdim=True), "finite advantages, got .* for group 2, on the example"),
        (lambda rewards, temperature: rewards, "may ask for k, lengths, .* got the parameter temperature"),
        (lambda: torch.zeros(4, 4), "must take rewards"),
        (lambda rewards: rewards.median("x"), "fails on a small example: "),
        (7, "must be a function of rewards, got int"),
    ],
)
def test_invalid_functions_are_refused(function, message):
    with pytest.raises(ValueError, match=message):
        ops.register_estimator("bad", function)
    with pytest.raises(ValueError, match=message):
        CustomAdvantage.of(function)
    assert "bad" not in ESTIMATORS


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"baseline": "median"}, "baseline of bad must be one of zero, mean, length_mean, got 'median'"),
        ({"value": "rank"}, "bad must have a table if and only if"),
        ({"baseline": "length_mean"}, "its inputs must have lengths"),
        ({"inputs": ("rewards",)}, "inputs of bad must be among"),
        ({"after": lambda advantages, inputs, options: advantages / 0}, "must be finite"),
        ({"value": "rank", "table": lambda n, k: torch.zeros(1 // (n - n))}, "bad fails on a small example: .*zero"),
    ],
)
def test_invalid_rows_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        ops.register_estimator("bad", Estimator(**{"formula": "r", "source": "a test", "weight": "1"} | changes))
    assert "bad" not in ESTIMATORS
    assert "bad" not in KERNEL_ROWS


def test_bad_and_existing_names_are_refused():
    for name in ("two words", "", 3):
        with pytest.raises(ValueError, match="must be a Python identifier"):
            ops.register_estimator(name, centred)
    with pytest.raises(ValueError, match="there is an estimator grpo already; replace=True takes its place"):
        ops.register_estimator("grpo", centred)


def test_the_example_prints_advantages():
    run = subprocess.run(
        [sys.executable, EXAMPLES / "custom_advantage.py"], capture_output=True, text=True, check=True, cwd=EXAMPLES.parent
    )
    lines = [line.split() for line in run.stdout.splitlines()]
    assert lines[0] == ["above_median", "0.00", "0.00", "1.00", "0.00", "4.00", *["0.00"] * 5]
    assert lines[1][0] == "short_and_right"
    assert float(lines[1][6]) > float(lines[1][10])  # both are correct, and the first one is shorter
