"""The console script `maxrl-fast`, or `python -m maxrl_fast`: one entry for all commands."""

import sys
from collections.abc import Sequence
from importlib import import_module

from maxrl_fast.runtime.output import protect_output
from maxrl_fast.runtime.version import FLAG, version_text

COMMANDS = {  # name: (module, what it does); a module is imported only when its command is called
    "train": ("maxrl_fast.train", "train a policy"),
    "sweep": ("maxrl_fast.sweep", "train a grid of options and seeds, one run after another"),
    "evaluate": ("maxrl_fast.evaluate", "evaluate a run or a checkpoint"),
    "report": ("maxrl_fast.report.command", "write runs and evaluations as one HTML page"),
    "objectives": (
        "maxrl_fast.objectives",
        "print objectives, token losses and corrections, and the weights of estimators",
    ),
}
USAGE = "usage: maxrl-fast COMMAND [OPTIONS]\n\n" + "\n".join(
    f"  {name:<12}{what}" for name, (_, what) in COMMANDS.items()
)
USAGE += (
    "\n\nmaxrl-fast COMMAND --help lists the command's options.\nmaxrl-fast --version prints the "
    "versions."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names. Return its exit code, or 2 for an unknown
    command.
    """
    protect_output()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    name = arguments[0] if arguments else "none"
    if name in ("-h", "--help"):
        print(USAGE)
        return 0
    if name == FLAG:
        print(version_text())
        return 0
    if name not in COMMANDS:
        print(
            f"error: the command must be train, sweep, evaluate, report or objectives, got {name}",
            file=sys.stderr,
        )
        return 2
    code: int = import_module(COMMANDS[name][0]).main(arguments[1:])
    return code


if __name__ == "__main__":
    sys.exit(main())
