"""The command `python -m maxrl_fast.report`."""

from collections.abc import Sequence
from pathlib import Path

from maxrl_fast.errors import InputError, printable
from maxrl_fast.job.screen import Screen
from maxrl_fast.report.page import render
from maxrl_fast.report.reading import read_folder
from maxrl_fast.runtime.files import atomic_file
from maxrl_fast.runtime.output import CommandParser, command

MOST_RUNS = 24


@command
def main(arguments: Sequence[str]) -> int:
    """Write the page. Return 0, 1 if writing fails, or 2 on bad input."""
    screen = Screen()
    parser = CommandParser(
        prog="python -m maxrl_fast.report",
        description="Show runs and evaluations as one web page: curves, pass@k, weights, samples "
        "with their rewards. The page is a single file that needs no network: open it in any "
        "browser, send it, or keep it with the run. It can be made while a run is in progress.",
        epilog="Example: python -m maxrl_fast.report runs/maxpo runs/grpo --out compared.html",
    )
    parser.add_argument(
        "runs",
        nargs="*",
        type=Path,
        metavar="RUN",
        help="1 to 24 folders of training runs (OUT of `python -m maxrl_fast.train`) or of "
        "evaluations (of `python -m maxrl_fast.evaluate`), drawn on the same axes",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="FILE.html",
        help="the file to write; an existing file is replaced (default: %(default)s)",
    )
    try:
        options = parser.parse_args(arguments)
        paths, out = options.runs, options.out
        if not 1 <= len(paths) <= MOST_RUNS:
            raise InputError(f"RUN must be 1 to {MOST_RUNS} folders, got {len(paths)}")
        if out.suffix != ".html":  # a typing error must not replace a run's log
            raise InputError(f"--out must be a file that ends in .html, got {printable(out)}")
        names = [path.absolute().name for path in paths]
        folders = [
            read_folder(path, name if names.count(name) == 1 else str(path))
            for path, name in zip(paths, names, strict=True)
        ]
        with atomic_file(out) as temporary:
            temporary.write_text(render(folders), encoding="utf-8")
    except InputError as error:
        screen.error(str(error))
        return 2
    except OSError as error:
        screen.error(f"cannot write --out {printable(out)}: {error}")
        return 1
    for folder in folders:
        for note in folder.notes:
            screen.warning(f"{printable(folder.name)}: {note}")
    screen.info(f"report {out}")
    return 0
