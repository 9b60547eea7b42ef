"""Dynamic sampling: groups whose rewards are all equal are replaced by others, and a resumed run is
bitwise identical.
"""

import pytest
import torch

from maxrl_fast.records import Rollouts, pack
from maxrl_fast.rewards import RewardSource, Scores
from maxrl_fast.rollout import Sampling
from maxrl_fast.tasks.maze import DONE, UP, MazeTask
from maxrl_fast.tasks.scorer import Scorer
from maxrl_fast.training.collect import Needs, RolloutCollector, is_mixed
from tests.job.test_resume import resumes_bitwise
from tests.test_train import base, read

NAN = float("nan")


def test_a_group_is_mixed_if_its_known_rewards_differ():
    alike = [[1, 1, 1], [0, 0, 0], [NAN, 1, 1], [NAN, NAN, 1], [NAN] * 3]
    mixed = [[0, 1, 0], [NAN, 1, 0], [-2, -2, -1], [0.35, 0.4, 0.4]]
    assert is_mixed(torch.tensor(alike + mixed)).tolist() == [False] * 5 + [True] * 4


class NumberedTask(MazeTask):
    """The reward of sample n of prompt i is `table[i][n]`."""

    table: list[list[float]]

    def score(self, prompts, rollouts):
        return torch.tensor([self.table[i] for i in prompts.ids.tolist()]).flatten()


class NumberedEngine:
    """Sample n of prompt i is UP i times, then DONE. Each of its tokens has log-prob -(n + 1)."""

    def generate(self, request):
        prompts, num_samples = request.prompts, request.num_samples
        responses = [[UP] * i + [DONE] for i in prompts.ids.tolist() for _ in range(num_samples)]
        tokens, cu_seqlens = pack(responses)
        numbers = torch.arange(1.0, num_samples + 1).repeat(len(prompts))
        logprobs = -numbers.repeat_interleave(cu_seqlens.diff())
        return Rollouts(tokens, cu_seqlens, logprobs, torch.zeros(len(responses), dtype=torch.bool))


def collected(table, max_batches, source=None, **options):
    task = NumberedTask(5)
    task.table = table
    scorer, sampling = Scorer(task, source), Sampling(1.0, 32, task.stop_ids)
    options |= {"num_prompts": 2, "num_rollouts": 2, "max_batches": max_batches}
    return RolloutCollector(task, NumberedEngine(), scorer, sampling, **options).collect(3, 0)


ALL_WRONG, MIXED, ALL_RIGHT = [0.0, 0.0], [0.0, 1.0], [1.0, 1.0]


@pytest.mark.parametrize(
    ("table", "num_batches", "ids", "num_sampled"),
    [
        ([ALL_WRONG, MIXED, ALL_RIGHT, MIXED, MIXED], 0, [0, 1], 2),
        ([ALL_WRONG, MIXED, ALL_RIGHT, MIXED, MIXED], 1, [0, 1], 2),
        ([ALL_WRONG, MIXED, ALL_RIGHT, MIXED, MIXED], 5, [1, 3], 4),
        ([MIXED, MIXED, ALL_RIGHT, MIXED], 5, [0, 1], 2),
        ([ALL_WRONG, ALL_WRONG, ALL_RIGHT, MIXED, MIXED, MIXED], 5, [3, 4], 6),
        # at the limit, a zero-variance group fills up
        ([ALL_WRONG, ALL_WRONG, ALL_RIGHT, MIXED, MIXED, MIXED], 2, [0, 3], 4),
        ([ALL_WRONG, ALL_WRONG, ALL_RIGHT, ALL_WRONG], 2, [0, 1], 4),
    ],
)
def test_the_first_mixed_groups_are_taken(table, num_batches, ids, num_sampled):
    step = collected(table, max(num_batches, 1))
    assert step.prompts.ids.tolist() == ids
    assert step.num_sampled == num_sampled
    assert step.rewards.tolist() == [table[i] for i in ids]
    assert step.all_rewards.tolist() == table[:num_sampled]
    assert step.rollouts.lengths.tolist() == [i + 1 for i in ids for _ in range(2)]
    tokens = [token for i in ids for _ in range(2) for token in [UP] * i + [DONE]]
    assert step.rollouts.tokens.tolist() == tokens
    expected = [-float(n + 1) for i in ids for n in range(2) for _ in range(i + 1)]
    assert step.rollouts.logprobs.tolist() == expected
    whole = MazeTask(5).prompts("train", 0, 6)
    for place, i in enumerate(ids):
        assert torch.equal(step.prompts.take(place, 1).tokens, whole.take(i, 1).tokens)
    assert step.num_tokens == sum(2 * (i + 1) for i in range(num_sampled))
    share = sum(row == MIXED for row in table[:num_sampled]) / num_sampled
    metrics = {"num_prompts_sampled": num_sampled, "frac_prompts_alive": share}
    assert step.metrics == (metrics if num_batches > 1 else {})


class CountingSource(RewardSource):
    """Gives each prompt's rewards of the table, with the prompt's index and the sample's as
    components.
    """

    def __init__(self, table):
        self.table = table

    def score(self, rows, max_failures=None, on_progress=lambda: None, group=1):
        cells = [(len(row["response"].split()) - 1, i % group) for i, row in enumerate(rows)]
        rewards = [self.table[prompt][n] for prompt, n in cells]
        return Scores(rewards, [], 0, [{"prompt": float(i), "sample": float(n)} for i, n in cells])


def test_components_and_greedy_rewards_stay_with_their_groups_when_others_are_replaced():
    table = [ALL_WRONG, MIXED, ALL_RIGHT, MIXED[::-1], MIXED]
    # those of greedy responses have components too, which are not those of the rollouts
    step = collected(table, 5, CountingSource(table), needs=Needs(greedy=True))
    assert step.prompts.ids.tolist() == [1, 3]
    parts = [{"prompt": i, "sample": n} for i in (1.0, 3.0) for n in (0.0, 1.0)]
    assert [*step.components] == parts
    assert step.greedy_rewards.tolist() == [0.0, 1.0]


CHAIN = ["--task", "chain", "--chain-length", "8", "--reward-threshold", ".1", "--sft-steps", "0"]


@pytest.mark.slow
def test_a_run_with_dynamic_sampling_resumes_bitwise(tmp_path, monkeypatch):
    flags = [*base()[2:], *CHAIN, "--objective", "maxrl", "--dynamic-sampling", "6", "--steps", "6"]
    records = resumes_bitwise(monkeypatch, tmp_path, flags, "step 3")
    assert len({record["num_prompts_sampled"] for record in records}) > 1, records
    assert all(
        record["frac_groups_zero_variance"] <= 1 - record["frac_prompts_alive"]
        for record in records
    )
    start, kept = 0, read(tmp_path / "whole" / "rollouts.jsonl")
    for record in records:  # each step draws new prompts
        ids = {rollout["id"] for rollout in kept if rollout["step"] == record["step"]}
        assert ids <= {*range(start, start + record["num_prompts_sampled"])}
        start += record["num_prompts_sampled"]
