"""`python -m bench.ab [EXPERIMENT ...]`: variants of the numbers in maxrl_fast/runtime/tuning.py
and csrc/cuda/tuning.h, each checked and timed in a separate process; the first is today's.

Variants of the kernels are built beforehand, where there is a compiler and perhaps no GPU:
`--build FOLDER --for-python PYTHON`. `--variants FOLDER` reads them. A variant that is not built,
fails or takes too long is reported, and the next one starts. `error` is relative: of a gradient
against PyTorch's (rows), or of a hidden state's gradient against float64 (linear); rollouts and
updates are not compared. The last line is one JSON document.

Each variant takes 5 to 20 seconds. `--device cpu` is a dry run at tiny sizes.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.gpu_build import ROOT, build_for, interpreter

# What is measured, and the values: macros of csrc/cuda/tuning.h (in capitals) or names of tuning.py
EXPERIMENTS: dict[str, tuple[str, str, list[Any]]] = {
    "storage": ("rows", "MAXRL_STORAGE", [40 << 10, 72 << 10, 100 << 10]),
    "ahead": ("rows", "MAXRL_AHEAD", [4, 8]),
    "carveout": ("rows", "MAXRL_CARVEOUT", [100, -1]),
    "chunks": ("linear", "CHUNK_SHARE", [1 / 32, 1 / 16, 1 / 64]),
    "burst": ("rollout", "BURST", [8, 16, 32]),
    "prefill": ("rollout", "PREFILL_TOKENS", [32768, 8192, 131072]),
    "merge": ("update", "FLOPS_PER_ELEMENT", [300, 100, 1000]),
    "deterministic": ("update", "deterministic", [False, True]),
}
SECONDS = 60  # of a variant


def rows(device: torch.device) -> tuple[float, float]:
    """Return the milliseconds of the loss from logits, and the error of its gradient."""
    from bench.loss_case import Case
    from bench.measure import kernel_milliseconds

    case = Case(torch.bfloat16, *((16384, 151936) if device.type == "cuda" else (64, 500)), device)
    with case.filled():
        error = case.difference("ours", case.ours)
        times = kernel_milliseconds({"ours": case.ours}, 5, device, case.refill)
    return times["ours"], error


def linear(device: torch.device) -> tuple[float, float]:
    """Return the milliseconds of the loss from hidden states, and the error of their gradient."""
    from bench.measure import kernel_milliseconds
    from maxrl_fast.ops import linear_policy_gradient_loss

    tokens, width, vocab = (16384, 4096, 151936) if device.type == "cuda" else (64, 32, 500)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, width, generator=generator).to(device, torch.bfloat16)
    weight = torch.randn(vocab, width, generator=generator).div_(width**0.5)
    weight = weight.to(device, torch.bfloat16).requires_grad_()
    targets = torch.randint(vocab, (tokens,), generator=generator).to(device)

    def gradients(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        h = hidden[:size].requires_grad_()
        bounds = torch.tensor([0, size], device=device)
        loss, _ = linear_policy_gradient_loss(
            h, weight, targets[:size], torch.ones(1, device=device), bounds
        )
        of_hidden, of_weight = torch.autograd.grad(loss, (h, weight))
        return of_hidden, of_weight

    few = 16  # of which the gradient is computed in float64 too
    p = (hidden[:few].double() @ weight.detach().double().T).softmax(-1)
    p[torch.arange(few, device=device), targets[:few]] -= 1
    exact = p @ weight.detach().double() / few
    error = float((gradients(few)[0].double() - exact).norm() / exact.norm())
    times = kernel_milliseconds({"ours": lambda: gradients(tokens)}, 3, device)
    return times["ours"], error


def rollout(device: torch.device) -> tuple[float, None]:
    """Return the milliseconds of a rollout of the paper's maze job."""
    from bench.measure import milliseconds
    from bench.rollout import CASES, policy
    from maxrl_fast.rollout import RolloutRequest, Sampling
    from maxrl_fast.rollout.native import NativeEngine
    from maxrl_fast.tasks.maze import MazeTask

    (size, *counts), sizes = CASES["maze17x32" if device.type == "cuda" else "maze7"]
    task = MazeTask(size, 0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    engine = NativeEngine(policy(task, *sizes).to(device), dtype, in_cpp=False)
    prompts = task.prompts("train", 0, counts[0]).to(device)
    limit = task.max_new_tokens if device.type == "cuda" else 8
    sampling = Sampling(1.0, limit, tuple(task.stop_ids))

    def generate() -> object:
        return engine.generate(RolloutRequest(prompts, counts[1], sampling, 0, 1))

    return milliseconds({"ours": generate}, 5, device)["ours"], None


def update(device: torch.device) -> tuple[float, None]:
    """Return the milliseconds of an update of the Qwen-shaped policy."""
    from bench.layouts import LayoutUpdates
    from bench.measure import milliseconds
    from bench.train_step import qwen

    case = qwen("qwen-0.5b", *((4, 16) if device.type == "cuda" else (1, 2)), device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    updates = LayoutUpdates.on_device(case, device, dtype)
    return milliseconds({"ours": lambda: updates.update("shared")}, 3, device)["ours"], None


MEASURES: dict[str, Callable[[torch.device], tuple[float, float | None]]] = {
    "rows": rows,
    "linear": linear,
    "rollout": rollout,
    "update": update,
}


def measure(experiment: str, number: int, variants: Path, device: torch.device) -> None:
    """Set a variant's value, and print its figures; the process is its own."""
    what, name, values = EXPERIMENTS[experiment]
    if name.isupper() and name.startswith("MAXRL_"):
        if number and device.type == "cuda":
            file = variants / f"{name}={values[number]}/_C{sysconfig.get_config_var('EXT_SUFFIX')}"
            spec = importlib.util.spec_from_file_location("maxrl_fast._C", file)
            assert spec is not None
            assert spec.loader is not None
            sys.modules["maxrl_fast._C"] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    elif name == "deterministic":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # else torch refuses products
        torch.use_deterministic_algorithms(values[number], warn_only=False)
    else:
        from maxrl_fast.runtime import tuning

        value = {"cpu": 20, "cuda": values[number]} if what == "update" else values[number]
        setattr(tuning, name, value)
    milliseconds, error = MEASURES[what](device)
    print(json.dumps({"milliseconds": milliseconds, "error": error}))


def run(experiment: str, number: int, variants: Path, device: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.ab", experiment, "--run", str(number)]
    command += ["--variants", str(variants), "--device", device]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"it took more than {SECONDS} s"}
    if ended.returncode:
        return {"failed": (ended.stderr.strip().splitlines() or ["no output"])[-1][:300]}
    figures: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.ab", description=__doc__)
    parser.add_argument("experiments", nargs="*", help=f"default: {', '.join(EXPERIMENTS)}")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--variants", type=Path, default=ROOT / "build/ab", metavar="FOLDER")
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="build the kernels' variants")
    parser.add_argument("--for-python", default="python3.12", metavar="PYTHON")
    parser.add_argument("--run", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.experiments or list(EXPERIMENTS)
    if unknown := set(names) - set(EXPERIMENTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(EXPERIMENTS)}")
    if options.run is not None:
        measure(names[0], options.run, options.variants, torch.device(options.device))
        return 0
    if options.build is not None:
        python = interpreter(options.for_python)
        for _, macro, values in (EXPERIMENTS[name] for name in names):
            for value in values[1:] if macro.startswith("MAXRL_") else []:
                build_for(python, options.build / f"{macro}={value}", f"-D{macro}={value}")
        return 0
    result: dict[str, Any] = {"benchmark": "ab", "torch": torch.__version__, "experiments": {}}
    for name in names:
        what, setting, values = EXPERIMENTS[name]
        figures = [run(name, i, options.variants, options.device) for i in range(len(values))]
        result["experiments"][name] = dict(zip(map(str, values), figures, strict=True))
        for value, of_variant in zip(values, figures, strict=True):
            failed, ms = of_variant.get("failed"), of_variant.get("milliseconds", 0.0)
            error = of_variant.get("error")
            text = failed or f"{ms:10.3f} ms{'' if error is None else f', error {error:.2g}'}"
            print(f"{name:14}{what:18}{setting} = {value}: {text}", flush=True)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
