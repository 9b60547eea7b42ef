"""The trainer's side of a worker of the reward pool."""

import contextlib
import json
import math
import os
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from threading import Event
from typing import IO, Any

from maxrl_fast.rewards.keeper import ENDED, NEXT
from maxrl_fast.rewards.signature import ROW, ROWS, Signature, is_valid
from maxrl_fast.rewards.worker import MESSAGE_LENGTH

# Not `python -m`: with the trainer's sys.path the worker imports the same modules as the trainer.
BOOTSTRAP = "import sys; sys.path[:] = sys.argv[2:]; from maxrl_fast.rewards.keeper import main; main()"
FRAME_LIMIT = 1 << 22  # bytes of an answer
SEND_LIMIT = 10.0  # seconds for an idle worker to read a call
GRACE = 1.0  # seconds for a worker to answer after its async calls have reached the time limit
KILL_LIMIT = 5.0  # seconds for the keeper to kill everything and end
SLICE = 0.1  # seconds after which a wait looks whether to stop
STACK_LIMIT, STACK_PAUSE = 0.2, 0.02  # seconds to wait for a worker's stack, and of silence that end it
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
WROTE = "the reward code wrote to the connection between worker and trainer"


def printable(text: str) -> str:
    """Return text of the reward code as one short printable line: it may contain escape sequences."""
    return "".join(c if c.isprintable() else " " for c in text[: 2 * MESSAGE_LENGTH])


class CallError(Exception):
    """A call has no reward."""

    def __init__(self, kind: str, cause: str) -> None:
        """Keep the kind, as in `pool.Failure`, and the cause."""
        self.kind, self.cause = kind, printable(cause)


class UnreadError(CallError):
    """The process ended before it had read the call, which another may thus make."""


class StartError(CallError):
    """A process cannot be started, or cannot load the function."""


