"""Objectives that take several rewards one by one: what the collector keeps of them, and which
options they refuse.
"""

import torch

from maxrl_fast import ops
from maxrl_fast.rewards import RewardSource, Scores
from maxrl_fast.rewards.combined import WeightedRewards
from maxrl_fast.rollout import Sampling
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.tasks.scorer import Scorer
from maxrl_fast.training.collect import RolloutCollector
from maxrl_fast.training.objectives.group import GroupObjective
from maxrl_fast.training.objectives.objective import Needs
from tests.training.test_collect import NumberedEngine

NAN = float("nan")


class Source(RewardSource):
    """Gives these values, NaN where it does not apply."""

    def __init__(self, name, values):
        self.name, self.values = name, values

    def score(self, rows, max_failures=None, on_progress=lambda: None, group=1):
        return Scores(self.values, [], 0, [{"half": value / 2} for value in self.values])


def collect(first, second, needs_parts=True):
    task = MazeTask(5)
    sources = [Source("a.py:first", first), Source("a.py:second", second)]
    scorer = Scorer(task, WeightedRewards(sources, [1.0, 0.5]))
    options = {"num_prompts": 2, "num_rollouts": 3, "needs": Needs(parts=needs_parts)}
    sampling = Sampling(1.0, 32, task.stop_ids)
    return RolloutCollector(task, NumberedEngine(), scorer, sampling, **options).collect(1, 0)


def test_each_reward_is_kept_beside_the_sum():
    first, second = [0.0, 1.0, 1.0, 0.0, 0.0, 1.0], [4.0, 2.0, NAN, 8.0, 6.0, 2.0]
    step = collect(first, second)
    assert step.rewards.tolist() == [[2.0, 2.0, 1.0], [4.0, 3.0, 2.0]]
    expected = torch.tensor([first, second]).view(2, 2, 3)
    assert torch.equal(step.reward_terms.movedim(-1, 0).nan_to_num(9), expected.nan_to_num(9))
    assert step.term_weights == (1.0, 0.5)
    assert collect(first, second, needs_parts=False).reward_terms is None
    for name in ("gdpo", "hero"):
        objective = GroupObjective(name, {})
        assert objective.needs == Needs(parts=True)
        begun = objective.begin(step, None)
        by_hand = ops.group_advantage(
            step.rewards, name, reward_parts=expected, reward_weights=[1.0, 0.5]
        )
        assert torch.equal(begun.advantages(torch.arange(6)), by_hand.flatten())
        assert by_hand.abs().max() > 0.1
