"""The child's side of the reward pool: loads the reward function, then answers one call after the other.

It speaks JSON, a line for each message. Once at the start it sends {"ready": file of the function} or {"failed": cause}. A call
is {"call": number, "arguments": {...}}; its answer is {"call": number, "reward": x} or {"call": number, "kind": ..., "message":
...}. Only the standard library, and little of it, is imported: every worker and every replacement waits for it.
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

# By name, because the function may replace what json and os hold, and what it replaces would be its own undoing only later.
from json import dumps, loads
from os import _exit, getpid, kill, killpg
from pathlib import Path
from types import ModuleType
from typing import Any

MESSAGE_LENGTH = 500  # characters
FILE_LIMIT = 1 << 30  # bytes in a file that the function writes
CHILDREN_LIMIT = 32  # processes, dead ones that nobody waited for included, that calls may leave behind before a fresh start
LARGEST = 3.4028234663852886e38  # that float32 has
WATCH_INTERVAL = 1.0  # seconds
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = 80


class LoadError(Exception):
    """The function cannot be had. The message says why."""


class InvalidReward(Exception):
    """The function returned what is no reward. The message says what."""


def main() -> None:
    """Serve as the arguments say: descriptors of the connection and of the pipe for stacks, trainer's process, and limits."""
    connection_fd, stacks_fd, trainer, function, time_limit, memory_limit = sys.argv[1:7]
    del sys.argv[1:]
    connection = socket.socket(fileno=int(connection_fd))
    for fd in (int(connection_fd), int(stacks_fd)):
        os.set_inheritable(fd, False)  # not for programs that the function starts
    faulthandler.register(signal.SIGUSR1, file=int(stacks_fd), all_threads=False)
    threading.Thread(target=watch, args=(connection.fileno(), int(trainer)), daemon=True).start()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # when memory runs out the kernel ends this one, not the trainer
    # Sent to a whole job: the trainer ends its workers when it has no more calls.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # not ignored: programs that the function starts would do so too
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    limit_soft(resource.RLIMIT_FSIZE, FILE_LIMIT)
    try:
        called, file = load(function)
        said = {"ready": file}
    except LoadError as error:
        said = {"failed": str(error)}
    connection.sendall(dumps(said).encode() + b"\n")
    if "failed" not in said:
        limit_memory(int(memory_limit))
        try:
            serve(connection, called, file, float(time_limit))
        except BaseException:  # the call has damaged the process: do not wait for threads that it has left
            _exit(1)
    kill_tree(getpid())


def limit_soft(which: int, value: int) -> None:
    """Set a limit of this process that can be moved later."""
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def limit_memory(size: int) -> None:
    """Let the process have `size` bytes beyond what it has now.

    RLIMIT_DATA counts private writable memory. RLIMIT_AS would count address space too that is only reserved: 64 MB for each
    thread that allocates, and many GB for a program in Java, JavaScript or Go that the function starts.
    """
    status = Path("/proc/self/status").read_text()
    taken = next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:")), 0)
    limit_soft(resource.RLIMIT_DATA, taken + size)


def load(name: str) -> tuple[Callable[..., Any], str]:
    """The function called "path/to/file.py:name" or "package.module:name", and its file; LoadError if it cannot be had."""
    place, _, attribute = name.rpartition(":")
    path = Path(place).resolve() if place.endswith(".py") else None
    if path and not path.is_file():
        raise LoadError(f"there is no file {place}")
    try:
        module = load_file(path) if path else importlib.import_module(place)
    except SyntaxError as error:
        raise LoadError(f"syntax error in {error.filename}, line {error.lineno}: {error.msg}") from error
    except BaseException as error:
        raise LoadError(f"importing {place} failed: {described(error, str(path))}") from error
    function = getattr(module, attribute, None)
    if function is None:
        raise LoadError(f"{place} has no {attribute}")
    if not callable(function):
        raise LoadError(f"{attribute} in {place} is not a function: {SHORT.repr(function)}")
    return function, getattr(module, "__file__", None) or ""


