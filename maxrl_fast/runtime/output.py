"""The commands, their arguments and their output."""

import contextlib
import functools
import io
import platform
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any, NoReturn

import maxrl_fast
from maxrl_fast.errors import InputError, nearest

COMMANDS = {  # what they do
    "train": "train a policy",
    "sweep": "train a grid of options and seeds, one run after another",
    "evaluate": "evaluate a run or a checkpoint",
    "report": "write runs and evaluations as one HTML page",
    "objectives": "list objectives, token losses and corrections, or explain some by name",
}


class _LossyFile(io.FileIO):
    def write(self, data: Any) -> int:
        with contextlib.suppress(OSError):  # a closed pipe, a lost terminal or a full disk
            return super().write(data) or len(data)  # None: a pipe that does not wait is full
        return len(data)


def command(run: Callable[[Sequence[str]], int]) -> Callable[..., int]:
    """Return the main function of a command, which finishes its work where nobody reads its output,
    except in a stream that the caller has replaced."""

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
            parts = f"{maxrl_fast.__version__}, torch {version('torch')}"
            print(f"maxrl_fast {parts}, Python {platform.python_version()}")
            return 0
        except InputError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2

    return main


def show_help(arguments: Sequence[str], text: str) -> None:
    if {"-h", "--help"} & {*arguments}:
        print(text)
        sys.exit(0)


@command
def main(arguments: Sequence[str]) -> int:
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        lines = (f"  {x:<12}{what}" for x, what in COMMANDS.items())
        print("usage: maxrl-fast COMMAND [OPTIONS]\n", *lines, sep="\n")
        print("\nmaxrl-fast COMMAND --help lists the command's options, --version the versions.")
        return 0
    if name not in COMMANDS:
        wanted = f"the command must be one of {', '.join(COMMANDS)}"
        raise InputError(f"{wanted}, got {name}{nearest(name, COMMANDS)}")
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not ignored, as in a background job of a shell
        # the import could swallow an exception that interrupts it
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        run = import_module(f"maxrl_fast.{name}").main
    except ModuleNotFoundError as error:
        raise InputError(
            f"{sys.executable} has no package {error.name}: activate the environment of "
            "`make setup` (source .venv/bin/activate), or run `make setup` first"
        ) from error
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        return int(run(arguments[1:]))
    except KeyboardInterrupt:
        print("error: stopped by Ctrl-C", file=sys.stderr)
        return 130


def run_command(name: str) -> NoReturn:
    """`python -m` of a command's module calls this before imports that may fail or be stopped."""
    sys.exit(main([name, *sys.argv[1:]]))
