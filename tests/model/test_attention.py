"""Attention over a forest against ordinary causal attention over the path of each segment, in
float64; also with sliding windows, soft caps and sinks.
"""

import contextlib
import sys
from types import SimpleNamespace

import pytest
import torch

from maxrl_fast.model import attention, flash
from maxrl_fast.model.attention import AttentionVariant, Forest, tree_attention
from maxrl_fast.model.flash import PADDED_REFERENCE, VarlenSpec
from tests.tables import refused

CPU = torch.device("cpu")
REAL_ATEN = torch.ops.aten
# The lengths of the segments, and the segment above each.
CASES = {
    "uneven groups": ([5, 3, 1, 5, 6, 2, 5, 9], [-1, 0, 0, -1, 3, 3, -1, 6]),
    "prompts of different lengths": ([4, 2, 1, 3, 17, 7, 5], [-1, 0, -1, 2, 2, -1, 5]),
    "one response": ([6, 4], [-1, 0]),
    "prefixes of prefixes": ([4, 3, 2, 1, 5, 2, 6, 3], [-1, 0, 1, 2, 1, 0, 5, -1]),
    "a chain": ([1, 1, 2, 3, 1, 4], [-1, 0, 1, 2, 3, 4]),
    "equal lengths": ([4, 3, 3, 4, 3, 3], [-1, 0, 0, -1, 3, 3]),
    "sequences without responses": ([9, 3, 2, 5, 12, 40], [-1, -1, 1, 1, -1, -1]),
    "only sequences": ([9, 3, 1], [-1, -1, -1]),
}


# window, soft cap, sinks
VARIANTS = {
    "plain": (0, 0.0, False),
    "window 1": (1, 0.0, False),
    "window 3": (3, 0.0, False),
    "window as long as a prompt and its response": (9, 0.0, False),
    "window longer than all": (1000, 0.0, False),
    "soft cap": (0, 1.5, False),
    "sinks": (0, 0.0, True),
    "all three": (4, 2.0, True),
}


def ordinary_attention(q, k, v, window=0, softcap=0.0, sinks=None):
    """Causal attention in plain PyTorch: q [L, Hq, D], k and v [L, Hkv, D], sinks [Hq]."""
    repeats, length = q.shape[1] // k.shape[1], len(q)
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[2] ** 0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    i, j = torch.arange(length)[:, None], torch.arange(length)
    scores = scores.masked_fill((j > i) | (bool(window) & (j <= i - window)), float("-inf"))
    extra = [] if sinks is None else [sinks[:, None, None].expand(-1, length, 1)]
    p = torch.cat([scores, *extra], -1).softmax(-1)[..., :length]
    return torch.einsum("hij,jhd->ihd", p, v)


def ordinary_forest(q, k, v, lengths, parents, *variant):
    """Compute ordinary attention of a forest, the path of every segment written out."""
    segments, paths = torch.arange(sum(lengths)).split(lengths), []
    expected = torch.zeros_like(q)
    for segment, parent in zip(segments, parents, strict=True):
        paths.append(torch.cat([paths[parent], segment]) if parent >= 0 else segment)
        rows = paths[-1]
        expected[segment] = ordinary_attention(q[rows], k[rows], v[rows], *variant)[-len(segment) :]
    return expected


def check(case, variant="plain", dtype=torch.float64, rtol=1e-11, heads=(4, 2, 2)):
    (window, softcap, has_sinks), total = VARIANTS[variant], sum(CASES[case][0])
    generator = torch.Generator().manual_seed(0)
    shapes = [(total, h, 8) for h in heads] + [(heads[0],)] * has_sinks
    tensors = [torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes]
    inputs = [(2 * x).to(dtype).requires_grad_() for x in tensors]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    forest = Forest(*map(torch.tensor, CASES[case]), CPU)
    chosen = AttentionVariant(window, softcap, *inputs[3:])
    out = tree_attention(*inputs[:3], forest, chosen)
    expected = ordinary_forest(*exact[:3], *CASES[case], window, softcap, *exact[3:])
    atol = rtol / 10 if dtype == torch.float64 else rtol
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=atol)

    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(dtype)
    wanted = torch.autograd.grad(expected, exact, grad.double())
    for a, w in zip(torch.autograd.grad(out, inputs, grad), wanted, strict=True):
        assert variant != "plain" or w.abs().max() > 0.1
        scale = max(1.0, float(w.abs().max()))
        torch.testing.assert_close(a.double(), w, rtol=rtol, atol=atol * scale)


