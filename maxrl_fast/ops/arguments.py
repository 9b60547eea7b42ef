"""What every op asks of its arguments before it computes with them."""

import math
import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_INTEGERS = (
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
)
_REAL = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
    *_INTEGERS,
    torch.bool,
)


def check_tensor(name: str, value: Any, device: torch.device | None = None, like: str = "") -> None:
    """Raise where `value` is not a dense tensor of real numbers, or is not on the device that `like` is on.

    Of other dtypes a conversion would drop a part; tensors of two devices would reach the operator's stand-in for tracing.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.layout is not torch.strided or value.dtype not in _REAL:
        raise ValueError(f"{name} must be a dense tensor of real numbers, got {value.dtype} with layout {value.layout}")
    if device is not None and value.device != device:
        raise ValueError(f"{name} must be on {device} as {like}, got {value.device}")


def is_integer(tensor: Tensor) -> bool:
    """Whether the dtype is one of whole numbers; bool is not."""
    return tensor.dtype in _INTEGERS


def check_number(name: str, value: Any, wanted: str, holds: Callable[[float], bool]) -> float:
    """`value` as a float; a ValueError where it is not a number, or not as `wanted`."""
    if isinstance(value, (int, float, numbers.Real, torch.SymInt, torch.SymFloat)):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf if value > 0 else -math.inf  # type: ignore[operator]  # whole numbers alone come here
        if holds(number):
            return number
    raise ValueError(f"{name} must be {wanted}, got {_shown(value)}")


def check_finite(name: str, value: Any) -> float:
    """`value` as a float, not infinite and not NaN."""
    return check_number(name, value, "a finite number", lambda x: -math.inf < x < math.inf)


def check_whole(name: str, value: Any, wanted: str, holds: Callable[[int], bool]) -> int:
    """`value`, a whole number as `wanted`; else a ValueError."""
    is_whole = isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
    if not is_whole or not holds(value):
        raise ValueError(f"{name} must be {wanted}, got {_shown(value)}")
    whole: int = value
    return whole


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """A ValueError where `value` is none of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {_shown(value)}")


def check_flag(name: str, value: Any) -> None:
    """A ValueError where `value` is not True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {_shown(value)}")


def can_look_at(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor can be read for a check: on a CPU, where that waits for nothing."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()


def _shown(value: Any) -> str:
    return f"{value!r:.80}"
