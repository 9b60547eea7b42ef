"""The processes of a reward pool: a supervisor, and the children that it forks. Only children make
calls.

The supervisor loads the function once, gives calls of the trainer to its children, and kills a
child that is late or has failed with its process group and forks another. A process in which
loading has started threads cannot be forked safely: then the trainer starts another supervisor,
which loads nothing, and each child loads the function.

A socket connects the trainer with the supervisor, and another one each child. All send lines "WORD
JSON":

    trainer      NUMBER arguments
    supervisor   NUMBER [result, ...]        ready {"file", "signature", "can_fork"}   error "cause"
    child        keep NUMBER [result, ...]   ready null                                error "cause"

with a result of `function.py` for each response. A child says "last" for "keep" if it must make no
more calls. Environments live in their children: call NUMBER is then for child NUMBER modulo the
number of children. At SIGUSR2 the supervisor writes the stacks of its children to the trainer's
standard error.
"""

import contextlib
import ctypes
import faulthandler
import gc
import io
import os
import re
import resource
import select
import signal
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

# By name: a reward function that replaces attributes of these modules does not break its worker.
from json import dumps, loads
from os import (
    P_ALL,
    P_PID,
    WEXITED,
    WNOHANG,
    WNOWAIT,
    _exit,
    getpid,
    getppid,
    killpg,
    waitid,
    waitpid,
)
from pathlib import Path
from typing import Any, cast

from maxrl_fast.rewards.environment import ENVIRONMENT, EnvironmentHost, signature_of_environment
from maxrl_fast.rewards.function import ROWS, Caller, late, signature_of
from maxrl_fast.runtime.loading import LoadError, load

FILE_LIMIT = 1 << 30  # bytes of a file that the function writes
SEND_LIMIT = 10.0  # seconds for an idle child to read a call
# seconds between two looks at the trainer's pid and at children whose connection others keep open
LOOK_INTERVAL = 1.0
GRACE = 1.0  # seconds for a child to answer after its async calls have reached the time limit
# seconds to wait for a child's stack, and of silence that end it
STACK_LIMIT, STACK_PAUSE = 0.2, 0.02
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
WROTE = "the reward code wrote to the connection between worker and trainer"
LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass
class Child:
    """A process that makes one call after another."""

    pid: int
    slot: int  # which of the children it is, kept by the one that replaces it
    connection: socket.socket
    deadline: float  # for loading the function, or for the call
    is_ready: bool = False
    call: tuple[bytes, bytes] | None = None  # its number, and the line
    received: bytes = b""  # of a line that has not come as a whole
    has_unread: bool = False  # it ended before it read the call

    @property
    def has_deadline(self) -> bool:
        return self.call is not None or not self.is_ready


def main() -> None:
    """Run the supervisor. `RewardPool` passes its arguments in sys.argv."""
    settings = loads(sys.argv[1])
    del sys.argv[1:]
    trainer = socket.socket(fileno=settings["connection"])
    # programs that the function starts do not inherit it
    os.set_inheritable(trainer.fileno(), False)
    # While the function is loaded nothing else notices the trainer's end. Afterwards `run` does,
    # and kills all groups.
    end_with(settings["trainer"])
    stderr = os.dup(2)
    os.dup2(1, 2)
    # Whole lines, which those of other processes do not cut, and which are there if the process is
    # killed afterwards.
    for stream in (sys.stdout, sys.stderr):
        cast(io.TextIOWrapper, stream).reconfigure(line_buffering=True, write_through=False)
    # A scheduler sends SIGTERM and SIGINT to the whole job. The trainer stops its workers itself,
    # when it has no more calls.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        # not SIG_IGN, which programs that the function starts would inherit
        signal.signal(number, lambda *_: None)
    with contextlib.suppress(OSError):
        # out of memory, the kernel kills a worker, not the trainer
        Path("/proc/self/oom_score_adj").write_text("1000")
    set_soft_limit(resource.RLIMIT_CORE, 0)
    set_soft_limit(resource.RLIMIT_FSIZE, FILE_LIMIT)
    function, ready = None, settings["ready"]
    try:
        if ready is None:
            function, ready = load_function(settings["function"], settings["is_environment"])
        LIBC.prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)
        trainer.sendall(f"ready {dumps(ready)}\n".encode())
        if function is None or ready["can_fork"]:
            # otherwise garbage collection in a child would copy all pages with objects of the
            # supervisor
            gc.freeze()
            Supervisor(settings, trainer, stderr, function, ready).run()
        else:
            trainer.recv(1)  # until the trainer closes it
    except (LoadError, OSError) as error:
        with contextlib.suppress(OSError):  # the trainer has closed the connection
            trainer.sendall(f"error {dumps(str(error))}\n".encode())
    finally:
        trainer.close()
        killpg(0, signal.SIGKILL)  # with what loading the function has started


