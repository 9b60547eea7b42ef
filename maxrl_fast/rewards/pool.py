"""Python reward functions in processes of their own, where they can neither freeze nor poison a training run."""

import contextlib
import json
import math
import selectors
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from maxrl_fast.errors import InputError, RewardError
from maxrl_fast.rewards.process import Worker, ended, printable, understood

FRAME_LIMIT = 1 << 20  # bytes of an answer
SEND_LIMIT = 10.0  # seconds in which an idle worker reads a call
EXIT_LIMIT = 0.5  # seconds between the end of a connection and that of the process
KILL_LIMIT = 5.0  # seconds in which the kernel removes what was killed
FAILED_STARTS = 3  # in a row, after which no other is tried


@dataclass(frozen=True)
class Failure:
    """Why a call has no reward.

    Args:
        index: of the call.
        kind: "exception", "timeout", "crash" (the process ended), "memory", or "invalid" (it returned no finite number).
        message: one printable line.
    """

    index: int
    kind: str
    message: str


@dataclass(frozen=True)
class Scores:
    """Rewards in the order of the calls, 0 where a call failed, and the failures by index."""

    rewards: list[float]
    failures: list[Failure]
    num_left: int = 0  # calls that were not made, as too many had failed


@dataclass
class Batch:
    """The calls of one `score`, and what became of them."""

    calls: Sequence[dict[str, Any]]
    rewards: list[float] = field(init=False)
    waiting: deque[int] = field(init=False)
    unread: Counter[int] = field(default_factory=Counter)  # workers that died before they read the call
    failures: list[Failure] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rewards = [0.0] * len(self.calls)
        self.waiting = deque(range(len(self.calls)))


