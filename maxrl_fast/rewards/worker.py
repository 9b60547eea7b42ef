"""Load a reward function, and answer calls of it in a worker process.

Messages are JSON, one per line. A call is {"call": number, "arguments": {...}}; its answer is {"call": number, "reward": x} or
{"call": number, "kind": ..., "message": ...}. This module, `keeper` and `contain` import only a few modules of the standard
library, because they delay the start of every worker.
"""

import contextlib
import importlib
import importlib.util
import math
import os
import reprlib
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection

# Imported by name, so that the worker still works if the reward function replaces attributes of json and os.
from json import dumps, loads
from os import _exit, getpid
from pathlib import Path
from types import ModuleType
from typing import Any

from maxrl_fast.rewards.contain import kill_descendants

MESSAGE_LENGTH = 500  # characters
LARGEST_FLOAT32 = 3.4028234663852886e38
SHORT_REPR = reprlib.Repr()
SHORT_REPR.maxstring = SHORT_REPR.maxother = 80


class LoadError(Exception):
    """The function cannot be loaded. The message says why."""


class InvalidReward(Exception):
    """The function did not return a finite number. The message says what it returned."""


def set_soft_limit(which: int, value: int) -> None:
    """Set a resource limit of this process; a soft limit can be raised again later."""
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def load(name: str) -> tuple[Callable[..., Any], str]:
    """Return the function "path/to/file.py:name" or "package.module:name", and its file.

    Raises:
        LoadError: if it cannot be loaded.
    """
    place, _, attribute = name.rpartition(":")
    path = Path(place).resolve() if place.endswith(".py") else None
    if path and not path.is_file():
        raise LoadError(f"there is no file {place}")
    try:
        module = load_file(path) if path else importlib.import_module(place)
    except SyntaxError as error:
        raise LoadError(f"syntax error in {error.filename}, line {error.lineno}: {error.msg}") from error
    except SystemExit as error:
        raise LoadError(f"importing {place} called sys.exit({error.code!r})") from error
    except BaseException as error:
        raise LoadError(f"importing {place} failed: {describe_error(error, str(path))}") from error
    function = getattr(module, attribute, None)
    if function is None:
        raise LoadError(f"{place} has no {attribute}")
    if not callable(function):
        raise LoadError(f"{attribute} in {place} is not a function: {SHORT_REPR.repr(function)}")
    return function, getattr(module, "__file__", None) or ""


def load_file(path: Path) -> ModuleType:
    """Return the module in a file that need not be part of a package. As in a script, it can import modules beside it."""
    sys.path.insert(0, str(path.parent))
    is_taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    spec = importlib.util.spec_from_file_location(f"reward_{path.stem}" if is_taken else path.stem, path)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def serve(
    connection: socket.socket, function: Callable[..., Any], file: str, time_limit: float, home: int, spared: Collection[int]
) -> None:
    """Answer calls until one fails or the trainer closes the connection.

    Args:
        home: file descriptor of the working directory.
        spared: descendants that the calls have not started.
    """
    worker_pid = getpid()
    lines, send = connection.makefile("rb", buffering=1 << 16), connection.sendall
    reset_process(home, time_limit)
    while line := lines.readline():
        call = loads(line)
        answer = call_function(function, call["arguments"], file)
        if getpid() != worker_pid:
            _exit(0)  # this is a child that the function forked and that returned from it too
        kill_descendants(spared)
        send(dumps({"call": call["call"], **answer}).encode() + b"\n")
        if "reward" not in answer:
            return
        reset_process(home, time_limit)  # now: if it fails, the next call is not read and goes to another worker


def reset_process(home: int, time_limit: float) -> None:
    """Undo cheap side effects of a call on the next one.

    The directory is entered by its descriptor, which also works if a call has deleted it. The limit of processor time also
    counts threads, which may use several processors.
    """
    signal.setitimer(signal.ITIMER_REAL, 0)  # cancel a pending alarm
    os.fchdir(home)
    set_soft_limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + 2 * time_limit) + 1)


def call_function(function: Callable[..., Any], arguments: dict[str, Any], file: str) -> dict[str, Any]:
    """Return the reward, or the kind and message of the failure."""
    try:
        return {"reward": to_reward(function(**arguments))}
    except InvalidReward as error:
        return {"kind": "invalid", "message": str(error)}
    except MemoryError:
        return {"kind": "memory", "message": "the call needed more memory than its limit"}
    except BaseException as error:
        return {"kind": "exception", "message": describe_error(error, file)}


def to_reward(result: Any) -> float:
    """Return a number, or a tensor or array of one element, as a float.

    Raises:
        InvalidReward: if it is anything else, or not finite in float32.
    """
    value = result
    if not isinstance(result, (int, float)) and hasattr(result, "item"):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # it has more than one element
            value = result.item()
    if not isinstance(value, (int, float)):
        raise InvalidReward(f"the function must return a number, got {SHORT_REPR.repr(result)} of type {type(result).__name__}")
    try:
        reward = float(value)
    except OverflowError:
        raise InvalidReward("the function must return a finite number of float32, got an integer that is too large") from None
    if not abs(reward) <= LARGEST_FLOAT32:
        raise InvalidReward(f"the function must return a finite number of float32, got {reward}")
    return reward


def describe_error(error: BaseException, file: str) -> str:
    """Return the type and message of an error and, if its traceback passes through `file`, the last line there."""
    try:
        text = str(error)[:MESSAGE_LENGTH]
    except BaseException:
        text = "(its message cannot be printed)"
    line, trace = 0, error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"{type(error).__name__}: {text}" + (f" ({os.path.basename(file)}, line {line})" if line else "")
