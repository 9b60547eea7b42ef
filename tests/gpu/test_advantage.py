"""The CUDA kernels against the references; `make gpu` runs this folder, which imports nothing but torch, pytest and the ops."""

import pytest
import torch

from maxrl_fast import _C, ops
from maxrl_fast.ops.rank_transform import rank_transform, rank_transform_reference, rank_weights

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (0, 4), (1024, 16), (7, 33), (5, 1000), (2, 4096)])
def test_cuda_equals_the_reference(shape, dtype):
    assert _C.cuda, "the extension was built without CUDA kernels"
    generator = torch.Generator().manual_seed(0)
    rewards = ((torch.randn(shape, generator=generator, dtype=dtype) * 4).round() / 4 + 100).cuda()
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        stream.wait_stream(torch.cuda.current_stream())
        for kind in ("mean", "rloo", "maxpo", "ei", "maxrl"):
            weights = rank_weights(kind, shape[1], min(3, max(shape[1] - 1, 1)), rewards.device)
            torch.cuda.synchronize()
            for centred in (True, False):
                with torch.cuda.stream(stream):
                    actual = rank_transform(rewards, weights, centred)
                torch.cuda.synchronize()
                tolerance = 1e-6 if dtype == torch.float32 else 1e-12
                expected = rank_transform_reference(rewards, weights, centred)
                torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
                assert torch.equal(actual, rank_transform(rewards, weights, centred))  # deterministic


def test_cuda_refuses_groups_it_cannot_sort():
    with pytest.raises(ValueError, match="at most 4096 rollouts, got 4097"):
        ops.rloo_advantage(torch.rand(2, 4097, device="cuda"))
