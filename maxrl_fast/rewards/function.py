"""How a user's reward function is called, by the names of its parameters, and what it may return.
Each worker imports this at its start, so it imports little."""

import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import lru_cache
from typing import Any

from maxrl_fast.rewards import Outcome, Rows, failure
from maxrl_fast.runtime.loading import SHORT_REPR, describe_error

LARGEST_FLOAT32 = 3.4028234663852886e38

Signature = dict[str, Any]  # as JSON: "style", "names", "required" and "takes_any"
ROW, ROWS, LISTS = "row", "rows", "lists"
STYLES = {
    ROW: "called with each response",
    ROWS: "async, called with each response, at most {concurrency} at a time in each process",
    LISTS: "called with all responses to a prompt at once",
}
AS_LISTS = {"prompt": "prompts", "response": "completions"}  # the names of TRL's lists


class InvalidReward(Exception):
    """The function did not return a finite number."""


class LateCall(BaseException):
    """A call has exceeded its limit, in seconds. No Exception, which functions catch."""


def signature_of(function: Callable[..., Any]) -> Signature:
    """A function that names `completions` or `prompts` is called with lists."""
    import inspect  # the workers of data sets of prompts need not wait for it

    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    names = [p.name for p in named]
    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    takes_lists = "response" not in names and not {*AS_LISTS.values()}.isdisjoint(names)
    return {
        "style": LISTS if takes_lists else ROWS if is_async else ROW,
        "names": names,
        "required": [p.name for p in named if p.default is p.empty],
        "takes_any": len(named) < len(parameters),
    }


def taken(signature: Signature, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that a function names, or all with **columns."""
    if missing := [name for name in signature["required"] if name not in columns]:
        raise InvalidReward(
            f"your code asks for `{missing[0]}`: the arguments are {', '.join(columns)}; give "
            "it a default, or name a column of the data"
        )
    names = signature["names"]
    return {key: x for key, x in columns.items() if signature["takes_any"] or key in names}


@lru_cache(1)
def event_loop() -> Any:
    """The process's one loop, which clients in user code may keep, in a thread: that of a
    notebook's cells has another loop."""
    import asyncio  # only here: it delays the start of a worker
    from threading import Thread

    loop = asyncio.new_event_loop()
    Thread(target=loop.run_forever, daemon=True).start()
    return loop


def run_coroutines(coroutines: Sequence[Awaitable[Any]], seconds: float | None) -> list[Any]:
    """Run coroutines at the same time, and return what each returns or raises, or LateCall."""
    import asyncio

    async def settle(one: Awaitable[Any]) -> Any:
        try:
            return await one
        except BaseException as error:  # also a CancelledError that the function raises
            return error

    async def settle_all() -> list[Any]:
        tasks = [asyncio.ensure_future(settle(one)) for one in coroutines]
        _, late = await asyncio.wait(tasks, timeout=seconds)
        values = [LateCall(seconds) if task in late else task.result() for task in tasks]
        for task in late:
            task.cancel()
        return values

    return asyncio.run_coroutine_threadsafe(settle_all(), event_loop()).result()


def awaited(result: Any) -> Any:
    """Return what a function has returned, or its coroutine returns."""
    if isinstance(result, Coroutine):
        [result] = run_coroutines([result], None)
        if isinstance(result, BaseException):
            raise result
    return result


class Caller:
    """Calls a function in its style. seconds: the limit of each async call."""

    BREAKING = ("memory",)  # the kinds of failures after which the worker ends
    live: Mapping[int, Any] = {}  # between calls it keeps nothing

    def __init__(self, function: Callable[..., Any], seconds: float | None) -> None:
        self.signature = signature_of(function)
        self._function, self._seconds = function, seconds

    def call(self, rows: Sequence[dict[str, Any]]) -> list[Outcome]:
        """Return the outcome of each row of a call, or one failure for all."""
        try:
            if self.signature["style"] == LISTS:
                values = list_of(awaited(self._begin(lists_of(rows))), len(rows))
            elif self.signature["style"] == ROWS:
                values = run_coroutines([*map(self._later, rows)], self._seconds)
            else:
                values = [awaited(self._begin(rows[0]))]
        except BaseException as error:
            values = [error]
        return [*map(outcome_of, values)]

    def _begin(self, arguments: dict[str, Any]) -> Any:
        return self._function(**taken(self.signature, arguments))

    async def _later(self, arguments: dict[str, Any]) -> Any:
        return await self._begin(arguments)


def lists_of(rows: Rows) -> dict[str, Any]:
    """Return `prompts`, `completions` and every column as lists. As in TRL, a completion of a chat
    prompt is a list with the assistant's message."""
    columns = dict.fromkeys(key for row in rows for key in row)
    lists = {AS_LISTS.get(key, key): [row.get(key) for row in rows] for key in columns}
    lists["completions"] = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(lists["prompts"], lists["completions"], strict=True)
    ]
    return lists


def list_of(result: Any, count: int) -> list[Any]:
    values = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(values, list | tuple) or len(values) != count:
        raise InvalidReward(
            f"a function of `completions` must return a list with a number for each of the {count} "
            f"completions, got {SHORT_REPR.repr(result)}"
        )
    return [*values]


def outcome_of(value: Any) -> Outcome:
    """Return the outcome of a value that a function has returned, or raised. A dict of components
    has its reward under "reward" or, as verl's, under "score", beside which some may be no numbers;
    else it is their sum. Components that are None or NaN are left out."""
    try:
        if isinstance(value, BaseException):
            raise value
        if not isinstance(value, dict):
            return Outcome(to_number(value, "a reward"))
        own, components = "reward" if "reward" in value else "score", dict[str, float]()
        for name, part in value.items():
            if name == own or "score" not in value or hasattr(part, "__float__"):
                number = to_number(part, f"component {name!r}")
                components |= {} if number is None else {str(name): number}
        if own in value:
            return Outcome(components.pop(own, None), components)
        return Outcome(
            to_number(sum(components.values()) if components else None, "a reward"), components
        )
    except KeyboardInterrupt:  # in the trainer, where it ends the run
        raise
    except InvalidReward as error:
        return failure("invalid", str(error))
    except LateCall as error:
        return failure("timeout", f"the call ran longer than {error.args[0]:g} s")
    except MemoryError:
        return failure("memory", "the call needed more memory than its limit")
    except BaseException as error:
        return failure("exception", describe_error(error))


def to_number(value: Any, what: str) -> float | None:
    """Return a number, or the one element of a tensor or array, which must be finite in float32;
    None and NaN as None."""
    if value is None:
        return None
    try:
        number = (value.item() if hasattr(value, "item") else value).__float__()
    except Exception:  # text, more than one element, or an integer that is too large
        number = math.inf
    if math.isnan(number):
        return None
    if abs(number) <= LARGEST_FLOAT32:
        return number
    given = f"{SHORT_REPR.repr(value)} of type {type(value).__name__}"
    raise InvalidReward(f"{what} must be a finite number of float32, got {given}")
