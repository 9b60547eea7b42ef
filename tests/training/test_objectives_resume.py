"""Objectives that need more than the rewards of one group: a run that is stopped and resumed is
bitwise that of one piece.
"""

import pytest

from maxrl_fast import train
from tests.job.test_resume import assert_same, stop_at
from tests.objectives_with_more import flags_of
from tests.test_train import base, read


@pytest.mark.slow
# riskpo: test_riskpo_objective.py
@pytest.mark.parametrize("name", ["gdpo", "hero", "rl_zvp", "by_token"])
def test_a_run_resumes_bitwise(name, tmp_path, monkeypatch):
    flags = [*base(), *flags_of(name, tmp_path), "--steps", "6"]
    assert train.main([*flags, "--out", str(tmp_path / "whole")]) == 0
    records = read(tmp_path / "whole" / "metrics.jsonl")
    assert all(record["grad_norm"] > 0 for record in records)
    stop_at(monkeypatch, "step 3")
    assert train.main([*flags, "--out", str(tmp_path / "stopped")]) == 143
    monkeypatch.undo()
    assert train.main(["--resume", str(tmp_path / "stopped")]) == 0
    assert_same(tmp_path / "whole", tmp_path / "stopped")
