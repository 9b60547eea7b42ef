"""Errors that end a run with a message instead of a traceback. Whatever reads or checks the user's
input raises InputError where it is wrong; docstrings name only other errors."""

import difflib
import sys
from collections.abc import Iterable


def warn(sentence: str) -> None:
    print(f"warning: {sentence}", file=sys.stderr, flush=True)


def printable(text: object, most: int = 300) -> str:
    """Return a text on one line, without its middle where it is longer than `most`."""
    line = str(text)
    line = line if line.isprintable() else repr(line)
    return line if len(line) <= most else f"{line[: most // 2]}...{line[-most // 2 :]}"


def nearest(word: str, words: Iterable[str]) -> str:
    """Return what may have been meant, for the end of a message, or nothing."""
    begin = [x for x in words if x[:1] == word[:1]]
    close = difflib.get_close_matches(word, begin, n=1, cutoff=0.4)
    return f"; did you mean {close[0]!r}?" if close else ""


class InputError(ValueError):
    """The user's input is invalid; exit code 2. The command adds the lines of the --config file
    that give the options which the message names."""


class UnsupportedModelError(InputError):
    """The native decoder does not have the model of a checkpoint."""


class NonFiniteError(RuntimeError):
    """A loss, gradient or log-probability became NaN or infinite; exit code 1."""

    advice = "A lower --lr or --clip-grad often helps; --dtype float32 rules out rounding."


class TeacherError(NonFiniteError):
    """The same of the reference policy, which is not trained."""

    advice = "--dtype float32 often helps; otherwise another --reference."


class StorageError(RuntimeError):
    """A file of the run could not be written, for example on a full disk; exit code 1."""

    advice = "Free some disk space, or remove what is in the way; then continue with --resume."


class EngineError(RuntimeError):
    """A rollout engine or its server does not answer, or returned nonsense; exit code 1."""

    advice = "Restart the server or fix the engine, then continue with --resume."


class UserCodeError(RuntimeError):
    """Code of the user's has failed; exit code 1, or 2 before the first step."""

    advice = "Fix it, and continue with --resume --allow-changes."

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


class RewardError(RuntimeError):
    """The reward function fails too often or no longer runs; exit code 1."""

    advice = (
        "Fix the reward and continue with --resume --allow-changes, or raise "
        "--max-reward-error-rate and continue with --resume."
    )

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.advice = advice or self.advice


FAILURES = NonFiniteError, RewardError, StorageError, EngineError