@pytest.fixture(params=["own kernel", "FlashAttention calls"])
def path(request, monkeypatch):
    if request.param == "FlashAttention calls":
        monkeypatch.setattr(attention, "has_kernel", lambda *_: False)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_equal_ordinary_attention(case):
    check(case)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("heads", [(4, 4, 4), (6, 1, 1)])
def test_grouped_query_heads(heads):
    check("uneven groups", heads=heads)


@pytest.mark.parametrize("variant", [*VARIANTS][1:])
@pytest.mark.parametrize("case", ["uneven groups", "prefixes of prefixes", "only sequences"])
def test_variants_equal_ordinary_attention(case, variant):
    check(case, variant)


@pytest.mark.parametrize("variant", ["window 3", "soft cap", "all three"])
def test_half_precision(variant):
    check("prompts of different lengths", variant, torch.bfloat16, 0.03)


def emulated(calls):
    """Return the varlen functions of torch and of flash-attn, computed by padding, with the
    signatures of the real ones. `calls` gets the window of each call.
    """

    def spec(cu_q, cu_k, max_q, max_k, causal, left, right, softcap=0.0):
        calls.append(left)
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert max_q >= cu_q.diff().max()
        assert max_k == cu_k.diff().max()
        assert right == (0 if left >= 0 else -1)
        lengths = cu_q.diff().long(), cu_k.diff().long()
        return VarlenSpec(*lengths, CPU, causal=causal, window=left + 1, softcap=softcap)

    def forward(q, k, v, own):
        o, lse = PADDED_REFERENCE.forward(q, k, v, own)
        return o, lse.t()

    def backward(grad, q, k, v, o, lse, own):
        assert lse.shape == (q.shape[1], len(q))
        assert lse.is_contiguous()
        return PADDED_REFERENCE.backward(grad, q, k, v, o, lse.t(), own)

    def aten_forward(
        q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, causal, debug, *,
        window_size_left=-1, window_size_right=-1,
    ):  # fmt: skip
        assert (dropout_p, debug) == (0.0, False)
        own = spec(cu_q, cu_k, max_q, max_k, causal, window_size_left, window_size_right)
        return *forward(q, k, v, own), torch.empty(2), torch.empty(0), torch.empty(0)

    def aten_backward(
        grad, q, k, v, o, lse, cu_q, cu_k, max_q, max_k, dropout_p, causal, _state, _unused, *,
        window_size_left=-1, window_size_right=-1,
    ):  # fmt: skip
        assert dropout_p == 0.0
        own = spec(cu_q, cu_k, max_q, max_k, causal, window_size_left, window_size_right)
        return backward(grad, q, k, v, o, lse, own)

    def package_forward(
        q, k, v, cu_q, cu_k, max_q, max_k, *, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0,
    ):  # fmt: skip
        assert (dropout_p, softmax_scale) == (0.0, q.shape[-1] ** -0.5)
        own = spec(cu_q, cu_k, max_q, max_k, causal, window_size_left, window_size_right, softcap)
        return *forward(q, k, v, own), torch.empty(0), torch.empty(2)

    def package_backward(
        grad, q, k, v, o, lse, dq, dk, dv, cu_q, cu_k, max_q, max_k, *,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
        alibi_slopes, deterministic,
    ):  # fmt: skip
        assert (dropout_p, softmax_scale, alibi_slopes) == (0.0, q.shape[-1] ** -0.5, None)
        own = spec(cu_q, cu_k, max_q, max_k, causal, window_size_left, window_size_right, softcap)
        for given, x in zip((dq, dk, dv), backward(grad, q, k, v, o, lse, own), strict=True):
            given.copy_(x)

    class Aten:
        _flash_attention_forward = staticmethod(aten_forward)
        _flash_attention_backward = staticmethod(aten_backward)

        def __getattr__(self, name: str):
            return getattr(REAL_ATEN, name)

    package = SimpleNamespace(
        _flash_attn_varlen_forward=package_forward, _flash_attn_varlen_backward=package_backward
    )
    return Aten(), package


def check_calls(case, variant, calls):
    check(case, variant)
    window = VARIANTS[variant][0]
    assert calls == [window - 1] * 2 or (not window and set(calls) == {-1})


PLAIN = [(case, "plain") for case in ("uneven groups", "prefixes of prefixes", "only sequences")]


