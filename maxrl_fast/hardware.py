"""Which device and number format to compute with, and what machine this is."""

import os
import platform
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
    """The dtype of "float32", "bfloat16" or "auto": bfloat16 on a GPU that computes with it, float32 elsewhere.

    Not bfloat16 on a CPU, even where it has instructions for it: matrix multiplications are faster there, but a small policy's
    whole step was slower (bench/README.md). Nothing is timed, so that one machine always computes the same numbers.
    """
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    has_bfloat16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if has_bfloat16 else torch.float32


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
