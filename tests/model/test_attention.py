"""Shared-prompt attention against ordinary causal attention over [prompt, response], sequence by
sequence, in float64.
"""

import contextlib
import sys
from types import SimpleNamespace

import pytest
import torch

from maxrl_fast.model import attention_kernel, flash
from maxrl_fast.model.attention import SharedPromptLayout, merge, shared_prompt_attention
from maxrl_fast.model.flash import (
    VarlenSpec,
    attend,
    attend_backward,
    attend_backward_reference,
    attend_reference,
)
from tests.tables import refused

CPU = torch.device("cpu")
# The lengths of the sequences, the lengths of the responses, and the sequence that each response
# answers.
CASES = {
    "uneven groups": ([5, 5, 5], [3, 1, 6, 2, 9], [0, 0, 1, 1, 2]),
    "prompts of different lengths": ([4, 1, 7], [2, 3, 17, 5], [0, 1, 1, 2]),
    "one response": ([6], [4], [0]),
    "responses without tokens": ([3, 4], [0, 5, 0, 1], [0, 0, 1, 1]),
    "no response tokens at all": ([3, 2], [0, 0], [0, 1]),
    "equal lengths": ([4, 4], [3, 3, 3, 3], [0, 0, 1, 1]),
    "sequences without responses": ([9, 3, 12, 40], [2, 5], [1, 1]),
    "only sequences": ([9, 3, 1], [], []),
}


