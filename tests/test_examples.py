"""The examples run as printed."""

import subprocess
import sys
from pathlib import Path

import pytest

from maxrl_fast import train
from maxrl_fast.config.checks import check
from maxrl_fast.config.parse import parse
from maxrl_fast.config.resolve import resolve
from maxrl_fast.tasks.maze import MazeTask
from tests.tasks.test_dataset import save_byte_level_policy, written

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_advantages():
    run = subprocess.run(
        [sys.executable, EXAMPLES / "advantages.py"], capture_output=True, text=True, check=True, cwd=EXAMPLES.parent
    )
    lines = [line.split() for line in run.stdout.splitlines()]
    assert lines[0] == ["RLOO", *["-0.20"] * 2, "1.00", *["-0.20"] * 3, *["0.20"] * 3, "-1.00", *["0.20"] * 2]
    assert lines[2] == ["MaxRL", *["-1.00"] * 2, "5.00", *["-1.00"] * 3, *["0.20"] * 3, "-1.00", *["0.20"] * 2]


@pytest.mark.slow
def test_token_loss():
    run = subprocess.run(
        [sys.executable, EXAMPLES / "token_loss.py"], capture_output=True, text=True, check=True, cwd=EXAMPLES.parent
    )
    names, rates = zip(*((words[0], float(words[5])) for words in map(str.split, run.stdout.splitlines())), strict=True)
    assert names == ("MaxRL", "PACS")
    assert min(rates) > 0.5  # from 1/64


def test_the_maze_config_is_valid():
    config = parse(["--config", str(EXAMPLES / "maze.toml")])
    check(config)
    resolve(config, MazeTask(config.task.maze_size))


RECIPES = {  # objective, prompts, rollouts, and a line in the data set's form
    "gsm8k_smollm2.toml": ("maxrl", "256", "128", {"question": "1+1?", "answer": "#### 2"}),
    "polaris_qwen3.toml": ("maxrl", "256", "16", {"problem": "1+1?", "answer": "2"}),
    "deepscaler_pacs.toml": ("pacs", "1024", "8", {"problem": "1+1?", "answer": "2"}),
    "math_maxpo.toml": ("maxpo", "1024", "8", {"problem": "1+1?", "solution": "\\boxed{2}"}),
}


def test_every_config_of_the_examples_is_tested():
    assert {file.name for file in EXAMPLES.glob("*.toml")} == {"maze.toml", *RECIPES}


@pytest.mark.parametrize("name", RECIPES)
def test_the_papers_recipes_with_a_stand_in_checkpoint(name, tmp_path, capsys):
    """The data is a stand-in too: a file replaces the data set of the hub."""
    *expected, line = RECIPES[name]
    policy = save_byte_level_policy(tmp_path, positions=1 << 14)
    data = written(tmp_path / "data.jsonl", [{key: f"{i} {value}" for key, value in line.items()} for i in range(60)])
    recipe = [row for row in (EXAMPLES / name).read_text().splitlines() if not row.startswith("hub = ")]
    (tmp_path / name).write_text("\n".join([f"data = '{data}'", *recipe]))
    assert train.main(["--config", str(tmp_path / name), "--model", str(policy), "--dry-run"]) == 0
    rows = (row.partition(" = ") for row in capsys.readouterr().out.splitlines())
    options = {key.strip(): value for key, _, value in rows}
    assert [options[key] for key in ("objective", "prompts", "rollouts")] == expected
    assert train.main(["--config", str(EXAMPLES / name), "--dry-run"]) == 2  # models/... is not here
    assert "models/" in capsys.readouterr().err


@pytest.mark.slow
def test_gym_tiny(tmp_path):
    """Run a short version. The whole example takes two minutes."""
    command = [sys.executable, EXAMPLES / "gym_tiny.py", tmp_path / "out"]
    short = ["--sft-steps", "3", "--steps", "2", "--eval-prompts", "8", "--eval-samples", "2", "--threads", "1"]
    run = subprocess.run([*command, *short], capture_output=True, text=True, check=True, cwd=EXAMPLES.parent)
    lines = run.stdout.splitlines()
    assert "task gym:spell_backward" in lines[0] or "spell_backward of reasoning-gym" in lines[0]
    assert len([line for line in lines if line.startswith("'Spell this word backward")]) == 4


def test_the_ops_import_no_trainer():
    code = "import sys; from maxrl_fast import ops; print([m for m in sys.modules if m.startswith('maxrl_fast')])"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "maxrl_fast.ops.group_advantage" in modules
    for name in ("train", "config", "model", "rollout", "tasks", "learner"):
        assert f"maxrl_fast.{name}" not in modules
