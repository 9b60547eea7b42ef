"""From the flags of a sweep to the runs of its grid."""

import itertools
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from maxrl_fast.config.checks import check
from maxrl_fast.config.metadata import options_of
from maxrl_fast.config.options import Config
from maxrl_fast.config.parse import parse
from maxrl_fast.errors import InputError


@dataclass(frozen=True)
class Run:
    """A run of the grid."""

    group: str  # its name without the seed; runs of one group are averaged
    folder: Path
    command: list[str]
    config: Config


def values_of(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return the values of every option by name."""
    options: dict[str, list[str]] = {}
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not argument.startswith("--"):
            if not options:
                raise InputError(f"a sweep takes --option VALUE [VALUE ...], got {argument}")
            options[list(options)[-1]].append(argument)
        elif name in options:
            raise InputError(f"{flag} must be given once, with all its values after it")
        elif name in ("resume", "allow_changes"):
            raise InputError(f"a sweep does not use {flag}: the same command resumes it")
        else:
            options[name] = [value] if equals else []
    return options


def _words(flag: str, values: list[str]) -> list[str]:
    """Return the words of an option in a command; a value like "-- think" would be an option as a
    separate word.
    """
    return (
        [f"{flag}={values[0]}"]
        if len(values) == 1 and values[0].startswith("-")
        else [flag, *values]
    )


def sweep_grid(options: dict[str, list[str]], out: Path) -> list[Run]:
    """Return the runs of all combinations of values, the seeds of one combination one after
    another.
    """
    several = {option.name for option in options_of(Config).values() if option.takes_several}
    sides = [name for name, values in options.items() if len(values) > 1 and name not in several]
    sides.sort(key=lambda name: name == "seed")
    runs: dict[Path, Run] = {}
    for values in itertools.product(*(options[name] for name in sides)):
        chosen = options | {name: [value] for name, value in zip(sides, values, strict=True)}
        arguments = [
            word
            for name, texts in chosen.items()
            for word in _words(f"--{name.replace('_', '-')}", texts)
        ]
        try:
            config = parse(arguments)
            check(config)
            if config.run.dry_run is not None or config.run.resume is not None:
                raise InputError("the file of --config must not have dry_run or resume")
        except InputError as error:
            said = ", ".join(f"{name} {value}" for name, value in zip(sides, values, strict=True))
            raise InputError(f"the run of {said}: {error}" if said else str(error)) from error
        if any(run.config == config for run in runs.values()):  # 1e-4 and 0.0001
            continue
        parts = [config.objective.short_name]
        for name in sides:
            if name not in ("objective", "seed"):
                parts.append(f"{name.replace('_', '-')}-{chosen[name][0].strip('/')}")
        group = "_".join(re.sub(r"[^\w.+-]+", "-", part) for part in parts)
        folder = out / f"{group}_seed-{config.run.seed}"
        if folder in runs:
            raise InputError(
                f"the folder {folder} is of two runs of the grid: give every value once, under its "
                "own name"
            )
        command = [sys.executable, "-m", "maxrl_fast.train", *arguments]
        command += ["--out", str(folder), "--resume", "auto"]
        runs[folder] = Run(group, folder, command, config)
    return list(runs.values())
