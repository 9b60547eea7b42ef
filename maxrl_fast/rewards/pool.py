"""Run Python reward functions in worker processes, so that they can neither hang nor corrupt a training run."""

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
from maxrl_fast.rewards.process import Worker, describe_exit, parse_message, printable

FRAME_LIMIT = 1 << 20  # bytes of an answer
SEND_LIMIT = 10.0  # seconds for an idle worker to read a call
EXIT_LIMIT = 0.5  # seconds to wait for a process to end after its connection
KILL_LIMIT = 5.0  # seconds to wait for killed processes to end
MAX_FAILED_STARTS = 3  # after this many in a row `score` raises RewardError


@dataclass(frozen=True)
class Failure:
    """The reason why a call has no reward.

    Args:
        index: index of the call in its batch.
        kind: "exception", "timeout", "crash" (the process ended), "memory", or "invalid" (the result is not a finite number).
        message: one printable line.
    """

    index: int
    kind: str
    message: str


@dataclass(frozen=True)
class Scores:
    """Rewards in the order of the calls, 0 for failed calls, and the failures sorted by index."""

    rewards: list[float]
    failures: list[Failure]
    num_left: int = 0  # calls without a result, because too many others failed


@dataclass
class CallBatch:
    """The calls of one `score`, their results, and the calls still to be made."""

    calls: Sequence[dict[str, Any]]
    rewards: list[float] = field(init=False)
    waiting: deque[int] = field(init=False)
    num_unread: Counter[int] = field(default_factory=Counter)  # by call: workers that died before they read it
    failures: list[Failure] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rewards = [0.0] * len(self.calls)
        self.waiting = deque(range(len(self.calls)))


