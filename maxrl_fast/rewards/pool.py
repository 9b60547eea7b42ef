"""Python reward functions: in worker processes that can neither hang nor corrupt a run, or in a thread of this process.

The pool is the trainer's side; `supervisor.py` is the other. There is no library below it: those for pools of processes
(multiprocessing, pebble) run the user's script again in each worker unless it has a __main__ guard, pickle results, and neither
give a worker an environment of its own nor kill what it has started.
"""

import contextlib
import fcntl
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
import termios
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any, Literal

from maxrl_fast.errors import InputError, RewardError
from maxrl_fast.rewards import PROGRESS_INTERVAL, Progress, ResultBatch, RewardSource, Rows, Scores, no_progress, power_of_two
from maxrl_fast.rewards.function import ROWS, STYLES, Caller, Signature, WorkItem, mismatch, signature_of, work_items

# Not `python -m`: with the trainer's sys.path the worker imports the same modules as the trainer.
BOOTSTRAP = "import sys; sys.path[:] = sys.argv[2:]; from maxrl_fast.rewards.supervisor import main; main()"
MAX_FAILED_STARTS = 3  # after this many `score` raises RewardError
MAX_HUNG = 3  # threads that a call never gave back, after which no other is started
ANSWER_LIMIT = 1 << 22  # bytes
SEND_LIMIT = 10.0  # seconds for an idle worker to read a call
GRACE = 1.0  # seconds for a worker to answer after its async calls have reached the time limit
KILL_LIMIT = 5.0  # seconds for the supervisor to kill everything and end
STACK_LIMIT, STACK_PAUSE = 0.2, 0.02  # seconds to wait for a worker's stack, and of silence that end it
FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
WROTE = "the reward code wrote to the connection between worker and trainer"
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS"), "1")
# Names of the environment variables that every function sees: how programs are found and how text is read, but no keys, no
# tokens, and no proxies, whose addresses can hold passwords.
ENVIRONMENT = (
    "PATH|HOME|USER|LOGNAME|SHELL|TMPDIR|TZ|LANG|LANGUAGE|LC_.*|PYTHON.*|VIRTUAL_ENV|CONDA_PREFIX|LD_LIBRARY_PATH|LD_PRELOAD"
    "|CUDA_VISIBLE_DEVICES|CUDA_HOME|XDG_CACHE_HOME|HF_HOME|HF_HUB_OFFLINE|TORCH_HOME|SSL_CERT_FILE|SSL_CERT_DIR"
)
HASH_SEED = {"PYTHONHASHSEED": "0"}  # unless the user sets it: the order of a set must not depend on the process


class StartError(Exception):
    """A worker cannot be started, or cannot load the function."""


@dataclass
class Worker:
    """The connection to a worker, and the call that it makes. Its process, a child of the supervisor's, may be replaced."""

    index: int
    connection: socket.socket
    serial: int = 0  # of its process
    pid: int = 0  # of its process; 0 while that starts
    item: int | None = None  # index of the work item that it works on
    number: int = 0  # of the call
    answer: bytes = b""  # as far as it has come
    deadline: float = 0.0  # of the start, or of the call


