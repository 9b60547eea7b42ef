"""The benchmark of attention, at a tiny size."""

import torch

from bench.attention import Case, measure

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
