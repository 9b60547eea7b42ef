import pytest

from maxrl_fast import train
from maxrl_fast.training.trainer import WarmStart
from tests.runs import assert_same_run, base, stop_at

GOOD = "def score(prompt, response):\n    return len(response) % 2\n"
LATER = """import os
def score(prompt, response):
    with open(__file__ + ".calls", "a") as file:
        file.write(".")
    assert os.path.getsize(__file__ + ".calls") < 5  # as many as before the first step
    return 1.0
"""


@pytest.fixture
def reward(tmp_path):
    path = tmp_path / "reward.py"
    path.write_text(GOOD)
    return path


def job(reward, out, objective="rloo"):
    flags = f"--sft-steps 2 --steps 1 --log-to tensorboard --objective {objective} --reward "
    flags += f"{reward}:score --reward-workers 1 --out {out}"
    return [*base(), *flags.split()]


@pytest.mark.parametrize(
    ("result", "code", "sentence"),
    [
        ("1 / 0", 1, "before the first step: 4 of 4 rewards failed (exception 4)"),
        (".5", 2, "before the first step: this objective needs rewards of 0 or 1, got"),
    ],
)
def test_a_reward_that_cannot_work_ends_the_run_before_the_warm_start(
    reward, tmp_path, capsys, monkeypatch, result, code, sentence
):
    monkeypatch.setattr(WarmStart, "steps", lambda *_, **__: pytest.fail("the warm start began"))
    reward.write_text(f"def score(prompt, response):\n    return {result}\n")
    assert train.main(job(reward, tmp_path / "run", "pacs")) == code
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_that_ended_before_its_first_step_is_begun_again_by_the_same_command_alone(
    reward, tmp_path, capsys
):
    assert train.main(job(reward, tmp_path / "whole")) == 0
    out = tmp_path / "run"
    reward.write_text(LATER)
    assert train.main(job(reward, out)) == 1
    assert (out / "checkpoints" / "step-000000").exists()
    reward.write_text(GOOD)
    before = {path: path.stat().st_mtime_ns for path in (out / "checkpoints").rglob("*")}
    capsys.readouterr()
    assert train.main([*job(reward, out), "--seed", "1"]) == 2
    assert f"which holds another run; --resume {out} resumes it" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in (out / "checkpoints").rglob("*")} == before
    assert train.main(job(reward, out)) == 0
    assert_same_run(tmp_path / "whole", out)
    assert len(list((out / "tensorboard").iterdir())) == 1
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    capsys.readouterr()
    assert train.main(job(reward, out)) == 2  # it has taken a step now
    assert "which holds another run; --resume" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


@pytest.mark.slow
def test_a_run_that_was_stopped_in_its_warm_start_is_not_begun_again(
    reward, tmp_path, capsys, monkeypatch
):
    stop_at(monkeypatch, "warm start step 1")
    assert train.main(job(reward, tmp_path / "run")) == 143
    assert train.main(job(reward, tmp_path / "run")) == 2
    assert f"holds another run; --resume {tmp_path / 'run'} resumes it" in capsys.readouterr().err
