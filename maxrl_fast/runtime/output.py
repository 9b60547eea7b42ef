"""What every command does with its arguments and its output: a closed pipe, a lost terminal or a
full disk does not stop it.
"""

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

_STREAMS = {1: ("stdout", "standard output"), 2: ("stderr", "standard error")}  # by descriptor


class _LossyFile(io.FileIO):
    """A file that drops what it cannot write and keeps the first error for `take_errors`."""

    def __init__(self, descriptor: int):
        super().__init__(descriptor, "wb", closefd=False)
        self.has_failed = False
        self.untold: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError as error:
            if not self.has_failed:
                self.has_failed, self.untold = True, error
            return len(data)
        return len(data) if written is None else written  # None: a non-blocking pipe is full


_files: list[_LossyFile] = []  # this process's protected streams


def protect_output() -> None:
    """Make sys.stdout and sys.stderr drop what cannot be written instead of raising, also at
    interpreter exit.

    Later writes are tried again. Characters that the encoding lacks are escaped. Streams that a
    caller has replaced, such as a notebook's, are left alone.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        # closed: the next file opened would get this number, and receive error messages
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    for descriptor, (name, _) in _STREAMS.items():
        stream: Any = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        _files.append(_LossyFile(descriptor))
        # AttributeError: None, if the descriptor was closed
        with contextlib.suppress(OSError, AttributeError):
            stream.flush()
        wrapped = io.TextIOWrapper(
            io.BufferedWriter(_files[-1]),
            encoding=getattr(stream, "encoding", "utf-8"),
            errors="backslashreplace",
            line_buffering=stream is None or stream.line_buffering or stream.write_through,
        )
        setattr(sys, name, wrapped)


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
    try:
        import torch  # imported here: not all commands need torch
    except ModuleNotFoundError:
        return f"maxrl_fast {maxrl_fast.__version__} (without PyTorch)"
    try:
        from maxrl_fast import _C
    except ImportError as error:
        kernels = f"not built ({error})"
    else:
        kernels = f"C++ built, CUDA {'built' if _C.cuda else 'not built'}"
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    return (
        f"maxrl_fast {maxrl_fast.__version__} (torch {torch.__version__}, {cuda}, Python "
        f"{platform.python_version()})\nkernels: {kernels}"
    )


class CommandParser(argparse.ArgumentParser):
    """The parser of a small command, which raises InputError in place of printing its usage."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message.removeprefix('argument ')}; --help lists the options")


def take_errors() -> list[tuple[str, OSError]]:
    """Return (stream name, first error) of each protected stream with a new error."""
    taken = []
    for file in _files:
        if file.untold is not None:
            taken.append((_STREAMS[file.fileno()][1], file.untold))
            file.untold = None
    return taken


def write_directly(text: str) -> None:
    """Write to standard error without Python's buffers, as a signal handler must."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
