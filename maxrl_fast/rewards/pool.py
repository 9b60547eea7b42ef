"""Reward functions and environments, called in worker processes, which can neither hang nor corrupt
a run, or in this process, where nothing contains them.

`worker.py` is the side of a worker. multiprocessing would run the user's script again in each, and
does not kill what it has started.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any

from maxrl_fast.errors import InputError
from maxrl_fast.rewards import PROGRESS_INTERVAL, Outcome, Outcomes, RewardSource, Rows, failure
from maxrl_fast.rewards.environment import EnvironmentHost
from maxrl_fast.rewards.function import (
    LISTS,
    ROW,
    STYLES,
    Caller,
    LateCall,
    Signature,
    mismatch,
    outcome_of,
)
from maxrl_fast.rewards.output import RewardOutput
from maxrl_fast.rewards.worker import close_memory
from maxrl_fast.runtime.loading import LoadError

# Not `python -m`: with the trainer's sys.path the worker imports the same modules as the trainer.
BOOTSTRAP = (
    "import json, sys; settings = json.loads(sys.argv.pop()); sys.path[:] = settings['path']; "
    "from maxrl_fast.rewards.worker import main; main(settings)"
)
LOADING = -1  # the number of a worker's first call
START_LIMIT = 60.0  # seconds for starting a process and loading the function
GRACE = 1.0  # seconds after its limit that a call is killed; a worker ends async calls itself
LOOK_INTERVAL = 1.0  # the longest wait for answers, in seconds
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


class UserCode(RewardSource):
    """A reward function, or a class of environments. A call has a number, and a list of outcomes:
    one for each of its rows, or one for all.
    """

    signature: Signature
    place: str  # of environments, for the start of a run
    concurrency = 1  # calls of an async function that are made at a time
    output: RewardOutput | None = None  # what workers print; None: discarded, or this process's

    def request(self, number: int, arguments: Any) -> None:
        """Have a call made, with rows, or an environment's operation, which has one call at a time.
        The arguments are JSON values: a tuple arrives as a list.
        """
        raise NotImplementedError

    def results(self, seconds: float) -> Iterator[tuple[int, list[Outcome]]]:
        """Yield the numbers and outcomes of calls, after waiting for at most some seconds."""
        raise NotImplementedError

    def drop(self) -> None:
        """End all calls, and all environments."""

    def outcomes(self, rows: Rows, group: int) -> Outcomes:
        """Call the function with each row; one of lists with `group` rows, and an async one with
        several rows at a time.
        """
        style = self.signature["style"]
        size = 1 if style == ROW else group if style == LISTS else self.concurrency
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

    def check(self, row: dict[str, Any]) -> None:
        if sentence := mismatch(self.signature, {**row, "response_raw": "", "truncated": False}):
            raise InputError(f"--reward {self.name}: {sentence}")


def _dumped(arguments: Any) -> str:
    try:
        return json.dumps(arguments)
    except (TypeError, ValueError) as error:  # of a task of the user's own
        wanted = "the columns of prompts must be JSON values, for rewards"
        raise InputError(f"{wanted}: {error}") from error


class InProcess(UserCode):
    """A Python object of this process. It is called in the main thread, one call at a time, with
    copies of its arguments and without a time limit.

    Args:
        name: as in --reward or --environment.
    """

    place = "in this process, without a time limit"

    def __init__(
        self,
        code: Callable[..., Any],
        name: str,
        is_environment: bool = False,
    ) -> None:
        file = getattr(getattr(code, "__code__", None), "co_filename", "")
        self._host: Caller | EnvironmentHost
        try:
            if is_environment:
                self._host = EnvironmentHost(code, file, None)
            else:
                self._host = Caller(code, file, None)
        except LoadError as error:
            raise InputError(f"environment {name}: {error}") from error
        self.name, self.signature = name, self._host.signature
        self._calls = dict[int, str]()

    def request(self, number: int, arguments: Any) -> None:
        self._calls[number] = _dumped(arguments)

    def results(self, seconds: float) -> Iterator[tuple[int, list[Outcome]]]:
        for number in [*self._calls]:
            yield number, self._host.call(json.loads(self._calls.pop(number)))

    def drop(self) -> None:
        self._calls.clear()
        self._host.live.clear()

    def lines(self) -> list[str]:
        how = STYLES[self.signature["style"]].format(concurrency=1)
        return [
            f"reward {self.name}: {how}, in this process, without a time limit: a call that hangs "
            "stops the run, and a crash ends this process. FILE.py:FUNCTION runs in separate "
            "processes"
        ]


class StartError(Exception):
    """A worker cannot load the function."""


class Worker:
    """A process that loads the function and makes one call at a time. Time counts while the trainer
    looks for the answer: a call that was stopped with its trainer is not late.
    """

    def __init__(self, settings: dict[str, Any], variables: dict[str, str], output: int) -> None:
        self.socket, theirs = socket.socketpair()
        given = {**settings, "connection": theirs.fileno(), "path": sys.path}
        self.has_ended = False
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP, json.dumps(given)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C does not reach it
            )
        self.expect(LOADING, START_LIMIT)

    def expect(self, number: int, limit: float) -> None:
        """Begin to wait for the answer to a call."""
        self.number: int | None = number  # None: it has no call
        self._limit, self.left, self._received = limit, limit + GRACE, b""
        self._looked = time.monotonic()

    def look(self, is_readable: bool) -> list[Outcome] | None:
        """Return the outcomes of its call; None while it runs, [] if a process has not read it."""
        now = time.monotonic()
        self.left -= min(now - self._looked, 2 * LOOK_INTERVAL)
        self._looked = now
        if is_readable:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionError:
                self.end()
                return []
            self._received += data
            if not data:
                return [failure("crash", f"the worker process {self.end()}")]
            if data.endswith(b"\n"):
                try:
                    return [Outcome(*values) for values in json.loads(self._received)]
                except (ValueError, TypeError):
                    self.end()
                    return [failure("crash", "the reward code wrote to its worker's connection")]
        if self.left > 0:
            return None
        self.end()
        return [outcome_of(LateCall(self._limit))]

    def end(self) -> str:
        """Kill the process group; return how the process has ended, now or before."""
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate(timeout=KILL_LIMIT)
            self.socket.close()
            self.has_ended = True
        code = self._process.returncode
        name = signal.Signals(-code).name if code < 0 else ""
        return f"was killed by {name}" if name else f"exited with code {code}"


class RewardPool(UserCode):
    """Makes the calls in several processes.

    A call that exceeds its time or memory limit or crashes its process fails alone, and its process
    is replaced. An environment lives in the worker of its number modulo their number, and ends with
    it. One thread at a time may use the pool.

    Args:
        name: "path/to/file.py:name" or "package.module:name".
        time_limit: seconds for a call.
        memory_limit: bytes that a worker may allocate after loading the function.
        environment: names of variables that the function sees in addition to `VARIABLES`.
        concurrency: calls of an async function that one process makes at a time.
        output: gets what the function prints; None: it is discarded.
    """

    def __init__(
        self,
        name: str,
        *,
        workers: int,
        time_limit: float,
        memory_limit: int,
        environment: Sequence[str] = (),
        concurrency: int = 16,
        is_environment: bool = False,
        output: RewardOutput | None = None,
    ) -> None:
        for variable in environment:
            if variable not in os.environ:
                raise InputError(
                    f"--reward-env names {variable}, which is not set: set it, or leave it out"
                )
        self.name, self.concurrency, self.output = name, concurrency, output
        self.place, self._num_workers = f"in {workers} worker processes", workers
        close_memory()
        seen = {x: os.environ[x] for x in os.environ if x in environment or VARIABLES.fullmatch(x)}
        self._variables = {**SETTINGS, **seen}
        self._settings: dict[str, Any] = {
            "name": name,
            "time_limit": time_limit,
            "memory_limit": memory_limit,
            "is_environment": is_environment,
        }
        if name.startswith("maxrl_fast.rewards.verifiers:"):
            # a program can kill the worker, too
            self.wrong_kinds = ("timeout", "crash") if name.endswith(":code") else ("timeout",)
        self._waiting = dict[int, str]()  # calls without outcomes: arguments as JSON
        # calls that are not made yet, for each worker where environments live in them
        self._queues = [deque[int]() for _ in range(workers if is_environment else 1)]
        self._workers, self.signature = list[Worker](), {}
        try:
            while not self._workers or any(x.number == LOADING for x in self._workers):
                [*self._look(LOOK_INTERVAL)]
        except BaseException as error:
            self.drop()
            if isinstance(error, StartError):
                what = "environment" if is_environment else "reward function"
                raise InputError(f"{what} {name}: {error}") from error
            raise

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _new_worker(self) -> Worker:
        # the schemas of tools take long, and one worker makes them for all
        settings = {**self._settings, "with_schemas": not (self._workers or self.signature)}
        output = self.output.fileno() if self.output else subprocess.DEVNULL
        return Worker(settings, self._variables, output)

    def request(self, number: int, arguments: Any) -> None:
        self._waiting[number] = _dumped(arguments)
        self._queues[number % len(self._queues)].append(number)

    def _give(self, i: int) -> None:
        """Give a free worker its next call."""
        worker, queue = self._workers[i], self._queues[i % len(self._queues)]
        if queue and worker.number is None:
            limit = self._settings["time_limit"]
            try:
                worker.socket.settimeout(limit)
                worker.socket.sendall(f"{self._waiting[queue[0]]}\n".encode())
                worker.expect(queue.popleft(), limit)
            except OSError:  # it has ended after its last call, or was stopped
                worker.end()
                self._workers[i] = self._new_worker()

    def results(self, seconds: float) -> Iterator[tuple[int, list[Outcome]]]:
        """See `UserCode.results`. Where workers cannot be restarted, all calls fail."""
        try:
            yield from self._look(seconds)
        except StartError as error:
            waiting, message = [*self._waiting], f"the workers of {self.name} cannot be restarted"
            self.drop()
            for number in waiting:
                yield number, [failure("crash", f"{message}: {error}")]

    def _look(self, seconds: float) -> Iterator[tuple[int, list[Outcome]]]:
        """Look once at what the workers send, and give them their next calls."""
        while len(self._workers) < self._num_workers:
            self._workers.append(self._new_worker())
        for i in range(self._num_workers):
            self._give(i)
        busy = [(i, x, x.number) for i, x in enumerate(self._workers) if x.number is not None]
        longest = min([seconds, LOOK_INTERVAL, *(worker.left for _, worker, _ in busy)])
        ready = wait([worker.socket for _, worker, _ in busy], max(0.0, longest))
        for i, worker, number in busy:
            outcomes = worker.look(worker.socket in ready)
            if outcomes is None:
                continue
            worker.number = None
            if number == LOADING:
                if outcomes[0].kind:
                    raise StartError(outcomes[0].message.replace("the call", "loading it"))
                if not i:
                    self.signature = self.signature or json.loads(outcomes[0].text or "")
            if not outcomes:
                self._queues[i % len(self._queues)].appendleft(number)
            if worker.has_ended:
                self._workers[i] = self._new_worker()
            self._give(i)
            if outcomes and number != LOADING:
                del self._waiting[number]
                yield number, outcomes

    def lines(self) -> list[str]:
        how = STYLES[self.signature["style"]].format(concurrency=self.concurrency)
        return [
            f"reward workers: {self._num_workers}, a fresh process after each call that crashes or "
            "exceeds a limit, which limits accidents but is not a sandbox",
            f"reward {self.name}: {how}",
        ]

    def drop(self) -> None:
        """Kill all workers and their process groups; they start again when they are needed."""
        while self._workers:
            self._workers.pop().end()
        self._waiting.clear()
        for queue in self._queues:
            queue.clear()

    def close(self) -> None:
        """End the workers; what ones that start later print is discarded."""
        self.drop()
        self.output = None
