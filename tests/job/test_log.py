"""Logs as tables: columns and rows."""

import json

import numpy as np
import pytest

from maxrl_fast.job.log import Log

ROWS = [
    {"step": 1, "reward_mean": 0.5, "pass_at_k": {"1": 0.25, "2": 0.5}},
    {"step": 2, "reward_mean": 0.75, "note": "<b>bold</b>", "ids": [1, 2]},
    {"step": 3, "reward_mean": None, "note": None, "ids": [3]},
]


@pytest.fixture
def log(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return Log.of_numbers(tmp_path / "metrics.jsonl")


def test_columns_are_arrays_with_nan_where_a_row_has_no_number(log):
    assert log["step"].tolist() == [1, 2, 3]
    assert log["step"].dtype.kind == "i"
    np.testing.assert_array_equal(log["reward_mean"], [0.5, 0.75, np.nan])
    np.testing.assert_array_equal(log["pass_at_2"], [0.5, np.nan, np.nan])
    assert log["note"].tolist() == [None, "<b>bold</b>", None]
    assert log["ids"].tolist() == [None, [1, 2], [3]]
    assert log.columns == ["step", "reward_mean", "pass_at_1", "pass_at_2", "note", "ids"]
    with pytest.raises(
        KeyError, match="the log has no column 'reward', only step, reward_mean, pass_at_1"
    ):
        log["reward"]


def test_lists_of_one_length_stay_one_entry_each():
    assert Log([{"ids": [1, 2]}, {"ids": [3, 4]}])["ids"].tolist() == [[1, 2], [3, 4]]


def test_rows_are_dicts(log):
    assert log[0] == {"step": 1, "reward_mean": 0.5, "pass_at_1": 0.25, "pass_at_2": 0.5}
    assert log[-1]["step"] == 3
    assert [row["step"] for row in log] == [1, 2, 3]
    assert (len(log), len(log[1:]), log[1:][0]["step"]) == (3, 2, 2)
