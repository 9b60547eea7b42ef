"""The device and dtype to compute with, and a description of this machine."""

import os
import platform
from typing import Any

import torch

import maxrl_fast
from maxrl_fast.errors import InputError


def resolve_device(name: str) -> torch.device:
    """Return the device that "auto", "cpu" or "cuda" names."""
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda needs a CUDA device, but this PyTorch finds none; --device cpu runs without one")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype that "float32", "bfloat16" or "auto" names. "auto" is bfloat16 on a GPU that has it, else float32.

    It is never bfloat16 on a CPU, even if the CPU has instructions for it: matrix multiplications are faster, but a small
    policy's whole step was slower (bench/README.md). Nothing is timed, so a machine always computes the same numbers.
    """
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    has_bfloat16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if has_bfloat16 else torch.float32


def versions() -> dict[str, Any]:
    """Return the versions and hardware that the numbers of a run may depend on besides its configuration."""
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
    """Return the device's total memory; for "cpu" the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
