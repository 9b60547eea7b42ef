"""Reward functions and environments, called in worker processes, which can neither hang nor corrupt
a run, or in this process. `user_code.py` is the side of a worker."""

import contextlib
import io
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from threading import Lock, Thread
from typing import Any

from maxrl_fast.errors import InputError, RewardError
from maxrl_fast.rewards import (
    PROGRESS_INTERVAL,
    LateCall,
    Outcome,
    Outcomes,
    RewardSource,
    Rows,
    failure,
    outcome_of,
)
from maxrl_fast.rewards.options import Reward
from maxrl_fast.rewards.user_code import (
    LISTS,
    ROW,
    STYLES,
    Caller,
    EnvironmentHost,
    Signature,
    close_memory,
)
from maxrl_fast.runtime.loading import OBJECT, LoadError, lost_object

FILE_NAME, MOST_BYTES = "reward_output.log", 10_000_000
FULL = b"\n[more was printed: this file is full]\n"
# Not `python -m`: with the trainer's sys.path the worker imports the same modules as the trainer.
# Not multiprocessing: it would run the user's script again.
BOOTSTRAP = (
    "import json, sys; settings = json.loads(sys.argv.pop()); sys.path[:] = settings['path']; "
    "from maxrl_fast.rewards.user_code import main; main(settings)"
)
LOADING = -1  # the number of a worker's first call
START_LIMIT = 60.0  # seconds for starting a process and loading the function
GRACE = 1.0  # seconds after its limit that a call is killed; a worker ends async calls itself
KILL_LIMIT = 5.0  # seconds for a killed process to end
# Unless the user sets the seed: the order of a set must not depend on the process.
SETTINGS = {"PYTHONHASHSEED": "0"} | dict.fromkeys(
    ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1"
)
# The environment variables that every function sees: no keys, no tokens, and no proxies, whose
# addresses can hold passwords.
VARIABLES = re.compile(
    "PATH|HOME|USER|LOGNAME|SHELL|TMPDIR|TZ|LANG|LANGUAGE|LC_.*|PYTHON.*|VIRTUAL_ENV|CONDA_PREFIX|"
    "LD_LIBRARY_PATH|LD_PRELOAD|CUDA_VISIBLE_DEVICES|CUDA_HOME|XDG_CACHE_HOME|HF_HOME|"
    "HF_HUB_OFFLINE|TORCH_HOME|SSL_CERT_FILE|SSL_CERT_DIR"
)
Calls = deque[tuple[int, str]]  # that are not made yet: numbers, and arguments as JSON


