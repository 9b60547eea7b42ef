"""The processes of a reward pool, from the outside in.

The supervisor (`main`) runs none of the user's code, so it always notices the trainer's end, and then kills all others. Its
child, the template, loads the function and makes no call. On request of the trainer it forks a child, or kills one with its
process group and forks a fresh one. Children make the calls (`serve`). If loading the function starts threads, it cannot be
forked safely: then there is no template, and the supervisor forks children that load the function each.

Each child is connected with the trainer, by JSON lines: a call is {"call": number, "arguments": {...}}, its answer {"call":
number, "results": [...], "left": whether processes of the call still run}, with a result of `function.py` for each response.

All share a control socket. The trainer sends [index of a worker, serial number of its next child]. The answer is
{"index", "serial", "pid", "file", "signature", "can_fork"} of a child that is ready, or {"index", "serial",
"cause"} of one that has ended, or {"error"} where there can be none.
"""

import contextlib
import ctypes
import faulthandler
import gc
import math
import mmap
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable

# Imported by name, so that the worker still works if the reward function replaces attributes of json and os.
from json import dumps, loads
from os import P_ALL, P_PID, WEXITED, WNOHANG, WNOWAIT, _exit, getpid, getppid, killpg, setpgid, waitid, waitpid
from pathlib import Path
from typing import Any

from maxrl_fast.rewards.function import Caller, signature_of
from maxrl_fast.runtime.loading import LoadError, load

FILE_LIMIT = 1 << 30  # bytes of a file that the function writes
POLL_MILLISECONDS = 100  # between two looks at the template and at the trainer's pid
PR_SET_PDEATHSIG = 1  # linux/prctl.h
HAS_THREADS = 77  # exit code of a template that cannot be forked


def main() -> None:
    """Run the supervisor. `RewardPool` passes its arguments in sys.argv."""
    settings = loads(sys.argv[1])
    del sys.argv[1:]
    for fd in (settings["control"], settings["stacks"], *settings["connections"]):
        os.set_inheritable(fd, False)  # programs that the function starts do not inherit it
    control = socket.socket(fileno=settings["control"])
    connections = [socket.socket(fileno=fd) for fd in settings["connections"]]
    faulthandler.register(signal.SIGUSR1, file=settings["stacks"], all_threads=False)
    # A scheduler sends these signals to the whole job. The trainer stops its workers itself, when it has no more calls.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs that the function starts would inherit
    pids = memoryview(mmap.mmap(-1, 8 * len(connections))).cast("q")  # of the children, written by the template
    template = fork()
    if template == 0:
        run_template(settings, control, connections, pids)
    has_ended = wait_for_template(template, control, settings["trainer"])
    code = end_group(template)
    if has_ended and code == HAS_THREADS:
        manage_children(control, connections, pids, settings["trainer"], lambda *child: serve_loaded(settings, *child))
    elif has_ended:
        discard(control)  # otherwise the trainer would get ECONNRESET instead of the message
        with contextlib.suppress(OSError):  # the trainer has just ended
            control.send(dumps({"error": f"the worker process {describe_exit(code)}"}).encode())
    for pid in pids:
        if pid:
            kill_group(pid)


def fork() -> int:
    """Return as os.fork. The child leads a process group of its own, and the kernel kills it when its parent ends.

    PR_SET_PDEATHSIG acts when the thread that forked ends, so only a process with a single thread may call this.
    """
    parent = getpid()
    child = os.fork()
    if child:
        with contextlib.suppress(OSError):  # it has ended
            setpgid(child, child)  # in both, so that neither goes on without it
        return child
    setpgid(0, 0)
    if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) or getppid() != parent:
        _exit(1)  # its parent ended before the line above
    return 0


def kill_group(pid: int) -> None:
    """Kill a process and all that it started in its process group."""
    with contextlib.suppress(ProcessLookupError):  # none is left
        killpg(pid, signal.SIGKILL)


def end_group(pid: int) -> int:
    """Kill a child of this process with its group, and return its exit code, which is its own if it had ended before.

    Until it is reaped, no other process can have its pid.
    """
    kill_group(pid)
    return os.waitstatus_to_exitcode(waitpid(pid, 0)[1])


def wait_for_template(template: int, control: socket.socket, trainer: int) -> bool:
    """Wait until the template has ended, or the trainer has; return whether it was the template.

    The parent's pid is checked too: a fork of the trainer keeps the socket open after the trainer has ended.
    """
    poll = select.poll()
    poll.register(control, 0)  # only a hang-up
    while getppid() == trainer and not poll.poll(POLL_MILLISECONDS):
        if waitid(P_PID, template, WEXITED | WNOHANG | WNOWAIT):
            return True
    return False


def run_template(settings: dict[str, Any], control: socket.socket, connections: list[socket.socket], pids: memoryview) -> None:
    """Load the function and fork children that make calls, until the trainer closes the socket. It does not return."""
    try:
        function, ready = load_within_limits(settings)
        if not ready["can_fork"]:
            if settings["isolation"] == "call":
                threads = "loading it starts threads, so it cannot be forked for each call"
                raise LoadError(f"{threads}; it needs --reward-isolation process")
            _exit(HAS_THREADS)
        gc.freeze()  # otherwise garbage collection in a child would copy all pages with objects of the template
        data_limit = data_size() + settings["memory_limit"]

        def start(*child: Any) -> None:
            serve(settings, function, ready, data_limit, *child)

        manage_children(control, connections, pids, getppid(), start)
    except (LoadError, OSError) as error:
        control.send(dumps({"error": str(error)}).encode())
    finally:
        _exit(0)


