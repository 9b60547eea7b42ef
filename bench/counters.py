"""`python -m bench.counters`: hardware counters of this project's kernels, by Nsight Compute (ncu),
which must be installed.

ncu runs `python -m bench.counters --run` and counts, after warm-up, a token loss on [4096, 151936]
bfloat16 logits and decoding steps of the paper's maze job, 32 x 128, in which every row has 90
tokens; they run outside of a CUDA graph. The last line is one JSON
document; for each kernel it has the medians over its launches of four numbers: time, throughput of
the device's memory as a share of its peak, throughput of the multiprocessors, and registers per
thread. The clocks are left as they are, so that times can be compared with those of the other
benchmarks; caches are flushed before each launch.

`make gpu-profile` gives it 90 seconds.
"""

import csv
import io
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from bench.gpu_steps import cuda_tool
from bench.loss_case import Case
from bench.measure import argument_parser, describe, machine, prepare, run_command
from bench.rollout import CASES, policy
from maxrl_fast.errors import InputError
from maxrl_fast.rollout import RolloutRequest, Sampling
from maxrl_fast.rollout.device_decoder import DeviceDecoder
from maxrl_fast.rollout.native import NativeEngine
from maxrl_fast.tasks.maze import MazeTask

METRICS = {
    "gpu__time_duration.sum": "nanoseconds",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "memory_percent",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "multiprocessor_percent",
    "launch__registers_per_thread": "registers",
}
LAUNCHES = 80  # at most; each takes a fraction of a second under ncu
STEPS, LENGTH, LIMIT = 2, 90, 180  # of decoding: steps, tokens of a row before them and at most


def run(device: torch.device) -> None:
    case = Case(torch.bfloat16, 4096, 151936, device)
    with case.filled():
        case.ours()
        case.refill()
        steps = decoding_steps("maze17x32", torch.bfloat16, device)
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStart()
        case.ours()
        steps()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()


def decoding_steps(case: str, dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """Return a call that decodes STEPS tokens of every row of a case of bench.rollout, from LENGTH
    tokens on, after a rollout that has computed the prompts."""
    (maze_size, num_prompts, num_samples), sizes = CASES[case]
    task, sampling = MazeTask(maze_size, 0), Sampling(1.0, LIMIT, ())
    engine = NativeEngine(policy(task, *sizes).to(device), dtype, in_cpp=False)
    prompts = task.prompts("train", 0, num_prompts).to(device)
    engine.generate(RolloutRequest(prompts, num_samples, sampling, 0, 1))
    assert isinstance(engine.decoder, DeviceDecoder)
    assert engine.decoder.batch is not None
    slots = engine.decoder.batch

    @torch.no_grad()
    def steps() -> None:
        slots.begin(num_prompts, num_samples, sampling)
        slots.length.fill_(LENGTH)
        slots.done.fill_(False)
        for _ in range(STEPS):
            slots.step(sampling, LIMIT)

    return steps


def kernels(text: str) -> dict[str, dict[str, float]]:
    """Return each kernel's metrics, medians over its launches, from ncu's output, which has a CSV
    table after other lines.

    Raises:
        InputError: if there is no table, or none of our kernels is in it.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise InputError(f"ncu printed no table; its last lines: {' | '.join(lines[-5:])}")
    values: dict[str, dict[str, list[float]]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        if row.get("Metric Name") in METRICS:
            of_kernel = values.setdefault(row["Kernel Name"], {})
            of_kernel.setdefault(METRICS[row["Metric Name"]], []).append(
                float(row["Metric Value"].replace(",", ""))
            )
    if not values:
        raise InputError("ncu counted none of the kernels")
    return {
        name: {"launches": max(map(len, of_kernel.values()))}
        | {metric: statistics.median(numbers) for metric, numbers in of_kernel.items()}
        for name, of_kernel in values.items()
    }


def command(ncu: str) -> list[str]:
    options = [
        "--csv",
        "--print-units",
        "base",
        "--clock-control",
        "none",
        "--launch-count",
        str(LAUNCHES),
        "--profile-from-start",
        "off",
    ]
    options += [
        "--kernel-name-base",
        "demangled",
        "--kernel-name",
        "regex:maxrl::",
        "--metrics",
        ",".join(METRICS),
    ]
    return [ncu, *options, sys.executable, "-m", "bench.counters", "--device", "cuda", "--run"]


def main() -> int:
    parser = argument_parser("counters", __doc__)
    parser.add_argument(
        "--run", action="store_true", help="launch the kernels; ncu calls the command so"
    )
    options = parser.parse_args()
    device = prepare(options)
    if device.type != "cuda":
        raise InputError("bench.counters needs a GPU: --device cuda")
    if options.run:
        run(device)
        return 0
    if (ncu := cuda_tool("ncu")) is None:
        raise InputError("bench.counters needs Nsight Compute, and ncu is not installed")
    result: dict[str, Any] = {"benchmark": "counters", "machine": machine(device)}
    print(describe(result["machine"]), flush=True)
    counted = subprocess.run(
        command(ncu), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if counted.returncode:
        print(counted.stdout[-3000:])
        return 1
    result["kernels"] = kernels(counted.stdout)
    for name, x in result["kernels"].items():
        print(
            f"  {x['nanoseconds'] / 1e3:10.1f} us  memory {x['memory_percent']:5.1f}%  "
            "multiprocessors "
            f"{x['multiprocessor_percent']:5.1f}%  {x['registers']:4.0f} registers  "
            f"{x['launches']:4.0f} x {name:.90}"
        )
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
