"""Variants of guessed numbers, on a CPU: the first is today's, and what is measured is checked."""

import re
from pathlib import Path

import pytest
import torch

from bench import ab
from maxrl_fast.runtime import tuning

CPU = torch.device("cpu")


def test_the_first_value_is_todays():
    header = Path(ab.ROOT / "csrc/cuda/tuning.h").read_text()
    macros = dict(re.findall(r"#define (MAXRL_\w+) (-?\d+)", header))
    assert macros.keys() == {name for _, name, _ in ab.EXPERIMENTS.values() if "MAXRL" in name}
    for what, name, (value, *others) in ab.EXPERIMENTS.values():
        assert what in ab.MEASURES
        assert value not in others
        if name in macros:
            assert int(macros[name]) == value
        elif name != "deterministic":
            today = getattr(tuning, name)
            assert (today["cuda"] if isinstance(today, dict) else today) == value


@pytest.mark.parametrize("what", ["rows", "linear"])
def test_gradients_are_compared(what):
    milliseconds, error = ab.MEASURES[what](CPU)
    assert milliseconds > 0
    assert 0 <= error < 1e-2
    assert error > 0 or what == "rows"  # both sides may round to the same numbers


def test_a_variant_that_is_not_built_is_reported(tmp_path):
    failed = ab.run("storage", 1, tmp_path, "cuda")["failed"]
    assert "_C" in failed or "No such file" in failed


def test_a_variant_runs_in_a_process(tmp_path):
    figures = ab.run("chunks", 1, tmp_path, "cpu")
    assert 0 < figures["error"] < 1e-2
