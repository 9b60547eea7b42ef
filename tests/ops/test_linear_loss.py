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
from maxrl_fast.ops.token_batch import prepare
from maxrl_fast.ops.token_loss_kernel import loss_arguments
from tests.statistics import statistics_for

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


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}  # each side rounds its own products


def assert_close(actual, expected, dtype):
    for ours, theirs in zip(actual, expected, strict=True):
        error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        assert error <= TOLERANCE[dtype], float(error)


@pytest.mark.parametrize("chunk_tokens", [None, 1, 7, 64])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_equals_the_loss_from_logits(loss, dtype, chunk_tokens):
    hidden, weight, batch = make(dtype)
    ref = -5 * torch.rand(T, generator=torch.Generator().manual_seed(1))
    rel = 2e-3 if dtype == torch.bfloat16 else 2e-5  # the logits come from other matrix multiplications and round differently
    for kl_coef in (0.0, 0.1):  # with and without rows of zero gradient
        options = batch | {"loss": loss, "ref_logprobs": ref, "kl_coef": kl_coef} | statistics_for(loss, T)
        options["aggregation"] = LOSSES[loss].aggregation or "seq_mean_token_mean"
        expected, metrics = policy_gradient_loss(hidden @ weight.T, **options)
        actual, linear_metrics = linear_policy_gradient_loss(hidden, weight, **options, chunk_tokens=chunk_tokens)
        assert actual.item() == pytest.approx(expected.item(), rel=rel)
        assert set(metrics) == set(linear_metrics)
        for name, value in metrics.items():
            assert linear_metrics[name].item() == pytest.approx(value.item(), rel=rel), name
        gradients = [torch.autograd.grad(3 * value, (hidden, weight)) for value in (actual, expected)]
        assert_close(*gradients, dtype)


def test_gspo_ratio_includes_tokens_without_a_gradient():
    hidden, weight, batch = make(torch.float64)
    batch["advantages"] = torch.randn(T, generator=torch.Generator().manual_seed(3)) * (torch.arange(T) % 3 > 0)
    expected, metrics = policy_gradient_loss(hidden @ weight.T, **batch, loss="gspo", clip_high=9.0)
    actual, linear_metrics = linear_policy_gradient_loss(hidden, weight, **batch, loss="gspo", clip_high=9.0)
    assert actual.item() == pytest.approx(expected.item(), rel=1e-12)
    assert linear_metrics["dropped_tokens"].item() == metrics["dropped_tokens"].item() > 0
    assert linear_metrics["tokens"].item() == metrics["tokens"].item()
    gradients = [torch.autograd.grad(value, (hidden, weight)) for value in (actual, expected)]
    assert_close(*gradients, torch.float64)


def test_rows_without_a_gradient_are_not_multiplied(monkeypatch):
    hidden, weight, batch = make(torch.float32)
    rows = []
    original = Chunks.__iter__

    def counted(self):
        rows.append(len(self.hidden))
        return original(self)

    monkeypatch.setattr(Chunks, "__iter__", counted)
    batch["advantages"] = torch.tensor([1.0, 0.0, 0.0, 0.5])
    kept = int(batch["mask"][:10].sum() + batch["mask"][30:].sum())
    _, metrics = linear_policy_gradient_loss(hidden, weight, **batch)
    assert rows == [kept]
    assert metrics["tokens"].item() == int(batch["mask"].sum())
    assert metrics["dropped_tokens"].item() == int(batch["mask"].sum()) - kept
    with torch.no_grad():
        hidden[10:30] = torch.nan  # never read
    loss, _ = linear_policy_gradient_loss(hidden, weight, **batch)
    gradient = torch.autograd.grad(loss, (hidden, weight))
    assert (gradient[0][10:30] == 0).all()
    assert all(x.isfinite().all() for x in gradient)


def test_frozen_inputs_get_no_gradient_buffer(monkeypatch):
    hidden, weight, batch = make(torch.float32)
    made = []
    original = Chunks.__init__

    def remembered(self, *arguments):
        original(self, *arguments)
        made.append(self)

    monkeypatch.setattr(Chunks, "__init__", remembered)
    loss, _ = linear_policy_gradient_loss(hidden, weight.detach(), **batch)
    assert made[-1].grad_weight is None
    expected, _ = policy_gradient_loss(hidden @ weight.T, **batch)
    assert_close(torch.autograd.grad(loss, [hidden]), torch.autograd.grad(expected, [hidden]), torch.float32)
    loss, _ = linear_policy_gradient_loss(hidden.detach(), weight, **batch)
    assert made[-1].grad_hidden is None
    expected, _ = policy_gradient_loss(hidden @ weight.T, **batch)
    assert_close(torch.autograd.grad(loss, [weight]), torch.autograd.grad(expected, [weight]), torch.float32)
    with torch.no_grad():
        loss, _ = linear_policy_gradient_loss(hidden, weight, **batch)
    assert (made[-1].grad_hidden, made[-1].grad_weight) == (None, None)
    assert loss.item() == expected.item()


