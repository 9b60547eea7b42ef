"""The cost of MaxRL of order 128 on a prompt, and the variance of its gradient: with 128 rollouts,
stopping (--stop-at 4) and carried prompts (--rollouts 16 --carry 8). All outcomes are enumerated,
for a response that is right with probability p and has no other features.

    python examples/papers/carried.py

It takes seconds.
"""

import argparse
from collections.abc import Iterator
from math import comb

Outcome = tuple[float, float, int]  # probability, gradient in units of grad log p, rollouts


def rounds(ends: list[int], most: int, p: float) -> Iterator[tuple[float, tuple[int, ...]]]:
    """Yield the successes of each round until `most` succeed, with their probability."""
    begun: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    while begun:
        chance, counts = begun.pop()
        if counts and (sum(counts) >= most or len(counts) == len(ends)):
            yield chance, counts
            continue
        size = ends[len(counts)] - (ends[len(counts) - 1] if counts else 0)
        more = ((comb(size, k) * p**k * (1 - p) ** (size - k), k) for k in range(size + 1))
        begun += [(chance * x, (*counts, k)) for x, k in more if chance * x > 1e-13]


def stopped(ends: list[int], most: int, p: float) -> Iterator[Outcome]:
    """Yield the outcomes with the advantages of docs/objectives/maxrl.md."""
    for chance, counts in rounds(ends, most, p):
        total, before, gradient, begun = sum(counts), 0, 0.0, 0
        for k, end in zip(counts, ends, strict=False):
            before += k
            success = 1 / max(total, 1) - min(before - 1, most) / (most * end)
            failure = -min(before, most) / (most * end)
            gradient += k * success - (end - begun - k) * failure * p / (1 - p)
            begun = end
        yield chance, gradient, begun


def carried(size: int, most: int, p: float) -> Iterator[Outcome]:
    """Yield the outcomes of a visit: rounds of `size` until a success, at most `most`."""
    last = [*zip(rounds([size], 1, p), stopped([size], 1, p), strict=True)]
    for failed in range(most):
        for (chance, (successes,)), (_, gradient, _) in last:
            if successes or failed == most - 1:
                yield (1 - p) ** (size * failed) * chance, gradient, size * (failed + 1)


def show(p: float) -> str:
    cells = []
    for outcomes in (
        stopped([128], 1, p),
        stopped([8, 16, 32, 64, 128], 4, p),
        carried(16, 8, p),
    ):
        found = [*outcomes]
        mean = sum(chance * x for chance, x, _ in found)
        square = sum(chance * x * x for chance, x, _ in found)
        cost = sum(chance * n for chance, _, n in found)
        assert abs(mean - (1 - (1 - p) ** 128)) < 1e-9
        cells.append(f"{cost:7.1f} {(square / mean**2 - 1) * cost:8.1f}")
    return f"{p:5.3f} " + " ".join(cells)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    print("    p    N = 128            stop-at 4        carry 8: rollouts, variance times them")
    for p in (0.005, 0.02, 0.1, 0.3, 0.6):
        print(show(p))
