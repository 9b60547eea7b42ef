"""The console script `maxrl-fast`, or `python -m maxrl_fast`: one entry for all commands."""

import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from maxrl_fast.errors import InputError, nearest
from maxrl_fast.runtime.output import command

COMMANDS = {  # what they do
    "train": "train a policy",
    "sweep": "train a grid of options and seeds, one run after another",
    "evaluate": "evaluate a run or a checkpoint",
    "report": "write runs and evaluations as one HTML page",
    "objectives": "list objectives, token losses and corrections, or explain some by name",
}


@command
def main(arguments: Sequence[str]) -> int:
    """Run the command that the first argument names, or print the commands. Return its exit code,
    or 130 on Ctrl-C."""
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        lines = (f"  {name:<12}{what}" for name, what in COMMANDS.items())
        print("usage: maxrl-fast COMMAND [OPTIONS]\n", *lines, sep="\n")
        print("\nmaxrl-fast COMMAND --help lists the command's options, --version the versions.")
        return 0
    if name not in COMMANDS:
        wanted = "the command must be train, sweep, evaluate, report or objectives"
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


if __name__ == "__main__":
    sys.exit(main())
