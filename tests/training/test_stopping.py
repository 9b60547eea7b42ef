import re
from dataclasses import replace
from fractions import Fraction as F
from itertools import product
from math import comb, prod

import pytest
import torch

from maxrl_fast.algorithms.estimators.max_at_k import stopped_maxrl
from maxrl_fast.job.loop import RunLoop, rollout_records
from maxrl_fast.records import Rollouts
from maxrl_fast.rollout import RolloutRequest, Sampling
from maxrl_fast.rollout.native import native_engine
from maxrl_fast.tasks.maze import DONE, UP
from maxrl_fast.tasks.scorer import Scorer
from maxrl_fast.train import main
from maxrl_fast.training.collect import RolloutCollector, Shaping
from maxrl_fast.training.objectives.group import GroupObjective
from maxrl_fast.training.schedule import Carried, ScheduleOptions, Stopping
from tests.batches import make_prompts
from tests.job.test_resume import resumes_bitwise
from tests.models import tiny_decoder
from tests.runs import MAZE, ROOT, base, read
from tests.test_session import state
from tests.training.test_collect import CHAIN, NumberedTask


def histories(ends, m):
    """Yield the successes of each round of a prompt, until it stops."""
    begun = [()]
    while begun:
        counts = begun.pop()
        if counts and (sum(counts) >= m or len(counts) == len(ends)):
            yield counts
        else:
            size = ends[len(counts)] - (ends[len(counts) - 1] if counts else 0)
            begun += [(*counts, k) for k in range(size + 1)]


def round_ends(first, most):
    ends = [first]
    while ends[-1] < most:
        ends.append(min(2 * ends[-1], most))
    return ends


def rounds(ends):
    return [(start, end - start) for start, end in zip([0, *ends], ends, strict=False)]


CASES = [(1, 8, 1), (1, 8, 3), (4, 4, 2), (4, 24, 2), (8, 32, 1), (8, 32, 8), (8, 128, 4)]


@pytest.mark.parametrize(("first", "most", "m"), CASES)
def test_the_gradient_is_that_of_maxrl_of_order_n(first, most, m):
    """In units of grad log p a success has the score 1 and a failure -p/(1-p)."""
    ends = round_ends(first, most)
    drawn = [*histories(ends, m)]
    rewards, drawn_by = torch.zeros(2, len(drawn), most)
    for row, counts in enumerate(drawn):
        for k, (start, size) in zip(counts, rounds(ends), strict=False):
            rewards[row, start : start + k] = 1
            drawn_by[row, start : start + size] = start + size
    found = stopped_maxrl(rewards, drawn_by > 0, drawn_by.long(), m)
    for p in (0.01, 0.2, 0.5, 0.99):
        chances = [
            prod(
                comb(size, k) * p**k * (1 - p) ** (size - k)
                for k, (_, size) in zip(counts, rounds(ends), strict=False)
            )
            for counts in drawn
        ]
        scores = torch.where(rewards > 0, 1.0, -p / (1 - p))
        computed = torch.tensor(chances).double() @ (found * scores).sum(1)
        assert float(computed) == pytest.approx(1 - (1 - p) ** most, rel=1e-6)


class Coins:
    """Sample n of prompt i is UP n times, then DONE."""

    def __init__(self):
        self.requests = []

    def generate(self, request):
        self.requests.append((request.prompts.ids.tolist(), request.first_sample))
        numbers = range(request.first_sample, request.first_sample + request.num_samples)
        responses = [[UP] * n + [DONE] for _ in request.prompts.ids for n in numbers]
        return replace(Rollouts.given(responses), logprobs=-torch.ones(sum(map(len, responses))))


class CoinTask(NumberedTask):
    def score(self, prompts, rollouts):
        count = len(rollouts) // len(prompts)
        owners = prompts.ids.repeat_interleave(count).tolist()
        lengths = (rollouts.lengths - 1).tolist()
        return torch.tensor([self.table[i][n] for i, n in zip(owners, lengths, strict=True)])


