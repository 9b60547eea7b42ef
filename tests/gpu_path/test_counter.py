"""The counter itself: what it takes for a kernel and for a wait, and that it finds what the budgets
are there for.
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from maxrl_fast.ops.dispatch import KernelLaunch
from maxrl_fast.records import Rollouts
from maxrl_fast.runtime.device import to_device
from tests.gpu_path.pretend import GPU


def test_kernels_are_counted_and_views_and_allocations_are_not(gpu):
    x = gpu.put(torch.arange(12.0))
    with gpu.watch():
        y = x.view(3, 4).t()[1:]
        z = torch.empty_like(y)
        z.copy_(y + 1)
    assert gpu.launches == {"add": 1, "copy_": 1}
    assert z.device == GPU
    assert not gpu.waits


def test_autograd_runs_and_its_kernels_are_counted(gpu):
    w = gpu.put(torch.ones(4, 4)).requires_grad_()
    with gpu.watch():
        (w @ w).sum().backward()
    assert gpu.launches["mm"] == 3
    assert w.grad.device == GPU


READS = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x[1]),
    "bool": lambda x: bool((x > 2).any()),
    "list": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: (x > 2).nonzero(),
    "boolean index": lambda x: x[x > 2],
    "assignment by a boolean index": lambda x: x.index_put_(
        ((x > 2),), torch.zeros((), device=GPU)
    ),
    "unique": lambda x: torch.unique(x),
    "repeat_interleave": lambda x: torch.repeat_interleave(x),
    "data": lambda x: torch.tensor([1, 2], device=GPU),
    "pageable memory": lambda x: torch.arange(4).to(GPU, non_blocking=True),
    "select of rollouts": lambda x: Rollouts(x, torch.tensor([0, 4]).to(GPU), x, x > 0).select(
        x[:1]
    ),
}


@pytest.mark.parametrize("read", READS)
def test_what_makes_the_host_wait_is_found(gpu, read):
    x = gpu.put(torch.tensor([0, 1, 2, 3]))
    with gpu.watch():
        READS[read](x)
    assert gpu.waits


def test_what_does_not_make_the_host_wait_is_not_found(gpu):
    x = gpu.put(torch.tensor([0, 1, 2, 3]))
    with gpu.watch():
        torch.repeat_interleave(x, x, output_size=6)
        torch.where(x > 1, x, 0).clamp(1, 2)[x] = x
        to_device(GPU, torch.arange(3), torch.arange(4))
        torch.full((3,), 2.0, device=GPU)
    assert not gpu.waits


def test_lengths_keep_their_values(gpu):
    lengths = gpu.put(torch.tensor([3, 1, 2]))
    with gpu:
        cumulated = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        cumulated += 1
        assert cumulated.tolist() == [1, 4, 5, 7]
        assert lengths[lengths > 1].shape == (2,)
        cumulated.copy_(torch.empty(4, device=GPU) @ torch.empty(4, 4, device=GPU))
        assert cumulated.tolist() == [1, 1, 1, 1]  # of a product nothing is known


def test_a_loop_over_sequences_is_found(gpu):
    """The regression that the budgets of packing are there for."""

    def launches(num_sequences: int) -> int:
        x = gpu.put(torch.arange(2 * num_sequences))
        with gpu.watch():
            torch.cat([x[2 * s : 2 * s + 2] + s for s in range(num_sequences)])
        return gpu.num_launches

    assert launches(8) == launches(4) + 4


def test_devices_must_not_be_mixed(gpu):
    with gpu, pytest.raises(RuntimeError, match="same device"):
        gpu.put(torch.zeros(3)) + torch.zeros(3)


def test_a_kernel_of_the_package_gets_no_tensor_of_the_host(gpu):
    call = KernelLaunch(GPU)
    x = gpu.put(torch.zeros(3))
    call.address("x", x, torch.float32, (3,))
    with pytest.raises(
        ValueError, match=r"x must be a contiguous torch.float64 tensor of shape \(3,\) on cuda:0"
    ):
        call.address("x", x, torch.float64, (3,))
    with pytest.raises(AssertionError, match="not on the GPU"):
        call.keep(torch.zeros(3))
    call.launch("token_loss", logits=1)
    assert gpu.launches == {"token_loss": 1}


def test_pytorch_is_as_before_afterwards():
    """The fixture replaces functions of PyTorch for one test."""
    with FakeTensorMode():
        assert torch.empty(2, device=GPU).device == GPU
    assert torch.nn.functional.rms_norm(torch.ones(2, 2), (2,)).device.type == "cpu"
