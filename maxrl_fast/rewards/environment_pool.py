"""Environments in worker processes, or in a thread of this process: the trainer's side of
`environment.py`.
"""

import contextlib
import json
import threading
import time
from collections import Counter, deque
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from maxrl_fast.errors import InputError
from maxrl_fast.rewards.environment import (
    RESET,
    REWARD,
    EnvironmentHost,
    Operation,
    Result,
    signature_of_environment,
)
from maxrl_fast.rewards.function import Signature, late
from maxrl_fast.rewards.pool import MAX_FAILED_STARTS, MAX_HUNG, RewardPool, StartError
from maxrl_fast.runtime.loading import LoadError

AHEAD = 2  # calls that a worker has at a time, so that it need not wait for the trainer


class EnvironmentWorkers(Protocol):
    """Where environments live. An environment has one operation at a time."""

    name: str  # as in --environment
    signature: Signature

    def request(self, operation: Operation) -> None:
        """Have an operation done, in the worker of its environment."""

    def results(self, seconds: float) -> list[tuple[int, Result]]:
        """Return the results that are there, by the number of the environment, or wait some
        seconds for one.
        """

    def describe(self) -> str:
        """Return where they live, for the start of a run."""

    def drop(self) -> None:
        """End all environments; the workers start again when they are needed."""


def _take(waiting: deque[Operation], signature: Signature, most: int) -> list[Operation]:
    """Remove the next operation, and those after it that can run at its side."""

    def is_async(operation: Operation) -> bool:
        _, word, value = operation
        name = value[0] if word == "call" else REWARD if word == "end" else RESET
        return name in signature["async"]

    taken = [waiting.popleft()]
    while waiting and len(taken) < most and all(map(is_async, (taken[0], waiting[0]))):
        taken.append(waiting.popleft())
    return taken


class EnvironmentPool(RewardPool):
    """Environments in worker processes, each in the worker of its number modulo their number. Only
    one thread may use it.

    Arguments: as of RewardPool. A worker that has ended takes its own environments with it.
    """

    what, is_environment = "an environment", True

    def __init__(self, name: str, **options: Any) -> None:
        self._num_workers = options["workers"]
        self._waiting = [deque[Operation]() for _ in range(self._num_workers)]
        self._sent = dict[int, list[Operation]]()  # by the number of the call
        self._num_failed_starts = 0
        super().__init__(name, **options)

    def request(self, operation: Operation) -> None:
        self._waiting[operation[0] % self._num_workers].append(operation)

    def results(self, seconds: float) -> list[tuple[int, Result]]:
        try:
            if self._supervisor is None:
                self._start()
                self._num_failed_starts = 0
            self._send()
            return [
                (operation[0], result)
                for call, results in self._exchange(seconds)
                for operation, result in _paired(self._sent.pop(int(call)), results)
            ]
        except StartError as error:
            self._end()
            lost = [operation for sent in self._sent.values() for operation in sent]
            self._sent.clear()
            self._num_failed_starts += 1
            if self._num_failed_starts >= MAX_FAILED_STARTS:
                lost += [operation for waiting in self._waiting for operation in waiting]
                for waiting in self._waiting:
                    waiting.clear()
            failure = {"kind": "crash", "message": f"the workers have ended: {error}"}
            return [(operation[0], failure) for operation in lost]

    def _send(self) -> None:
        num_sent = Counter(call % self._num_workers for call in self._sent)
        for slot, waiting in enumerate(self._waiting):
            for _ in range(AHEAD - num_sent[slot]):
                if waiting:
                    call = next(self._numbers) * self._num_workers + slot
                    self._sent[call] = _take(waiting, self.signature, self._concurrency)
                    self._unsent += f"{call} {json.dumps(self._sent[call])}\n".encode()

    def describe(self) -> str:
        return f"in {self._num_workers} worker processes"

    def drop(self) -> None:
        self._end()
        self._sent.clear()
        for waiting in self._waiting:
            waiting.clear()


def _paired(operations: list[Operation], results: list[Result]) -> list[tuple[Operation, Result]]:
    """One failure of a whole call is that of all its operations."""
    same = results if len(results) == len(operations) else [results[0]] * len(operations)
    return [*zip(operations, same, strict=True)]


class InProcessEnvironments:
    """Environments of a class of this process, in a thread, without a sandbox.

    An operation that takes longer than its limit fails, and the thread is given up with all its
    environments: it ends when the operation returns.
    """

    def __init__(self, cls: type, name: str, time_limit: float, concurrency: int) -> None:
        try:
            self.signature = signature_of_environment(cls)
        except LoadError as error:
            raise InputError(f"environment {name}: {error}") from error
        self.name, self._class = name, cls
        self._time_limit, self._concurrency = time_limit, concurrency
        self._waiting, self._sent = deque[Operation](), list[Operation]()
        self._deadline, self._num_hung = 0.0, 0
        # to and from the thread
        self._queues: tuple[SimpleQueue[Any], SimpleQueue[list[Result]]] | None = None

    def request(self, operation: Operation) -> None:
        self._waiting.append(operation)

    def results(self, seconds: float) -> list[tuple[int, Result]]:
        if not self._sent and self._waiting:
            self._sent = _take(self._waiting, self.signature, self._concurrency)
            if self._num_hung >= MAX_HUNG:
                hung = f"{MAX_HUNG} earlier calls have not ended, and a thread cannot be killed"
                return self._finished([{"kind": "timeout", "message": hung}] * len(self._sent))
            if self._queues is None:
                self._queues = SimpleQueue(), SimpleQueue()
                threading.Thread(
                    target=self._serve, args=self._queues, name="environments", daemon=True
                ).start()
            self._queues[0].put(self._sent)
            self._deadline = time.monotonic() + self._time_limit + 1.0  # coroutines end themselves
        if not self._sent or self._queues is None:
            return []
        pause = max(0.0, min(seconds, self._deadline - time.monotonic()))
        with contextlib.suppress(Empty):
            return self._finished(self._queues[1].get(timeout=pause))
        if time.monotonic() < self._deadline:
            return []
        self._num_hung += 1
        self._queues = None
        return self._finished([late(self._time_limit)] * len(self._sent))

    def _finished(self, results: list[Result]) -> list[tuple[int, Result]]:
        operations, self._sent = self._sent, []
        return [
            (operation[0], result) for operation, result in zip(operations, results, strict=True)
        ]

    def _serve(self, requests: SimpleQueue[Any], outcomes: SimpleQueue[list[Result]]) -> None:
        """Do operations in the thread, until None."""
        host = EnvironmentHost(self._class, "", self.signature, self._time_limit, has_alarm=False)
        while (operations := requests.get()) is not None:
            outcomes.put(host.call(operations))
        host.close()

    def describe(self) -> str:
        return "in a thread of this process, which nothing contains"

    def drop(self) -> None:
        if self._queues is not None:
            self._queues[0].put(None)
        self._queues, self._sent = None, []
        self._waiting.clear()
