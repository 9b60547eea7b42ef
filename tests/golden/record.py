"""Golden runs: 10 steps on mazes for each of five objectives, kept as NAME.jsonl in this folder.

`python -m tests.golden.record` writes them again. A refactor must reproduce them bitwise; a commit
that changes the numerics writes them again and says which numbers moved and why.

The first line of a file names the machine that wrote it, as far as float32 sums depend on it. The
other lines are those of metrics.jsonl without the times.
"""

import json
import platform
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import maxrl_fast
from maxrl_fast import _C
from maxrl_fast.tasks.maze import MazeTask

HERE = Path(__file__).parent
TIMES = ("tokens_per_second", "rollout_seconds", "train_seconds")
RUNS: dict[str, dict[str, Any]] = {
    "maxpo": {"objective": "maxpo", "k": 4},
    "maxrl": {"objective": "maxrl"},
    "pacs": {"objective": "pacs"},
    "grpo": {"objective": "grpo", "updates_per_step": 2, "kl_coef": 0.05},
    "gspo": {"objective": "grpo", "loss": "gspo", "updates_per_step": 2},
}
SIZES = {
    "prompts": 16,
    "rollouts": 8,
    "steps": 10,
    "sft_steps": 30,
    "lr": 1e-3,
    "eval_every": 0,
    "eval_prompts": 8,
    "seed": 1,
    "dtype": "float32",
    "device": "cpu",
    "threads": 1,
}


def machine() -> dict[str, str]:
    """Return what decides the order of float32 sums, besides the code."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    model = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": model[0] if model else platform.processor(),
        "torch": torch.__version__,
        "torch instructions": torch.backends.cpu.get_cpu_capability(),
        "instructions": _C.instruction_sets()[0],
    }


def lines_of(name: str, folder: Path) -> list[dict[str, float]]:
    """Run the golden run of this name; return its metrics without times, a line for each step."""
    maxrl_fast.run(RUNS[name], **SIZES, task=MazeTask(5, SIZES["seed"]), out=folder / name)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key not in TIMES}
        for line in lines
    ]


def recorded(name: str) -> tuple[Mapping[str, str], list[dict[str, float]]]:
    """Return the machine and the lines of a recorded run."""
    first, *lines = map(json.loads, (HERE / f"{name}.jsonl").read_text().splitlines())
    return first, lines


def main() -> None:
    for name in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            records = [machine(), *lines_of(name, Path(folder))]
        text = "".join(json.dumps(record) + "\n" for record in records)
        (HERE / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    main()
