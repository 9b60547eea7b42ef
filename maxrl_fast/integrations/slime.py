"""slime: advantages of every estimator NAME by `--custom-reward-post-process-path
maxrl_fast.integrations.slime.NAME`.

Options of an estimator come from the mapping `maxrl_fast` in the YAML file of
`--custom-config-path`.
"""

import functools
import math
from typing import Any

import torch

from maxrl_fast.integrations.rollouts import names, rollout_advantages


def __getattr__(name: str) -> Any:
    """Return the function (args, samples) that slime calls for an estimator."""
    if name not in names():
        raise AttributeError(f"{__name__} has the estimators {', '.join(names())}, not {name}")
    return functools.partial(group_advantage, name)


def group_advantage(name: str, args: Any, samples: list[Any]) -> tuple[list[Any], list[float]]:
    """Return (raw rewards, advantages) of slime's samples, before they are divided among the ranks.

    Samples of one prompt share a group_index. Samples of one rollout (rollout_id) are its parts:
    the last part's reward counts, and all get the rollout's advantage. A sample without a reward is
    left out of its group; its raw reward is NaN, because slime sums the raw rewards for its log.

    Raises:
        ValueError: if a sample has no group_index, or as `rollout_advantages`.
    """
    if any(sample.group_index is None for sample in samples):
        raise ValueError(
            f"{name} needs the prompt of each sample as its group_index, got a sample with None"
        )
    given = [sample.get_reward_value(args) for sample in samples]
    raw = [math.nan if reward is None else reward for reward in given]
    rollouts = [
        (s.group_index, i if s.rollout_id is None else f"rollout {s.rollout_id}")
        for i, s in enumerate(samples)
    ]
    last = {rollout: i for i, rollout in enumerate(rollouts)}
    rows = list(last.values())
    advantages = rollout_advantages(
        name,
        getattr(args, "maxrl_fast", None) or {},
        torch.tensor([float(raw[i]) for i in rows]),
        [samples[i].group_index for i in rows],
        torch.tensor([samples[i].effective_response_length for i in rows]),
    )
    by_rollout = dict(zip(last, advantages.tolist(), strict=True))
    return raw, [by_rollout[rollout] for rollout in rollouts]
