"""Import the experiments as modules. They are scripts, and their folder is not a package."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parents[2] / "examples" / "papers"


def load(name: str) -> ModuleType:
    """Import examples/papers/NAME.py."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)
