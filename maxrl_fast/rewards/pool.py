"""Reward functions and environments in worker processes, which can neither hang nor corrupt a run.

This is the trainer's side; `worker.py` is the other. multiprocessing and pebble would run the
user's script again in each worker, and do not kill what it has started.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any

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
from maxrl_fast.rewards.environment import Operation
from maxrl_fast.rewards.function import ROWS, STYLES, Result, Signature, calls_for, late, mismatch
from maxrl_fast.rewards.output import RewardOutput

# Not `python -m`: with the trainer's sys.path the worker imports the same modules as the trainer.
BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[2:]; from maxrl_fast.rewards.worker import main; main()"
)
# seconds after its limit that a call may take to end itself, as a stopped process does not
PATIENCE = 10.0
LOOK_INTERVAL = 1.0  # seconds between two looks whether a process has ended that others keep open
KILL_LIMIT = 5.0  # seconds for a killed process to end
LATE = b"Timeout ("  # how faulthandler begins the stack of a process that ends itself
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
WROTE = "the reward code wrote to the connection between worker and trainer"
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1"
)
# Names of the environment variables that every function sees: no keys, no tokens, and no proxies,
# whose addresses can hold passwords.
ENVIRONMENT = (
    "PATH|HOME|USER|LOGNAME|SHELL|TMPDIR|TZ|LANG|LANGUAGE|LC_.*|PYTHON.*|VIRTUAL_ENV|CONDA_PREFIX|LD_LIBRARY_PATH|LD_PRELOAD"
    "|CUDA_VISIBLE_DEVICES|CUDA_HOME|XDG_CACHE_HOME|HF_HOME|HF_HUB_OFFLINE|TORCH_HOME|SSL_CERT_FILE|SSL_CERT_DIR"
)
# unless the user sets it: the order of a set must not depend on the process
HASH_SEED = {"PYTHONHASHSEED": "0"}

Queue = SimpleQueue[Any]


class StartError(Exception):
    """A worker cannot be started, or cannot load the function."""


class Worker(threading.Thread):
    """A process, and the thread that starts it, gives it one call after another, and kills it.

    Args:
        settings: for `worker.py`.
        variables: the environment variables of the process.
        output: descriptor of its standard output and error.
        calls: (NUMBER, arguments as JSON), or None, after which the thread ends.
        results: gets (NUMBER, results), and (None, what the process says of the function, or an
            exception), which comes first and last.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        variables: dict[str, str],
        output: int,
        calls: Queue,
        results: Queue,
    ) -> None:
        super().__init__(name="reward worker", daemon=True)
        self._settings, self._variables, self._output = settings, variables, output
        self._calls, self._results = calls, results
        self._lock, self._is_closed = threading.Lock(), False
        self._process: subprocess.Popen[bytes] | None = None
        self._file = ""  # of the function
        self.start()

    def run(self) -> None:
        try:
            self._results.put((None, self._begin()))
            while (call := self._calls.get()) is not None:
                number, arguments = call
                self._results.put((number, self._call(number, arguments)))
                if self._process is None:
                    self._begin()
        except Exception as error:  # raised in the thread that waits for results
            self._results.put((None, error))
        finally:
            self._end()

    def close(self) -> None:
        """Kill the process, so that a call ends; None in `calls` then ends the thread."""
        with self._lock:
            self._is_closed = True
            if self._process is not None:
                kill_group(self._process.pid)

    def _begin(self) -> dict[str, Any]:
        """Start the process and return what it says of the function, once it has loaded it.

        Raises:
            StartError: if it cannot.
        """
        self._connection, theirs = socket.socketpair()
        settings = json.dumps(self._settings | {"connection": theirs.fileno()})
        with theirs, self._lock:
            if self._is_closed:
                raise StartError("the workers have been closed")
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", BOOTSTRAP, settings, *sys.path],
                    stdin=subprocess.PIPE,
                    stdout=self._output,
                    stderr=subprocess.STDOUT,
                    env=self._variables,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # Ctrl-C does not reach it
                )
            except OSError as error:
                raise StartError(f"a process cannot be started: {error}") from error
        limit = self._settings["start_limit"]
        reply = self._exchange(b"", limit + PATIENCE)
        with contextlib.suppress(ValueError, RecursionError):
            ready = json.loads(reply)
            if isinstance(ready, dict):
                if "error" in ready:
                    raise StartError(ready["error"])
                self._file, self._settings["with_schemas"] = ready["file"], False
                return ready
        code = self._end()
        if reply.startswith(LATE):
            raise StartError(f"loading it took longer than {limit:g} s{place_in(reply, '')}")
        raise StartError(describe_end(reply, code))

    def _call(self, number: int, arguments: str) -> list[Result]:
        """Return the results of a call, or one failure for all of them.

        Raises:
            StartError: if the process has ended, and cannot be started again.
        """
        limit = self._settings["time_limit"]
        for _ in range(2):
            try:
                reply = self._exchange(f"[{number}, {arguments}]\n".encode(), limit + PATIENCE)
                break
            except ConnectionError:  # it had ended, and has not read the call
                code = self._end()
                self._begin()
        else:
            return [{"kind": "crash", "message": describe_end(b"", code)}]
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            answered, results, is_last = json.loads(reply)
            if answered == number:
                if is_last:
                    self._end()
                return list(results)
        code = self._end()
        if reply.startswith(LATE):
            return [late(limit, place_in(reply, self._file))]
        return [{"kind": "crash", "message": describe_end(reply, code)}]

    def _exchange(self, data: bytes, seconds: float) -> bytes:
        """Send data and return the line that comes back. If the process ends, return what it has
        sent, and if no line comes in time, LATE.

        Raises:
            ConnectionError: if the process has ended and has not read the data.
        """
        assert self._process is not None
        end, received = time.monotonic() + seconds, b""
        self._connection.settimeout(seconds)
        try:
            self._connection.sendall(data)
        except TimeoutError:  # it was stopped
            return LATE
        self._connection.settimeout(LOOK_INTERVAL)
        while received.startswith(LATE) or not received.endswith(b"\n"):
            part = None
            with contextlib.suppress(TimeoutError):
                part = self._connection.recv(1 << 13)
            # where processes that it has started keep the connection open there is no end of it
            if part == b"" or (part is None and has_ended(self._process.pid)):
                break
            received += part or b""
            if time.monotonic() > end:
                return LATE
        return received

    def _end(self) -> int:
        """Kill the process group, wait for the process, and return its exit code; 0 if none."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return 0
        kill_group(process.pid)
        code = process.wait(KILL_LIMIT)  # its own if it had ended before
        self._connection.close()
        if process.stdin is not None:
            process.stdin.close()
        return code


class RewardPool(RewardSource):
    """Calls a reward function in several processes.

    A call that exceeds its time or memory limit or crashes its process fails alone, and its process
    is replaced; a call of a built-in verifier that exceeds the time limit gives 0. State that the
    function keeps between calls belongs to one worker. Only one thread may use the pool.

    Args:
        function: "path/to/file.py:name" or "package.module:name".
        workers: number of processes, each with one call at a time.
        time_limit: seconds for a call, from when its worker has received it.
        memory_limit: bytes that a worker may allocate beyond its memory after loading the function.
        start_limit: seconds for starting a process and loading the function.
        environment: names of variables that the function sees in addition to `ENVIRONMENT`.
        concurrency: calls of an async function that one process makes at a time.
        is_optional: whether None and NaN mean that the function does not apply to a response;
            otherwise they are failures.
        output: gets what the function prints; None: it is discarded.
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
        for name in environment:
            if name not in os.environ:
                raise InputError(
                    f"{self.what} needs the environment variable {name}, which is not set"
                )
        self.name, self._num_workers, self._concurrency = function, workers, concurrency
        seen = {
            name: value
            for name, value in os.environ.items()
            if name in environment or re.fullmatch(ENVIRONMENT, name)
        }
        self._variables = HASH_SEED | seen | ONE_THREAD
        self._settings: dict[str, Any] = {
            "function": function,
            "is_environment": self.is_environment,
            "time_limit": time_limit,
            "memory_limit": memory_limit,
            "start_limit": start_limit,
            "is_optional": is_optional,
        }
        self.output, self._numbers, self._is_closed = output, itertools.count(), False
        self.is_verifier = module == "maxrl_fast.rewards.verifiers"
        self.signature: Signature = {}
        self._workers: list[Worker] = []
        try:
            self._start()
        except StartError as error:
            raise InputError(f"{self.what.partition(' ')[2]} {function}: {error}") from error

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
            on_progress: called when results come, and every second.

        Raises:
            RewardError: if workers cannot be restarted.
            TypeError: if an argument is not a JSON value.
        """
        if self._is_closed:
            raise RuntimeError("the reward pool is closed")
        scores, waiting = Scores.of_rows(len(rows)), dict[int, range]()  # rows by call
        lines = [
            (part, json.dumps(arguments))
            for part, arguments in calls_for(self.signature, rows, group, self._concurrency)
        ]
        try:
            if not self._workers:
                self._start()
            for part, line in lines:
                number = next(self._numbers)
                waiting[number] = part
                self._calls[0].put((number, line))
            while not scores.is_done(max_failures):
                on_progress()
                for number, results in self._take(PROGRESS_INTERVAL):
                    part = waiting.pop(number)
                    if self.is_verifier and results[0].get("kind") == "timeout":
                        results = [{"reward": 0.0}]
                        scores.num_late += len(part)
                    scores.add(part, results)
                    if scores.is_done(max_failures):
                        break
        except StartError as error:
            raise RewardError(
                f"the workers of the reward function {self.name} cannot be restarted: {error}"
            ) from error
        finally:
            # after too many failures, or an interrupt: the calls must not go on
            if waiting:
                self._end()
        return scores

    def _start(self) -> None:
        """Start the workers; raise StartError if one cannot load the function."""
        # Environments live in their workers: call NUMBER is for worker NUMBER modulo their number.
        num_queues = self._num_workers if self.is_environment else 1
        self._calls, self._results = [Queue() for _ in range(num_queues)], Queue()
        output = self.output.fileno() if self.output else subprocess.DEVNULL
        try:
            for i in range(self._num_workers):
                calls = self._calls[i % num_queues]
                settings = {**self._settings, "with_schemas": not (i or self.signature)}
                self._workers.append(
                    Worker(settings, self._variables, output, calls, self._results)
                )
            for _ in self._workers:
                _, ready = self._results.get()
                if isinstance(ready, Exception):
                    raise ready
                if ready["with_schemas"]:
                    self.signature = ready["signature"]
        except BaseException:
            self._end()
            raise

    def _take(self, seconds: float) -> list[tuple[int, list[Result]]]:
        """Return the results that are there, with the numbers of their calls, or wait some seconds
        for one.

        Raises:
            StartError: if a worker cannot be started again.
        """
        found = []
        with contextlib.suppress(Empty):
            found.append(self._results.get(timeout=seconds))
            while True:
                found.append(self._results.get_nowait())
        for _, value in found:
            if isinstance(value, Exception):
                raise value
        return found

    def check(self, row: dict[str, Any]) -> None:
        if sentence := mismatch(self.signature, row):
            raise InputError(f"--reward {self.name}: {sentence}")

    def lines(self) -> list[str]:
        how = STYLES[self.signature["style"]].format(concurrency=self._concurrency)
        contained = "this contains mistakes; run untrusted or model-written code in a container"
        return [
            f"reward workers: {self._num_workers}, a fresh process after each call that crashes or "
            f"exceeds a limit; {contained}",
            f"reward {self.name}: {how}",
        ]

    def faster(self, factor: float) -> str:
        if self.signature["style"] == ROWS:
            return f"--reward-concurrency {power_of_two(self._concurrency * factor)}"
        return f"--reward-workers {power_of_two(self._num_workers * factor)}"

    def close(self) -> None:
        """Kill all workers and their process groups. Without it they end with the trainer."""
        self._is_closed = True
        self._end()

    def _end(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()
        for i in range(len(workers)):
            self._calls[i % len(self._calls)].put(None)
        for worker in workers:
            worker.join(2 * KILL_LIMIT)


class EnvironmentPool(RewardPool):
    """Environments in worker processes, each in the worker of its number modulo their number. Only
    one thread may use it.

    Arguments: as of RewardPool. A worker that has ended takes its own environments with it.
    """

    what, is_environment = "an environment", True

    def __init__(self, name: str, **options: Any) -> None:
        self._operations = dict[int, Operation]()  # without a result, by environment
        super().__init__(name, **options)
        self.place = f"in {options['workers']} worker processes"

    def request(self, operation: Operation) -> None:
        """Have an operation done. An environment has one at a time, whose call has its number."""
        number = operation[0]
        self._operations[number] = operation
        if self._workers:
            self._calls[number % len(self._calls)].put((number, json.dumps(operation)))

    def results(self, seconds: float) -> list[tuple[int, Result]]:
        """Return the results that are there, by the number of the environment, or wait some
        seconds for one.
        """
        try:
            if not self._workers:
                self._start()
                for operation in self._operations.values():
                    self.request(operation)
            found = [(number, results[0]) for number, results in self._take(seconds)]
        except StartError as error:
            self._end()
            failure = {"kind": "crash", "message": f"the workers have ended: {error}"}
            found = [(number, failure) for number in self._operations]
        for number, _ in found:
            del self._operations[number]
        return found

    def drop(self) -> None:
        """End all environments; the workers start again when they are needed, without output:
        the run may have ended.
        """
        self._end()
        self.output = None
        self._operations.clear()


def kill_group(pid: int) -> None:
    """Kill a process and all that it started in its process group."""
    with contextlib.suppress(ProcessLookupError):  # none is left
        os.killpg(pid, signal.SIGKILL)


def has_ended(pid: int) -> bool:
    """Return whether a process of this one has ended; it stays to be waited for."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def place_in(stack: bytes, file: str) -> str:
    """Return the innermost place of the main thread in the user's file, or anywhere, or ""."""
    *_, main_thread = stack.decode(errors="replace").split("Thread 0x")
    frames = FRAME.findall(main_thread)
    for path, line, function in [*(x for x in frames if x[0] == file), *frames]:
        return f", in {function} ({os.path.basename(path)}, line {line})"
    return ""


def describe_end(reply: bytes, code: int) -> str:
    """Return why a process with this exit code, negative for a signal, has given no answer."""
    if reply.endswith(b"\n"):
        return f"{WROTE}: {reply[:80].decode(errors='replace')}"
    if code >= 0:
        return f"the worker process exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    return f"the worker process was killed by {name}" + (
        " (by the kernel if the machine ran out of memory)" * (name == "SIGKILL")
    )
