"""Checks of arguments that all ops share."""

import math
import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

INTEGER_DTYPES = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)
REAL_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *INTEGER_DTYPES,
    torch.bool,
)


def check_tensor(name: str, value: Any, device: torch.device | None = None, like: str = "") -> None:
    """Raise TypeError or ValueError unless `value` is a dense tensor of real numbers on `device`.

    `like` names what is on the device. With two devices PyTorch would run the operator's fake."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.layout is not torch.strided or value.dtype not in REAL_DTYPES:
        raise ValueError(
            f"{name} must be a dense tensor of real numbers, got {value.dtype} with layout "
            f"{value.layout}"
        )
    if device is not None and value.device != device:
        raise ValueError(f"{name} must be on {device} as {like}, got {value.device}")


def is_integer(tensor: Tensor) -> bool:
    return tensor.dtype in INTEGER_DTYPES


def check_number(name: str, value: Any, wanted: str, holds: Callable[[float], bool]) -> float:
    if isinstance(value, (int, float, numbers.Real, torch.SymInt, torch.SymFloat)):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf if value > 0 else -math.inf  # type: ignore[operator]  # only integers overflow
        if holds(number):
            return number
    raise ValueError(f"{name} must be {wanted}, got {_shown(value)}")


def check_finite(name: str, value: Any) -> float:
    return check_number(name, value, "a finite number", lambda x: -math.inf < x < math.inf)


def check_integer(name: str, value: Any, wanted: str, holds: Callable[[int], bool]) -> int:
    is_int = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    if not is_int or not holds(value):
        raise ValueError(f"{name} must be {wanted}, got {_shown(value)}")
    number: int = value
    return number


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {_shown(value)}")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {_shown(value)}")


def is_host_readable(tensor: Tensor) -> bool:
    """Whether a check may read the values; on a GPU that would wait for the device."""
    return tensor.device.type == "cpu"


def _shown(value: Any) -> str:
    return f"{value!r:.80}"
