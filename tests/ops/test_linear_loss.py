"""The losses from hidden states and the output matrix against the losses from logits."""

import pytest
import torch

from maxrl_fast.ops import (
    LOSSES,
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


# With softcap 4 half of the logits are near the cap.
CASES = [(None, 0.0), (1, 4.0), (7, 0.0), (7, 4.0)]


@pytest.mark.parametrize(
    ("dtype", "of_weight"), [*((x, x) for x in TOLERANCE), (torch.bfloat16, torch.float32)]
)
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_equals_the_loss_from_logits(loss, dtype, of_weight, monkeypatch):
    """A master weight in float32 gets its gradient in float32: in bfloat16, small contributions of
    chunks would be lost.
    """
    hidden, weight, batch = make(dtype)
    weight = weight.detach().to(of_weight).requires_grad_()
    if dtype == torch.bfloat16 and LOSSES[loss].over_batch:
        # of nearly equal tokens another may be chosen where logits round differently
        batch["advantages"][2] *= -1
    batch |= {
        "ref_logprobs": -5 * torch.rand(T, generator=torch.Generator().manual_seed(1)),
        "loss": loss,
    }
    batch["aggregation"] = aggregation_of(loss, "seq_mean_token_mean")
    # the logits come from other matrix multiplications and round differently
    rel = 4e-3 if dtype == torch.bfloat16 else 2e-5
    for i, (chunk, softcap) in enumerate(CASES):
        if chunk:  # functions of rows are computed for few rows at a time
            monkeypatch.setattr(
                "maxrl_fast.ops.function_loss.default_chunk", lambda *_, chunk=chunk: 8 * chunk
            )
        # with and without rows of zero gradient
        terms = {"kl_coef": 0.1 * (i % 2), "entropy_coef": 0.1 * (i % 2)}
        torch.manual_seed(0)
        expected, metrics = policy_gradient_loss(
            logits_of(hidden, weight, softcap), **batch, **terms
        )
        torch.manual_seed(0)
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
    batch |= {
        "advantages": torch.tensor([1.0, 0.0, 0.0, 0.5]),
        "mask": batch["mask"] if has_mask else None,
    }
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
        assert_close(
            torch.autograd.grad(loss, [free]),
            torch.autograd.grad(expected, [free], retain_graph=True),
            torch.float32,
        )
        assert operators.sizes() & {T * H, V * H} == {free.numel()}
    with torch.no_grad(), Operators() as operators:
        loss, _ = linear_policy_gradient_loss(hidden, weight, **batch)
    assert not operators.sizes() & {V * H, T * H}
    assert loss.item() == expected.item()


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_logprobs_equal_logprobs_from_logits(dtype):
    hidden, weight, batch = make(dtype)
    for softcap, tau in (
        (0.0, 0.7),
        (4.0, 0.7),
        (0.0, batch["temperature"]),
        (4.0, batch["temperature"]),
    ):
        expected = token_logprobs(
            logits_of(hidden, weight, softcap), batch["targets"], temperature=tau
        )
        scale = {"temperature": tau, "softcap": softcap}
        actual = linear_token_logprobs(hidden, weight, batch["targets"], **scale, chunk_tokens=7)
        assert_close(actual, expected, dtype)
        generator = torch.Generator().manual_seed(2)
        slopes = [torch.randn(T, generator=generator).to(actual[0].dtype) for _ in range(2)]
        gradients = [
            torch.autograd.grad(values, (hidden, weight), slopes, retain_graph=True)
            for values in (actual, expected)
        ]
        assert_close(*gradients, dtype)
    with torch.no_grad():
        assert not linear_token_logprobs(hidden, weight, batch["targets"])[0].requires_grad


@pytest.mark.parametrize(
    ("num_tokens", "most", "hidden_size", "chunk"),
    [
        (16384, 4416, 4096, 4224),  # 33 x 16 tiles are four waves of 132 multiprocessors
        (16384, 2560, 4096, 2048),  # 256 tiles of 264; 2560 tokens would be 320 tiles, three waves
        (100_000, 10_000, 896, 8448),
        (300, 4416, 4096, 300),  # all at once
        (0, 4416, 4096, 1),
        (1000, 128, 4096, 128),
    ],
)
def test_chunks_fill_whole_waves_of_tiles(num_tokens, most, hidden_size, chunk):
    assert chunk_tokens(num_tokens, most, hidden_size, 132) == chunk


def test_no_other_multiple_of_a_tile_has_fewer_waves():
    def waves(num_tokens, size):
        parts = [min(size, num_tokens - start) for start in range(0, num_tokens, size)]
        return sum(-(-(-(-part // 128) * 5) // 132) for part in parts)  # H = 1100: 5 tiles of 256

    for num_tokens in (9000, 40_000, 123_457):
        chunk = chunk_tokens(num_tokens, 7000, 1100, 132)
        assert chunk % 128 == 0
        assert waves(num_tokens, chunk) <= min(
            waves(num_tokens, size) for size in range(3584, 7001, 128)
        )


def test_many_tokens():
    """More than 65,536 tokens, in chunks of the default size and in one that leaves a rest."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = 70_001
    hidden, weight = (
        torch.randn(n, 4, generator=generator).requires_grad_() for n in (num_tokens, 33)
    )
    batch = (
        torch.randint(33, (num_tokens,), generator=generator),
        torch.tensor([1.0, -2.0]),
        torch.tensor([0, 66_000, num_tokens]),
    )
    expected, _ = policy_gradient_loss(hidden @ weight.T, *batch)
    for chunk in (None, 4224):
        actual, _ = linear_policy_gradient_loss(hidden, weight, *batch, chunk_tokens=chunk)
        assert actual.item() == pytest.approx(expected.item(), rel=1e-5)
        gradients = [
            torch.autograd.grad(value, (hidden, weight), retain_graph=True)
            for value in (actual, expected)
        ]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)


def test_no_tokens():
    weight = torch.randn(V, H, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    hidden = torch.zeros(0, H, requires_grad=True)
    loss, _ = linear_policy_gradient_loss(
        hidden, weight, none, torch.zeros(1), torch.tensor([0, 0])
    )
    loss.backward()
    assert loss.item() == 0
    assert (weight.grad == 0).all()
    assert linear_token_logprobs(hidden, weight, none)[0].shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"weight": torch.randn(V, H + 1)},
            r"hidden \[T, H\] and weight \[V, H\] must have one H and device",
        ),
        (
            {"weight": torch.randn(V, H).half()},
            "weight must be torch.float32 as hidden is, or float32, got torch.float16",
        ),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1, got 0"),
        ({"targets": torch.full((T,), V)}, rf"targets must be in \[0, {V}\), got {V} at token 0"),
        *(
            ({"softcap": x}, "softcap must be finite and at least 0, got")
            for x in (-1.0, float("inf"), "30")
        ),
    ],
)
def test_bad_input(change, message):
    hidden, weight, batch = make(torch.float32)
    arguments = {"hidden": hidden, "weight": weight} | batch | {"mask": None} | change
    with pytest.raises(ValueError, match=message):
        linear_policy_gradient_loss(**arguments)
    kept = ("hidden", "weight", "targets", "temperature", "softcap", "chunk_tokens")
    with pytest.raises(ValueError, match=message):
        linear_token_logprobs(**{name: x for name, x in arguments.items() if name in kept})


def test_an_unknown_argument_is_named():
    hidden, weight, batch = make(torch.float32)
    with pytest.raises(TypeError, match=r"loss does not take cliphigh, in_place"):
        linear_policy_gradient_loss(hidden, weight, **batch, cliphigh=0.3, in_place=True)


@pytest.mark.parametrize(
    "options", [{"loss": "gspo", "aggregation": "seq_mean_token_mean"}, {"loss": "ppo"}]
)
def test_the_loss_compiles_as_one_graph(options):
    """Also for another number of tokens, and with rows that are left out, whose number the compiler
    cannot know.
    """

    def step(hidden, weight, batch):
        return linear_policy_gradient_loss(2 * hidden, weight, **batch, **options)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for seed, start in ((0, 0), (1, 0), (2, 4)):
        hidden, weight, batch = make(torch.float32, seed)
        batch |= {
            "advantages": torch.tensor([1.0, 0.0, 0.0, 0.5]),
            "cu_seqlens": (batch["cu_seqlens"] - start).clamp_min(0),
        }
        batch = {name: x[start:] if len(x) == T else x for name, x in batch.items()}
        actual, metrics = compiled(hidden[start:], weight, batch)
        expected, eager_metrics = step(hidden[start:], weight, batch)
        assert actual.item() == expected.item()
        assert {name: x.item() for name, x in metrics.items()} == {
            name: x.item() for name, x in eager_metrics.items()
        }
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
        return (
            linear_policy_gradient_loss(hidden, weight, **batch)[0]
            + (logprobs.exp() + entropy).sum()
        )

    actual, expected = torch.compile(step, fullgraph=True)(hidden, weight), step(hidden, weight)
    assert actual.item() == pytest.approx(expected.item(), rel=1e-6)
    assert_close(
        *(torch.autograd.grad(loss, (hidden, weight)) for loss in (actual, expected)), torch.float32
    )


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
