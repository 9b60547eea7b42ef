"""Reward functions and environments that are Python objects of this process. They are called in its
main thread, one call at a time, and nothing contains them.
"""

import json
from collections.abc import Callable
from typing import Any

from maxrl_fast.errors import InputError
from maxrl_fast.rewards import Progress, RewardSource, Rows, Scores, no_progress
from maxrl_fast.rewards.environment import EnvironmentHost, Operation, signature_of_environment
from maxrl_fast.rewards.function import STYLES, Caller, Result, calls_for, mismatch, signature_of
from maxrl_fast.runtime.loading import LoadError


class InProcessReward(RewardSource):
    """A Python function that scores responses, called as in worker processes, with copies of its
    arguments. It has no time limit.

    Args:
        name: of the function, as in --reward.
        is_optional: whether None and NaN mean that the function does not apply to a response;
            otherwise they are failures.
    """

    def __init__(self, function: Callable[..., Any], name: str, is_optional: bool = False):
        self.name, self._signature = name, signature_of(function)
        code = getattr(function, "__code__", None)
        file = "" if code is None else code.co_filename
        self._caller = Caller(function, file, self._signature["style"], None, is_optional)

    def score(
        self,
        rows: Rows,
        max_failures: int | None = None,
        on_progress: Progress = no_progress,
        group: int = 1,
    ) -> Scores:
        """Return the rewards of rows, as `RewardSource.score`.

        Raises:
            TypeError: if an argument is not a JSON value.
        """
        scores = Scores.of_rows(len(rows))
        for part, arguments in calls_for(self._signature, rows, group, concurrency=1):
            if scores.is_done(max_failures):
                break
            on_progress()
            scores.add(part, self._caller.call(json.loads(json.dumps(arguments))))
        return scores

    def check(self, row: dict[str, Any]) -> None:
        if sentence := mismatch(self._signature, row):
            raise InputError(f"the reward {self.name}: {sentence}")

    def lines(self) -> list[str]:
        how = STYLES[self._signature["style"]].format(concurrency=1)
        return [
            f"reward {self.name}: {how}, in this process, without a time limit: a call that hangs "
            "stops the run, and a crash ends this process. FILE.py:FUNCTION runs in separate "
            "processes"
        ]

    def faster(self, factor: float) -> str:
        return "FILE.py:FUNCTION as the reward, which runs in --reward-workers processes"


class InProcessEnvironments:
    """Environments of a class of this process."""

    place = "in this process, without a time limit"
    output = None  # what they print is this process's

    def __init__(self, cls: type, name: str) -> None:
        try:
            self.signature = signature_of_environment(cls)
        except LoadError as error:
            raise InputError(f"environment {name}: {error}") from error
        self.name, self._class, self._operations = name, cls, list[Operation]()
        self.drop()

    def request(self, operation: Operation) -> None:
        """Have an operation done by the next call of `results`."""
        self._operations.append(operation)

    def results(self, _: float) -> list[tuple[int, Result]]:
        """Do what was requested; return the results by the number of the environment."""
        operations, self._operations = self._operations, []
        return [
            (operation[0], self._host.call(json.loads(json.dumps(operation)))[0])
            for operation in operations
        ]

    def drop(self) -> None:
        """End all environments."""
        self._host = EnvironmentHost(self._class, "", self.signature, None)
        self._operations.clear()
