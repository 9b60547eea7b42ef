"""The command `make gpu`, tested without a GPU: its table, time limits, results and refusals."""

import importlib.util
import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

from bench import gpu
from bench.gpu_run import last_document, run_step
from bench.gpu_steps import LIMIT_SECONDS, Step, dry_steps, gpu_steps
from bench.gpu_table import SECTIONS, lines, rows
from bench.measure import Sides, milliseconds

ROOT = Path(__file__).parents[2]
GPU = {"device": "cuda", "dtype": "torch.bfloat16"}


def done(**figures):
    return {"state": "done", "why": "", "figures": {"machine": GPU, **figures}}


def loss_case(vocabulary, share, **liger):
    return {
        "tokens": 16384,
        "vocabulary": vocabulary,
        "milliseconds": {"copy": 2.25, "ours": 2.25 / share, "eager": 40.0},
        "of_copy_bandwidth": {"ours": share},
        "times_ours": {"ours": 1.0, **liger},
        "peak_bytes_per_element": {"ours": 2.0, "ours, in place": 0.001},
    }


RECORDS = {
    "tests": {"state": "failed", "why": "exit code 1", "figures": {"failed": 2, "passed": 310}},
    "sanitizer": {"state": "absent", "why": "compute-sanitizer is not on the PATH"},
    "ceilings": done(copy_bytes_per_second=4.25e12, matrix_flops_per_second=7.8e14),
    "launches": done(
        launches={"empty kernel": 1, "maxpo": 1, "log_ratio_reward": 1, "pacs_loss": 3},
        microseconds_in_a_graph={"empty kernel": 2.0, "maxpo": 3.5, "log_ratio_reward": 4.5, "pacs_loss": 3.0},
    ),
    "token_loss": done(
        logits={"bfloat16": loss_case(151936, 0.9, **{"liger-kernel GRPO": 1.65})},
        other_vocabularies={"bfloat16 32000": loss_case(32000, 0.8)},
        linear={
            "bfloat16": {
                "tokens": 16384,
                "hidden_size": 4096,
                "vocabulary": 151936,
                "useful_tflops": {"ours": 760.0, "eager": 400.0},
                "matrix_product_tflops": 750.0,
                "peak_mib": {"ours": 3000.0, "eager": 30000.0},
                "gradients_mib": 1900.0,
                "chunk_mib": 1024,
            }
        },
        linear_logprobs={
            "bfloat16": {"tokens": 4096, "vocabulary": 131072, "hidden_size": 4096, "milliseconds": 25.1, "tflops": 701.0}
        },
    ),
    "qwen_1.5b": {"state": "past its limit", "why": "killed after 40 s", "figures": None},
}


def test_the_table_of_recorded_steps():
    table = {row.figure: row for row in rows(RECORDS)}
    assert (table["tests"].value, table["tests"].reached) == ("FAILED, 2 failed, 310 passed", False)
    assert (table["sanitizer"].value, table["sanitizer"].reached) == ("not run", None)
    assert (table["copy bandwidth"].value, table["bfloat16 GEMM"].value) == ("4,250 GB/s", "780.0 TFLOP/s")
    reached = {name.split(",")[0]: row.reached for name, row in table.items() if "1024 x 16" in name}
    # log_ratio_reward is too slow, pacs_loss has too many launches
    assert reached == {"maxpo": True, "log_ratio_reward": False, "pacs_loss": False}
    assert table["loss, 16384 x 151936 bfloat16"].value == "90% of a copy"
    assert table["loss, 16384 x 151936 bfloat16"].reached
    assert not table["loss, 16384 x 32000 bfloat16"].reached
    assert (table["  liger-kernel's GRPO loss"].value, table["  liger-kernel's GRPO loss"].reached) == ("1.65 x ours", False)
    assert table["linear, 16384 x 4096 x 151936 bfloat16"].reached
    assert table["linear log-probs, 4096 x 4096 x 131072 bfloat16"].reached is False
    assert (table["  besides its gradients"].value, table["  besides its gradients"].reached) == ("1,100 MiB", False)
    assert (table["qwen_1.5b"].value, table["qwen_1.5b"].beside) == ("FAILED", "past its limit: killed after 40 s")
    text = lines(rows(RECORDS))
    assert len(text) == len(rows(RECORDS)) + 1
    assert text[0].split() == ["figure", "measured", "aim", "reached", "floor", "or", "peer"]
    assert "NO" in text[1]


def test_steps_fit_into_eight_minutes_and_every_figure_has_a_section():
    steps = gpu_steps()
    assert sum(step.seconds for step in steps) < LIMIT_SECONDS
    assert [step.name for step in steps] == [step.name for step in dry_steps()]
    assert {step.name for step in steps if step.has_figures} == set(SECTIONS)


def test_steps_that_need_a_missing_package_are_left_out(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("tyro", "trl") else found(name))
    absent = {step.name: step.absent for step in gpu_steps() if step.has_figures and step.absent}
    assert absent.keys() == {"whole_step", "qwen_0.5b", "qwen_1.5b", "trl"}
    assert absent["whole_step"] == "tyro is not installed"


