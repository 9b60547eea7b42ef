"""The losses from hidden states and the output matrix against the losses from logits.

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


# One loss of a kernel, one by response, one of rows and one that chooses tokens; a master weight in
# float32 gets its gradient in float32: in bfloat16, small contributions of chunks would be lost.
@pytest.mark.parametrize(
    ("loss", "dtype", "of_weight"),
    [
        ("ppo", torch.float32, torch.float32),
        ("ppo", torch.bfloat16, torch.float32),
        ("gspo", torch.bfloat16, torch.bfloat16),
        ("simko", torch.float64, torch.float64),
        ("kl_cov", torch.float32, torch.float32),
    ],
)
def test_loss_equals_the_loss_from_logits(loss, dtype, of_weight, monkeypatch):
    hidden, weight, batch = make(dtype)
    weight = weight.detach().to(of_weight).requires_grad_()
    generator = torch.Generator().manual_seed(1)
    batch |= {"ref_logprobs": -5 * torch.rand(T, generator=generator), "loss": loss}
    batch["aggregation"] = aggregation_of(loss, "seq_mean_token_mean")
    # the logits come from other matrix multiplications and round differently
    rel = 4e-3 if dtype == torch.bfloat16 else 2e-5
    # With softcap 4 half of the logits are near the cap.
    for i, (chunk, softcap) in enumerate(((None, 0.0), (1, 4.0), (7, 0.0), (7, 4.0))):
        if chunk:  # functions of rows are computed for few rows at a time
            monkeypatch.setattr(
                "maxrl_fast.ops.function_loss.default_chunk", lambda *_, chunk=chunk: 8 * chunk
            )
        # with and without rows of zero gradient
        terms = {"kl_coef": 0.1 * (i % 2), "entropy_coef": 0.1 * (i % 2)}
        logits = logits_of(hidden, weight, softcap)
        expected, metrics = policy_gradient_loss(logits, **batch, **terms)
        actual, found = linear_policy_gradient_loss(
            hidden, weight, **batch, **terms, chunk_tokens=chunk, softcap=softcap
        )
        assert actual.item() == pytest.approx(expected.item(), rel=rel)
        assert {name: x.item() for name, x in found.items()} == pytest.approx(
            {name: x.item() for name, x in metrics.items()}, rel=rel
        )
        gradients = [
            torch.autograd.grad(2 * value, (hidden, weight), retain_graph=True)
            for value in (actual, expected)
        ]
        of_ours = gradients[0][1]
        assert of_ours.dtype == of_weight
        # nor rounded before: 2 changes no digit
        assert of_weight == torch.bfloat16 or (of_ours != of_ours.bfloat16()).any()
        assert_close(*gradients, dtype)


@pytest.mark.parametrize("has_mask", [True, False])
def test_rows_without_a_gradient_are_not_multiplied(has_mask):
    hidden, weight, batch = make(torch.float32)
    batch["advantages"] = torch.tensor([1.0, 0.0, 0.0, 0.5])
    batch["mask"] = batch["mask"] if has_mask else None
    expected, metrics = policy_gradient_loss(logits_of(hidden, weight), **batch)
    expected = torch.autograd.grad(expected, (hidden, weight))
    with torch.no_grad():
        hidden[10:30] = torch.nan  # never read: a product with 0 would be NaN too
    loss, found = linear_policy_gradient_loss(hidden, weight, **batch)
    gradients = torch.autograd.grad(loss, (hidden, weight))
    assert (gradients[0][10:30] == 0).all()
    assert_close(gradients, expected, torch.float32)
    assert found["tokens"] == metrics["tokens"]
    assert found["dropped_tokens"] == metrics["dropped_tokens"] > 0


def test_frozen_inputs_get_no_gradient_buffer():
    hidden, weight, batch = make(torch.float32)
    # all rows have a gradient
    batch |= {"mask": None, "advantages": torch.tensor([1.0, 1.0, -2.0, 0.5])}
    expected, _ = policy_gradient_loss(logits_of(hidden, weight), **batch)
    for frozen, free in ((weight, hidden), (hidden, weight)):
        given = [x.detach() if x is frozen else x for x in (hidden, weight)]
        with Operators() as operators:
            loss, _ = linear_policy_gradient_loss(*given, **batch)
        gradients = (
            torch.autograd.grad(x, [free], retain_graph=x is expected) for x in (loss, expected)
        )
        assert_close(*gradients, torch.float32)
        assert operators.sizes() & {T * H, V * H} == {free.numel()}
    with torch.no_grad(), Operators() as operators:
        loss, _ = linear_policy_gradient_loss(hidden, weight, **batch)
    assert not operators.sizes() & {V * H, T * H}
    assert loss.item() == expected.item()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_logprobs_equal_logprobs_from_logits(dtype):
    hidden, weight, batch = make(dtype)
    generator = torch.Generator().manual_seed(2)
    for softcap, tau in ((0.0, 0.7), (4.0, batch["temperature"])):
        scale = {"temperature": tau, "softcap": softcap}
        logits = logits_of(hidden, weight, softcap)
        expected = token_logprobs(logits, batch["targets"], temperature=tau)
        actual = linear_token_logprobs(hidden, weight, batch["targets"], **scale, chunk_tokens=7)
        assert_close(actual, expected, dtype)
        slopes = [torch.randn(T, generator=generator).to(actual[0].dtype) for _ in range(2)]
        gradients = [
            torch.autograd.grad(values, (hidden, weight), slopes, retain_graph=True)
            for values in (actual, expected)
        ]
        assert_close(*gradients, dtype)
    with torch.no_grad():
        assert not linear_token_logprobs(hidden, weight, batch["targets"])[0].requires_grad


def test_chunks_fill_whole_waves_of_tiles():
    for num_tokens, most, hidden_size, chunk in (
        (16384, 4416, 4096, 4224),  # 33 x 16 tiles are four waves of 132 multiprocessors
        (16384, 2560, 4096, 2048),  # 256 tiles of 264; 2560 tokens would be 320 tiles, three waves
        (300, 4416, 4096, 300),  # all at once
        (0, 4416, 4096, 1),
        (1000, 128, 4096, 128),
    ):
        assert chunk_tokens(num_tokens, most, hidden_size, 132) == chunk

    def waves(num_tokens, size):
        parts = [min(size, num_tokens - start) for start in range(0, num_tokens, size)]
        return sum(-(-(-(-part // 128) * 5) // 132) for part in parts)  # H = 1100: 5 tiles of 256

    for num_tokens in (9000, 40_000, 123_457):
        chunk = chunk_tokens(num_tokens, 7000, 1100, 132)
        assert chunk % 128 == 0
        others = [waves(num_tokens, size) for size in range(3584, 7001, 128)]
        assert waves(num_tokens, chunk) <= min(others)


def test_the_loss_compiles_as_one_graph():
    """Also for another number of tokens, and with rows that are left out, whose number the compiler
    cannot know.
    """

    def step(hidden, weight, batch):
        options = {"loss": "gspo", "aggregation": "seq_mean_token_mean"}
        return linear_policy_gradient_loss(2 * hidden, weight, **batch, **options)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for seed, start in ((0, 0), (2, 4)):
        hidden, weight, batch = make(torch.float32, seed)
        batch["advantages"] = torch.tensor([1.0, 0.0, 0.0, 0.5])
        batch["cu_seqlens"] = (batch["cu_seqlens"] - start).clamp_min(0)
        batch = {name: x[start:] if len(x) == T else x for name, x in batch.items()}
        results = [f(hidden[start:], weight, batch) for f in (compiled, step)]
        (actual, metrics), (expected, eager_metrics) = results
        assert actual.item() == expected.item()
        assert all(x.item() == eager_metrics[name].item() for name, x in metrics.items())
        gradients = [torch.autograd.grad(loss, (hidden, weight)) for loss in (actual, expected)]
        assert_close(*gradients, torch.float32)


@pytest.mark.slow
def test_inductor_compiles_loss_and_logprobs(monkeypatch, tmp_path):
    """In a cache of its own: inductor's outlives a version of the operators, and does not know of
    their results' shapes.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    hidden, weight, batch = make(torch.float32)

    def step(hidden, weight):
        logprobs, entropy = linear_token_logprobs(hidden, weight, batch["targets"])
        loss, _ = linear_policy_gradient_loss(hidden, weight, **batch)
        return loss + (logprobs.exp() + entropy).sum()

    actual, expected = torch.compile(step, fullgraph=True)(hidden, weight), step(hidden, weight)
    assert actual.item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = (torch.autograd.grad(loss, (hidden, weight)) for loss in (actual, expected))
    assert_close(*gradients, torch.float32)


def test_split_sums_of_gradients_are_in_full_precision(monkeypatch):
    """cuBLAS may otherwise add parts of the sum over the vocabulary in half precision."""
    matmul, seen, mm = torch.backends.cuda.matmul, [], torch.mm

    def watched(a, b, **options):
        seen.append((b is chunks.weight, matmul.allow_bf16_reduced_precision_reduction))
        return mm(a, b, **options)

    assert matmul.allow_bf16_reduced_precision_reduction  # PyTorch's default
    hidden, weight, _ = make(torch.bfloat16)
    chunks = Chunks(hidden.detach(), weight.detach(), 20, True, True)
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
