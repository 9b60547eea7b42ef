"""Tests of the script at a tiny size: it runs, resumes and names a failed run. They check no
ranking of objectives.
"""

import json
import subprocess
import sys

import pytest

from tests.papers.load import FOLDER, load

pytestmark = pytest.mark.slow

maze_scaling, training_runs = load("maze_scaling"), load("training_runs")

TINY = [
    *"--maze-size 5 --sft-steps 20 --steps 3 --prompts 2 --rollouts 4 8 --seeds 1".split(),
    *"--objectives maxpo --eval-mazes 4 --eval-samples 4".split(),
]


def test_the_command_trains_and_reuses_finished_runs(tmp_path):
    places = f"--out {tmp_path}/out --work {tmp_path}/work".split()
    command = [sys.executable, FOLDER / "maze_scaling.py", *TINY, *places]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "pass@4, N = 8" in run.stdout
    record = json.loads((tmp_path / "out" / "maze_scaling.json").read_text())
    assert (tmp_path / "out" / "maze_scaling.png").read_bytes().startswith(b"\x89PNG")
    runs = record["results"]["runs"]
    assert [(run["objective"], run["rollouts"]) for run in runs] == [("maxpo", 8), ("maxpo", 4)]
    first = runs[0]["pass_at_k"]["0"]
    for outcome in runs:
        assert outcome["pass_at_k"].keys() == {"0", "1", "2", "3"}
        assert outcome["pass_at_k"]["0"] == first  # the same policy, mazes and random numbers
        assert [step for step, _ in outcome["reward"]] == [1, 2, 3]
        config = json.loads(
            (
                tmp_path
                / "work"
                / f"{outcome['objective']}-{outcome['rollouts']}-seed1/config.json"
            ).read_text()
        )
        assert (config["objective"], config["rollouts"]) == (
            outcome["objective"],
            outcome["rollouts"],
        )
        assert config["k"] == 2
    logs = {path: path.read_bytes() for path in (tmp_path / "work").glob("*.log")}
    # all runs are finished
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert again.stdout.splitlines()[:-1] == run.stdout.splitlines()[:-1]
    assert (
        json.loads((tmp_path / "out" / "maze_scaling.json").read_text())["results"]
        == record["results"]
    )
    assert logs == {path: path.read_bytes() for path in (tmp_path / "work").glob("*.log")}


def test_a_run_that_fails_is_named(tmp_path, capsys):
    code = maze_scaling.main(
        [
            *TINY,
            *"--sft-steps -1 --out".split(),
            str(tmp_path / "out"),
            "--work",
            str(tmp_path / "work"),
        ]
    )
    assert code == 2
    error = capsys.readouterr().err
    assert str(tmp_path / "work" / "warm-start.log") in error
    assert (
        "sft_steps must be at least 0, got -1" in (tmp_path / "work" / "warm-start.log").read_text()
    )


def test_thinned_curves_are_means():
    assert training_runs.thinned([1, 2, 3, 4, 5], 2) == [[3, 2.0], [5, 4.5]]
    assert training_runs.thinned([1, 2], 20) == [[1, 1.0], [2, 2.0]]