class RewardPool:
    """Calls a reward function in several processes.

    A call that exceeds its time or memory limit or crashes its process fails alone: the process is replaced while the others
    keep working. State that the function keeps between calls belongs to one worker and is lost when that worker is replaced.
    Only one thread may use the pool, except for `stacks`.

    Args:
        function: "path/to/file.py:name" or "package.module:name".
        workers: number of processes, each with one call at a time.
        time_limit: seconds for a call, from when its worker has received it.
        memory_limit: bytes that a worker may allocate beyond its memory after loading the function.
        start_limit: seconds for starting a process and loading the function.
        isolation: whether a process makes calls until one fails, or each call has a fresh process.
        environment: names of variables that the function sees in addition to `ENVIRONMENT`.
        concurrency: calls of an async function that one process makes at a time.
        is_optional: whether None and NaN mean that the function does not apply to a response; otherwise they are failures.

    Raises:
        InputError: if the function cannot be loaded, a number is not positive and finite, or a variable does not exist.
    """

    signature: Signature

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
        self._time_limit, self._start_limit = time_limit, start_limit
        environ = {name: value for name, value in os.environ.items() if name in environment or re.fullmatch(ENVIRONMENT, name)}
        self._environment = HASH_SEED | environ | ONE_THREAD
        self._settings = {"function": function, "isolation": isolation, "is_optional": is_optional}
        self._settings |= {"time_limit": time_limit, "memory_limit": memory_limit, "trainer": os.getpid()}
        self._num_workers, self._serials, self._numbers = workers, itertools.count(1), itertools.count(1)
        self._can_fork, self._file, self._is_closed = True, "", False
        self._stack_lock = threading.Lock()
        self._supervisor: subprocess.Popen[bytes] | None = None
        try:
            self._start()
            while not all(worker.pid for worker in self._workers):
                self._receive(None)
        except StartError as error:
            self.close()
            raise InputError(f"reward function {function}: {error}") from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def score(self, rows: Rows, max_failures: int | None = None, on_progress: Progress = no_progress, group: int = 1) -> Scores:
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
        items = work_items(self.signature, rows, group, self._concurrency)
        batch, num_failed_starts = _Calls(items, len(rows)), 0
        try:
            while not batch.is_done(max_failures):
                on_progress()
                try:
                    if self._supervisor is None:
                        self._start()
                    self._send_calls(batch)
                    self._receive(batch)
                except StartError as error:
                    num_failed_starts += 1
                    if num_failed_starts >= MAX_FAILED_STARTS:
                        cause = f"the workers of the reward function {self.name} cannot be restarted: {error}"
                        raise RewardError(cause) from error
        finally:
            for worker in self._workers:
                if worker.item is not None:
                    self._replace(worker)
        return batch.scores()

    def _start(self) -> None:
        """Start the supervisor, and have it start all workers."""
        with contextlib.ExitStack() as passed:  # closed here once the supervisor has them
            pairs = [socket.socketpair() for _ in range(self._num_workers)]
            self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for connection in (theirs, *(pair[1] for pair in pairs)):
                passed.enter_context(connection)
            self._stacks, write = os.pipe()
            passed.callback(os.close, write)
            for fd in (self._stacks, write):
                os.set_blocking(fd, False)
            connections = [pair[1].fileno() for pair in pairs]
            fds = {"control": theirs.fileno(), "stacks": write, "connections": connections}
            self._workers = [Worker(index, pair[0]) for index, pair in enumerate(pairs)]
            self._poll = select.poll()
            self._by_fd = {worker.connection.fileno(): worker for worker in self._workers}
            for fd in (self._control.fileno(), *self._by_fd):
                self._poll.register(fd, select.POLLIN)
            try:
                self._supervisor = subprocess.Popen(
                    [sys.executable, "-c", BOOTSTRAP, json.dumps(self._settings | fds), *sys.path],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env=self._environment,
                    pass_fds=(theirs.fileno(), write, *connections),
                    start_new_session=True,  # Ctrl-C does not reach it
                )
            except OSError as error:
                raise StartError(f"a process cannot be started: {error}") from error
        self._control.settimeout(self._start_limit)
        for worker in self._workers:
            self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        """Have a worker's process killed with its process group, and a fresh one started, without waiting for either."""
        worker.serial, worker.pid, worker.item = next(self._serials), 0, None
        worker.answer, worker.deadline = b"", time.monotonic() + self._start_limit
        worker.connection.setblocking(False)
        with contextlib.suppress(OSError):  # the supervisor has ended, which `_receive_control` will see
            self._control.send(json.dumps([worker.index, worker.serial]).encode())

    def _send_calls(self, batch: "_Calls") -> None:
        """Give each worker that is idle a call, while some are waiting."""
        for worker in self._workers:
            if not worker.pid or worker.item is not None or not batch.waiting:
                continue
            arguments = batch.items[batch.waiting[0]].arguments
            worker.number = next(self._numbers)
            message = json.dumps({"call": worker.number, "arguments": arguments}).encode() + b"\n"
            worker.item, worker.answer = batch.waiting.popleft(), b""
            try:
                if (size := worker.connection.send(message)) < len(message):
                    worker.connection.settimeout(SEND_LIMIT)
                    worker.connection.sendall(memoryview(message)[size:])
                    worker.connection.setblocking(False)
            except OSError:  # a time-out: it was stopped
                self._fail(worker, batch, "crash", f"the worker did not read its call within {SEND_LIMIT:g} s")
                continue
            grace = GRACE if self.signature["style"] == ROWS else 0.0  # each of its calls has the time limit for itself
            worker.deadline = time.monotonic() + self._time_limit + grace

    def _receive(self, batch: "_Calls | None") -> None:
        """Take what has come from the workers and the supervisor, and end what is late; wait at most a second for them.

        Raises:
            StartError: if a worker cannot be started.
        """
        busy = [worker for worker in self._workers if worker.item is not None or not worker.pid]
        first = min((worker.deadline for worker in busy), default=math.inf)
        ready = [fd for fd, _ in self._poll.poll(1000 * max(0.0, min(PROGRESS_INTERVAL, first - time.monotonic())))]
        for fd in ready:
            if worker := self._by_fd.get(fd):
                self._receive_answer(worker, batch)
        if self._control.fileno() in ready:
            self._receive_control(batch)
        for worker in busy:
            if worker.deadline > time.monotonic():
                continue
            if worker.item is not None and batch:
                late = f"the call ran longer than {self._time_limit:g} s{self._location(worker)}"
                self._fail(worker, batch, "timeout", late)
            elif not worker.pid:
                self._replace(worker)
                raise StartError(f"loading it took longer than {self._start_limit:g} s")

    def _receive_answer(self, worker: Worker, batch: "_Calls | None") -> None:
        """Read what a worker has sent; if it is its whole answer, keep the results."""
        try:
            worker.answer += worker.connection.recv(1 << 16)
        except OSError:  # nothing has come, or the supervisor has ended, which the control socket tells too
            return
        if worker.item is None or batch is None:  # no call is being made
            if worker.pid:
                self._replace(worker)
            worker.answer = b""
        elif worker.answer.endswith(b"\n") or len(worker.answer) > ANSWER_LIMIT:
            rows = batch.items[worker.item].rows
            answer = parse_answer(worker.answer, worker.number, len(rows))
            if answer is None:
                self._fail(worker, batch, "crash", f"{WROTE}: {worker.answer[:80].decode(errors='replace')}")
                return
            batch.add(rows, answer["results"])
            worker.item = None
            if self._isolation == "call" or answer["left"] or any("kind" in result for result in answer["results"]):
                self._replace(worker)

    def _receive_control(self, batch: "_Calls | None") -> None:
        """Read one message of the supervisor and its children: a process is ready, has ended, or cannot be started."""
        try:
            data = self._control.recv(1 << 16)
        except OSError:  # requests are unread
            data = b""
        try:
            message = json.loads(data or '{"error": "the supervisor of the workers has ended"}')
            error, worker = message.get("error"), self._workers[message.get("index", 0)]
            is_current = message.get("serial") == worker.serial
            if "pid" in message and is_current:
                self._file, self._can_fork, self.signature = (message[key] for key in ("file", "can_fork", "signature"))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
            message, error = {}, f"{WROTE}: {data[:80]!r}"
        if error is not None and "index" not in message:  # there are no workers any more
            for other in self._workers:
                if other.item is not None and batch:
                    self._fail(other, batch, "crash", error)
            self._end_supervisor()
            raise StartError(error)
        if not is_current:  # it is of a process that has been replaced
            return
        if "pid" in message:
            with contextlib.suppress(OSError):  # nothing is left
                while worker.connection.recv(1 << 16):  # of the process before
                    pass
            worker.pid = message["pid"]
        elif worker.pid:
            self._replace_ended(worker, batch, message["cause"])
        else:
            self._replace(worker)
            raise StartError(message.get("error") or message["cause"])

    def _replace_ended(self, worker: Worker, batch: "_Calls | None", cause: str) -> None:
        """Start another process for one that has ended. A call that it had not read is made by another, up to a few times."""
        serial = worker.serial
        if worker.item is not None and batch:
            self._receive_answer(worker, batch)  # it may have answered before
        if worker.item is not None and batch and worker.serial == serial:
            batch.num_unread[worker.item] += 1
            if has_unread(worker.connection) and batch.num_unread[worker.item] <= self._num_workers:
                batch.waiting.appendleft(worker.item)
            else:
                self._fail(worker, batch, "crash", cause)
        if worker.serial == serial:
            self._replace(worker)

    def _fail(self, worker: Worker, batch: "_Calls", kind: str, message: str) -> None:
        """Count the call of a worker as failed, and replace its process."""
        assert worker.item is not None
        batch.add(batch.items[worker.item].rows, [{"kind": kind, "message": message}])
        self._replace(worker)

    def check(self, row: dict[str, Any]) -> None:
        """Raise InputError naming the nearest fix if the function's parameters do not fit a row."""
        if sentence := mismatch(self.signature, row):
            raise InputError(f"--reward {self.name}: {sentence}")

    def lines(self) -> list[str]:
        """Return how the processes are limited and how the function is called, for the start of a run."""
        how = STYLES[self.signature["style"]].format(concurrency=self._concurrency)
        return [f"reward workers: {self.describe()}", f"reward {self.name}: {how}"]

    def faster(self, factor: float) -> str:
        """Return the option that makes scoring about this many times as fast."""
        if self.signature["style"] == ROWS:
            return f"--reward-concurrency {power_of_two(self._concurrency * factor)}"
        return f"--reward-workers {power_of_two(self._num_workers * factor)}"

    def describe(self) -> str:
        """Return when processes are replaced and what limits them, for the start of a run."""
        fresh = "each call" if self._isolation == "call" else "each failed call"
        if not self._can_fork:
            fresh += ", which loads the function again, because loading it starts threads"
        return f"{self._num_workers}, a fresh process after {fresh}; this contains mistakes, not hostile code"

    def stacks(self) -> None:
        """Write the stack of each worker to stderr, within a second. A watchdog may call it in any thread."""
        end = time.monotonic() + 1.0
        for worker in self._workers:
            if worker.pid and time.monotonic() < end:
                state = "is idle" if worker.item is None else f"runs call {worker.item}"
                print(f"reward worker {worker.pid} {state}\n{self._stack(worker.pid)}", file=sys.stderr, flush=True)

    def _stack(self, pid: int) -> str:
        """Return the stack of a worker's main thread, innermost frame first; "" if the worker does not answer."""
        text, end = b"", time.monotonic() + STACK_LIMIT
        poll = select.poll()
        with self._stack_lock, contextlib.suppress(OSError):  # the process has ended, or nothing more is there
            poll.register(self._stacks, select.POLLIN)
            while poll.poll(0):
                os.read(self._stacks, 1 << 16)  # an earlier stack
            os.kill(pid, signal.SIGUSR1)
            while time.monotonic() < end and poll.poll(1000 * (STACK_PAUSE if text else STACK_LIMIT)):
                text += os.read(self._stacks, 1 << 16)
        return text.decode(errors="replace")

    def _location(self, worker: Worker) -> str:
        """Return the innermost line that it executes in the function's file, else in any file; "" if it does not answer."""
        frames = FRAME.findall(self._stack(worker.pid))
        frame = next((frame for frame in frames if frame[0] == self._file), frames[0] if frames else None)
        return f", in {frame[2]} ({os.path.basename(frame[0])}, line {frame[1]})" if frame else ""

    def close(self) -> None:
        """Kill all workers and what they have started in their process groups. Without `close` they end with the trainer."""
        self._is_closed = True
        self._end_supervisor()

    def _end_supervisor(self) -> None:
        """Have the supervisor kill everything, and wait until it has ended."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is None:
            return
        self._control.close()
        try:
            supervisor.wait(KILL_LIMIT)
        except subprocess.TimeoutExpired:  # it was stopped; the kernel kills its descendants with it
            supervisor.kill()
            supervisor.wait(KILL_LIMIT)
        for worker in self._workers:
            worker.connection.close()
        with self._stack_lock:
            os.close(self._stacks)


class _Calls(ResultBatch):
    """The calls of one `score`."""

    def __init__(self, items: Sequence[WorkItem], num_rows: int) -> None:
        super().__init__(num_rows)
        self.items, self.waiting = items, deque(range(len(items)))
        self.num_unread = Counter[int]()  # by work item: processes that ended before they read it


def has_unread(connection: socket.socket) -> bool:
    """Return whether the other end has not read all that was sent. A call is made once it has been read as a whole."""
    return fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)) != bytes(4)


def parse_answer(line: bytes, number: int, count: int) -> dict[str, Any] | None:
    """Return the answer of a worker, with a result for each of `count` responses; None if it is not one."""
    try:
        answer = json.loads(line)
        results = answer["results"]
        is_valid = answer["call"] == number and isinstance(answer["left"], bool) and all(map(is_result, results))
        is_valid = is_valid and (len(results) == count or (len(results) == 1 and "kind" in results[0]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # RecursionError: [[[[...
        return None
    return answer if is_valid else None


def is_result(result: dict[str, Any]) -> bool:
    """Return whether this is a reward, with components if it has some, or the failure of one."""
    if "kind" in result:
        return result["kind"] in ("exception", "memory", "invalid", "timeout") and isinstance(result["message"], str)
    numbers = [*result.get("components", {}).values()]
    if result["reward"] is not None:
        numbers.append(result["reward"])
    return all(isinstance(number, float) and math.isfinite(number) for number in numbers)


class InProcessReward(RewardSource):
    """A Python function of this process that scores responses, called as in worker processes, one call at a time, in a thread.

    Its arguments are copies. A call that takes longer than its limit counts as failed, and its thread is given up: it ends when
    the function returns. A call that holds the interpreter's lock, as a regular expression does, cannot be interrupted.

    Args:
        name: of the function, as in --reward.
        time_limit: seconds of a call.
        is_optional: whether None and NaN mean that the function does not apply to a response; otherwise they are failures.
    """

    def __init__(self, function: Callable[..., Any], name: str, time_limit: float, is_optional: bool = False):
        self.name, self._function, self._time_limit, self._is_optional = name, function, time_limit, is_optional
        self._signature = signature_of(function)
        self._requests, self._outcomes = SimpleQueue[Any](), SimpleQueue[list[dict[str, Any]]]()
        self._has_thread, self._num_hung = False, 0

    def score(self, rows: Rows, max_failures: int | None = None, on_progress: Progress = no_progress, group: int = 1) -> Scores:
        """Return the rewards of rows, as `RewardSource.score`.

        Raises:
            RewardError: if too many calls have not ended.
            TypeError: if an argument is not a JSON value.
        """
        batch = ResultBatch(len(rows))
        for item in work_items(self._signature, rows, group, concurrency=1):
            if batch.is_done(max_failures):
                break
            batch.add(item.rows, self._call(json.loads(json.dumps(item.arguments)), on_progress))
        return batch.scores()

    def _call(self, arguments: Any, on_progress: Callable[[], None]) -> list[dict[str, Any]]:
        """Return the results of one call, or one failure for all of them."""
        if not self._has_thread:
            if self._num_hung >= MAX_HUNG:
                hung = f"{MAX_HUNG} calls of the reward function {self.name} have not ended after {self._time_limit:g} s"
                raise RewardError(f"{hung}, and a thread cannot be killed; a function in a file, FILE.py:FUNCTION, can be")
            self._requests, self._outcomes = SimpleQueue[Any](), SimpleQueue[list[dict[str, Any]]]()
            queues = self._requests, self._outcomes
            # A call that never ends does not keep the process from ending.
            threading.Thread(target=self._make_calls, args=queues, name="reward", daemon=True).start()
            self._has_thread = True
        self._requests.put(arguments)
        end = time.monotonic() + self._time_limit
        while (left := end - time.monotonic()) > 0:
            on_progress()
            try:
                return self._outcomes.get(timeout=min(left, PROGRESS_INTERVAL))
            except Empty:
                continue
        self.close()
        self._num_hung += 1
        return [{"kind": "timeout", "message": f"the call ran longer than {self._time_limit:g} s"}]

    def _make_calls(self, requests: SimpleQueue[Any], outcomes: SimpleQueue[list[dict[str, Any]]]) -> None:
        """Make one call after the other, in a thread, until one with the arguments None."""
        code = getattr(self._function, "__code__", None)
        file = code.co_filename if code is not None else ""
        caller = Caller(self._function, file, self._signature["style"], self._time_limit, self._is_optional)
        while (arguments := requests.get()) is not None:
            outcomes.put(caller.call(arguments))
        caller.close()

    def check(self, row: dict[str, Any]) -> None:
        """Raise InputError naming the nearest fix if the function's parameters do not fit a row."""
        if sentence := mismatch(self._signature, row):
            raise InputError(f"the reward {self.name}: {sentence}")

    def lines(self) -> list[str]:
        """Return where the function runs, for the start of a run."""
        how = STYLES[self._signature["style"]].format(concurrency=1)
        return [
            f"reward {self.name}: {how}, in a thread of this process; nothing contains it: a call of more than "
            f"{self._time_limit:g} s counts as failed but runs on, and a crash ends this process. FILE.py:FUNCTION runs in "
            "processes of its own"
        ]

    def faster(self, factor: float) -> str:
        """Return what makes scoring faster: worker processes."""
        return "FILE.py:FUNCTION as the reward, which runs in --reward-workers processes"

    def close(self) -> None:
        """End the thread once its call has ended."""
        if self._has_thread:
            self._requests.put(None)
            self._has_thread = False