class Worker:
    """A process that computes rewards, and the keeper above it, which replaces it on request.

    Only one thread may use it at a time, except for `stack`.

    Attributes:
        pid: of the process; 0 while it starts.
        index: of its call in the batch; None while it is idle.
        can_fork: whether a fresh process is forked, without loading the function again.
        signature: of the function, once it has been loaded.
    """

    signature: Signature

    def __init__(
        self, settings: Mapping[str, Any], environment: Mapping[str, str], time_limit: float, start_limit: float
    ) -> None:
        """Keep what `is_ready` needs to start the process.

        Args:
            settings: what `keeper.main` needs.
            environment: the variables of the process.
            time_limit: seconds for a call, from when the process has received it.
            start_limit: seconds for starting a process and loading the function.
        """
        self._settings, self._environment = settings, environment
        self._time_limit, self._start_limit = time_limit, start_limit
        self._keeper: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._stacks: IO[bytes] | None = None
        self._number, self._file = 0, ""  # of the call; of the function
        self._end = "", ""  # kind and cause of the end of the process before this one
        self.pid, self.can_fork = 0, True
        self.index: int | None = None

    def is_ready(self, seconds: float = SLICE) -> bool:
        """Wait at most `seconds` until the process has loaded the function; return whether it has.

        Raises:
            StartError: if it cannot. The next call starts another.
        """
        if self._connection:
            try:
                self._connection.recv(1, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:
                pass
            self.replace()  # it has ended between two calls, or sent something
        if self._keeper is None:
            try:
                self._start_keeper()
            except OSError as error:
                raise StartError("crash", f"a process cannot be started: {error}") from error
        if is_readable(self._control, seconds):
            self._receive()
            return True
        if time.monotonic() > self._deadline:
            self.close()
            raise StartError("crash", f"loading it took longer than {self._start_limit:g} s")
        return False

    def call(self, index: int, arguments: Any, stop: Event) -> list[dict[str, Any]]:
        """Make a call and return its results: a "reward", or the "kind" and "message" of a failure, for each response.

        After a failure, and when `stop` is set, the process is replaced.

        Raises:
            CallError: if there are no results.
            TypeError: if an argument is not a JSON value.
        """
        self._number += 1
        message = json.dumps({"call": self._number, "arguments": arguments}).encode() + b"\n"
        self.index = index
        try:
            self._send(message, stop)
            line = self._read(stop)
            results = parse_answer(line, self._number, self._num_results(arguments))
            if results is None:
                raise CallError("crash", f"{WROTE}: {line[:80].decode(errors='replace')}")
        except EOFError:
            raise self._how_it_ended(stop) from None
        except CallError:
            self.replace()
            raise
        finally:
            self.index = None
        if self._settings["isolation"] == "call" or any("kind" in result for result in results):
            self.replace()
        return results

    def _num_results(self, arguments: Any) -> int:
        if self.signature["style"] == ROW:
            return 1
        return len(arguments if self.signature["style"] == ROWS else arguments["prompts"])

    def replace(self, request: bytes = NEXT) -> None:
        """Have the process killed with all that it started, and a fresh one started, without waiting for either."""
        self._disconnect()
        with contextlib.suppress(OSError):  # the keeper has ended, which `is_ready` will see
            self._control.send(request)

    def close(self) -> None:
        """Have the keeper kill everything, and wait until it has ended."""
        self._disconnect()
        keeper, self._keeper = self._keeper, None
        if keeper:
            self._control.close()
            try:
                keeper.wait(KILL_LIMIT)
            except subprocess.TimeoutExpired:  # it was stopped; the kernel kills its child and grandchild with it
                keeper.kill()
                keeper.wait(KILL_LIMIT)
        if self._stacks:
            self._stacks.close()

    def _start_keeper(self) -> None:
        with contextlib.ExitStack() as on_error:
            self._control, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            on_error.callback(self._control.close)
            self._control.send(NEXT)
            with child_end:
                read, write = os.pipe()
                self._stacks = on_error.enter_context(open(read, "rb", buffering=0))
                with open(write, "wb", buffering=0):
                    for fd in (read, write):
                        os.set_blocking(fd, False)
                    fds = {"control": child_end.fileno(), "stacks": write}
                    settings = json.dumps({**self._settings, **fds, "trainer": os.getpid()})
                    self._keeper = subprocess.Popen(
                        [sys.executable, "-c", BOOTSTRAP, settings, *sys.path],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        env=self._environment,
                        pass_fds=tuple(fds.values()),
                        start_new_session=True,  # Ctrl-C does not reach it
                    )
            on_error.pop_all()
        self._disconnect()

    def _disconnect(self) -> None:
        """Close the connection, and set the time limit for the next one."""
        if self._connection:
            self._connection.close()
        self._connection, self.pid, self._deadline = None, 0, time.monotonic() + self._start_limit

    def _receive(self) -> None:
        """Read the keeper's message, and take the connection to a fresh process.

        Raises:
            StartError: if it brings none, or is not valid, because code that loads the function has written it.
        """
        try:
            data, fds, _, _ = socket.recv_fds(self._control, 1 << 16, 1)
        except OSError:  # requests are unread
            data, fds = b"", []
        try:
            self._connection = socket.socket(fileno=fds[0]) if fds else None
            message = json.loads(data or '{"kind": "crash", "cause": "its keeper has ended"}')
            is_sound = message["kind"] in ("crash", "memory") and isinstance(message["cause"], str)
            if self._connection:
                self.pid, self._file, self.can_fork = (message[key] for key in ("pid", "file", "can_fork"))
                self.signature = message["signature"]
                is_known = isinstance(self.pid, int) and self.pid > 1 and is_valid(self.signature)
                is_sound = is_sound and is_known
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            is_sound = False
        if not is_sound or not self._connection:
            self.close()
            raise StartError(*((message["kind"], message["cause"]) if is_sound else ("crash", f"{WROTE}: {data[:80]!r}")))
        self._end = message["kind"], message["cause"]
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            self._connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 0, int(SLICE * 1e6)))

    def _send(self, message: bytes, stop: Event) -> None:
        assert self._connection
        rest, deadline = memoryview(message), time.monotonic() + SEND_LIMIT
        while rest:
            if stop.is_set() or time.monotonic() > deadline:
                raise CallError("crash", f"the worker did not read its call within {SEND_LIMIT:g} s")
            try:
                rest = rest[self._connection.send(rest) :]
            except BlockingIOError:  # after SLICE
                pass
            except OSError as error:
                raise UnreadError("crash", f"the worker process ended before it read its call: {error}") from error

    def _read(self, stop: Event) -> bytes:
        """Return a line that the process sends within the time limit.

        Raises:
            EOFError: if it has closed the connection, usually because it has ended.
        """
        assert self._connection
        grace = GRACE if self.signature["style"] == ROWS else 0.0  # each of its calls has the time limit for itself
        data, deadline = b"", time.monotonic() + self._time_limit + grace
        while not data.endswith(b"\n") and len(data) <= FRAME_LIMIT:
            if stop.is_set() or time.monotonic() > deadline:
                raise CallError("timeout", f"the call ran longer than {self._time_limit:g} s{self._location()}")
            try:
                part = self._connection.recv(1 << 16)
            except BlockingIOError:  # after SLICE
                continue
            except OSError as error:  # the other end was closed with unread data
                raise UnreadError("crash", f"the worker process ended before it read its call: {error}") from error
            if not part:
                raise EOFError
            data += part
        return data

    def _how_it_ended(self, stop: Event) -> CallError:
        """Return how a process that has closed its connection ended, and have a fresh one started."""
        self.replace(ENDED)
        try:
            while not self.is_ready() and not stop.is_set():
                pass
        except StartError as error:
            return error
        return CallError(*self._end)

    def stack(self) -> str:
        """Return the stack of its main thread, innermost frame first; "" if the worker does not answer."""
        text, end, pid = b"", time.monotonic() + STACK_LIMIT, self.pid
        if not pid or not self._stacks:
            return ""
        with contextlib.suppress(OSError, ValueError):  # the process has ended, or another thread has just replaced it
            self._stacks.read(1 << 16)  # discard an earlier stack
            os.kill(pid, signal.SIGUSR1)
            while is_readable(self._stacks, STACK_PAUSE if text else STACK_LIMIT) and time.monotonic() < end:
                part = self._stacks.read(1 << 16)
                if not part:
                    break
                text += part
        return text.decode(errors="replace")

    def _location(self) -> str:
        """Return the innermost line that it executes in the function's file, else in any file; "" if it does not answer."""
        frames = FRAME.findall(self.stack())
        frame = next((frame for frame in frames if frame[0] == self._file), frames[0] if frames else None)
        return f", in {frame[2]} ({os.path.basename(frame[0])}, line {frame[1]})" if frame else ""


def is_readable(file: IO[bytes] | socket.socket, seconds: float) -> bool:
    """Wait at most `seconds` until a file has something to read or has ended; return whether it has."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


def parse_answer(line: bytes, number: int, count: int) -> list[dict[str, Any]] | None:
    """Return the results in an answer of a worker, one for each of `count` responses; None if it does not answer this call."""
    try:
        answer = json.loads(line)
        is_valid = answer["call"] == number
        results = answer["results"] if "results" in answer else [answer] * count
        is_valid = is_valid and len(results) == count and all(map(is_result, results))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # RecursionError: [[[[...
        return None
    return results if is_valid else None


def is_result(result: dict[str, Any]) -> bool:
    """Return whether this is a reward, with components if it has some, or the failure of one."""
    if "kind" in result:
        return result["kind"] in ("exception", "memory", "invalid", "timeout") and isinstance(result["message"], str)
    numbers = [*result.get("components", {}).values()]
    if result["reward"] is not None:
        numbers.append(result["reward"])
    return all(isinstance(number, float) and math.isfinite(number) for number in numbers)
