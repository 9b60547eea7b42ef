"""The process of a reward worker: it loads a function, or a class of environments, and makes one
call after another for the trainer's side, `pool.py`.

A socket carries lines of JSON. The trainer sends [NUMBER, arguments], and the worker

    {"file", "signature", ...} or {"error"}  once, after loading
    [NUMBER, [result, ...], is_last]         after each call, a result of `function.py` per response

A call that is late ends the process: faulthandler writes the stack to the socket and exits, in C
code that needs no lock of the interpreter. When the trainer ends, however it does, the kernel kills
the process group: see `end_with_trainer`.
"""

import contextlib
import ctypes
import fcntl
import io
import os
import resource
import signal
import socket
import sys

# By name: a reward function that replaces attributes of these modules does not break its worker.
from faulthandler import cancel_dump_traceback_later, dump_traceback_later
from json import dumps, loads
from os import P_ALL, WEXITED, WNOHANG, _exit, fchdir, getpid, killpg, waitid
from pathlib import Path
from signal import ITIMER_REAL, setitimer
from typing import Any, cast

from maxrl_fast.rewards.environment import ENVIRONMENT, EnvironmentHost
from maxrl_fast.rewards.function import ROWS, Caller
from maxrl_fast.runtime.loading import LoadError, load

FILE_LIMIT = 1 << 30  # bytes of a file that the function writes
GRACE = 1.0  # seconds for a worker to answer after its async calls have reached the time limit


def main() -> None:
    """Load and serve while the trainer is connected, with the settings in sys.argv."""
    settings = loads(sys.argv.pop(1))
    del sys.argv[1:]
    connection = socket.socket(fileno=settings["connection"])
    try:
        end_with_trainer()
        # programs that the function starts do not inherit it
        os.set_inheritable(connection.fileno(), False)
        contain()
        dump_traceback_later(settings["start_limit"], exit=True, file=connection)
        try:
            host, ready = load_host(settings)
        except LoadError as error:
            connection.sendall(f"{dumps({'error': str(error)})}\n".encode())
            return
        cancel_dump_traceback_later()
        set_soft_limit(resource.RLIMIT_DATA, data_size() + settings["memory_limit"])
        connection.sendall(f"{dumps(ready)}\n".encode())
        # Each of several async calls has the time limit for itself, and so has an environment's.
        has_grace = host.signature["style"] in (ROWS, ENVIRONMENT)
        serve(connection, host, settings["time_limit"] + GRACE * has_grace)
    finally:
        killpg(0, signal.SIGKILL)


def load_host(settings: dict[str, Any]) -> tuple[Caller | EnvironmentHost, dict[str, Any]]:
    """Return what makes the calls, and what the trainer is told of it.

    Raises:
        LoadError: if the function or class cannot be loaded.
    """
    code, file = load(settings["function"])
    limit, is_first = settings["time_limit"], settings["is_first"]
    host: Caller | EnvironmentHost
    if settings["is_environment"]:
        host = EnvironmentHost(code, file, limit, with_schemas=is_first)
    else:
        host = Caller(code, file, limit, settings["is_optional"])
    return host, {"file": file, "signature": host.signature if is_first else None}


def serve(connection: socket.socket, host: Caller | EnvironmentHost, limit: float) -> None:
    """Make calls of at most `limit` seconds while the trainer is connected and this can."""
    home, own_pid = os.open(".", os.O_PATH), getpid()
    is_broken = False
    has_servers = has_children()  # which loading has started, and which may go on
    lines, send = connection.makefile("rb", buffering=1 << 16), connection.sendall
    while line := lines.readline():
        number, arguments = loads(line)
        dump_traceback_later(limit, exit=True, file=connection)
        results = host.call(arguments)
        if getpid() != own_pid:
            _exit(0)  # this is a process that the function forked and that returned from it too
        cancel_dump_traceback_later()
        # Undo what is cheap to undo; the directory may be deleted.
        setitimer(ITIMER_REAL, 0)
        fchdir(home)
        # What failed calls keep would count against, or break, the next ones. An environment keeps
        # processes while it lives.
        is_broken |= any(result.get("kind") in host.BREAKING for result in results)
        is_last = host.is_idle and (is_broken or (not has_servers and has_children()))
        send(f"{dumps([number, results, is_last])}\n".encode())
        if is_last:
            return


def end_with_trainer() -> None:
    """Have the kernel kill the process group when standard input is closed, which only the trainer
    has open: a signal-driven pipe, whose signal is SIGKILL. Programs read an empty standard input.
    """
    pipe = os.dup(0)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_ASYNC)
    with open(os.devnull, "rb") as empty:
        os.dup2(empty.fileno(), 0)


def contain() -> None:
    """Set what holds while the function is loaded and called."""
    # Whole lines, which those of other processes do not cut, and which are there if the process is
    # killed afterwards.
    for stream in (sys.stdout, sys.stderr):
        cast(io.TextIOWrapper, stream).reconfigure(line_buffering=True, write_through=False)
    # A scheduler sends SIGTERM and SIGINT to the whole job. The trainer ends its workers itself,
    # when it has no more calls.
    for number in (signal.SIGTERM, signal.SIGINT):
        # not SIG_IGN, which programs that the function starts would inherit
        signal.signal(number, lambda *_: None)
    # where the trainer ignores it, `has_children` would not see children
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with contextlib.suppress(OSError):
        # out of memory, the kernel kills a worker, not the trainer
        Path("/proc/self/oom_score_adj").write_text("1000")
    close_memory()  # after oom_score_adj, which only root may write from here on
    set_soft_limit(resource.RLIMIT_CORE, 0)
    set_soft_limit(resource.RLIMIT_FSIZE, FILE_LIMIT)


def close_memory() -> None:
    """Close memory, environment and descriptors of this process to other programs of its user, root
    excepted."""
    with contextlib.suppress(AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


def set_soft_limit(which: int, value: int) -> None:
    """Set a resource limit of this process and those that it starts."""
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def data_size() -> int:
    """Return the bytes of this process that RLIMIT_DATA counts: private writable memory.

    RLIMIT_AS would also count what is only reserved: 1 GB for 16 threads that do nothing.
    """
    sizes = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return next(int(words[1]) * 1024 for words in sizes if words[0] == "VmData:")


def has_children() -> bool:
    """Return whether children of this process run, and reap those that have ended."""
    try:
        while waitid(P_ALL, 0, WEXITED | WNOHANG):
            pass
    except ChildProcessError:
        return False
    return True
