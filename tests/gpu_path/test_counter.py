import pytest
import torch

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


READS = {
    "item": lambda x: x[0].item(),
    "list": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: (x > 2).nonzero(),
    "boolean index": lambda x: x[x > 2],
    "assignment by an index": lambda x: x.index_put_((x > 2,), torch.zeros((), device=GPU)),
    "unique": torch.unique,
    "repeat_interleave": torch.repeat_interleave,
    "data": lambda x: torch.tensor([1, 2], device=GPU),
    "pageable memory": lambda x: torch.arange(4).to(GPU, non_blocking=True),
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
