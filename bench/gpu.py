"""`python -m bench.gpu [--part smoke|figures|peers|races|maze]`: steps on this machine's GPU, each
in its own process and within its own time limit, at most nine minutes a part.

Every part begins with the extension, carried here or built here (bench.gpu_build). A step that
exceeds its limit is killed with its process group, and the next one starts; after a failed build
none does. The output is shown and kept in a log. One JSON document, written again after each step,
has the machine and every figure.

`--profile` lets every benchmark print the kernels of one more call of what it times; `--counters`
runs it under Nsight Compute (ncu), which counts this project's kernels in that call.

Results go to the folder in MAXRL_FAST_GPU_RESULTS, by default runs/gpu, as gpu_NAME_PART.json and
.log. Nothing is installed or downloaded. MAXRL_FAST_WHEELS names a folder of wheels, which are
unpacked and come before the installed packages (`make gpu-wheels`).

Exit codes: 0; 1 where a step failed or took too long; 2 without a GPU, or on wrong input; 130 and
143 after Ctrl-C and SIGTERM, which end the step's processes.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu_build import ROOT, WHEELS
from bench.measure import LOOK, machine, run_command
from maxrl_fast.errors import InputError
from maxrl_fast.runtime.files import write_json

RESULTS = "MAXRL_FAST_GPU_RESULTS"
PARTS = ("smoke", "figures", "peers", "races", "maze")
PYTHON = sys.executable
TAIL = 4000  # characters of a failed step's output in the results
# of tests/kernels: what every run needs, the rest, and for each kernel the smallest that launch it
SMOKE_TESTS = ("update", "token_loss", "decoding", "layer", "sharding")
OTHER_TESTS = ("attention", "advantage")
SMALLEST_TESTS = ("token_loss", "advantage", "decoding")
SMALLEST = (
    "any_address or bad_values or log_ratio or sampling_equals and not 151936 or "
    "attention_equals_float64 and dtype1"
)
COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")
NCU = (
    "ncu --clock-control none --launch-count 80 --profile-from-start off "
    "--kernel-name-base demangled --kernel-name regex:maxrl:: --metrics gpu__time_duration.sum,"
    "dram__throughput.avg.pct_of_peak_sustained_elapsed,"
    "sm__throughput.avg.pct_of_peak_sustained_elapsed,launch__registers_per_thread"
)
# The commands at tiny sizes: chains of them, side by side. Rewards differ within groups, so that
# every update has a gradient.
REWARD = "def of_length(prompt, response, **columns): return float(len(response) % 2)"
TRAIN = (
    "train --steps 3 --lr-schedule constant --sft-steps 10 --sft-batch 8 --eval-prompts 32 "
    "--eval-samples 4 --prompts 8 --reward $OUT/reward.py:of_length"
)
EPISODES = TRAIN.partition(" --reward")[0] + " --task examples/guess.py:GuessTask"
CHAINS = (
    (
        f"{TRAIN} --objective maxpo --k 4 --out $OUT/run",
        "train --resume $OUT/run --steps 4",
        "evaluate $OUT/run --samples 16 --eval-prompts 32 --out $OUT/evaluation",
        f"{TRAIN} --task maze --model $OUT/run/latest --lora-rank 4 --out $OUT/lora",
    ),
    (f"{TRAIN} --objective pacs --top-p .9 --out $OUT/pacs",),
    (f"{TRAIN} --objective ppo --kl-coef .01 --updates-per-step 2 --out $OUT/ppo",),
    (f"{EPISODES} --objective maxrl --out $OUT/episodes",),
)


@dataclass(frozen=True)
class Step:
    """A command. `dry`: the words after its first three in a dry run on a CPU; None: it needs a
    GPU."""

    name: str
    command: list[str]
    seconds: float  # time limit
    dry: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


def bench(name: str, seconds: float, words: str, dry: str | None = None) -> Step:
    """Return a step of `python -m bench.WORDS`."""
    return Step(name, [PYTHON, "-m", *f"bench.{words} --device cuda".split()], seconds, dry)


def train() -> Step:
    chains = [
        " && ".join(f"{PYTHON} -m maxrl_fast.{words} --device cuda" for words in chain)
        for chain in CHAINS
    ]
    lines = ["OUT=$(mktemp -d)", "trap 'rm -rf $OUT' EXIT", f"echo '{REWARD}' > $OUT/reward.py"]
    lines += [f"({chain}) &" for chain in chains]
    lines += ["for job in $(jobs -p); do wait $job || code=1; done", "exit $code"]
    return Step("train", ["bash", "-c", "\n".join(lines)], 80)


def gpu_tests(name: str, files: tuple[str, ...], seconds: float, *options: str) -> Step:
    """Return a step of tests; a file that cannot be imported does not stop the others."""
    words = "-m pytest -q -m gpu --tb=short --maxfail=30 --continue-on-collection-errors"
    places = [f"tests/kernels/test_{file}.py" for file in files]
    return Step(name, [PYTHON, *words.split(), *options, *places], seconds)


def cuda_tool(name: str) -> str:
    """Return the path of a CUDA tool, on the PATH, beside nvcc, or in the newest Nsight Compute;
    its name where it is in none."""
    nvcc = shutil.which("nvcc")
    places = [Path(nvcc).resolve().parent / name] if nvcc else []
    places += sorted(Path("/opt/nvidia/nsight-compute").glob(f"*/{name}"), reverse=True)
    return shutil.which(name) or next((str(x) for x in places if x.is_file()), name)


def sanitizer(tool: str, seconds: float) -> Step:
    """Return the smallest tests under a tool of compute-sanitizer, 10 to 100 times slower.

    torch's memory cache is off, so that memcheck sees where every tensor ends; tests that capture
    graphs need it and are left out.
    """
    words = f"--tool {tool} --error-exitcode 1 --kernel-regex kns=maxrl"  # not torch's
    words += " --report-api-errors no" if tool == "memcheck" else ""
    step = gpu_tests(tool, SMALLEST_TESTS, seconds, "-k", SMALLEST)
    command = [cuda_tool("compute-sanitizer"), *words.split(), *step.command]
    return replace(step, command=command, environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})


def maze(seconds: float) -> Step:
    # The runs stay where a next call resumes them; what is brought back is one archive, without
    # their checkpoints. A minute is for starting, saving and drawing.
    code = f"{PYTHON} examples/papers/maze_table.py --out runs/maze_table --minutes "
    code += f"{(seconds - 60) / 60:g}; code=$?; tar -C runs --exclude=checkpoints -czf "
    code += f'"${RESULTS}/maze_table.tar.gz" maze_table && exit $code'
    return Step("maze", ["sh", "-c", code], seconds)


def steps_of(part: str) -> list[Step]:
    """Return a part's steps, the most important first."""
    loss = "--tokens 64 --vocab 500 --other-vocabs 300 --hidden 32 --rounds 1 --no-compile"
    whole = "--warm-start 1 --rounds 1 --prompts 1 --rollouts 2 --cases step17"
    qwen = "train_step --layouts shared padded --rounds 3 --cases qwen"
    step17, maze7 = "train_step --cases step17 --rounds 5", "--cases maze7 --peers --rounds 1"
    eight = ("-n", "8") if importlib.util.find_spec("xdist") else ()
    parts = {
        "smoke": [train(), gpu_tests("tests", SMOKE_TESTS, 70, *eight)],
        "figures": [
            bench("ceilings", 30, "ceilings", "--dtype float32"),
            bench("token_loss", 55, "token_loss --no-compile --rounds 3", loss),
            bench("rollout", 40, "rollout --peers", f"{maze7} --no-others"),
            bench("whole_step", 60, step17, whole),
            bench("qwen_0.5b", 45, f"{qwen}-0.5b"),
            bench("qwen_0.5b_12288", 25, f"{qwen}-0.5b --tokens 12288"),
            bench("qwen_1.5b", 55, f"{qwen}-1.5b"),
            bench("advantages", 40, "advantages --rounds 5", "--rounds 1"),
            gpu_tests("other_tests", OTHER_TESTS, 60, *eight),
        ],
        "peers": [
            bench("token_loss_peers", 65, "token_loss", loss),
            bench(
                "rollout_peer",
                30,
                "rollout --cases maze17x32 --rounds 1 --peers transformers",
            ),
            bench("trl", 40, "peers --turns 1"),
        ],
        "races": [
            sanitizer("memcheck", 120),
            sanitizer("racecheck", 210),
            sanitizer("synccheck", 120),
        ],
        "maze": [maze(450)],
    }
    return [Step("build", [PYTHON, "-m", "bench.gpu_build"], 90), *parts[part]]


