"""Values from files: finite numbers and bounded texts."""

import json
import math
from typing import Any

TEXT_LENGTH = 20_000  # characters of one prompt or response

Number = int | float | None


def finite(value: Any) -> Number:
    """Return the number, or None if the value is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond the range of float64
        return None


def text_of(value: Any, most: int | None = None) -> tuple[str, int]:
    """Return a value as text of at most `most` characters, and the original length."""
    text = value if isinstance(value, str) else "" if value is None else json.dumps(value)
    return text[: TEXT_LENGTH if most is None else most], len(text)
