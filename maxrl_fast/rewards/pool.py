"""Run Python reward functions in worker processes, so that they can neither hang nor corrupt a training run."""

import math
import os
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Event, Thread
from types import TracebackType
from typing import Any, Literal

from maxrl_fast.errors import InputError, RewardError
from maxrl_fast.rewards.contain import ControlGroup
from maxrl_fast.rewards.keeper import INTERVAL
from maxrl_fast.rewards.process import CallError, StartError, UnreadError, Worker, printable
from maxrl_fast.rewards.signature import BATCH, ROWS, STYLES, Signature, batch_arguments, mismatch

PROGRESS_INTERVAL = 1.0  # seconds
MAX_FAILED_STARTS = 3  # after this many `score` raises RewardError
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
# Names of the environment variables that every function sees: how programs are found and how text is read, but no keys, no
# tokens, and no proxies, whose addresses can hold passwords.
ENVIRONMENT = (
    "PATH|HOME|USER|LOGNAME|SHELL|TMPDIR|TZ|LANG|LANGUAGE|LC_.*|PYTHON.*|VIRTUAL_ENV|CONDA_PREFIX|LD_LIBRARY_PATH|LD_PRELOAD"
    "|CUDA_VISIBLE_DEVICES|CUDA_HOME|XDG_CACHE_HOME|HF_HOME|HF_HUB_OFFLINE|TORCH_HOME|SSL_CERT_FILE|SSL_CERT_DIR"
)
HASH_SEED = {"PYTHONHASHSEED": "0"}  # unless the user sets it: the order of a set must not depend on the process


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
    """Rewards in the order of the calls, 0 for failed calls, and the failures sorted by index.

    A reward is NaN where the function does not apply, if that is allowed.
    """

    rewards: list[float]
    failures: list[Failure]
    num_left: int = 0  # calls without a result, because too many others failed
    components: list[dict[str, float]] = field(default_factory=list)  # of each reward; empty: there are none


@dataclass(frozen=True)
class Call:
    """What a worker is asked at once: the rewards of consecutive rows."""

    rows: range
    arguments: Any  # keyword arguments; a list of them for async functions


def calls_of(signature: Signature, rows: Sequence[dict[str, Any]], group: int, concurrency: int) -> list[Call]:
    """Return the calls for these rows: one for each row, or each group, or as many rows as run side by side."""
    if signature["style"] not in (ROWS, BATCH):
        return [Call(range(i, i + 1), row) for i, row in enumerate(rows)]
    size = group if signature["style"] == BATCH else concurrency
    parts = [range(start, min(start + size, len(rows))) for start in range(0, len(rows), size)]
    if signature["style"] == ROWS:
        return [Call(part, rows[part.start : part.stop]) for part in parts]
    return [Call(part, batch_arguments(rows[part.start : part.stop], signature)) for part in parts]