class RewardPool:
    """Calls a reward function in several processes.

    A call that runs too long, exhausts the memory or brings its process down fails alone: the process is replaced, and the
    others go on meanwhile. State that the function keeps between calls belongs to one worker, and is lost with it. Only one
    thread may use the pool, except for `stacks`.
    """

    def __init__(self, function: str, *, workers: int, time_limit: float, memory_limit: int, start_limit: float = 60.0) -> None:
        """Start the workers, and wait until all have loaded the function.

        Args:
            function: "path/to/file.py:name" or "package.module:name".
            workers: processes, and calls at a time.
            time_limit: seconds for a call, from when a worker has it.
            memory_limit: bytes that a worker may take beyond what it has after loading the function.
            start_limit: seconds for starting a process and loading the function.

        Raises:
            InputError: the function cannot be loaded, or a number makes no sense.
        """
        place, _, name = function.rpartition(":")
        if not place or not name:
            raise InputError(f'a reward function is given as "path/to/file.py:name" or "package.module:name", not "{function}"')
        for value, meaning in ((workers, "number of workers"), (time_limit, "time limit"), (memory_limit, "memory limit")):
            if not 0 < value < math.inf:
                raise InputError(f"the {meaning} of the reward pool must be positive and finite, not {value}")
        self._function, self._size = function, workers
        self._time_limit, self._memory_limit, self._start_limit = time_limit, memory_limit, start_limit
        self._workers: list[Worker] = []
        self._killed: list[subprocess.Popen[bytes]] = []
        self._batch = Batch([])
        self._sent = self._failed_starts = 0
        self._is_built = self._is_closed = False
        self._selector = selectors.DefaultSelector()
        try:
            self._fill()
            while not all(worker.is_ready for worker in self._workers):
                self._turn()
        except BaseException:
            self.close()
            raise
        self._is_built = True

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def score(
        self,
        calls: Sequence[dict[str, Any]],
        most_failures: int | None = None,
        beat: Callable[[], None] = lambda: None,
    ) -> Scores:
        """Call the function once with each of `calls`, its keyword arguments (JSON values: a tuple arrives as a list).

        Args:
            most_failures: with more of them it gives up, and the other calls are left.
            beat: is called whenever a worker has said something or was given up.

        Raises:
            RewardError: workers cannot be started any more.
            TypeError: an argument is not a JSON value.
        """
        if self._is_closed:
            raise RuntimeError("the reward pool is closed")
        batch = self._batch = Batch(calls)
        try:
            self._turn(0)  # replaces workers that have died since, before they get calls
            while batch.waiting or any(worker.index is not None for worker in self._workers):
                for worker in list(self._workers):
                    if batch.waiting and worker.is_ready and worker.index is None:
                        self._send(worker, batch.waiting.popleft())
                self._turn()
                beat()
                if most_failures is not None and len(batch.failures) > most_failures:
                    break
            num_left = len(batch.waiting) + self._abandon()
        except BaseException:
            self._abandon()
            raise
        finally:
            self._batch = Batch([])
        return Scores(batch.rewards, sorted(batch.failures, key=lambda failure: failure.index), num_left)

    def _abandon(self) -> int:
        """End the workers that have a call; how many they are."""
        busy = [worker for worker in self._workers if worker.index is not None]
        for worker in busy:
            self._remove(worker)
        return len(busy)

    def stacks(self) -> None:
        """Write to stderr where each worker is in its Python code: for a watchdog, in whatever thread. A second at most."""
        end = time.monotonic() + 1.0
        for worker in list(self._workers):
            if worker.is_ready and time.monotonic() < end:  # one that starts would die of the signal
                doing = "waits" if worker.index is None else f"has call {worker.index}"
                print(f"reward worker {worker.process.pid} {doing}\n{worker.stack()}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """End all workers, and what they have started. Without it they end with the trainer."""
        self._is_closed = True
        for worker in list(self._workers):
            self._remove(worker)
        end = time.monotonic() + KILL_LIMIT
        for process in self._killed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(end - time.monotonic(), 0.01))
        self._selector.close()

    def _fill(self) -> None:
        """Start the workers that are missing."""
        while len(self._workers) < self._size:
            try:
                worker = Worker(self._function, self._time_limit, self._memory_limit)
            except OSError as error:
                self._count_failed_start(f"a process cannot be started: {error}")
                continue
            self._workers.append(worker)
            worker.deadline = time.monotonic() + self._start_limit
            self._selector.register(worker.connection, selectors.EVENT_READ, worker)

    def _turn(self, limit: float = math.inf) -> None:
        """Wait at most `limit` seconds until a worker says something or a deadline passes, and do what follows from it."""
        self._fill()  # a worker may have been gone when it was given a call
        nearest = min(worker.deadline for worker in self._workers)
        wait = min(nearest - time.monotonic(), limit, self._start_limit + self._time_limit)
        for key, events in self._selector.select(max(wait, 0)):
            if events & selectors.EVENT_WRITE:
                self._flush(key.data)
            else:
                self._receive(key.data)
        for worker in list(self._workers):
            if worker.deadline <= time.monotonic():
                self._receive(worker)  # it may have answered while others were attended to
                if worker.deadline <= time.monotonic():
                    self._expire(worker)
        self._killed = [process for process in self._killed if process.poll() is None]
        self._fill()  # now, not when the next batch comes: loading the function can take long

    def _send(self, worker: Worker, index: int) -> None:
        """Give a call to a worker."""
        self._sent += 1
        call = {"call": self._sent, "arguments": self._batch.calls[index]}
        worker.outgoing = memoryview(json.dumps(call).encode() + b"\n")
        worker.index, worker.number = index, self._sent
        worker.deadline = time.monotonic() + SEND_LIMIT
        self._flush(worker)

    def _flush(self, worker: Worker) -> None:
        """Send what can be sent without waiting; the time of the call starts when all is sent."""
        try:
            sent = worker.connection.send(worker.outgoing)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._lose(worker, was_read=False)
            return
        worker.outgoing = worker.outgoing[sent:]
        if not worker.outgoing:
            worker.deadline = time.monotonic() + self._time_limit
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.outgoing else 0)
        if self._selector.get_key(worker.connection).events != events:
            self._selector.modify(worker.connection, events, worker)

    def _receive(self, worker: Worker) -> None:
        """Take in what a worker has sent."""
        try:
            data = worker.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:  # a local socket says so when something was left unread at its other end
            self._lose(worker, was_read=False)
            return
        if not data:
            self._lose(worker, was_read=True)
            return
        worker.incoming += data
        if b"\n" not in data and len(worker.incoming) <= FRAME_LIMIT:
            return
        line, worker.incoming = worker.incoming, b""
        message = understood(line, worker)
        if message:
            self._obey(worker, message)
            return
        self._fail(worker, f"wrote to the connection between worker and trainer: {line[:80].decode(errors='replace')}")

    def _obey(self, worker: Worker, message: dict[str, Any]) -> None:
        """Act on a message."""
        if "failed" in message:
            self._fail(worker, message["failed"])
        elif "ready" in message:
            worker.file, worker.is_ready = message["ready"], True
            worker.deadline, self._failed_starts = math.inf, 0
        elif "reward" in message:
            assert worker.index is not None
            self._batch.rewards[worker.index] = message["reward"]
            worker.index, worker.deadline = None, math.inf
        else:
            self._end_call(worker, message["kind"], message["message"])
            if message["kind"] == "memory":
                self._remove(worker)

    def _fail(self, worker: Worker, cause: str, kind: str = "crash") -> None:
        """End a worker, and with it its start or its call, if it has one."""
        self._remove(worker)
        if worker.is_ready:
            self._end_call(worker, kind, cause)
        else:
            self._count_failed_start(printable(cause))

    def _end_call(self, worker: Worker, kind: str, message: str) -> None:
        """Note that a worker's call, if it has one, failed."""
        if worker.index is not None:
            self._batch.failures.append(Failure(worker.index, kind, printable(message)))
        worker.index, worker.deadline = None, math.inf

    def _expire(self, worker: Worker) -> None:
        """Act on a deadline that has passed."""
        if worker.return_code(0) is not None:
            self._lose(worker, was_read=True)  # a copy of it (fork) keeps the connection open
            return
        if not worker.is_ready:
            self._fail(worker, f"loading it took longer than {self._start_limit:g} s")
        elif worker.outgoing:
            self._fail(worker, f"did not read its arguments within {SEND_LIMIT:g} s")
        else:
            self._fail(worker, f"ran longer than {self._time_limit:g} s{worker.place()}", "timeout")

    def _lose(self, worker: Worker, was_read: bool) -> None:
        """Act on the end of a connection: most often that of the process.

        Args:
            was_read: whether the worker had read its call, and may have died of it. If not, another worker gets the call, so
                often that all workers may have died at once.
        """
        if worker.index is not None and not was_read and self._batch.unread[worker.index] < self._size:
            self._batch.unread[worker.index] += 1
            self._batch.waiting.appendleft(worker.index)
            self._remove(worker)
            return
        code = worker.return_code(EXIT_LIMIT)
        cause = "closed the connection between worker and trainer" if code is None else ended(code)
        self._fail(worker, cause if worker.is_ready else f"the process that loads it {cause}")

    def _remove(self, worker: Worker) -> None:
        """End a worker. An interrupt in the middle leaves it listed, for `close`."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(worker.connection)
        worker.kill()
        worker.deadline = math.inf
        self._killed.append(worker.process)
        self._workers.remove(worker)

    def _count_failed_start(self, cause: str) -> None:
        """InputError when the pool is being built, and RewardError when starts have failed too often since."""
        if not self._is_built:
            raise InputError(f"reward function {self._function}: {cause}")
        self._failed_starts += 1
        if self._failed_starts >= FAILED_STARTS:
            self._failed_starts = 0  # another `score` may try again
            raise RewardError(f"workers for the reward function {self._function} cannot be started any more: {cause}")
