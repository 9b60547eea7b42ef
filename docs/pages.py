"""Write the generated parts of these pages: `python docs/pages.py`, from the root of the project.

A page of docs/objectives gets its section "Facts" from the registry: the objectives that its title
names, each with formula, weight, needs, options and source.
"""

import re
import sys
from pathlib import Path

from maxrl_fast.algorithms.estimators import ESTIMATORS
from maxrl_fast.algorithms.method import Method
from maxrl_fast.config.options_page import default_text, escaped
from maxrl_fast.training.objectives.registry import (
    OBJECTIVE_CLASSES,
    OBJECTIVES,
    objective_options,
)

OBJECTIVE_PAGES = Path(__file__).parent / "objectives"
HEADING = "## Facts"
METHODS: dict[str, Method] = {**ESTIMATORS, **OBJECTIVE_CLASSES}
COLUMNS = ("name", "advantage", "weight W_N(p)", "needs", "options", "source")


def facts(name: str) -> list[str]:
    """Return the cells of the row of an objective, or of an estimator that is only a baseline."""
    row = METHODS[name]
    options = objective_options(name) if name in OBJECTIVES else {}
    flags = [f"`{option.flag}` ({default_text(option)})" for option in options.values()]
    texts = [escaped(text) for text in (row.formula, row.weight, row.needs)]
    return [f"`{name}`", *texts, ", ".join(flags) or "-", escaped(row.source)]


def with_facts(page: str) -> str:
    """Return the page of an objective with its facts as the registry has them, before Source."""
    title = page.split("\n", 1)[0]
    rows = [facts(name) for name in re.split(r"[#, ]+", title) if name in METHODS]
    table = "\n".join(
        f"| {' | '.join(cells)} |" for cells in (COLUMNS, ["---"] * len(COLUMNS), *rows)
    )
    section = f"{HEADING}\n\nFrom the registry, by `python docs/pages.py`.\n\n{table}\n\n"
    page = re.sub(rf"^{HEADING}\n.*?(?=^## )", "", page, flags=re.DOTALL | re.MULTILINE)
    before, source, after = page.partition("## Source")
    return before + section + source + after


def main() -> None:
    for path in sorted(OBJECTIVE_PAGES.glob("*.md")):
        if path.name != "README.md":
            path.write_text(with_facts(path.read_text()))


if __name__ == "__main__":
    sys.exit(main())