class RewardPool:
    """Calls a reward function in several processes.

    A call that exceeds its time or memory limit or crashes its process fails alone: the process is replaced while the others
    keep working. State that the function keeps between calls belongs to one worker and is lost when that worker is replaced.
    Only one thread may use the pool, except for `stacks`.
    """

    def __init__(self, function: str, *, workers: int, time_limit: float, memory_limit: int, start_limit: float = 60.0) -> None:
        """Start the workers and wait until all have loaded the function.

        Args:
            function: "path/to/file.py:name" or "package.module:name".
            workers: number of processes, each with one call at a time.
            time_limit: seconds for a call, from when its worker has received it.
            memory_limit: bytes that a worker may use in addition to its memory after loading the function.
            start_limit: seconds for starting a process and loading the function.

        Raises:
            InputError: if the function cannot be loaded, or a number is not positive and finite.
        """
        module, _, attribute = function.rpartition(":")
        if not module or not attribute:
            raise InputError(f'a reward function must be "path/to/file.py:name" or "package.module:name", got "{function}"')
        for value, name in ((workers, "number of workers"), (time_limit, "time limit"), (memory_limit, "memory limit")):
            if not 0 < value < math.inf:
                raise InputError(f"the {name} of the reward pool must be positive and finite, got {value}")
        self._function, self._size = function, workers
        self._time_limit, self._memory_limit, self._start_limit = time_limit, memory_limit, start_limit
        self._workers: list[Worker] = []
        self._killed: list[subprocess.Popen[bytes]] = []
        self._batch = CallBatch([])
        self._num_sent = self._num_failed_starts = 0
        self._is_built = self._is_closed = False
        self._selector = selectors.DefaultSelector()
        try:
            self._start_missing()
            while not all(worker.is_ready for worker in self._workers):
                self._poll()
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
        max_failures: int | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> Scores:
        """Call the function once with each of `calls`, its keyword arguments (JSON values: a tuple arrives as a list).

        Args:
            max_failures: after more failures than this the remaining calls are not made.
            on_progress: called after every wait for the workers.

        Raises:
            RewardError: if workers cannot be restarted.
            TypeError: if an argument is not a JSON value.
        """
        if self._is_closed:
            raise RuntimeError("the reward pool is closed")
        batch = self._batch = CallBatch(calls)
        try:
            self._poll(0)  # replaces workers that have died since the last batch, before they get calls
            while batch.waiting or any(worker.index is not None for worker in self._workers):
                for worker in list(self._workers):
                    if batch.waiting and worker.is_ready and worker.index is None:
                        self._send(worker, batch.waiting.popleft())
                self._poll()
                on_progress()
                if max_failures is not None and len(batch.failures) > max_failures:
                    break
            num_left = len(batch.waiting) + self._kill_busy_workers()
        except BaseException:
            self._kill_busy_workers()
            raise
        finally:
            self._batch = CallBatch([])
        return Scores(batch.rewards, sorted(batch.failures, key=lambda failure: failure.index), num_left)

    def _kill_busy_workers(self) -> int:
        """Kill the workers that have a call, and return their number."""
        busy = [worker for worker in self._workers if worker.index is not None]
        for worker in busy:
            self._remove(worker)
        return len(busy)

    def stacks(self) -> None:
        """Write the stack of each worker to stderr, within a second. A watchdog may call it in any thread."""
        end = time.monotonic() + 1.0
        for worker in list(self._workers):
            if worker.is_ready and time.monotonic() < end:  # before it is ready, the signal would kill it
                state = "is idle" if worker.index is None else f"runs call {worker.index}"
                print(f"reward worker {worker.process.pid} {state}\n{worker.stack()}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Kill all workers and the processes that they have started. Without `close` they end with the trainer."""
        self._is_closed = True
        for worker in list(self._workers):
            self._remove(worker)
        end = time.monotonic() + KILL_LIMIT
        for process in self._killed:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(end - time.monotonic(), 0.01))
        self._selector.close()

    def _start_missing(self) -> None:
        """Start workers until there are as many as the pool should have."""
        while len(self._workers) < self._size:
            try:
                worker = Worker(self._function, self._time_limit, self._memory_limit)
            except OSError as error:
                self._handle_failed_start(f"a process cannot be started: {error}")
                continue
            self._workers.append(worker)
            worker.deadline = time.monotonic() + self._start_limit
            self._selector.register(worker.connection, selectors.EVENT_READ, worker)

    def _poll(self, limit: float = math.inf) -> None:
        """Wait at most `limit` seconds until a worker sends something or a deadline passes, and handle it."""
        self._start_missing()  # a worker may have died when it was sent a call
        nearest = min(worker.deadline for worker in self._workers)
        wait = min(nearest - time.monotonic(), limit, self._start_limit + self._time_limit)
        for key, events in self._selector.select(max(wait, 0)):
            if events & selectors.EVENT_WRITE:
                self._flush(key.data)
            else:
                self._receive(key.data)
        for worker in list(self._workers):
            if worker.deadline <= time.monotonic():
                self._receive(worker)  # it may have answered while others were handled
                if worker.deadline <= time.monotonic():
                    self._handle_deadline(worker)
        self._killed = [process for process in self._killed if process.poll() is None]
        self._start_missing()  # now, not with the next batch: loading the function can take long

    def _send(self, worker: Worker, index: int) -> None:
        """Send a call of the batch to a worker."""
        self._num_sent += 1
        call = {"call": self._num_sent, "arguments": self._batch.calls[index]}
        worker.outgoing = memoryview(json.dumps(call).encode() + b"\n")
        worker.index, worker.number = index, self._num_sent
        worker.deadline = time.monotonic() + SEND_LIMIT
        self._flush(worker)

    def _flush(self, worker: Worker) -> None:
        """Send as much of the call as possible without blocking. The time limit starts when all of it is sent."""
        try:
            sent = worker.connection.send(worker.outgoing)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._handle_disconnect(worker, was_read=False)
            return
        worker.outgoing = worker.outgoing[sent:]
        if not worker.outgoing:
            worker.deadline = time.monotonic() + self._time_limit
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.outgoing else 0)
        if self._selector.get_key(worker.connection).events != events:
            self._selector.modify(worker.connection, events, worker)

    def _receive(self, worker: Worker) -> None:
        """Read what a worker has sent, and handle a complete message."""
        try:
            data = worker.connection.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:  # a local socket raises this if its other end closed with unread data
            self._handle_disconnect(worker, was_read=False)
            return
        if not data:
            self._handle_disconnect(worker, was_read=True)
            return
        worker.incoming += data
        if b"\n" not in data and len(worker.incoming) <= FRAME_LIMIT:
            return
        line, worker.incoming = worker.incoming, b""
        message = parse_message(line, worker)
        if message:
            self._handle_message(worker, message)
            return
        text = line[:80].decode(errors="replace")
        self._fail_worker(worker, f"the reward code wrote to the connection between worker and trainer: {text}")

    def _handle_message(self, worker: Worker, message: dict[str, Any]) -> None:
        """Handle a message of a worker: its start, or the result of its call."""
        if "failed" in message:
            self._fail_worker(worker, message["failed"])
        elif "ready" in message:
            worker.file, worker.is_ready = message["ready"], True
            worker.deadline, self._num_failed_starts = math.inf, 0
        elif "reward" in message:
            assert worker.index is not None
            self._batch.rewards[worker.index] = message["reward"]
            worker.index, worker.deadline = None, math.inf
        else:
            self._fail_call(worker, message["kind"], message["message"])
            if message["kind"] == "memory":
                self._remove(worker)

    def _fail_worker(self, worker: Worker, cause: str, kind: str = "crash") -> None:
        """Kill a worker. Its call, if it has one, or its start has failed."""
        self._remove(worker)
        if worker.is_ready:
            self._fail_call(worker, kind, cause)
        else:
            self._handle_failed_start(printable(cause))

    def _fail_call(self, worker: Worker, kind: str, message: str) -> None:
        """Record a failure of a worker's call, if it has one."""
        if worker.index is not None:
            self._batch.failures.append(Failure(worker.index, kind, printable(message)))
        worker.index, worker.deadline = None, math.inf

    def _handle_deadline(self, worker: Worker) -> None:
        """Fail a worker whose deadline has passed."""
        if worker.return_code(0) is not None:
            self._handle_disconnect(worker, was_read=True)  # it has ended, but a forked child keeps the connection open
            return
        if not worker.is_ready:
            self._fail_worker(worker, f"loading it took longer than {self._start_limit:g} s")
        elif worker.outgoing:
            self._fail_worker(worker, f"the worker did not read its call within {SEND_LIMIT:g} s")
        else:
            self._fail_worker(worker, f"the call ran longer than {self._time_limit:g} s{worker.location()}", "timeout")

    def _handle_disconnect(self, worker: Worker, was_read: bool) -> None:
        """Handle the end of a connection, usually because the process has ended.

        Args:
            was_read: whether the worker had read its call, which may then have killed it. An unread call goes to another
                worker, at most as often as there are workers, since all of them may have died at once.
        """
        if worker.index is not None and not was_read and self._batch.num_unread[worker.index] < self._size:
            self._batch.num_unread[worker.index] += 1
            self._batch.waiting.appendleft(worker.index)
            self._remove(worker)
            return
        code = worker.return_code(EXIT_LIMIT)
        if code is None:
            cause = "the reward code closed the connection between worker and trainer"
        else:
            cause = f"the {'worker process' if worker.is_ready else 'process that loads it'} {describe_exit(code)}"
        self._fail_worker(worker, cause)

    def _remove(self, worker: Worker) -> None:
        """Kill a worker. If an interrupt comes in between, the worker stays in the list, and `close` kills it."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(worker.connection)
        worker.kill()
        worker.deadline = math.inf
        self._killed.append(worker.process)
        self._workers.remove(worker)

    def _handle_failed_start(self, cause: str) -> None:
        """Raise InputError while the pool is being built; later raise RewardError after MAX_FAILED_STARTS in a row."""
        if not self._is_built:
            raise InputError(f"reward function {self._function}: {cause}")
        self._num_failed_starts += 1
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            self._num_failed_starts = 0  # the next `score` may try again
            raise RewardError(f"the workers of the reward function {self._function} cannot be restarted: {cause}")
