import html
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, overload

import numpy as np

SHOWN = 10  # rows of a table in a notebook, half of them the last


class Log:
    """A log: `log["reward_mean"]` is a column, a NumPy array; `log[-1]` the last row, a dict."""

    def __init__(self, rows: Iterable[dict[str, Any]]):
        self._rows = list(rows)

    @classmethod
    def read(cls, path: Path) -> "Log":
        return cls(map(json.loads, path.read_text().splitlines() if path.exists() else ()))

    @classmethod
    def of_numbers(cls, path: Path) -> "Log":
        """A dict such as pass_at_k becomes columns pass_at_1, ..."""
        return cls(map(flat, cls.read(path)))

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self._rows for name in row))

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    @overload
    def __getitem__(self, key: str) -> np.ndarray[Any, Any]: ...
    @overload
    def __getitem__(self, key: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, key: slice) -> "Log": ...
    def __getitem__(self, key: str | int | slice) -> Any:
        """Return a column, a row, or a slice of rows; KeyError if no row has such a column. In a
        numeric column NaN marks rows without a value."""
        if isinstance(key, slice):
            return Log(self._rows[key])
        if isinstance(key, int):
            return self._rows[key]
        if key not in self.columns:
            raise KeyError(f"the log has no column {key!r}, only {', '.join(self.columns)}")
        values = [row.get(key) for row in self._rows]
        if all(value is None or isinstance(value, (int, float)) for value in values):
            return np.array([np.nan if value is None else value for value in values])
        column = np.empty(len(values), dtype=object)
        for i, value in enumerate(values):  # one by one, so that lists stay one entry each
            column[i] = value
        return column

    def to_pandas(self) -> Any:
        import pandas

        return pandas.DataFrame(self._rows, columns=self.columns)

    def __repr__(self) -> str:
        return f"Log of {len(self)} rows: {', '.join(self.columns)}"

    def _repr_html_(self) -> str:
        rows, half = self._rows, SHOWN // 2
        rows = rows if len(rows) <= SHOWN else [*rows[:half], {}, *rows[-half:]]
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        cells = ("".join(f"<td>{_cell(row, name)}</td>" for name in self.columns) for row in rows)
        body = "".join(f"<tr>{x}</tr>" for x in cells)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f"{table}<p>{len(self)} rows</p>"


def flat(record: dict[str, Any]) -> dict[str, Any]:
    """Spread a record's dicts: pass_at_k becomes pass_at_1, pass_at_2, ..."""
    spread: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            spread |= {f"{name.removesuffix('_k')}_{key}": entry for key, entry in value.items()}
        else:
            spread[name] = value
    return spread


def _cell(row: dict[str, Any], name: str) -> str:
    if name not in row:
        return "" if row else "..."
    value = row[name]
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return html.escape(text if len(text) <= 80 else f"{text[:80]}...")
