"""Sliding windows, soft caps and sinks against ordinary attention over [prompt, response], sequence
by sequence, in float64.
"""

from types import SimpleNamespace

import pytest
import torch

from maxrl_fast.model import flash
from maxrl_fast.model.attention import AttentionVariant, SharedPromptLayout, shared_prompt_attention
from maxrl_fast.model.flash import PADDED_REFERENCE, VarlenSpec
from tests.model.test_attention import CASES, CPU

REAL_ATEN = torch.ops.aten
VARIANTS = {
    "window 1": (1, 0.0, False),
    "window 3": (3, 0.0, False),
    "window as long as a prompt and its response": (9, 0.0, False),
    "window longer than all": (1000, 0.0, False),
    "soft cap": (0, 1.5, False),
    "sinks": (0, 0.0, True),
    "all three": (4, 2.0, True),
}


def ordinary_attention(q, k, v, window, softcap, sinks):
    """q [L, Hq, D], k and v [L, Hkv, D], sinks [Hq] or None."""
    repeats, length = q.shape[1] // k.shape[1], len(q)
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[2] ** 0.5
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    i, j = torch.arange(length)[:, None], torch.arange(length)
    scores = scores.masked_fill((j > i) | (bool(window) & (j <= i - window)), float("-inf"))
    extra = [] if sinks is None else [sinks[:, None, None].expand(-1, length, 1)]
    p = torch.cat([scores, *extra], -1).softmax(-1)[..., :length]
    return torch.einsum("hij,jhd->ihd", p, v)


def check(case, variant, dtype=torch.float64, rtol=1e-11, head_dim=8):
    (window, softcap, has_sinks), (lengths, response_lengths, prompt_index) = (
        VARIANTS[variant],
        CASES[case],
    )
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths) + sum(response_lengths)
    tensors = [
        2 * torch.randn(total, h, head_dim, generator=generator, dtype=torch.float64)
        for h in (4, 2, 2)
    ]
    tensors += [torch.randn(4, generator=generator, dtype=torch.float64)] if has_sinks else []
    inputs = [x.to(dtype).requires_grad_() for x in tensors]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    layout = SharedPromptLayout(*(torch.tensor(x, dtype=torch.int64) for x in CASES[case]), CPU)
    out = shared_prompt_attention(
        *inputs[:3], layout, AttentionVariant(window, softcap, *inputs[3:])
    )

    (q, k, v), sinks = exact[:3], exact[3] if has_sinks else None
    sequences = torch.arange(sum(lengths)).split(lengths)
    responses = (
        (torch.arange(sum(response_lengths)) + sum(lengths)).split(response_lengths)
        if response_lengths
        else ()
    )
    expected = torch.zeros_like(q)
    for b, sequence in enumerate(sequences):
        expected[sequence] = ordinary_attention(
            q[sequence], k[sequence], v[sequence], window, softcap, sinks
        )
        for response in (
            r for r, prompt in zip(responses, prompt_index, strict=True) if prompt == b
        ):
            rows = torch.cat([sequence, response])
            expected[response] = ordinary_attention(
                q[rows], k[rows], v[rows], window, softcap, sinks
            )[len(sequence) :]
    torch.testing.assert_close(out.double(), expected, rtol=rtol, atol=rtol)

    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(dtype)
    wanted = torch.autograd.grad(expected, exact, grad.double())
    for actual, w in zip(torch.autograd.grad(out, inputs, grad), wanted, strict=True):
        torch.testing.assert_close(
            actual.double(), w, rtol=rtol, atol=rtol * max(1.0, float(w.abs().max()))
        )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_equal_ordinary_attention(case, variant):
    check(case, variant)


@pytest.mark.parametrize("variant", ["window 3", "soft cap", "all three"])
def test_half_precision(variant):
    check("prompts of different lengths", variant, torch.bfloat16, 0.03)