def test_rounds_are_drawn_until_enough_succeed(monkeypatch):
    task, engine = CoinTask(5), Coins()
    task.table = [[0.0] * 12, [1.0, 1.0] + [0.0] * 10, [0.0, 1.0, 1.0, 1.0] + [0.0] * 8]
    sampling = Sampling(1.0, 32, task.stop_ids)
    schedule = Stopping(3, block=2, most=12, stop_at=2)
    scorer, sizes = Scorer(task, None), ScheduleOptions(3, 12)
    collector = RolloutCollector(task, engine, scorer, sampling, sizes, schedule=schedule)
    batch = collector.collect(1, 0)
    assert engine.requests == [([0, 1, 2], 0), ([0, 2], 2), ([0], 4), ([0], 8)]
    drawn = torch.tensor([12, 2, 4])
    assert batch.drawn_by[0].tolist() == [2, 2, 4, 4, *[8] * 4, *[12] * 4]
    assert torch.equal(batch.has_reward.sum(1), drawn)
    expected = torch.where(torch.arange(12) < drawn[:, None], torch.arange(1, 13), 0)
    assert torch.equal(batch.rollouts.lengths.view(3, 12), expected)
    assert torch.equal(batch.rewards, torch.tensor(task.table) * (expected > 0))
    assert batch.prompts.ids.tolist() == [0, 1, 2]
    assert batch.frac_drawn == 0.5
    assert batch.num_tokens == expected.sum() == len(batch.raw_rollouts.tokens)
    draws = {name: x for name, x in batch.metrics.items() if "_to_" in name}
    assert draws == {"draws_to_0": 12.0, "draws_to_0.5": 4.0, "draws_to_1": 2.0}
    assert (batch.metrics["reward_mean"], batch.metrics["draws_mean"]) == (0.5, 6.0)
    objective = GroupObjective("maxrl", {}, stop_at=2)
    step, minibatches = objective.begin(batch, None), batch.minibatches(3)
    plain = stopped_maxrl(batch.rewards, batch.has_reward, batch.drawn_by, 2).float().flatten()
    assert plain.view(3, 12).count_nonzero(1).tolist() == [0, 2, 4]
    # an average over prompts: each prompt has its number of rollouts as the denominator
    for own, count in zip(minibatches, drawn.tolist(), strict=True):
        assert torch.allclose(step.advantages(own), plain * count)
    assert torch.allclose(step.advantages(torch.cat(minibatches)), plain * 6)
    # with --truncated mask it stays one over prompts, of the responses that are left
    is_cut = replace(batch.raw_rollouts, truncated=torch.arange(36) % 2 == 0)
    masked = replace(batch, raw_rollouts=is_cut, masks_truncated=True)
    whole, kept = torch.cat(minibatches), masked.in_loss(torch.cat(minibatches))
    assert kept.tolist() == [s for s in whole.tolist() if s % 2]
    step = objective.begin(masked, None)
    assert torch.allclose(step.advantages(whole) / len(kept), plain / 3)
    for count in (5, 100):  # a line has its own prompt, reward and advantage
        records = rollout_records(task, batch, torch.arange(36.0), count)
        own = {(x["id"], x["tokens"] - 1, x["reward"], x["advantage"]) for x in records}
        assert len(own) == min(count, 18)
        assert all(reward == task.table[i][n] and a == 12 * i + n for i, n, reward, a in own)


@pytest.mark.parametrize(("truncated", "drawn"), [("mask", 2), ("zero", 8)])
def test_a_truncated_success_is_none_with_zero(truncated, drawn):
    task, engine = CoinTask(5), Coins()
    task.table, generate = [[1.0] * 4 + [0.0] * 4 + [1.0] * 8], engine.generate

    def cut(request):  # those of up to 4 tokens
        rollouts = generate(request)
        return replace(rollouts, truncated=rollouts.lengths <= 4)

    engine.generate, sampling = cut, Sampling(1.0, 32, task.stop_ids)
    sizes, schedule = ScheduleOptions(1, 8), Stopping(1, block=2, most=8, stop_at=1)
    how = Scorer(task, None), sampling, sizes, Shaping(truncated=truncated)
    collector = RolloutCollector(task, engine, *how, schedule=schedule)
    batch = collector.collect(1, 0)
    assert batch.has_reward.sum() == drawn
    assert batch.rewards.sum() == (0 if truncated == "zero" else 2)


@pytest.mark.parametrize("in_cpp", [True, False])
def test_rounds_are_the_prefix_of_one_draw(in_cpp):
    """Bitwise in C++; the matrix products of PyTorch round by the size of the batch."""
    model = tiny_decoder()
    engine = native_engine(model, torch.float32, in_cpp=in_cpp)
    prompts, sampling = make_prompts([[5, 6, 7], [9, 3]]), Sampling(1.0, 12, (1,))
    whole = engine.generate(RolloutRequest(prompts, 8, sampling, seed=3, step=2))
    for first, count in ((0, 2), (2, 2), (4, 4)):
        part = RolloutRequest(
            prompts, count, sampling, 3, 2, first_sample=first, keeps_prompts=first < 4
        )
        own = whole.select(
            torch.tensor([8 * g + first + n for g in range(2) for n in range(count)])
        )
        found = engine.generate(part)
        assert torch.equal(found.tokens, own.tokens)
        largest = (found.logprobs - own.logprobs).abs().max()
        assert largest <= (0 if in_cpp else 1e-5)
    assert part.name_of(5) == "sample 5 of prompt 1"


