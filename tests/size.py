"""Prints the bytes of package, csrc and tests beside their budgets, [tool.size] of pyproject.toml,
and fails if one is above its budget: `make size`, a part of `make lint`.

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
SOURCES = {
    "package": ("maxrl_fast", {".py"}),
    "csrc": ("csrc", {".cpp", ".cu", ".h", ".cuh"}),
    "tests": ("tests", {".py", ".cpp", ".cu", ".h", ".cuh", ".sh", ".toml"}),
}


def main() -> int:
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["size"]
    too_large = []
    for name, (folder, suffixes) in SOURCES.items():
        files = [path for path in (ROOT / folder).rglob("*") if path.suffix in suffixes]
        size = sum(path.stat().st_size for path in files)
        print(f"{name:8} {size:>10,} bytes of {budgets[name]:>10,}")
        if size > budgets[name]:
            too_large.append(name)
    if too_large:
        print(f"over the budget of pyproject.toml: {', '.join(too_large)}. Remove what the change")
        print("made superfluous, or raise the budget in a commit that says what for.")
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main())
