import re
from dataclasses import replace
from fractions import Fraction as F
from itertools import product

import pytest
import torch

from maxrl_fast.records import Rollouts
from maxrl_fast.rollout import Sampling
from maxrl_fast.tasks.maze import DONE, UP
from maxrl_fast.tasks.scorer import Scorer
from maxrl_fast.train import main
from maxrl_fast.training.collect import RolloutCollector
from maxrl_fast.training.objectives.group import GroupObjective
from maxrl_fast.training.schedule import Carried
from tests.job.test_resume import resumes_bitwise
from tests.runs import MAZE, ROOT, base, read
from tests.test_session import state
from tests.training.test_collect import CHAIN, NumberedTask


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
    how = Scorer(task, None), Sampling(1.0, 32, task.stop_ids), prompts, rollouts
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
def test_a_loop_of_verbs_has_the_weights_of_a_run_with_carried_prompts(tmp_path):
    run = tmp_path / "run"
    flags = [*MAZE, "--objective", "maxrl", "--carry", "3", "--lr", "1e-3", "--out", str(run)]
    del flags[flags.index("--k") : flags.index("--k") + 2]
    assert main(flags) == 0
    assert any(record["carried"] for record in read(run / "metrics.jsonl"))
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
    flags += ["--carry", "3", "--ahead", str(ahead)]
    resumes_bitwise(monkeypatch, tmp_path, flags, "step 3")
    records = read(tmp_path / "whole" / "metrics.jsonl")
    assert any(record["carried"] for record in records), records