def emulated(calls):
    """Return the varlen functions of torch and of flash-attn, computed by padding; they take the
    arguments of the real ones.
    """

    def spec(cu_q, cu_k, causal, left, right, softcap=0.0):
        calls.append(left)
        assert right == (0 if left >= 0 else -1)
        return VarlenSpec(
            cu_q.diff().long(),
            cu_k.diff().long(),
            CPU,
            causal=causal,
            window=left + 1,
            softcap=softcap,
        )

    def aten_forward(
        q,
        k,
        v,
        cu_q,
        cu_k,
        _q,
        _k,
        _p,
        causal,
        _debug,
        *,
        window_size_left=-1,
        window_size_right=-1,
    ):
        o, lse = PADDED_REFERENCE.forward(
            q, k, v, spec(cu_q, cu_k, causal, window_size_left, window_size_right)
        )
        return o, lse.t()

    def aten_backward(
        grad,
        q,
        k,
        v,
        o,
        lse,
        cu_q,
        cu_k,
        _q,
        _k,
        _p,
        causal,
        _state,
        _unused,
        *,
        window_size_left=-1,
        window_size_right=-1,
    ):
        own = spec(cu_q, cu_k, causal, window_size_left, window_size_right)
        return PADDED_REFERENCE.backward(grad, q, k, v, o, lse.t(), own)

    def package_forward(
        q,
        k,
        v,
        cu_q,
        cu_k,
        _q,
        _k,
        *,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
    ):
        own = spec(cu_q, cu_k, causal, window_size_left, window_size_right, softcap)
        o, lse = PADDED_REFERENCE.forward(q, k, v, own)
        return o, lse.t()

    def package_backward(
        grad, q, k, v, o, lse, dq, dk, dv, cu_q, cu_k, _q, _k, *,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
        alibi_slopes, deterministic,
    ):  # fmt: skip
        own = spec(cu_q, cu_k, causal, window_size_left, window_size_right, softcap)
        for given, x in zip(
            (dq, dk, dv), PADDED_REFERENCE.backward(grad, q, k, v, o, lse.t(), own), strict=True
        ):
            given.copy_(x)

    class Aten:
        _flash_attention_forward, _flash_attention_backward = (
            staticmethod(aten_forward),
            staticmethod(aten_backward),
        )

        def __getattr__(self, name: str):
            return getattr(REAL_ATEN, name)

    package = SimpleNamespace(
        _flash_attn_varlen_forward=package_forward, _flash_attn_varlen_backward=package_backward
    )
    return Aten(), package


@pytest.mark.parametrize("variant", ["window 1", "window 3", "sinks"])
def test_torchs_kernel_gets_the_window(monkeypatch, variant):
    calls: list[int] = []
    monkeypatch.setattr(flash.torch.ops, "aten", emulated(calls)[0])
    monkeypatch.setattr(flash, "kernel_for", lambda *_: flash.TORCH_VARLEN)
    check("uneven groups", variant)
    assert calls == [VARIANTS[variant][0] - 1] * 2


@pytest.mark.parametrize("variant", ["window 3", "soft cap", "all three"])
def test_flash_attn_gets_the_window_and_the_soft_cap(monkeypatch, variant):
    calls: list[int] = []
    monkeypatch.setattr(flash, "_flash_attn", lambda: emulated(calls)[1])
    monkeypatch.setattr(flash, "kernel_for", lambda *_: flash.FLASH_ATTN)
    check("uneven groups", variant)
    assert calls == [VARIANTS[variant][0] - 1] * 2


def test_torchs_kernel_takes_no_soft_cap(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(flash, "_is_recent", lambda device: True)
    monkeypatch.setattr(flash, "_flash_attn", lambda: None)
    assert flash.kernel_for(cuda, torch.bfloat16, 64, 0.0) is flash.TORCH_VARLEN
    assert flash.kernel_for(cuda, torch.bfloat16, 64, 50.0) is flash.PADDED_REFERENCE
    monkeypatch.setattr(flash, "_flash_attn", lambda: object())
    assert flash.kernel_for(cuda, torch.bfloat16, 64, 50.0) is flash.FLASH_ATTN
