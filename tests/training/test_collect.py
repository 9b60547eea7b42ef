import dataclasses

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.config.read import parse
from maxrl_fast.records import Rollouts, Samples, pack
from maxrl_fast.rewards import Outcome, RewardSource, WeightedRewards
from maxrl_fast.rollout import Sampling
from maxrl_fast.tasks.maze import DONE, UP, MazeTask
from maxrl_fast.tasks.scorer import Scorer
from maxrl_fast.training.collect import Needs, RolloutCollector, Shaping
from maxrl_fast.training.objectives.group import GroupObjective
from maxrl_fast.training.schedule import DynamicSampling, ScheduleOptions, StdFilter, is_mixed
from tests import batches
from tests.job.test_resume import resumes_bitwise
from tests.runs import CHAIN_TASK
from tests.tables import refused
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


def collected(table, max_batches, source=None, step=3, **options):
    task = NumberedTask(5)
    task.table = table
    scorer, sampling = Scorer(task, source), Sampling(1.0, 32, task.stop_ids)
    schedule = DynamicSampling(2, 2, max_batches) if max_batches > 1 else None
    options = {"options": ScheduleOptions(2, 2), "schedule": schedule} | options
    return RolloutCollector(task, NumberedEngine(), scorer, sampling, **options).collect(step, 0)


ALL_WRONG, MIXED, ALL_RIGHT = [0.0, 0.0], [0.0, 1.0], [1.0, 1.0]


