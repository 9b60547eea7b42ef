"""How a user's reward function is called, and what it may return: in a worker or in the trainer.

The parameters' names say how it is called (`signature_of`). A result is a dict of JSON: {"reward":
x}, with "components" if the function returned a dict, or {"kind": ..., "message": ...} for a
failure. A reward of None does not apply to its response. Each worker imports this module at its
start, so it imports only a few standard modules.
"""

import contextlib
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

from maxrl_fast.rewards import Rows
from maxrl_fast.runtime.loading import SHORT_REPR, describe_error

MOST_COMPONENTS, NAME_LENGTH = 32, 100  # of one result; characters of a component's name
LARGEST_FLOAT32 = 3.4028234663852886e38

Result = dict[str, Any]
Signature = dict[str, Any]  # as JSON: "style", "names", "required" and "takes_any"
RAW = "response_raw"
CUT = "response truncated"  # of a row: whether the length limit ended the response
ROW = "row"  # f(prompt, response, **columns) -> number
ROWS = "rows"  # async def f(prompt, response, **columns) -> number: several run at a time
# f(completions, prompts, **columns) -> list of numbers, for all responses to a prompt
BATCH = "batch"
STYLES = {
    ROW: "called with each response",
    ROWS: "async, called with each response, at most {concurrency} at a time in each process",
    BATCH: "called with all responses to a prompt at once",
}
OF_BATCHES = ("completions", "responses", "prompts")
# What other trainers and other people call the arguments.
RENAMED = {
    **dict.fromkeys(
        ("completion", "solution_str", "solution", "output", "generation", "generated", "text"),
        "response",
    ),
    **dict.fromkeys(("prompt_str", "input", "query", "question", "instruction"), "prompt"),
}
NOT_GIVEN = (
    "completion_ids",
    "completions_ids",
    "prompt_ids",
    "trainer_state",
    "log_extra",
    "log_metric",
    "extra_info",
)


class InvalidReward(Exception):
    """The function did not return a finite number. The message says what it returned."""


def signature_of(function: Callable[..., Any]) -> Signature:
    """Return how to call a function: one that names `response` with each response, one that names
    `completions`, `responses` or `prompts` with lists.
    """
    import inspect  # the workers of data sets of prompts need not wait for it

    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except (TypeError, ValueError):  # written in C
        return {"style": ROW, "names": [], "required": [], "takes_any": True}
    named = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    names = [p.name for p in named]
    is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
    takes_lists = "response" not in names and any(name in names for name in OF_BATCHES)
    return {
        "style": BATCH if takes_lists else ROWS if is_async else ROW,
        "names": names,
        "required": [p.name for p in named if p.default is p.empty],
        "takes_any": any(p.kind is p.VAR_KEYWORD for p in parameters),
    }


def calls_for(
    signature: Signature, rows: Rows, group: int, concurrency: int
) -> list[tuple[range, Any]]:
    """Return the calls for these rows, each with the indices of its rows and its arguments by name;
    those of an async function of single responses are a list.
    """
    style = signature["style"]
    rows = [given_of(signature, row) for row in rows]
    size = {ROW: 1, ROWS: concurrency, BATCH: group}[style]
    calls = []
    for start in range(0, len(rows), size):
        part = rows[start : start + size]
        arguments = (
            part[0] if style == ROW else part if style == ROWS else batch_arguments(part, signature)
        )
        calls.append((range(start, start + len(part)), arguments))
    return calls


