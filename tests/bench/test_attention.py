"""The benchmark of attention compares both sides before it times them."""

import pytest
import torch

from bench import attention
from bench.attention import Case, measure
from maxrl_fast.model.attention import tree_attention

TINY = Case(2, 5, 3, 1, 4, 4, 2, 16)


def test_figures_of_a_tiny_case():
    figures = measure(TINY, torch.float32, rounds=1)
    lengths = TINY.forest().lengths.view(2, 4)[:, 1:].flatten().tolist()
    assert figures["tokens"] == 10 + sum(lengths)
    assert figures["pairs"] == 4 * (2 * 15 + sum(5 * n + n * (n + 1) // 2 for n in lengths))
    assert all(
        0 < figures[way]["floor_milliseconds"] < figures[way]["milliseconds"]
        for way in ("forward", "backward")
    )


def test_sides_that_differ_are_not_timed(monkeypatch):
    monkeypatch.setattr(attention, "merged_attention", lambda *x: 2 * tree_attention(*x))
    with pytest.raises(AssertionError, match="not close"):
        measure(TINY, torch.float32, rounds=1)
