"""`python -m bench.ceilings`: the machine's upper limits, memory bandwidth and GEMM throughput.

The other figures are compared with these, measured on the same machine in the same hour. A copy
moves each byte twice, by one read and one write. The matrices are random: zeros would be faster,
because a GPU at its power limit then clocks down less. The last line is one JSON document.

It takes a few seconds.
"""

import json
import sys
from typing import Any

import torch

from bench.measure import (
    argument_parser,
    gemm_throughput,
    machine,
    milliseconds,
    prepare,
    run_command,
)
from maxrl_fast.runtime.device import memory_bytes, resolve_dtype


def copy_rate(num_bytes: int, device: torch.device) -> float:
    """Return bytes per second, read plus written, of a copy within the device's memory; the best of
    three medians.
    """
    source = torch.ones(num_bytes // 2, dtype=torch.bfloat16, device=device)
    target = torch.zeros_like(source)
    best = min(
        milliseconds({"copy": lambda: target.copy_(source)}, 5, device)["copy"] for _ in range(3)
    )
    return 2 * num_bytes / best * 1e3


def main() -> int:
    options = argument_parser("ceilings", __doc__, has_dtype=True).parse_args()
    device = prepare(options)
    dtype = resolve_dtype(options.dtype, device)
    result: dict[str, Any] = {
        "benchmark": "ceilings",
        "machine": machine(device, dtype) | {"memory_bytes": memory_bytes(device)},
        "copy_bytes_per_second": copy_rate(2**32 if device.type == "cuda" else 2**26, device),
        "matrix_flops_per_second": gemm_throughput(512, 512, dtype, device),
    }
    print(f"copy  {result['copy_bytes_per_second'] / 1e9:10,.0f} GB/s, read and written")
    print(f"GEMM  {result['matrix_flops_per_second'] / 1e12:10,.2f} TFLOP/s, {dtype}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
