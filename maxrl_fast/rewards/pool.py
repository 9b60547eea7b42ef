"""Python reward functions: in worker processes that can neither hang nor corrupt a run, or in a
thread of this process.

The pool is the trainer's side; `supervisor.py` is the other. There is no library below it: those
for pools of processes (multiprocessing, pebble) run the user's script again in each worker unless
it has a __main__ guard, pickle results, and neither give a worker its own environment nor
kill what it has started.
"""

import contextlib
import itertools
import json
import math
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Literal

from maxrl_fast.errors import InputError, RewardError
from maxrl_fast.rewards import (
    PROGRESS_INTERVAL,
    Progress,
    RewardSource,
    Rows,
    Scores,
    no_progress,
    power_of_two,
)
from maxrl_fast.rewards.function import (
    ROWS,
    STYLES,
    Caller,
    Signature,
    WorkItem,
    late,
    mismatch,
    signature_of,
    work_items,
)
from maxrl_fast.rewards.output import RewardOutput
from maxrl_fast.rewards.supervisor import WROTE, describe_exit

# Not `python -m`: with the trainer's sys.path the worker imports the same modules as the trainer.
BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[2:]; from maxrl_fast.rewards.supervisor import main; main()"
)
MAX_FAILED_STARTS = 3  # after this many `score` raises RewardError
MAX_HUNG = 3  # threads that a call never gave back, after which no other is started
# for each worker: calls that the supervisor has at a time, fewer if they are large
MOST_SENT, SENT_BYTES = 64, 1 << 20
KILL_LIMIT = 5.0  # seconds for the supervisor to kill everything and end
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1"
)
# Names of the environment variables that every function sees: how programs are found and how text
# is read, but no keys, no tokens, and no proxies, whose addresses can hold passwords.
ENVIRONMENT = (
    "PATH|HOME|USER|LOGNAME|SHELL|TMPDIR|TZ|LANG|LANGUAGE|LC_.*|PYTHON.*|VIRTUAL_ENV|CONDA_PREFIX|LD_LIBRARY_PATH|LD_PRELOAD"
    "|CUDA_VISIBLE_DEVICES|CUDA_HOME|XDG_CACHE_HOME|HF_HOME|HF_HUB_OFFLINE|TORCH_HOME|SSL_CERT_FILE|SSL_CERT_DIR"
)
# unless the user sets it: the order of a set must not depend on the process
HASH_SEED = {"PYTHONHASHSEED": "0"}


class StartError(Exception):
    """The workers cannot be started, or cannot load the function, or their supervisor has ended."""


