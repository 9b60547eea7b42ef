from typing import Any

import numpy as np


class Log(list[dict[str, Any]]):
    """Rows are dicts; `log["reward_mean"]` is a column, a NumPy array of numbers with NaN where a
    row has none, or a list; `pandas.DataFrame(log)` is a table."""

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        values = [row.get(key) for row in self]
        if not any(key in row for row in self):
            names = dict.fromkeys(name for row in self for name in row)
            raise KeyError(f"the log has no column {key!r}, only {', '.join(names)}")
        if all(value is None or isinstance(value, int | float) for value in values):
            return np.array([np.nan if value is None else value for value in values])
        return values


def flat(record: dict[str, Any]) -> dict[str, Any]:
    """Spread dicts: pass_at_k becomes pass_at_1, pass_at_2, ..."""
    spread: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            spread |= {f"{name.removesuffix('_k')}_{key}": x for key, x in value.items()}
        else:
            spread[name] = value
    return spread
