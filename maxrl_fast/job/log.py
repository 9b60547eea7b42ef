from typing import Any

import numpy as np


class Log(list[dict[str, Any]]):
    """A log: rows are dicts; `log["reward_mean"]` is a column, a NumPy array of numbers with NaN
    where a row has none, otherwise a list; `to_pandas()` is a DataFrame."""

    def __getitem__(self, key: Any) -> Any:
        """Return a column, or a row as of a list; KeyError if no row has such a column."""
        if not isinstance(key, str):
            return super().__getitem__(key)
        names = dict.fromkeys(name for row in self for name in row)
        if key not in names:
            raise KeyError(f"the log has no column {key!r}, only {', '.join(names)}")
        values = [row.get(key) for row in self]
        if all(value is None or isinstance(value, int | float) for value in values):
            return np.array([np.nan if value is None else value for value in values])
        return values

    def to_pandas(self) -> Any:
        import pandas

        return pandas.DataFrame(self)

    def _repr_html_(self) -> str | None:
        try:
            return str(self.to_pandas().to_html(max_rows=10))
        except ModuleNotFoundError:
            return None  # a notebook prints the list


def flat(record: dict[str, Any]) -> dict[str, Any]:
    """Spread a record's dicts: pass_at_k becomes pass_at_1, pass_at_2, ..."""
    spread: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            spread |= {f"{name.removesuffix('_k')}_{key}": entry for key, entry in value.items()}
        else:
            spread[name] = value
    return spread
