"""The advantages of a step: what an estimator gets of the rollouts."""

import torch

from maxrl_fast import ops
from maxrl_fast.config.parse import parse, resolve
from maxrl_fast.records import Rollouts
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.training.group_objective import GroupAdvantages, advantages_of
from maxrl_fast.training.pacs_objective import Pacs

ROLLOUTS = Rollouts(
    tokens=torch.zeros(6, dtype=torch.int64),
    cu_seqlens=torch.tensor([0, 1, 3, 6, 6]),
    logprobs=torch.tensor([-1.0, -2, -4, -1, -2, -3]),
    truncated=torch.zeros(4, dtype=torch.bool),
)
REWARDS = torch.tensor([[1.0, 0.0], [0.0, 1.0]])


def values(estimator, greedy_correct=None, **options):
    advantages = GroupAdvantages(estimator, options)
    advantages.begin(None, None, ROLLOUTS, REWARDS, None, greedy_correct)
    everything = torch.arange(4)
    assert torch.equal(advantages.for_update(everything), advantages.values.flatten())
    assert advantages.end(1) == {}
    return advantages.values


def test_what_an_estimator_gets_of_the_rollouts():
    lengths = torch.tensor([[1, 2], [3, 0]])
    assert torch.equal(values("opo"), ops.group_advantage(REWARDS, "opo", lengths=lengths))
    logprobs = torch.tensor([[-1.0, -3], [-2, 0]])
    assert torch.equal(values("unlikeliness"), ops.group_advantage(REWARDS, "unlikeliness", logprobs=logprobs))
    assert torch.equal(values("maxpo", k=1), ops.maxpo_advantage(REWARDS, 1))
    solved = torch.tensor([True, False])
    assert GroupAdvantages("self", {}).needs_greedy
    assert not GroupAdvantages("grpo", {}).needs_greedy
    assert (values("self", solved) != 0).tolist() == [[False, False], [True, True]]


def test_the_objective_chooses():
    def made(*flags):
        return advantages_of(resolve(parse(flags), MazeTask(9)))

    maxpo = made("--objective", "maxpo", "--k", "3", "--scale-by-k")
    assert maxpo == GroupAdvantages("maxpo", {"k": 3, "order": None, "scale_by_k": True}, values=maxpo.values)
    assert made("--objective", "grpo", "--estimator-options", "eps=1e-3").options["eps"] == 1e-3
    pacs = made("--objective", "pacs", "--beta", "0.5", "--score", "grpo", "--updates-per-step", "4")
    assert isinstance(pacs, Pacs)
    assert (pacs.beta, pacs.score, pacs.class_weight, pacs.updates_per_step) == (0.5, "grpo", "balanced", 4)
    assert (pacs.needs_reference, pacs.needs_greedy) == (False, False)
    paper = made("--objective", "pacs_paper", "--ref-reset-interval", "7")
    assert (paper.needs_reference, paper.ref_reset_interval, paper.beta) == (True, 7, 1.0)
