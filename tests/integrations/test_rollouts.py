"""Advantages of rollouts in any order; these tests need no other trainer."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.integrations.rollouts import advantages_and_returns, names, rollout_advantages
from tests.integrations import uneven


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("name", names())
def test_every_estimator_is_computed_within_shuffled_uneven_groups(name, binary):
    if uneven.needs_binary(name) and not binary:
        return
    batch, options = uneven.rollouts(binary=binary), uneven.options_of(name)
    actual, returns = advantages_and_returns(
        name, options, batch.token_level_rewards, batch.mask, batch.prompts
    )
    assert torch.equal(returns, actual)
    expected = batch.expected(name, **options)
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(actual, expected[:, None] * batch.mask, rtol=1e-5, atol=1e-6)


def test_a_rollout_without_a_reward_is_left_out_of_its_group():
    batch = uneven.rollouts()
    missing = torch.zeros(len(batch.rewards), dtype=torch.bool)
    missing[[0, 7, 9]] = True
    missing |= torch.tensor([key == "prompt 3" for key in batch.prompts])  # a whole group
    rewards = batch.rewards.masked_fill(missing, torch.nan)
    with pytest.warns(RuntimeWarning, match=f"{int(missing.sum())} of 27 rewards are NaN"):
        actual = rollout_advantages("maxrl", {}, rewards, batch.prompts, batch.lengths)
    kept = (~missing).nonzero()[:, 0].tolist()
    prompts = [batch.prompts[i] for i in kept]
    expected = uneven.one_group_at_a_time(
        "maxrl", batch.rewards[kept], prompts, batch.lengths[kept]
    )
    assert torch.equal(actual[kept], expected)
    assert not actual[missing].any()


def test_prompts_are_given_as_a_tensor_too():
    batch = uneven.rollouts()
    ids = torch.tensor([batch.prompts.index(key) for key in batch.prompts])
    expected = rollout_advantages("rloo", {}, batch.rewards, batch.prompts, batch.lengths)
    assert torch.equal(rollout_advantages("rloo", {}, batch.rewards, ids, batch.lengths), expected)


def test_missing_prompts_and_wrong_options_are_refused_with_a_sentence():
    rewards, lengths = torch.tensor([0.0, 1.0]), torch.tensor([1, 1])
    with pytest.raises(ValueError, match="rloo needs the prompt of each of 2 rollouts, got none"):
        rollout_advantages("rloo", {}, rewards, None, lengths)
    with pytest.raises(ValueError, match="the prompt of each of 2 rollouts, got 3"):
        rollout_advantages("rloo", {}, rewards, ["a", "a", "b"], lengths)
    with pytest.raises(ValueError, match="maxpo needs k"):
        rollout_advantages("maxpo", {}, rewards, ["a", "a"], lengths)
    with pytest.raises(ValueError, match="rloo does not use k"):
        rollout_advantages("rloo", {"k": 2}, rewards, ["a", "a"], lengths)


PAGE = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()


def snippet(first_line: str) -> str:
    (found,) = re.findall(rf"```python\n(# {re.escape(first_line)}.*?)```", PAGE, re.DOTALL)
    return found


def test_slime_gets_the_advantages_of_interleaved_groups() -> None:
    scope: dict[str, Any] = {}
    exec(snippet("maxrl_advantages.py"), scope)
    rewards = torch.tensor([[0.0, 1.0, 0.25, 0.5, 1.0, 0.0], [3.0, 1.0, 1.0, 2.0, 0.0, -1.0]])
    samples = [
        SimpleNamespace(group_index=7 + g, get_reward_value=lambda _, x=rewards[g, n]: x.item())
        for n in range(6)
        for g in range(2)
    ]
    raw, advantages = scope["maxpo"](SimpleNamespace(), samples)
    assert raw == rewards.T.flatten().tolist()
    wanted = ops.maxpo_advantage(rewards, k=4).T.flatten()
    assert wanted.abs().max() > 1
    torch.testing.assert_close(torch.tensor(advantages), wanted)
