"""The steps of `make gpu` and its other parts: their commands and time limits."""

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

# of all steps of a part together: a machine may be lent for ten minutes at a time, and what crashes
# must do so while there is time for a repair
LIMIT_SECONDS = {"smoke": 240, "figures": 540, "profile": 540, "races": 540, "maze": 540}
PARTS = tuple(LIMIT_SECONDS)
RESULTS = "MAXRL_FAST_GPU_RESULTS"  # environment variable: the folder of results
NSIGHT = Path("/opt/nvidia/nsight-compute")


@dataclass(frozen=True)
class Step:
    """A command in its own process: it has the GPU's memory to itself, and a crash does not end the
    other steps.
    """

    name: str
    command: list[str]
    seconds: float  # time limit
    has_figures: bool = True  # one of its last lines is a JSON document
    absent: str = ""  # why it cannot run here
    environment: dict[str, str] = field(default_factory=dict)


def bench(name: str, module: str, arguments: str, seconds: float, absent: str = "") -> Step:
    return Step(
        name, [sys.executable, "-m", f"bench.{module}", *arguments.split()], seconds, absent=absent
    )


def missing(*packages: str) -> str:
    """Return why a step that needs these packages cannot run; "" if all are installed."""
    absent = [package for package in packages if not importlib.util.find_spec(package)]
    return (
        f"{' and '.join(absent)} {'is' if len(absent) == 1 else 'are'} not installed"
        if absent
        else ""
    )


def cuda_tool(name: str) -> str | None:
    """Return the path of a CUDA tool: on the PATH, next to nvcc, or in the newest folder of Nsight
    Compute.
    """
    nvcc = shutil.which("nvcc")
    places = [Path(nvcc).resolve().parent / name] if nvcc else []
    places += sorted(NSIGHT.glob(f"*/{name}"), reverse=True)
    return shutil.which(name) or next((str(place) for place in places if place.is_file()), None)


def marked_gpu(name: str, files: tuple[str, ...], seconds: float) -> Step:
    """Return a step of tests; a file that cannot be imported does not stop the others."""
    options = "-q -m gpu --tb=short --maxfail=30 --durations=5 --continue-on-collection-errors"
    command = [sys.executable, "-m", "pytest", *options.split()]
    command += [] if missing("xdist") else ["-n", "8"]
    command += [f"tests/kernels/test_{file}.py" for file in files]
    return Step(name, command, seconds, has_figures=False)


def build(seconds: float) -> Step:
    """Return the step that installs the extension: a prebuilt one if it matches, else one built
    here.
    """
    command = [sys.executable, "-m", "bench.gpu_build"]
    return Step("build", command, seconds, has_figures=False)


# of tests/kernels: what every run needs, and the rest
SMOKE_TESTS = ("token_loss", "decoding", "layer", "sharding")
OTHER_TESTS = ("attention", "advantage")
# for each kernel the smallest tests that launch it
SMALLEST = (
    "any_address or bad_values or log_ratio or sampling_equals and not 151936 or "
    "attention_equals_float64 and dtype1"
)
SMALLEST_FILES = [
    "tests/kernels/test_token_loss.py",
    "tests/kernels/test_advantage.py",
    "tests/kernels/test_decoding.py",
]


def sanitizer(tool: str, seconds: float) -> Step:
    """Return a step that runs the smallest tests under a tool of compute-sanitizer, 10 to 100 times
    slower.

    Tests that capture graphs are left out: they need torch's memory cache, which is off so that
    memcheck sees where every tensor ends.
    """
    found = cuda_tool("compute-sanitizer")
    command = [found or "compute-sanitizer", "--tool", tool, "--error-exitcode", "1"]
    command += ["--kernel-regex", "kns=maxrl"]  # not torch's
    command += ["--report-api-errors", "no"] if tool == "memcheck" else []
    options = "-m pytest -q -m gpu --tb=short -k"
    command += [sys.executable, *options.split(), SMALLEST, *SMALLEST_FILES]
    absent = "" if found else "compute-sanitizer is not installed"
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return Step(tool, command, seconds, has_figures=False, absent=absent, environment=environment)


