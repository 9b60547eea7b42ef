"""The gate in front of the kernels: everything they take on trust is checked here, once."""

from functools import lru_cache

import torch
from torch import Tensor

from maxrl_fast import _C


@lru_cache
def has_cuda_kernels(device: torch.device) -> bool:
    """Whether the extension was built with CUDA kernels that this GPU can run: those of Ampere and later."""
    return _C.cuda and torch.cuda.get_device_capability(device) >= (8, 0)


def has_kernels(device: torch.device) -> bool:
    """Whether the extension's kernels run on this device; else the references in plain PyTorch do."""
    return device.type == "cpu" or (device.type == "cuda" and has_cuda_kernels(device))


def address(name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> int:
    """The address of `tensor`, which must be contiguous and of this dtype, shape and device."""
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous() or tensor.device != device:
        raise ValueError(
            f"{name} must be a contiguous {dtype} tensor of shape {tuple(shape)} on {device}, got {tensor.dtype} of shape "
            f"{tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"
        )
    return tensor.data_ptr()


def kernels_for(device: torch.device) -> str:
    """Which implementation the ops run on this device, for the report at the start of a run."""
    if device.type == "cpu":
        return "C++"
    return "CUDA" if has_kernels(device) else "PyTorch reference"
