"""Environments in worker processes, or in a thread of this process: the trainer's side of
`environment.py`.
"""

import json
from typing import Any

from maxrl_fast.errors import InputError
from maxrl_fast.rewards import no_progress
from maxrl_fast.rewards.environment import (
    EnvironmentHost,
    Operation,
    Result,
    signature_of_environment,
)
from maxrl_fast.rewards.pool import InProcessReward, RewardPool, StartError
from maxrl_fast.runtime.loading import LoadError


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
        self._operations[operation[0]] = operation
        self._unsent += _line(operation)

    def results(self, seconds: float) -> list[tuple[int, Result]]:
        """Return the results that are there, by the number of the environment, or wait some
        seconds for one.
        """
        try:
            if self._supervisor is None:
                self._start()
                for operation in self._operations.values():
                    self._unsent += _line(operation)
            found = [(int(number), results[0]) for number, results in self._exchange(seconds)]
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


def _line(operation: Operation) -> bytes:
    return f"{operation[0]} {json.dumps(operation)}\n".encode()


class InProcessEnvironments(InProcessReward):
    """Environments of a class of this process, in a thread, without a sandbox.

    An operation that takes longer than its limit fails, and the thread is given up with all its
    environments: it ends when the operation returns.
    """

    what, place = "environment", "in a thread of this process, which nothing contains"
    output = None  # what they print is this process's

    def __init__(self, cls: type, name: str, time_limit: float) -> None:
        try:
            self.signature = signature_of_environment(cls)
        except LoadError as error:
            raise InputError(f"environment {name}: {error}") from error
        self._operations = list[Operation]()
        super().__init__(cls, name, time_limit)

    def request(self, operation: Operation) -> None:
        """Have an operation done by the next call of `results`."""
        self._operations.append(operation)

    def results(self, _: float) -> list[tuple[int, Result]]:
        """Do what was requested; return the results by the number of the environment.

        Raises:
            RewardError: if too many operations have not ended.
        """
        operations, self._operations = self._operations, []
        return [
            (operation[0], self._call(json.loads(json.dumps(operation)), no_progress)[0])
            for operation in operations
        ]

    def _caller(self) -> EnvironmentHost:
        return EnvironmentHost(
            self._function, "", self.signature, self._time_limit, has_alarm=False
        )

    def drop(self) -> None:
        """End all environments; the thread starts again when it is needed."""
        self.close()
        self._operations.clear()


EnvironmentWorkers = EnvironmentPool | InProcessEnvironments
