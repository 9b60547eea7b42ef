"""Copies between the host and a GPU. Each one that waits for the GPU leaves it without work, so there are few."""

import torch
from torch import Tensor


def to_host(*tensors: Tensor) -> list[Tensor]:
    """Return these tensors of one device on the host, with one wait for the device.

    Values must be exact in float64, as those of float32 and integers below 2^53 are.
    """
    if all(x.device.type == "cpu" for x in tensors):
        return list(tensors)
    values = torch.cat([x.flatten().double() for x in tensors]).cpu().split([x.numel() for x in tensors])
    return [part.to(x.dtype).view(x.shape) for part, x in zip(values, tensors, strict=True)]


def to_device(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """Return these tensors of the host, of one dtype, on the device, in one copy that nothing waits for.

    The copy is from pinned memory. From other memory the host would wait until the GPU has done all it has to do.
    """
    if device.type == "cpu":
        return list(tensors)
    packed = torch.cat([x.flatten() for x in tensors]).pin_memory().to(device, non_blocking=True)
    return [part.view(x.shape) for part, x in zip(packed.split([x.numel() for x in tensors]), tensors, strict=True)]
