"""The processes of one reward worker, from the outside in.

The keeper (`main`) loads nothing of the user's. As a subreaper it is the parent of every orphan that the function leaves, so
all that the function starts are its descendants, and it kills them when the trainer has ended or closes the control socket.
Under it the template (`run_template`) loads the function and makes no call. On each request of the trainer it kills the worker
before with all descendants and forks a fresh one. The worker (`worker.serve`) makes the calls. It has a connection of its own
to the trainer, so that it cannot answer the calls of another. A template with threads cannot be forked safely: it becomes the
worker itself, and the keeper kills it and starts another on request.

The answer to a request is JSON on the control socket: {"kind": ..., "cause": ...} says how the worker before ended, if "pid",
"file", "can_fork", "signature" and the connection of a fresh one come with it; otherwise why there is none.
"""

import contextlib
import faulthandler
import gc
import mmap
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Collection
from json import dumps, loads
from os import _exit, getpid, getppid
from pathlib import Path
from typing import Any

from maxrl_fast.rewards import contain
from maxrl_fast.rewards.signature import signature_of
from maxrl_fast.rewards.worker import LoadError, load, serve, set_soft_limit

FILE_LIMIT = 1 << 30  # bytes of a file that the function writes
INTERVAL = 0.1  # seconds between two looks at the memory of a worker and at the trainer
EXIT_LIMIT = 0.5  # seconds for a process to end after its connection
NEXT, ENDED = b"next", b"ended"  # requests for a fresh worker: kill the one before; it has closed its connection
STOPPED = {"kind": "crash", "cause": "the reward code closed the connection between worker and trainer"}
OUT_OF_MEMORY = {"kind": "memory", "cause": "the worker and the processes that it started needed more memory than the limit"}


def main() -> None:
    """Run the keeper. The class `process.Worker` passes its arguments in sys.argv."""
    settings = loads(sys.argv[1])
    del sys.argv[1:]
    control = socket.socket(fileno=settings["control"])
    for fd in (settings["control"], settings["stacks"]):
        os.set_inheritable(fd, False)  # programs that the function starts do not inherit it
    faulthandler.register(signal.SIGUSR1, file=settings["stacks"], all_threads=False)
    # A scheduler sends these signals to the whole job. The trainer stops its workers itself, when it has no more calls.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs that the function starts would inherit
    contain.become_subreaper()
    group = contain.ControlGroup(Path(settings["cgroup"], f"maxrl-reward-{getpid()}")) if settings["cgroup"] else None
    end: dict[str, str] | None = STOPPED
    while end:
        # Written by the template: whether it has loaded the function, and the bytes that it may use if it is the worker itself.
        shared = memoryview(mmap.mmap(-1, 16)).cast("Q")
        template = contain.fork()
        if template == 0:
            try:
                run_template(settings, control, group, shared, end)
            except (LoadError, OSError) as error:
                control.send(dumps({"kind": "crash", "cause": str(error)}).encode())
            finally:
                _exit(1)
        end = keep(template, settings["trainer"], control, group, shared)


def keep(
    template: int, trainer: int, control: socket.socket, group: contain.ControlGroup | None, shared: memoryview
) -> dict[str, str] | None:
    """Kill everything when the template cannot start the worker that the trainer asks for, or the trainer has ended.

    Return how the template ended, or None if there should be no other.
    """
    end: dict[str, str] = {}
    # The parent's pid is checked too: a fork of the trainer keeps the socket open after the trainer has ended.
    # PR_SET_PDEATHSIG would not do: it acts already at the end of the trainer's thread that started this process.
    while getppid() == trainer:
        poll = select.poll()
        poll.register(control, select.POLLIN if end or shared[1] else 0)  # 0: only a hang-up
        for _, event in poll.poll(INTERVAL * 1000):
            if event & select.POLLHUP:
                finish({}, group)
                return None
            return end or finish(examine(template, 0, control.recv(16, socket.MSG_PEEK) == ENDED), group) or STOPPED
        if not end and (end := examine(template, shared[1])):
            end = finish(end, group)
            if not shared[0]:
                with contextlib.suppress(OSError):  # the template has said why, and the trainer has closed the socket
                    control.recv(16)  # otherwise the trainer would get ECONNRESET instead of the message
                    control.send(dumps(end).encode())
                return None
    finish({}, group)
    return None


