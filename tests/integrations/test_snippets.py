"""The code for slime on docs/integrations.md, run with what its source passes."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from maxrl_fast import ops

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