@pytest.mark.parametrize(
    ("table", "num_batches", "ids", "num_sampled"),
    [
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
    step = collected(table, num_batches)
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


def test_the_average_is_a_mean_and_then_moves():
    std_filter = StdFilter(0.5, torch.tensor([NAN]).double())
    means = [*[NAN] * 5, 3.0, 3.25, 3.5, 3.75, 4.0, 0.99 * 4 + 0.01 * 5.5]
    for step, mean in enumerate(means, start=1):
        assert std_filter.bound(step) == pytest.approx(0.5 * 4 / 2**0.5 if step == 11 else 0)
        # deviations: step / sqrt(2) of the first group, 0 of the second, none of the third
        std_filter.observe(torch.tensor([[step, 0.0], [2.0, 2.0], [1.0, NAN]]), step)
        assert float(std_filter.average) == pytest.approx(mean / 2**0.5, nan_ok=True)


def test_groups_below_the_bound_are_replaced():
    table = [[0.0, 1.0], [0.0, 0.1], [3.0, 3.0], [0.0, 2.0]]
    std_filter = StdFilter(0.5, torch.tensor([0.7]).double())
    schedule = DynamicSampling(2, 2, 3, std_filter)
    batch = collected(table, 1, step=11, schedule=schedule)
    assert batch.prompts.ids.tolist() == [0, 3]
    assert batch.metrics["frac_prompts_alive"] == 0.5
    assert float(std_filter.average) == pytest.approx(0.99 * 0.7 + 0.01 * 3.1 / 4 / 2**0.5)
    assert collected(table, 1, step=10, schedule=schedule).prompts.ids.tolist() == [0, 1]
    with refused("std-filter needs --dynamic-sampling of 2 or more"):
        parse(["--std-filter", "0.5"])


class CountingSource(RewardSource):
    """Gives each prompt's rewards of the table, with the prompt's index and the sample's as
    components."""

    def __init__(self, table):
        self.table = table

    def outcomes(self, rows, group):
        for i, row in enumerate(rows):
            prompt, n = len(row["response"].split()) - 1, i % group
            yield i, Outcome(self.table[prompt][n], {"prompt": float(prompt), "sample": float(n)})


def test_components_and_greedy_rewards_stay_with_their_groups_when_others_are_replaced():
    table = [ALL_RIGHT, MIXED, ALL_WRONG, MIXED[::-1], MIXED]
    # those of greedy responses have components too, which are not those of the rollouts
    step = collected(table, 5, CountingSource(table), needs=Needs(greedy=True))
    assert step.prompts.ids.tolist() == [1, 3]
    parts = [{"prompt": i, "sample": n} for i in (1.0, 3.0) for n in (0.0, 1.0)]
    assert [*step.components] == parts
    assert step.greedy_rewards.tolist() == [0.0, 1.0]


CHAIN = f"--task {CHAIN_TASK} --length 8 --reward-threshold .1 --sft-steps 0".split()


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


class Source(RewardSource):
    """Gives these values, None where it does not apply."""

    def __init__(self, name, values):
        self.name, self.values = name, values

    def outcomes(self, rows, group):
        for i, value in enumerate(self.values):
            is_known = value == value
            yield i, Outcome(value, {"half": value / 2}) if is_known else Outcome()


def test_each_reward_is_kept_beside_the_sum():
    first, second = [0.0, 1.0, 1.0, 0.0, 0.0, 1.0], [4.0, 2.0, NAN, 8.0, 6.0, 2.0]
    sources = [Source("a.py:first", first), Source("a.py:second", second)]
    source, sizes = WeightedRewards(sources, [1.0, 0.5]), ScheduleOptions(2, 3)
    step, without = (
        collected([], 1, source, options=sizes, needs=Needs(parts=x)) for x in (True, False)
    )
    assert step.rewards.tolist() == [[2.0, 2.0, 1.0], [4.0, 3.0, 2.0]]
    expected = torch.tensor([first, second]).view(2, 2, 3)
    assert torch.equal(step.reward_terms.movedim(-1, 0).nan_to_num(9), expected.nan_to_num(9))
    assert step.term_weights == (1.0, 0.5)
    assert without.reward_terms is None
    for name in ("gdpo", "hero"):
        objective = GroupObjective(name, {})
        assert objective.needs == Needs(parts=True)
        begun = objective.begin(step, None)
        by_hand = ops.group_advantage(
            step.rewards, name, reward_parts=expected, reward_weights=[1.0, 0.5]
        )
        assert torch.equal(begun.advantages(torch.arange(6)), by_hand.flatten())
        assert by_hand.abs().max() > 0.1


def soft_punishment(length, longest, cache):
    """Return R_length of DAPO, eq. 13, case by case."""
    if length <= longest - cache:
        return 0.0
    return ((longest - cache) - length) / cache if length <= longest else -1.0


@pytest.mark.parametrize(("limit", "buffer"), [(20, 5), (7, 7), (9, 1)])
def test_the_penalty_is_that_of_dapo(limit, buffer):
    lengths = torch.arange(limit + 1)
    expected = torch.tensor([soft_punishment(length, limit, buffer) for length in range(limit + 1)])
    for factor in (1.0, 0.25):
        own = Shaping(overlong_buffer=buffer, overlong_penalty=factor)
        torch.testing.assert_close(own.length_penalty(lengths, limit), factor * expected)
    assert expected[-1] == -1


def test_a_reward_that_is_not_known_stays_0_with_a_penalty():
    samples = Samples(batches.make_prompts([[1]]), Rollouts.given([[1] * 8, [1] * 10]))
    sampling, shaping = Sampling(1.0, 10, ()), Shaping(overlong_buffer=4)
    collector = RolloutCollector(None, None, None, sampling, ScheduleOptions(1, 2), shaping)
    batch = collector._finished(batches.collected(samples, torch.tensor([[1.0, NAN]])))
    assert batch.rewards.tolist() == [[0.5, 0.0]]
    assert batch.metrics["overlong_penalty"] == pytest.approx(-(0.5 + 1) / 2)


@pytest.mark.parametrize("truncated", ["keep", "zero", "mask"])
def test_zero_replaces_the_reward_of_a_truncated_response_and_its_parts(truncated, monkeypatch):
    generate, is_cut = NumberedEngine.generate, torch.tensor([False, False, True] * 2)
    monkeypatch.setattr(
        NumberedEngine, "generate", lambda *x: dataclasses.replace(generate(*x), truncated=is_cut)
    )
    first, second = torch.tensor([0.0, 1, 1, 0, 0, 3]), torch.tensor([4.0, 2, 6, 8, 6, 2])
    sources = [Source("a.py:first", first.tolist()), Source("a.py:second", second.tolist())]
    # the penalty is of prompt 1, whose responses have two tokens
    shaping = Shaping(overlong_buffer=31, overlong_penalty=15.5, truncated=truncated)
    source, sizes = WeightedRewards(sources, [1.0, 0.5]), ScheduleOptions(2, 3)
    needs = Needs(parts=True)
    step = collected([], 1, source, options=sizes, shaping=shaping, needs=needs)
    is_zero = truncated == "zero"
    parts = torch.stack([first, second], 1).masked_fill(is_cut[:, None] & is_zero, 0)
    own = (parts @ torch.tensor([1, 0.5])).view(2, 3)
    assert torch.equal(step.task_rewards, own)
    assert torch.equal(step.all_rewards, own)  # metrics and the schedule
    assert torch.equal(step.rewards, own - torch.tensor([[0.0], [0.5]]))
    assert torch.equal(step.reward_terms.view(6, 2), parts)
    assert step.metrics["reward/first"] == pytest.approx(float(parts[:, 0].mean()))
    assert step.metrics.get("rewards_zeroed") == (pytest.approx(1 / 3) if is_zero else None)
    kept = [0, 1, 3, 4] if truncated == "mask" else [*range(6)]
    assert step.in_loss(step.minibatches(1)[0]).tolist() == kept
