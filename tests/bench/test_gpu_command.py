"""The command `make gpu`, tested without a GPU: its steps, time limits and results."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.gpu import PARTS, RESULTS, SMALLEST, SMALLEST_TESTS, gpu_tests, run_step, steps_of

ROOT = Path(__file__).parents[2]
SHORT = gpu_tests("short", (), 60)


def test_the_steps_of_each_part_fit_into_its_limit():
    for part in PARTS:
        steps = steps_of(part)
        assert steps[0].name == "build"
        assert sum(step.seconds for step in steps) <= (240 if part == "smoke" else 540)


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
    steps = (step for part in ("smoke", "figures") for step in steps_of(part))
    files = [word for step in steps for word in step.command if word.startswith("tests/")]
    places = ROOT.glob("tests/kernels/test_*")
    assert sorted(files) == sorted(str(x.relative_to(ROOT)) for x in places)
    of_races = [f"tests/kernels/test_{name}.py" for name in SMALLEST_TESTS]
    every, smallest = collected(files, ["-k", SMALLEST, *of_races])
    assert {file for file, _ in every} == set(files)
    assert {name.partition("[")[0] for _, name in smallest} == {
        *("test_rows_at_any_address", "test_log_ratio_reward"),
        *("test_sampling_equals_pytorchs", "test_bad_values_become_nan"),
        "test_attention_equals_float64",
    }


@pytest.mark.parametrize(
    ("code", "state", "exit_code"),
    [("exit 3", "failed", 3), ("sleep 60 & sleep 60", "past its limit", -9), ("true", "done", 0)],
)
def test_a_step_has_its_own_end_and_limit(tmp_path, code, state, exit_code):
    document = '{"benchmark": "one", "figure": 4}'
    command = ["sh", "-c", f"echo '{document}'; echo 2 failed, 1 passed; {code}"]
    record = run_step(replace(SHORT, command=command, seconds=1.0), tmp_path / "log")
    assert (record["state"], record["exit_code"]) == (state, exit_code)
    assert record["seconds"] < 10
    assert record["documents"] == [{"benchmark": "one", "figure": 4}]
    assert record["tests"] == {"failed": 2, "passed": 1}
    assert "== short" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_the_dry_run_writes_its_results(tmp_path):
    command = [sys.executable, *"-m bench.gpu --device cpu --part figures".split()]
    command += ["--only", "ceilings", "--profile"]
    environment = os.environ | {RESULTS: str(tmp_path / "results"), "OMP_NUM_THREADS": "1"}
    options = {"capture_output": True, "text": True, "cwd": ROOT, "check": False}
    run = subprocess.run(command, env=environment, **options)
    assert run.returncode == 0, run.stdout + run.stderr
    name = "gpu_dry_run_figures_profile_ceilings"
    result = json.loads((tmp_path / "results" / f"{name}.json").read_text())
    assert result["machine"]["torch"] == torch.__version__
    (record,) = result["steps"].values()
    *profiles, figures = record["documents"]
    assert figures["copy_bytes_per_second"] > 0
    assert [x["name"] for x in profiles] == ["copy", "multiply"]
    assert profiles[0]["kernels"][0]["name"] == "aten::copy_"
    assert "== ceilings" in (tmp_path / "results" / f"{name}.log").read_text()
