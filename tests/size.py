"""Prints the bytes of what is kept here beside their budgets, [tool.size] of pyproject.toml, and
fails if one is above its budget: `make size`, a part of `make lint`. Vendored files
are not counted.

A change that adds a capability pays with a removal, or raises the budget in a commit of its own
that says what for.
"""

import sys
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
NATIVE = {".cpp", ".cu", ".h", ".cuh"}
SOURCES = {
    "package": (("maxrl_fast",), {".py"}),
    "page": (("maxrl_fast",), {".js", ".css", ".html"}),
    "csrc": (("csrc",), NATIVE),
    "tests": (("tests",), NATIVE | {".py", ".sh", ".toml"}),
    "bench": (("bench",), {".py"}),
    "examples": (("examples",), {".py", ".toml"}),
    "docs": (("docs",), {".md"}),
    "results": (("bench/results", "examples/papers/results"), set[str]()),  # of any suffix
}


def main() -> int:
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["size"]
    too_large = []
    for name, (folders, suffixes) in SOURCES.items():
        files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
        size = sum(
            path.stat().st_size
            for path in files
            if path.is_file() and "vendor" not in path.parts
            if not suffixes or path.suffix in suffixes
        )
        print(f"{name:8} {size:>10,} bytes of {budgets[name]:>10,}")
        if size > budgets[name]:
            too_large.append(name)
    if too_large:
        print(f"over the budget of pyproject.toml: {', '.join(too_large)}. Remove what the change")
        print("made superfluous, or raise the budget in a commit that says what for.")
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main())
