"""Environments, classes as TRL's `environment_factory` takes them: `reset(**columns)` begins an
episode, every other public method is a tool, and `get_reward()` may end it. An operation is [number
of the environment, word, value]:

    probe columns            reset a new environment and drop it
    start columns            reset a new environment and keep it
    call [name, arguments]   call a tool
    end null                 ask for the reward and drop it

Its outcome has the text that the environment returned, or the reward, and the component
"tool_errors" of a call that raised an error. After a failure the environment is dropped.
"""

import contextlib
import signal
from collections.abc import Callable
from typing import Any

from maxrl_fast.rewards import Outcome, failure
from maxrl_fast.rewards.function import (
    InvalidReward,
    LateCall,
    Signature,
    awaited,
    outcome_of,
    signature_of,
    taken,
)
from maxrl_fast.runtime.loading import SHORT_REPR, LoadError, describe_error

ENVIRONMENT = "environment"  # the style of its signature
RESET, REWARD = "reset", "get_reward"
LONGEST_TEXT = 1 << 20  # characters of a reply; no context is that long
LOST = "the worker process of this environment has ended, in a call of another one"

Operation = tuple[int, str, Any]


def signature_of_environment(cls: Any, with_schemas: bool = True) -> Signature:
    """Return how to reset the environments of a class, "tools" (JSON schemas, which transformers
    makes slowly, or only names) and "has_reward". LoadError if it is not such a class."""
    import inspect

    if not inspect.isclass(cls):
        raise LoadError(f"an environment must be a class, got {SHORT_REPR.repr(cls)}")
    name, methods = cls.__name__, dict[str, Callable[..., Any]]()  # as an instance binds them
    for key, value in inspect.getmembers(cls, callable):
        if not key.startswith("_") and not inspect.isclass(value):
            static = inspect.getattr_static(cls, key)
            methods[key] = static.__get__(object(), cls) if hasattr(static, "__get__") else value
    tools = [key for key in methods if key not in (RESET, REWARD)]
    if RESET not in methods:
        raise LoadError(f"{name} must have a method reset(**columns), which it does not")
    if not tools:
        raise LoadError(f"{name} must have a public method besides reset, which is a tool")
    try:
        inspect.signature(cls).bind()
    except (TypeError, ValueError) as error:
        raise LoadError(f"{name}() must need no arguments: {error}") from error
    return {
        **signature_of(methods[RESET]),
        "style": ENVIRONMENT,
        "tools": [
            _schema(name, key, methods[key]) if with_schemas else {"function": {"name": key}}
            for key in tools
        ],
        "has_reward": REWARD in methods,
    }


def _schema(owner: str, name: str, tool: Callable[..., Any]) -> dict[str, Any]:
    import inspect

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
        needed = "a docstring that describes every argument, and type hints"
        why = f"{error}; a name with _ in front is no tool"
        raise LoadError(f"the tool {owner}.{name} needs {needed}: {why}") from error
    schema["function"]["name"] = name
    return schema


class EnvironmentHost:
    """The environments of one process. SIGALRM ends an operation after some seconds."""

    BREAKING = ("memory", "timeout", "exception")  # see Caller

    def __init__(self, cls: Any, seconds: float | None, with_schemas: bool = True) -> None:
        self.signature = signature_of_environment(cls, with_schemas)
        self._class, self._seconds = cls, seconds
        self._tools = [tool["function"]["name"] for tool in self.signature["tools"]]
        self.live = dict[int, Any]()  # the environments by number
        if seconds is not None:
            signal.signal(signal.SIGALRM, self._stop)

    def _stop(self, *_: object) -> None:
        raise LateCall(self._seconds)

    def call(self, operation: Operation) -> list[Outcome]:
        try:
            if self._seconds is not None:
                signal.setitimer(signal.ITIMER_REAL, self._seconds)
            try:
                return [self._operate(*operation)]
            finally:
                if self._seconds is not None:
                    signal.setitimer(signal.ITIMER_REAL, 0)
        except BaseException as error:  # also sys.exit
            self.live.pop(operation[0], None)
            return [outcome_of(error)]

    def _operate(self, number: int, word: str, value: Any) -> Outcome:
        if word in ("probe", "start"):
            environment = self._class()
            columns = taken(self.signature, value)
            text = awaited(getattr(environment, RESET)(**columns))
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
            return outcome_of(awaited(getattr(environment, REWARD)())).or_failure()
        name, arguments = value
        try:
            if name not in self._tools:
                raise ValueError(f"no tool is called {name!r}; there are {', '.join(self._tools)}")
            if not isinstance(arguments, dict):
                raise ValueError(f"arguments must be a JSON object, got {arguments!r:.80}")
            return Outcome(text=_as_text(awaited(getattr(environment, name)(**arguments))))
        except (MemoryError, InvalidReward):
            raise
        except Exception as error:
            said = _as_text(describe_error(error, with_place=False))
            return Outcome(None, {"tool_errors": 1.0}, text=said)


def _as_text(value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    if len(text) > LONGEST_TEXT:
        raise InvalidReward(
            f"a reply must have at most {LONGEST_TEXT:,} characters, got {len(text):,}"
        )
    return text.encode(errors="replace").decode()  # half a surrogate pair cannot be encoded