def load_function(name: str, is_environment: bool) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return the function, or the class of environments, and what the trainer is told of it.

    Raises:
        LoadError: if it cannot be loaded.
    """
    function, file = load(name)
    signature = signature_of_environment(function) if is_environment else signature_of(function)
    can_fork = len(os.listdir("/proc/self/task")) == 1
    return function, {"file": file, "signature": signature, "can_fork": can_fork}


class Supervisor:
    """Has children make the calls of the trainer.

    Args:
        stderr: descriptor of the trainer's standard error.
        function: None: each child loads it.
        ready: as sent to the trainer.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        trainer: socket.socket,
        stderr: int,
        function: Callable[..., Any] | None,
        ready: dict[str, Any],
    ) -> None:
        self._settings, self._trainer, self._stderr = settings, trainer, stderr
        self._function, self._ready = function, ready
        # Each of several async calls has the time limit for itself, and so has an environment's.
        style = ready["signature"]["style"]
        self._limit = settings["time_limit"] + (GRACE if style in (ROWS, ENVIRONMENT) else 0.0)
        # numbers and lines of calls: of all children, or of each
        num_queues = settings["workers"] if style == ENVIRONMENT else 1
        self._waiting = [deque[tuple[bytes, bytes]]() for _ in range(num_queues)]
        self._num_unread = Counter[bytes]()  # processes that did not read a call, by its number
        # from the trainer; for the trainer
        self._received, self._results = bytearray(), bytearray()
        self._children: dict[int, Child] = {}  # by the descriptor of the connection
        self._poll = select.poll()
        self._poll.register(trainer, select.POLLIN)
        # a full pipe must not stop a child
        self._stacks, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        faulthandler.register(signal.SIGUSR1, file=write, all_threads=False)
        signal.signal(signal.SIGUSR2, lambda *_: self._show_stacks())
        # where the trainer ignores it, the exit codes of children would be lost
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def run(self) -> None:
        """Make calls until the trainer closes the connection or has ended; then kill all children
        with their groups.

        Raises:
            LoadError: if a child cannot load the function.
        """
        try:
            for slot in range(self._settings["workers"]):
                self._start_child(slot)
            # a fork of the trainer would keep the connection open
            while getppid() == self._settings["trainer"]:
                self._send_calls()
                busy = [child for child in self._children.values() if child.has_deadline]
                next_look = time.monotonic() + LOOK_INTERVAL
                pause = min([next_look, *(x.deadline for x in busy)]) - time.monotonic()
                ready = self._poll.poll(max(0.0, 1000 * pause))
                for fd, _ in ready:
                    if child := self._children.get(fd):
                        self._receive_results(child)
                    elif fd == self._trainer.fileno() and not self._receive_calls():
                        return
                now = time.monotonic()
                for child in [*self._children.values()]:
                    if not ready or (child.has_deadline and child.deadline <= now):
                        self._look_at(child, now)
                self._send_results()
        finally:
            self._send_results()
            for child in self._children.values():
                kill_group(child.pid)

    def _queue(self, number: int) -> deque[tuple[bytes, bytes]]:
        """Return the queue of a call, or of a child, with this number."""
        return self._waiting[number % len(self._waiting)]

    def _start_child(self, slot: int) -> None:
        parent = getpid()
        ours, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, 0)
                end_with(parent)
                others = [child.connection for child in self._children.values()]
                for connection in (ours, self._trainer, *others):
                    connection.close()
                os.close(self._stderr)
                serve(self._settings, theirs, self._function, self._ready)
            finally:
                _exit(1)
        with contextlib.suppress(OSError):  # it has ended
            os.setpgid(pid, pid)  # in both, so that neither continues without it
        theirs.close()
        ours.settimeout(SEND_LIMIT)
        self._poll.register(ours, select.POLLIN)
        self._children[ours.fileno()] = Child(
            pid, slot, ours, time.monotonic() + self._settings["start_limit"]
        )

    def _receive_calls(self) -> bool:
        """Read what the trainer asks for; return whether it is still connected."""
        try:
            data = self._trainer.recv(1 << 18)
        except OSError:
            return False
        self._received += data
        if b"\n" in data:
            *lines, self._received = self._received.split(b"\n")
            for line in lines:
                number = bytes(line.partition(b" ")[0])
                self._queue(int(number)).append((number, bytes(line + b"\n")))
        return bool(data)

    def _send_calls(self) -> None:
        """Give each child that has none a call."""
        for child in self._children.values():
            waiting = self._queue(child.slot)
            if child.has_deadline or not waiting:
                continue
            child.call = waiting.popleft()
            try:
                child.connection.sendall(child.call[1])
            except TimeoutError:  # it was stopped
                pass
            except OSError:  # it has ended
                child.has_unread = True
            child.deadline = time.monotonic() + self._limit

    def _receive_results(self, child: Child) -> None:
        """Take what a child has sent, and replace it if it makes no more calls."""
        try:
            data = child.connection.recv(1 << 16)
        except OSError:  # ECONNRESET
            data, child.has_unread = b"", True
        *lines, child.received = (child.received + data).split(b"\n")
        for line in lines:
            word, _, rest = line.partition(b" ")
            if child.call and word in (b"keep", b"last") and rest.startswith(child.call[0] + b" "):
                child.call = None
                self._results += rest + b"\n"
                if word == b"last":
                    self._replace(child)
                    return
            elif line == b"ready null":
                child.is_ready = True
            elif line.startswith(b"error ") and not child.is_ready:
                raise LoadError(loads(line[6:]))
            else:
                message = f"{WROTE}: {line[:80].decode(errors='replace')}"
                self._fail(child, {"kind": "crash", "message": message})
                return
        if data:
            return
        number, _ = child.call or (b"", b"")
        if child.has_unread and number and self._num_unread[number] < self._settings["workers"]:
            self._num_unread[number] += 1
            self._replace(child)
        else:
            self._fail(child)

    def _look_at(self, child: Child, now: float) -> None:
        """Replace a child that has ended while others keep its connection open, or that is late."""
        if waitid(P_PID, child.pid, WEXITED | WNOHANG | WNOWAIT):
            self._fail(child)
        elif child.deadline <= now and not child.is_ready:
            raise LoadError(f"loading it took longer than {self._settings['start_limit']:g} s")
        elif child.deadline <= now and child.call:
            frames = FRAME.findall(self._stack(child))
            own = [frame for frame in frames if frame[0] == self._ready["file"]] or frames
            place = (
                f", in {own[0][2]} ({os.path.basename(own[0][0])}, line {own[0][1]})" if own else ""
            )
            self._fail(child, late(self._settings["time_limit"], place))

    def _fail(self, child: Child, failure: dict[str, Any] | None = None) -> None:
        """Fail the call that a child makes, by default because the child has ended, and replace the
        child.
        """
        call, child.call = child.call, None
        code = self._replace(child)
        if call:
            ended = {"kind": "crash", "message": f"the worker process {describe_exit(code)}"}
            self._results += call[0] + f" {dumps([failure or ended])}\n".encode()

    def _replace(self, child: Child) -> int:
        """Kill a child with its process group and start another, and return its exit code. Its
        call is made by another.

        Raises:
            LoadError: if it has ended while it loaded the function.
        """
        del self._children[child.connection.fileno()]
        self._poll.unregister(child.connection)
        child.connection.close()
        kill_group(child.pid)
        if child.is_ready:
            if child.call:
                self._queue(child.slot).appendleft(child.call)
            # while the other ends: both take milliseconds where much is loaded
            self._start_child(child.slot)
        code = os.waitstatus_to_exitcode(waitpid(child.pid, 0)[1])  # its own if it had ended before
        if not child.is_ready:
            raise LoadError(f"the worker process {describe_exit(code)}")
        return code

    def _send_results(self) -> None:
        with contextlib.suppress(OSError):  # the trainer has closed it, which the next read shows
            self._trainer.sendall(self._results)
        self._results.clear()

    def _show_stacks(self) -> None:
        for child in [*self._children.values()]:
            state = f"runs call {child.call[0].decode()}" if child.call else "is idle"
            with contextlib.suppress(OSError):  # nobody reads it
                os.write(
                    self._stderr,
                    f"reward worker {child.pid} {state}\n{self._stack(child)}\n".encode(),
                )

    def _stack(self, child: Child) -> str:
        """Return the stack of a child's main thread, innermost frame first; "" if the child does
        not answer.
        """
        text, end = b"", time.monotonic() + STACK_LIMIT
        poll = select.poll()
        poll.register(self._stacks, select.POLLIN)
        while poll.poll(0):
            os.read(self._stacks, 1 << 16)  # an earlier stack
        os.kill(child.pid, signal.SIGUSR1)
        while time.monotonic() < end and poll.poll(1000 * (STACK_PAUSE if text else STACK_LIMIT)):
            text += os.read(self._stacks, 1 << 16)
        return text.decode(errors="replace")