def ordinary_attention(q, k, v):
    """Compute causal attention in plain PyTorch: q [L, Hq, D], k and v [L, Hkv, D]."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[2] ** 0.5
    scores = scores.masked_fill(torch.ones(len(q), len(q), dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)


def ordinary_stream(q, k, v, lengths, response_lengths, prompt_index):
    """Compute ordinary attention of a stream, every sequence written out."""
    sequences = torch.arange(sum(lengths)).split(lengths)
    responses = (
        (torch.arange(sum(response_lengths)) + sum(lengths)).split(response_lengths)
        if response_lengths
        else ()
    )
    expected = torch.zeros_like(q)
    for b, sequence in enumerate(sequences):
        expected[sequence] = ordinary_attention(q[sequence], k[sequence], v[sequence])
        for response in (
            r for r, prompt in zip(responses, prompt_index, strict=True) if prompt == b
        ):
            rows = torch.cat([sequence, response])
            expected[response] = ordinary_attention(q[rows], k[rows], v[rows])[len(sequence) :]
    return expected


def check_against_ordinary_attention(case, dtype=torch.float64, rtol=1e-11, heads=(4, 2, 2)):
    lengths, response_lengths, prompt_index = CASES[case]
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths) + sum(response_lengths)
    q, k, v = (
        torch.randn(total, h, 8, generator=generator, dtype=dtype).requires_grad_() for h in heads
    )
    layout = SharedPromptLayout(*(torch.tensor(x, dtype=torch.int64) for x in CASES[case]), CPU)
    out = shared_prompt_attention(q, k, v, layout)

    expected = ordinary_stream(q, k, v, lengths, response_lengths, prompt_index)
    torch.testing.assert_close(out, expected, rtol=rtol, atol=rtol / 10)

    grad = torch.randn(out.shape, generator=generator, dtype=dtype)
    actual = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    wanted = torch.autograd.grad(expected, (q, k, v), grad)
    for a, w in zip(actual, wanted, strict=True):
        assert w.abs().max() > 0.1
        torch.testing.assert_close(a, w, rtol=rtol, atol=rtol / 10)


@pytest.fixture(params=["own kernel", "FlashAttention calls"])
def path(request, monkeypatch):
    if request.param == "FlashAttention calls":
        monkeypatch.setattr(attention_kernel, "has_kernel", lambda *_: False)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_equal_ordinary_attention(case):
    check_against_ordinary_attention(case)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("heads", [(4, 4, 4), (6, 1, 1)])
def test_grouped_query_heads(heads):
    check_against_ordinary_attention("uneven groups", heads=heads)


def emulated_varlen(calls):
    """Return FlashAttention's varlen functions, forward and backward, computed by attend_reference
    one sequence at a time.

    Log-sum-exps are [H, T]. Keys and values keep their own number of heads.
    """

    def runs(cu_q, cu_k, max_q, max_k):
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert max_q >= cu_q.diff().max()
        assert max_k == cu_k.diff().max()
        pairs = zip(
            cu_q[:-1].tolist(),
            cu_q[1:].tolist(),
            cu_k[:-1].tolist(),
            cu_k[1:].tolist(),
            strict=True,
        )
        return [(slice(a, b), slice(c, d)) for a, b, c, d in pairs if b > a]

    def heads_first(x, heads):
        return x.repeat_interleave(heads // x.shape[1], 1).transpose(0, 1)[None]

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, is_causal):
        o, lse = torch.empty_like(q), q.new_empty(q.shape[1], len(q))
        for of_q, of_k in runs(cu_q, cu_k, max_q, max_k):
            part = (heads_first(x, q.shape[1]) for x in (q[of_q], k[of_k], v[of_k]))
            out, part_lse = attend_reference(*part, is_causal, None)
            o[of_q], lse[:, of_q] = out[0].transpose(0, 1), part_lse[0]
        calls.append(lse.shape)
        return o, lse

    def backward(grad, q, k, v, o, lse, cu_q, cu_k, max_q, max_k, is_causal):
        assert lse.shape == (q.shape[1], len(q))
        assert lse.is_contiguous()
        grads = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for of_q, of_k in runs(cu_q, cu_k, max_q, max_k):
            part = [
                heads_first(x, q.shape[1]) for x in (grad[of_q], q[of_q], k[of_k], v[of_k], o[of_q])
            ]
            by_q, by_k, by_v = attend_backward_reference(*part, lse[None, :, of_q], is_causal, None)
            grads[0][of_q] = by_q[0].transpose(0, 1)
            for packed, x in ((grads[1], by_k), (grads[2], by_v)):
                packed[of_k] = x[0].transpose(0, 1).unflatten(1, (k.shape[1], -1)).sum(2)
        return grads

    return forward, backward


@pytest.mark.parametrize("case", CASES)
def test_torch_varlen_calls(case, monkeypatch):
    """Check the calls on a GPU in half precision. An emulation with the same signatures replaces
    torch's kernels.
    """
    calls = []
    forward, backward = emulated_varlen(calls)

    def aten_forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, return_debug_mask):
        assert (dropout_p, return_debug_mask) == (0.0, False)
        return (
            *forward(q, k, v, cu_q, cu_k, max_q, max_k, is_causal),
            torch.empty(2),
            torch.empty(0),
            torch.empty(0),
        )

    def aten_backward(
        grad, q, k, v, o, lse, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, rng_state, unused
    ):
        assert dropout_p == 0.0
        return backward(grad, q, k, v, o, lse, cu_q, cu_k, max_q, max_k, is_causal)

    schema = torch.ops.aten._flash_attention_forward.default._schema
    names = "cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask"
    assert " ".join(a.name for a in schema.arguments[3:10]) == names
    schema = torch.ops.aten._flash_attention_backward.default._schema
    names = "out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal rng_state unused"
    assert " ".join(a.name for a in schema.arguments[4:14]) == names
    aten = SimpleNamespace(
        _flash_attention_forward=aten_forward, _flash_attention_backward=aten_backward
    )
    monkeypatch.setattr(flash, "kernel_for", lambda *_: flash.TORCH_VARLEN)
    monkeypatch.setattr(flash.torch.ops, "aten", aten)
    check_against_ordinary_attention(case)
    assert calls


def fake_flash_attn(calls):
    forward, backward = emulated_varlen(calls)

    def varlen_forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, softmax_scale, causal):
        assert (dropout_p, softmax_scale) == (0.0, q.shape[-1] ** -0.5)
        return *forward(q, k, v, cu_q, cu_k, max_q, max_k, causal), torch.empty(0), torch.empty(2)

    def varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        deterministic,
    ):  # fmt: skip
        assert (window_size_left, window_size_right, softcap, alibi_slopes) == (-1, -1, 0.0, None)
        grads = backward(
            dout,
            q,
            k,
            v,
            out,
            softmax_lse,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            causal,
        )
        for given, grad in zip((dq, dk, dv), grads, strict=True):
            given.copy_(grad)

    return SimpleNamespace(
        _flash_attn_varlen_forward=varlen_forward, _flash_attn_varlen_backward=varlen_backward
    )


@pytest.mark.parametrize("case", CASES)
def test_flash_attn_calls(case, monkeypatch):
    """Check the calls of the flash-attn package. An emulation with the same signatures replaces
    it.
    """
    calls = []
    package = fake_flash_attn(calls)
    monkeypatch.setattr(flash, "_flash_attn", lambda: package)
    monkeypatch.setattr(flash, "kernel_for", lambda *_: flash.FLASH_ATTN)
    check_against_ordinary_attention(case)
    assert calls


def test_which_kernel_runs(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(flash, "_flash_attn", lambda: None)
    monkeypatch.setattr(flash, "_is_recent", lambda device: True)
    assert flash.kernel_for(CPU, torch.bfloat16, 64) is flash.PADDED_CPU
    assert flash.kernel_for(cuda, torch.bfloat16, 64) is flash.TORCH_VARLEN
    assert flash.kernel_for(cuda, torch.float32, 64) is flash.PADDED_REFERENCE
    assert flash.kernel_for(cuda, torch.bfloat16, 20) is flash.PADDED_REFERENCE
    monkeypatch.setattr(flash, "_flash_attn", lambda: object())
    assert flash.kernel_for(cuda, torch.float16, 128) is flash.FLASH_ATTN
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


def test_queries_need_a_key():
    with pytest.raises(ValueError, match="at least one key"):
        VarlenSpec(torch.tensor([1, 2]), torch.tensor([3, 0]), CPU)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_reference_equals_the_flash_kernel(causal, masked):
    generator = torch.Generator().manual_seed(1)
    q, grad = (torch.randn(3, 5, 4, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(3, 5, 4, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = None
    if masked:
        mask = torch.zeros(3, 1, 1, 5, dtype=torch.float64)
        mask[1, ..., 3:] = float("-inf")
    o, lse = attend(q, k, v, causal=causal, mask=mask)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    o_reference, lse_reference = attend_reference(*heads_first, causal, mask)
    torch.testing.assert_close(o, o_reference.transpose(1, 2), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(lse, lse_reference.transpose(1, 2), rtol=1e-12, atol=1e-13)
    actual = attend_backward(grad, q, k, v, o, lse, causal=causal, mask=mask)
    wanted = attend_backward_reference(
        grad.transpose(1, 2), *heads_first, o_reference, lse_reference, causal, mask
    )
    for a, w in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, w.transpose(1, 2), rtol=1e-11, atol=1e-12)


def test_the_references_bfloat16_error_is_at_most_twice_the_kernels():
    generator = torch.Generator().manual_seed(3)
    exact = [torch.randn(4, 32, 2, 16, generator=generator, dtype=torch.float64) for _ in range(4)]
    rounded = [x.bfloat16() for x in exact]
    exact = [x.double() for x in rounded]

    def errors(attend_, backward, arguments):
        grad, *qkv = arguments
        o, lse = attend_(*qkv)
        truth = [x.transpose(1, 2) for x in exact]
        true_o, true_lse = attend_reference(*truth[1:], True, None)
        true_grads = attend_backward_reference(*truth, true_o, true_lse, True, None)
        results = (o, *backward(grad, *qkv, o, lse))
        wanted = (true_o, *true_grads)
        return [
            float((x.double() - w).norm() / w.norm()) for x, w in zip(results, wanted, strict=True)
        ]

    def flash(q, k, v):
        return [
            x.transpose(1, 2) for x in attend(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)
        ]

    def flash_backward(*tensors):
        return [
            x.transpose(1, 2)
            for x in attend_backward(*(x.transpose(1, 2) for x in tensors), causal=True)
        ]

    heads_first = [x.transpose(1, 2) for x in rounded]
    kernel = errors(flash, flash_backward, heads_first)
    reference = errors(
        lambda *qkv: attend_reference(*qkv, True, None),
        lambda *x: attend_backward_reference(*x, True, None),
        heads_first,
    )
    for ours, theirs in zip(reference, kernel, strict=True):
        assert 1e-5 < ours <= 2 * theirs


def test_merge_equals_attention_over_the_union():
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(2, 3, 4, 8, generator=generator, dtype=torch.float64)
    k, v = (torch.randn(2, 9, 4, 8, generator=generator, dtype=torch.float64) * 3 for _ in range(2))
    whole = attend(q, k, v)
    parts = (*attend(q, k[:, :2], v[:, :2]), *attend(q, k[:, 2:], v[:, 2:]))
    for actual, expected in zip(merge(*parts), whole, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)