class RewardOutput:
    """The standard output and error of workers, a pipe that a thread reads all the time, so that no
    call waits for it. What comes before `open` is kept in memory; what the file has no room for is
    dropped."""

    def __init__(self) -> None:
        self._lock, self._pipe = Lock(), -1
        self._file: io.BytesIO | io.FileIO = io.BytesIO()

    def fileno(self) -> int:
        """Return the descriptor to write to, which is there from the first call on."""
        if self._pipe < 0:
            reader, self._pipe = os.pipe()
            self._thread = Thread(target=self._read, args=(reader,), daemon=True)
            self._thread.start()
        return self._pipe

    def open(self, folder: Path, is_resumed: bool) -> None:
        """Write to a file in a run's folder, if there are workers; append if resumed."""
        with self._lock:
            if self._pipe >= 0 and isinstance(self._file, io.BytesIO):
                kept = self._file.getvalue()
                self._file = io.FileIO(folder / FILE_NAME, "ab" if is_resumed else "wb")
                self._keep(kept)

    def _read(self, reader: int) -> None:
        while data := os.read(reader, 1 << 16):
            with self._lock:
                self._keep(data)
        os.close(reader)

    def _keep(self, data: bytes) -> None:
        # a full disk, of which the run's other files tell, or the file is closed
        with contextlib.suppress(OSError, ValueError):
            if (left := MOST_BYTES - self._file.tell()) > 0:
                self._file.write(data[:left] + FULL * (left <= len(data)))

    def close(self) -> None:
        """End the thread once the worker processes have ended."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._thread.join(1.0)  # a program that left its process group may keep the pipe open
            with self._lock:
                self._file.close()


class UserCode(RewardSource):
    """A reward function, or a class of environments, of this process, called in the main thread,
    one call at a time, with copies of its arguments. A call has a number, and a list of outcomes:
    one for each row, or one for all."""

    place = "in this process, without a time limit; FILE.py:FUNCTION runs in separate processes"
    concurrency = 1  # calls of an async function that are made at a time
    output: RewardOutput | None = None  # what workers print; None: discarded, or this process's

    def __init__(self, code: Callable[..., Any], name: str, is_environment: bool = False) -> None:
        try:
            self._host = (EnvironmentHost if is_environment else Caller)(code, None)
        except LoadError as error:
            raise InputError(f"environment {name}: {error}") from error
        self.name, self.signature, self._queues = name, self._host.signature, [Calls()]

    def request(self, number: int, arguments: Any) -> None:
        """Have a call made, with rows, or an environment's operation, which has one at a time."""
        try:
            call = number, json.dumps(arguments)
        except (TypeError, ValueError) as error:  # of a task of the user's own
            wanted = "the columns of prompts must be JSON values, for rewards"
            raise InputError(f"{wanted}: {error}") from error
        self._queues[number % len(self._queues)].append(call)

    def results(self, seconds: float) -> Iterator[tuple[int, list[Outcome]]]:
        """Yield the numbers and outcomes of calls, after a wait of at most `seconds`."""
        [calls], self._queues = self._queues, [Calls()]
        for number, arguments in calls:
            yield number, self._host.call(json.loads(arguments))

    def drop(self) -> None:
        """End all calls, and all environments."""
        self._queues[0].clear()
        self._host.live = {}

    def outcomes(self, rows: Rows, group: int) -> Outcomes:
        size = {ROW: 1, LISTS: group}.get(self.signature["style"], self.concurrency)
        waiting = {start: rows[start : start + size] for start in range(0, len(rows), size)}
        try:
            for start, part in waiting.items():
                self.request(start, part)
            while waiting:
                yield None
                for start, results in self.results(PROGRESS_INTERVAL):
                    for i in range(len(waiting.pop(start))):
                        outcome = results[i % len(results)]
                        if outcome.kind in self.wrong_kinds:
                            outcome = outcome._replace(reward=0.0)
                        yield start + i, outcome
        finally:
            if waiting:  # after too many failures, or an interrupt: the calls must not go on
                self.drop()

    @property
    def wants_raw(self) -> bool:  # type: ignore[override]
        return self.signature["takes_any"] or "response_raw" in self.signature["names"]

    def lines(self) -> list[str]:
        how = STYLES[self.signature["style"]].format(concurrency=self.concurrency)
        return [f"reward {self.name}: {how}, {self.place}"]


