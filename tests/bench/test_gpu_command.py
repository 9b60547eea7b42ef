"""The command `make gpu`, tested without a GPU: its steps, time limits and results."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import gpu
from bench.gpu_steps import (
    LIMIT_SECONDS,
    PARTS,
    RESULTS,
    SMALLEST,
    SMALLEST_FILES,
    dry_steps,
    gpu_steps,
)
from bench.gpu_table import SECTIONS

ROOT = Path(__file__).parents[2]


def test_the_steps_of_each_part_fit_into_its_limit_and_every_figure_has_a_section():
    parts = gpu_steps()
    assert tuple(parts) == PARTS
    names = [[step.name for step in steps] for steps in parts.values()]
    assert names == [[step.name for step in steps] for steps in dry_steps().values()]
    for part, steps in parts.items():
        assert steps[0].name == "build"
        assert sum(step.seconds for step in steps) <= LIMIT_SECONDS[part]
    with_figures = {x.name for steps in parts.values() for x in steps if x.has_figures}
    assert with_figures == set(SECTIONS)


def collected(*calls):
    """Return files and names of the GPU's tests where transformers is not installed, for each list
    of arguments of pytest.
    """
    code = f"""
import sys; sys.modules["transformers"] = None; import pytest
for arguments in {calls}:
    print("CALL", pytest.main([*"-q -n 0 --collect-only -m gpu".split(), *arguments]))
"""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    parts = re.split(r"CALL ExitCode\.OK|CALL 0", run.stdout)
    assert len(parts) == len(calls) + 1, run.stdout
    return [[x.split("::") for x in part.splitlines() if "::" in x] for part in parts[:-1]]


def test_the_steps_of_tests_have_every_file_and_the_race_checks_every_kernel():
    steps = (step for part in ("smoke", "figures") for step in gpu_steps()[part])
    files = [word for step in steps for word in step.command if word.startswith("tests/")]
    places = ROOT.glob("tests/kernels/test_*")
    assert sorted(files) == sorted(str(x.relative_to(ROOT)) for x in places)
    every, smallest = collected(files, ["-k", SMALLEST, *SMALLEST_FILES])
    assert {file for file, _ in every} == set(files)
    assert {name.partition("[")[0] for _, name in smallest} == {
        *("test_rows_at_any_address_and_in_place", "test_log_ratio_reward"),
        *("test_sampling_equals_pytorchs", "test_bad_values_become_nan"),
        "test_attention_equals_float64",
    }
    tools = [step.command[step.command.index("--tool") + 1] for step in gpu_steps()["races"][1:]]
    assert tools == ["memcheck", "racecheck", "synccheck"]


def dry_run(folder, *arguments):
    command = [sys.executable, *"-m bench.gpu --device cpu".split(), *arguments]
    environment = os.environ | {RESULTS: str(folder), "OMP_NUM_THREADS": "1"}
    options = {"capture_output": True, "text": True, "cwd": ROOT, "check": False}
    return subprocess.run(command, env=environment, **options)


@pytest.mark.slow
def test_the_dry_run_writes_its_results(tmp_path):
    run = dry_run(tmp_path / "results", *"--part figures --only other_tests ceilings".split())
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads((tmp_path / "results" / "gpu_dry_run_figures.json").read_text())
    assert result["machine"]["torch"] == torch.__version__
    states = {name: record["state"] for name, record in result["steps"].items()}
    assert states == {"other_tests": "absent", "ceilings": "done"}
    assert result["steps"]["ceilings"]["figures"]["copy_bytes_per_second"] > 0
    figures = [row["figure"] for row in result["table"]]
    assert figures == ["copy bandwidth", "float32 GEMM", "other_tests"]
    assert all(row["reached"] is None for row in result["table"])
    assert run.stdout.splitlines()[-1].startswith("other_tests")
    assert "== ceilings" in (tmp_path / "results" / "gpu_dry_run_figures.log").read_text()
    kept = gpu.earlier_steps(tmp_path / "results" / "gpu_dry_run_figures.json")
    assert kept["ceilings"]["is_earlier"]
