"""Which device and number format to compute with, and what machine this is."""

import os
import platform
import time
from typing import Any

import torch

import maxrl_fast
from maxrl_fast.errors import InputError


def resolve_device(name: str) -> torch.device:
    """The device of "auto", "cpu" or "cuda"."""
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device cuda was asked for, but this PyTorch finds no CUDA device; --device cpu runs without one")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype of "float32", "bfloat16" or "auto": bfloat16 where the hardware multiplies it faster than float32."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    if device.type == "cuda":
        fast = torch.cuda.get_device_capability(device) >= (8, 0)
    else:
        # Emulated, as on AVX2, bfloat16 products are about ten times slower than float32.
        fast = product_seconds(torch.bfloat16) < 0.7 * product_seconds(torch.float32)
    return torch.bfloat16 if fast else torch.float32


def product_seconds(dtype: torch.dtype) -> float:
    """Time of a small product on the CPU, the best of a few."""
    a, b = torch.ones(128, 512, dtype=dtype), torch.ones(512, 512, dtype=dtype)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - start)
    return min(times)


def versions() -> dict[str, Any]:
    """What the numbers of a run may depend on besides its configuration."""
    return {
        "maxrl_fast": maxrl_fast.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "platform": platform.platform(),
        "processor": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def memory_bytes(device: torch.device) -> int:
    """All of the device's memory; for "cpu" the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
