from functools import cache

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from maxrl_fast.model import attention
from maxrl_fast.model.attention import Forest, MergedAttention, kernel_name, tree_attention
from tests.fuzzing import settings
from tests.model.test_attention import CPU, ordinary_forest, paths_of
from tests.models import on_threads

NAMES = ("o", "grad_q", "grad_k", "grad_v")


def stream(lengths, parents, heads, key_heads, head_dim, dtype=torch.float64, seed=0):
    """Return the two tensors of a forest, then q, k and v, and a gradient."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, grad = (
        torch.randn(sum(lengths), h, head_dim, generator=generator, dtype=torch.float64).to(dtype)
        for h in (heads, key_heads, key_heads, heads)
    )
    return [torch.tensor(x, dtype=torch.int64) for x in (lengths, parents)], (q, k, v), grad


def answered(prompts, responses):
    lengths, parents = [], []
    for prompt, own in zip(prompts, responses, strict=True):
        parents += [-1, *[len(lengths)] * len(own)]
        lengths += [prompt, *own]
    return lengths, parents


def results(function, qkv, grad):
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def ours(layout, qkv, grad):
    return results(lambda *x: attention._TreeAttention.apply(*x, *layout), qkv, grad)


def pytorchs(layout, qkv, grad):
    return results(
        lambda *x: MergedAttention.apply(*x, None, Forest(*layout, CPU).parts), qkv, grad
    )


def ordinary(layout, qkv, grad):
    lists, inputs = [x.tolist() for x in layout], [x.double() for x in qkv]
    return results(lambda *x: ordinary_forest(*x, *lists), inputs, grad.double())


def check_exact(layout, qkv, grad, function=ours):
    pairs = zip(function(layout, qkv, grad), ordinary(layout, qkv, grad), strict=True)
    for name, (actual, wanted) in zip(NAMES, pairs, strict=True):
        assert actual.shape == wanted.shape
        largest = max(1.0, float(wanted.abs().max()))
        assert float((actual - wanted).abs().max()) <= 1e-12 * largest, name


@st.composite
def forests(draw):
    """1 to 40 segments, at most 8 levels, at most 300 tokens a segment and 700 in all."""
    parents, path = [], []
    for segment in range(draw(st.integers(1, 40))):
        path = path[: draw(st.integers(0, len(path)))][:7]
        parents.append(path[-1] if path else -1)
        path.append(segment)
    sizes = st.sampled_from([1, 2, 5, 16, 33, 95, 130, 300] if len(parents) < 6 else [1, 2, 7, 17])
    lengths = [draw(sizes) for _ in parents]
    key_heads, shared = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 3, 7]))
    head_dim = draw(
        st.sampled_from(
            [1, 3, 8, 15, 16, 17, 24, 32, 33, 48, 64, 80, 96, 100, 128, 130, 192, 255, 256]
        )
    )
    return lengths, parents, key_heads * shared, key_heads, head_dim


@settings(40)
@given(forests(), st.booleans())
@pytest.mark.usefixtures("instructions")
def test_outputs_and_gradients_equal_ordinary_attention_for_any_lengths_and_heads(drawn, is_view):
    layout, qkv, grad = stream(*drawn)
    if is_view:  # heads first in memory, as transformers has them, and every other number
        qkv = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in qkv]
        grad = torch.stack([grad, grad], -1)[..., 1]
    check_exact(layout, qkv, grad)


@pytest.mark.parametrize(
    "case",
    [
        answered([1], [[2049, 3]]),
        answered([600, 2], [[40] * 90, [5]]),
        ([600, *[100, 40, 30] * 30], [-1, *(x for i in range(1, 91, 3) for x in (0, i, i))]),
    ],
)
def test_long_segments_and_trees_of_several_pieces(case):
    check_exact(*stream(*case, 2, 1, 16))


def test_a_forest_without_tokens():
    shapes = [x.shape for x in ours(*stream([], [], 2, 1, 16))]
    assert shapes == [(0, 2, 16), (0, 2, 16), (0, 1, 16), (0, 1, 16)]


# Shapes of the default job, of a maze and of a larger model, with few sequences.
SHAPES = {
    "heads of 16": (*answered([94] * 4, [[13, 9, 17]] * 4), 8, 4, 16),
    "heads of 64": (*answered([310], [[1, 20, 90, 180] * 3]), 4, 2, 64),
    "odd heads": (*answered([41, 7], [[33, 5], [1, 20]]), 3, 1, 35),
    "prefixes of prefixes": ([90, 7, 3, 12, 2, 9, 9, 60], [-1, 0, 1, 1, 0, 4, 4, -1], 8, 4, 16),
}


@cache
def references(shape, dtype):
    """Return a shape's inputs, and its results in float64 and of PyTorch, which no instruction set
    changes."""
    inputs = stream(*SHAPES[shape], dtype=dtype)
    return inputs, ordinary(*inputs), pytorchs(*inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("instructions")
def test_rounding_errors_are_at_most_twice_pytorchs(shape, dtype):
    inputs, exact, theirs = references(shape, dtype)
    for name, wanted, x, y in zip(NAMES, exact, ours(*inputs), theirs, strict=True):
        assert x.dtype == dtype
        errors = [float((z.double() - wanted).norm() / wanted.norm()) for z in (x, y)]
        assert 1e-9 < errors[0] <= 2 * errors[1], name


@pytest.mark.parametrize("dtype", attention.DTYPES)
def test_results_are_bitwise_the_same_for_any_number_of_threads(dtype):
    lengths, parents = answered([600, 90, 3], [[40] * 30, [5] * 5, [5] * 4])
    parents[2:31:2] = range(1, 30, 2)  # every second response follows the one before it
    layout, qkv, grad = stream(lengths, parents, 4, 2, 16, dtype=dtype)
    expected, *others = [ours(layout, qkv, grad) for _ in on_threads(1, 2, 3)]
    for actual in others:
        assert all(map(torch.equal, actual, expected))


@pytest.mark.usefixtures("instructions")
def test_what_is_not_finite_stays_in_its_tree():
    lengths, parents = answered([40, 9], [[12, 5], [7, 30]])
    layout, qkv, grad = stream(lengths, parents, 4, 2, 24, dtype=torch.float32)
    given = *qkv, grad
    expected = ours(layout, qkv, grad)
    for x in given:
        broken = x.clone()
        broken[3], broken[50] = float("nan"), float("inf")
        *changed, slope = (broken if y is x else y for y in given)
        found = ours(layout, changed, slope)
        for actual, wanted in zip(found, expected, strict=True):
            assert torch.equal(actual[57:], wanted[57:])
        assert x is not qkv[2] or found[0][3:57].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("instructions")
def test_a_rows_output_is_bitwise_the_same_in_every_forest(dtype):
    """Scores rise along the keys, so that tops are raised at other keys in another forest."""
    lengths, parents = [150, 20, 3, 70, 31, 1, 9, 100], [-1, 0, 1, 2, 2, 0, 5, 0]
    layout, (q, k, v), _ = stream(lengths, parents, 4, 2, 24, dtype=dtype)
    k = k * torch.linspace(0.1, 20, len(k))[:, None, None].to(dtype)
    together = attention._TreeAttention.apply(q, k, v, *layout)
    for _, path in paths_of(lengths, parents):
        for cut in ([len(path)], [1, len(path) - 1], [37] * (len(path) // 37) + [len(path) % 37]):
            cut = [length for length in cut if length]
            chain = torch.tensor(cut), torch.arange(len(cut)) - 1
            alone = attention._TreeAttention.apply(q[path], k[path], v[path], *chain)
            assert torch.equal(alone, together[path])


def test_which_streams_the_kernel_takes():
    assert kernel_name(CPU, torch.float32, 256) == kernel_name(CPU, torch.bfloat16, 1) == "C++"
    for dtype, head_dim in ((torch.float32, 257), (torch.float16, 64)):
        assert kernel_name(CPU, dtype, head_dim) == attention.REFERENCE.name
    layout, qkv, grad = stream([4, 3, 2], [-1, 0, 0], 2, 1, 260)
    forest = Forest(*layout, CPU)

    def by_calls(layout, *inputs):
        return results(lambda *x: tree_attention(*x, forest), *inputs)

    check_exact(layout, qkv, grad, by_calls)
    with pytest.raises(ValueError, match="needs heads of 1 to 256"):
        attention._TreeAttention.apply(*qkv, *layout)


def test_bad_forests_are_a_sentence():
    (lengths, parents), (q, k, v), _ = stream([4, 3, 2], [-1, 0, 0], 2, 1, 16)
    attend = attention._TreeAttention.apply
    with pytest.raises(ValueError, match="lengths must add up to the 9 tokens, got 12"):
        attend(q, k, v, lengths + 1, parents)
    message = "must have at least 1 token, and be in depth-first order after the"
    for wrong in (
        ([9, 0], [-1, 0]),
        ([10, -1], [-1, 0]),
        ([4, 3, 2], [-1, 1, 0]),
        ([4, 3, 2], [-2, 0, 0]),
        ([4, 3, 1, 1], [-1, -1, 0, 1]),  # the first tree is over
    ):
        with pytest.raises(ValueError, match=message):
            attend(q, k, v, *map(torch.tensor, wrong))
