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
from maxrl_fast.ops.function_loss import linear_rows
from maxrl_fast.ops.logit_chunks import Chunks, chunk_tokens
from maxrl_fast.ops.token_loss_kernel import loss_arguments
from tests.ops.test_in_place import prepared_loss

T, H, V = 50, 16, 70
CHOOSE = [name for name, row in LOSSES.items() if row.over_batch]


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


@pytest.mark.parametrize(("chunk_tokens", "softcap"), [(None, 0), (1, 4.0), (7, 0), (7, 4.0)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("loss", LOSSES)
def test_loss_equals_the_loss_from_logits(loss, dtype, chunk_tokens, softcap, monkeypatch):
    """Also where half of the logits are near the cap, and where functions of rows are computed for few rows at a time."""
    if chunk_tokens:
        monkeypatch.setattr("maxrl_fast.ops.function_loss.default_chunk", lambda hidden, vocab_size: 8 * chunk_tokens)
    hidden, weight, batch = make(dtype)
    if (
        dtype == torch.bfloat16 and loss in CHOOSE
    ):  # of nearly equal tokens another may be chosen where logits round differently
        batch["advantages"] = torch.tensor([1.0, 0.0, 2.0, 0.5])
    logits = hidden @ weight.T
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    ref = -5 * torch.rand(T, generator=torch.Generator().manual_seed(1))
    rel = 4e-3 if dtype == torch.bfloat16 else 2e-5  # the logits come from other matrix multiplications and round differently
    for terms in ({}, {"kl_coef": 0.1, "entropy_coef": 0.1}):  # with and without rows of zero gradient
        options = batch | {"loss": loss, "ref_logprobs": ref, "aggregation": LOSSES[loss].aggregation or "seq_mean_token_mean"}
        torch.manual_seed(0)
        expected, metrics = policy_gradient_loss(logits, **options, **terms)
        torch.manual_seed(0)
        actual, linear_metrics = linear_policy_gradient_loss(
            hidden, weight, **options, **terms, chunk_tokens=chunk_tokens, softcap=softcap
        )
        assert actual.item() == pytest.approx(expected.item(), rel=rel)
        assert {name: x.item() for name, x in linear_metrics.items()} == pytest.approx(
            {name: x.item() for name, x in metrics.items()}, rel=rel
        )
        gradients = [torch.autograd.grad(3 * value, (hidden, weight), retain_graph=True) for value in (actual, expected)]
        assert_close(*gradients, dtype)


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_functions_of_rows_equal_the_plain_computation(size, monkeypatch):
    monkeypatch.setattr("maxrl_fast.ops.function_loss.default_chunk", lambda hidden, vocab_size: 4 * size)
    hidden, weight, batch = make(torch.bfloat16)

    def function(log_p, targets):
        assert log_p.dtype == torch.float32
        assert len(log_p) <= size
        return torch.stack([log_p.logsumexp(-1) + log_p.square().sum(-1), log_p.gather(1, targets[:, None])[:, 0]], -1)

    for temperature, softcap in ((0.7, 0.0), (batch["temperature"], 4.0)):
        actual = linear_rows(hidden, weight, batch["targets"], function, temperature=temperature, softcap=softcap)
        logits = (softcap * torch.tanh(hidden @ weight.T / softcap) if softcap else hidden @ weight.T).float()
        tau = temperature[:, None] if softcap else temperature
        log_p = torch.log_softmax(logits / tau, -1)
        expected = torch.cat([function(log_p[t : t + 1], batch["targets"][t : t + 1]) for t in range(T)])
        torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
        slopes = torch.randn(T, 2, generator=torch.Generator().manual_seed(2))
        assert_close(*[torch.autograd.grad(x, (hidden, weight), slopes) for x in (actual, expected)], torch.bfloat16)
    assert linear_rows(hidden[:0], weight, batch["targets"][:0], function).shape == (0, 2)


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


@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_logprobs_equal_logprobs_from_logits(dtype, softcap):
    hidden, weight, batch = make(dtype)
    logits = softcap * torch.tanh(hidden @ weight.T / softcap) if softcap else hidden @ weight.T
    for scale in ({"temperature": 0.7}, {"temperature": batch["temperature"]}):
        expected = token_logprobs(logits, batch["targets"], **scale)
        actual = linear_token_logprobs(hidden, weight, batch["targets"], **scale, softcap=softcap, chunk_tokens=7)
        assert_close(actual, expected, dtype)
        generator = torch.Generator().manual_seed(2)
        slopes = [torch.randn(T, generator=generator).to(actual[0].dtype) for _ in range(2)]
        gradients = [torch.autograd.grad(values, (hidden, weight), slopes, retain_graph=True) for values in (actual, expected)]
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


@pytest.mark.parametrize("options", [{"loss": "gspo", "aggregation": "seq_mean_token_mean"}, {"loss": "ppo"}])
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
    given = {name: x for name, x in batch.items() if name not in ("targets", "advantages", "cu_seqlens")}
    prepared, terms = prepared_loss((T, V), batch["targets"], batch["advantages"], batch["cu_seqlens"], **given)
    arguments, operators = loss_arguments(prepared, terms), torch.ops.maxrl_fast
    for needed in ((True, True), (True, False), (False, True)):
        matrices = (x.detach().requires_grad_(is_needed) for x, is_needed in zip((hidden, weight), needed, strict=True))
        torch.library.opcheck(operators.linear_loss.default, (*matrices, *arguments, 7, 4.0, *needed))
    torch.library.opcheck(operators.linear_logprobs.default, (hidden, weight, prepared.targets, None, 0.7, 7, 4.0))
    detached = (hidden.detach(), weight.detach(), prepared.targets, None, 0.7, torch.rand(T), torch.rand(T), 7, 4.0)
    for needed in ((True, True), (False, True), (True, False)):
        torch.library.opcheck(operators.linear_logprobs_backward.default, (*detached, *needed))


@pytest.mark.parametrize("softcap", [-1.0, float("inf"), "30"])
def test_a_wrong_soft_cap_is_refused(softcap):
    hidden, weight, batch = make(torch.float32)
    with pytest.raises(ValueError, match="softcap must be finite and at least 0, got"):
        linear_token_logprobs(hidden, weight, batch["targets"], softcap=softcap)
