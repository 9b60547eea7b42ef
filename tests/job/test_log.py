import numpy as np
import pytest

from maxrl_fast.api import Log
from maxrl_fast.job.run_files import flat

ROWS = [
    {"step": 1, "reward_mean": 0.5, "pass_at_k": {"1": 0.25, "2": 0.5}},
    {"step": 2, "reward_mean": 0.75, "note": "bold", "ids": [1, 2]},
    {"step": 3, "reward_mean": None, "note": None, "ids": [3]},
]


@pytest.fixture
def log():
    return Log(map(flat, ROWS))


def test_columns_are_arrays_with_nan_where_a_row_has_no_number(log):
    assert log["step"].tolist() == [1, 2, 3]
    assert log["step"].dtype.kind == "i"
    np.testing.assert_array_equal(log["reward_mean"], [0.5, 0.75, np.nan])
    np.testing.assert_array_equal(log["pass_at_2"], [0.5, np.nan, np.nan])
    assert log["note"] == [None, "bold", None]
    assert log["ids"] == [None, [1, 2], [3]]
    with pytest.raises(
        KeyError, match="the log has no column 'reward', only step, reward_mean, pass_at_1"
    ):
        log["reward"]


def test_rows_are_dicts(log):
    assert log[0] == {"step": 1, "reward_mean": 0.5, "pass_at_1": 0.25, "pass_at_2": 0.5}
    assert log[-1]["step"] == 3
    assert [row["step"] for row in log] == [1, 2, 3]
    assert (len(log), log[1:][0]["step"]) == (3, 2)
