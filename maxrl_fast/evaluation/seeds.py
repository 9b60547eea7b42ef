"""The last pass@k or max@k of runs that differ in their seeds alone: mean and standard error."""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from maxrl_fast.evaluation.scores import MAX, PASS, label_of, score_of
from maxrl_fast.evaluation.tables import new_table


def last_record(file: Path) -> dict[str, Any]:
    """Return the last complete record of a JSON Lines log; {} if there is none."""
    lines = file.read_text().rpartition("\n")[0].splitlines() if file.exists() else []
    return json.loads(lines[-1]) if lines else {}


def over_seeds(group: str, runs: Mapping[int, Path]) -> dict[str, Any]:
    """Return the last pass@k and max@k of runs by seed, by k: mean and standard error, None for one
    seed. Runs without an evaluation are left out."""
    records = {seed: last_record(folder / "eval.jsonl") for seed, folder in runs.items()}
    last = {seed: record for seed, record in records.items() if record}
    row: dict[str, Any] = {"group": group, "seeds": [*last]}
    for name in (PASS, MAX):
        values = [record.get(name, record[PASS]) for record in last.values()]
        sizes = [k for k in next(iter(values), {}) if all(k in x for x in values)]
        row[name] = {k: _of([x[k] for x in values]) for k in sizes}
    return row


def _of(values: list[float]) -> dict[str, float | None]:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "standard_error": error}


def seeds_table(rows: Sequence[dict[str, Any]]) -> Table:
    score = score_of(rows)
    sizes = sorted({k for row in rows for k in row[score]}, key=int)
    table = new_table("mean ± standard error", "seeds", *(label_of(score, k) for k in sizes))
    for row in rows:
        cells = (_shown(row[score].get(k)) for k in sizes)
        table.add_row(row["group"], str(len(row["seeds"])), *cells)
    return table


def _shown(cell: dict[str, float | None] | None) -> str:
    if cell is None:
        return "-"
    return f"{cell['mean']:.3f}" + (
        "" if cell["standard_error"] is None else f" ± {cell['standard_error']:.3f}"
    )
