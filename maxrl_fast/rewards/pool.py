"""Reward functions and environments in worker processes, which can neither hang nor corrupt a run.

This is the trainer's side; `worker.py` is the other. multiprocessing would run the user's script
again in each worker, and does not kill what it has started.
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
from collections.abc import Iterator, Sequence
from multiprocessing.connection import wait
from typing import Any

from maxrl_fast.errors import InputError
from maxrl_fast.rewards import Outcome, failure
from maxrl_fast.rewards.function import STYLES, LateCall, outcome_of
from maxrl_fast.rewards.output import RewardOutput
from maxrl_fast.rewards.user_code import UserCode

# Not `python -m`: with the trainer's sys.path the worker imports the same modules as the trainer.
BOOTSTRAP = (
    "import json, sys; settings = json.loads(sys.argv.pop()); sys.path[:] = settings['path']; "
    "from maxrl_fast.rewards.worker import main; main(settings)"
)
LOADING = -1  # the number of a worker's first call
GRACE = 1.0  # seconds after its limit that a call is killed; a worker ends async calls itself
LOOK_INTERVAL = 1.0  # the longest wait for answers, in seconds
KILL_LIMIT = 5.0  # seconds for a killed process to end
WROTE = "the reward code wrote to the connection between worker and trainer"
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


class StartError(Exception):
    """A worker cannot be started, or cannot load the function."""


class Worker:
    """A process that loads the function and makes one call at a time. Time counts while the trainer
    looks for the answer, so a call that was stopped with its trainer is not late.
    """

    def __init__(self, settings: dict[str, Any], variables: dict[str, str], output: int) -> None:
        self.socket, theirs = socket.socketpair()
        given = {**settings, "connection": theirs.fileno(), "path": sys.path}
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
        self.expect(LOADING, settings["start_limit"])

    def expect(self, number: int, limit: float) -> None:
        """Begin to wait for the answer to a call."""
        self.number: int | None = number  # None: it has no call
        self.limit, self.left, self._looked = limit, limit + GRACE, time.monotonic()
        self._received = b""

    def look(self, is_readable: bool) -> list[Outcome] | None:
        """Return the outcomes of its call, or [] if the process has ended and has not read it; None
        while the call runs.
        """
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
                except (ValueError, TypeError, RecursionError):
                    self.end()
                    return [failure("crash", WROTE)]
        if self.left > 0:
            return None
        self.end()
        return [outcome_of(LateCall(self.limit))]

    def end(self) -> str:
        """Kill the process group, and return how the process has ended, also if before."""
        if not self.has_ended:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate(timeout=KILL_LIMIT)
            self.socket.close()
        code = self._process.returncode
        return (
            f"was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"exited with code {code}"
        )

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None


class RewardPool(UserCode):
    """Makes the calls in several processes.

    A call that exceeds its time or memory limit or crashes its process fails alone, and its process
    is replaced. State that the function keeps between calls belongs to one worker. An environment
    lives in the worker of its number modulo their number, and ends with it. One thread at a time
    may use the pool.

    Args:
        name: "path/to/file.py:name" or "package.module:name".
        workers: number of processes, each with one call at a time.
        time_limit: seconds for a call. `start_limit`: for starting a process and loading.
        memory_limit: bytes that a worker may allocate beyond its memory after loading the function.
        environment: names of variables that the function sees in addition to `VARIABLES`.
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
        if missing := [x for x in environment if x not in os.environ]:
            wanted = f"the environment variable {missing[0]}, which is not set"
            raise InputError(f"the {what} {name} needs {wanted}")
        self.name, self.concurrency, self.output = name, concurrency, output
        self.place, self._num_workers = f"in {workers} worker processes", workers
        seen = {x: os.environ[x] for x in os.environ if x in environment or VARIABLES.fullmatch(x)}
        self._variables = {**SETTINGS, **seen}
        self._settings: dict[str, Any] = {
            "name": name,
            "time_limit": time_limit,
            "memory_limit": memory_limit,
            "start_limit": start_limit,
            "is_optional": is_optional,
            "is_environment": is_environment,
        }
        if name.startswith("maxrl_fast.rewards.verifiers:"):
            # a program can kill the worker, too
            self.wrong_kinds = ("timeout", "crash") if name.endswith(":code") else ("timeout",)
        self._waiting = dict[int, str]()  # calls without outcomes: arguments as JSON
        # Calls that are not made yet. Environments live in their workers: each has its own.
        self._queues = [deque[int]() for _ in range(workers if is_environment else 1)]
        self._workers, self.signature = list[Worker](), {}
        try:
            while not self._workers or any(x.number == LOADING for x in self._workers):
                [*self._look(LOOK_INTERVAL)]
        except BaseException as error:
            self.drop()
            if isinstance(error, StartError):
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

    def _request(self, number: int, arguments: str) -> None:
        self._waiting[number] = arguments
        self._queues[number % len(self._queues)].append(number)
        for i in range(len(self._workers)):
            self._give(i)

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
        """End the workers, which else end with the trainer. Ones that start later discard what they
        print: the run may have ended.
        """
        self.drop()
        self.output = None
