import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.records import Rollouts, Samples
from maxrl_fast.training.objectives import classes
from maxrl_fast.training.objectives.group import GroupObjective, Needs
from tests.batches import collected, make_prompts
from tests.training.test_ahead import build

ROLLOUTS = Rollouts(
    tokens=torch.zeros(6, dtype=torch.int64),
    cu_seqlens=torch.tensor([0, 1, 3, 6, 6]),
    logprobs=torch.tensor([-1.0, -2, -4, -1, -2, -3]),
    truncated=torch.zeros(4, dtype=torch.bool),
)
REWARDS = torch.tensor([[1.0, 0.0], [0.0, 1.0]])


def values(estimator, greedy_correct=None, **options):
    objective = GroupObjective(estimator, options)
    greedy_rewards = None if greedy_correct is None else greedy_correct.float()
    samples = Samples(make_prompts([[1], [2]]), ROLLOUTS)
    step = objective.begin(collected(samples, REWARDS, None, greedy_rewards), None)
    assert step.finish() == {}
    return step.advantages(torch.arange(4)).view(2, 2)


def test_an_estimator_gets_its_inputs_from_the_rollouts():
    lengths = torch.tensor([[1, 2], [3, 0]])
    for name in ("opo", "reinforce_pp_tokens"):
        assert torch.equal(values(name), ops.group_advantage(REWARDS, name, lengths=lengths))
    logprobs = torch.tensor([[-1.0, -3], [-2, 0]])
    expected = ops.group_advantage(REWARDS, "unlikeliness", logprobs=logprobs)
    assert torch.equal(values("unlikeliness"), expected)
    assert torch.equal(values("maxpo", k=1), ops.maxpo_advantage(REWARDS, 1))
    solved = torch.tensor([True, False])
    assert GroupObjective("self", {}).needs == Needs(greedy=True)
    assert GroupObjective("grpo", {}).needs == Needs()
    assert (values("self", solved) != 0).tolist() == [[False, False], [True, True]]
    assert GroupObjective("remax", {}).needs == Needs(greedy=True)
    assert values("remax", torch.tensor([0.25, 1.0])).tolist() == [[0.75, -0.25], [-1.0, 0.0]]


@pytest.mark.parametrize("objective", ["rloo", "ppo"])
def test_mask_leaves_out_tokens_of_truncated_responses_of_groups(objective, monkeypatch):
    learned = []
    monkeypatch.setattr(
        classes, "update_critic", lambda *given, when: (learned.append(given[-1]), (0.0, 0.0))[1]
    )
    flags = "--loss reinforce --truncated mask --max-new-tokens 5 --rollouts 8 --objective"
    trainer, _ = build(*flags.split(), objective)
    record = trainer.step(1, 0)
    rollouts, rewards = record.batch.raw_rollouts, record.batch.rewards
    kept = (~rollouts.truncated).nonzero()[:, 0].tolist()
    assert 4 < len(kept) < 28
    if objective == "ppo":
        assert [x.tolist() for x in learned] == [kept]
        return
    advantages = (rewards - rewards.mean(1, keepdim=True)).flatten() * 8 / 7
    sums = [x.sum() for x in rollouts.logprobs.split(rollouts.lengths.tolist())]
    num_tokens = int(rollouts.lengths[kept].sum())
    expected = -sum(float(advantages[s] * sums[s]) for s in kept) / num_tokens
    assert abs(expected) > 0.1
    assert record.metrics["loss"] == pytest.approx(expected, rel=1e-3)
    share = 1 - num_tokens / len(rollouts.tokens)
    assert record.metrics["tokens_masked"] == pytest.approx(share)
    assert record.metrics["truncated"] == 1 - len(kept) / 32
