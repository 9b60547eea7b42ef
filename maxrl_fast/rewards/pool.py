"""Reward functions and environments in worker processes, which can neither hang nor corrupt a run.

This is the trainer's side; `worker.py` is the other. multiprocessing and pebble would run the
user's script again in each worker, and do not kill what it has started.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from maxrl_fast.errors import InputError, RewardError
from maxrl_fast.rewards import power_of_two
from maxrl_fast.rewards.function import ROWS, STYLES, Result, late
from maxrl_fast.rewards.output import RewardOutput
from maxrl_fast.rewards.user_code import UserCode
from maxrl_fast.rewards.worker import close_memory

# Not `python -m`: with the trainer's sys.path the worker imports the same modules as the trainer.
BOOTSTRAP = (
    "import sys; sys.path[:] = sys.argv[2:]; from maxrl_fast.rewards.worker import main; main()"
)
# seconds after its limit that a call may take to end itself, as a stopped process does not
PATIENCE = 10.0
LOOK_INTERVAL = 1.0  # seconds between two looks whether a process has ended
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
                self._file, self._settings["is_first"] = ready["file"], False
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
        for attempt in range(2):
            try:
                reply = self._exchange(f"[{number}, {arguments}]\n".encode(), limit + PATIENCE)
                if attempt or not (self._was_stopped and reply.startswith(LATE)):
                    break  # else it may have been stopped, too
            except ConnectionError:  # it had ended, and has not read the call
                pass
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
        received, self._was_stopped = b"", False
        self._connection.settimeout(seconds)
        try:
            self._connection.sendall(data)
        except TimeoutError:  # it was stopped
            return LATE
        self._connection.settimeout(LOOK_INTERVAL)
        before = time.monotonic()
        while received.startswith(LATE) or not received.endswith(b"\n"):
            # before the read, which gets its last words; its processes may keep the connection
            is_over, part = has_ended(self._process.pid), None
            with contextlib.suppress(TimeoutError):
                part = self._connection.recv(1 << 13)
            if part == b"" or (part is None and is_over):
                break
            received += part or b""
            passed, before = time.monotonic() - before, time.monotonic()
            self._was_stopped |= passed > 2 * LOOK_INTERVAL
            seconds -= min(passed, 2 * LOOK_INTERVAL)  # a whole reply may wait
            if seconds < 0:
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


class RewardPool(UserCode):
    """Makes the calls in several processes.

    A call that exceeds its time or memory limit or crashes its process fails alone, and its process
    is replaced. State that the function keeps between calls belongs to one worker; an environment
    lives in the worker of its number modulo their number, which takes its environments with it when
    it ends. Only one thread may use the pool.

    Args:
        name: "path/to/file.py:name" or "package.module:name".
        workers: number of processes, each with one call at a time.
        time_limit: seconds for a call, from when its worker has received it.
        memory_limit: bytes that a worker may allocate beyond its memory after loading the function.
        start_limit: seconds for starting a process and loading the function.
        environment: names of variables that the function sees in addition to `ENVIRONMENT`.
        concurrency: calls of an async function that one process makes at a time.
        is_optional: see Caller.
        output: gets what the function prints; None: it is discarded.
    """

    def __init__(
        self,
        name: str,
        *,
        workers: int,
        time_limit: float,
        memory_limit: int,
        start_limit: float = 60.0,
        environment: Sequence[str] = (),
        concurrency: int = 16,
        is_optional: bool = False,
        is_environment: bool = False,
        output: RewardOutput | None = None,
    ) -> None:
        what = "environment" if is_environment else "reward function"
        module, _, attribute = name.rpartition(":")
        if not module or not attribute:
            wanted = '"path/to/file.py:name" or "package.module:name"'
            raise InputError(f'the {what} must be {wanted}, got "{name}"')
        for variable in environment:
            if variable not in os.environ:
                wanted = f"the environment variable {variable}, which is not set"
                raise InputError(f"the {what} needs {wanted}")
        self.name, self._num_workers, self.concurrency = name, workers, concurrency
        self.place = f"in {workers} worker processes"
        seen = {
            name: value
            for name, value in os.environ.items()
            if name in environment or re.fullmatch(ENVIRONMENT, name)
        }
        self._variables = HASH_SEED | seen | ONE_THREAD
        self._settings: dict[str, Any] = {
            "function": name,
            "is_environment": is_environment,
            "time_limit": time_limit,
            "memory_limit": memory_limit,
            "start_limit": start_limit,
            "is_optional": is_optional,
        }
        self.output, self.signature = output, {}
        self.is_verifier = module == "maxrl_fast.rewards.verifiers"
        # Environments live in their workers: each has its own queue.
        self._num_queues = workers if is_environment else 1
        self._waiting = dict[int, str]()  # calls without results: arguments as JSON
        self._workers: list[Worker] = []
        try:
            self._start()
        except StartError as error:
            raise InputError(f"{what} {name}: {error}") from error

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def request(self, number: int, arguments: Any) -> None:
        self._waiting[number] = json.dumps(arguments)
        if self._workers:
            self._put(number)

    def _put(self, number: int) -> None:
        self._calls[number % self._num_queues].put((number, self._waiting[number]))

    def results(self, seconds: float) -> Iterator[tuple[int, list[Result]]]:
        """See `UserCode.results`. Where workers cannot be restarted, environments fail."""
        try:
            if not self._workers:
                self._start()
                for number in self._waiting:
                    self._put(number)
            for number, results in self._take(seconds):
                del self._waiting[number]
                yield number, results
        except StartError as error:
            waiting = [*self._waiting]
            self.drop()
            why = f"the workers of {self.name} cannot be restarted: {error}"
            if not self._settings["is_environment"]:
                raise RewardError(why) from error
            for number in waiting:
                yield number, [{"kind": "crash", "message": why}]

    def _take(self, seconds: float) -> Iterator[tuple[int, list[Result]]]:
        with contextlib.suppress(Empty):
            number, value = self._results.get(timeout=seconds)
            while True:
                if isinstance(value, Exception):
                    raise value
                yield number, value
                number, value = self._results.get_nowait()

    def _start(self) -> None:
        """Start the workers; raise StartError if one cannot load the function."""
        self._calls, self._results = [Queue() for _ in range(self._num_queues)], Queue()
        output = self.output.fileno() if self.output else subprocess.DEVNULL
        close_memory()
        try:
            for i in range(self._num_workers):
                calls = self._calls[i % self._num_queues]
                settings = {**self._settings, "is_first": not (i or self.signature)}
                self._workers.append(
                    Worker(settings, self._variables, output, calls, self._results)
                )
            for _ in self._workers:
                _, ready = self._results.get()
                if isinstance(ready, Exception):
                    raise ready
                self.signature = ready["signature"] or self.signature
        except BaseException:
            self._end()
            raise

    def lines(self) -> list[str]:
        how = STYLES[self.signature["style"]].format(concurrency=self.concurrency)
        return [
            f"reward workers: {self._num_workers}, a fresh process after each call that crashes or "
            "exceeds a limit, which limits accidents but is not a sandbox",
            f"reward {self.name}: {how}",
        ]

    def faster(self, factor: float) -> str:
        if self.signature["style"] == ROWS:
            return f"--reward-concurrency {power_of_two(self.concurrency * factor)}"
        return f"--reward-workers {power_of_two(self._num_workers * factor)}"

    def drop(self) -> None:
        """Kill all workers and their process groups; they start again when they are needed."""
        self._end()
        self._waiting.clear()

    def _end(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()
        for i in range(len(workers)):
            self._calls[i % self._num_queues].put(None)
        for worker in workers:
            worker.join(2 * KILL_LIMIT)

    def close(self) -> None:
        """End the workers, which else end with the trainer. Ones that start later discard what they
        print: the run may have ended.
        """
        self.drop()
        self.output = None


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
