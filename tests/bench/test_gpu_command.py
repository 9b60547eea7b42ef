"""The command `make gpu`, tested without a GPU: its table, time limits, results and refusals."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

from bench import counters, gpu, gpu_build
from bench.gpu_run import run_step
from bench.gpu_steps import (
    LIMIT_SECONDS,
    PARTS,
    RESULTS,
    SMALLEST,
    SMALLEST_FILES,
    Step,
    dry_steps,
    gpu_steps,
)
from bench.gpu_table import SECTIONS, lines, rows
from tests.rewards.pools import eventually, is_alive
from tests.tables import refused

ROOT = Path(__file__).parents[2]
GPU = {"device": "cuda", "dtype": "torch.bfloat16"}


def done(**figures):
    return {"state": "done", "why": "", "figures": {"machine": GPU, **figures}}


LOSS = {
    **{"tokens": 16384, "vocabulary": 32000, "host_microseconds": None},
    "milliseconds": {"copy": 2.0, "ours": 2.5, "eager": 40.0},
    "of_copy_bandwidth": {"ours": 0.8},
    "times_ours": {"ours": 1.0, "liger-kernel GRPO": 1.65},
    "peak_bytes_per_element": {"ours": 2.0, "ours, in place": 0.001},
    "failed": {"TRL": "RuntimeError: CUDA out of memory"},
}
NATIVE = {"native": {"tokens_per_second": 6.1e6, "milliseconds": 121.0}}
RECORDS = {
    "tests": {"state": "failed", "why": "exit code 1", "figures": {"failed": 2, "passed": 310}},
    "racecheck": {"state": "absent", "why": "compute-sanitizer is not on the PATH"},
    "ceilings": done(copy_bytes_per_second=4.25e12, matrix_flops_per_second=7.8e14),
    "train": done(chains={"lora": [{"code": 2, "seconds_since_start": 3.0, "command": "resume"}]}),
    "token_loss": done(
        **{"logits": {"bfloat16": LOSS}, "failed": {"pacs float32": "RuntimeError: no kernel"}},
        **{name: {} for name in ("other_vocabularies", "linear", "linear_products")},
        **{name: {} for name in ("linear_logprobs", "divergence")},
    ),
    "qwen_1.5b": {"state": "past its limit", "why": "killed after 40 s", "figures": None},
    "rollout_compiled": done(
        cases={
            "maze17x32": {"prompts": 32, "samples": 128, "floor_milliseconds": 9, "sides": NATIVE}
        }
    ),
}


def test_the_table_of_recorded_steps():
    table = {row.figure: row for row in rows(RECORDS)}
    for figure, expected in {
        "tests": ("FAILED, 2 failed, 310 passed", False),
        "racecheck": ("not run", None),
        "copy bandwidth": ("4,250 GB/s", None),
        "bfloat16 GEMM": ("780.0 TFLOP/s", None),
        "train, lora": ("FAILED: resume", False),
        "loss, pacs float32": ("FAILED", False),
        "loss, 16384 x 32000 bfloat16": ("80% of a copy", False),
        "  liger-kernel's GRPO loss": ("1.65 x ours", False),
        "  TRL": ("failed", None),
        "qwen_1.5b": ("FAILED", False),
        "rollout, 4,096 rows": ("6,100,000 tokens/s", True),
    }.items():
        assert (table[figure].value, table[figure].reached) == expected
    assert table["qwen_1.5b"].beside == "past its limit: killed after 40 s"
    text = lines(rows(RECORDS))
    assert len(text) == len(rows(RECORDS)) + 1
    assert text[0].split() == ["figure", "measured", "aim", "reached", "floor", "or", "peer"]
    assert "NO" in text[1]


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


def test_after_a_failed_build_no_step_runs(tmp_path, capsys):
    fails = [sys.executable, "-c", "raise SystemExit('no compiler')"]
    steps = [Step("build", fails, 60, has_figures=False), Step("later", fails, 60)]
    result = {"steps": {}, "machine": {"commit": None}}
    gpu.run_all(steps, result, tmp_path / "results.json", 1.0)
    states = {name: record["state"] for name, record in result["steps"].items()}
    assert states == {"build": "failed", "later": "absent"}
    assert "not run, the extension was not built" in capsys.readouterr().out


NCU = """==PROF== Connected to process 17
some output
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","17","KERNEL","gpu__time_duration.sum","ns","1,200,000"
"0","17","KERNEL","launch__registers_per_thread","register/thread","60"
"1","17","KERNEL","gpu__time_duration.sum","ns","1,000,000"
"2","17","void maxrl::cuda::sample_rows(int)","gpu__time_duration.sum","ns","3500"
""".replace("KERNEL", "void maxrl::cuda::softmax_rows<float>(int)")


def test_the_counters_of_a_kernel_are_medians_over_its_launches():
    rows, sample = counters.kernels(NCU).values()
    assert rows == {"launches": 2, "nanoseconds": 1.1e6, "registers": 60}
    assert sample == {"launches": 1, "nanoseconds": 3500}
    with refused("no table"):
        counters.kernels("==ERROR== the profiler cannot be used here")


def test_a_carried_extension_is_used_only_where_it_fits(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_build, "ROOT", tmp_path)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "CMakeLists.txt").write_text("project(x)")
    (tmp_path / "csrc/a.cu").write_text("kernel")
    folder = tmp_path / "carried"
    folder.mkdir()
    assert "has no _C" in gpu_build.carried(folder)[1]
    extension = folder / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    extension.write_text("machine code")
    assert gpu_build.carried(folder) == (None, f"{folder} has no {gpu_build.DIGEST}")
    (folder / gpu_build.DIGEST).write_text(gpu_build.digest_of_sources())
    assert gpu_build.carried(folder) == (extension, "")
    (tmp_path / "csrc/a.cu").write_text("kernels")
    assert gpu_build.carried(folder) == (None, f"{extension} was built from other sources")


@pytest.mark.slow
def test_a_step_past_its_limit_is_killed_with_its_children(tmp_path, capsys):
    code = (
        "import subprocess, time; child = subprocess.Popen(['sleep', '600']);"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid)); print('begun', flush=True); "
        "time.sleep(600)"
    )
    record = run_step(Step("slow", [sys.executable, "-c", code], 3), 3, tmp_path / "log")
    assert (record["state"], record["why"]) == ("past its limit", "killed after 3 s")
    assert record["exit_code"] == -9
    assert record["seconds"] >= 3
    assert record["figures"] is None
    assert "begun" in record["tail"]
    assert "begun" in capsys.readouterr().out
    assert "== slow" in (tmp_path / "log").read_text()
    pid = int((tmp_path / "pid").read_text())
    assert eventually(lambda: not is_alive(pid))


@pytest.mark.parametrize(
    ("code", "state", "figures"),
    [
        ("""print('{"benchmark": "x"}'); print('a warning')""", "done", {"benchmark": "x"}),
        ("""print('{"benchmark": "x"}'); raise SystemExit(1)""", "failed", {"benchmark": "x"}),
        ("print('nothing')", "failed", None),
    ],
)
def test_a_step_needs_figures_and_exit_code_0(code, state, figures, tmp_path):
    (tmp_path / "log").write_text('{"benchmark": "of the step before"}\n')
    record = run_step(Step("x", [sys.executable, "-c", code], 60), 60, tmp_path / "log")
    assert (record["state"], record["figures"]) == (state, figures)
    assert ("tail" in record) == (state != "done")


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


def refusal(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["gpu", *arguments])
    code, error = gpu.main(), capsys.readouterr().err
    assert code == 2
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def test_bad_input_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs a GPU" in refusal(monkeypatch, capsys)
    cpu = monkeypatch, capsys, "--device", "cpu"
    refusal(*cpu, "--stretch", "0")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(RESULTS, str(tmp_path / "file"))
    assert RESULTS in refusal(*cpu)
    monkeypatch.setenv(RESULTS, str(tmp_path))
    monkeypatch.setenv(gpu.WHEELS, str(tmp_path))
    assert "must be a folder of wheels" in refusal(*cpu)
    monkeypatch.delenv(gpu.WHEELS)
    (tmp_path / "gpu_dry_run_smoke.json").write_text("[]")
    assert "which cannot be read" in refusal(*cpu, "--only", "build")
    wanted = "--only must name steps of --part races, build, memcheck, racecheck, synccheck; got"
    assert wanted in refusal(*cpu, "--part", "races", "--only", "ceilings")