def test_a_master_weight_gets_its_gradient_in_float32():
    """In bfloat16, small contributions of chunks would be lost."""
    hidden, weight, batch = make(torch.bfloat16)
    master = weight.detach().float().requires_grad_()
    loss, _ = linear_policy_gradient_loss(hidden, master, **batch, chunk_tokens=1)
    (gradient,) = torch.autograd.grad(loss, master)
    assert gradient.dtype == torch.float32
    wide, wide_weight = hidden.detach().double(), weight.detach().double().requires_grad_()
    logits = (hidden @ weight.T).detach().double() + (wide @ wide_weight.T) - (wide @ wide_weight.T).detach()
    expected, _ = policy_gradient_loss(logits, **batch)
    assert_close([gradient], torch.autograd.grad(expected, [wide_weight]), torch.bfloat16)


def test_logits_exist_for_one_chunk_at_a_time():
    hidden, weight, _ = make(torch.float32)
    chunks = Chunks(hidden.detach(), weight.detach(), 8, True, True)
    addresses = {logits.data_ptr() for _, _, logits in chunks}
    assert len(addresses) == 1
    assert chunks.buffer.shape == (8, V)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_logprobs_equal_logprobs_from_logits(dtype):
    hidden, weight, batch = make(dtype)
    for temperature in (0.7, batch["temperature"]):
        expected = token_logprobs(hidden @ weight.T, batch["targets"], temperature=temperature)
        actual = linear_token_logprobs(hidden, weight, batch["targets"], temperature=temperature, chunk_tokens=7)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
        generator = torch.Generator().manual_seed(2)
        slopes = [torch.randn(T, generator=generator).to(actual[0].dtype) for _ in range(2)]
        gradients = [torch.autograd.grad(values, (hidden, weight), slopes) for values in (actual, expected)]
        assert_close(*gradients, dtype)
    with torch.no_grad():
        assert not linear_token_logprobs(hidden, weight, batch["targets"])[0].requires_grad


