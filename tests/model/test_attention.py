import sys

import pytest
import torch

from maxrl_fast.model import attention
from maxrl_fast.model.attention import (
    REFERENCE,
    AttentionVariant,
    Forest,
    Kernel,
    VarlenSpec,
    tree_attention,
)

CPU = torch.device("cpu")
REAL_ATEN = torch.ops.aten
# The lengths of the segments, and the segment above each.
CASES = {
    "uneven groups": ([5, 3, 1, 5, 6, 2, 5, 9], [-1, 0, 0, -1, 3, 3, -1, 6]),
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
    """Causal attention in plain PyTorch of the last tokens: q [M, Hq, D], k and v [L, Hkv, D],
    sinks [Hq]."""
    repeats, length = q.shape[1] // k.shape[1], len(k)
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[2] ** 0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    j = torch.arange(length)
    i = j[length - len(q) :, None]
    scores = scores.masked_fill((j > i) | (bool(window) & (j <= i - window)), float("-inf"))
    extra = [] if sinks is None else [sinks[:, None, None].expand(-1, len(q), 1)]
    p = torch.cat([scores, *extra], -1).softmax(-1)[..., :length]
    return torch.einsum("hij,jhd->ihd", p, v)


def paths_of(lengths, parents):
    """Return the rows of each segment, and of its whole path."""
    segments, paths = torch.arange(sum(lengths)).split(lengths), []
    for own, parent in zip(segments, parents, strict=True):
        paths.append(torch.cat([paths[parent], own]) if parent >= 0 else own)
    return list(zip(segments, paths, strict=True))


def ordinary_forest(q, k, v, lengths, parents, *variant):
    expected = torch.zeros_like(q)
    for segment, rows in paths_of(lengths, parents):
        expected[segment] = ordinary_attention(q[segment], k[rows], v[rows], *variant)
    return expected


def check(case, variant="plain", heads=(4, 2, 2)):
    (window, softcap, has_sinks), total = VARIANTS[variant], sum(CASES[case][0])
    generator = torch.Generator().manual_seed(0)
    shapes = [(total, h, 8) for h in heads] + [(heads[0],)] * has_sinks
    inputs = [2 * torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes]
    q, k, v, *sinks = (x.requires_grad_() for x in inputs)
    forest = Forest(*map(torch.tensor, CASES[case]), CPU)
    out = tree_attention(q, k, v, forest, AttentionVariant(window, softcap, *sinks))
    expected = ordinary_forest(q, k, v, *CASES[case], window, softcap, *sinks)
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-12)

    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    found, wanted = (torch.autograd.grad(x, inputs, grad) for x in (out, expected))
    for a, w in zip(found, wanted, strict=True):
        assert variant != "plain" or w.abs().max() > 0.1
        torch.testing.assert_close(a, w, rtol=1e-11, atol=1e-12 * max(1.0, float(w.abs().max())))


@pytest.fixture(params=["own kernel", "FlashAttention calls"])
def path(request, monkeypatch):
    if request.param == "FlashAttention calls":
        monkeypatch.setattr(attention, "has_kernel", lambda *_: False)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_equal_ordinary_attention(case):
    for heads in ((4, 2, 2), (4, 4, 4), (6, 1, 1)) if case == "uneven groups" else ((4, 2, 2),):
        check(case, heads=heads)


@pytest.mark.parametrize("variant", [*VARIANTS][1:])
@pytest.mark.parametrize("case", ["uneven groups", "prefixes of prefixes", "only sequences"])
def test_variants_equal_ordinary_attention(case, variant):
    check(case, variant)


def emulated(calls):
    """Return torch's varlen functions, computed by padding, with the signatures of the real ones.
    `calls` gets the window of each call."""

    def spec(
        cu_q, cu_k, max_q, max_k, dropout_p, causal, window_size_left=-1, window_size_right=-1
    ):
        calls.append(window_size_left)
        assert dropout_p == 0.0
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert max_q >= cu_q.diff().max()
        assert max_k == cu_k.diff().max()
        assert window_size_right == (0 if window_size_left >= 0 else -1)
        lengths = cu_q.diff().long(), cu_k.diff().long()
        return VarlenSpec(*lengths, CPU, causal=causal, window=window_size_left + 1)

    class Aten:
        @staticmethod
        def _flash_attention_forward(q, k, v, *sizes, **window):
            *sizes, _debug = sizes
            o, lse = REFERENCE.forward(q, k, v, spec(*sizes, **window))
            return o, lse.t(), torch.empty(2), torch.empty(0), torch.empty(0)

        @staticmethod
        def _flash_attention_backward(grad, q, k, v, o, lse, *sizes, **window):
            assert lse.shape == (q.shape[1], len(q))
            assert lse.is_contiguous()
            *sizes, _state, _unused = sizes
            return REFERENCE.backward(grad, q, k, v, o, lse.t(), spec(*sizes, **window))

        def __getattr__(self, name: str):
            return getattr(REAL_ATEN, name)

    return Aten()


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
    monkeypatch.setattr(attention.torch.ops, "aten", emulated(calls))
    monkeypatch.setattr(attention, "has_kernel", lambda *_: False)
    monkeypatch.setattr(attention, "kernel_for", lambda *_: attention.TORCH_VARLEN)
    check(case, variant)
    window = VARIANTS[variant][0]
    assert calls == [window - 1] * 2 or (not window and set(calls) == {-1})