def test_carried_wheels_come_before_installed_packages(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried_package.py", "VALUE = 7")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv(gpu.WHEELS, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    gpu.use_wheels()
    assert sys.path[0] == str(tmp_path / "build/wheels")
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [sys.path[0], "elsewhere"]
    command = [sys.executable, "-c", "import carried_package; print(carried_package.VALUE)"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "7\n"


def test_a_side_that_fails_does_not_cost_the_others_their_figures():
    def fail():
        raise RuntimeError("CUDA out of memory")

    device = torch.device("cpu")
    sides = Sides("ours", lambda: None, lambda functions: milliseconds(functions, 1, device), device)
    sides.add({"ours": sides.ours})
    for _ in sides.try_each({"bad": lambda: fail, "unmade": fail, "good": lambda: lambda: None}):
        pass
    assert sides.milliseconds.keys() == sides.ratio.keys() == {"ours", "good"}
    assert sides.failed == dict.fromkeys(("bad", "unmade"), "RuntimeError: CUDA out of memory")


def is_running(pid):
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


@pytest.mark.slow
def test_a_step_past_its_limit_is_killed_with_its_children(tmp_path, capsys):
    code = (
        "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); print('begun', flush=True); time.sleep(600)"
    )
    record = run_step(Step("slow", [sys.executable, "-c", code], 3), 3, tmp_path / "log")
    assert (record["state"], record["why"], record["exit_code"]) == ("past its limit", "killed after 3 s", -9)
    assert record["seconds"] >= 3
    assert record["figures"] is None
    assert "begun" in record["tail"]
    assert "begun" in capsys.readouterr().out
    assert "== slow" in (tmp_path / "log").read_text()
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not is_running(pid):
            break
        time.sleep(0.1)
    assert not is_running(pid)


@pytest.mark.parametrize(
    ("code", "state", "figures"),
    [
        ("""print('{"benchmark": "x", "y": 1}'); print('a warning')""", "done", {"benchmark": "x", "y": 1}),
        ("""print('{"benchmark": "x", "y": 1}'); raise SystemExit(1)""", "failed", {"benchmark": "x", "y": 1}),
        ("print('nothing')", "failed", None),
    ],
)
def test_a_step_needs_figures_and_exit_code_0(code, state, figures, tmp_path):
    (tmp_path / "log").write_text('{"benchmark": "of the step before"}\n')
    record = run_step(Step("x", [sys.executable, "-c", code], 60), 60, tmp_path / "log")
    assert (record["state"], record["figures"]) == (state, figures)
    assert ("tail" in record) == (state != "done")


def test_the_counts_of_pytest_are_read(tmp_path):
    code = "print('....F'); print('1 failed, 4 passed, 2 errors in 0.5s'); raise SystemExit(1)"
    record = run_step(Step("tests", [sys.executable, "-c", code], 60, has_figures=False), 60, tmp_path / "log")
    assert record["figures"] == {"failed": 1, "passed": 4, "error": 2}
    assert record["state"] == "failed"


def test_the_last_json_document_is_found():
    assert last_document('{"benchmark": "a"}\n{"benchmark": "b"}\nlater\n') == {"benchmark": "b"}
    assert last_document("no figures\n") is None


@pytest.mark.slow
def test_the_dry_run_writes_its_results(tmp_path):
    command = [sys.executable, "-m", "bench.gpu", "--device", "cpu", "--only", "tests", "ceilings"]
    environment = os.environ | {gpu.VARIABLE: str(tmp_path / "results")}
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    result = json.loads((tmp_path / "results" / "gpu_dry_run.json").read_text())
    assert result["machine"]["torch"] == torch.__version__
    assert {name: record["state"] for name, record in result["steps"].items()} == {"tests": "absent", "ceilings": "done"}
    assert result["steps"]["ceilings"]["figures"]["copy_bytes_per_second"] > 0
    assert [row["figure"] for row in result["table"]] == ["tests", "copy bandwidth", "float32 GEMM"]
    assert all(row["reached"] is None for row in result["table"])
    assert run.stdout.splitlines()[-3].startswith("tests")
    assert "== ceilings" in (tmp_path / "results" / "gpu_dry_run.log").read_text()
    kept = gpu.earlier_steps(tmp_path / "results" / "gpu_dry_run.json")
    assert kept["ceilings"]["is_earlier"]


def refusal(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments])
    code, error = gpu.main(), capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return code, error


def test_bad_input_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, error = refusal(monkeypatch, capsys)
    assert code == 2
    assert "needs a GPU" in error
    assert refusal(monkeypatch, capsys, "--device", "cpu", "--stretch", "0")[0] == 2
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(gpu.VARIABLE, str(tmp_path / "file"))
    code, error = refusal(monkeypatch, capsys, "--device", "cpu")
    assert code == 2
    assert gpu.VARIABLE in error
    monkeypatch.setenv(gpu.VARIABLE, str(tmp_path))
    monkeypatch.setenv(gpu.WHEELS, str(tmp_path))
    code, error = refusal(monkeypatch, capsys, "--device", "cpu")
    assert code == 2
    assert "must be a folder of wheels" in error
    monkeypatch.delenv(gpu.WHEELS)
    (tmp_path / "gpu_dry_run.json").write_text("[]")
    assert refusal(monkeypatch, capsys, "--device", "cpu", "--only", "ceilings")[0] == 2
