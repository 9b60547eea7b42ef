"""The last pass@k of runs that differ in their seeds alone: mean and standard error."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from maxrl_fast.evaluation.tables import new_table


def last_record(file: Path) -> dict[str, Any]:
    """Return the last complete record of a JSON Lines log; {} if there is none."""
    lines = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
    return json.loads(lines[-1]) if lines else {}


def over_seeds(group: str, runs: Mapping[int, Path]) -> dict[str, Any]:
    """Return the last pass@k of runs by seed, by k: mean and standard error, None for one seed.
    Runs without an evaluation are left out.
    """
    last = {
        seed: record["pass_at_k"]
        for seed, folder in runs.items()
        if (record := last_record(folder / "eval.jsonl"))
    }
    sizes = [
        k for k in next(iter(last.values()), {}) if all(k in passes for passes in last.values())
    ]
    return {
        "group": group,
        "seeds": [*last],
        "pass_at_k": {k: _of([passes[k] for passes in last.values()]) for k in sizes},
    }


def _of(values: list[float]) -> dict[str, float | None]:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "standard_error": error}


def seeds_table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table of what `over_seeds` returned for each group."""
    sizes = sorted({k for row in rows for k in row["pass_at_k"]}, key=int)
    table = new_table("mean ± standard error", "seeds", *(f"pass@{k}" for k in sizes))
    for row in rows:
        table.add_row(
            row["group"], str(len(row["seeds"])), *(_shown(row["pass_at_k"].get(k)) for k in sizes)
        )
    return table


def _shown(cell: dict[str, float | None] | None) -> str:
    if cell is None:
        return "-"
    return f"{cell['mean']:.3f}" + (
        "" if cell["standard_error"] is None else f" ± {cell['standard_error']:.3f}"
    )