def run_step(step: Step, log: Path) -> dict[str, Any]:
    """Run a step, append its output to the log, and return its record.

    The record's `state` is "done", "failed" or "past its limit". `documents` are the JSON documents
    that it printed: the last is the benchmark's, those before it profiles of its calls.
    """
    offline = {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    start, text, is_running = time.monotonic(), "", True
    with log.open("ab") as output, log.open("rb") as written:
        output.write(f"\n== {step.name}: {' '.join(step.command)}\n".encode())
        output.flush()
        written.seek(0, os.SEEK_END)
        # A new session: its process group has every process that the step starts, and Ctrl-C in the
        # terminal does not reach it.
        process = subprocess.Popen(
            ["env", *step.command],  # which says which command is missing
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=os.environ | offline | step.environment,
            start_new_session=True,
        )
        try:
            while is_running and time.monotonic() - start < step.seconds:
                time.sleep(0.2)
                is_running = process.poll() is None
                new = written.read().decode(errors="replace")
                print(re.sub(r'(?m)^\{"benchmark".*\n?', "", new), end="", flush=True)
                text += new
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)  # longer: it hangs in the driver, and stays behind
    is_done = process.returncode == 0
    documents = [json.loads(x) for x in text.splitlines() if re.fullmatch(r'\{"benchmark".*\}', x)]
    kept = {(x["benchmark"], x.get("name")): x for x in documents}  # the last of each
    return {
        "state": "past its limit" if is_running else "done" if is_done else "failed",
        "command": step.command,
        "seconds": time.monotonic() - start,
        "exit_code": process.returncode,
        "documents": list(kept.values()),
        "tests": {kind: int(number) for number, kind in COUNT.findall(text[-2000:])},
        "tail": "" if is_done else text[-TAIL:],
    }