@pytest.mark.parametrize(
    ("num_tokens", "most", "hidden_size", "chunk"),
    [
        (16384, 4416, 4096, 4224),  # 33 x 16 tiles are four waves of 132 multiprocessors
        (65536, 4416, 4096, 4224),
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
        assert waves(num_tokens, chunk) <= min(waves(num_tokens, size) for size in range(3584, 7001, 128))


def test_many_tokens():
    """More than 65,536 tokens, in chunks of the default size and in one that leaves a rest."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = 70_001
    hidden, weight = (torch.randn(n, 4, generator=generator).requires_grad_() for n in (num_tokens, 33))
    batch = (
        torch.randint(33, (num_tokens,), generator=generator),
        torch.tensor([1.0, -2.0]),
        torch.tensor([0, 66_000, num_tokens]),
    )
    expected, _ = policy_gradient_loss(hidden @ weight.T, *batch)
    for chunk in (None, 4224):
        actual, _ = linear_policy_gradient_loss(hidden, weight, *batch, chunk_tokens=chunk)
        assert actual.item() == pytest.approx(expected.item(), rel=1e-5)
        gradients = [torch.autograd.grad(value, (hidden, weight), retain_graph=True) for value in (actual, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-7)


def test_no_tokens():
    weight = torch.randn(V, H, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    hidden = torch.zeros(0, H, requires_grad=True)
    loss, _ = linear_policy_gradient_loss(hidden, weight, none, torch.zeros(1), torch.tensor([0, 0]))
    loss.backward()
    assert loss.item() == 0
    assert (weight.grad == 0).all()
    assert linear_token_logprobs(hidden, weight, none)[0].shape == (0,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.randn(V, H + 1)}, r"hidden \[T, H\] and weight \[V, H\] must have one H and device"),
        ({"weight": torch.randn(V, H).half()}, "weight must be torch.float32 as hidden is, or float32, got torch.float16"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1, got 0"),
        ({"targets": torch.full((T,), V)}, rf"targets must be in \[0, {V}\), got {V} at token 0"),
    ],
)
def test_bad_input(change, message):
    hidden, weight, batch = make(torch.float32)
    with pytest.raises(ValueError, match=message):
        linear_policy_gradient_loss(**({"hidden": hidden, "weight": weight} | batch | {"mask": None} | change))


@pytest.mark.parametrize("options", [{"loss": "ppo"}, {"loss": "gspo", "aggregation": "seq_mean_token_mean"}])
def test_the_loss_compiles_as_one_graph(options):
    """Also for another number of tokens, and with rows that are left out, whose number the compiler cannot know."""

    def step(hidden, weight, batch):
        return linear_policy_gradient_loss(2 * hidden, weight, **batch, **options)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    for seed, start in ((0, 0), (1, 0), (2, 4)):
        hidden, weight, batch = make(torch.float32, seed)
        batch |= {"advantages": torch.tensor([1.0, 0.0, 0.0, 0.5]), "cu_seqlens": (batch["cu_seqlens"] - start).clamp_min(0)}
        batch = {name: x[start:] if len(x) == T else x for name, x in batch.items()}
        actual, metrics = compiled(hidden[start:], weight, batch)
        expected, eager_metrics = step(hidden[start:], weight, batch)
        assert actual.item() == expected.item()
        assert {name: x.item() for name, x in metrics.items()} == {name: x.item() for name, x in eager_metrics.items()}
        gradients = [torch.autograd.grad(loss, (hidden, weight)) for loss in (actual, expected)]
        assert_close(*gradients, torch.float32)


@pytest.mark.slow
def test_inductor_compiles_loss_and_logprobs(monkeypatch, tmp_path):
    # Its cache outlives a version of the operators, and does not know of their results' shapes.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    hidden, weight, batch = make(torch.float32)

    def step(hidden, weight):
        logprobs, entropy = linear_token_logprobs(hidden, weight, batch["targets"])
        return linear_policy_gradient_loss(hidden, weight, **batch)[0] + (logprobs.exp() + entropy).sum()

    actual, expected = torch.compile(step, fullgraph=True)(hidden, weight), step(hidden, weight)
    assert actual.item() == pytest.approx(expected.item(), rel=1e-6)
    assert_close(*(torch.autograd.grad(loss, (hidden, weight)) for loss in (actual, expected)), torch.float32)


def test_operators_pass_opcheck():
    hidden, weight, batch = make(torch.float32)
    absent = ("advantages_per_token", "importance_weights", "importance_weights_per_token", "ref_logprobs", "dual_clip")
    given = (
        dict.fromkeys((*absent, "denominator", "loss_options", "token_statistics", "top_tokens"))
        | {"loss": "ppo", "clip_low": 0.2, "clip_high": 0.2, "kl": "k3"}
        | batch
    )
    given |= {"kl_coef": 0.0, "entropy_coef": 0.0, "aggregation": "token_mean"}
    prepared = prepare(torch.float32, hidden.device, (T, V), **given)
    arguments, operators = loss_arguments(*prepared), torch.ops.maxrl_fast
    for needed in ((True, True), (True, False), (False, True)):
        matrices = (x.detach().requires_grad_(is_needed) for x, is_needed in zip((hidden, weight), needed, strict=True))
        torch.library.opcheck(operators.linear_loss.default, (*matrices, *arguments, 7, 4.0, *needed))
    targets = prepared[0].targets
    torch.library.opcheck(operators.linear_logprobs.default, (hidden, weight, targets, None, 0.7, 7, 4.0))
    detached = (hidden.detach(), weight.detach(), targets, None, 0.7, torch.rand(T), torch.rand(T), 7, 4.0)
    for needed in ((True, True), (False, True), (True, False)):
        torch.library.opcheck(operators.linear_logprobs_backward.default, (*detached, *needed))


@pytest.mark.parametrize("chunk_tokens", [None, 7])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_a_soft_cap_on_the_logits(loss, dtype, chunk_tokens):
    """Against the loss from logits that are capped in PyTorch, where half of them are near the cap."""
    hidden, weight, batch = make(dtype)
    cap = 4.0
    logits = cap * torch.tanh(hidden @ weight.T / cap)
    assert (logits.abs() > 0.7 * cap).float().mean() > 0.3
    rel = 4e-3 if dtype == torch.bfloat16 else 2e-5
    options = batch | {"loss": loss, "entropy_coef": 0.1}
    expected = policy_gradient_loss(logits, **options)[0]
    actual = linear_policy_gradient_loss(hidden, weight, **options, softcap=cap, chunk_tokens=chunk_tokens)[0]
    assert actual.item() == pytest.approx(expected.item(), rel=rel)
    gradients = [torch.autograd.grad(value, (hidden, weight), retain_graph=True) for value in (actual, expected)]
    assert_close(*gradients, dtype)
    of_logits = token_logprobs(logits, batch["targets"], temperature=batch["temperature"])
    of_hidden = linear_token_logprobs(
        hidden, weight, batch["targets"], temperature=batch["temperature"], softcap=cap, chunk_tokens=chunk_tokens
    )
    for ours, theirs in zip(of_hidden, of_logits, strict=True):
        assert_close([ours], [theirs], dtype)
    totals = [(p.sum() + 0.3 * entropy.sum()) for p, entropy in (of_hidden, of_logits)]
    assert_close(*[torch.autograd.grad(total, (hidden, weight)) for total in totals], dtype)


@pytest.mark.parametrize("softcap", [-1.0, float("inf"), "30"])
def test_a_wrong_soft_cap_is_refused(softcap):
    hidden, weight, batch = make(torch.float32)
    with pytest.raises(ValueError, match="softcap must be finite and at least 0, got"):
        linear_token_logprobs(hidden, weight, batch["targets"], softcap=softcap)
