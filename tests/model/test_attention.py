"""Shared-prompt attention against ordinary causal attention over [prompt, response], sequence by sequence, in float64."""

import pytest
import torch

from maxrl_fast.model.attention import (
    SharedPromptLayout,
    attend,
    attend_backward,
    attend_backward_reference,
    attend_reference,
    merge,
    shared_prompt_attention,
)

CASES = {
    "uneven groups": ([5, 5, 5], [3, 1, 6, 2, 9], [0, 0, 1, 1, 2]),
    "prompts of different lengths": ([4, 1, 7], [2, 3, 17, 5], [0, 1, 1, 2]),
    "one response": ([6], [4], [0]),
    "responses without tokens": ([3, 4], [0, 5, 0, 1], [0, 0, 1, 1]),
    "no response tokens at all": ([3, 2], [0, 0], [0, 1]),
    "equal lengths": ([4, 4], [3, 3, 3, 3], [0, 0, 1, 1]),
}


def ordinary_attention(q, k, v):
    """q [L, Hq, D], k and v [L, Hkv, D], causal."""
    repeats = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) / q.shape[2] ** 0.5
    scores = scores.masked_fill(torch.ones(len(q), len(q), dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), v)


@pytest.mark.parametrize("case", CASES)
def test_equals_ordinary_attention_outputs_and_gradients(case):
    prompt_lengths, response_lengths, groups = CASES[case]
    generator = torch.Generator().manual_seed(0)
    total = sum(prompt_lengths) + sum(response_lengths)
    q, k, v = (torch.randn(total, heads, 8, generator=generator, dtype=torch.float64).requires_grad_() for heads in (4, 2, 2))
    layout = SharedPromptLayout.build(torch.tensor(prompt_lengths), torch.tensor(response_lengths), torch.tensor(groups))
    out = shared_prompt_attention(q, k, v, layout)

    prompts = torch.arange(sum(prompt_lengths)).split(prompt_lengths)
    responses = (torch.arange(sum(response_lengths)) + sum(prompt_lengths)).split(response_lengths)
    expected = torch.zeros_like(out)
    for g, prompt in enumerate(prompts):
        expected[prompt] = ordinary_attention(q[prompt], k[prompt], v[prompt])
        for response in (r for r, group in zip(responses, groups, strict=True) if group == g):
            rows = torch.cat([prompt, response])
            expected[response] = ordinary_attention(q[rows], k[rows], v[rows])[len(prompt) :]
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-13)

    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    actual = torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)
    wanted = torch.autograd.grad(expected, (q, k, v), grad)
    for a, w in zip(actual, wanted, strict=True):
        assert w.abs().max() > 0.1
        torch.testing.assert_close(a, w, rtol=1e-11, atol=1e-12)


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
    wanted = attend_backward_reference(grad.transpose(1, 2), *heads_first, o_reference, lse_reference, causal, mask)
    for a, w in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, w.transpose(1, 2), rtol=1e-11, atol=1e-12)


def test_the_reference_in_bfloat16_errs_at_most_twice_as_much_as_the_kernel():
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
        return [float((x.double() - w).norm() / w.norm()) for x, w in zip(results, wanted, strict=True)]

    def flash(q, k, v):
        return [x.transpose(1, 2) for x in attend(*(x.transpose(1, 2) for x in (q, k, v)), causal=True)]

    def flash_backward(*tensors):
        return [x.transpose(1, 2) for x in attend_backward(*(x.transpose(1, 2) for x in tensors), causal=True)]

    heads_first = [x.transpose(1, 2) for x in rounded]
    kernel = errors(flash, flash_backward, heads_first)
    reference = errors(
        lambda *qkv: attend_reference(*qkv, True, None), lambda *x: attend_backward_reference(*x, True, None), heads_first
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