class RewardPool:
    """Calls a reward function in several processes.

    A call that exceeds its time or memory limit or crashes its process fails alone: the process is replaced while the others
    keep working. State that the function keeps between calls belongs to one worker and is lost when that worker is replaced.
    Only one thread may use the pool, except for `stacks`.
    """

    def __init__(
        self,
        function: str,
        *,
        workers: int,
        time_limit: float,
        memory_limit: int,
        start_limit: float = 60.0,
        isolation: Literal["process", "call"] = "process",
        environment: Sequence[str] = (),
        concurrency: int = 16,
        is_optional: bool = False,
    ) -> None:
        """Start the workers and wait until all have loaded the function.

        Args:
            function: "path/to/file.py:name" or "package.module:name".
            workers: number of processes, each with one call at a time.
            time_limit: seconds for a call, from when its worker has received it.
            memory_limit: bytes that a worker and all that it starts may use beyond its memory after loading the function.
            start_limit: seconds for starting a process and loading the function.
            isolation: whether a process makes calls until one fails, or each call has a fresh process.
            environment: names of variables that the function sees in addition to `ENVIRONMENT`.
            concurrency: calls of an async function that one process makes at a time.
            is_optional: whether None and NaN mean that the function does not apply to a response; otherwise they are failures.

        Raises:
            InputError: if the function cannot be loaded, a number is not positive and finite, or a variable does not exist.
        """
        module, _, attribute = function.rpartition(":")
        if not module or not attribute:
            raise InputError(f'a reward function must be "path/to/file.py:name" or "package.module:name", got "{function}"')
        limits = {"number of workers": workers, "time limit": time_limit, "memory limit": memory_limit}
        for name, value in (limits | {"concurrency": concurrency}).items():
            if not 0 < value < math.inf:
                raise InputError(f"the {name} of the reward pool must be positive and finite, got {value}")
        for name in environment:
            if name not in os.environ:
                raise InputError(f"the reward function needs the environment variable {name}, which is not set")
        self.name, self._isolation, self._concurrency = function, isolation, concurrency if isolation == "process" else 1
        environ = {name: value for name, value in os.environ.items() if name in environment or re.fullmatch(ENVIRONMENT, name)}
        self._cgroup = ControlGroup.parent()
        settings = {
            "function": function,
            "isolation": isolation,
            "time_limit": time_limit,
            "memory_limit": memory_limit,
            "is_optional": is_optional,
            "cgroup": self._cgroup and str(self._cgroup),
        }
        self._workers: list[Worker] = []
        self._is_closed = False
        try:
            for _ in range(workers):
                self._workers.append(Worker(settings, HASH_SEED | environ | ONE_THREAD, time_limit, start_limit))
                self._workers[-1].is_ready(0)  # starts it
            for worker in self._workers:
                while not worker.is_ready():
                    pass
        except BaseException as error:
            self.close()
            if isinstance(error, StartError):
                raise InputError(f"reward function {function}: {error.cause}") from error
            raise

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def score(
        self,
        rows: Sequence[dict[str, Any]],
        max_failures: int | None = None,
        on_progress: Callable[[], None] = lambda: None,
        group: int = 1,
    ) -> Scores:
        """Call the function with each of `rows`, its keyword arguments (JSON values: a tuple arrives as a list).

        A function of lists is called with `group` rows at a time, and an async one with several rows side by side.

        Args:
            max_failures: after more failures than this the remaining calls are not made.
            on_progress: called after every result, and every second.

        Raises:
            RewardError: if workers cannot be restarted.
            TypeError: if an argument is not a JSON value.
        """
        if self._is_closed:
            raise RuntimeError("the reward pool is closed")
        calls = calls_of(self._workers[0].signature, rows, group, self._concurrency)
        batch = Batch(calls, max_unread=len(self._workers))
        threads = [Thread(target=batch.make_calls, args=(worker,), daemon=True) for worker in self._workers]
        results, failures, num_left, num_failed_starts = [dict[str, Any]()] * len(rows), list[Failure](), len(rows), 0
        try:
            for thread in threads:
                thread.start()
            while num_left and (max_failures is None or len(failures) <= max_failures):
                on_progress()
                try:
                    index, outcome = batch.outcomes.get(timeout=PROGRESS_INTERVAL)
                except Empty:
                    continue
                if isinstance(outcome, StartError):
                    num_failed_starts += 1
                    if num_failed_starts >= MAX_FAILED_STARTS:
                        cause = f"the workers of the reward function {self.name} cannot be restarted: {outcome.cause}"
                        raise RewardError(cause) from outcome
                    continue
                if isinstance(outcome, CallError):
                    outcome = [{"kind": outcome.kind, "message": outcome.cause}] * len(calls[index].rows)
                elif isinstance(outcome, Exception):
                    raise outcome
                num_left -= len(outcome)
                for row, result in zip(calls[index].rows, outcome, strict=True):
                    results[row] = result
                    if "kind" in result:
                        failures.append(Failure(row, result["kind"], printable(result["message"])))
        finally:
            batch.stop.set()
            for thread in threads:
                thread.join()
        return Scores(
            [math.nan if (reward := result.get("reward", 0.0)) is None else reward for result in results],
            sorted(failures, key=lambda failure: failure.index),
            num_left,
            [result.get("components", {}) for result in results],
        )

    def check(self, row: dict[str, Any]) -> None:
        """Raise InputError naming the nearest fix if the function's parameters do not fit a row."""
        signature = self._workers[0].signature
        given = [*(batch_arguments([row], signature) if signature["style"] == BATCH else row)]
        if sentence := mismatch(signature, given):
            raise InputError(f"--reward {self.name}: {sentence}")

    def lines(self) -> list[str]:
        """Return how the processes are contained and how the function is called, for the start of a run."""
        how = STYLES[self._workers[0].signature["style"]].format(concurrency=self._concurrency)
        return [f"reward workers: {self.describe()}", f"reward {self.name}: {how}"]

    def faster(self, factor: float) -> str:
        """Return the option that makes scoring about this many times as fast."""
        if self._workers[0].signature["style"] == ROWS:
            return f"--reward-concurrency {power_of_two(self._concurrency * factor)}"
        return f"--reward-workers {power_of_two(len(self._workers) * factor)}"

    def describe(self) -> str:
        """Return how the processes are contained, for the start of a run."""
        memory = f"measured every {INTERVAL:g} s, because no cgroup v2 is writable"
        if self._cgroup:
            memory = f"limited by the kernel in cgroups v2 below {self._cgroup}"
        fresh = "each call" if self._isolation == "call" else "each failed call"
        if not all(worker.can_fork for worker in self._workers):
            fresh += ", which loads the function again, because loading it starts threads"
        contained = "a subreaper kills all that it leaves; the memory of a process and its descendants is"
        return f"{len(self._workers)}, a fresh process after {fresh}; {contained} {memory}"

    def stacks(self) -> None:
        """Write the stack of each worker to stderr, within a second. A watchdog may call it in any thread."""
        end = time.monotonic() + 1.0
        for worker in self._workers:
            if worker.pid and time.monotonic() < end:
                state = "is idle" if worker.index is None else f"runs call {worker.index}"
                print(f"reward worker {worker.pid} {state}\n{worker.stack()}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Kill all workers and the processes that they have started. Without `close` they end with the trainer."""
        self._is_closed = True
        for worker in self._workers:
            worker.close()


def power_of_two(number: float) -> int:
    """Return the nearest power of two that is at least 2."""
    return 2 ** max(1, round(math.log2(number)))


class Batch:
    """The calls of one `score`. A thread for each worker makes them, and leaves each outcome with its index in `outcomes`."""

    def __init__(self, calls: Sequence[Call], max_unread: int) -> None:
        self._calls, self._max_unread = calls, max_unread
        self._waiting = deque(range(len(calls)))
        self._num_unread = Counter[int]()  # by call: processes that ended before they read it
        self.outcomes = SimpleQueue[tuple[int, list[dict[str, Any]] | Exception]]()
        self.stop = Event()

    def make_calls(self, worker: Worker) -> None:
        """Make calls in a worker until none is waiting."""
        while self._waiting and not self.stop.is_set():
            index = -1
            try:
                if not worker.is_ready():
                    continue
                try:
                    index = self._waiting.popleft()
                except IndexError:  # another worker has just taken it
                    return
                outcome: list[dict[str, Any]] | Exception = worker.call(index, self._calls[index].arguments, self.stop)
            except UnreadError as error:  # as often as there are workers, since all of them may have ended at once
                outcome = error
                self._num_unread[index] += 1
                if self._num_unread[index] <= self._max_unread:
                    self._waiting.appendleft(index)
                    continue
            except Exception as error:
                outcome = error
            self.outcomes.put((index, outcome))
