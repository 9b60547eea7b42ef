"""The steps of `make gpu`: the command of each, and its time limit."""

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

LIMIT_SECONDS = 480  # of all steps together


@dataclass(frozen=True)
class Step:
    """A command that runs in its own process: it has the GPU's memory to itself, and a crash does not end the other steps."""

    name: str
    command: list[str]
    seconds: float  # time limit
    has_figures: bool = True  # one of its last lines is a JSON document
    absent: str = ""  # why it cannot run here
    environment: dict[str, str] = field(default_factory=dict)


def bench(name: str, module: str, arguments: str, seconds: float, absent: str = "") -> Step:
    """Return a step that runs a benchmark."""
    return Step(name, [sys.executable, "-m", f"bench.{module}", *arguments.split()], seconds, absent=absent)


def missing(*packages: str) -> str:
    """Return why a step that needs these packages cannot run; "" where all are installed."""
    absent = [package for package in packages if not importlib.util.find_spec(package)]
    return f"{' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed" if absent else ""


def compute_sanitizer() -> str | None:
    """Return the path of compute-sanitizer, on the PATH or beside nvcc."""
    nvcc = shutil.which("nvcc")
    beside = Path(nvcc).resolve().parent / "compute-sanitizer" if nvcc else None
    return shutil.which("compute-sanitizer") or (str(beside) if beside and beside.exists() else None)


def marked_gpu(seconds: float, absent: str = "") -> Step:
    """Return a step that runs the tests marked gpu."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--tb=short", "--maxfail=30", "--durations=5", "tests/gpu"]
    return Step("tests", command, seconds, has_figures=False, absent=absent)


def sanitizer(seconds: float, absent: str = "") -> Step:
    """Return a step that runs the smallest tests under memcheck, 10 to 100 times slower.

    It leaves out the tests that capture graphs: they need torch's memory cache, which is off here so that memcheck knows where
    every tensor ends.
    """
    found = compute_sanitizer()
    command = [found or "compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "1"]
    command += [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-k", "any_address or what_cannot", "--tb=short"]
    command += ["tests/gpu/test_token_loss.py", "tests/gpu/test_advantage.py"]
    absent = absent or ("" if found else "compute-sanitizer is not on the PATH")
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return Step("sanitizer", command, seconds, has_figures=False, absent=absent, environment=environment)


def gpu_steps() -> list[Step]:
    """Return the steps on a GPU: correctness first, then the ceilings and the figures that have an aim, and peers last."""
    qwen = "--device cuda --layouts shared padded --rounds 1 --cases"
    no_options = missing("tyro", "docstring_parser")  # the trainer's options need them
    return [
        marked_gpu(85),
        sanitizer(35),
        bench("ceilings", "ceilings", "--device cuda", 15),
        bench("launches", "launches", "--device cuda", 15),
        bench("token_loss", "token_loss", "--device cuda", 75),
        bench("rollout", "rollout", "--device cuda --peers", 45),
        bench("whole_step", "train_step", "--device cuda --cases step17 --rounds 5", 75, no_options),
        bench("qwen_0.5b", "train_step", f"{qwen} qwen-0.5b", 25, no_options),
        bench("qwen_1.5b", "train_step", f"{qwen} qwen-1.5b", 30, no_options),
        bench("advantages", "advantages", "--device cuda --rounds 5", 15),
        bench(
            *("rollout_peer", "rollout", "--device cuda --cases maze17x32 --peers transformers --rounds 1", 25),
            absent=missing("transformers"),
        ),
        bench("trl", "peers", "--device cuda --turns 1", 35, absent=missing("trl")),
    ]


def dry_steps() -> list[Step]:
    """Return the same steps at sizes that take a CPU a few seconds each, to test that everything runs and is recorded."""
    no_gpu = "it needs a GPU"
    update = "--layouts shared --rounds 1 --prompts 1 --rollouts 2 --cases"
    return [
        marked_gpu(105, no_gpu),
        sanitizer(35, no_gpu),
        bench("ceilings", "ceilings", "--dtype float32", 20),
        bench("launches", "launches", "--rounds 1", 15),
        bench(
            *("token_loss", "token_loss", "--tokens 64 --vocab 500 --other-vocabs 300 --hidden 32 --rounds 1 --no-compile"),
            *(60,),
        ),
        bench("rollout", "rollout", "--cases maze7 --peers --rounds 1", 30),
        bench("whole_step", "train_step", f"--warm-start 1 {update} step17", 40),
        bench("qwen_0.5b", "train_step", "", 25, no_gpu),
        bench("qwen_1.5b", "train_step", "", 40, no_gpu),
        bench("advantages", "advantages", "--rounds 1", 120),
        bench("rollout_peer", "rollout", "", 35, no_gpu),
        bench("trl", "peers", "", 40, no_gpu),
    ]


def environment_of(step: Step) -> dict[str, str]:
    """Return the environment of a step's process: no downloads, and unbuffered output."""
    return os.environ | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} | step.environment