def load_file(path: Path) -> ModuleType:
    """The module in a file that need not be part of a package; its neighbours can be imported, as in a script."""
    sys.path.insert(0, str(path.parent))
    is_taken = path.stem in sys.modules or path.stem in sys.stdlib_module_names
    spec = importlib.util.spec_from_file_location(f"reward_{path.stem}" if is_taken else path.stem, path)
    assert spec is not None  # as its name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def serve(connection: socket.socket, function: Callable[..., Any], file: str, time_limit: float) -> None:
    """Answer calls until the trainer closes the connection."""
    own, home = getpid(), os.getcwd()
    lines, send = connection.makefile("rb", buffering=1 << 16), connection.sendall
    # What follows an answer is done before the next call is read: if it fails, that call goes to another worker.
    while tidy(home, time_limit) and (line := lines.readline()):
        call = loads(line)
        answer = outcome(function, call["arguments"], file)
        if getpid() != own:
            _exit(0)  # a child that the function forked has returned from it as well
        send(dumps({"call": call["call"], **answer}).encode() + b"\n")


def tidy(home: str, time_limit: float) -> bool:
    """Undo what one call could do to the next, as far as it is cheap; whether the process is fit for another.

    The limit of processor time is for what no signal and no thread can end once the trainer is gone: a loop in C.
    """
    signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that is still set
    os.chdir(home)
    limit_soft(resource.RLIMIT_CPU, math.ceil(time.process_time() + 2 * time_limit) + 1)
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return True
    return len(children(getpid())) <= CHILDREN_LIMIT


def outcome(function: Callable[..., Any], arguments: dict[str, Any], file: str) -> dict[str, Any]:
    """The reward, or kind and message of the failure."""
    try:
        return {"reward": reward_of(function(**arguments))}
    except InvalidReward as error:
        return {"kind": "invalid", "message": str(error)}
    except MemoryError:
        return {"kind": "memory", "message": "needed more memory than it may have"}
    except BaseException as error:
        return {"kind": "exception", "message": described(error, file)}


def reward_of(result: Any) -> float:
    """A finite number, or a tensor or array of one, as a float; InvalidReward if it is something else."""
    value = result
    if not isinstance(result, (int, float)) and hasattr(result, "item"):
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # it has several elements
            value = result.item()
    if not isinstance(value, (int, float)):
        raise InvalidReward(f"returned {SHORT.repr(result)} of type {type(result).__name__}, not a number")
    try:
        reward = float(value)
    except OverflowError:
        raise InvalidReward("returned an integer that is too large") from None
    if not abs(reward) <= LARGEST:
        raise InvalidReward(f"returned {reward}, not a finite number of float32")
    return reward


def described(error: BaseException, file: str) -> str:
    """Type, message and, if it passed through `file`, the last line there."""
    try:
        text = str(error)[:MESSAGE_LENGTH]
    except BaseException:
        text = "(it has no message that can be printed)"
    line, trace = 0, error.__traceback__
    while trace:
        if trace.tb_frame.f_code.co_filename == file:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"{type(error).__name__}: {text}" + (f" ({os.path.basename(file)}, line {line})" if line else "")


def watch(connection: int, trainer: int) -> None:
    """End this process and its children when the trainer has closed the connection or is gone.

    PR_SET_PDEATHSIG would end this process alone, before it could end its children, and already when the thread that started it
    ends.
    """
    poll = select.poll()
    poll.register(connection, 0)  # reports a hang-up only
    # The number of the parent is for copies of the trainer (fork), which keep the connection open after its end.
    while os.getppid() == trainer:
        for _, event in poll.poll(WATCH_INTERVAL * 1000):
            if event & select.POLLNVAL:
                return  # the function has closed it: the trainer takes note and ends this process
            kill_tree(getpid())
    kill_tree(getpid())


def children(pid: int) -> list[int]:
    """The processes that a process has started; none if it is gone."""
    found = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += [int(child) for child in file.read().split()]
    return found


def kill_tree(pid: int) -> None:
    """Kill a process, the group that it leads, and descendants that have left the group. It must not have been waited for."""
    family = children(pid)
    for child in family:  # which grows
        family += children(child)
    for child in family:
        with contextlib.suppress(OSError):
            kill(child, signal.SIGKILL)
    with contextlib.suppress(OSError):
        killpg(pid, signal.SIGKILL)
