"""Tests of the script at a tiny size: it resumes after a kill, stops at its tokens and leaves out
what it says. They check no ranking of objectives."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.training.objectives.registry import OBJECTIVES
from tests.papers.load import FOLDER, load

league = load("objectives_league")

TINY = [
    *"--maze-size 5 --sft-steps 40 --prompts 4 --tokens 700 --variance-steps 2".split(),
    *"--eval-mazes 4 --eval-samples 16 --seeds 1 --objectives pacs".split(),
]
SMALL = {
    "maze_size": 5,
    "prompts": 2,
    "rollouts": 4,
    "hidden_size": 16,
    "intermediate_size": 32,
    "layers": 1,
    "heads": 2,
}
SMALL |= {"kv_heads": 1, "keep_rollouts": 0, "threads": 1, "device": "cpu", "dtype": "float32"}


def command(folder):
    script = FOLDER / "objectives_league.py"
    return [sys.executable, script, *TINY, "--out", folder, "--work", folder / "work"]


def results(folder):
    """Return the results without times."""
    runs = json.loads((folder / "objectives_league.json").read_text())["results"]["runs"]
    return [{key: value for key, value in one.items() if key != "seconds"} for one in runs]


def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def exists(pid):
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_a_league_that_is_killed_continues_and_ends_as_one_that_is_not(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run = subprocess.run(command(whole), capture_output=True, text=True, check=True)
    assert "2 of 2 runs, about 0 minutes left" in run.stdout
    assert (whole / "objectives_league.png").read_bytes().startswith(b"\x89PNG")
    start, one = results(whole)
    assert [start["objective"], one["objective"]] == ["warm start", "pacs"]
    assert (start["tokens"], start["steps"]) == (0, 0)
    assert one["pass_at_k"].keys() == {"1", "2", "4", "8", "16"}
    assert one["pass_at_k"] != start["pass_at_k"]
    assert 700 <= one["tokens"] < 700 + 4 * 16 * 8  # 8 tokens are the limit of a response
    assert one["entropy"] > 0
    assert one["gradient_variance"] is None or one["gradient_variance"] > 0
    assert len(one["reward"]) == one["steps"] > 1

    killed.mkdir()
    log = (killed / "log").open("w")
    process, limit = (
        subprocess.Popen(command(killed), stdout=log, stderr=log),
        time.monotonic() + 600,
    )
    while not (killed / "work" / "warm-start-seed0.json").exists():
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.01)
    workers = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    while any(map(exists, workers)):
        assert time.monotonic() < limit
        time.sleep(0.01)
    before = (killed / "work" / "warm-start-seed0.json").read_bytes()
    again = subprocess.run(command(killed), capture_output=True, text=True, check=True)
    assert "warm start, seed 0" not in again.stdout
    assert (killed / "work" / "warm-start-seed0.json").read_bytes() == before
    assert results(killed) == results(whole)


@pytest.mark.slow
def test_without_time_no_run_begins_and_a_run_of_other_settings_does_not_count(tmp_path, capsys):
    flags = [*TINY, "--out", str(tmp_path), "--work", str(tmp_path / "work"), "--threads", "1"]
    assert league.main([*flags, "--hours", "1e-9"]) == 0
    assert "2 of 2 runs are missing: the same command continues" in capsys.readouterr().out
    assert results(tmp_path) == []
    settings = league.LeagueSettings(work=tmp_path / "work")
    one = league.league_run(settings, "rloo", 0, Path("policy"))
    league.write_json(
        tmp_path / "work" / "rloo-seed0.json", {"run": vars(one), "outcome": {"steps": 7}}
    )
    assert league.stored(one, settings) == {"steps": 7}
    other = league.league_run(league.LeagueSettings(lr=1e-3), "rloo", 0, Path("policy"))
    assert league.stored(other, settings) is None


def test_the_relative_variance_has_no_bias_and_no_scale():
    vectors = torch.tensor([[1.0, 0.0], [3.0, 0.0]], dtype=torch.float64)
    assert league.relative_variance(vectors) == pytest.approx(2 / (4 - 2 / 2))
    assert league.relative_variance(torch.tensor([[1.0], [-1.0]])) == float("inf")
    generator = torch.Generator().manual_seed(0)
    mean, scale = torch.tensor([2.0, -1.0, 0.5]), torch.tensor([1.0, 0.5, 3.0])
    drawn = mean + scale * torch.randn(200_000, 3, generator=generator, dtype=torch.float64)
    expected = float(scale.square().sum() / mean.square().sum())
    assert league.relative_variance(drawn) == pytest.approx(expected, rel=0.01)
    assert league.relative_variance(-7 * drawn) == pytest.approx(league.relative_variance(drawn))


def test_gradients_are_of_a_policy_that_stays_and_are_not_clipped():
    trainer, _ = league.build(SMALL | {"objective": "nsr", "seed": 3})
    before = [p.detach().clone() for p in trainer.learner.model.parameters()]
    records, variance = league.gradient_variance(trainer, 3)
    assert all(
        torch.equal(a, b) for a, b in zip(before, trainer.learner.model.parameters(), strict=True)
    )
    last = torch.cat([p.grad.flatten() for p in trainer.learner.model.parameters()])
    assert float(last.norm()) == pytest.approx(records[-1].metrics["grad_norm"], rel=1e-5)
    assert records[-1].metrics["grad_norm"] > 0.1  # the default limit of the norm
    assert len({record.metrics["grad_norm"] for record in records}) == 3
    assert variance > 0


def test_training_stops_with_the_step_that_reaches_the_tokens(monkeypatch):
    trainer, _ = league.build(SMALL | {"objective": "nsr"})
    records = [*league.steps(trainer, 150)]
    tokens = [record.tokens["rollout"] for record in records]
    assert sum(tokens[:-1]) < 150 <= sum(tokens)
    monkeypatch.setattr(league, "MOST_STEPS", 2)
    assert len([*league.steps(trainer, 10**6)]) == 2
    assert [*league.steps(trainer, 0)] == []


def test_every_objective_is_in_the_league_or_is_left_out_for_a_reason_that_holds():
    assert set(league.LEAGUE) | set(league.LEFT_OUT) == set(OBJECTIVES)
    assert not set(league.LEAGUE) & set(league.LEFT_OUT)
    rewards = torch.randint(0, 2, (40, 16), generator=torch.Generator().manual_seed(0)).double()
    none = {"false_positive_rate": 0.0, "false_negative_rate": 0.0}
    for name, options, other, factor in (
        ("maxrl_ratio", {}, "maxrl", 1.0),
        ("reinforce", {}, "rloo", 15 / 16),
        ("pkpo", {"k": 4}, "expected_improvement", 4 / 16),
        ("noisy_verifier_backward", none, "reinforce", 1.0),
        ("noisy_verifier_forward", {"false_negative_rate": 0.0}, "nsr", 1.0),
    ):
        size = {"k": 4} if other in ("pkpo", "expected_improvement") else {}
        expected = factor * ops.group_advantage(rewards, other, **size)
        assert expected.abs().max() > 0.1
        torch.testing.assert_close(ops.group_advantage(rewards, name, **options), expected)


def test_only_seeds_that_all_have_finished_are_compared():
    def one(objective, seed, rate):
        return {"objective": objective, "seed": seed, "pass_at_k": {"1": rate}}

    runs = [one("a", 0, 0.1), one("b", 0, 0.3), one("a", 1, 0.9)]
    assert league.by_objective({"runs": runs}) == {"b": [runs[1]], "a": [runs[0]]}
    assert league.by_objective({"runs": runs[1:]}) == {"a": [runs[2]], "b": [runs[1]]}
    assert league.by_objective({"runs": []}) == {}
