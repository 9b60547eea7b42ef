"""What every command does with its arguments and its output."""

import argparse
import contextlib
import errno
import functools
import io
import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import maxrl_fast
from maxrl_fast.errors import InputError


class _LossyFile(io.FileIO):
    """A stream that drops what it cannot write."""

    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):  # a closed pipe, a lost terminal or a full disk
            return super().write(data) or len(data)  # None: a pipe that does not wait is full
        return len(data)


def protect_output() -> None:
    """Let a command finish its work where nobody reads its output. Streams that a caller has
    replaced, as a notebook does, stay."""
    for descriptor, name in (1, "stdout"), (2, "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            file = io.BufferedWriter(_LossyFile(descriptor, "wb", closefd=False))
            lossy = io.TextIOWrapper(file, stream.encoding, "backslashreplace", line_buffering=True)
            setattr(sys, name, lossy)


def command(run: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    """Return the main function of a command, which takes the process's arguments if it is given
    none, and answers --version.
    """

    @functools.wraps(run)
    def main(arguments: Sequence[str] | None = None) -> int:
        protect_output()
        arguments = sys.argv[1:] if arguments is None else arguments
        if "--version" not in arguments:
            try:
                return run(arguments)
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG:
                    raise
                wanted = "a name of a file must have at most 255 bytes"
                print(f"error: {wanted}, got {error.filename!s:.60}...", file=sys.stderr)
                return 2
        print(version_text())
        return 0

    return main


def version_text() -> str:
    own = f"maxrl_fast {maxrl_fast.__version__}"
    try:
        import torch  # imported here: not all commands need torch

        from maxrl_fast import _C
    except ImportError as error:
        return f"{own}, Python {platform.python_version()}\nkernels: not there ({error})"
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return (
        f"{own} (torch {torch.__version__}, {cuda}, Python {platform.python_version()})\n"
        f"kernels: C++ built, CUDA {'built' if _C.cuda else 'not built'}"
    )


class CommandParser(argparse.ArgumentParser):
    """The parser of a small command, which raises InputError in place of printing its usage."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message.removeprefix('argument ')}; --help lists the options")


def write_directly(text: str) -> None:
    """Write to standard error without Python's buffers, as a signal handler must."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