def maze(seconds: float, absent: str) -> Step:
    # The runs stay where a next call resumes them; what is brought back is one archive, without
    # their checkpoints. A minute is for starting, saving and drawing.
    table = f"{sys.executable} examples/papers/maze_table.py --out runs/maze_table"
    archive = f'tar -C runs --exclude=checkpoints -czf "${RESULTS}/maze_table.tar.gz" maze_table'
    code = f"{table} --minutes {(seconds - 60) / 60:g}; code=$?; {archive} && exit $code"
    return Step("maze", ["sh", "-c", code], seconds, has_figures=False, absent=absent)


def gpu_steps() -> dict[str, list[Step]]:
    """Return the steps by part, the most important first."""
    qwen = "--device cuda --layouts shared padded --rounds 3 --cases"
    step17 = "--device cuda --cases step17 --rounds 5"
    no_options = missing("rich")  # the trainer's options need them
    return {
        "smoke": [
            build(90),
            bench("train", "gpu_train", "--device cuda", 80, no_options),
            marked_gpu("tests", SMOKE_TESTS, 70),
        ],
        "figures": [
            build(90),
            bench("ceilings", "ceilings", "--device cuda", 30),
            bench("token_loss", "token_loss", "--device cuda --no-compile --rounds 3", 55),
            bench("rollout", "rollout", "--device cuda --no-compile --peers", 40),
            bench("whole_step", "train_step", f"{step17} --no-compile", 60, no_options),
            bench("qwen_0.5b", "train_step", f"{qwen} qwen-0.5b", 45, no_options),
            bench("qwen_1.5b", "train_step", f"{qwen} qwen-1.5b", 55, no_options),
            bench("advantages", "advantages", "--device cuda --rounds 5", 40),
            marked_gpu("other_tests", OTHER_TESTS, 60),
        ],
        "profile": [
            build(90),
            bench("profiles", "profiles", "--device cuda", 75, no_options),
            bench(
                "counters",
                "counters",
                "--device cuda",
                90,
                "" if cuda_tool("ncu") else "ncu is not installed",
            ),
            bench("rollout_compiled", "rollout", "--device cuda --peers", 55),
            bench("whole_step_compiled", "train_step", step17, 90, no_options),
            bench("token_loss_peers", "token_loss", "--device cuda", 65),
            bench(
                *(
                    "rollout_peer",
                    "rollout",
                    "--device cuda --no-compile --cases maze17x32 --peers transformers --rounds 1",
                    30,
                ),
                absent=missing("transformers"),
            ),
            bench("trl", "peers", "--device cuda --turns 1", 40, absent=missing("trl")),
        ],
        "races": [
            build(90),
            sanitizer("memcheck", 120),
            sanitizer("racecheck", 210),
            sanitizer("synccheck", 120),
        ],
        "maze": [build(90), maze(450, missing("rich", "matplotlib"))],
    }


def dry_steps() -> dict[str, list[Step]]:
    """Return the same steps at sizes that take a few seconds on a CPU, to test that everything runs
    and is recorded; the limits are wide, because such a machine's cores may be busy."""
    update = "--layouts shared --rounds 1 --prompts 1 --rollouts 2 --cases"
    loss = "--tokens 64 --vocab 500 --other-vocabs 300 --hidden 32 --rounds 1 --no-compile"
    small = {
        "train": ("gpu_train", "--seconds 880", 900),
        "ceilings": ("ceilings", "--dtype float32", 30),
        "token_loss": ("token_loss", loss, 60),
        "rollout": ("rollout", "--cases maze7 --peers --rounds 1 --no-compile", 30),
        "whole_step": ("train_step", f"--warm-start 1 --no-compile {update} step17", 150),
        "advantages": ("advantages", "--rounds 1", 240),
        "profiles": ("profiles", "--prompts 1 --rollouts 2 --dtype float32", 240),
        "token_loss_peers": ("token_loss", loss, 90),
    }

    def dry(step: Step) -> Step:
        if step.name in small:
            return bench(step.name, *small[step.name])
        return replace(step, absent="it needs a GPU")

    return {part: [dry(step) for step in steps] for part, steps in gpu_steps().items()}


def environment_of(step: Step) -> dict[str, str]:
    return (
        os.environ
        | {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        | step.environment
    )
