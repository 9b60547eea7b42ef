"""`python -m bench.gpu [--part smoke|figures|profile|races|maze]`: what this machine's GPU is for,
within nine minutes.

`smoke`, at most 4 minutes, is what a first run needs: commands and tests in which all that can
crash does. Every part begins with the extension: the one that was carried here, or one that is
built here. bench/README.md lists the parts and their steps, which run one after another, each in
its own process and with its own time limit, at most 9 minutes in all. A step that exceeds its limit
is killed with all its processes, and the next one starts; after a failed build none does. The
output is shown and kept in a log. One JSON document has the machine, the versions and every figure;
it is written again after each step. The last lines are a table of figures, aims, floors and peers;
the aims are for an H100 or H200.

Results go to the folder in MAXRL_FAST_GPU_RESULTS, by default runs/gpu, as gpu_NAME_PART.json and
gpu_NAME_PART.log. Nothing is installed or downloaded. MAXRL_FAST_WHEELS names a folder of wheels,
which are unpacked and come before the installed packages; `make gpu-wheels` fetches them.

Exit codes: 0; 1 where a step failed or took too long, whatever its figures; 2 without a GPU, or on
wrong input; 130 and 143 after Ctrl-C and SIGTERM, which end the step's processes. A figure that
misses its aim is not a failure.
"""

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.gpu_build import WHEELS
from bench.gpu_run import ROOT, run_step
from bench.gpu_steps import PARTS, RESULTS, Step, dry_steps, gpu_steps, missing
from bench.gpu_table import lines, rows
from maxrl_fast.errors import InputError
from maxrl_fast.runtime.device import memory_bytes, versions
from maxrl_fast.runtime.files import write_json

NEEDED = ("numpy", "safetensors", "pytest")
PACKAGES = ["triton", "transformers", "numpy", "trl", "liger-kernel", "vllm", "flash-attn"]


def output_of(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    try:
        run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30)
    except subprocess.TimeoutExpired:
        return None
    return run.stdout.strip() if run.returncode == 0 else None


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def machine(device: torch.device) -> dict[str, Any]:
    changes = output_of("git", "status", "--porcelain")
    return versions() | {
        "device": str(device),
        "memory_bytes": memory_bytes(device),
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "compute_capability": torch.cuda.get_device_capability(device)
        if device.type == "cuda"
        else None,
        "cpu_cores": os.cpu_count(),
        "packages": {name: version_of(name) for name in PACKAGES},
        "commit": output_of("git", "rev-parse", "HEAD"),
        "has_changes": None if changes is None else bool(changes),
    }


def check(device: torch.device) -> None:
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"bench.gpu needs a GPU and a PyTorch that sees it, and torch {torch.__version__} "
            "finds none; --device cpu is a "
            "dry run without one"
        )
    absent = [package for package in NEEDED if missing(package)]
    if absent:
        raise InputError(
            f"bench.gpu installs nothing and needs {', '.join(absent)}: pip install "
            f"{' '.join(absent)}"
        )


def use_wheels() -> None:
    """Unpack the wheels in MAXRL_FAST_WHEELS and put them before the installed packages, here and
    in the steps' processes.
    """
    folder = os.environ.get(WHEELS)
    if not folder:
        return
    wheels = sorted(Path(folder).glob("*.whl"))
    if not wheels:
        raise InputError(f"{WHEELS} must be a folder of wheels, got {folder}, which has none")
    unpacked = ROOT / "build/wheels"
    shutil.rmtree(unpacked, ignore_errors=True)
    for wheel in wheels:
        try:
            zipfile.ZipFile(wheel).extractall(unpacked)
        except (OSError, zipfile.BadZipFile) as error:
            raise InputError(
                f"the wheel {wheel} of {WHEELS} cannot be unpacked: {error}"
            ) from error
    sys.path.insert(0, str(unpacked))
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(unpacked), os.environ.get("PYTHONPATH")])
    )


