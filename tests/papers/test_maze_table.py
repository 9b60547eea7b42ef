"""Tests of the script at a tiny size: it stops, moves and continues bitwise, and divides its time.
They check no ranking.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from maxrl_fast.config.checks import check
from maxrl_fast.config.parse import parse
from maxrl_fast.config.resolve import resolve
from maxrl_fast.tasks.maze import MazeTask
from tests.papers.load import FOLDER, load

maze_table, read = load("maze_table"), load("training_runs").records
STEPS = 30
RECIPE = """
task = "maze"
maze_size = 7
max_new_tokens = 16
hidden_size = 32
intermediate_size = 48
layers = 2
heads = 4
kv_heads = 2
sft_steps = 5
sft_batch = 8
prompts = 4
rollouts = 8
lr_schedule = "constant"
warmup_steps = 0
eval_every = 15
eval_prompts = 8
eval_samples = 4
save_every = 0
threads = 1
dtype = "float32"
device = "cpu"
"""


@pytest.fixture
def command(tmp_path):
    (tmp_path / "recipe.toml").write_text(RECIPE)
    return [
        sys.executable,
        FOLDER / "maze_table.py",
        "--recipe",
        tmp_path / "recipe.toml",
        *f"--objectives maxrl --steps {STEPS} --out".split(),
    ]


def stopped(command, out, name):
    """Stop the script once the run NAME has taken three more steps; return how many steps it had
    saved.
    """
    metrics = out / name / "metrics.jsonl"
    before = len(read(metrics)) if metrics.exists() else 0
    process, limit = subprocess.Popen([*command, out]), time.monotonic() + 300
    while not metrics.exists() or len(metrics.read_text().splitlines()) < before + 3:
        assert process.poll() is None
        assert time.monotonic() < limit
        time.sleep(0.002)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    return len(read(metrics))


def results(out, name):
    """Return what must be bitwise the same: the policy's weights, and the logs without their
    timings.
    """
    (newest,) = (out / name / "checkpoints").iterdir()
    logs = [read(out / name / log) for log in ("metrics.jsonl", "eval.jsonl", "samples.jsonl")]
    untimed = [
        [{k: v for k, v in line.items() if "second" not in k} for line in log] for log in logs
    ]
    return newest.name, (newest / "model.safetensors").read_bytes(), untimed


@pytest.mark.slow
def test_a_run_that_is_stopped_and_moved_equals_an_uninterrupted_one_bitwise(
    command, tmp_path, monkeypatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    whole, parts, moved = tmp_path / "whole", tmp_path / "parts", tmp_path / "moved"
    assert (
        subprocess.run([*command, whole], check=True, capture_output=True, text=True).stdout.count(
            "| maxrl |"
        )
        == 1
    )
    step = stopped(command, parts, "maxrl")
    assert 3 <= step < STEPS
    # Links and the finished warm start stay behind.
    shutil.copytree(
        parts,
        moved,
        ignore=lambda _, names: [n for n in names if n in ("latest", "best", "warm-start")],
    )
    shutil.copytree(
        parts / "warm-start",
        moved / "warm-start",
        ignore=shutil.ignore_patterns("checkpoints", "latest", "best"),
    )
    shutil.rmtree(parts)
    subprocess.run([*command, moved], check=True, capture_output=True)
    # not from the beginning
    assert f", from maxrl/checkpoints/step-{step:06d}\n" in (moved / "maxrl.log").read_text()
    assert len(results(whole, "maxrl")[2][0]) == STEPS
    assert results(moved, "maxrl") == results(whole, "maxrl")
    records = [
        json.loads((out / "maze_table.json").read_text())["results"]["runs"]
        for out in (whole, moved)
    ]
    assert records[0]["maxrl"]["pass_at_k"].keys() == {"0", "15", "30"}
    assert [run["pass_at_k"] for run in records[0].values()] == [
        run["pass_at_k"] for run in records[1].values()
    ]
    pieces = [piece["run"] for piece in read(moved / "pieces.jsonl")]
    assert pieces == ["warm-start", "maxrl", "maxrl"]
    assert (moved / "maze_table.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_time_that_ends_before_the_first_checkpoint_loses_nothing(command, tmp_path):
    run = subprocess.run(
        [*command, tmp_path / "out", "--minutes", "0.001"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert "No objective has been evaluated yet." in run.stdout
    assert (
        "No objective has been evaluated yet." in (tmp_path / "out" / "maze_table.md").read_text()
    )


class Clock:
    """Replaces `train`: a run takes the time that it is given, or what it needs to be finished."""

    def __init__(self, needed):
        self.now, self.needed, self.given = 0.0, needed, []

    def train(self, out, name, flags, steps, seconds):
        self.given.append((name, seconds))
        used = min(seconds, self.needed[name])
        self.now, self.needed[name] = self.now + used, self.needed[name] - used

    def is_finished(self, folder, steps):
        return not self.needed[folder.name]


def test_the_time_is_divided_among_what_is_not_finished(tmp_path, monkeypatch):
    clock = Clock({"warm-start": 60.0, "maxrl": 200.0, "grpo": 1000.0, "rloo": 1000.0})
    monkeypatch.setattr(maze_table, "train", clock.train)
    monkeypatch.setattr(maze_table, "is_finished", clock.is_finished)
    monkeypatch.setattr(maze_table.time, "monotonic", lambda: clock.now)
    settings = maze_table.TableSettings(out=tmp_path, objectives=("maxrl", "grpo", "rloo"))
    maze_table.train_all(settings, 960.0)
    assert clock.given == [
        ("warm-start", 960.0),
        ("maxrl", 300.0),
        ("grpo", 350.0),
        ("rloo", 350.0),
    ]
    clock.given.clear()
    maze_table.train_all(settings, clock.now + 100.0)
    assert clock.given == [("grpo", 50.0), ("rloo", 50.0)]


def test_objectives_are_compared_after_equal_steps(tmp_path):
    def of_run(*steps):
        rates = {f"{step}": {"1": step / 1e3, "128": step / 500} for step in steps}
        return {
            "steps": steps[-1] + 7,
            "pass_at_k": rates,
            "seconds": {f"{step}": step * 6.0 for step in steps},
        }

    runs = {"maxrl": of_run(0, 250, 500), "grpo": of_run(0, 250)}
    piece = {"run": "maxrl", "seconds": 90.0, "device": "CPU", "torch": "2.13.0"}
    text = maze_table.markdown({"runs": runs, "pieces": [piece, piece]}, maze_table.TableSettings())
    assert "after 250 steps" in text
    assert "| warm start | 0.000 | 0.000 |  |  |  |" in text
    assert "| maxrl | 0.250 | 0.500 | 25.0 | 507 | 84.4 / 92.0 / 94.3 |" in text
    assert "| grpo | 0.250 | 0.500 | 25.0 | 257 | 39.6 / 42.4 / 43.0 |" in text
    assert "2 pieces of 3.0 minutes in total, on CPU, torch 2.13.0." in text


def test_the_objectives_are_the_papers_losses():
    """Appendix F: advantages of a sample standard deviation for GRPO, and an average over all
    tokens of a batch.
    """
    losses = {}
    for name, flags in maze_table.OBJECTIVES.items():
        config = parse(["--config", str(maze_table.RECIPE), *flags, "--out", "none"])
        check(config)
        options = resolve(config, MazeTask(17)).flat()
        losses[name] = [
            options[key] for key in ("aggregation", "order", "k", "ddof", "updates_per_step")
        ]
    assert losses == {
        "maxrl": ["token_mean", 127, None, None, 1],
        "grpo": ["token_mean", None, None, 1, 1],
        "rloo": ["token_mean", None, None, None, 1],
        "maxpo-k4": ["token_mean", None, 4, None, 1],
        "maxpo-k16": ["token_mean", None, 16, None, 1],
        "pacs": ["seq_mean_token_sum", None, None, None, 1],
    }


def test_a_run_that_fails_is_named_and_bad_settings_are_refused(command, tmp_path, capsys):
    for bad in (["--objectives", "nothing"], ["--steps", "0"], ["--minutes", "0"]):
        assert maze_table.main([*bad, "--out", str(tmp_path / "out")]) == 2
        assert f"error: {bad[0]} must be" in capsys.readouterr().err
    assert not os.listdir(tmp_path / "out")
    (tmp_path / "recipe.toml").write_text(RECIPE + "sft_lr = -1.0\n")
    assert maze_table.main([*map(str, command[2:]), str(tmp_path / "out")]) == 2
    assert str(tmp_path / "out" / "warm-start.log") in capsys.readouterr().err