class RewardPool(RewardSource):
    """Calls a reward function in several processes.

    A call that exceeds its time or memory limit or crashes its process fails alone: the process is
    replaced while the others keep working. State that the function keeps between calls belongs to
    one worker and is lost when that worker is replaced. Only one thread may use the pool, except
    for `stacks`.

    Args:
        function: "path/to/file.py:name" or "package.module:name". workers: number of processes,
        each with one call at a time. time_limit: seconds for a call, from when its worker has
        received it. memory_limit: bytes that a worker may allocate beyond its memory after loading
        the function. start_limit: seconds for starting a process and loading the function.
        isolation: whether a process makes calls until one fails, or each call has a fresh process.
        environment: names of variables that the function sees in addition to `ENVIRONMENT`.
        concurrency: calls of an async function that one process makes at a time. is_optional:
        whether None and NaN mean that the function does not apply to a response; otherwise they are
        failures. output: gets what the function prints; None: it is discarded.

    Raises:
        InputError: if the function cannot be loaded, a number is not positive and finite, or a
        variable does not exist.
    """

    what, is_environment = "a reward function", False

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
        output: RewardOutput | None = None,
    ) -> None:
        module, _, attribute = function.rpartition(":")
        if not module or not attribute:
            raise InputError(
                f'{self.what} must be "path/to/file.py:name" or "package.module:name", got '
                f'"{function}"'
            )
        limits = {
            "number of workers": workers,
            "time limit": time_limit,
            "memory limit": memory_limit,
            "concurrency": concurrency,
        }
        for name, value in limits.items():
            if not 0 < value < math.inf:
                raise InputError(
                    f"the {name} of the reward pool must be positive and finite, got {value}"
                )
        for name in environment:
            if name not in os.environ:
                raise InputError(
                    f"{self.what} needs the environment variable {name}, which is not set"
                )
        self.name, self._concurrency = function, concurrency if isolation == "process" else 1
        environ = {
            name: value
            for name, value in os.environ.items()
            if name in environment or re.fullmatch(ENVIRONMENT, name)
        }
        self._environment = HASH_SEED | environ | ONE_THREAD
        self._settings: dict[str, Any] = {
            "function": function,
            "is_environment": self.is_environment,
            "workers": workers,
            "time_limit": time_limit,
            "memory_limit": memory_limit,
            "start_limit": start_limit,
            "isolation": isolation,
            "is_optional": is_optional,
            "trainer": os.getpid(),
            "ready": None,  # what the first supervisor says, where loading starts threads
        }
        self._output, self._numbers, self._is_closed = output, itertools.count(), False
        self._supervisor: subprocess.Popen[bytes] | None = None
        try:
            ready = self._start()
            if not ready["can_fork"] and isolation == "call":
                threads = "loading it starts threads, so it cannot be forked for each call"
                raise StartError(f"{threads}; it needs --reward-isolation process")
            self.signature: Signature = ready["signature"]
            self._can_fork: bool = ready["can_fork"]
            if not self._can_fork:
                self._end()
                self._settings["ready"] = ready
                self._start()
        except StartError as error:
            self.close()
            raise InputError(f"{self.what.partition(' ')[2]} {function}: {error}") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def score(
        self,
        rows: Rows,
        max_failures: int | None = None,
        on_progress: Progress = no_progress,
        group: int = 1,
    ) -> Scores:
        """Call the function with each of `rows`, its keyword arguments (JSON values: a tuple
        arrives as a list).

        A function of lists is called with `group` rows at a time, and an async one with several
        rows side by side.

        Args:
            max_failures: after more failures than this the remaining calls are not made.
            on_progress: called after every result, and every second.

        Raises:
            RewardError: if workers cannot be restarted.
            TypeError: if an argument is not a JSON value.
        """
        if self._is_closed:
            raise RuntimeError("the reward pool is closed")
        waiting, sent = (
            deque(work_items(self.signature, rows, group, self._concurrency)),
            dict[int, WorkItem](),
        )
        scores, num_failed_starts, workers = Scores.of_rows(len(rows)), 0, self._settings["workers"]
        most = 2 * workers
        try:
            while not scores.is_done(max_failures):
                on_progress()
                try:
                    if self._supervisor is None:
                        self._start()
                    while waiting and len(sent) < most:
                        number = next(self._numbers)
                        line = f"{number} {json.dumps(waiting[0].arguments)}\n".encode()
                        most = workers * max(2, min(MOST_SENT, SENT_BYTES // len(line)))
                        self._unsent += line
                        sent[number] = waiting.popleft()
                    for word, results in self._exchange():
                        scores.add(sent.pop(int(word)).rows, results)
                        if scores.is_done(max_failures):
                            break
                except StartError as error:
                    self._end()
                    waiting.extendleft(reversed(sent.values()))
                    sent.clear()
                    num_failed_starts += 1
                    if num_failed_starts >= MAX_FAILED_STARTS:
                        cause = (
                            f"the workers of the reward function {self.name} cannot be restarted: "
                            f"{error}"
                        )
                        raise RewardError(cause) from error
        finally:
            # after too many failures, or an interrupt: the calls must not go on
            if sent or self._unsent:
                self._end()
        return scores

    def _start(self) -> dict[str, Any]:
        """Start the supervisor and return what it says of the function, once it has loaded it.

        Raises:
            StartError: if it cannot.
        """
        self._connection, theirs = socket.socketpair()
        self._received, self._unsent = b"", bytearray()
        with theirs:
            settings = json.dumps(self._settings | {"connection": theirs.fileno()})
            try:
                self._supervisor = subprocess.Popen(
                    [sys.executable, "-c", BOOTSTRAP, settings, *sys.path],
                    stdin=subprocess.DEVNULL,
                    stdout=self._output.fileno() if self._output else subprocess.DEVNULL,
                    env=self._environment,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # Ctrl-C does not reach it
                )
            except OSError as error:
                raise StartError(f"a process cannot be started: {error}") from error
        self._connection.setblocking(False)
        limit = self._settings["start_limit"]
        end = time.monotonic() + limit
        while time.monotonic() < end:
            for _, ready in self._exchange():
                return dict(ready)
        raise StartError(f"loading it took longer than {limit:g} s")

    def _exchange(self, seconds: float = PROGRESS_INTERVAL) -> list[tuple[str, Any]]:
        """Send what the supervisor takes, wait at most some seconds, and return what it has sent:
        words and values.

        Raises:
            StartError: if it has ended, or workers cannot be started.
        """
        poll = select.poll()
        poll.register(self._connection, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        events = dict(poll.poll(1000 * seconds)).get(self._connection.fileno(), 0)
        data = b""
        with contextlib.suppress(OSError):  # it has ended
            if events & select.POLLOUT:
                del self._unsent[: self._connection.send(self._unsent)]
            if not events & ~select.POLLOUT:
                return []
            data = self._connection.recv(1 << 18)
        if not data:
            raise StartError(f"the worker process {describe_exit(self._end())}")
        *lines, self._received = (self._received + data).split(b"\n")
        messages = []
        for line in lines:
            word, _, text = line.decode(errors="replace").partition(" ")
            try:
                value = json.loads(text)
            except ValueError as error:
                raise StartError(f"{WROTE}: {line[:80]!r}") from error
            if word == "error":
                raise StartError(value)
            messages.append((word, value))
        return messages

    def check(self, row: dict[str, Any]) -> None:
        if sentence := mismatch(self.signature, row):
            raise InputError(f"--reward {self.name}: {sentence}")

    def lines(self) -> list[str]:
        fresh = "each call" if self._settings["isolation"] == "call" else "each failed call"
        if not self._can_fork:
            fresh += ", which loads the function again, because loading it starts threads"
        how = STYLES[self.signature["style"]].format(concurrency=self._concurrency)
        contained = "this contains mistakes; run untrusted or model-written code in a container"
        return [
            f"reward workers: {self._settings['workers']}, a fresh process after {fresh}; "
            f"{contained}",
            f"reward {self.name}: {how}",
        ]

    def faster(self, factor: float) -> str:
        if self.signature["style"] == ROWS:
            return f"--reward-concurrency {power_of_two(self._concurrency * factor)}"
        return f"--reward-workers {power_of_two(self._settings['workers'] * factor)}"

    def stacks(self) -> None:
        """Have the stack of each worker written to standard error, within a second. A watchdog may
        call it in any thread.
        """
        if self._supervisor is not None:
            self._supervisor.send_signal(signal.SIGUSR2)
            time.sleep(1.0)

    def close(self) -> None:
        """Kill all workers and what they have started in their process groups. Without `close` they
        end with the trainer.
        """
        self._is_closed = True
        self._end()

    def _end(self) -> int:
        """Have the supervisor kill everything, wait until it has ended, and return its exit code; 0
        where there is none.
        """
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return 0
        self._connection.close()
        try:
            return supervisor.wait(KILL_LIMIT)
        except subprocess.TimeoutExpired:  # it was stopped; the kernel kills its children with it
            supervisor.kill()
            return supervisor.wait(KILL_LIMIT)


class InProcessReward(RewardSource):
    """A Python function of this process that scores responses, called as in worker processes, one
    call at a time, in a thread.

    Its arguments are copies. A call that takes longer than its limit counts as failed, and its
    thread is given up: it ends when the function returns. A call that holds the interpreter's lock,
    as a regular expression does, cannot be interrupted.

    Args:
        name: of the function, as in --reward. time_limit: seconds of a call. is_optional: whether
        None and NaN mean that the function does not apply to a response; otherwise they are
        failures.
    """

    def __init__(
        self, function: Callable[..., Any], name: str, time_limit: float, is_optional: bool = False
    ):
        self.name, self._function = name, function
        self._time_limit, self._is_optional = time_limit, is_optional
        self._signature, self._num_hung = signature_of(function), 0
        # to and from the thread
        self._queues: tuple[SimpleQueue[Any], SimpleQueue[list[dict[str, Any]]]] | None = None

    def score(
        self,
        rows: Rows,
        max_failures: int | None = None,
        on_progress: Progress = no_progress,
        group: int = 1,
    ) -> Scores:
        """Return the rewards of rows, as `RewardSource.score`.

        Raises:
            RewardError: if too many calls have not ended.
            TypeError: if an argument is not a JSON value.
        """
        scores = Scores.of_rows(len(rows))
        for item in work_items(self._signature, rows, group, concurrency=1):
            if scores.is_done(max_failures):
                break
            scores.add(item.rows, self._call(json.loads(json.dumps(item.arguments)), on_progress))
        return scores

    def _call(self, arguments: Any, on_progress: Progress) -> list[dict[str, Any]]:
        """Return the results of one call, or one failure for all of them."""
        if self._queues is None:
            if self._num_hung >= MAX_HUNG:
                hung = (
                    f"{MAX_HUNG} calls of the reward function {self.name} have not ended after "
                    f"{self._time_limit:g} s"
                )
                raise RewardError(
                    f"{hung}, and a thread cannot be killed; a function in a file, "
                    "FILE.py:FUNCTION, can be"
                )
            self._queues = SimpleQueue(), SimpleQueue()
            # A call that never ends does not keep the process from ending.
            threading.Thread(
                target=self._make_calls, args=self._queues, name="reward", daemon=True
            ).start()
        requests, outcomes = self._queues
        requests.put(arguments)
        end = time.monotonic() + self._time_limit
        while (left := end - time.monotonic()) > 0:
            on_progress()
            with contextlib.suppress(Empty):
                return outcomes.get(timeout=min(left, PROGRESS_INTERVAL))
        self.close()
        self._num_hung += 1
        return [late(self._time_limit)]

    def _make_calls(
        self, requests: SimpleQueue[Any], outcomes: SimpleQueue[list[dict[str, Any]]]
    ) -> None:
        """Make one call after the other, in the thread, until one with the arguments None."""
        code = getattr(self._function, "__code__", None)
        file = code.co_filename if code is not None else ""
        caller = Caller(
            self._function, file, self._signature["style"], self._time_limit, self._is_optional
        )
        while (arguments := requests.get()) is not None:
            outcomes.put(caller.call(arguments))
        caller.close()

    def check(self, row: dict[str, Any]) -> None:
        if sentence := mismatch(self._signature, row):
            raise InputError(f"the reward {self.name}: {sentence}")

    def lines(self) -> list[str]:
        how = STYLES[self._signature["style"]].format(concurrency=1)
        return [
            f"reward {self.name}: {how}, in a thread of this process; nothing contains it: a call "
            "of more than "
            f"{self._time_limit:g} s counts as failed but runs on, and a crash ends this process. "
            "FILE.py:FUNCTION runs in "
            "separate processes"
        ]

    def faster(self, factor: float) -> str:
        return "FILE.py:FUNCTION as the reward, which runs in --reward-workers processes"

    def close(self) -> None:
        """End the thread once its call has ended."""
        if self._queues is not None:
            self._queues[0].put(None)
            self._queues = None
