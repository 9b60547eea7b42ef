"""User code, reward functions and environments: how it is called, in a worker process, whose side
this is, or in the trainer. Each worker imports this at its start, so it imports little.

Environments are as TRL's `environment_factory` takes them: `reset(**columns)` begins an episode,
every other public method is a tool, and `get_reward()` may end it. An operation is [number of the
environment, word, value]:

    probe columns            reset a new environment and drop it
    start columns            reset a new environment and keep it
    call [name, arguments]   call a tool
    end null                 ask for the reward and drop it

Its outcome has the text that the environment returned, or the reward, and the component
"tool_errors" of a call that raised an error. After a failure the environment is dropped.

A socket carries lines of JSON between `pool.py` and a worker: the arguments of a call, and [whether
the process ends, its outcomes]. The first line is the worker's, and has the signature of what it
has loaded as its text."""

import contextlib
import ctypes
import fcntl
import inspect
import io
import json
import os
import re
import resource
import signal
import socket
import sys
from collections.abc import Callable, Coroutine, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

from maxrl_fast.rewards import InvalidReward, LateCall, Outcome, Rows, failure, outcome_of
from maxrl_fast.runtime.loading import SHORT_REPR, LoadError, describe_error, load

Signature = dict[str, Any]  # as JSON: "style", "names", "required" and "takes_any"
ROW, ROWS, LISTS = "row", "rows", "lists"
STYLES = {
    ROW: "called with each response",
    ROWS: "async, called with each response, at most {concurrency} at a time in each process",
    LISTS: "called with all responses to a prompt at once",
}
AS_LISTS = {"prompt": "prompts", "response": "completions"}  # the names of TRL's lists
RESET, REWARD = "reset", "get_reward"
LONGEST_TEXT = 1 << 20  # characters of a reply; no context is that long
LOST = "the worker process of this environment has ended, in a call of another one"
MEMORY = resource.RLIMIT_DATA  # RLIMIT_AS also counts what is only reserved: 1 GB for 16 threads


def signature_of(function: Callable[..., Any]) -> Signature:
    """A function that names `completions` or `prompts` is called with lists."""
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


def settled(results: list[Any], seconds: float | None) -> list[Any]:
    """Return what functions have returned, or what their coroutines, which run at once, return or
    raise, or LateCall."""
    if not any(isinstance(x, Coroutine) for x in results):
        return results
    import asyncio

    async def settle(result: Any) -> Any:
        try:
            return await result if isinstance(result, Coroutine) else result
        except BaseException as error:  # also a CancelledError that the function raises
            return error

    async def settle_all() -> list[Any]:
        tasks = [asyncio.ensure_future(settle(x)) for x in results]
        _, late = await asyncio.wait(tasks, timeout=seconds)
        values = [LateCall(seconds) if x in late else x.result() for x in tasks]
        for task in late:
            task.cancel()
        return values

    return asyncio.run_coroutine_threadsafe(settle_all(), event_loop()).result()


class Caller:
    """Calls a function in its style. seconds: the limit of each async call."""

    BREAKING: tuple[str, ...] = ("memory",)  # kinds of failures after which the worker ends
    live: Mapping[int, Any] = {}  # what it keeps between calls

    def __init__(self, function: Callable[..., Any], seconds: float | None) -> None:
        self.signature = signature_of(function)
        self._function, self._seconds = function, seconds

    def call(self, rows: Any) -> list[Outcome]:
        """Return the outcome of each row of a call, or one failure for all."""
        if self.signature["style"] != LISTS:
            return [*map(outcome_of, settled([*map(self._begin, rows)], self._seconds))]
        [result] = settled([self._begin(_lists_of(rows))], None)
        if isinstance(result, BaseException):
            return [outcome_of(result)]
        values = result.tolist() if hasattr(result, "tolist") else result
        if isinstance(values, list | tuple) and len(values) == len(rows):
            return [*map(outcome_of, values)]
        wanted = "a function of `completions` must return a list with a number for each of the"
        return [
            failure("invalid", f"{wanted} {len(rows)} completions, got {SHORT_REPR.repr(result)}")
        ]

    def _begin(self, arguments: dict[str, Any]) -> Any:
        try:
            return self._function(**taken(self.signature, arguments))
        except BaseException as error:
            return error


