"""How the benchmarks time calls, and find their memory and the machine's matrix rate."""

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


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


def microseconds(functions: Mapping[str, Callable[[], object]], rounds: int, device: torch.device) -> dict[str, float]:
    """Median over rounds of the time of one call, each round timing each function for about 2 ms, in turn."""

    def timed(function: Callable[[], object], calls: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize(device)
        return (time.perf_counter() - start) / calls * 1e6

    calls = {}
    for name, function in functions.items():
        timed(function, 3)  # tables are made, threads are started
        calls[name] = max(1, min(200, int(2000 / timed(function, 3))))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(timed(function, calls[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def launches(function: Callable[[], object]) -> int:
    """Kernels, copies and fills that one call starts on the GPU."""
    function()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        function()
        torch.cuda.synchronize()
    # What ran on the device, not the runtime's calls that asked for it, which the profiler lists too.
    return sum(event.device_type.name == "CUDA" for event in profiler.events() or ())


def microseconds_in_a_graph(
    functions: Mapping[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, float]:
    """Median time of one call among a hundred in a CUDA graph: what the GPU does, without the CPU that asks for it."""
    replays: dict[str, Callable[[], object]] = {}
    for name, function in functions.items():
        function()  # tables are made before capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(100):
                function()
        replays[name] = graph.replay
    return {name: t / 100 for name, t in microseconds(replays, rounds, device).items()}


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
    """Measured FLOP/s of a square-weight product, [rows, width] x [width, 4 width], the best of five medians.

    On a GPU neither is below 8192: small products are over before their launch is, and would make a low ceiling.
    """
    if device.type == "cuda":
        rows, width = max(rows, 8192), max(width, 8192)
    a, b = (torch.randn(n, width, device=device).to(dtype) for n in (rows, 4 * width))

    def product() -> Tensor:
        return torch.mm(a, b.T)

    best = min(milliseconds({"product": product}, 5, device)["product"] for _ in range(5))
    return 8 * rows * width * width / best * 1e3
