"""Short forms that many tests share."""

import re
import textwrap
from typing import Any

import pytest

from maxrl_fast.errors import InputError


def refused(message: str) -> Any:
    """Expect an InputError whose sentence has a match of this regular expression."""
    return pytest.raises(InputError, match=message)


def table(text: str) -> list[tuple[str, ...]]:
    """Return the rows of lines `a | b`; an indented line continues the one above it."""
    lines = re.sub(r"\n +", " ", textwrap.dedent(text).strip())
    return [tuple(cell.strip() for cell in f"{x} ".split(" | ")) for x in lines.splitlines()]
