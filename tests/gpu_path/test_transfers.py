"""Copies between host and GPU keep values, shapes and dtypes, and wait once or not at all."""

import torch

from maxrl_fast.runtime.device import to_device, to_host
from tests.gpu_path.pretend import GPU

TENSORS = [
    torch.tensor([2**52 + 1, -3]),
    torch.tensor(0.1),
    torch.tensor([[True, False]]),
    torch.zeros(0, 3),
]


def test_values_come_to_the_host_in_one_read(gpu):
    given = [gpu.put(x) for x in TENSORS]
    with gpu.watch():
        results = to_host(*given)
    assert len(gpu.waits) == 1
    for result, x in zip(results, TENSORS, strict=True):
        assert type(result) is torch.Tensor
        assert result.dtype == x.dtype
        assert torch.equal(result, x)


def test_indices_go_to_the_device_in_one_copy_that_nothing_waits_for(gpu):
    given = [torch.arange(5), torch.zeros(0).long(), torch.arange(6).view(2, 3)]
    with gpu.watch():
        results = to_device(GPU, *given)
    assert not gpu.waits
    assert gpu.launches == {"_to_copy": 1}
    with gpu:
        for result, x in zip(results, given, strict=True):
            assert result.device == GPU
            assert torch.equal(result.cpu(), x)


def test_on_the_host_nothing_is_copied():
    for results in (to_host(*TENSORS), to_device(torch.device("cpu"), *TENSORS)):
        assert all(a is b for a, b in zip(results, TENSORS, strict=True))
