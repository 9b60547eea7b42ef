import itertools
import json
import shlex
import signal
import subprocess
import sys
import time

import pytest

from maxrl_fast import sweep, train
from maxrl_fast.sweep import mean_over_seeds
from tests.runs import CHAIN_TASK, ROOT, read
from tests.tables import table

FLAGS = [
    *f"--task {CHAIN_TASK} --prompts 4 --rollouts 4 --eval-prompts 1 --eval-samples 4".split(),
    *"--hidden-size 32 --intermediate-size 48 --layers 1 --heads 4 --kv-heads 2".split(),
    *"--threads 1 --dtype float32".split(),
]


def printed(capsys, *flags):
    assert sweep.main([*flags, "--dry-run"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert all(line[:3] == [sys.executable, "-m", "maxrl_fast.train"] for line in lines)
    return [line[3:] for line in lines]


def after(words, flag):
    return next(x.partition("=")[2] for x in words if x.startswith(f"{flag}="))


def test_options_with_several_values_are_the_sides_of_the_grid(capsys, tmp_path):
    config = tmp_path / "shared.toml"
    config.write_text(f"steps = 7\ntask = '{CHAIN_TASK}'\n")
    sides = "--seeds 0 1 --objective maxrl grpo --lr 1e-3 2e-3 --checkpoint-activations".split()
    commands = printed(capsys, "--config", str(config), *sides)
    shown = [(after(x, "--objective"), after(x, "--lr"), after(x, "--seed")) for x in commands]
    assert shown == [*itertools.product(("maxrl", "grpo"), ("1e-3", "2e-3"), ("0", "1"))]
    for x in commands:
        assert after(x, "--config") == str(config)
        assert x[-2:] == ["--resume", "auto"]
        assert "--checkpoint-activations" in x
    assert commands[3][-3] == "runs/sweep/objective-maxrl_lr-2e-3_seed-1"


def test_a_value_that_begins_with_a_dash_stays_a_value(capsys):
    words = printed(capsys, *"--task gsm8k --data x".split(), "--prompt-suffix=-- think")[0]
    assert "--prompt-suffix=-- think" in words


@pytest.mark.parametrize(
    ("flags", "message"),
    table("""
    --objective maxpo maxrl --k 4 | error: --k is not used by objective
        maxrl
    --lr 0.1 -0.1 | error: --lr must be a finite number above 0, got -0.1
    --seeds 0 1 --length 4 | error: unknown option --length
    --resume runs/x | a sweep takes no --resume, because the same command resumes it
    --lr 0.1 --lr 0.2 | each option must be given once, with all its values after it
    """),
)
def test_bad_input_is_refused_before_the_first_run(flags, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sweep.main(flags.split()) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_interval_of_a_mean_over_seeds_is_of_students_t_distribution():
    half = 4.303 * 0.1 / 3**0.5
    interval = {"mean": 0.3, "low": 0.3 - half, "high": 0.3 + half}
    assert mean_over_seeds([0.2, 0.3, 0.4]) == pytest.approx(interval)
    assert mean_over_seeds([0.5]) == {"mean": 0.5}
    for num, quantile in {2: 12.706, 6: 2.571, 30: 2.228}.items():  # of more than 11: wider
        error = (num / 4 / (num - 1) / num) ** 0.5
        high = mean_over_seeds([0, 1] * (num // 2))["high"]
        assert high == pytest.approx(0.5 + quantile * error, abs=1e-3)


def finish(folder, steps, **options):
    (folder / "checkpoints" / f"step-{steps:06d}").mkdir(parents=True)
    (folder / "latest").symlink_to(f"checkpoints/step-{steps:06d}")
    rise = 0.1 + 0.1 * options["seed"]
    scores = {0: {"1": 0.1}, steps: {"1": 0.1 + rise, "2": 1.0}}
    lines = [{"step": n, "pass_at_k": x, "max_at_k": x} for n, x in scores.items()]
    (folder / "eval.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    config = {"objective": "maxrl", "task": "maze", "lr": 0.1, "dtype": "float32", "steps": steps}
    (folder / "config.json").write_text(json.dumps(config | options))


def test_finished_runs_are_summarized_without_training(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    name = "clip-grad-" + "0" * 40 + "1"
    for seed in range(3):
        finish(tmp_path / f"{name}_seed-{seed}", 200, seed=seed, clip_grad=1.0)
    grid = ["--clip-grad", "0" * 40 + "1", "0.1", "--seeds", "0", "1", "2"]
    command = ["--objective", "maxrl", *grid, "--out", str(tmp_path)]
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda words, **_: started.append(words) or Failing())
    assert sweep.main([*command, "--lr", "0.1"]) == 1
    text, error = capfd.readouterr()
    rows = [[x.strip() for x in line.strip("│┃").split("│")] for line in text.splitlines()]
    assert ["pass@1", "0.100", "0.300", "+0.200 (-0.048, +0.448)"] in rows
    assert "pass@2" not in text  # which not all have
    assert max(map(len, text.splitlines())) <= 100
    assert [after(words, "--seed") for words in started] == ["0", "1", "2"]
    assert "3 of 6 runs failed: clip-grad-0.1_seed-0" in error
    for others in ("--lr", "0.5"), ("--steps", "300"):  # a run refuses or takes these itself
        started.clear()
        assert sweep.main([*command, *others]) == 1
        assert len(started) == 6


class Failing:
    returncode = 2

    def wait(self):
        return 2


@pytest.mark.slow
def test_ctrl_c_stops_the_run_and_the_sweep_and_the_same_command_resumes_both(tmp_path, capfd):
    out, whole = tmp_path / "sweep", tmp_path / "whole"
    flags = [*FLAGS, *"--steps 30 --objective maxrl --seeds 0 1".split()]
    command = [sys.executable, "-m", "maxrl_fast.sweep", *flags, "--out", str(out)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, **options)
    log, limit = out / "seed-0" / "metrics.jsonl", time.monotonic() + 120
    while not (log.exists() and log.read_text().count("\n") > 3):
        assert time.monotonic() < limit
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "stopped; the same command resumes the sweep" in output
    assert not (out / "seed-1").exists()
    num_done = len(read(log))
    assert num_done < 30
    assert sweep.main([*flags, "--quiet", "--out", str(out)]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[:2] == ["run 1 of 2: seed-0", "run 2 of 2: seed-1"]  # nothing of the runs
    assert lines[2].startswith("┏")
    ends = zip(*(read(out / f"seed-{i}" / "eval.jsonl") for i in (0, 1)), strict=True)
    means = [f"{sum(x['pass_at_k']['1'] for x in end) / 2:.3f}" for end in ends]
    (row,) = (line for line in lines if "pass@1" in line)
    assert [x.strip() for x in row.split("│")][2:4] == [means[0], means[-1]]
    assert [record["step"] for record in read(log)] == list(range(1, 31))
    assert train.main([*flags[:-3], "--seed", "0", "--out", str(whole)]) == 0
    weights = (x / "latest" / "model.safetensors" for x in (out / "seed-0", whole))
    assert len({path.read_bytes() for path in weights}) == 1
