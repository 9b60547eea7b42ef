"""Call a reward function in a thread of this process, where a lambda or a closure can be called. Nothing contains it.

A worker process (`pool.py`) can be killed when a call hangs or takes too much memory; a thread cannot.
"""

import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from maxrl_fast.errors import InputError, RewardError
from maxrl_fast.rewards.pool import PROGRESS_INTERVAL, Failure, Scores, calls_of
from maxrl_fast.rewards.process import printable
from maxrl_fast.rewards.signature import BATCH, ROW, STYLES, batch_arguments, mismatch, signature_of
from maxrl_fast.rewards.worker import Lists, call_function

MAX_HUNG = 3  # threads that a call never gave back, after which no other is started


class _Caller(threading.Thread):
    """Makes one call after the other, and leaves each outcome in `outcomes`; arguments of None end it."""

    def __init__(self, function: Callable[..., Any], style: str, time_limit: float, is_optional: bool):
        super().__init__(name="reward", daemon=True)  # a call that never ends does not keep the process from ending
        self._function, self._style, self._time_limit, self._is_optional = function, style, time_limit, is_optional
        code = getattr(function, "__code__", None)
        self._file = code.co_filename if code is not None else ""  # whose line an error names
        self.arguments, self.outcomes = SimpleQueue[Any](), SimpleQueue[list[dict[str, Any]]]()

    def run(self) -> None:
        lists = None if self._style == ROW else Lists(self._style, self._time_limit)
        call = call_function if lists is None else lists.call
        while (arguments := self.arguments.get()) is not None:
            answer = call(self._function, arguments, self._file, self._is_optional)
            self.outcomes.put(answer.get("results", [answer]))
        if lists is not None:
            lists.close()


class InProcessReward:
    """A Python function of this process that scores responses, called as in worker processes, one call at a time.

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
        self._caller: _Caller | None = None
        self._num_hung = 0

    def score(
        self,
        rows: Sequence[dict[str, Any]],
        max_failures: int | None = None,
        on_progress: Callable[[], None] = lambda: None,
        group: int = 1,
    ) -> Scores:
        """Call the function with each of `rows`, its keyword arguments, or with lists of `group` rows if it takes lists.

        Raises:
            RewardError: if too many calls have not ended.
            TypeError: if an argument is not a JSON value.
        """
        results: list[dict[str, Any]] = []
        failures = list[Failure]()
        for call in calls_of(self._signature, rows, group, concurrency=1):
            if max_failures is not None and len(failures) > max_failures:
                break
            outcome = self._outcome(json.loads(json.dumps(call.arguments)), on_progress)
            outcome = outcome * len(call.rows) if len(outcome) < len(call.rows) else outcome  # one failure of a whole call
            failures += [
                Failure(row, result["kind"], printable(result["message"]))
                for row, result in zip(call.rows, outcome, strict=True)
                if "kind" in result
            ]
            results += outcome
        num_left = len(rows) - len(results)
        results += [{}] * num_left
        rewards = [math.nan if (reward := result.get("reward", 0.0)) is None else reward for result in results]
        return Scores(rewards, failures, num_left, [result.get("components", {}) for result in results])

    def _outcome(self, arguments: Any, on_progress: Callable[[], None]) -> list[dict[str, Any]]:
        """Return the results of one call, or one failure for all of them."""
        if self._caller is None:
            if self._num_hung >= MAX_HUNG:
                hung = f"{MAX_HUNG} calls of the reward function {self.name} have not ended after {self._time_limit:g} s"
                raise RewardError(f"{hung}, and a thread cannot be killed; a function in a file, FILE.py:FUNCTION, can be")
            self._caller = _Caller(self._function, self._signature["style"], self._time_limit, self._is_optional)
            self._caller.start()
        self._caller.arguments.put(arguments)
        end = time.monotonic() + self._time_limit
        while (left := end - time.monotonic()) > 0:
            on_progress()
            try:
                return self._caller.outcomes.get(timeout=min(left, PROGRESS_INTERVAL))
            except Empty:
                continue
        self._caller.arguments.put(None)  # it ends once the function returns
        self._caller, self._num_hung = None, self._num_hung + 1
        return [{"kind": "timeout", "message": f"the call ran longer than {self._time_limit:g} s"}]

    def check(self, row: dict[str, Any]) -> None:
        """Raise InputError naming the nearest fix if the function's parameters do not fit a row."""
        given = [*(batch_arguments([row], self._signature) if self._signature["style"] == BATCH else row)]
        if sentence := mismatch(self._signature, given):
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

    def stacks(self) -> None:
        """Do nothing: this process writes the stacks of all its threads."""

    def close(self) -> None:
        """End the thread once its call has ended."""
        if self._caller is not None:
            self._caller.arguments.put(None)
            self._caller = None
