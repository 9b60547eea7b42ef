"""The benchmark against another commit: its figures, comparison, refusals, and the worktree that it
removes.
"""

import json
import subprocess
import sys

import pytest

from bench import against, attention
from bench.against import ROOT, agree, built_worktree, main
from bench.measure import run_command
from maxrl_fast.model.decoder import DecoderConfig

TINY = DecoderConfig(16, 32, 48, 1, 4, 2, 8, max_position_embeddings=32)


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["against", "--threads", "1", "--rounds", "2", *arguments])
    return run_command(main)


def worktrees(root):
    command = ["git", "-C", root, "worktree", "list"]
    return subprocess.check_output(command, text=True).splitlines()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of one commit, in the place of ours."""
    root = tmp_path / "repository"
    root.mkdir()
    (root / "file").write_text("x")
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    commit = [*identity, "commit", "--quiet", "-m", "x"]
    for command in (["init", "--quiet"], ["add", "file"], commit):
        subprocess.run(["git", "-C", root, *command], check=True)
    monkeypatch.setattr(against, "ROOT", root)
    return root


@pytest.mark.slow
def test_figures_of_this_tree_against_itself(monkeypatch, capsys):
    monkeypatch.setitem(against.UPDATES, "update", (TINY, attention.Case(4, 5, 3, 1, 4, 4, 2, 8)))
    monkeypatch.setitem(against.rollout.CASES, "maze7", ((5, 1, 2), (32, 48, 4, 2)))
    monkeypatch.setattr(against, "ROLLOUTS", ("maze7",))
    compared = []
    monkeypatch.setattr(against, "agree", lambda what, results, tolerance: compared.append(results))
    cases = ("--cases", "update", "rollout", "operators")
    assert run(monkeypatch, "--checkout", str(ROOT), *cases) == 0
    assert [results["ours"].keys() for results in compared] == [
        {"loss", "gradient norm"},
        {"first tokens' log-prob", "log-prob", "tokens"},
    ]
    assert all(results["ours"] == results["theirs"] for results in compared)
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document.keys() == {"benchmark", "machine", "commit", "cases"}
    update, rollout = document["cases"]["update"], document["cases"]["rollout"]["maze7"]
    for figures in (update["float32"], rollout["float32"]):
        for each in ("milliseconds", "share_of_floor"):
            assert figures[each].keys() == {"ours", "theirs"}
        assert 0.1 < figures["ratio"] < 10
        assert 0 < figures["floor_milliseconds"] < min(figures["milliseconds"].values())
    operators = document["cases"]["operators"]
    assert operators["ours"] == operators["theirs"] > 10


def test_results_that_differ_end_the_benchmark():
    agree("update", {"ours": {"loss": 1.0}, "theirs": {"loss": 1.00001}}, 1e-4)
    wanted = r"update: the loss of ours is 1\.0, that of theirs 1\.001: nothing is timed"
    with pytest.raises(RuntimeError, match=wanted):
        agree("update", {"ours": {"loss": 1.0}, "theirs": {"loss": 1.001}}, 1e-4)


def test_bad_input_is_one_sentence_and_exit_code_2(monkeypatch, capsys, tmp_path, repository):
    assert run(monkeypatch, "no-such-commit") == 2
    error = "error: COMMIT must name a commit of this repository, got 'no-such-commit'\n"
    assert capsys.readouterr().err == error
    assert run(monkeypatch, "--checkout", str(tmp_path)) == 2
    error = "error: --checkout must be a tree with a built extension"
    assert capsys.readouterr().err.startswith(error)
    for arguments in (["HEAD", "--cases", "nothing"], []):
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch, *arguments)
        assert ended.value.code == 2
        assert "against: error: " in capsys.readouterr().err.splitlines()[-1]
    assert len(worktrees(repository)) == 1


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_worktree_is_removed_after_an_error(monkeypatch, repository, error):
    folders = []
    monkeypatch.setattr(against, "build", folders.append)

    def use():
        with built_worktree("HEAD") as folder:
            assert folders == [folder]
            assert (folder / "file").read_text() == "x"
            assert len(worktrees(repository)) == 2
            raise error

    with pytest.raises(error):
        use()
    assert list((repository / "build").iterdir()) == []
    assert len(worktrees(repository)) == 1