def run_template(
    settings: dict[str, Any],
    control: socket.socket,
    group: contain.ControlGroup | None,
    shared: memoryview,
    end: dict[str, str],
) -> None:
    """Load the function, and start a worker whenever the trainer asks for one.

    Args:
        end: how the worker before ended.

    Raises:
        LoadError: if the function cannot be loaded.
        OSError: if a process cannot be started.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # out of memory, the kernel kills the worker, not the trainer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    set_soft_limit(resource.RLIMIT_FSIZE, FILE_LIMIT)
    home = os.open(".", os.O_PATH)
    function, file = load(settings["function"])
    signature = signature_of(function)
    can_fork = len(os.listdir("/proc/self/task")) == 1
    if settings["isolation"] == "call" and not can_fork:
        raise LoadError("loading it starts threads, so it cannot be forked for each call; it needs --reward-isolation process")
    spared = contain.descendants(getpid())  # servers that the module starts; they are no descendants of a forked worker
    memory_limit = sum(map(contain.memory, [getpid(), *(() if can_fork else spared)])) + settings["memory_limit"]
    data_limit = contain.data_size() + settings["memory_limit"]
    gc.freeze()  # otherwise garbage collection in a worker would copy all pages with objects of the template
    shared[0] = True
    request = control.recv(16)
    while request:
        theirs, own = socket.socketpair()
        if group:
            group.make(memory_limit)
        worker = contain.fork() if can_fork else 0
        if worker == 0:
            if group:
                group.join()
            shared[1] = 0 if can_fork else memory_limit
            set_soft_limit(resource.RLIMIT_DATA, data_limit)
            message = {"pid": getpid(), "file": file, "can_fork": can_fork, "signature": signature, **end}
            socket.send_fds(control, [dumps(message).encode()], [theirs.fileno()])
            theirs.close()
            control.close()
            limits = settings["is_optional"], settings["time_limit"]
            serve(own, function, file, signature["style"], *limits, home, () if can_fork else spared)
            _exit(1)
        theirs.close()
        own.close()
        poll, end = select.poll(), {}
        poll.register(control, select.POLLIN)
        while not poll.poll(None if end else INTERVAL * 1000):
            if end := examine(worker, memory_limit):
                end = finish(end, group, spared)
        request = control.recv(16)
        end = end or finish(examine(worker, 0, request == ENDED), group, spared) or STOPPED


def examine(child: int, memory_limit: int, is_ending: bool = False) -> dict[str, str]:
    """Return how a child has ended, or that it and its descendants use more bytes than a limit (0: none); else nothing.

    Args:
        is_ending: whether to wait for its end, because it has closed its connection.
    """
    end = time.monotonic() + EXIT_LIMIT
    while not (found := os.waitpid(child, os.WNOHANG))[0] and is_ending and time.monotonic() < end:
        time.sleep(0.001)
    pid, status = found
    if pid:
        return {"kind": "crash", "cause": f"the worker process {describe_exit(os.waitstatus_to_exitcode(status))}"}
    if memory_limit and contain.exceeds([child, *contain.descendants(child)], memory_limit):
        return OUT_OF_MEMORY
    return {}


def finish(end: dict[str, str], group: contain.ControlGroup | None, spared: Collection[int] = ()) -> dict[str, str]:
    """Kill all descendants but `spared` ones. Return how the child ended, corrected by what its cgroup says."""
    if group:
        group.kill()
    contain.kill_descendants(spared)
    return OUT_OF_MEMORY if group and group.remove() else end


def describe_exit(code: int) -> str:
    """Return how a process with this return code, negative for a signal, ended."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    reasons = {
        "SIGKILL": " (by the kernel if the machine ran out of memory)",
        "SIGXCPU": " (it used more than twice the time limit in processor time)",
    }
    return f"was killed by {name}{reasons.get(name, '')}"
