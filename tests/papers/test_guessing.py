"""The bounds, the counts of each number, and the script at a tiny size. They check no ranking of
objectives.
"""

import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from maxrl_fast.records import Rollouts, Samples
from maxrl_fast.tasks.guess import EOS, GuessTask
from tests.papers.load import FOLDER, load

guessing = load("guessing")

TINY = [
    *"--objectives maxpo-k4 --seeds 1 --sft-steps 60 --tokens 2500 --rollouts 8".split(),
    *"--evaluations 2 --eval-samples 16".split(),
]


def test_an_even_policy_reaches_every_bound_and_one_tree_the_first():
    even, tree = [1500] * 31, [3100, 0] * 15 + [3100]
    tree[0] = 0  # 15 numbers are always found
    assert guessing.BOUNDS[:3] == pytest.approx([15 / 31, 1 - (16 / 31) ** 4, 1 - (16 / 31) ** 16])
    assert guessing.BOUNDS[3] == pytest.approx(-0.7259, abs=1e-4)
    # pass@k of samples without replacement is a little above that of the rate
    assert guessing.values_of(even, 3100) == pytest.approx(guessing.BOUNDS, abs=1e-3)
    first, fourth, last, mean_log, lowest, most = guessing.values_of(tree, 3100)
    assert (first, fourth, last) == pytest.approx([15 / 31] * 3)
    assert mean_log == pytest.approx(16 / 31 * math.log(0.5 / 3101), rel=1e-3)
    assert (lowest, most) == (0, 1)


def test_counts_are_in_the_order_of_the_numbers():
    """Of three samples of each number, number x has x modulo 4 correct ones."""
    prompts = GuessTask(seed=3).prompts("test", 0, 31)
    samples = Samples(prompts, Rollouts.given([[EOS]] * 93))

    class Evaluator:
        def evaluate(self, keep):
            for start in (0, 20):
                part = replace(samples, prompts=prompts.take(start, 20))
                answers = torch.tensor([line["answer"] for line in part.prompts.columns])
                keep(part, (torch.arange(3) < answers[:, None] % 4).float().flatten(), [])

    assert guessing.correct_by_number(Evaluator()) == [x % 4 for x in range(1, 32)]


def test_a_finished_run_is_read_unless_its_settings_were_others(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    settings, measured = guessing.GuessingSettings(work=tmp_path), []

    def measure(one):
        measured.append(one.options["lr"])
        return {"steps": len(measured)}

    def steps(lr):
        changed = replace(settings, lr=lr)
        one = guessing.guessing_run(changed, "maxpo-k4", 0, tmp_path / "start")
        return load("training_runs").measure_once(measure, one)["steps"]

    assert [steps(2e-3), steps(2e-3), steps(1e-3)] == [1, 1, 2]
    assert measured == [2e-3, 1e-3]


@pytest.mark.slow
def test_the_command_trains_until_its_tokens_and_draws(tmp_path):
    command = [sys.executable, FOLDER / "guessing.py", *TINY]
    folders = ["--out", tmp_path, "--work", tmp_path / "work"]
    run = subprocess.run([*command, *folders], capture_output=True, text=True, check=True)
    assert "maxpo-k4" in run.stdout
    assert "0.484" in run.stdout
    assert (tmp_path / "guessing.png").read_bytes().startswith(b"\x89PNG")
    (one,) = json.loads((tmp_path / "guessing.json").read_text())["results"]["runs"]
    start, half, end = one["tokens"]
    assert start == 0 < 1250 <= half < 2500 <= end < 2500 + 31 * 8 * 8
    assert one["steps"] > 1
    assert [len(counts) for counts in one["num_correct"]] == [31] * 3
    assert 0 < max(one["num_correct"][0]) <= 16
    assert one["num_correct"][0] != one["num_correct"][2]
