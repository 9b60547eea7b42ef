"""The gate in front of the kernels: which of them run on which device, how they are registered as operators of PyTorch, and
the checks of everything that a kernel takes on trust."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from maxrl_fast import _C


@lru_cache
def has_cuda_kernels(device: torch.device) -> bool:
    """Return whether the extension was built with CUDA kernels, and this GPU can run them: Ampere and later."""
    return _C.cuda and torch.cuda.get_device_capability(device) >= (8, 0)


def has_kernels(device: torch.device) -> bool:
    """Return whether the extension's kernels run on this device; otherwise the plain PyTorch references do."""
    return device.type == "cpu" or (device.type == "cuda" and has_cuda_kernels(device))


def is_gpu(device: torch.device) -> bool:
    """Return whether this device runs the CUDA kernels. Tests that emulate a GPU replace this function."""
    return device.type == "cuda"


def operator(*, mutates: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Register a typed function as the operator `maxrl_fast::NAME` on CPU and CUDA, and return that operator.

    The function's annotations are the schema; `mutates` names the tensors that it writes to. This is torch.library.custom_op
    without the wrapper around each call, which costs 8 us of the 14 us that a small group_advantage takes.
    """

    def register(implementation: Callable[..., Any]) -> Any:
        name = implementation.__name__
        schema = torch.library.infer_schema(implementation, mutates_args=mutates)
        torch.library.define(f"maxrl_fast::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
        for device in ("CPU", "CUDA"):
            torch.library.impl(f"maxrl_fast::{name}", device, implementation)
        return getattr(torch.ops.maxrl_fast, name).default

    return register


def register_fake(op: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function with the operator's signature that allocates its results without computing them, for tracing."""
    register: Callable[[Callable[..., Any]], Callable[..., Any]] = torch.library.register_fake(op)
    return register


def check_fields(record: str, fields: tuple[str, ...]) -> None:
    """Raise ImportError where a record of the compiled module has other fields, or another order, than Python's."""
    compiled = getattr(_C, "FIELDS", {}).get(record)
    if compiled != fields:
        raise ImportError(
            f"the compiled module maxrl_fast._C does not fit this Python code: its {record} has the fields {compiled}, "
            f"Python's has {fields}; build the extension again"
        )


def launch(name: str, device: torch.device, **arguments: Any) -> Any:
    """Run the kernel of this device: C++ on the threads of this process, or CUDA on the current stream."""
    if not is_gpu(device):
        return getattr(_C, f"{name}_cpu")(**arguments, num_threads=torch.get_num_threads())
    with torch.cuda.device(device):
        return getattr(_C, f"{name}_cuda")(**arguments, stream=torch.cuda.current_stream().cuda_stream)


def address(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> int:
    """Return the address of `tensor`; raise ValueError if it is not contiguous or has another dtype, shape or device."""
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.device != device:
        raise ValueError(
            f"{name} must be a contiguous {dtype} tensor of shape {tuple(shape)} on {device}, got {tensor.dtype} of shape "
            f"{tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
        )
    return tensor.data_ptr()


def kernels_for(device: torch.device) -> str:
    """Return the name of the implementation that the ops run on this device, for the report at the start of a run."""
    if device.type == "cpu":
        return "C++"
    return "CUDA" if has_kernels(device) else "PyTorch reference"
