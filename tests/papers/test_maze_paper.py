"""Tests of the paper's maze recipe: its settings, and all its phases at a tiny size."""

import json

import pytest

from maxrl_fast import evaluate as command
from maxrl_fast.config.checks import check
from maxrl_fast.config.parse import parse
from maxrl_fast.config.resolve import resolve
from maxrl_fast.job.build_policy import build_policy
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.train import main as train
from tests.papers.load import FOLDER, load

read = load("training_runs").records
RECIPE = ("--config", str(FOLDER / "maze_paper.toml"))
TINY = (
    "--maze-size 5 --max-new-tokens 8 --hidden-size 32 --intermediate-size 48 --layers 2 "
    "--prompts 2 --rollouts 4 --eval-prompts 3 --eval-samples 2 --eval-every 2 --save-every 1 "
    "--threads 1 --dtype float32 --device cpu"
).split()


def test_the_papers_settings():
    config = parse([*RECIPE, "--out", "none"])
    check(config)
    task = MazeTask(config.task.maze_size)
    config = resolve(config, task)
    assert (
        sum(parameter.numel() for parameter in build_policy(config, task).parameters()) == 3_944_704
    )
    expected = {
        **{"objective": "maxrl", "order": 127, "maze_size": 17, "max_new_tokens": 180},
        **{"sft_steps": 1500, "sft_batch": 32, "sft_lr": 5e-4, "sft_beta2": 0.95},
        **{"steps": 20000, "prompts": 32, "rollouts": 128, "updates_per_step": 1},
        **{"lr": 1e-4, "lr_schedule": "constant", "warmup_steps": 0, "beta2": 0.999},
        **{"weight_decay": 0.01, "temperature": 1.0, "kl_coef": 0.0, "entropy_coef": 0.0},
        **{"eval_prompts": 256, "eval_samples": 256},
    }
    assert {name: config.flat()[name] for name in expected} == expected


@pytest.mark.slow
def test_every_phase_runs_at_a_tiny_size(tmp_path):
    """Warm start and two steps, resuming, evaluation, and another objective from the same warm
    start.
    """
    first, other = tmp_path / "first", tmp_path / "other"
    assert train([*RECIPE, *TINY, "--sft-steps", "3", "--steps", "2", "--out", str(first)]) == 0
    assert train(["--resume", str(first), "--steps", "4", "--allow-changes"]) == 0
    assert [record["step"] for record in read(first / "metrics.jsonl")] == [1, 2, 3, 4]
    assert [record["step"] for record in read(first / "eval.jsonl")] == [0, 2, 4]
    assert (
        command.main(
            [
                str(first),
                *"--eval-prompts 3 --samples 4 --bootstrap 10 --out".split(),
                str(tmp_path / "eval"),
            ]
        )
        == 0
    )
    warm = first / "checkpoints" / "step-000000"
    flags = ["--objective", "grpo", "--sft-steps", "0", "--seed", "1", "--steps", "1"]
    assert train([*RECIPE, *TINY, *flags, "--model", str(warm), "--out", str(other)]) == 0
    assert json.loads((other / "config.json").read_text())["objective"] == "grpo"
    assert [record["step"] for record in read(other / "eval.jsonl")] == [0, 1]
