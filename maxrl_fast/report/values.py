"""Values from files that nobody vouches for: finite numbers, counts and bounded texts."""

import json
import math
from typing import Any, TypeGuard

TEXT_LENGTH = 20_000  # characters of one prompt or response

Number = int | float | None


def is_count(value: Any) -> TypeGuard[int]:
    """Return whether the value is an integer from 0 to 2^53, exact in JavaScript."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 2**53


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def finite(value: Any) -> Number:
    """Return the number, or None if the value is not a finite number."""
    if not is_number(value):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond the range of float64
        return None


def text_of(value: Any, most: int | None = None) -> tuple[str, int]:
    """Return a value as text of at most `most` characters, and the original length."""
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value)
    return text[: TEXT_LENGTH if most is None else most], len(text)
