"""Load a reward function, and answer calls of it in a worker process.

Messages are JSON, one per line. A call is {"call": number, "arguments": {...}}; its answer is {"call": number, "reward": x},
with "components" if the function returned a dict, or {"call": number, "kind": ..., "message": ...}. A function that is called
for several responses at once answers {"call": number, "results": [...]} with such an object for each (`signature.py`). A reward
of null does not apply to its response. This module, `keeper`, `contain` and `signature` import only a few standard modules,
because they delay the start of every worker.
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
from collections.abc import Callable, Collection, Coroutine

# Imported by name, so that the worker still works if the reward function replaces attributes of json and os.
from json import dumps, loads
from os import _exit, getpid
from pathlib import Path
from types import ModuleType
from typing import Any

from maxrl_fast.rewards.contain import kill_descendants
from maxrl_fast.rewards.signature import BATCH, ROW

MESSAGE_LENGTH = 500  # characters
MOST_COMPONENTS, NAME_LENGTH = 32, 100  # of one result; characters of a component's name
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
    connection: socket.socket,
    function: Callable[..., Any],
    file: str,
    style: str,
    is_optional: bool,
    time_limit: float,
    home: int,
    spared: Collection[int],
) -> None:
    """Answer calls until one fails or the trainer closes the connection.

    Args:
        style: of its signature.
        is_optional: whether None and NaN mean that the function does not apply to a response.
        home: file descriptor of the working directory.
        spared: descendants that the calls have not started.
    """
    worker_pid = getpid()
    lines, send = connection.makefile("rb", buffering=1 << 16), connection.sendall
    call_styled = call_function if style == ROW else Lists(style, time_limit).call
    reset_process(home, time_limit)
    while line := lines.readline():
        call = loads(line)
        answer = call_styled(function, call["arguments"], file, is_optional)
        if getpid() != worker_pid:
            _exit(0)  # this is a child that the function forked and that returned from it too
        kill_descendants(spared)
        send(dumps({"call": call["call"], **answer}).encode() + b"\n")
        if any("kind" in result for result in answer.get("results", [answer])):
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


def call_function(
    function: Callable[..., Any], arguments: dict[str, Any], file: str, is_optional: bool = False
) -> dict[str, Any]:
    """Return the reward, or the kind and message of the failure."""
    try:
        return to_reward(function(**arguments), is_optional)
    except BaseException as error:
        return failure_of(error, file)


def failure_of(error: BaseException, file: str) -> dict[str, Any]:
    """Return the kind and message of a failure."""
    if isinstance(error, InvalidReward):
        return {"kind": "invalid", "message": str(error)}
    if isinstance(error, MemoryError):
        return {"kind": "memory", "message": "the call needed more memory than its limit"}
    return {"kind": "exception", "message": describe_error(error, file)}


class Lists:
    """Calls functions that score several responses at once. Coroutines run in one event loop, which clients may keep."""

    def __init__(self, style: str, time_limit: float) -> None:
        import asyncio  # only here: it delays the start of a worker

        self._asyncio, self._loop = asyncio, asyncio.new_event_loop()
        self._style, self._time_limit = style, time_limit

    def call(self, function: Callable[..., Any], arguments: Any, file: str, is_optional: bool) -> dict[str, Any]:
        """Return the results of one call with lists, or of a call for each response; else the failure of all."""
        try:
            if self._style != BATCH:
                return {"results": self._loop.run_until_complete(self._each(function, arguments, file, is_optional))}
            result = function(**arguments)
            if isinstance(result, Coroutine):
                result = self._loop.run_until_complete(result)
            return {"results": self._split(result, len(arguments["prompts"]), is_optional)}
        except BaseException as error:
            return failure_of(error, file)

    def close(self) -> None:
        """Close the event loop."""
        self._loop.close()

    async def _each(
        self, function: Callable[..., Any], rows: list[dict[str, Any]], file: str, is_optional: bool
    ) -> list[dict[str, Any]]:
        """Call an async function for all rows at the same time. Each has the time limit for itself."""

        async def call(row: dict[str, Any]) -> dict[str, Any]:
            try:
                return to_reward(await function(**row), is_optional)
            except self._asyncio.CancelledError:
                raise
            except BaseException as error:
                return failure_of(error, file)

        tasks = [self._asyncio.ensure_future(call(row)) for row in rows]
        done, pending = await self._asyncio.wait(tasks, timeout=self._time_limit)
        for task in pending:
            task.cancel()
        late = {"kind": "timeout", "message": f"the call ran longer than {self._time_limit:g} s"}
        return [task.result() if task in done else late for task in tasks]

    def _split(self, result: Any, count: int, is_optional: bool) -> list[dict[str, Any]]:
        """Return the results for each response of a function's list.

        Raises:
            InvalidReward: if it is no list of as many numbers.
        """
        listed = result.tolist() if hasattr(result, "tolist") else result
        if not isinstance(listed, (list, tuple)) or len(listed) != count:
            wanted = f"a function of `completions` must return a list with a number for each of the {count} completions"
            given = f"a list of {len(listed)}" if isinstance(listed, (list, tuple)) else SHORT_REPR.repr(result)
            raise InvalidReward(f"{wanted}, got {given}")
        results = []
        for item in listed:
            try:
                results.append(to_reward(item, is_optional))
            except InvalidReward as error:
                results.append({"kind": "invalid", "message": str(error)})
        return results


def to_reward(result: Any, is_optional: bool = False) -> dict[str, Any]:
    """Return what a function returned for a response as the fields of an answer.

    A dict of components has its reward under "reward", else it is their sum. Components that are None or NaN are left out.

    Raises:
        InvalidReward: if it is no number of float32 and no dict of such numbers. None and NaN are allowed if it is optional.
    """
    if not isinstance(result, dict):
        value = to_number(result)
        if value is None and not is_optional:
            raise InvalidReward(_NO_NUMBER.format(SHORT_REPR.repr(result), type(result).__name__) if result is None else _NAN)
        return {"reward": value}
    if len(result) > MOST_COMPONENTS or not all(isinstance(name, str) and len(name) <= NAME_LENGTH for name in result):
        raise InvalidReward(
            f"a dict of components must have at most {MOST_COMPONENTS} names of at most {NAME_LENGTH} characters, "
            f"got {SHORT_REPR.repr(result)}"
        )
    values = {name: to_number(value, f"component {name!r}: ") for name, value in result.items()}
    components = {name: value for name, value in values.items() if value is not None}
    reward = components.pop("reward", None) if "reward" in values else _sum([*components.values()])
    if reward is None and not is_optional:
        raise InvalidReward(f"the function must return a reward, got a dict without one: {SHORT_REPR.repr(result)}")
    return {"reward": reward, "components": components}


def _sum(values: list[float]) -> float | None:
    return to_number(sum(values), "the sum of the components: ") if values else None


_NO_NUMBER = "the function must return a number, got {} of type {}"
_NAN = "the function must return a finite number of float32, got nan"


def to_number(result: Any, where: str = "") -> float | None:
    """Return a number, or a tensor or array of one element, as a float; None and NaN as None.

    Raises:
        InvalidReward: if it is anything else, or not finite in float32.
    """
    value = result
    if not isinstance(result, (int, float)) and hasattr(result, "item"):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # it has more than one element
            value = result.item()
    if value is None:
        return None
    if not isinstance(value, (int, float)):
        raise InvalidReward(where + _NO_NUMBER.format(SHORT_REPR.repr(result), type(result).__name__))
    try:
        number = float(value)
    except OverflowError:
        wanted = "the function must return a finite number of float32, got an integer that is too large"
        raise InvalidReward(where + wanted) from None
    if math.isnan(number):
        return None
    if not abs(number) <= LARGEST_FLOAT32:
        raise InvalidReward(f"{where}the function must return a finite number of float32, got {number}")
    return number


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
