"""The console script `maxrl-fast`, or `python -m maxrl_fast`: one entry for all commands."""

import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from maxrl_fast.errors import nearest
from maxrl_fast.runtime.output import command, write_directly

COMMANDS = {  # name: (module, what it does); a module is imported only when its command is called
    "train": ("maxrl_fast.train", "train a policy"),
    "sweep": ("maxrl_fast.sweep", "train a grid of options and seeds, one run after another"),
    "evaluate": ("maxrl_fast.evaluate", "evaluate a run or a checkpoint"),
    "report": ("maxrl_fast.report.command", "write runs and evaluations as one HTML page"),
    "objectives": (
        "maxrl_fast.objectives",
        "list objectives, token losses and corrections, or explain some by name",
    ),
}
USAGE = "\n".join(
    [
        "usage: maxrl-fast COMMAND [OPTIONS]\n",
        *(f"  {name:<12}{what}" for name, (_, what) in COMMANDS.items()),
        "\nmaxrl-fast COMMAND --help lists the command's options.",
        "maxrl-fast --version prints the versions.",
    ]
)


@command
def main(arguments: Sequence[str]) -> int:
    """Run the command that the first argument names, or print the commands. Return its exit code,
    2 for an unknown command or a missing package, 130 on Ctrl-C."""
    name = arguments[0] if arguments else "--help"
    if name in ("-h", "--help"):
        print(USAGE)
        return 0
    if name not in COMMANDS:
        return _refuse(
            "the command must be train, sweep, evaluate, report or objectives, got "
            f"{name}{nearest(name, COMMANDS)}"
        )
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # not ignored, as in a background job of a shell
        signal.signal(signal.SIGINT, _stop)
    try:
        run: Callable[[Sequence[str]], int] = import_module(COMMANDS[name][0]).main
    except ModuleNotFoundError as error:
        return _refuse(
            f"{sys.executable} has no package {error.name}: activate the environment of "
            "`make setup` (source .venv/bin/activate), or run `make setup` first"
        )
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        return run(arguments[1:])
    except KeyboardInterrupt:
        return _refuse("stopped by Ctrl-C", 130)


def run_command(name: str) -> NoReturn:
    """`python -m` of a command's module calls this before imports that may fail or be stopped."""
    sys.exit(main([name, *sys.argv[1:]]))


def _refuse(sentence: str, code: int = 2) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return code


def _stop(number: int, frame: object) -> None:
    """End at once: an exception could be swallowed by an import that it interrupts."""
    write_directly("error: stopped by Ctrl-C before the command started\n")
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
