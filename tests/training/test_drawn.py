import pytest
import torch

from maxrl_fast.errors import InputError
from maxrl_fast.train import main
from maxrl_fast.training.schedule import Drawn, Learnability
from tests.runs import ROOT, base, read, resumes_bitwise
from tests.training.test_stopping import collector

# a chain of which ten are drawn
FEW = f"""
import sys
sys.path.append({str(ROOT)!r})
from examples.chain import ChainTask
from maxrl_fast.training.schedule import Learnability

class Few(ChainTask):
    num_train_prompts = 10

class Last(Learnability):
    def draw(self, table, count, generator):
        return table[:, 0].argsort(stable=True)[:count] if count < 5 else table[:count, 0].long()
"""


def test_prompts_are_drawn_by_the_variance_of_their_rewards():
    generator = torch.Generator().manual_seed(0)
    table = torch.tensor([[16, 0], [16, 4], [8, 4], [0.5, 0.5], [32, 24]], dtype=torch.float64)
    weights = torch.tensor([0, 3 / 16, 1 / 4, 0, 3 / 16], dtype=torch.float64)
    shares = 0.9 * weights / weights.sum() + 0.1 / 5
    draws = 5_000
    first, second = torch.zeros(2, 5, dtype=torch.float64)
    for _ in range(draws):
        one, two = Learnability().draw(table, 2, generator).tolist()
        first[one] += 1 / draws
        second[two] += 1 / draws
    after = shares[:, None] * shares / (1 - shares[:, None])  # [one, two]
    after.fill_diagonal_(0)
    for found, expected in ((first, shares), (second, after.sum(0))):
        assert ((found - expected).abs() < 5 * (expected / draws).sqrt()).all(), (found, expected)


def test_prompts_that_were_never_drawn_come_first_and_then_none_twice():
    table = torch.tensor([[4, 2], [0, 0], [4, 4], [0, 0]], dtype=torch.float64)
    for count in (1, 2, 3, 4):
        drawn = Learnability().draw(table, count, torch.Generator()).tolist()
        assert drawn[:2] == [1, 3][:count]
        assert len(set(drawn)) == count
    nothing = torch.tensor([[4, 0], [4, 4]], dtype=torch.float64)  # no variance: uniform
    generator = torch.Generator().manual_seed(0)
    assert {int(Learnability().draw(nothing, 1, generator)) for _ in range(9)} == {0, 1}


def test_the_table_counts_rollouts_and_is_halved_in_each_epoch():
    table = torch.zeros(5, 2, dtype=torch.float64)
    drawn = Drawn(table, Learnability(), 2, seed=3)
    rewards = {(0, 1): [1.0, 0.0], (2, 2): [1.0, 1.0], (4, 3): [0.6, 0.5]}
    own, engine = collector(rewards, drawn, 2, 2)
    expected = [
        [[2, 1], [2, 0], [0, 0], [0, 0], [0, 0]],
        [[2, 1], [2, 0], [2, 2], [2, 0], [0, 0]],
    ]
    for step, (first, counts) in enumerate(zip((0, 2), expected, strict=True), start=1):
        batch = own.collect(step, first)
        assert (engine.asked, batch.num_sampled) == ([first, first + 1], 2)
        assert batch.drawn_by is None
        assert table.tolist() == counts
    assert batch.metrics["prompts_seen"] == 0.4
    # the third step begins in the first epoch, the fourth, of prompts 6 and 7, in the second
    own.collect(3, 4)
    assert engine.asked[0] == 4
    before = table.clone()
    batch = own.collect(4, 6)
    index = torch.tensor(engine.asked)
    rates = before[index, 1] / before[index, 0]
    assert batch.metrics["drawn_pass_rate"] == pytest.approx(float(rates.mean()))
    before /= 2
    before[index, 0] += 2
    assert torch.equal(table, before)
    drawn.observe(torch.tensor([[1.0, torch.nan], [torch.nan, torch.nan]]))
    before[index] += torch.tensor([[2, 1], [2, 0]])
    assert torch.equal(table, before)


def test_a_draw_depends_on_seed_and_step_alone():
    def draws(seed, step):
        table = torch.tensor([[8.0, 4.0]] * 40, dtype=torch.float64)
        return Drawn(table, Learnability(), 8, seed).places(0, step)[0]

    assert draws(1, 5) == draws(1, 5)
    assert len({tuple(draws(*x)) for x in ((1, 5), (1, 6), (2, 5))}) == 3


@pytest.mark.parametrize("index", [[0, 0], [0, 5], [1], [-1, 2]])
def test_a_rule_that_draws_something_else_is_named(index):
    class Wrong(Learnability):
        def draw(self, table, count, generator):
            return torch.tensor(index)

    drawn = Drawn(torch.zeros(5, 2, dtype=torch.float64), Wrong(), 2, 0)
    with pytest.raises(InputError, match="--draw-prompts must return 2 different indices below 5"):
        drawn.places(0, 1)


def flags(tmp_path, rule, prompts=4):
    (tmp_path / "few.py").write_text(FEW)
    few = ["--task", f"{tmp_path}/few.py:Few", "--length", "8", "--prompts", str(prompts)]
    rule = f"{tmp_path}/few.py:{rule}" if rule in ("Few", "Last") else rule
    return [*base()[2:], *few, "--sft-steps", "0", "--objective", "grpo", "--draw-prompts", rule]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "ahead"), [("learnability", 0), ("learnability", 1), ("Last", 0)])
def test_a_run_with_drawn_prompts_resumes_bitwise(rule, ahead, tmp_path, monkeypatch):
    own = [*flags(tmp_path, rule), "--steps", "6", "--rollouts", "4", "--ahead", str(ahead)]
    resumes_bitwise(monkeypatch, tmp_path, own, "step 3")
    assert read(tmp_path / "whole" / "metrics.jsonl")[-1]["prompts_seen"] == 1


def test_what_cannot_be_drawn_is_refused(tmp_path, capsys):
    for rule, prompts, message in (
        ("learnability", 16, "--prompts 16 as num_train_prompts, got 10 of task chain"),
        ("Few", 4, "a class of maxrl_fast.training.schedule.Learnability, got"),
        ("learnable", 4, "--draw-prompts must be uniform, learnability, FILE.py:CLASS or"),
    ):
        assert main([*flags(tmp_path, rule, prompts), "--out", str(tmp_path / "run")]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "run").exists()
