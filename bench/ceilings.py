"""`python -m bench.ceilings`: what the machine can do at best: copying memory, and multiplying matrices.

The other figures are measured against these, taken on the same machine in the same hour. A copy moves each byte twice, one read
and one write. The product is of random numbers: of zeros it would be faster, as a GPU at its power limit clocks down less. The
last line is one JSON document.
"""

import argparse
import json
import sys
from typing import Any

import torch

from bench.measure import matrix_rate, milliseconds
from maxrl_fast.errors import InputError
from maxrl_fast.hardware import memory_bytes, resolve_device, resolve_dtype, versions


def copy_rate(num_bytes: int, device: torch.device) -> float:
    """Bytes a second, read and written, of a copy within the device's memory; the best of three medians."""
    source = torch.ones(num_bytes // 2, dtype=torch.bfloat16, device=device)
    target = torch.zeros_like(source)
    best = min(milliseconds({"copy": lambda: target.copy_(source)}, 5, device)["copy"] for _ in range(3))
    return 2 * num_bytes / best * 1e3


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.ceilings", description=__doc__)
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="cpu", help="default: %(default)s")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of the product")
    options = parser.parse_args()
    try:
        device = resolve_device(options.device)
        dtype = resolve_dtype(options.dtype, device)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    result: dict[str, Any] = {
        "benchmark": "ceilings",
        "machine": versions() | {"device": str(device), "dtype": str(dtype), "memory_bytes": memory_bytes(device)},
        "copy_bytes_per_second": copy_rate(2**32 if device.type == "cuda" else 2**26, device),
        "matrix_flops_per_second": matrix_rate(512, 512, dtype, device),
    }
    print(f"copy    {result['copy_bytes_per_second'] / 1e9:10,.0f} GB/s, read and written")
    print(f"product {result['matrix_flops_per_second'] / 1e12:10,.2f} TFLOP/s, {dtype}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
