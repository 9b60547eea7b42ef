"""What every command does with its arguments and its output."""

import argparse
import contextlib
import functools
import io
import platform
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, NoReturn

import maxrl_fast
from maxrl_fast.errors import InputError


class _LossyFile(io.FileIO):
    """A stream that drops what it cannot write."""

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):  # a closed pipe, a lost terminal or a full disk
            return super().write(data) or len(data)  # None: a pipe that does not wait is full
        return len(data)


def command(run: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    """Return the main function of a command, which takes the process's arguments if it is given
    none. It finishes its work where nobody reads its output, except into a stream that the caller
    has replaced, as a notebook does."""

    @functools.wraps(run)
    def main(arguments: Sequence[str] | None = None) -> int:
        for name in ("stdout", "stderr"):
            if (stream := getattr(sys, name)) and stream is getattr(sys, f"__{name}__"):
                file = io.BufferedWriter(_LossyFile(stream.fileno(), "wb", closefd=False))
                lossy = io.TextIOWrapper(file, stream.encoding, "backslashreplace", None, True)
                setattr(sys, name, lossy)
        arguments = sys.argv[1:] if arguments is None else arguments
        try:
            if "--version" not in arguments:
                return run(arguments)
            parts = f"torch {version('torch')}, Python {platform.python_version()}"
            print(f"maxrl_fast {maxrl_fast.__version__}, {parts}")
            return 0
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    return main


class CommandParser(argparse.ArgumentParser):
    """The parser of a small command, which raises InputError in place of printing its usage."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message.removeprefix('argument ')}; --help lists the options")
