"""The CUDA kernels on an emulated GPU (see cuda_runtime.h) against the CPU kernels, as in
tests/gpu.

Half of the cases run the threads of a block in ascending order, with late asynchronous copies, the
others in descending order, with early ones. Rows large enough for a cluster run with and without.
"""

import contextlib
from collections.abc import Iterator

import pytest
import torch

from maxrl_fast import _C, ops
from maxrl_fast.ops import dispatch
from maxrl_fast.ops.group_advantage_kernel import group_advantage
from tests.gpu.test_advantage import CASES, FORMULAS, KERNELS, arguments, examples
from tests.gpu.test_token_loss import (
    FUNCTIONS,
    OPTIONS,
    TOLERANCE,
    assert_rows_close,
    example,
    gradient_of,
)
from tests.ops.test_token_rows import check_rows_far_apart

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("is_reverse")]
CPU = torch.device("cpu")


def run(call: dispatch.KernelLaunch, kernel: str, **arguments: object) -> object:
    return getattr(_C, f"{kernel}_cuda")(**arguments, stream=0)


@contextlib.contextmanager
def emulated_gpu() -> Iterator[None]:
    """Treat the CPU as a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "is_gpu", lambda device: True)
        patch.setattr(dispatch.KernelLaunch, "_run", run)
        yield


CLUSTERS, NO_CLUSTERS = 9, 8  # compute capabilities; 9/2: holds clusters of 2 at most


# A warp takes rows of up to 8 KiB, a block or a cluster of 4 takes those of 100 kB, and a cluster
# of 8 takes those of 240 kB, which a block must read twice.
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("vocab", "row_bytes", "capability"),
    [
        *((vocab, None, CLUSTERS) for vocab in (1, 2, 127)),
        *((None, size, has) for size in (100_000, 240_000) for has in (CLUSTERS, NO_CLUSTERS)),
    ],
)
def test_token_loss(vocab, row_bytes, capability, dtype, monkeypatch):
    monkeypatch.setenv("MAXRL_EMULATED_CAPABILITY", str(capability))
    vocab = vocab or row_bytes // dtype.itemsize + 3
    logits, batch = example(vocab, dtype)
    for options in OPTIONS + FUNCTIONS * (vocab == 127) if vocab < 1000 else OPTIONS[2:4]:
        loss, gradient, metrics = gradient_of(logits, batch, **options)
        with emulated_gpu():
            gpu_loss, gpu_gradient, gpu_metrics = gradient_of(logits, batch, **options)
        assert gpu_loss.item() == pytest.approx(loss.item(), rel=1e-5, abs=1e-7)
        assert_rows_close(gpu_gradient, gradient, TOLERANCE[dtype])
        for name, value in metrics.items():
            assert gpu_metrics[name].item() == pytest.approx(value.item(), rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("vocab", "capability"),
    [(31, CLUSTERS), (1030, CLUSTERS), (24001, CLUSTERS), (24001, NO_CLUSTERS)],
)
def test_rows_at_any_address(vocab, capability, dtype, monkeypatch):
    """Rows may start at any address, in place or not, and the padding between rows is not
    written.
    """
    monkeypatch.setenv("MAXRL_EMULATED_CAPABILITY", str(capability))
    logits, batch = example(vocab, dtype)
    _, expected, _ = gradient_of(logits, batch, **OPTIONS[2])
    for offset in (0, 1, 5):
        padded = torch.full((len(logits), vocab + 13), 7.0, dtype=dtype)
        view = padded[:, offset : offset + vocab]
        view.copy_(logits)
        with emulated_gpu():
            _, gradient, _ = gradient_of(view, batch, **OPTIONS[2])
            computed = padded.detach().requires_grad_() * 1.0
            loss, _ = ops.policy_gradient_loss(
                computed[:, offset : offset + vocab], **batch, **OPTIONS[2], in_place=True
            )
            loss.backward()
        assert_rows_close(gradient, expected, TOLERANCE[dtype])
        for result in (padded, computed.detach()):
            assert (result[:, :offset] == 7).all()
            assert (result[:, offset + vocab :] == 7).all()
        assert_rows_close(computed.detach()[:, offset : offset + vocab], expected, TOLERANCE[dtype])


@pytest.mark.parametrize("vocab", [5003, 12007])  # a block; in 4 and 8 bytes a cluster
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_token_logprobs(dtype, vocab):
    logits, batch = example(vocab, dtype)
    weights = torch.randn(2, len(logits), generator=torch.Generator().manual_seed(1))
    weights[:, 3] = 0

    def results():
        z = logits.detach().requires_grad_()
        outputs = ops.token_logprobs(
            z, batch["targets"], temperature=batch["temperature"].to(outputs_dtype)
        )
        total = sum((w * x).sum() for w, x in zip(weights, outputs, strict=True))
        return (*(x.detach() for x in outputs), torch.autograd.grad(total, z)[0])

    outputs_dtype = torch.promote_types(dtype, torch.float32)
    expected = results()
    with emulated_gpu():
        actual = results()
    for a, b in zip(actual[:2], expected[:2], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert_rows_close(actual[2], expected[2], TOLERANCE[dtype])


@pytest.mark.parametrize("vocab", [37, 5003])
def test_more_rows_than_fit_at_once(vocab):
    """Every warp, or block, takes several rows, some of which it skips."""
    generator = torch.Generator().manual_seed(5)
    num_tokens = 300 if vocab < 100 else 60
    logits = 3 * torch.randn(num_tokens, vocab, generator=generator)
    batch = {
        "targets": torch.randint(vocab, (num_tokens,), generator=generator),
        "advantages": torch.randn(num_tokens, generator=generator)
        * (torch.rand(num_tokens, generator=generator) < 0.7),
        "advantages_per_token": True,
        "cu_seqlens": torch.tensor([0, 17, num_tokens]),
        "mask": torch.rand(num_tokens, generator=generator) < 0.8,
    }
    loss, gradient, metrics = gradient_of(logits, batch)
    with emulated_gpu():
        gpu_loss, gpu_gradient, gpu_metrics = gradient_of(logits, batch)
    assert gpu_loss.item() == pytest.approx(loss.item(), rel=1e-5)
    assert_rows_close(gpu_gradient, gradient, TOLERANCE[torch.float32])
    for name, value in metrics.items():
        assert gpu_metrics[name].item() == pytest.approx(value.item(), rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize(
    ("vocab", "capability"),
    [(40, CLUSTERS), (30011, CLUSTERS), (30011, NO_CLUSTERS), (40011, "9/2"), (70011, "9/1")],
)
def test_extreme_logits(vocab, capability, monkeypatch):
    monkeypatch.setenv("MAXRL_EMULATED_CAPABILITY", str(capability))
    """Logits of -inf have probability 0, large differences do not overflow, and one NaN or +inf
    makes a row NaN.
    """
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(6))
    targets = torch.tensor([3, 3, vocab - 1, 0, 5, 5, 5, 5])
    logits[0, vocab // 2 :] = -torch.inf
    logits[1, :3] = logits[1, 4:] = -torch.inf  # all but the target
    logits[2] *= 1e6
    logits[3, 0] = 80  # a probability of 1
    logits[4, 6:] = 1e6
    logits[5, 9] = torch.nan
    logits[6, 9] = torch.inf
    logits[7, 5] = -torch.inf  # the target
    results = []
    for gpu in (contextlib.nullcontext(), emulated_gpu()):
        z = logits.detach().requires_grad_()
        with gpu:
            logprobs, entropy = ops.token_logprobs(z, targets)
            (gradient,) = torch.autograd.grad(logprobs[:5].sum() + 0.5 * entropy[:4].sum(), z)
        results.append((logprobs.detach(), entropy.detach(), gradient))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6, equal_nan=True)
    assert results[1][0].isfinite().tolist() == [True] * 5 + [False] * 3


def test_rows_may_be_more_than_32_bits_apart():
    with emulated_gpu():
        check_rows_far_apart()


# A warp, a cluster, and a block that reads rows twice, write the gradient over float32 logits.
@pytest.mark.parametrize(
    ("vocab", "capability", "dtype"),
    [
        (517, CLUSTERS, torch.float32),
        (517, CLUSTERS, torch.bfloat16),
        (12_007, CLUSTERS, torch.float16),
        (60_001, NO_CLUSTERS, torch.bfloat16),
    ],
)
def test_linear_loss(vocab, capability, dtype, monkeypatch):
    monkeypatch.setenv("MAXRL_EMULATED_CAPABILITY", str(capability))
    _, batch = example(vocab, torch.float32)
    generator = torch.Generator().manual_seed(2)
    tokens = len(batch["targets"])
    inputs = [torch.randn(n, 24, generator=generator).to(dtype) for n in (tokens, vocab)]

    def results(inputs):
        h, w = (x.detach().requires_grad_() for x in inputs)
        loss, _ = ops.linear_policy_gradient_loss(
            h, w, **batch, loss="reinforce", entropy_coef=0.1, chunk_tokens=7
        )
        logprobs, _ = ops.linear_token_logprobs(h, w, batch["targets"], chunk_tokens=7)
        total = 3 * loss + logprobs.mean()
        return loss.detach(), logprobs.detach(), *torch.autograd.grad(total, (h, w))

    expected = results([x.float() for x in inputs])
    with emulated_gpu():
        actual = results(inputs)
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        error = 1e-5 if dtype == torch.float32 or i < 2 else 6e-3
        assert (a - b).double().norm() <= error * b.double().norm()


def test_a_bad_target_makes_the_loss_nan():
    logits, batch = example(127, torch.float32)
    batch["targets"][4] = 127
    batch["mask"][:] = True
    with emulated_gpu():
        loss, gradient, _ = gradient_of(logits, batch, loss="ppo")
    assert loss.isnan()
    assert gradient[4].isnan().all()


# One estimator of each formula: the others have other numbers in their tables.
@pytest.mark.parametrize(
    ("name", "dtype"), [case for case in CASES if case[0] in FORMULAS.values()]
)
def test_group_advantage(name, dtype):
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    for rewards, valid in examples(name, dtype):
        expected = group_advantage(rewards, valid, *arguments(name))
        with emulated_gpu():
            actual = group_advantage(rewards, valid, *arguments(name))
        assert actual.dtype == expected.dtype
        assert (actual - expected).abs().max() <= tolerance * expected.abs().max(), rewards.shape


def test_a_group_does_not_depend_on_its_width_nor_ranks_on_the_order():
    generator = torch.Generator().manual_seed(5)
    rewards, order = (
        torch.randn(3, 70, generator=generator).double(),
        torch.randperm(70, generator=generator),
    )
    wide, valid = torch.zeros(3, 300).double(), torch.arange(300).expand(3, 300) < 70
    wide[:, :70] = rewards
    with emulated_gpu():
        for name in FORMULAS.values():
            narrow = group_advantage(rewards, None, *arguments(name))
            padded = group_advantage(wide, valid.contiguous(), *arguments(name))
            assert torch.equal(padded[:, :70], narrow)
            assert (padded[:, 70:] == 0).all()
            permuted = group_advantage(rewards[:, order].contiguous(), None, *arguments(name))
            if KERNELS[name].kernel.table is not None:
                assert torch.equal(permuted, narrow[:, order])


def test_unusable_rewards_give_nan():
    rewards = torch.zeros(4, 40).double()
    rewards[1, 7], rewards[2, 0] = torch.inf, -2e150
    for name in ("rloo", "maxpo", "reinforce_raw"):
        with emulated_gpu():
            a = group_advantage(rewards, None, *arguments(name))
        assert a[1:3].isnan().all()
        assert a[[0, 3]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_log_ratio_reward(dtype):
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, 300, (170,), generator=generator)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    logprobs, ref = 0.2 * torch.randn(2, int(cu_seqlens[-1]), generator=generator, dtype=dtype)
    weights = torch.randn(170, generator=generator, dtype=dtype)
    logprobs.requires_grad_()

    def results(mask):
        proxies = ops.log_ratio_reward(logprobs, ref, cu_seqlens, beta=0.3, mask=mask)
        return proxies.detach(), torch.autograd.grad(proxies, logprobs, weights)[0]

    for mask in (None, torch.rand(len(ref), generator=generator) < 0.8):
        expected = results(mask)
        with emulated_gpu():
            actual = results(mask)
        for a, b in zip(actual, expected, strict=True):
            tolerance = 1e-5 if dtype == torch.float32 else 1e-11
            torch.testing.assert_close(a, b, rtol=tolerance, atol=1e-6)
            assert b.abs().max() > 0.1
