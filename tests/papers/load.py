"""The experiments as modules: they are scripts, whose folder is not a package."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "examples" / "papers"


def load(name: str) -> ModuleType:
    """examples/papers/NAME.py."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)
