"""Reward functions and environments, whose calls are made in worker processes (`pool.py`) or here,
in the trainer's main thread, where nothing contains them.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

from maxrl_fast.errors import InputError
from maxrl_fast.rewards import PROGRESS_INTERVAL, Progress, RewardSource, Rows, Scores, no_progress
from maxrl_fast.rewards.environment import EnvironmentHost
from maxrl_fast.rewards.function import (
    CUT,
    RAW,
    STYLES,
    Caller,
    Result,
    Signature,
    calls_for,
    given_of,
    mismatch,
    takes_raw,
)
from maxrl_fast.rewards.output import RewardOutput
from maxrl_fast.runtime.loading import LoadError


class UserCode(RewardSource):
    """A reward function, or a class of environments. A call has a number, and a list of results."""

    signature: Signature
    place: str  # of environments, for the start of a run
    concurrency = 1  # calls of an async function that are made at a time
    is_verifier = False  # a built-in one, for which a call that is late has reward 0
    output: RewardOutput | None = None  # what workers print; None: discarded, or this process's

    def request(self, number: int, arguments: Any) -> None:
        """Have a call made. Arguments are JSON values: a tuple arrives as a list. An environment
        has one call at a time, with its number.
        """
        raise NotImplementedError

    def results(self, seconds: float) -> Iterator[tuple[int, list[Result]]]:
        """Yield the results that are there, with the numbers of their calls, after waiting for at
        most some seconds.

        Raises:
            RewardError: if a function's workers cannot be restarted.
        """
        raise NotImplementedError

    def drop(self) -> None:
        """End all calls, and all environments."""
        raise NotImplementedError

    def score(
        self,
        rows: Rows,
        max_failures: int | None = None,
        on_progress: Progress = no_progress,
        group: int = 1,
    ) -> Scores:
        """Call the function with each of `rows`; one of lists with `group` rows at a time, and an
        async one with several rows side by side. See `RewardSource.score`.

        Raises:
            RewardError: if workers cannot be restarted.
            TypeError: if an argument is not a JSON value.
        """
        calls = calls_for(self.signature, rows, group, self.concurrency)
        scores, waiting = Scores.of_rows(len(rows)), dict(enumerate(part for part, _ in calls))
        try:
            for number, (_, arguments) in enumerate(calls):
                self.request(number, arguments)
            while not scores.is_done(max_failures):
                on_progress()
                for number, results in self.results(PROGRESS_INTERVAL):
                    part = waiting.pop(number)
                    # a program can kill the worker, too
                    wrong = ("timeout", "crash")[: 1 + self.name.endswith(":code")]
                    if self.is_verifier and results[0].get("kind") in wrong:
                        results = [{"reward": 0.0}]
                        scores.num_late += len(part)
                    scores.add(part, results)
                    on_progress()
                    if scores.is_done(max_failures):
                        break
        finally:
            # after too many failures, or an interrupt: the calls must not go on
            if waiting:
                self.drop()
        return scores

    @property
    def wants_raw(self) -> bool:  # type: ignore[override]
        return takes_raw(self.signature) and not self.is_verifier

    def check(self, row: dict[str, Any]) -> None:
        own = given_of(self.signature, {**row, CUT: False, RAW: ""})
        if sentence := mismatch(self.signature, own):
            raise InputError(f"--reward {self.name}: {sentence}")


class InProcess(UserCode):
    """A Python object of this process. It is called in the main thread, one call at a time, with
    copies of its arguments and without a time limit.

    Args:
        name: as in --reward or --environment.
        is_optional: see Caller.
    """

    place = "in this process, without a time limit"

    def __init__(
        self,
        code: Callable[..., Any],
        name: str,
        is_optional: bool = False,
        is_environment: bool = False,
    ) -> None:
        file = getattr(getattr(code, "__code__", None), "co_filename", "")
        self._host: Caller | EnvironmentHost
        try:
            if is_environment:
                self._host = EnvironmentHost(code, file, None)
            else:
                self._host = Caller(code, file, None, is_optional)
        except LoadError as error:
            raise InputError(f"environment {name}: {error}") from error
        self.name, self.signature = name, self._host.signature
        self._calls = list[tuple[int, Any]]()

    def request(self, number: int, arguments: Any) -> None:
        self._calls.append((number, json.loads(json.dumps(arguments))))

    def results(self, seconds: float) -> Iterator[tuple[int, list[Result]]]:
        while self._calls:
            number, arguments = self._calls.pop(0)
            yield number, self._host.call(arguments)

    def drop(self) -> None:
        self._calls.clear()
        self._host.drop()

    def lines(self) -> list[str]:
        how = STYLES[self.signature["style"]].format(concurrency=1)
        return [
            f"reward {self.name}: {how}, in this process, without a time limit: a call that hangs "
            "stops the run, and a crash ends this process. FILE.py:FUNCTION runs in separate "
            "processes"
        ]

    def faster(self, factor: float) -> str:
        return "FILE.py:FUNCTION as the reward, which runs in --reward-workers processes"