def _lists_of(rows: Rows) -> dict[str, Any]:
    """Return `prompts`, `completions` and every column, which rows of one prompt share, as lists.
    As in TRL, a completion of a chat prompt is a list with the assistant's message."""
    lists = {AS_LISTS.get(key, key): [row[key] for row in rows] for key in rows[0]}
    lists["completions"] = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(lists["prompts"], lists["completions"], strict=True)
    ]
    return lists


def _schema(shown: str, name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils.chat_template_utils import get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(tool)
        names = dict.fromkeys(schema["function"]["parameters"]["properties"])
        for x in inspect.signature(tool).parameters.values():
            if x.kind not in (x.POSITIONAL_OR_KEYWORD, x.KEYWORD_ONLY):
                raise TypeError(f"{x} cannot be passed by its name")
        with contextlib.suppress(ValueError):  # a decorator that is written in C
            inspect.signature(tool, follow_wrapped=False).bind(**names)
    except Exception as error:
        raise LoadError(
            f"the tool {shown} needs a docstring that describes every argument, and type "
            f"hints: {error}; a name with _ in front is no tool"
        ) from error
    schema["function"]["name"] = name
    return schema


class EnvironmentHost(Caller):
    """The environments of one process. SIGALRM ends an operation after some seconds. Its signature
    has how to reset an environment, "tools" (JSON schemas, which transformers makes slowly), and
    "has_reward"."""

    BREAKING = ("memory", "timeout", "exception")
    live: dict[int, Any]  # the environments by number

    def __init__(self, cls: Any, seconds: float | None, with_schemas: bool = True) -> None:
        if not inspect.isclass(cls):
            raise LoadError(f"an environment must be a class, got {SHORT_REPR.repr(cls)}")
        name, methods = cls.__name__, dict[str, Callable[..., Any]]()  # as an instance binds them
        for key, value in inspect.getmembers(cls, callable):
            if not key.startswith("_") and not inspect.isclass(value):
                own = inspect.getattr_static(cls, key)
                methods[key] = own.__get__(object(), cls) if hasattr(own, "__get__") else value
        self._tools = methods.keys() - {RESET, REWARD}
        if RESET not in methods:
            raise LoadError(f"{name} must have a method reset(**columns), which it does not")
        if not self._tools:
            raise LoadError(f"{name} must have a public method besides reset, which is a tool")
        try:
            inspect.signature(cls).bind()
        except (TypeError, ValueError) as error:
            raise LoadError(f"{name}() must need no arguments: {error}") from error
        asked = sorted(self._tools) if with_schemas else []
        self.signature = signature_of(methods[RESET]) | {
            "style": "environment",
            "tools": [_schema(f"{name}.{key}", key, methods[key]) for key in asked],
            "has_reward": REWARD in methods,
        }
        self._function, self._seconds, self.live = cls, seconds, {}
        if seconds is not None:
            signal.signal(signal.SIGALRM, self._stop)

    def _stop(self, *_: object) -> None:
        raise LateCall(self._seconds)

    def call(self, rows: Any) -> list[Outcome]:
        try:
            if self._seconds is not None:
                signal.setitimer(signal.ITIMER_REAL, self._seconds)
            try:
                return [self._operate(*rows)]
            finally:
                if self._seconds is not None:
                    signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException as error:  # also sys.exit
            self.live.pop(rows[0], None)
            return [outcome_of(error)]

    def _operate(self, number: int, word: str, value: Any) -> Outcome:
        if word in ("probe", "start"):
            environment = self._function()
            text = _awaited(environment.reset(**taken(self.signature, value)))
            if text is not None and not isinstance(text, str):
                raise InvalidReward(f"reset must return text or None, got {SHORT_REPR.repr(text)}")
            if word == "start":
                self.live[number] = environment
            return Outcome(text=None if text is None else _as_text(text))
        if number not in self.live:
            return failure("crash", LOST)
        environment = self.live[number]
        if word == "end":
            del self.live[number]
            if not self.signature["has_reward"]:
                return Outcome(0.0)
            return outcome_of(_awaited(environment.get_reward())).or_failure()
        name, arguments = value
        try:
            if name not in self._tools:
                known = ", ".join(sorted(self._tools))
                raise ValueError(f"no tool is called {name!r}; there are {known}")
            if not isinstance(arguments, dict):
                raise ValueError(f"arguments must be a JSON object, got {arguments!r:.80}")
            return Outcome(text=_as_text(_awaited(getattr(environment, name)(**arguments))))
        except (MemoryError, InvalidReward):
            raise
        except Exception as error:
            said = _as_text(describe_error(error, with_place=False))
            return Outcome(None, {"tool_errors": 1.0}, text=said)


def _awaited(result: Any) -> Any:
    [value] = settled([result], None)
    if isinstance(value, BaseException):
        raise value
    return value


def _as_text(value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    if len(text) > LONGEST_TEXT:
        raise InvalidReward(
            f"a reply must have at most {LONGEST_TEXT:,} characters, got {len(text):,}"
        )
    return text.encode(errors="replace").decode()  # half a surrogate pair cannot be encoded


def main(settings: dict[str, Any]) -> None:
    connection = socket.socket(fileno=settings["connection"])
    try:
        contain()
        # programs that the function starts do not inherit it
        os.set_inheritable(connection.fileno(), False)
        lines = connection.makefile("rwb")
        try:
            code, seconds = load(settings["name"]), settings["seconds"]
            host = (
                EnvironmentHost(code, seconds, settings["with_schemas"])
                if settings["is_environment"]
                else Caller(code, seconds)
            )
        except LoadError as error:
            write(lines, True, [failure("crash", str(error))])
            return
        write(lines, False, [Outcome(text=json.dumps(host.signature))])
        limit_memory(settings["memory_bytes"])
        serve(lines, host)
    finally:
        os.killpg(0, signal.SIGKILL)


def write(lines: io.BufferedIOBase, is_last: bool, outcomes: list[Outcome]) -> None:
    lines.write(f"{json.dumps([is_last, outcomes])}\n".encode())
    lines.flush()


def contain() -> None:
    # The kernel kills the process group when the trainer, however it ends, closes standard input, a
    # signal-driven pipe. PR_SET_PDEATHSIG would spare programs that the function has started, and
    # end the worker with the thread that started it. Programs read an empty input.
    pipe = os.dup(0)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, os.O_ASYNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # A scheduler sends these to the whole job, and the trainer ends its workers itself. Not
    # SIG_IGN, which programs that the function starts would inherit.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    with contextlib.suppress(OSError):  # out of memory, the kernel kills a worker, not the trainer
        Path("/proc/self/oom_score_adj").write_text("1000")
    close_memory()  # after oom_score_adj, which only root may write from here on
    # whole lines, which are there if the process is killed
    cast(io.TextIOWrapper, sys.stdout).reconfigure(line_buffering=True)


def close_memory() -> None:
    """Close memory, environment and descriptors of this process to other programs of its user, root
    excepted."""
    with contextlib.suppress(AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE


def limit_memory(size: int) -> None:
    """Limit private writable memory to `size` bytes more than there is now."""
    [used] = re.findall(r"VmData:\s*(\d+) kB", Path("/proc/self/status").read_text())
    limit, hard = int(used) * 1024 + size, resource.getrlimit(MEMORY)[1]
    resource.setrlimit(MEMORY, (limit if hard < 0 else min(limit, hard), hard))


def serve(lines: io.BufferedIOBase, host: Caller) -> None:
    home, own_pid, is_broken = os.open(".", os.O_PATH), os.getpid(), False
    has_servers = has_children()  # which loading has started, and which may go on
    for line in lines:
        outcomes = host.call(json.loads(line))
        if os.getpid() != own_pid:
            os._exit(0)  # a process that the function forked and that returned from it too
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.fchdir(home)
        # What failed calls keep would count against, or break, the next ones. An environment keeps
        # processes while it lives.
        is_broken |= any(outcome.kind in host.BREAKING for outcome in outcomes)
        is_last = not host.live and (is_broken or (not has_servers and has_children()))
        write(lines, is_last, outcomes)
        if is_last:
            return


def has_children() -> bool:
    """Whether children of this process run; those that have ended are reaped."""
    try:
        while os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG):
            pass
    except ChildProcessError:
        return False
    return True
