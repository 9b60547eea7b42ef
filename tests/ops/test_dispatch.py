import contextlib
import struct
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from maxrl_fast import _C, ops
from maxrl_fast.ops import dispatch
from maxrl_fast.ops.group_advantage import forget_tables

THREADS, ROUNDS = 8, 40
CPU = torch.device("cpu")


def results_for(size: int) -> list[torch.Tensor]:
    """Return what ops compute for inputs of this size; sizes that follow one another share no
    table.
    """
    generator = torch.Generator().manual_seed(size)
    n = 3 + size % 61
    uneven = torch.rand(n + 6 + size, generator=generator)
    logits = torch.randn(n, 2 + size % 7, generator=generator).requires_grad_()
    bounds = torch.tensor([0, 1, n])
    proxies = ops.log_ratio_reward(logits[:, 0], torch.zeros(n), bounds)
    losses = [
        ops.policy_gradient_loss(
            logits, torch.zeros(n, dtype=torch.int64), torch.tensor([1.0, -0.5]), bounds
        )[0],
        ops.pacs_loss(proxies, torch.tensor([0.0, 1.0]), 2)[0],
    ]
    torch.stack(losses).sum().backward()
    return [
        ops.maxpo_advantage(uneven[None, :n], 1 + size % 2),
        ops.maxrl_advantage(uneven, group_ids=(torch.arange(len(uneven)) > size % 5).long()),
        torch.stack(losses).detach(),
        logits.grad,
    ]


def test_eight_threads_compute_what_one_does():
    """The threads drop each other's tables from the caches, which keep fewer than there are
    sizes.
    """
    sizes = list(range(40, 40 + ROUNDS))
    expected = {size: results_for(size) for size in sizes}
    forget_tables()
    # Neighbours take the same sizes at the same time.
    orders = [sizes[i // 2 * 10 :] + sizes[: i // 2 * 10] for i in range(THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        wrong = pool.map(
            lambda order: [
                s for s in order if not all(map(torch.equal, results_for(s), expected[s]))
            ],
            orders,
        )
        assert [sizes for sizes in wrong if sizes] == []


@pytest.mark.parametrize(
    ("wrong", "shape"),
    [
        (torch.zeros(4, 2).t(), (2, 4)),
        (torch.zeros(4), (3,)),
        (torch.zeros(4).double(), (4,)),
        (torch.zeros(4, device="meta"), (4,)),
    ],
)
def test_a_kernel_reads_only_what_it_was_told(wrong, shape):
    call = dispatch.KernelLaunch(CPU)
    assert call.address("x", None, torch.float32, shape) == 0
    with pytest.raises(
        ValueError, match=r"x must be a contiguous torch.float32 tensor of shape .* on cpu, got"
    ):
        call.address("x", wrong, torch.float32, shape)
    if wrong.dim() == 2:
        with pytest.raises(ValueError, match=r"x must be a contiguous .*, in rows on cpu, got"):
            call.matrix("x", wrong)


class Watched:
    """Stands for a tensor on a GPU, and remembers on which streams it is used."""

    def __init__(self):
        self.streams = []

    def data_ptr(self):
        return 64

    def is_neg(self):
        return False

    def record_stream(self, stream):
        self.streams.append(stream.cuda_stream)


@pytest.mark.parametrize("is_capturing", [False, True])
def test_a_cached_tensor_outlives_its_cache_on_the_stream_that_reads_it(monkeypatch, is_capturing):
    monkeypatch.setattr(dispatch, "is_gpu", lambda device: True)
    monkeypatch.setattr(dispatch, "_captured", set())
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: is_capturing)
    monkeypatch.setattr(_C, "of_a_test_cuda", lambda *arguments: arguments, raising=False)
    monkeypatch.setitem(_C.FIELDS, "of_a_test", {"table": "Q", "rewards": "i"})
    call, cached, given = dispatch.KernelLaunch(torch.device("cuda")), Watched(), Watched()
    addresses = {"table": call.keep_cached(cached), "rewards": call.keep(given)}
    assert call.launch("of_a_test", **addresses) == (
        "",
        struct.pack("=Qi", 64, 64),
        7,
    )
    assert (cached.streams, given.streams) == ([7], [])
    # a graph reads it at every replay
    assert dispatch._captured == ({cached} if is_capturing else set())
