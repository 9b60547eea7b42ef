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
    *(
        "--maze-size",
        "5",
        "--max-new-tokens",
        "8",
        "--hidden-size",
        "32",
        "--intermediate-size",
        "48",
        "--layers",
        "2",
    ),
    *(
        "--prompts",
        "2",
        "--rollouts",
        "4",
        "--eval-prompts",
        "3",
        "--eval-samples",
        "2",
        "--eval-every",
        "2",
    ),
    *("--save-every", "1", "--threads", "1", "--dtype", "float32", "--device", "cpu"),
)


def test_the_papers_settings():
    config = parse([*RECIPE, "--out", "none"])
    check(config)
    task = MazeTask(config.task.maze_size)
    config = resolve(config, task)
    assert (
        sum(parameter.numel() for parameter in build_policy(config, task).parameters()) == 3_944_704
    )
    options = config.flat()
    assert [options[name] for name in ("objective", "order", "maze_size", "max_new_tokens")] == [
        "maxrl",
        127,
        17,
        180,
    ]
    assert [options[name] for name in ("sft_steps", "sft_batch", "sft_lr", "sft_beta2")] == [
        1500,
        32,
        5e-4,
        0.95,
    ]
    assert [options[name] for name in ("steps", "prompts", "rollouts", "updates_per_step")] == [
        20000,
        32,
        128,
        1,
    ]
    assert [options[name] for name in ("lr", "lr_schedule", "warmup_steps")] == [
        1e-4,
        "constant",
        0,
    ]
    assert [options[name] for name in ("beta2", "weight_decay")] == [0.999, 0.01]
    assert [options[name] for name in ("temperature", "kl_coef", "entropy_coef")] == [1.0, 0.0, 0.0]
    assert [options[name] for name in ("eval_prompts", "eval_samples")] == [256, 256]


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
                "--prompts",
                "3",
                "--samples",
                "4",
                "--bootstrap",
                "10",
                "--out",
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
