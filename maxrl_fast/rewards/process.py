"""A worker process of the reward pool, seen from the trainer."""

import contextlib
import json
import math
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from maxrl_fast.rewards.worker import MESSAGE_LENGTH, kill_tree

# Not `python -m`: with the trainer's sys.path a module is found, or hidden, here as it is there.
START = "import sys; sys.path[:] = sys.argv[7:]; from maxrl_fast.rewards.worker import main; main()"
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
MARK = "MAXRL_FAST_REWARD_WORKER"  # in the environment of a worker, and so of what it starts
STACK_LIMIT, STACK_PAUSE = 0.2, 0.02  # seconds in which a worker writes its stack, and of silence after it
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def kill_marked(mark: bytes) -> None:
    """Kill the processes whose environment has this: those that a worker started, and that left its session and its family."""
    for pid in os.listdir("/proc"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if pid.isdecimal() and mark in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(int(pid), signal.SIGKILL)


class Worker:
    """A process that computes rewards, and what it is doing: starting (until `is_ready`), waiting, or the call `index`."""

    def __init__(self, function: str, time_limit: float, memory_limit: int) -> None:
        """Start it; OSError if the system has no process or descriptor left."""
        self.connection, theirs = socket.socketpair()
        self.is_ready, self.mark = False, uuid.uuid4().hex
        self.file = ""  # of the function
        self.index: int | None = None  # in the batch
        self.number = 0  # of the call, never used twice
        self.deadline = math.inf  # on the clock time.monotonic
        self.outgoing = memoryview(b"")
        self.incoming = b""
        with contextlib.ExitStack() as on_error, theirs:
            on_error.callback(self.connection.close)
            self.connection.setblocking(False)
            read, write = os.pipe()
            self.stacks = on_error.enter_context(open(read, "rb", buffering=0))
            with open(write, "wb", buffering=0):
                for fd in (read, write):
                    os.set_blocking(fd, False)
                fds = (theirs.fileno(), write)
                words = [*fds, os.getpid(), function, time_limit, memory_limit, *sys.path]
                self.process = subprocess.Popen(
                    [sys.executable, "-c", START, *map(str, words)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=os.environ | ONE_THREAD | {MARK: self.mark},
                    pass_fds=fds,
                    start_new_session=True,  # Ctrl-C is not for it, and it leads a group that can be killed
                )
            on_error.pop_all()

    def kill(self) -> None:
        """End it and what it has started. Its process is still to be waited for."""
        if self.process.returncode is None:  # else the number may be another process's by now
            kill_tree(self.process.pid)
        kill_marked(f"{MARK}={self.mark}".encode())
        self.connection.close()
        self.stacks.close()

    def return_code(self, limit: float) -> int | None:
        """The process's return code as that of Popen, if it ends within `limit` seconds. Its number stays its own."""
        end = time.monotonic() + limit
        while True:
            status = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status:
                return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
            if time.monotonic() >= end:
                return None
            time.sleep(0.002)

    def stack(self) -> str:
        """Where its main thread is, innermost first; empty if it does not say."""
        text, end = b"", time.monotonic() + STACK_LIMIT
        with contextlib.suppress(OSError, ValueError):  # it has ended, or another thread has just replaced it
            self.stacks.read(1 << 16)  # what came before
            os.kill(self.process.pid, signal.SIGUSR1)
            while select.select([self.stacks], [], [], STACK_PAUSE if text else STACK_LIMIT)[0] and time.monotonic() < end:
                part = self.stacks.read(1 << 16)
                if not part:
                    break
                text += part
        return text.decode(errors="replace")

    def place(self) -> str:
        """The innermost line in the function's file, or anywhere, that it is at; empty if it does not say."""
        frames = FRAME.findall(self.stack())
        frame = next((frame for frame in frames if frame[0] == self.file), frames[0] if frames else None)
        return f", in {frame[2]} ({os.path.basename(frame[0])}, line {frame[1]})" if frame else ""


def understood(line: bytes, worker: Worker) -> dict[str, Any] | None:
    """What a worker says, unless it cannot have said so in its place."""
    try:
        message = json.loads(line)
        if not worker.is_ready:
            is_right = [type(text) for key, text in message.items() if key in ("ready", "failed")] == [str]
        elif worker.index is None or message["call"] != worker.number:
            is_right = False
        elif "reward" in message:
            is_right = isinstance(message["reward"], float) and math.isfinite(message["reward"])
        else:
            is_right = message["kind"] in ("exception", "memory", "invalid") and isinstance(message["message"], str)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # RecursionError: [[[[...
        return None
    return message if is_right else None


def ended(code: int) -> str:
    """How a process with this return code of Popen ended."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    reasons = {
        "SIGKILL": " (by the kernel, if the machine has run out of memory)",
        "SIGXCPU": " (it used more than twice the time limit of processor time)",
    }
    return f"was killed by {name}{reasons.get(name, '')}"


def printable(message: str) -> str:
    """One line that can be shown and written anywhere: what a function says may hold escape sequences and surrogates."""
    return "".join(c if c.isprintable() else " " for c in message[: 2 * MESSAGE_LENGTH])
