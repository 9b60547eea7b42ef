"""The worker process of the reward pool. It loads the reward function, then answers one call after the other.

Messages are JSON, one per line. At its start the worker sends {"ready": file of the function} or {"failed": cause}. A call is
{"call": number, "arguments": {...}}; its answer is {"call": number, "reward": x} or {"call": number, "kind": ...,
"message": ...}. This module imports only a few modules of the standard library, because they delay the start of every worker.
"""

import contextlib
import faulthandler
import importlib
import importlib.util
import math
import os
import reprlib
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

# Imported by name, so that the worker still works if the reward function replaces attributes of json and os.
from json import dumps, loads
from os import _exit, getpid, kill, killpg
from pathlib import Path
from types import ModuleType
from typing import Any

MESSAGE_LENGTH = 500  # characters
FILE_LIMIT = 1 << 30  # bytes of a file that the function writes
CHILDREN_LIMIT = 32  # processes that calls may leave behind, zombies included, before the worker is replaced
LARGEST_FLOAT32 = 3.4028234663852886e38
WATCH_INTERVAL = 1.0  # seconds
SHORT_REPR = reprlib.Repr()
SHORT_REPR.maxstring = SHORT_REPR.maxother = 80


class LoadError(Exception):
    """The function cannot be loaded. The message says why."""


class InvalidReward(Exception):
    """The function did not return a finite number. The message says what it returned."""


def main() -> None:
    """Run the worker. The class `Worker` passes its arguments in sys.argv."""
    connection_fd, stacks_fd, trainer, function, time_limit, memory_limit = sys.argv[1:7]
    del sys.argv[1:]
    connection = socket.socket(fileno=int(connection_fd))
    for fd in (int(connection_fd), int(stacks_fd)):
        os.set_inheritable(fd, False)  # programs that the function starts do not inherit it
    faulthandler.register(signal.SIGUSR1, file=int(stacks_fd), all_threads=False)
    threading.Thread(target=watch_trainer, args=(connection.fileno(), int(trainer)), daemon=True).start()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # out of memory, the kernel kills the worker, not the trainer
    # A scheduler sends these signals to the whole job. The trainer stops its workers itself, when it has no more calls.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs that the function starts would inherit
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    set_soft_limit(resource.RLIMIT_FSIZE, FILE_LIMIT)
    try:
        loaded, file = load(function)
        message = {"ready": file}
    except LoadError as error:
        message = {"failed": str(error)}
    connection.sendall(dumps(message).encode() + b"\n")
    if "failed" not in message:
        limit_memory(int(memory_limit))
        try:
            serve(connection, loaded, file, float(time_limit))
        except BaseException:  # a call has damaged the process: exit without waiting for threads that it left
            _exit(1)
    kill_tree(getpid())


def set_soft_limit(which: int, value: int) -> None:
    """Set a resource limit of this process; a soft limit can be raised again later."""
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def limit_memory(size: int) -> None:
    """Limit the process to `size` bytes more than it uses now.

    RLIMIT_DATA counts private writable memory. RLIMIT_AS would also count address space that is only reserved: 64 MB for each
    thread that allocates, and many GB for a Java, JavaScript or Go program that the function starts.
    """
    status = Path("/proc/self/status").read_text()
    used = next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:")), 0)
    set_soft_limit(resource.RLIMIT_DATA, used + size)


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


def serve(connection: socket.socket, function: Callable[..., Any], file: str, time_limit: float) -> None:
    """Answer calls until the trainer closes the connection."""
    worker_pid, home = getpid(), os.getcwd()
    lines, send = connection.makefile("rb", buffering=1 << 16), connection.sendall
    # The process is reset before the next call is read: if that fails, the call goes to another worker.
    while reset_process(home, time_limit) and (line := lines.readline()):
        call = loads(line)
        answer = call_function(function, call["arguments"], file)
        if getpid() != worker_pid:
            _exit(0)  # this is a child that the function forked and that returned from it too
        send(dumps({"call": call["call"], **answer}).encode() + b"\n")


def reset_process(home: str, time_limit: float) -> bool:
    """Undo cheap side effects of a call on the next one; return whether the process can run another call.

    The limit of processor time ends a loop in C, which no thread and no signal handler can stop once the trainer is gone.
    """
    signal.setitimer(signal.ITIMER_REAL, 0)  # cancel a pending alarm
    os.chdir(home)
    set_soft_limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + 2 * time_limit) + 1)
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return len(children(getpid())) <= CHILDREN_LIMIT


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


def watch_trainer(connection: int, trainer: int) -> None:
    """Kill this process and its children once the trainer has closed the connection or has ended.

    PR_SET_PDEATHSIG would kill only this process, before it could kill its children, and already at the end of the thread that
    started it.
    """
    poll = select.poll()
    poll.register(connection, 0)  # reports only a hang-up
    # The parent's pid is checked too: a fork of the trainer keeps the connection open after the trainer has ended.
    while os.getppid() == trainer:
        for _, event in poll.poll(WATCH_INTERVAL * 1000):
            if event & select.POLLNVAL:
                return  # the function has closed the connection: the trainer notices and kills this process
            kill_tree(getpid())
    kill_tree(getpid())


def children(pid: int) -> list[int]:
    """Return the pids of a process's children; none if the process has ended."""
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += [int(child) for child in file.read().split()]
    return found


def kill_tree(pid: int) -> None:
    """Kill a process, its process group, and descendants outside the group. The caller must not have waited for the process."""
    descendants = children(pid)
    for child in descendants:  # the list grows during the loop
        descendants += children(child)
    for child in descendants:
        with contextlib.suppress(OSError):
            kill(child, signal.SIGKILL)
    with contextlib.suppress(OSError):
        killpg(pid, signal.SIGKILL)
