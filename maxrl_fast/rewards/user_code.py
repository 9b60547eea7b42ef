"""Reward functions and environments, whose calls are made in worker processes (`pool.py`) or here,
in the trainer's main thread, where nothing contains them.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

from maxrl_fast.errors import InputError
from maxrl_fast.rewards import PROGRESS_INTERVAL, Outcome, Outcomes, RewardSource, Rows
from maxrl_fast.rewards.environment import EnvironmentHost
from maxrl_fast.rewards.function import LISTS, ROW, STYLES, Caller, Signature, mismatch
from maxrl_fast.rewards.output import RewardOutput
from maxrl_fast.runtime.loading import LoadError


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

        Raises:
            InputError: if an argument is not a JSON value.
        """
        try:
            self._request(number, json.dumps(arguments))
        except (TypeError, ValueError) as error:  # of a task of the user's own
            wanted = "the columns of prompts must be JSON values, for rewards"
            raise InputError(f"{wanted}: {error}") from error

    def _request(self, number: int, arguments: str) -> None:
        raise NotImplementedError

    def results(self, seconds: float) -> Iterator[tuple[int, list[Outcome]]]:
        """Yield the outcomes that are there, with the numbers of their calls, after waiting for at
        most some seconds.
        """
        raise NotImplementedError

    def drop(self) -> None:
        """End all calls, and all environments."""
        raise NotImplementedError

    def outcomes(self, rows: Rows, group: int) -> Outcomes:
        """Call the function with each of `rows`; one of lists with `group` rows at a time, and an
        async one with several rows side by side. See `RewardSource.outcomes`.
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
                    part = waiting.pop(start)
                    for i in range(len(part)):
                        outcome = results[i] if len(results) == len(part) else results[0]
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
        self._calls = dict[int, str]()

    def _request(self, number: int, arguments: str) -> None:
        self._calls[number] = arguments

    def results(self, seconds: float) -> Iterator[tuple[int, list[Outcome]]]:
        for number in [*self._calls]:
            yield number, self._host.call(json.loads(self._calls.pop(number)))

    def drop(self) -> None:
        self._calls.clear()
        if isinstance(self._host, EnvironmentHost):
            self._host.live.clear()

    def lines(self) -> list[str]:
        how = STYLES[self.signature["style"]].format(concurrency=1)
        return [
            f"reward {self.name}: {how}, in this process, without a time limit: a call that hangs "
            "stops the run, and a crash ends this process. FILE.py:FUNCTION runs in separate "
            "processes"
        ]