@pytest.mark.parametrize(
    ("case", "variant"),
    [*PLAIN, *(("uneven groups", x) for x in ("window 1", "window 3", "sinks"))],
)
def test_torchs_kernel_gets_the_stream_and_the_window(case, variant, monkeypatch):
    schema = REAL_ATEN._flash_attention_forward.default._schema
    names = "cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask"
    assert " ".join(a.name for a in schema.arguments[3:10]) == names
    schema = REAL_ATEN._flash_attention_backward.default._schema
    names = "out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal rng_state unused"
    assert " ".join(a.name for a in schema.arguments[4:14]) == names
    calls: list[int] = []
    monkeypatch.setattr(flash.torch.ops, "aten", emulated(calls)[0])
    monkeypatch.setattr(attention, "has_kernel", lambda *_: False)
    monkeypatch.setattr(flash, "kernel_for", lambda *_: flash.TORCH_VARLEN)
    check_calls(case, variant, calls)


@pytest.mark.parametrize(
    ("case", "variant"),
    [*PLAIN, *(("uneven groups", x) for x in ("window 3", "soft cap", "all three"))],
)
def test_flash_attn_gets_the_stream_the_window_and_the_soft_cap(case, variant, monkeypatch):
    calls: list[int] = []
    package = emulated(calls)[1]
    monkeypatch.setattr(flash, "_flash_attn", lambda: package)
    monkeypatch.setattr(attention, "has_kernel", lambda *_: False)
    monkeypatch.setattr(flash, "kernel_for", lambda *_: flash.FLASH_ATTN)
    check_calls(case, variant, calls)


def test_which_kernel_runs(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(flash, "_flash_attn", lambda: None)
    monkeypatch.setattr(flash, "_is_recent", lambda device: True)
    assert flash.kernel_for(CPU, torch.bfloat16, 64) is flash.PADDED_CPU
    assert flash.kernel_for(cuda, torch.bfloat16, 64) is flash.TORCH_VARLEN
    assert flash.kernel_for(cuda, torch.float32, 64) is flash.PADDED_REFERENCE
    assert flash.kernel_for(cuda, torch.bfloat16, 20) is flash.PADDED_REFERENCE
    assert flash.kernel_for(cuda, torch.bfloat16, 64, 50.0) is flash.PADDED_REFERENCE
    monkeypatch.setattr(flash, "_flash_attn", lambda: object())
    assert flash.kernel_for(cuda, torch.float16, 128) is flash.FLASH_ATTN
    assert flash.kernel_for(cuda, torch.bfloat16, 64, 50.0) is flash.FLASH_ATTN
    monkeypatch.setattr(flash, "_is_recent", lambda device: False)
    assert flash.kernel_for(cuda, torch.float16, 128) is flash.PADDED_REFERENCE


def test_a_broken_flash_attn_is_reported(monkeypatch, tmp_path):
    broken = "raise ImportError('undefined symbol: _ZN3c10')"
    with (
        installed_flash_attn(monkeypatch, tmp_path, "__version__ = '2.8.3'", broken),
        refused(r"cannot be imported \(undefined symbol: _ZN3c10\); reinstall it for torch"),
    ):
        flash._flash_attn()


@pytest.mark.parametrize(("version", "interface"), [("2.6.3", ""), ("4.0.0", None)])
def test_unsupported_flash_attn_versions_are_not_used(monkeypatch, tmp_path, version, interface):
    """Versions below 2.7 return other values, and version 4 has no FlashAttention-2, so torch's own
    kernel runs.
    """
    with installed_flash_attn(monkeypatch, tmp_path, f"__version__ = '{version}'", interface):
        assert flash._flash_attn() is None


@contextlib.contextmanager
def installed_flash_attn(monkeypatch, folder, package, interface):
    (folder / "flash_attn").mkdir()
    (folder / "flash_attn" / "__init__.py").write_text(package)
    if interface is not None:
        (folder / "flash_attn" / "flash_attn_interface.py").write_text(interface)
    monkeypatch.syspath_prepend(folder)
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    flash._flash_attn.cache_clear()
    try:
        yield
    finally:
        flash._flash_attn.cache_clear()
        for name in ("flash_attn", "flash_attn.flash_attn_interface"):
            sys.modules.pop(name, None)


def test_where_segments_end():
    forest = Forest(*map(torch.tensor, CASES["prefixes of prefixes"]), CPU)
    assert forest.ends.tolist() == [23, 15, 10, 10, 15, 23, 23, 26]
    of_level = [(rows.tolist(), keys.tolist()) for rows, keys, _ in forest.levels]
    assert of_level[0] == ([*range(4, 23)], [*range(4)])
    assert of_level[1] == ([*range(7, 15), *range(17, 23)], [4, 5, 6, 15, 16])
    assert of_level[2] == ([9], [7, 8])
    assert not Forest.roots(torch.tensor([3, 1])).levels