def given_of(signature: Signature, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a function gets of a row: `truncated` if it has this parameter and the data no
    such column."""
    own = {key: x for key, x in row.items() if key != RAW or takes_raw(signature)}
    truncated = own.pop(CUT, None)
    if truncated is not None and "truncated" in signature["names"]:
        own.setdefault("truncated", truncated)
    return own


def takes_raw(signature: Signature) -> bool:
    """Return whether a function gets the response with its special tokens too, by this name or in
    **columns."""
    return signature["takes_any"] or RAW in signature["names"]


def batch_arguments(rows: Sequence[Mapping[str, Any]], signature: Signature) -> dict[str, Any]:
    """Return the arguments of a function of lists: `prompts`, every column, and `completions`, or
    `responses` if it names them.

    As in TRL, a completion of a chat prompt is a list with the assistant's message. Responses are
    always text.
    """
    columns = dict.fromkeys(key for row in rows for key in row if key not in ("prompt", "response"))
    arguments = {key: [row.get(key) for row in rows] for key in columns}
    arguments["prompts"] = [row["prompt"] for row in rows]
    if "responses" in signature["names"]:
        arguments["responses"] = [row["response"] for row in rows]
    if "completions" in signature["names"] or "responses" not in signature["names"]:
        arguments["completions"] = [
            row["response"]
            if isinstance(row["prompt"], str)
            else [{"role": "assistant", "content": row["response"]}]
            for row in rows
        ]
    return arguments


def mismatch(signature: Signature, row: Mapping[str, Any]) -> str:
    """Return a sentence on the first parameter that does not fit a row, or ""."""
    given = [*(batch_arguments([row], signature) if signature["style"] == BATCH else row)]
    extra = [name for name in given if name not in signature["names"]]
    for name in signature["required"]:
        if name not in given and {"solution_str", "ground_truth"} <= {*signature["names"]}:
            return (
                "your function has verl's arguments: take `response` for solution_str, and for the "
                f"others columns of the data ({', '.join(given)}) or none"
            )
        if name not in given:
            return f"your function asks for `{name}`: {_fix(name, given, extra)}"
    if extra and not signature["takes_any"]:
        return (
            f"your function does not take `{extra[0]}`: add **columns to its parameters, which "
            "collects what they do not name"
        )
    return ""


def _fix(name: str, given: Sequence[str], extra: Sequence[str]) -> str:
    """Return the nearest fix. A new name must be one of `extra`, which the function lacks."""
    if (own := RENAMED.get(name)) in extra:
        return f"rename it to `{own}`"
    if (one := name.removesuffix("s")) in extra:
        return f"rename it to `{one}`, or ask for `completions` and return a list"
    if name == "environments":
        return "environments live in other processes; return the reward from their get_reward(self)"
    if name in NOT_GIVEN:
        return "this trainer does not give it; leave it out, or give it a default"
    close = get_close_matches(name, extra, n=1, cutoff=0.5)
    nearest = f"did you mean `{close[0]}`? " if close else ""
    return (
        f"{nearest}the arguments are {', '.join(given)}; give it a default, or name a column of "
        "the data"
    )


@lru_cache(1)
def event_loop() -> Any:
    """Return the event loop of this process, which clients in user code may keep."""
    import asyncio  # only here: it delays the start of a worker

    return asyncio.new_event_loop()


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Return what a coroutine returns."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    task = event_loop().create_task(coroutine)
    try:
        if asyncio._get_running_loop() is None:
            return event_loop().run_until_complete(task)
        # the thread of a notebook's cells has a loop that runs, and can have no other
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(event_loop().run_until_complete, task).result()
    finally:
        task.cancel()  # where it is late, so that the next run of the loop ends it


class Caller:
    """Calls a function in its style, which its `signature` says.

    Args:
        file: whose lines errors name.
        time_limit: seconds of each async call; None: no limit.
        is_optional: whether None and NaN mean that the function does not apply to a response;
            otherwise they are failures.
    """

    is_idle = True  # between calls it keeps nothing
    BREAKING = ("memory",)  # the kinds of failures after which the worker ends when it is idle

    def __init__(
        self, function: Callable[..., Any], file: str, time_limit: float | None, is_optional: bool
    ) -> None:
        self.signature = signature_of(function)
        self._function, self._file, self._style = function, file, self.signature["style"]
        self._time_limit, self._is_optional = time_limit, is_optional

    def drop(self) -> None:
        """Do nothing: between calls it keeps nothing."""

    def call(self, arguments: Any) -> list[Result]:
        """Return the result for each response of a call, or one failure for all."""
        try:
            if self._style == ROW:
                return [result_of(self._function(**arguments), self._is_optional)]
            if self._style == ROWS:
                return run_coroutine(self._call_rows(arguments))
            result = self._function(**arguments)
            if isinstance(result, Coroutine):
                result = run_coroutine(result)
            return self._split(result, len(arguments["prompts"]))
        except KeyboardInterrupt:  # in the trainer, where it ends the run
            raise
        except BaseException as error:
            return [failure_of(error, self._file)]

    async def _call_rows(self, rows: list[dict[str, Any]]) -> list[Result]:
        """Call an async function for all rows at the same time. Each has the time limit for
        itself.
        """
        import asyncio

        async def call(row: dict[str, Any]) -> Result:
            try:
                return result_of(await self._function(**row), self._is_optional)
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # also a CancelledError that the function raises
                return failure_of(error, self._file)

        tasks = [asyncio.ensure_future(call(row)) for row in rows]
        done, pending = await asyncio.wait(tasks, timeout=self._time_limit)
        for task in pending:
            task.cancel()
        return [task.result() if task in done else late(self._time_limit or 0.0) for task in tasks]

    def _split(self, result: Any, count: int) -> list[Result]:
        """Return the result for each response of a function's list.

        Raises:
            InvalidReward: if it is not a list with `count` items.
        """
        listed = result.tolist() if hasattr(result, "tolist") else result
        is_list = isinstance(listed, (list, tuple))
        if not is_list or len(listed) != count:
            given = f"a list of {len(listed)}" if is_list else SHORT_REPR.repr(result)
            raise InvalidReward(
                "a function of `completions` must return a list with a number for each of the "
                f"{count} completions, got {given}"
            )
        return [result_of(item, self._is_optional) for item in listed]


def result_of(value: Any, is_optional: bool = False) -> Result:
    """Return what was given for a response as a result: a finite float32, or a failure of kind
    "invalid" with its reason.

    A dict of components has its reward under "reward" or, as verl's, under "score", beside which
    some may be no numbers; else it is their sum. Components that are None or NaN are left out. An
    optional reward that is None or NaN does not apply.
    """
    try:
        return _reward_of(value, is_optional)
    except InvalidReward as error:
        return failure_of(error)


def _reward_of(result: Any, is_optional: bool) -> Result:
    if not isinstance(result, dict):
        value = to_number(result)
        if value is None and not is_optional:
            none = _NO_NUMBER.format("None", "NoneType")
            raise InvalidReward(none if result is None else _NOT_FINITE.format("nan"))
        return {"reward": value}
    if len(result) > MOST_COMPONENTS or not all(
        isinstance(name, str) and len(name) <= NAME_LENGTH for name in result
    ):
        raise InvalidReward(
            f"a dict of components must have at most {MOST_COMPONENTS} names of at most "
            f"{NAME_LENGTH} characters, "
            f"got {SHORT_REPR.repr(result)}"
        )
    own = "reward" if "reward" in result else "score"
    values = {
        name: to_number(value, f"component {name!r}: ")
        for name, value in result.items()
        if name == own or "score" not in result or hasattr(value, "__float__")
    }
    components = {name: value for name, value in values.items() if value is not None}
    if own in values:
        reward = components.pop(own, None)
    else:
        reward = to_number(sum(components.values()), "the sum of the components: ")
        reward = reward if components else None
    if reward is None and not is_optional:
        raise InvalidReward(
            f"a dict of components must have a reward, got {SHORT_REPR.repr(result)}"
        )
    return {"reward": reward, "components": components}


_NO_NUMBER = "a reward must be a number, got {} of type {}"
_NOT_FINITE = "a reward must be a finite number of float32, got {}"


def to_number(result: Any, where: str = "") -> float | None:
    """Return what float() takes, but no text, or a tensor or array of one element, as a float;
    None and NaN as None.

    Raises:
        InvalidReward: if it is anything else, or not finite in float32.
    """
    value = result
    if not isinstance(result, (int, float)) and hasattr(result, "item"):
        # it has more than one element
        with contextlib.suppress(TypeError, ValueError, RuntimeError):
            value = result.item()
    if value is None:
        return None
    try:
        number = value.__float__()
    except OverflowError:
        raise InvalidReward(where + _NOT_FINITE.format("an integer that is too large")) from None
    except Exception:  # it has none, or more than one element
        text = _NO_NUMBER.format(SHORT_REPR.repr(result), type(result).__name__)
        raise InvalidReward(where + text) from None
    if math.isnan(number):
        return None
    if not abs(number) <= LARGEST_FLOAT32:
        raise InvalidReward(where + _NOT_FINITE.format(number))
    return number


def late(seconds: float, place: str = "") -> Result:
    """Return the failure of a call that exceeds its time limit."""
    return {"kind": "timeout", "message": f"the call ran longer than {seconds:g} s{place}"}


def failure_of(error: BaseException, file: str = "") -> Result:
    """Return the kind and message of a failure as a result."""
    if isinstance(error, InvalidReward):
        return {"kind": "invalid", "message": str(error)}
    if isinstance(error, MemoryError):
        return {"kind": "memory", "message": "the call needed more memory than its limit"}
    return {"kind": "exception", "message": describe_error(error, file)}
