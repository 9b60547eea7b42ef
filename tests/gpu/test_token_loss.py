"""The CUDA token kernels against CPU and float64, on side streams, in CUDA graphs, unsynchronized,
and with large sizes.
"""

import pytest
import torch

from maxrl_fast import ops

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda")
LENGTHS = torch.tensor([3, 0, 1, 9, 4, 0, 6])
T = int(LENGTHS.sum())
# The relative error of a row in the Euclidean norm. In float32 a log-prob of -12 is known to 1e-6,
# which functions of it multiply.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 2e-3, torch.float64: 1e-11}


def on_gpu(values):
    return {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in values.items()}


def example(vocab, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (2 * torch.randn(T, vocab, generator=generator)).to(dtype)
    targets = torch.randint(vocab, (T,), generator=generator)
    targets[0], targets[1] = 0, vocab - 1
    logp, _ = ops.token_logprobs(logits, targets)
    return logits, {
        "targets": targets,
        "advantages": torch.tensor([1.5, 1.0, -2.0, 0.7, 0.0, 1.0, -0.4]),
        "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int64), LENGTHS.cumsum(0)]),
        "old_logprobs": logp + 0.3 * torch.randn(T, generator=generator),
        "ref_logprobs": logp + 0.3 * torch.randn(T, generator=generator),
        "mask": torch.rand(T, generator=generator) < 0.8,
        "temperature": 0.5 + torch.rand(T, generator=generator),
    }


def gradient_of(logits, batch, **options):
    z = logits.detach().requires_grad_()
    loss, metrics = ops.policy_gradient_loss(z, **batch, **options)
    return loss.detach(), torch.autograd.grad(loss, z)[0], metrics


def assert_rows_close(actual, expected, tolerance):
    error = (actual.cpu().double() - expected.double()).norm(dim=1)
    assert (error <= tolerance * expected.double().norm(dim=1)).all(), float(error.max())


OPTIONS = [
    {"loss": "reinforce"},
    {"loss": "ppo", "aggregation": "seq_mean_token_mean"},
    {"loss": "ppo", "kl_coef": 0.1, "entropy_coef": 0.05, "dual_clip": 3.0},
    {"loss": "cispo", "kl_coef": 0.1, "kl": "k2"},
    {"loss": "gspo", "aggregation": "seq_mean_token_sum", "denominator": 11.0},
]
# Functions on token_logprobs, whose values do not depend on the choice of one of several nearly
# equal tokens.
FUNCTIONS = [
    {"loss": loss, "aggregation": row.aggregation or "token_mean"}
    for loss, row in ops.LOSSES.items()
    if not row.fused and not row.over_batch
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("vocab", [1, 2, 127, 32000, 50257, 151936, 262144])
def test_loss_gradient_and_metrics_equal_the_cpu_kernels(vocab, dtype):
    logits, batch = example(vocab, dtype)
    for options in OPTIONS + FUNCTIONS * (vocab in (127, 50257)):
        loss, gradient, metrics = gradient_of(logits, batch, **options)
        gpu_loss, gpu_gradient, gpu_metrics = gradient_of(
            logits.to(DEVICE), on_gpu(batch), **options
        )
        assert gpu_loss.item() == pytest.approx(loss.item(), rel=1e-5, abs=5e-7)
        assert_rows_close(gpu_gradient, gradient, TOLERANCE[dtype])
        for name, value in metrics.items():
            assert gpu_metrics[name].item() == pytest.approx(value.item(), rel=1e-5, abs=1e-7), name
        _, again, _ = gradient_of(logits.to(DEVICE), on_gpu(batch), **options)
        assert torch.equal(again, gpu_gradient)  # deterministic


@pytest.mark.parametrize("offset", [0, 1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_at_any_address_and_in_place(dtype, offset):
    logits, batch = example(3001, dtype)
    _, expected, _ = gradient_of(logits, batch)
    batch = on_gpu(batch)
    wide = torch.full((T, 3001 + 16), float("nan"), dtype=dtype, device=DEVICE)
    wide[:, offset : offset + 3001] = logits.to(DEVICE)
    _, actual, _ = gradient_of(wide[:, offset : offset + 3001], batch)
    assert_rows_close(actual, expected, TOLERANCE[dtype])
    one = torch.ones((), device=DEVICE, requires_grad=True)
    computed = one * wide[:, offset : offset + 3001]
    loss, _ = ops.policy_gradient_loss(computed, **batch, in_place=True)
    (3 * loss).backward()
    assert_rows_close(computed.detach(), 3 * expected, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_logprobs_entropy_and_their_gradient(dtype):
    for vocab in (1, 127, 50257, 151936):
        logits, batch = example(vocab, dtype)
        results = []
        for device in (torch.device("cpu"), DEVICE):
            z = logits.to(device).requires_grad_()
            values = ops.token_logprobs(z, batch["targets"].to(device), temperature=0.7)
            slopes = [torch.linspace(-1, 1, T).to(values[0]), torch.linspace(1, 0, T).to(values[0])]
            results.append((*values, torch.autograd.grad(values, z, slopes)[0]))
        for cpu, gpu in zip(results[0][:2], results[1][:2], strict=True):
            torch.testing.assert_close(gpu.cpu(), cpu, rtol=1e-5, atol=1e-6)
        assert_rows_close(results[1][2], results[0][2], 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("loss", [name for name, row in ops.LOSSES.items() if row.over_batch])
def test_losses_that_choose_tokens(loss):
    """Of float64 logits, whose log-probs differ by less than those of two tokens."""
    logits, batch = example(127, torch.float64)
    # all candidates, since a GPU's draws are others
    options = {"share": 1.0} if loss == "clip_cov" else None
    expected = gradient_of(logits, batch, loss=loss, loss_options=options)
    actual = gradient_of(logits.to(DEVICE), on_gpu(batch), loss=loss, loss_options=options)
    assert actual[0].item() == pytest.approx(expected[0].item(), rel=1e-9)
    assert_rows_close(actual[1], expected[1], 1e-9)


def test_masked_values_may_be_anything_and_bad_targets_give_nan():
    logits, batch = example(500, torch.float32)
    _, clean, _ = gradient_of(logits, batch)
    masked = ~batch["mask"]
    logits[masked] = torch.nan
    batch["targets"][masked] = -100
    loss, gradient, _ = gradient_of(logits.to(DEVICE), on_gpu(batch))
    assert loss.isfinite()
    assert_rows_close(gradient, clean, 3e-6)
    batch["targets"][batch["mask"].nonzero()[0]] = 500
    assert gradient_of(logits.to(DEVICE), on_gpu(batch))[0].isnan()


def test_more_than_two_to_the_31_elements():
    vocab, rows = 262144, 8200  # 2.15e9 elements
    logits = torch.zeros(rows, vocab, dtype=torch.bfloat16, device=DEVICE).requires_grad_()
    targets = torch.full((rows,), 7, device=DEVICE)
    loss, _ = ops.policy_gradient_loss(
        logits,
        targets,
        torch.ones(1, device=DEVICE),
        torch.tensor([0, rows], device=DEVICE),
        loss="reinforce",
    )
    loss.backward()
    assert loss.item() == pytest.approx(torch.tensor(float(vocab)).log().item(), rel=1e-6)
    last = logits.grad[-1].float()
    assert last[7].item() == pytest.approx(-1 / rows, rel=1e-2)
    assert last[8].item() == pytest.approx(1 / rows / vocab, rel=1e-2)


def test_linear_loss():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator).bfloat16() for n in (T, 1000))
    hidden /= 8  # small logits, whose rounding changes the loss little
    _, batch = example(1000, torch.float32)
    results = []
    for device in (torch.device("cpu"), DEVICE):
        h, w = hidden.to(device).requires_grad_(), weight.float().to(device).requires_grad_()
        moved = {
            name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()
        }
        loss, _ = ops.linear_policy_gradient_loss(h, w, **moved, loss="reinforce", chunk_tokens=5)
        results.append(
            (loss.detach().cpu(), *(x.cpu() for x in torch.autograd.grad(2 * loss, (h, w))))
        )
    assert results[1][0].item() == pytest.approx(results[0][0].item(), rel=3e-3)
    for cpu, gpu in zip(results[0][1:], results[1][1:], strict=True):
        assert (gpu.double() - cpu.double()).norm() <= 1e-2 * cpu.double().norm()


@pytest.mark.parametrize("groups", [16, torch.tensor([0, 1, 1, 40, 500, 16384])])
def test_pacs(groups):
    generator = torch.Generator().manual_seed(0)
    proxies, labels = (
        torch.randn(16384, generator=generator),
        torch.rand(16384, generator=generator) < 0.3,
    )
    for score in ("rloo", "grpo", "dr_grpo", "naive"):
        results = []
        for device in (torch.device("cpu"), DEVICE):
            r = proxies.to(device).requires_grad_()
            on = groups.to(device) if isinstance(groups, torch.Tensor) else groups
            loss, metrics = ops.pacs_loss(r, labels.to(device), on, score=score)
            results.append((loss.detach(), torch.autograd.grad(loss, r)[0], *metrics.values()))
        for cpu, gpu in zip(*results, strict=True):
            torch.testing.assert_close(gpu.cpu(), cpu, rtol=1e-5, atol=1e-9)
    cu_seqlens = torch.arange(0, 16385, 128)
    results = []
    for device in (torch.device("cpu"), DEVICE):
        r = proxies.to(device).requires_grad_()
        reward = ops.log_ratio_reward(
            r, labels.float().to(device), cu_seqlens.to(device), 0.5, mask=labels.to(device)
        )
        results.append((reward.detach(), torch.autograd.grad(reward.square().sum(), r)[0]))
    for cpu, gpu in zip(*results, strict=True):
        torch.testing.assert_close(gpu.cpu(), cpu, rtol=1e-5, atol=1e-6)


def both_losses(logits, batch):
    return ops.policy_gradient_loss(logits, **batch, denominator=9.0)


def test_on_a_side_stream_and_in_a_graph():
    logits, batch = example(5000, torch.bfloat16)
    batch = {name: x for name, x in on_gpu(batch).items() if name != "mask"}
    z = logits.to(DEVICE)
    expected = both_losses(z, batch)[0].item()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            side = both_losses(z, batch)[0]
    stream.synchronize()
    assert side.item() == expected
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = both_losses(z, batch)
    z.mul_(0.5)
    graph.replay()
    assert captured.item() == pytest.approx(both_losses(z, batch)[0].item())
    assert captured.item() != pytest.approx(expected)


def test_no_operator_waits_for_the_device():
    logits, batch = example(5000, torch.bfloat16)
    batch, z = on_gpu(batch), logits.to(DEVICE).requires_grad_()
    hidden, weight = (
        torch.randn(n, 64, device=DEVICE).bfloat16().requires_grad_() for n in (T, 5000)
    )
    unmasked = {name: values for name, values in batch.items() if name != "mask"}
    # the first one looks what torch can do
    ops.linear_policy_gradient_loss(hidden, weight, **unmasked)[0].backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for options in OPTIONS + FUNCTIONS:
            loss, _ = ops.policy_gradient_loss(z, **batch, **options)
            (2 * loss).backward()
            ops.linear_policy_gradient_loss(hidden, weight, **unmasked, **options)[0].backward()
        ops.token_logprobs(z, batch["targets"])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_second_backward_is_refused():
    """The first backward pass has scaled the gradient in place."""
    logits, batch = example(100, torch.float32)
    z = logits.to(DEVICE).requires_grad_()
    loss, _ = ops.policy_gradient_loss(z, **on_gpu(batch))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran already"):
        loss.backward()