def load_within_limits(settings: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the function, and what the trainer is told of it.

    Raises:
        LoadError: if it cannot be loaded.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # out of memory, the kernel kills a worker, not the trainer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    set_soft_limit(resource.RLIMIT_FSIZE, FILE_LIMIT)
    function, file = load(settings["function"])
    can_fork = len(os.listdir("/proc/self/task")) == 1
    return function, {"file": file, "signature": signature_of(function), "can_fork": can_fork}


def manage_children(
    control: socket.socket,
    connections: list[socket.socket],
    pids: memoryview,
    parent: int,
    run_child: Callable[[socket.socket, socket.socket, dict[str, Any]], None],
) -> None:
    """Start and replace children as the trainer asks, and tell it which have ended, until it closes the socket or has ended.

    Args:
        run_child: makes calls in a new child, given its connection, the control socket, and its index and serial number.
    """
    read, write = os.pipe()
    for fd in (read, write):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(write)  # the end of a child ends the wait of poll
    signal.signal(signal.SIGCHLD, lambda *_: None)
    serials = [0] * len(pids)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(read, select.POLLIN)
    while getppid() == parent:
        ready = [fd for fd, _ in poll.poll(10 * POLL_MILLISECONDS)]
        if read in ready:
            os.read(read, 1 << 16)
        for index, pid in enumerate(pids):
            if pid and waitid(P_PID, pid, WEXITED | WNOHANG | WNOWAIT):
                cause = f"the worker process {describe_exit(end_group(pid))}"
                pids[index] = 0
                control.send(dumps({"index": index, "serial": serials[index], "cause": cause}).encode())
        if control.fileno() in ready:
            request = control.recv(64)
            if not request:
                return
            index, serials[index] = loads(request)
            if pids[index]:
                end_group(pids[index])
            discard(connections[index])  # what the child before has not read
            pid = fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in connections:
                    if other is not connections[index]:
                        other.close()
                try:
                    run_child(connections[index], control, {"index": index, "serial": serials[index]})
                finally:
                    _exit(1)
            pids[index] = pid


def discard(connection: socket.socket) -> None:
    """Read what nobody has read."""
    with contextlib.suppress(OSError):  # nothing is left
        while connection.recv(1 << 16, socket.MSG_DONTWAIT):
            pass


def serve_loaded(settings: dict[str, Any], connection: socket.socket, control: socket.socket, identity: dict[str, Any]) -> None:
    """Load the function in a child, and make calls."""
    try:
        function, ready = load_within_limits(settings)
    except (LoadError, OSError) as error:
        control.send(dumps({"error": str(error), **identity}).encode())
        return
    serve(
        settings, function, ready | {"can_fork": False}, data_size() + settings["memory_limit"], connection, control, identity
    )


def serve(
    settings: dict[str, Any],
    function: Callable[..., Any],
    ready: dict[str, Any],
    data_limit: int,
    connection: socket.socket,
    control: socket.socket,
    identity: dict[str, Any],
) -> None:
    """Make calls until the trainer closes the connection or this process is killed."""
    home, own_pid = os.open(".", os.O_PATH), getpid()
    set_soft_limit(resource.RLIMIT_DATA, data_limit)
    caller = Caller(function, ready["file"], ready["signature"]["style"], settings["time_limit"], settings["is_optional"])
    lines, send = connection.makefile("rb", buffering=1 << 16), connection.sendall
    reset_process(home, settings["time_limit"])
    control.send(dumps(identity | {"pid": own_pid} | ready).encode())
    control.close()
    while line := lines.readline():
        call = loads(line)
        results = caller.call(call["arguments"])
        if getpid() != own_pid:
            _exit(0)  # this is a process that the function forked and that returned from it too
        left = ready["can_fork"] and has_children()
        send(dumps({"call": call["call"], "results": results, "left": left}).encode() + b"\n")
        reset_process(home, settings["time_limit"])  # now: if it fails, the next call is not read and made by another


def has_children() -> bool:
    """Return whether processes that this one has started run. Those that have ended are reaped."""
    try:
        while waitid(P_ALL, 0, WEXITED | WNOHANG):
            pass
    except ChildProcessError:
        return False
    return True


def reset_process(home: int, time_limit: float) -> None:
    """Undo cheap side effects of a call on the next one.

    The directory is entered by its descriptor, which also works if a call has deleted it. The limit of processor time also
    counts threads, which may use several processors.
    """
    signal.setitimer(signal.ITIMER_REAL, 0)  # cancel a pending alarm
    os.fchdir(home)
    set_soft_limit(resource.RLIMIT_CPU, math.ceil(time.process_time() + 2 * time_limit) + 1)


def set_soft_limit(which: int, value: int) -> None:
    """Set a resource limit of this process; a soft limit can be raised again later."""
    hard = resource.getrlimit(which)[1]
    resource.setrlimit(which, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def data_size() -> int:
    """Return the bytes of this process that RLIMIT_DATA counts."""
    sizes = [line.split() for line in Path("/proc/self/status").read_text().splitlines()]
    return next(int(words[1]) * 1024 for words in sizes if words[0] == "VmData:")


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