class Worker:
    """A process that makes the calls of a queue, one at a time. Time counts while the trainer
    looks: a call that was stopped with its trainer is not late."""

    number: int | None = None  # of its call
    has_ended = True

    def __init__(self, queue: Calls, seconds: float) -> None:
        self._queue, self._seconds = queue, seconds

    def start(self, settings: dict[str, Any], variables: dict[str, str], output: Any) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(self._seconds)
        given = {**settings, "connection": theirs.fileno(), "path": sys.path}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP, json.dumps(given)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C does not reach it
            )
        self.has_ended = False
        self._expect(LOADING, START_LIMIT)

    def _expect(self, number: int, limit: float) -> None:
        self.number, self._limit, self.left = number, limit, limit + GRACE
        self._received, self._looked = b"", time.monotonic()

    def give(self) -> None:
        """Begin the next call, if there is one, and none is running."""
        if self._queue and self.number is None and not self.has_ended:
            number, arguments = self._queue.popleft()
            with contextlib.suppress(OSError):  # of a process that has ended, which `look` tells
                self.socket.sendall(f"{arguments}\n".encode())
            self._expect(number, self._seconds)

    def look(self, is_readable: bool) -> list[Outcome]:
        """Return the outcomes of its call, after which it begins the next; [] while it runs."""
        now = time.monotonic()
        self.left -= min(now - self._looked, 2 * PROGRESS_INTERVAL)
        self._looked, data = now, b""
        if is_readable:
            with contextlib.suppress(ConnectionError):
                data = self.socket.recv(1 << 16)
            if not data:
                return [failure("crash", f"the worker process {self.end()}")]
        self._received += data
        if data.endswith(b"\n"):
            is_last, outcomes = json.loads(self._received)
            self.number = None
            if is_last:
                self.end()
            self.give()
            return [Outcome(*values) for values in outcomes]
        if self.left > 0:
            return []
        self.end()
        return [outcome_of(LateCall(self._limit))]

    def end(self) -> str:
        """Kill the process group; return how the process has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate(timeout=KILL_LIMIT)
        self.socket.close()
        self.number, self.has_ended, code = None, True, self.process.returncode
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"


class RewardPool(UserCode):
    """Makes the calls of "path/to/file.py:name" or "package.module:name" in several processes. A
    call that exceeds its time or memory limit or crashes its process fails alone, and its process
    is replaced. An environment lives in the worker of its number modulo their number, and ends with
    it. One thread at a time may use the pool. `results` raises RewardError where the code can no
    longer be loaded."""

    def __init__(
        self,
        name: str,
        options: Reward,
        is_environment: bool = False,
        output: RewardOutput | None = None,
    ) -> None:
        shown = options.reward_env.replace(",", " ").split()
        if unset := [x for x in shown if x not in os.environ]:
            why = "which is not set: set it, or leave it out"
            raise InputError(f"--reward-env names {unset[0]}, {why}")
        workers, self.name, self.output = options.reward_workers, name, output
        self.concurrency, self.signature = options.reward_concurrency, Signature()
        self.place = f"in {workers} worker processes, which are no sandbox"
        if name.startswith("maxrl_fast.rewards.verifiers:"):
            # a program can kill the worker, too
            self.wrong_kinds = ("timeout", "crash") if name.endswith(":code") else ("timeout",)
        close_memory()
        seen = {x: y for x, y in os.environ.items() if x in shown or VARIABLES.fullmatch(x)}
        self._variables = {**SETTINGS, **seen}
        self._settings = {
            "name": name,
            "is_environment": is_environment,
            "seconds": options.reward_seconds,
            "memory_bytes": int(options.reward_memory_gb * 1e9),
        }
        # where environments live in the workers, each has its own calls
        self._queues = [Calls() for _ in range(workers if is_environment else 1)]
        queues = itertools.islice(itertools.cycle(self._queues), workers)
        self._workers = [Worker(queue, options.reward_seconds) for queue in queues]
        try:
            while not self.signature or any(x.number == LOADING for x in self._workers):
                [*self.results(PROGRESS_INTERVAL)]
        except BaseException as error:
            self.drop()
            if isinstance(error, RewardError):
                raise InputError(str(error)) from error
            raise

    def results(self, seconds: float) -> Iterator[tuple[int, list[Outcome]]]:
        for i, worker in enumerate(self._workers):
            if worker.has_ended:
                # the schemas of tools take long, and the first worker makes them for all
                settings = {**self._settings, "with_schemas": not self.signature and i == 0}
                worker.start(settings, self._variables, self.output or subprocess.DEVNULL)
            worker.give()
        busy = [worker for worker in self._workers if worker.number is not None]
        longest = min([seconds, *(worker.left for worker in busy)])
        ready = wait([worker.socket for worker in busy], max(0.0, longest))
        for worker in busy:
            number, outcomes = worker.number, worker.look(worker.socket in ready)
            if number == LOADING and outcomes:
                if outcomes[0].kind:
                    why = outcomes[0].message.replace("the call", "loading it")
                    raise RewardError(f"{self.name} cannot be loaded: {why}")
                if worker is self._workers[0]:
                    self.signature = self.signature or json.loads(outcomes[0].text or "")
            elif number is not None and outcomes:
                yield number, outcomes

    def drop(self) -> None:
        """Kill all workers and their process groups; they start again when they are needed."""
        for queue in self._queues:
            queue.clear()
        for worker in self._workers:
            if not worker.has_ended:
                worker.end()

    def close(self) -> None:
        """End the workers; what later ones print is discarded."""
        self.drop()
        self.output = None


def start_code(
    name: str,
    given: Callable[..., Any] | None,
    options: Reward,
    output: RewardOutput | None,
    is_environment: bool = False,
) -> UserCode:
    """Return what calls an option's code: `given`, an object of this process, or that of `name` in
    workers."""
    if given is not None:
        return UserCode(given, name, is_environment)
    if name.startswith(OBJECT):
        raise lost_object("environment" if is_environment else "reward", name)
    return RewardPool(name, options, is_environment, output)