def test_prompts_are_kept_until_they_are_sampled_again_or_the_weights_change():
    model, changed = tiny_decoder(), tiny_decoder(seed=1)
    prompts, sampling = make_prompts([[5, 6, 7], [9, 3], [9, 3]]), Sampling(1.0, 12, (1,))
    engine, new = (native_engine(x, torch.float32, in_cpp=True) for x in (model, changed))
    one, decoder = engine.sequence_bytes(3, 0)[0], engine._decoder
    first = RolloutRequest(prompts, 2, sampling, keeps_prompts=True)
    second = replace(first, first_sample=2, keeps_prompts=False)
    engine.generate(first)
    assert decoder.kept_bytes == 2 * one  # equal prompts once
    engine.load_weights(changed)
    assert torch.equal(engine.generate(second).tokens, new.generate(second).tokens)
    for forget in (lambda: engine.generate(second), engine.sleep):
        engine.generate(first)
        forget()
        assert decoder.kept_bytes == 0
    engine.cache_bytes = 4 * one
    engine.generate(first)
    assert decoder.kept_bytes == one  # at most a quarter of the cache


RULE = """
import torch
from maxrl_fast.training.schedule import Stopping

class Alternate(Stopping):
    def __init__(self, *rule):
        super().__init__(*rule)
        self.state = {"steps": torch.zeros(1)}

    def more(self, step, rewards, drawn):
        self.state["steps"] += not len(drawn)
        self.stop_at = 1 + int(self.state["steps"]) % 2
        return super().more(step, rewards, drawn)
"""


@pytest.mark.slow
def test_a_run_that_stops_resumes_bitwise(tmp_path, monkeypatch):
    flags = [*base()[2:], *CHAIN, "--objective", "maxrl", "--steps", "6", "--rollouts", "32"]
    flags += ["--first-rollouts", "4", "--stop-at", "2", "--kl-coef", ".01"]
    (tmp_path / "rule.py").write_text(RULE)
    flags += ["--schedule", f"{tmp_path / 'rule.py'}:Alternate"]
    records = resumes_bitwise(monkeypatch, tmp_path, flags, "step 3")
    assert len({record["draws_mean"] for record in records}) > 1, records
    kept = read(tmp_path / "whole" / "rollouts.jsonl")
    assert all(rollout["tokens"] for rollout in kept)


class Tries:
    """Each of a prompt's rollouts is as many times UP as the step, then DONE."""

    def generate(self, request):
        self.asked = request.prompts.ids.tolist()
        response = [UP] * request.step + [DONE]
        rollouts = Rollouts.given([response] * (len(self.asked) * request.num_samples))
        return replace(rollouts, logprobs=-torch.ones(len(rollouts.tokens)))


class TriesTask(NumberedTask):
    """The rewards of prompt i at step n are `table[i][n]`."""

    def score(self, prompts, rollouts):
        step, count = int(rollouts.lengths[0]) - 1, len(rollouts) // len(prompts)
        rows = [self.table.get((i, step), [0.0] * count) for i in prompts.ids.tolist()]
        return torch.tensor(rows).flatten()


def collector(table, carried, prompts, rollouts):
    task, engine = TriesTask(5), Tries()
    task.table = table
    sizes = ScheduleOptions(prompts, rollouts)
    how = Scorer(task, None), Sampling(1.0, 32, task.stop_ids), sizes
    return RolloutCollector(task, engine, *how, chosen=carried), engine


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_a_visit_has_the_gradient_of_maxrl_of_order_n_times_rounds(n, rounds):
    """All patterns of rewards of the last round of a visit, each after 0 ... rounds - 1 rounds
    without a success, by the collector and the objective of a run. In units of grad log p a success
    has the score 1 and a failure -p/(1-p)."""
    patterns = [*product((0.0, 1.0), repeat=n)]
    visits, exact = dict.fromkeys((F(1, 50), F(1, 7), F(1, 2), F(9, 10)), F(0)), F(1, 10**9)
    for failed in range(rounds):
        carried = Carried(torch.zeros(len(patterns), 2, dtype=torch.int64), rounds)
        table = {(i, failed + 1): [*rewards] for i, rewards in enumerate(patterns)}
        own, _ = collector(table, carried, len(patterns), n)
        batches = [own.collect(step, 0) for step in range(1, failed + 2)]
        objective = GroupObjective("maxrl", {}, stop_at=1)
        for batch in batches:
            assert batch.prompts.ids.tolist() == [*range(len(patterns))]
            step = objective.begin(batch, None)
            advantages = step.advantages(batch.sequences).view(-1, n) / n
            assert batch is batches[-1] or not advantages.any()
        assert torch.equal(batch.rewards, torch.tensor(patterns))
        for p in visits:
            for rewards, found in zip(patterns, advantages.tolist(), strict=True):
                chance = (1 - p) ** (n * failed)
                scores = [F(1) if r else -p / (1 - p) for r in rewards]
                for r in rewards:
                    chance *= p if r else 1 - p
                values = (F(a).limit_denominator(100) for a in found)  # float32 of k / n
                visits[p] += chance * sum(map(F.__mul__, values, scores))
    for p, gradient in visits.items():
        assert abs(gradient - (1 - (1 - p) ** (n * rounds))) < exact, (p, gradient)


