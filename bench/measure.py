"""Shared by the benchmarks: command lines, and measurements of time, memory and GEMM throughput."""

import argparse
import ctypes
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from maxrl_fast.errors import InputError
from maxrl_fast.runtime.background import Stopwatch
from maxrl_fast.runtime.device import resolve_device, versions

COLD_BYTES = 256 << 20  # more than any second-level cache
HEAD_START_CYCLES = 20_000_000  # GPU clock cycles: about 10 ms in which the host queues calls
CALLS_A_ROUND = 10
LOOK = "MAXRL_FAST_BENCH_LOOK"  # environment variable: "", "profile" or "counters", of bench.gpu
LONGEST = 25  # kernels of a profile


def argument_parser(
    name: str, description: str | None, *, rounds: int | None = None, has_dtype: bool = False
) -> argparse.ArgumentParser:
    """Return the parser of `python -m bench.NAME`, with the shared options.

    Args:
        rounds: default of --rounds; None: no such option.
        has_dtype: whether there is --dtype.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        # some benchmarks pass unknown flags on to the trainer, whose --rollout is not --rollouts
        allow_abbrev=False,
    )
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="cpu", help="default: %(default)s"
    )
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    if has_dtype:
        parser.add_argument(
            "--dtype",
            choices=["auto", "float32", "bfloat16"],
            default="auto",
            help="default: %(default)s",
        )
    if rounds is not None:
        parser.add_argument(
            "--rounds", type=int, default=rounds, help="timed rounds (default: %(default)s)"
        )
    return parser


def prepare(options: argparse.Namespace) -> torch.device:
    """Set the number of threads, and return the device of the shared options.

    Raises:
        InputError: if the device is absent, or a number is too small.
    """
    for name in ("threads", "rounds"):
        number = getattr(options, name, None)
        if number is not None and number < 1:
            raise InputError(f"--{name} must be at least 1, got {number}")
    if options.threads:
        torch.set_num_threads(options.threads)
    return resolve_device(options.device)


def run_command(body: Callable[[], int]) -> int:
    """Return the exit code of `body`; 2 if it raises InputError, which is printed."""
    try:
        return body()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def machine(device: torch.device, dtype: torch.dtype | None = None) -> dict[str, Any]:
    place = {"threads": torch.get_num_threads(), "device": str(device)}
    return versions() | place | ({} if dtype is None else {"dtype": str(dtype)})


def describe(machine: Mapping[str, Any]) -> str:
    return ", ".join(
        [
            f"{machine['platform']}, {machine['processor']}, {machine['threads']} threads, torch "
            f"{machine['torch']}",
            machine["device"],
            *([machine["dtype"]] if "dtype" in machine else []),
        ]
    )


def keep(result: Mapping[str, Any]) -> None:
    """Print all figures so far as a JSON document, except to a terminal: what follows may fail or
    time out.
    """
    if not sys.stdout.isatty():
        print(json.dumps(result), flush=True)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class DeviceStopwatch(Stopwatch):
    """A stopwatch that waits for the device before and after each stage, so that a stage's time is
    only its own work.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        synchronize(self.device)
        with super().__call__(stage):
            yield
            synchronize(self.device)