def results_folder(is_dry: bool) -> Path:
    folder = Path(os.environ.get(RESULTS) or ROOT / ("build/gpu_dry_run" if is_dry else "runs/gpu"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{RESULTS} must be a folder that can be written to, got {folder}: {error}"
        ) from error
    os.environ[RESULTS] = str(folder.resolve())  # for the steps
    return folder


def run_all(steps: list[Step], result: dict[str, Any], file: Path, stretch: float) -> None:
    log, start, is_built = file.with_suffix(".log"), time.monotonic(), True
    limit = sum(step.seconds for step in steps if not step.absent) * stretch
    for number, step in enumerate(steps, 1):
        if not is_built:
            step = replace(step, absent="the extension was not built")
        passed = time.monotonic() - start
        about = f"[{number}/{len(steps)}] {step.name}"
        if step.absent:
            print(f"{about}: not run, {step.absent}", flush=True)
        else:
            print(
                f"{about}: at most {step.seconds * stretch:.0f} s; {passed:.0f} of at most "
                f"{limit:.0f} s have passed",
                flush=True,
            )
        record = run_step(step, step.seconds * stretch, log)
        result["steps"][step.name] = record
        is_built = is_built and (step.name != "build" or record["state"] in ("done", "absent"))
        record["commit"] = result["machine"]["commit"]
        result["table"] = [vars(row) for row in rows(result["steps"])]
        write_json(file, result)
        if not step.absent:
            why = f", {record['why']}" if record["why"] else ""
            print(f"    {record['state']} after {record['seconds']:.0f} s{why}", flush=True)


def earlier_steps(file: Path) -> dict[str, Any]:
    """Return the records of an earlier run, marked as earlier.

    Raises:
        InputError: if the file cannot be read.
    """
    if not file.exists():
        return {}
    try:
        steps = json.loads(file.read_text())["steps"]
        return {name: record | {"is_earlier": True} for name, record in steps.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"--only keeps the other steps' results in {file}, which cannot be read: {error!r}"
        ) from error


def _stop(*_: object) -> None:
    sys.exit(143)  # an exception, so that the step's processes are ended too


def chosen_steps(steps: list[Step], part: str, only: list[str] | None) -> list[Step]:
    """Return a part's steps, or only the named ones.

    Raises:
        InputError: if the part has no step of that name.
    """
    names = [step.name for step in steps]
    if unknown := set(only or ()) - set(names):
        raise InputError(
            f"--only must name steps of --part {part}, {', '.join(names)}; got "
            f"{', '.join(sorted(unknown))}"
        )
    return [step for step in steps if only is None or step.name in only]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", choices=PARTS, default=PARTS[0], help="default: %(default)s")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="STEP",
        help="run these steps, and keep the last results of the part's others",
    )
    parser.add_argument(
        "--device",
        choices=["cuda", "cpu"],
        default="cuda",
        help="cpu: a dry run at tiny sizes (default: cuda)",
    )
    parser.add_argument(
        "--stretch",
        type=float,
        default=1.0,
        help="factor on all limits, for a slower GPU (default: 1)",
    )
    options = parser.parse_args()
    device = torch.device(options.device)
    try:
        use_wheels()
        check(device)
        # after use_wheels: steps need packages
        by_part = gpu_steps() if device.type == "cuda" else dry_steps()
        steps = chosen_steps(by_part[options.part], options.part, options.only)
        if not 0 < options.stretch <= 1000:
            raise InputError(f"--stretch must be above 0 and at most 1000, got {options.stretch:g}")
        folder = results_folder(is_dry=device.type == "cpu")
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "dry run"
        file = (
            folder / f"gpu_{re.sub('[^a-z0-9]+', '_', name.lower()).strip('_')}_{options.part}.json"
        )
        earlier = earlier_steps(file) if options.only else {}
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _stop)
    result: dict[str, Any] = {
        "benchmark": "gpu",
        "part": options.part,
        "machine": machine(device),
        "steps": earlier,
    }
    result["started"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if not options.only:
        file.with_suffix(".log").unlink(missing_ok=True)
    about = result["machine"]
    print(
        f"{name}, driver {about['driver']}, torch {about['torch']}, CUDA {about['cuda']}; results "
        f"in {file}",
        flush=True,
    )
    try:
        run_all(steps, result, file, options.stretch)
    except KeyboardInterrupt:
        print(f"stopped; the results so far are in {file}", file=sys.stderr)
        return 130
    print(f"\n{name}, torch {about['torch']}; the aims are for an H100 or H200; {file}")
    print("\n".join(lines(rows(result["steps"]))))
    return int(any(result["steps"][step.name]["state"] not in ("done", "absent") for step in steps))


if __name__ == "__main__":
    sys.exit(main())
