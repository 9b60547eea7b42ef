"""The sweep: its grid, what it refuses, a run that fails, Ctrl-C and resuming, the numbers over
seeds.
"""

import itertools
import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from maxrl_fast import sweep, train
from maxrl_fast.evaluation.seeds import over_seeds
from maxrl_fast.job.screen import Screen
from tests.runs import CHAIN_TASK, read
from tests.tables import table

ROOT = Path(__file__).parents[1]
FLAGS = [
    *f"--task {CHAIN_TASK} --prompts 4 --rollouts 4 --eval-prompts 1 --eval-samples 4".split(),
    *"--hidden-size 32 --intermediate-size 48 --layers 1 --heads 4 --kv-heads 2".split(),
    *"--threads 1 --dtype float32".split(),
]


def printed(capsys, *flags):
    """Return the commands that --dry-run prints, without the interpreter."""
    assert sweep.main([*flags, "--dry-run"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert all(line[:3] == [sys.executable, "-m", "maxrl_fast.train"] for line in lines)
    return [line[3:] for line in lines]


def after(words, flag):
    return words[words.index(flag) + 1]


def test_options_with_several_values_are_the_sides_of_the_grid(capsys, tmp_path):
    config = tmp_path / "shared.toml"
    config.write_text(f"steps = 7\ntask = '{CHAIN_TASK}'\n")
    sides = "--seeds 0 1 --objective maxrl grpo --lr 1e-3 2e-3 --compile".split()
    commands = printed(capsys, "--config", str(config), *sides)
    shown = [(after(x, "--objective"), after(x, "--lr"), after(x, "--seed")) for x in commands]
    assert shown == [*itertools.product(("maxrl", "grpo"), ("1e-3", "2e-3"), ("0", "1"))]
    for x in commands:
        assert (after(x, "--config"), after(x, "--resume")) == (str(config), "auto")
        assert "--compile" in x
    assert after(commands[3], "--out") == "runs/sweep-shared/maxrl_lr-2e-3_seed-1"


def test_a_value_that_begins_with_a_dash_stays_a_value(capsys):
    words = printed(capsys, *"--task gsm8k --data x".split(), "--prompt-suffix=-- think")[0]
    assert "--prompt-suffix=-- think" in words


@pytest.mark.parametrize(
    ("flags", "message"),
    table("""
    --objective maxpo maxrl --k 4 | error: the run of objective maxrl: --k is not used by objective
        maxrl
    --lr 0.1 -0.1 | error: the run of lr -0.1: lr must be a finite number above 0, got -0.1
    --task maze --model a/b a-b --seeds 0 | model-a-b_seed-0 is of two runs of the grid
    --steps MANY --seeds MANY | error: a sweep must have at most 10,000 runs, got 640,000
    --lr 0.1 --lr 0.2 | --lr must be given once, with all its values after it
    """),
)
def test_bad_input_is_refused_before_the_first_run(flags, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sweep.main(flags.replace("MANY", "1 " * 800).split()) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_grid_of_thousands_of_runs_is_printed(capsys):
    assert len(printed(capsys, "--seeds", *map(str, range(3422)))) == 3422


def test_the_mean_and_standard_error_are_over_the_seeds_that_have_an_evaluation(tmp_path):
    for seed, passes in enumerate([{"1": 0.1, "2": 0.5}, {"1": 0.4}, {"1": 0.4, "2": 0.5}, None]):
        (tmp_path / str(seed)).mkdir()
        if passes is not None:
            lines = [{"step": 0, "pass_at_k": {"1": 0.9}}, {"step": 3, "pass_at_k": passes}]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            text += '{"step": 4, "pass_at_k": {"1": 0.0}'
            (tmp_path / str(seed) / "eval.jsonl").write_text(text)
    row = over_seeds("maxrl", {seed: tmp_path / str(seed) for seed in range(4)})
    assert (row["group"], row["seeds"], list(row["pass_at_k"])) == ("maxrl", [0, 1, 2], ["1"])
    assert row["pass_at_k"]["1"] == pytest.approx({"mean": 0.3, "standard_error": 0.1})
    alone = over_seeds("grpo", {0: tmp_path / "0"})
    assert alone["pass_at_k"]["2"] == {"mean": 0.5, "standard_error": None}


def test_a_mean_over_seeds_mixes_no_runs_of_different_steps(tmp_path, capsys):
    """Where a sweep was extended for some of its seeds only, the others have the pass@k of an
    earlier step.
    """
    runs = {}
    for seed, steps in ((0, 4), (1, 2), (2, 4)):
        folder = tmp_path / f"maxrl_seed-{seed}"
        folder.mkdir()
        line = {"step": steps, "pass_at_k": {"1": 0.1 * steps}}
        (folder / "eval.jsonl").write_text(json.dumps(line) + "\n")
        runs[folder.name] = {"group": "maxrl", "seed": seed, "options": {"steps": steps}}
        runs[folder.name]["state"] = "finished"
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": runs}))
    assert sweep.Sweep(tmp_path, [], Screen()).run() == 0
    (row,) = json.loads((tmp_path / "sweep.json").read_text())["summary"]
    assert (row["seeds"], row["pass_at_k"]["1"]) == ([0, 2], {"mean": 0.4, "standard_error": 0.0})


@pytest.mark.slow
def test_a_sweep_goes_on_after_a_failure_reports_and_does_not_repeat_what_is_finished(
    tmp_path, capfd
):
    out = tmp_path / "sweep"
    shared = [*"--steps 2 --seeds 0 --objective maxrl --out".split(), str(out)]
    assert sweep.main([*FLAGS, *shared, "--length", "0", "3"]) == 1
    name, failed = "maxrl_length-3_seed-0", "maxrl_length-0_seed-0"
    assert f"1 of 2 runs failed: {failed}" in capfd.readouterr().err
    assert (out / "report.html").exists()
    content = json.loads((out / "sweep.json").read_text())
    states = {name: run["state"] for name, run in content["runs"].items()}
    assert states == {failed: "failed with exit code 2", name: "finished"}
    last = read(out / name / "eval.jsonl")[-1]["pass_at_k"]["1"]
    (row,) = [row for row in content["summary"] if row["seeds"]]
    assert row["pass_at_k"]["1"]["mean"] == pytest.approx(last)
    (out / "maxrl_length-4_seed-0").mkdir()
    (out / "maxrl_length-4_seed-0" / "config.json").write_text("{}")
    written = (out / name / "config.json").stat().st_mtime_ns
    only_whole = [*FLAGS, *shared, "--length", "3", "4"]
    capfd.readouterr()
    assert sweep.main([*only_whole, "--clip-grad", "0.3"]) == 2
    said = "was begun with other options (clip_grad: 0.1 before, 0.3 now); use another --out"
    assert said in capfd.readouterr().err
    assert sweep.main(only_whole) == 2
    said = "maxrl_length-4_seed-0 holds a run that is not of this sweep; use another --out"
    assert said in capfd.readouterr().err
    (out / "maxrl_length-4_seed-0" / "config.json").unlink()
    assert sweep.main(only_whole) == 0
    assert written == (out / name / "config.json").stat().st_mtime_ns
    content = json.loads((out / "sweep.json").read_text())
    assert len(content["runs"]) == 3  # of both commands
    groups = [row["group"] for row in content["summary"] if row["seeds"]]
    assert groups == ["maxrl_length-3", "maxrl_length-4"]


@pytest.mark.slow
def test_ctrl_c_stops_the_run_and_the_sweep_and_the_same_command_resumes_both(tmp_path):
    out, whole = tmp_path / "sweep", tmp_path / "whole"
    flags = [*FLAGS, *"--steps 30 --objective maxrl --seeds 0 1".split()]
    command = [sys.executable, "-m", "maxrl_fast.sweep", *flags, "--out", str(out)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, **options)
    log, limit = out / "maxrl_seed-0" / "metrics.jsonl", time.monotonic() + 120
    while not (log.exists() and log.read_text().count("\n") > 3):
        assert time.monotonic() < limit
        assert process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert "stopped by Ctrl-C; the same command resumes the sweep" in output
    assert not (out / "maxrl_seed-1").exists()
    runs = json.loads((out / "sweep.json").read_text())["runs"]
    assert runs["maxrl_seed-0"]["state"] == "stopped"
    num_done = len(read(log))
    assert num_done < 30
    assert sweep.main([*flags, "--out", str(out)]) == 0
    assert [record["step"] for record in read(log)] == list(range(1, 31))
    assert train.main([*flags[:-3], "--seed", "0", "--out", str(whole)]) == 0
    weights = (x / "latest" / "model.safetensors" for x in (out / "maxrl_seed-0", whole))
    assert len({path.read_bytes() for path in weights}) == 1
