"""Losses from hidden states and the output matrix: what the losses from logits do not have.

tests/ops/test_token_loss.py compares them with definitions, and the fuzz tests draw sizes.
"""

import pytest
import torch

from maxrl_fast.ops import (
    linear_policy_gradient_loss,
    linear_token_logprobs,
    policy_gradient_loss,
    token_logprobs,
)
from maxrl_fast.ops.logit_chunks import Chunks, chunk_tokens
from maxrl_fast.runtime.device import resolve_device
from tests.ops.loss_definitions import aggregation_of
from tests.ops.operators import Operators

T, H, V = 50, 16, 70


def make(dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(T, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator).to(dtype).requires_grad_()
    batch = {
        "targets": torch.randint(V, (T,), generator=generator),
        "advantages": torch.tensor([1.0, 0.0, -2.0, 0.5]),
        "cu_seqlens": torch.tensor([0, 10, 10, 30, 50]),
        "old_logprobs": -5 * torch.rand(T, generator=generator),
        "mask": torch.rand(T, generator=generator) < 0.8,
        "temperature": 0.5 + torch.rand(T, generator=generator),
    }
    return hidden, weight, batch


def logits_of(hidden, weight, softcap=0.0):
    logits = hidden @ weight.to(hidden.dtype).T
    return softcap * torch.tanh(logits / softcap) if softcap else logits


# each side rounds its own products
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def assert_close(actual, expected, dtype):
    for ours, theirs in zip(actual, expected, strict=True):
        error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert error <= TOLERANCE[dtype], float(error)


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_a_master_weight_in_float32_has_a_gradient_in_float32(loss):
    """In bfloat16, small contributions of chunks would be lost."""
    hidden, weight, batch = make(torch.bfloat16)
    weight = weight.detach().float().requires_grad_()
    batch |= {"loss": loss, "aggregation": aggregation_of(loss, "seq_mean_token_mean")}
    expected, _ = policy_gradient_loss(logits_of(hidden, weight), **batch)
    actual, _ = linear_policy_gradient_loss(hidden, weight, **batch, chunk_tokens=7)
    assert actual.item() == pytest.approx(expected.item(), rel=4e-3)
    gradients = [torch.autograd.grad(2 * x, (hidden, weight)) for x in (actual, expected)]
    assert gradients[0][1].dtype == torch.float32
    # nor rounded before: 2 changes no digit
    assert (gradients[0][1] != gradients[0][1].bfloat16()).any()
    assert_close(*gradients, torch.bfloat16)


def test_frozen_inputs_get_no_gradient_buffer():
    hidden, weight, batch = make(torch.float32)
    # all rows have a gradient
    batch |= {"mask": None, "advantages": torch.tensor([1.0, 1.0, -2.0, 0.5])}
    expected, _ = policy_gradient_loss(logits_of(hidden, weight), **batch)
    for frozen, free in ((weight, hidden), (hidden, weight)):
        given = [x.detach() if x is frozen else x for x in (hidden, weight)]
        with Operators() as operators:
            loss, _ = linear_policy_gradient_loss(*given, **batch)
        both = (torch.autograd.grad(x, [free], retain_graph=True) for x in (loss, expected))
        assert_close(*both, torch.float32)
        assert operators.sizes() & {T * H, V * H} == {free.numel()}
    with torch.no_grad(), Operators() as operators:
        loss, _ = linear_policy_gradient_loss(hidden, weight, **batch)
    assert not operators.sizes() & {V * H, T * H}
    assert loss.item() == expected.item()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_logprobs_equal_logprobs_from_logits(dtype):
    hidden, weight, batch = make(dtype)
    generator, targets = torch.Generator().manual_seed(2), batch["targets"]
    for softcap, tau in ((0.0, 0.7), (4.0, batch["temperature"])):
        scale = {"temperature": tau, "softcap": softcap, "chunk_tokens": 7}
        expected = token_logprobs(logits_of(hidden, weight, softcap), targets, temperature=tau)
        actual = linear_token_logprobs(hidden, weight, targets, **scale)
        assert_close(actual, expected, dtype)
        slopes = [torch.randn(T, generator=generator).to(actual[0].dtype) for _ in range(2)]
        both = (torch.autograd.grad(x, (hidden, weight), slopes) for x in (actual, expected))
        assert_close(*both, dtype)
    with torch.no_grad():
        assert not linear_token_logprobs(hidden, weight, targets)[0].requires_grad


def test_chunks_fill_whole_waves_of_tiles():
    for num_tokens, most, chunk in (
        (16384, 4416, 4224),  # 33 x 16 tiles are four waves of 132 multiprocessors
        (16384, 2560, 2048),  # 256 tiles of 264; 2560 tokens would be 320 tiles, three waves
        (300, 4416, 300),  # all at once
        (0, 4416, 1),
        (1000, 128, 128),
    ):
        assert chunk_tokens(num_tokens, most, 4096, 132) == chunk


def test_split_sums_of_gradients_are_in_full_precision(monkeypatch):
    """cuBLAS may otherwise add parts of the sum over the vocabulary in half precision."""
    matmul, seen, mm = torch.backends.cuda.matmul, [], torch.mm

    def watched(a, b, **options):
        seen.append((b is chunks.weight, matmul.allow_bf16_reduced_precision_reduction))
        return mm(a, b, **options)

    assert matmul.allow_bf16_reduced_precision_reduction  # PyTorch's default
    hidden, weight, _ = make(torch.bfloat16)
    chunks = Chunks(hidden.detach(), weight.detach(), 20, needs=(True, True))
    monkeypatch.setattr(torch, "mm", watched)
    for start, stop, _ in chunks:
        chunks.backward(start, stop)
    assert seen == [(False, True), (True, False)] * 3  # of logits, and of hidden states
    assert matmul.allow_bf16_reduced_precision_reduction

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    try:
        resolve_device("auto")  # for a whole run
        assert not matmul.allow_bf16_reduced_precision_reduction
        assert not matmul.allow_fp16_reduced_precision_reduction
    finally:
        matmul.allow_bf16_reduced_precision_reduction = True
        matmul.allow_fp16_reduced_precision_reduction = True
