"""The steps of `make gpu`: what each runs, and how long it may take."""

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path

LIMIT_SECONDS = 480  # of all steps together


@dataclass(frozen=True)
class Step:
    """A process of its own, so that each has the GPU's memory to itself, and that one that hangs or dies takes none along."""

    name: str
    command: list[str]
    seconds: float  # its limit
    has_figures: bool = True  # one of its last lines is a JSON document
    absent: str = ""  # why it cannot run here
    environment: dict[str, str] = field(default_factory=dict)


def bench(name: str, module: str, arguments: str, seconds: float, absent: str = "") -> Step:
    return Step(name, [sys.executable, "-m", f"bench.{module}", *arguments.split()], seconds, absent=absent)


def missing(package: str) -> str:
    return "" if importlib.util.find_spec(package) else f"{package} is not installed"


def compute_sanitizer() -> str | None:
    """On the PATH, or beside nvcc."""
    nvcc = shutil.which("nvcc")
    beside = Path(nvcc).resolve().parent / "compute-sanitizer" if nvcc else None
    return shutil.which("compute-sanitizer") or (str(beside) if beside and beside.exists() else None)


def marked_gpu(seconds: float, absent: str = "") -> Step:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--tb=short", "--maxfail=30", "--durations=5", "tests/gpu"]
    return Step("tests", command, seconds, has_figures=False, absent=absent)


def sanitizer(seconds: float, absent: str = "") -> Step:
    """memcheck, 10 to 100 times slower, over the smallest tests.

    Not over those that capture graphs: torch's cache is off, so that every tensor is an allocation whose end memcheck knows,
    and graphs cannot be captured without it.
    """
    found = compute_sanitizer()
    command = [found or "compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "1"]
    command += [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-k", "any_address or what_cannot", "--tb=short"]
    command += ["tests/gpu/test_token_loss.py", "tests/gpu/test_advantage.py"]
    absent = absent or ("" if found else "compute-sanitizer is not on the PATH")
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return Step("sanitizer", command, seconds, has_figures=False, absent=absent, environment=environment)


def gpu_steps() -> list[Step]:
    """On a GPU. Correctness first; then the ceilings, and the figures that have an aim; peers last."""
    qwen = "--device cuda --layouts shared padded --rounds 1 --cases"
    return [
        marked_gpu(85),
        sanitizer(35),
        bench("ceilings", "ceilings", "--device cuda", 15),
        bench("launches", "launches", "--device cuda", 15),
        bench("token_loss", "token_loss", "--device cuda", 75),
        bench("rollout", "rollout", "--device cuda --peers", 45),
        bench("whole_step", "train_step", "--device cuda --cases step17 --rounds 5", 75),
        bench("qwen_0.5b", "train_step", f"{qwen} qwen-0.5b", 25),
        bench("qwen_1.5b", "train_step", f"{qwen} qwen-1.5b", 30),
        bench("advantages", "advantages", "--device cuda --rounds 5", 15),
        bench(
            *("rollout_peer", "rollout", "--device cuda --cases maze17x32 --peers transformers --rounds 1", 25),
            absent=missing("transformers"),
        ),
        bench("trl", "peers", "--device cuda --turns 1", 35, absent=missing("trl")),
    ]


def dry_steps() -> list[Step]:
    """The same at a size that a CPU does in a few seconds each, to see that everything runs and is written down."""
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
    """Of its process: nothing is fetched, and output comes as it is written."""
    return os.environ | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} | step.environment