def milliseconds(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    before: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Return each function's median time per call. Each round calls every function once; the first
    round is a warm-up.

    Args:
        before: called before each call, untimed.
    """
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
    look_into(functions, device, before)
    return {name: statistics.median(values) for name, values in times.items()}


def look_into(
    functions: Mapping[str, Callable[[], object]],
    device: torch.device,
    before: Callable[[], object],
) -> None:
    """For --profile and --counters of `python -m bench.gpu`: print the kernels of one more call of
    each function, on a CPU its operators, or let ncu count them."""
    look, on_gpu = os.environ.get(LOOK), device.type == "cuda"
    for name, function in functions.items() if look else ():
        before()
        synchronize(device)
        if look == "counters":
            torch.cuda.cudart().cudaProfilerStart()
            function()
            synchronize(device)
            torch.cuda.cudart().cudaProfilerStop()
            continue
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(activities=activities) as profiler:
            start = time.perf_counter()
            function()
            synchronize(device)
            milliseconds = (time.perf_counter() - start) * 1e3
        events = profiler.key_averages()
        if on_gpu:  # neither the operators' own events nor an annotation around several kernels
            events = [
                x for x in events if x.device_type.name == "CUDA" and not x.is_user_annotation
            ]
        times = [
            (x.self_device_time_total if on_gpu else x.self_cpu_time_total, x.count, x.key)
            for x in events
        ]
        longest = sorted(times, reverse=True)[:LONGEST]
        document = {
            "benchmark": "profile",
            "name": name,
            "milliseconds": milliseconds,
            "busy": sum(us for us, *_ in times) / 1e3 / milliseconds,
            "launches": sum(calls for _, calls, _ in times),
            "kernels": [{"name": x, "calls": n, "microseconds": us} for us, n, x in longest],
        }
        print(json.dumps(document), flush=True)
        print(f"{name}: {milliseconds:.1f} ms, {document['busy']:.0%} busy, the longest:")
        for us, calls, kernel in longest:
            print(f"  {us / 1e3:9.2f} ms {calls:7,} x {kernel:.110}")


def kernel_milliseconds(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    device: torch.device,
    before: Callable[[], object] = lambda: None,
    *,
    calls: int = CALLS_A_ROUND,
) -> dict[str, float]:
    """Return each function's median device time per call; on a CPU this is `milliseconds`.

    A GPU gets all calls of a round at once, after a wait that gives the host time to queue them,
    with events around each call. So the host's launch time is not measured.

    Args:
        before: called before each call, untimed; then the L2 cache is overwritten.
        calls: of each function in a round on a GPU.
    """
    if device.type != "cuda":
        return milliseconds(functions, rounds, device, before)
    other = torch.empty(COLD_BYTES, dtype=torch.uint8, device=device)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(rounds + 1):
        marks: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        torch.cuda._sleep(HEAD_START_CYCLES)
        for name, function in functions.items():
            for _ in range(calls):
                before()
                other.zero_()
                start, end = (
                    torch.cuda.Event(enable_timing=True),
                    torch.cuda.Event(enable_timing=True),
                )
                start.record()
                function()
                end.record()
                marks.append((name, start, end))
        torch.cuda.synchronize()
        if repeat:
            for name, start, end in marks:
                times[name].append(start.elapsed_time(end))
    look_into(functions, device, before)
    return {name: statistics.median(values) for name, values in times.items()}


def host_microseconds(
    functions: Mapping[str, Callable[[], object]], device: torch.device
) -> dict[str, float]:
    """Return the median time, over 50 calls, until each function returns to the host while the
    device is idle.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for name, function in functions.items():
        for repeat in range(53):
            synchronize(device)
            start = time.perf_counter()
            function()
            if repeat >= 3:  # the first calls build tables and start threads
                times[name].append((time.perf_counter() - start) * 1e6)
    synchronize(device)
    return {name: statistics.median(values) for name, values in times.items()}


def microseconds(
    functions: Mapping[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, float]:
    """Return each function's median time per call. Each round times every function for about 2
    ms.
    """

    def timed(function: Callable[[], object], calls: int) -> float:
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize(device)
        return (time.perf_counter() - start) / calls * 1e6

    calls = {}
    for name, function in functions.items():
        timed(function, 3)  # the first calls build tables and start threads
        calls[name] = max(1, min(200, int(2000 / timed(function, 3))))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(timed(function, calls[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def print_host_time(
    name: str, functions: Mapping[str, Callable[[], object]], floors: Mapping[str, str], rounds: int
) -> int:
    """Print the least time of the thread per call, in turn, and how many times that of its floor,
    another of the functions, it is."""
    torch.set_num_threads(1)
    times: dict[str, float] = dict.fromkeys(functions, math.inf)
    for _ in range(rounds * 8):
        for side, function in functions.items():
            start = time.thread_time()
            for _ in range(12):
                function()
            times[side] = min(times[side], (time.thread_time() - start) / 12 * 1e6)
    ratios = {side: times[side] / times[floor] for side, floor in floors.items()}
    result: dict[str, Any] = {"benchmark": name, "machine": machine(torch.device("cpu"))}
    print(describe(result["machine"]))
    for side, number in times.items():
        of_floor = f", {ratios[side]:.2f} times: {floors[side]}" if side in ratios else ""
        print(f"  {side:<36} {number:8.2f} us{of_floor}")
    print(json.dumps(result | {"host_microseconds": times, "times_floor": ratios}))
    return 0


def microseconds_in_a_graph(
    functions: Mapping[str, Callable[[], object]], rounds: int, device: torch.device
) -> dict[str, float]:
    """Return each function's median time per call in a CUDA graph of a hundred calls, without the
    CPU's launch cost.
    """
    replays: dict[str, Callable[[], object]] = {}
    for name, function in functions.items():
        function()  # the first call builds tables, which a capture cannot
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(100):
                function()
        replays[name] = graph.replay
    return {name: t / 100 for name, t in microseconds(replays, rounds, device).items()}


class PeakMemory:
    """The peak memory since this was made, beyond the memory in use then."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before: int | None = None
        if device.type == "cuda":
            synchronize(device)
            self.before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            ctypes.CDLL(None).malloc_trim(0)  # return freed memory to the system
            Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
            self.before = status_bytes("VmRSS")
        except (OSError, AttributeError):  # another system, or another C library
            pass

    def bytes(self) -> int | None:
        """Return it; None if the system does not report it."""
        if self.before is None:
            return None
        synchronize(self.device)
        is_cuda = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated() if is_cuda else status_bytes("VmHWM")
        return max(peak - self.before, 0)


def peak_bytes(function: Callable[[], object], device: torch.device) -> int | None:
    """Return a call's peak memory beyond the memory in use before it; None if the system does not
    report it.
    """
    peak = PeakMemory(device)
    function()
    return peak.bytes()


def status_bytes(field: str) -> int:
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith(field)
    )
    return int(line.split()[1]) * 1024


@dataclass
class Sides:
    """The figures of several implementations of one thing.

    Args:
        name: of ours.
        timed: returns the milliseconds per call of each function, as `milliseconds` does.
        before: called before a call whose memory is measured.
        in_turn: whether ours is timed again with each of the others.
    """

    name: str
    ours: Callable[[], object]
    timed: Callable[[Mapping[str, Callable[[], object]]], dict[str, float]]
    device: torch.device
    before: Callable[[], object] = lambda: None
    in_turn: bool = True
    milliseconds: dict[str, float] = field(default_factory=dict)
    ratio: dict[str, float] = field(default_factory=dict)  # time over ours
    peak_bytes: dict[str, int | None] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # errors by name

    def add(self, functions: Mapping[str, Callable[[], object]]) -> None:
        again = self.in_turn or self.name not in self.milliseconds
        times = self.timed(({self.name: self.ours} if again else {}) | dict(functions))
        ours = times[self.name] if again else self.milliseconds[self.name]
        for name, function in functions.items():
            self.before()
            self.milliseconds[name], self.ratio[name] = times[name], times[name] / ours
            self.peak_bytes[name] = peak_bytes(function, self.device)

    def try_each(self, makers: Mapping[str, Callable[[], Callable[[], object]]]) -> Iterator[None]:
        """Make and add one function at a time; if one fails, store its error and continue."""
        for name, make in makers.items():
            try:
                self.add({name: make()})
            except Exception as error:  # a compiler's, a peer's, or out of memory
                self.failed[name] = f"{type(error).__name__}: {error}"[:300]
            yield


def gemm_throughput(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> float:
    """Return the measured FLOP/s of the matrix multiplication [rows, width] x [width, 4 width], the
    best of five medians.

    On a GPU both sizes are at least 8192: a small multiplication takes less time than its launch,
    and would give a low ceiling.
    """
    if device.type == "cuda":
        rows, width = max(rows, 8192), max(width, 8192)
    a, b = (torch.randn(n, width, device=device).to(dtype) for n in (rows, 4 * width))

    def multiply() -> Tensor:
        return torch.mm(a, b.T)

    best = min(milliseconds({"multiply": multiply}, 5, device)["multiply"] for _ in range(5))
    return 8 * rows * width * width / best * 1e3
