"""The examples run as printed."""

import subprocess
import sys
from pathlib import Path

from maxrl_fast.config import check, parse, resolve
from maxrl_fast.tasks.maze import MazeTask

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_advantages():
    run = subprocess.run(
        [sys.executable, EXAMPLES / "advantages.py"], capture_output=True, text=True, check=True, cwd=EXAMPLES.parent
    )
    lines = [line.split() for line in run.stdout.splitlines()]
    assert lines[0] == ["RLOO", *["-0.20"] * 2, "1.00", *["-0.20"] * 3, *["0.20"] * 3, "-1.00", *["0.20"] * 2]
    assert lines[2] == ["MaxRL", *["-1.00"] * 2, "5.00", *["-1.00"] * 3, *["0.20"] * 3, "-1.00", *["0.20"] * 2]


def test_token_loss():
    run = subprocess.run(
        [sys.executable, EXAMPLES / "token_loss.py"], capture_output=True, text=True, check=True, cwd=EXAMPLES.parent
    )
    names, rates = zip(*((words[0], float(words[5])) for words in map(str.split, run.stdout.splitlines())), strict=True)
    assert names == ("MaxRL", "PACS")
    assert min(rates) > 0.5  # from 1/64


def test_every_option_file_is_good():
    files = list(EXAMPLES.glob("*.toml"))
    assert files
    for file in files:
        config = parse(["--config", str(file)])
        check(config)
        resolve(config, MazeTask(config.task.maze_size))


def test_the_ops_import_no_trainer():
    code = "import sys; from maxrl_fast import ops; print([m for m in sys.modules if m.startswith('maxrl_fast')])"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "maxrl_fast.ops.advantage" in modules
    for name in ("train", "config", "model", "rollout", "tasks", "learner"):
        assert f"maxrl_fast.{name}" not in modules