def test_which_kernel_runs(monkeypatch):
    def runs(dtype, head_dim=64, softcap=0.0, place="cuda"):
        return attention.kernel_for(torch.device(place), dtype, head_dim, softcap)

    half, padded = torch.bfloat16, attention.REFERENCE
    monkeypatch.setattr(attention, "_flash_attn", lambda: None)
    monkeypatch.setattr(attention, "_is_recent", lambda device: True)
    assert runs(half) is attention.TORCH_VARLEN
    assert runs(torch.float32) is runs(half, 20) is runs(half, softcap=50.0) is padded
    assert runs(half, place="cpu") is padded
    monkeypatch.setattr(attention, "_flash_attn", lambda: object())
    assert runs(torch.float16, 128) is runs(half, softcap=50.0) is attention.FLASH_ATTN
    monkeypatch.setattr(attention, "_is_recent", lambda device: False)
    assert runs(torch.float16, 128) is padded


@pytest.mark.usefixtures("no_flash_attn_afterwards")
@pytest.mark.parametrize(("version", "interface"), [("2.6.3", ""), ("4.0.0", None)])
def test_unsupported_flash_attn_versions_are_not_used(monkeypatch, tmp_path, version, interface):
    """Versions below 2.7 return other values, and version 4 has no FlashAttention-2, so torch's own
    kernel runs."""
    install_flash_attn(monkeypatch, tmp_path, version, interface)
    assert attention._flash_attn() is None


@pytest.fixture
def no_flash_attn_afterwards():
    yield
    attention._flash_attn.cache_clear()
    for name in ("flash_attn", "flash_attn.flash_attn_interface"):
        sys.modules.pop(name, None)


def install_flash_attn(monkeypatch, folder, version, interface):
    (folder / "flash_attn").mkdir()
    (folder / "flash_attn" / "__init__.py").write_text(f"__version__ = '{version}'")
    if interface is not None:
        (folder / "flash_attn" / "flash_attn_interface.py").write_text(interface)
    monkeypatch.syspath_prepend(folder)
    attention._flash_attn.cache_clear()


HEADS = 4, 2, 64
FA3, FA4 = "FA3 of flash_attn_interface", "FA4 of flash_attn.cute.interface"


def attend_prompts(q, k, v, starts, cache_starts, most, width, lengths, factor=1.0):
    """The attention of attend_prompts, where all prompts have as many queries."""
    tiles = (x.unflatten(0, (-1, n)) for x, n in ((q, most), (k, width), (v, width)))
    o, lse = attention.attend(*tiles, torch.arange(width) < lengths[:, None, None])
    return o.flatten(0, 1) * factor, lse.flatten(0, 1)


class Registry:
    """torch.nn.attention with implementations of its own: each is a kernel, or an error of its
    activation, and a factor of what it computes in decoding."""

    def __init__(self, patch, implementations):
        self.implementations, self._patch = implementations, patch
        self.active, self.log = None, []
        patch.setattr(attention, "registry", self)
        patch.setattr(attention, "_is_installed", lambda module: module.endswith("interface"))
        patch.setattr(attention, "kernel_for", lambda *_: attention.TORCH_VARLEN)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def current_flash_attention_impl(self):
        return self.active

    def activate_flash_attention_impl(self, name):
        self.log.append(name)
        kernel, factor = self.implementations[name]
        if isinstance(kernel, Exception):
            raise kernel
        self.active = name
        self._patch.setattr(attention, "TORCH_VARLEN", kernel)
        self._patch.setattr(
            attention, "attend_prompts", lambda *x: attend_prompts(*x, factor=factor)
        )

    def restore_flash_attention_impl(self):
        self.log.append("restored")
        self.active = None


def wrong(part, factor):
    """Plain attention with one of its results, 0 to 4 as (o, l, dq, dk, dv), multiplied."""

    def changed(results, first):
        return tuple(x * factor if first + i == part else x for i, x in enumerate(results))

    def forward(*x):
        return changed(REFERENCE.forward(*x), 0)

    return Kernel("wrong", forward, lambda *x: changed(REFERENCE.backward(*x), 2)), 1.0


def raising(*_):
    raise RuntimeError("FA3 flash_attention backward unsupported\nand a second line")


RIGHT = (REFERENCE, 1.0)
REFUSED = {  # an implementation, and why it is refused
    "its import": ((ImportError("no libcudart"), 1.0), "ImportError: no libcudart"),
    "its backward pass": (
        (Kernel("half", REFERENCE.forward, raising), 1.0),
        "RuntimeError: FA3 flash_attention backward unsupported",
    ),
    "its output": (wrong(0, 1.1), "it is off by 0.1, relative, at most 0.016"),
    "its log-sum-exp": (wrong(1, 0.9), "it is off by 0.1"),
    "its gradient of v": (wrong(4, float("nan")), "it is off by nan"),
    "its decoding": ((REFERENCE, 1.03), "it is off by 0.03"),
}


@pytest.mark.parametrize("what", [*REFUSED])
def test_what_fails_or_computes_something_else_is_taken_out_again(monkeypatch, what):
    implementation, reason = REFUSED[what]
    registry = Registry(monkeypatch, {"FA3": implementation, "FA4": RIGHT})
    refused, runs = attention.choose(CPU, torch.bfloat16, HEADS)
    assert refused.startswith(f"attention: {FA3} was tried and refused: {reason}")
    assert "\n" not in refused
    assert runs == f"attention: {FA4} runs in place of PyTorch's FlashAttention-2"
    assert registry.active == "FA4"
    assert registry.log == (["FA3", "FA4"] if what == "its import" else ["FA3", "restored", "FA4"])


def test_all_ranks_take_the_same(monkeypatch):
    registry = Registry(monkeypatch, {"FA3": RIGHT, "FA4": RIGHT})
    flags = iter([False, True, False, False])  # FA3 fails on another rank
    refused, runs = attention.choose(CPU, torch.bfloat16, HEADS, lambda failed: next(flags))
    assert refused == f"attention: {FA3} was tried and refused: it failed on another rank"
    assert (registry.active, runs.split()[1]) == ("FA4", "FA4")
