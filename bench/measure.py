"""How the benchmarks time calls, and find their memory and the machine's matrix rate."""

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def milliseconds(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    before: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Median over rounds of the time of a call, the functions in turn within a round, after one call of each; what is to be
    done before a call is not timed."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(rounds + 1):
        for name, function in functions.items():
            before()
            synchronize(device)
            start = time.perf_counter()
            function()
            synchronize(device)
            if repeat:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def peak_bytes(function: Callable[[], object], device: torch.device) -> int | None:
    """The most memory in use during a call, above what was in use before it; None where the system does not say."""
    if device.type == "cuda":
        synchronize(device)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        synchronize(device)
        return torch.cuda.max_memory_allocated() - before
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back to the system
        Path("/proc/self/clear_refs").write_text("5")  # forget the high-water mark
        before = status_bytes("VmRSS")
        function()
        return max(status_bytes("VmHWM") - before, 0)
    except (OSError, AttributeError):  # another system, or another C library
        return None


def status_bytes(field: str) -> int:
    """A size that Linux tells of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def matrix_rate(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> float:
    """Measured FLOP/s of a square-weight product, [rows, width] x [width, 4 width], the best of five medians."""
    a, b = (torch.randn(n, width, device=device).to(dtype) for n in (rows, 4 * width))

    def product() -> Tensor:
        return torch.mm(a, b.T)

    best = min(milliseconds({"product": product}, 5, device)["product"] for _ in range(5))
    return 8 * rows * width * width / best * 1e3
