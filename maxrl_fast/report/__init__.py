"""Shows runs as one web page, whose style and scripts are in `page/`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from maxrl_fast.errors import InputError, printable, warn
from maxrl_fast.report.page import read_folder, render
from maxrl_fast.runtime.files import atomic_file
from maxrl_fast.runtime.output import command, show_help

MOST_RUNS = 24
HELP = """usage: python -m maxrl_fast.report RUN ... [--out FILE.html]

Show 1 to 24 folders of training runs (OUT of maxrl_fast.train) or of evaluations (of
maxrl_fast.evaluate) as one web page: curves, pass@k, weights, samples with rewards, in a single
file that needs no network. An existing FILE.html (default: report.html) is replaced."""


@command
def main(arguments: Sequence[str]) -> int:
    show_help(arguments, HELP)
    words = [part for word in arguments for part in word.split("=", word.startswith("--out="))]
    out = Path("report.html")
    if "--out" in words[:-1]:
        at = words.index("--out")
        out = Path(words.pop(at + 1))
        del words[at]
    if wrong := [word for word in words if word.startswith("-")]:
        raise InputError(f"the options are --out FILE.html and --help, got {wrong[0]:.80}")
    paths = [*map(Path, words)]
    if not 1 <= len(paths) <= MOST_RUNS:
        raise InputError(f"RUN must be 1 to {MOST_RUNS} folders, got {len(paths)}")
    if out.suffix != ".html":  # a typing error must not replace a run's log
        raise InputError(f"--out must be a file that ends in .html, got {printable(out)}")
    names = [path.absolute().name for path in paths]
    folders = [
        read_folder(path, name if names.count(name) == 1 else str(path))
        for path, name in zip(paths, names, strict=True)
    ]
    try:
        with atomic_file(out) as temporary:
            temporary.write_text(render(folders), encoding="utf-8")
    except OSError as error:
        print(f"error: cannot write --out {printable(out)}: {error}", file=sys.stderr)
        return 1
    for folder in folders:
        for note in folder.notes:
            warn(f"{printable(folder.name)}: {note}")
    print(f"report {out}")
    return 0


__all__ = ["main"]
