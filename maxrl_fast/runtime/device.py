"""Device and dtype of the computation, the machine, and copies between host and GPU: few of them
wait for the GPU, which is idle then."""

import os
import platform
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import maxrl_fast
from maxrl_fast.errors import InputError


def resolve_device(name: str) -> torch.device:
    """For a GPU, let this process add the parts of split matrix multiplications in float32."""
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise InputError(
            "--device cuda needs a CUDA device, but this PyTorch finds none; --device cpu runs "
            "without one"
        )
    if name == "auto":
        name = "cuda" if has_gpu else "cpu"
    if name == "cuda":
        matmul = torch.backends.cuda.matmul
        matmul.allow_bf16_reduced_precision_reduction = False
        matmul.allow_fp16_reduced_precision_reduction = False
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """With "auto" bfloat16 on a GPU that has it, never on a CPU, where a small policy's whole step
    was slower, even with bfloat16 instructions (bench/README.md)."""
    if name != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
    has_bfloat16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    return torch.bfloat16 if has_bfloat16 else torch.float32


def versions() -> dict[str, Any]:
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
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True)
class Machine:
    """Of a run: processes with a GPU each, or with a share of the CPU's memory."""

    device: str  # "cpu" or "cuda"
    processes: int
    memory: int  # bytes of each process

    @classmethod
    def here(cls, device: torch.device, processes: int) -> "Machine":
        shared = processes if device.type == "cpu" else 1
        return cls(device.type, processes, memory_bytes(device) // shared)

    @classmethod
    def named(cls, text: str) -> "Machine":
        """8x80 is 8 GPUs of 80 GB (1e9 bytes) each."""
        found = re.fullmatch(r"([1-9]\d{0,5})x(\d{1,5}(?:\.\d{1,3})?)", text)
        if found is None or float(found[2]) == 0:
            raise InputError(
                f"--dry-run takes GPUs x GB of each, such as 8x80, or nothing, got {text!r:.80}"
            )
        return cls("cuda", int(found[1]), int(float(found[2]) * 1e9))

    def describe(self) -> str:
        size = f"{self.memory / 1e9:.4g} GB"
        several = self.processes > 1
        if self.device == "cpu":
            return f"a CPU with {size}{f' for each of {self.processes} processes' * several}"
        return f"each of {self.processes} GPUs of {size}" if several else f"one GPU of {size}"


def to_host(*tensors: Tensor) -> list[Tensor]:
    """Wait once for the device. Values must be exact in float64, as integers below 2^53 are."""
    if all(x.device.type == "cpu" for x in tensors):
        return list(tensors)
    values = torch.cat([x.flatten().double() for x in tensors]).cpu()
    parts = values.split([x.numel() for x in tensors])
    return [part.to(x.dtype).view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def host_numbers(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Wait once for the device."""
    numbers = to_host(*tensors.values())
    return {name: float(number) for name, number in zip(tensors, numbers, strict=True)}


def copy_to_host(x: Tensor, pinned: Tensor) -> Callable[[], Tensor]:
    """Start to copy x into pinned memory that no unread copy uses. Return what waits for the copy
    and returns it."""
    event = torch.cuda.Event()
    pinned.copy_(x, non_blocking=True)
    event.record()

    def read() -> Tensor:
        event.synchronize()
        return pinned

    return read


def to_device(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Copy tensors of one dtype at once and asynchronously, from pinned memory; from other memory
    the host would wait until the GPU has finished all queued work."""
    if device.type == "cpu":
        return list(tensors)
    packed = torch.cat([x.flatten() for x in tensors]).pin_memory().to(device, non_blocking=True)
    parts = packed.split([x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]
