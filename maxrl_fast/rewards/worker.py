"""The process of a reward worker, which makes calls for `pool.py`. A socket carries lines of JSON:
a call's arguments, and [whether the process ends, its outcomes]. The first line is the worker's,
and has the signature of what it has loaded as its text."""

import contextlib
import ctypes
import fcntl
import io
import json
import os
import re
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any, cast

from maxrl_fast.rewards import Outcome, failure
from maxrl_fast.rewards.environment import EnvironmentHost
from maxrl_fast.rewards.function import Caller
from maxrl_fast.runtime.loading import LoadError, load

MEMORY = resource.RLIMIT_DATA  # RLIMIT_AS also counts what is only reserved: 1 GB for 16 threads


def main(settings: dict[str, Any]) -> None:
    connection = socket.socket(fileno=settings["connection"])
    try:
        contain()
        # programs that the function starts do not inherit it
        os.set_inheritable(connection.fileno(), False)
        lines = connection.makefile("rwb")
        try:
            code, seconds = load(settings["name"]), settings["reward_seconds"]
            host: Caller | EnvironmentHost = (
                EnvironmentHost(code, seconds, settings["with_schemas"])
                if settings["is_environment"]
                else Caller(code, seconds)
            )
        except LoadError as error:
            write(lines, True, [failure("crash", str(error))])
            return
        write(lines, False, [Outcome(text=json.dumps(host.signature))])
        limit_memory(settings["memory_bytes"])
        serve(lines, host)
    finally:
        os.killpg(0, signal.SIGKILL)


def write(lines: io.BufferedIOBase, is_last: bool, outcomes: list[Outcome]) -> None:
    lines.write(f"{json.dumps([is_last, outcomes])}\n".encode())
    lines.flush()


def contain() -> None:
    # The kernel kills the process group when the trainer, however it ends, closes standard input: a
    # signal-driven pipe. PR_SET_PDEATHSIG would spare programs that the function has started, and
    # end the worker with the thread that started it. Programs read an empty input.
    pipe = os.dup(0)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_ASYNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # A scheduler sends these to the whole job, and the trainer ends its workers itself. Not
    # SIG_IGN, which programs that the function starts would inherit.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    with contextlib.suppress(OSError):  # out of memory, the kernel kills a worker, not the trainer
        Path("/proc/self/oom_score_adj").write_text("1000")
    close_memory()  # after oom_score_adj, which only root may write from here on
    # whole lines, which are there if the process is killed
    cast(io.TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)


def close_memory() -> None:
    """Close memory, environment and descriptors of this process to other programs of its user, root
    excepted."""
    with contextlib.suppress(AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


def limit_memory(size: int) -> None:
    """Limit private writable memory to `size` bytes more than there is now."""
    [used] = re.findall(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text())
    limit, hard = int(used) * 1024 + size, resource.getrlimit(MEMORY)[1]
    resource.setrlimit(MEMORY, (limit if hard < 0 else min(limit, hard), hard))


def serve(lines: io.BufferedIOBase, host: Caller | EnvironmentHost) -> None:
    home, own_pid, is_broken = os.open(".", os.O_PATH), os.getpid(), False
    has_servers = has_children()  # which loading has started, and which may go on
    for line in lines:
        outcomes = host.call(json.loads(line))
        if os.getpid() != own_pid:
            os._exit(0)  # a process that the function forked and that returned from it too
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.fchdir(home)
        # What failed calls keep would count against, or break, the next ones. An environment keeps
        # processes while it lives.
        is_broken |= any(outcome.kind in host.BREAKING for outcome in outcomes)
        is_last = not host.live and (is_broken or (not has_servers and has_children()))
        write(lines, is_last, outcomes)
        if is_last:
            return


def has_children() -> bool:
    """Whether children of this process run; those that have ended are reaped."""
    try:
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG):
            pass
    except ChildProcessError:
        return False
    return True