def about_machine(device: torch.device) -> dict[str, Any]:
    def output_of(*command: str) -> str:
        run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        return run.stdout.strip()

    on_gpu = device.type == "cuda"
    about = machine(device) | {"name": "dry run", "cpu_cores": os.cpu_count()}
    about |= {"commit": output_of("git", "rev-parse", "HEAD")}
    about |= {"has_changes": bool(output_of("git", "status", "--porcelain"))}
    if on_gpu:
        query = "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"
        about |= {
            "name": torch.cuda.get_device_name(device),
            "nvidia_smi": output_of("nvidia-smi", *query),
        }
    return about


def use_wheels() -> None:
    """Unpack the wheels in MAXRL_FAST_WHEELS and put them before the installed packages, here and
    in the steps' processes."""
    if not (folder := os.environ.get(WHEELS)):
        return
    unpacked, wheels = ROOT / "build/wheels", sorted(Path(folder).glob("*.whl"))
    if not wheels:
        raise InputError(f"{WHEELS} must be a folder of wheels, got {folder}, which has none")
    shutil.rmtree(unpacked, ignore_errors=True)
    for wheel in wheels:
        zipfile.ZipFile(wheel).extractall(unpacked)
    sys.path.insert(0, str(unpacked))
    paths = [str(unpacked), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def chosen_steps(options: argparse.Namespace) -> list[Step]:
    """Return the steps that run: a part's, or those of --only; as a dry run or under ncu.

    Raises:
        InputError: if the part has no step of such a name.
    """
    steps = steps_of(options.part)
    if options.device == "cpu":
        steps = [
            # such a machine's cores may be busy
            replace(x, command=[*x.command[:3], *x.dry.split()], seconds=x.seconds * 10)
            for x in steps
            if x.dry is not None
        ]
    names = [step.name for step in steps]
    if unknown := set(options.only or ()) - set(names):
        raise InputError(
            f"--only must name steps of --part {options.part}, {', '.join(names)}; got "
            f"{', '.join(sorted(unknown))}"
        )
    steps = [x for x in steps if x.name == "build" or x.name in (options.only or names)]
    if options.counters:
        ncu, *words = NCU.split()
        steps = [
            x if x.name == "build" else replace(x, command=[cuda_tool(ncu), *words, *x.command])
            for x in steps
        ]
    return steps


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", choices=PARTS, default="smoke", help="default: smoke")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps, after the build")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a dry run at tiny sizes"
    )
    looks = parser.add_mutually_exclusive_group()
    looks.add_argument("--profile", action="store_true", help="print the kernels of what is timed")
    looks.add_argument("--counters", action="store_true", help="count our kernels by ncu")
    return parser.parse_args()


def _stop(*_: object) -> None:
    sys.exit(143)  # an exception, so that the step's processes are ended too


def main() -> int:
    options = arguments()
    device = torch.device(options.device)
    use_wheels()
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"bench.gpu needs a GPU and a PyTorch that sees it, and torch {torch.__version__} "
            "finds none; --device cpu is a dry run without one"
        )
    os.environ[LOOK] = "profile" if options.profile else "counters" if options.counters else ""
    steps = chosen_steps(options)
    folder = Path(os.environ.get(RESULTS) or ROOT / "runs/gpu").resolve()
    os.environ[RESULTS] = str(folder)  # for the step maze
    folder.mkdir(parents=True, exist_ok=True)
    about = about_machine(device)
    words = f"gpu {about['name']} {options.part} {os.environ[LOOK]} {' '.join(options.only or ())}"
    file = folder / f"{re.sub('[^a-z0-9.]+', '_', words.lower()).strip('_')}.json"
    log = file.with_suffix(".log")
    log.unlink(missing_ok=True)
    print(f"{about['name']}, torch {about['torch']}, CUDA {about['cuda']}; results in {file}")
    signal.signal(signal.SIGTERM, _stop)
    result: dict[str, Any] = {"benchmark": "gpu", "part": options.part, "machine": about}
    records = result["steps"] = {}
    for step in steps:
        print(f"{step.name}: at most {step.seconds:.0f} s", flush=True)
        records[step.name] = run_step(step, log)
        write_json(file, result)
        state, seconds = (records[step.name][key] for key in ("state", "seconds"))
        print(f"    {state} after {seconds:.0f} s", flush=True)
        if step.name == "build" and state != "done":
            break
    return int(any(record["state"] != "done" for record in records.values()))


if __name__ == "__main__":
    try:
        sys.exit(run_command(main))
    except KeyboardInterrupt:
        sys.exit(130)
