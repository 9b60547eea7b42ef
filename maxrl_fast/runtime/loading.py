"""Loads custom code by name: FILE.py:NAME or package.module:NAME. Reward workers import this, so it
must not import torch.
"""

import importlib
import importlib.util
import os
import reprlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

MESSAGE_LENGTH = 500  # characters
SHORT_REPR = reprlib.Repr()
SHORT_REPR.maxstring = SHORT_REPR.maxother = 80


class LoadError(Exception):
    """A name cannot be loaded. The message says why."""


def load(name: str) -> tuple[Callable[..., Any], str]:
    """Return the function "path/to/file.py:name" or "package.module:name", and its file."""
    place, _, attribute = name.rpartition(":")
    path = Path(place).resolve() if place.endswith(".py") else None
    if path and not path.is_file():
        raise LoadError(f"there is no file {place}")
    try:
        module = _load_file(path) if path else importlib.import_module(place)
        function = getattr(module, attribute, None)
    except SyntaxError as error:
        raise LoadError(
            f"syntax error in {error.filename}, line {error.lineno}: {error.msg}"
        ) from error
    except SystemExit as error:
        raise LoadError(f"importing {place} called sys.exit({error.code!r})") from error
    except BaseException as error:
        raise LoadError(f"importing {place} failed: {describe_error(error, str(path))}") from error
    if function is None:
        raise LoadError(f"{place} has no {attribute}")
    if not callable(function):
        raise LoadError(f"{attribute} in {place} is not a function: {SHORT_REPR.repr(function)}")
    return function, getattr(module, "__file__", None) or ""


def _load_file(path: Path) -> ModuleType:
    """Import a file; as in a script, it can import modules in its folder."""
    sys.path.insert(0, str(path.parent))
    is_taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    spec = importlib.util.spec_from_file_location(
        f"reward_{path.stem}" if is_taken else path.stem, path
    )
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def describe_error(error: BaseException, file: str) -> str:
    """Add the last line of its traceback in `file`."""
    try:
        text = str(error)[:MESSAGE_LENGTH]
    except BaseException:
        text = "(its message cannot be printed)"
    line, trace = 0, error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"{type(error).__name__}: {text}" + (
        f" ({os.path.basename(file)}, line {line})" if line else ""
    )
