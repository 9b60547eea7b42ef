import json
import sys
from dataclasses import asdict

import pytest

from bench import against
from bench.against import ROOT, agree, main
from bench.measure import run_command
from maxrl_fast.model.decoder import DecoderConfig

TINY = DecoderConfig(16, 32, 48, 1, 4, 2, 8, max_position_embeddings=32)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["against", "--threads", "1", "--rounds", "2", *arguments])
    return run_command(main)


@pytest.mark.slow
def test_figures_of_this_tree_against_itself(monkeypatch, capsys):
    sizes = {"count": 4, "prompt_length": 5, "num_rollouts": 3, "shortest": 1, "longest": 4}
    monkeypatch.setattr(against, "UPDATE", {"config": asdict(TINY), **sizes})
    monkeypatch.setitem(against.rollout.CASES, "maze7", ((5, 1, 2), (32, 48, 4, 2)))
    monkeypatch.setattr(against, "ROLLOUTS", ("maze7",))
    compared = []
    monkeypatch.setattr(against, "agree", lambda what, results, tolerance: compared.append(results))
    cases = ("--cases", "update", "rollout")
    assert run(monkeypatch, "--checkout", str(ROOT), *cases) == 0
    assert [results["ours"].keys() for results in compared] == [
        {"loss", "gradient norm"},
        {"first tokens' log-prob", "log-prob", "tokens"},
    ]
    assert all(results["ours"] == results["theirs"] for results in compared)
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document.keys() == {"benchmark", "machine", "commit", "cases"}
    update, rollout = document["cases"]["update"], document["cases"]["rollout"]["maze7"]
    for figures in (update, rollout):
        for each in ("milliseconds", "share_of_floor"):
            assert figures[each].keys() == {"ours", "theirs"}
        assert 0.1 < figures["ratio"] < 10
        assert 0 < figures["floor_milliseconds"] < min(figures["milliseconds"].values())


def test_results_that_differ_end_the_benchmark():
    agree("update", {"ours": {"loss": 1.0}, "theirs": {"loss": 1.00001}}, 1e-4)
    wanted = r"update: the loss of ours is 1\.0, that of theirs 1\.001: nothing is timed"
    with pytest.raises(RuntimeError, match=wanted):
        agree("update", {"ours": {"loss": 1.0}, "theirs": {"loss": 1.001}}, 1e-4)