def test_a_prompt_keeps_its_place_until_a_success_or_the_last_round():
    solved, failed = [0.0, 1.0], [0.0, 0.0]
    table = {(0, 1): solved, (1, 2): solved, (2, 3): failed, (3, 2): solved}
    carried = Carried(torch.zeros(3, 2, dtype=torch.int64), 3)
    own, engine = collector(table, carried, 3, 2)
    first, asked, metrics = 0, [], []
    for step in range(1, 6):
        batch = own.collect(step, first)
        first += batch.num_sampled
        asked.append((engine.asked, batch.num_sampled))
        metrics.append({x: batch.metrics.get(x) for x in ("carried", "given_up", "rounds_mean")})
        assert batch.frac_drawn == 1
    assert asked == [
        ([0, 1, 2], 3),  # 0 is solved
        ([3, 1, 2], 1),  # 1 and 3 are
        ([4, 5, 2], 2),  # 2 is given up
        ([4, 5, 6], 1),
        ([4, 5, 6], 0),  # 4 and 5 are given up
    ]
    assert [list(x.values()) for x in metrics] == [
        [2, 0, 1.0],
        [1, 0, 1.5],
        [2, 1, 3.0],
        [3, 0, None],
        [1, 2, 3.0],
    ]


def test_a_round_with_unknown_rewards_is_one_without_success():
    carried = Carried(torch.zeros(2, 2, dtype=torch.int64), 2)
    carried.places(7, 1)
    carried.observe(torch.tensor([[torch.nan, 0.0], [torch.nan, 1.0]]))
    assert carried.places(9, 2) == ([7, 9], 1)


@pytest.mark.slow
def test_a_loop_of_verbs_has_the_weights_of_a_run_with_carried_prompts(tmp_path, monkeypatch):
    run, found = tmp_path / "run", [{"kind": "fails_by_form", "message": "said"}]
    monkeypatch.setattr(RunLoop, "_by_form", lambda self, batch: found)
    flags = [*MAZE, "--objective", "maxrl", "--carry", "3", "--lr", "1e-3", "--out", str(run)]
    del flags[flags.index("--k") : flags.index("--k") + 2]
    assert main(flags) == 0
    assert any(record["carried"] for record in read(run / "metrics.jsonl"))
    assert {x["kind"] for x in read(run / "warnings.jsonl")} >= {"fails_by_form"}
    page = (ROOT / "docs" / "session.md").read_text()
    (loop,) = re.findall(r"```python\n([^`]*/carried/[^`]*)```", page)
    changes = {'"runs/carried': f'"{run}', '"runs/loop"': f'"{tmp_path}/out"', "200": "6"}
    for old, new in {**changes, '000"': '000", threads=1'}.items():
        assert old in loop
        loop = loop.replace(old, new)
    exec(loop, {})
    of_run, by_verbs = dict(state(run)), dict(state(tmp_path / "out"))
    assert of_run.pop("objective.carried").any()
    assert of_run.keys() == by_verbs.keys()
    assert all(torch.equal(x, of_run[name]) for name, x in by_verbs.items())


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_a_run_with_carried_prompts_resumes_bitwise(ahead, tmp_path, monkeypatch):
    flags = [*base()[2:], *CHAIN, "--objective", "maxrl", "--steps", "6", "--rollouts", "4"]
    flags += ["--carry", "3", "--ahead", str(ahead), "--lora-rank", str(2 * ahead)]
    flags += "--kl full --kl-coef .1 --teacher-prompt sibling --teacher-ema .1".split() * ahead
    resumes_bitwise(monkeypatch, tmp_path, flags, "step 3")
    records = read(tmp_path / "whole" / "metrics.jsonl")
    assert any(record["carried"] for record in records), records
