"""The code for slime and prime-rl on docs/integrations.md, run with what their sources pass."""

import asyncio
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, Literal

import pytest
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


def test_prime_rl_gets_the_advantages_of_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    class Algorithm:
        def __init__(self, config: Any, policy_pool: Any) -> None: ...

    assigned: dict[int, float] = {}
    for name, members in {
        "base": {
            "Algorithm": Algorithm,
            "iter_trainable_traces": lambda episodes: ((e, t) for e in episodes for t in e.traces),
        },
        "routing": {"assign_advantages": lambda t, value: assigned.update({t.id: value})},
    }.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, f"prime_rl.orchestrator.algo.{name}", module)
    for parent in ("prime_rl", "prime_rl.orchestrator", "prime_rl.orchestrator.algo"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    scope: dict[str, Any] = {
        "BaseAlgoConfig": object,
        "Literal": Literal,
        "ClassVar": ClassVar,
        "ActionLossType": str,
    }
    exec(snippet("in packages/prime-rl-configs"), scope)
    exec(snippet("src/prime_rl"), scope)
    algorithm = scope["MaxPOAlgorithm"](scope["MaxPOAlgoConfig"](), policy_pool=None)
    rewards = [0.0, 1.0, 0.25, 0.5, 1.0, 0.0]
    traces = [SimpleNamespace(id=i, reward=reward) for i, reward in enumerate(rewards)]
    asyncio.run(
        algorithm.score_group(
            [SimpleNamespace(traces=traces[:2]), SimpleNamespace(traces=traces[2:])]
        )
    )
    wanted = ops.maxpo_advantage(torch.tensor([rewards]), k=4)[0]
    torch.testing.assert_close(torch.tensor([assigned[i] for i in range(6)]), wanted)