def serve(
    settings: dict[str, Any],
    connection: socket.socket,
    function: Callable[..., Any] | None,
    ready: dict[str, Any],
) -> None:
    """Make calls in a child until one fails or leaves processes behind."""
    if function is None:
        try:
            function, _ = load_function(settings["function"], settings["is_environment"])
        except LoadError as error:
            connection.sendall(f"error {dumps(str(error))}\n".encode())
            return
    home, own_pid = os.open(".", os.O_PATH), getpid()
    set_soft_limit(resource.RLIMIT_DATA, data_size() + settings["memory_limit"])
    file, signature, limit = ready["file"], ready["signature"], settings["time_limit"]
    caller: Caller | EnvironmentHost
    if settings["is_environment"]:
        caller = EnvironmentHost(function, file, signature, limit, has_alarm=True)
    else:
        caller = Caller(function, file, signature["style"], limit, settings["is_optional"])
    lines, send = connection.makefile("rb", buffering=1 << 16), connection.sendall
    send(b"ready null\n")
    while line := lines.readline():
        number, _, arguments = line.partition(b" ")
        results = caller.call(loads(arguments))
        if getpid() != own_pid:
            _exit(0)  # this is a process that the function forked and that returned from it too
        # Undo what is cheap to undo. The descriptor of the directory is there even if a call has
        # deleted the directory.
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.fchdir(home)
        if isinstance(caller, EnvironmentHost):  # an environment may keep processes while it lives
            is_done, is_last = caller.is_idle, False
        else:
            is_done = True
            is_last = settings["isolation"] == "call" or any("kind" in x for x in results)
        # otherwise loading may have started some
        is_last = is_last or (is_done and ready["can_fork"] and has_children())
        send(b"%s %s %s\n" % (b"last" if is_last else b"keep", number, dumps(results).encode()))
        if is_last:
            return


def end_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends, which must be the process with this
    pid.

    More exactly, when the thread ends that has started this process.
    """
    if LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) or getppid() != parent:
        _exit(1)  # its parent ended before the line above


def kill_group(pid: int) -> None:
    """Kill a process and all that it started in its process group."""
    with contextlib.suppress(ProcessLookupError):  # none is left
        killpg(pid, signal.SIGKILL)


def has_children() -> bool:
    """Return whether processes that this one has started run. Those that have ended are reaped."""
    try:
        while waitid(P_ALL, 0, WEXITED | WNOHANG):
            pass
    except ChildProcessError:
        return False
    return True


def set_soft_limit(which: int, value: int) -> None:
    """Set a resource limit of this process and those that it starts."""
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
    return f"was killed by {name}" + " (by the kernel if the machine ran out of memory)" * (
        name == "SIGKILL"
    )
