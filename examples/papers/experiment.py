"""Shared by the experiments: a command line made from the settings, and NAME.json and NAME.png as
results.
"""

import inspect
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torch import Tensor

from maxrl_fast.algorithms.options import options_of
from maxrl_fast.config.help_page import help_row, print_help, split_help
from maxrl_fast.config.read import convert, hint, read_flags
from maxrl_fast.errors import InputError
from maxrl_fast.runtime.device import versions
from maxrl_fast.runtime.files import atomic_file

# not the committed results beside this file, which only --out replaces
RESULTS = Path("runs/papers")
T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """Settings that all experiments share. Each experiment adds its own in a subclass, all with
    defaults.
    """

    seed: int = 0
    """Seed of all random numbers; experiments with several seeds count up from it."""
    threads: int = 2
    """CPU threads."""
    out: Path = RESULTS
    """Folder for the result (NAME.json) and its picture (NAME.png), which are replaced."""


def run(
    name: str,
    settings_type: type[Settings],
    experiment: Callable[[Any], dict[str, Any]],
    draw: Callable[[dict[str, Any]], Figure],
    arguments: Sequence[str] | None = None,
) -> int:
    """Run the command of one experiment: read settings, compute results (JSON values), draw them.

    Return the exit code: 0, 2 for bad input, 130 after Ctrl-C. `experiment` raises InputError for
    settings that make no sense, before any work.
    """
    start = time.perf_counter()
    try:
        settings = read_settings(name, settings_type, arguments)
        if settings.threads < 1:
            raise InputError(f"--threads must be at least 1, got {settings.threads}")
        try:
            settings.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--out must be a folder that can be written: {error}") from None
        torch.set_num_threads(settings.threads)
        results = experiment(settings)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    record = {
        "experiment": name,
        "settings": {key: value for key, value in asdict(settings).items() if key != "out"},
        "seconds": round(time.perf_counter() - start, 1),
        **versions(),
        "results": rounded(results),
    }
    with atomic_file(settings.out / f"{name}.json") as temporary:
        temporary.write_text(as_text(record))
    figure = draw(record)
    FigureCanvasAgg(figure)
    with atomic_file(settings.out / f"{name}.png") as temporary:
        figure.savefig(temporary, dpi=110, format="png")
    print(f"{record['seconds']:.0f} s; written {settings.out / name}.json and .png")
    return 0


def read_settings(
    name: str, settings_type: type[Settings], arguments: Sequence[str] | None
) -> Settings:
    """Return the settings that flags give; --help prints them, and exits."""
    kind: Any = settings_type
    options = options_of(kind)
    words, asks_for_help = split_help(sys.argv[1:] if arguments is None else arguments)
    if asks_for_help:
        rows = [help_row(option) for option in options.values()]
        print_help(f"{name}.py", inspect.getdoc(settings_type) or "", [("options", "", rows)])
    flags = read_flags(words)
    for name, x in flags.items():
        if name not in options:
            raise InputError(f"unknown option {x.name:.80}{hint(name, options)}")
    return settings_type(**{key: convert(options[key], x) for key, x in flags.items()})


def rounded(value: Any) -> Any:
    """Return JSON values: numbers to six significant digits, None for numbers that are not finite,
    lists for tensors.
    """
    if isinstance(value, Tensor):
        return rounded(value.tolist())
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value


def standard_error(values: Tensor) -> Tensor:
    """Return the standard error of the mean over the first dimension, [R, ...] -> [...]; 0 for a
    single value.
    """
    return values.std(0, correction=min(len(values) - 1, 1)) / len(values) ** 0.5


def cell(values: Tensor, digits: int = 3) -> str:
    """Return the mean with its standard error, as a table shows it."""
    return f"{float(values.mean()):.{digits}f} ± {float(standard_error(values)):.{digits}f}"


def as_text(record: dict[str, Any]) -> str:
    """Return JSON with one line per list of numbers."""
    text = json.dumps(record, indent=1, default=str)  # str for a Path
    return re.sub(r"\[[^\[\]{}\"]*\]", lambda numbers: " ".join(numbers[0].split()), text) + "\n"


def tracked(items: Iterable[T], what: str, total: int | None = None) -> Iterable[T]:
    """Yield the items with a progress bar, a count and the remaining time; without a terminal, one
    line at the end.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield from progress.track(items, total=total, description=what)
