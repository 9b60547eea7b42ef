"""The trainer's side of a worker process of the reward pool."""

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

# Not `python -m`: with the trainer's sys.path the worker imports the same modules as the trainer.
BOOTSTRAP = "import sys; sys.path[:] = sys.argv[7:]; from maxrl_fast.rewards.worker import main; main()"
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
WORKER_ID = "MAXRL_FAST_REWARD_WORKER"  # environment variable of a worker, inherited by the processes that it starts
STACK_LIMIT, STACK_PAUSE = 0.2, 0.02  # seconds to wait for a worker's stack, and of silence that end it
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def kill_by_environment(entry: bytes) -> None:
    """Kill every process whose environment has `entry`: also processes that are no longer descendants of their worker."""
    for pid in os.listdir("/proc"):
        with contextlib.suppress(OSError):  # the process has ended, or belongs to another user
            if pid.isdecimal() and entry in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(int(pid), signal.SIGKILL)


class Worker:
    """A process that computes rewards. It is starting (until `is_ready`), idle (`index` is None), or running call `index`."""

    def __init__(self, function: str, time_limit: float, memory_limit: int) -> None:
        """Start the process.

        Raises:
            OSError: if the system has no process or file descriptor left.
        """
        self.connection, child_end = socket.socketpair()
        self.is_ready, self.id = False, uuid.uuid4().hex
        self.file = ""  # the file of the function
        self.index: int | None = None  # of its call in the batch
        self.number = 0  # of its call, unique in the pool
        self.deadline = math.inf  # by time.monotonic()
        self.outgoing = memoryview(b"")
        self.incoming = b""
        with contextlib.ExitStack() as on_error, child_end:
            on_error.callback(self.connection.close)
            self.connection.setblocking(False)
            read, write = os.pipe()
            self.stacks = on_error.enter_context(open(read, "rb", buffering=0))
            with open(write, "wb", buffering=0):
                for fd in (read, write):
                    os.set_blocking(fd, False)
                fds = (child_end.fileno(), write)
                arguments = [*fds, os.getpid(), function, time_limit, memory_limit, *sys.path]
                self.process = subprocess.Popen(
                    [sys.executable, "-c", BOOTSTRAP, *map(str, arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=os.environ | ONE_THREAD | {WORKER_ID: self.id},
                    pass_fds=fds,
                    start_new_session=True,  # Ctrl-C does not reach it, and its process group can be killed
                )
            on_error.pop_all()

    def kill(self) -> None:
        """Kill the process and all processes that it started. The caller must still wait for it."""
        if self.process.returncode is None:  # otherwise the pid may already belong to another process
            kill_tree(self.process.pid)
        kill_by_environment(f"{WORKER_ID}={self.id}".encode())
        self.connection.close()
        self.stacks.close()

    def return_code(self, limit: float) -> int | None:
        """Return the return code as Popen does, None if the process does not end within `limit` seconds. It is not reaped."""
        end = time.monotonic() + limit
        while True:
            status = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if status:
                return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
            if time.monotonic() >= end:
                return None
            time.sleep(0.002)

    def stack(self) -> str:
        """Return the stack of its main thread, innermost frame first; "" if the worker does not answer."""
        text, end = b"", time.monotonic() + STACK_LIMIT
        with contextlib.suppress(OSError, ValueError):  # the process has ended, or another thread has just replaced it
            self.stacks.read(1 << 16)  # discard an earlier stack
            os.kill(self.process.pid, signal.SIGUSR1)
            while select.select([self.stacks], [], [], STACK_PAUSE if text else STACK_LIMIT)[0] and time.monotonic() < end:
                part = self.stacks.read(1 << 16)
                if not part:
                    break
                text += part
        return text.decode(errors="replace")

    def location(self) -> str:
        """Return the innermost line that it executes in the function's file, else in any file; "" if it does not answer."""
        frames = FRAME.findall(self.stack())
        frame = next((frame for frame in frames if frame[0] == self.file), frames[0] if frames else None)
        return f", in {frame[2]} ({os.path.basename(frame[0])}, line {frame[1]})" if frame else ""


def parse_message(line: bytes, worker: Worker) -> dict[str, Any] | None:
    """Return the message of a worker; None if it is not a valid message in the worker's present state."""
    try:
        message = json.loads(line)
        if not worker.is_ready:
            is_valid = [type(text) for key, text in message.items() if key in ("ready", "failed")] == [str]
        elif worker.index is None or message["call"] != worker.number:
            is_valid = False
        elif "reward" in message:
            is_valid = isinstance(message["reward"], float) and math.isfinite(message["reward"])
        else:
            is_valid = message["kind"] in ("exception", "memory", "invalid") and isinstance(message["message"], str)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # RecursionError: [[[[...
        return None
    return message if is_valid else None


def describe_exit(code: int) -> str:
    """Return how a process with this Popen return code ended."""
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


def printable(message: str) -> str:
    """Return a message as one printable line: a function's message may contain escape sequences and surrogates."""
    return "".join(c if c.isprintable() else " " for c in message[: 2 * MESSAGE_LENGTH])
