"""Attention on a GPU against float64: torch's FlashAttention, flash-attn where installed, and the
merge. tests/model/test_attention_kernel.py has the CPU's kernel.
"""

import importlib.util

import pytest
import torch

from maxrl_fast.model import attention
from maxrl_fast.model.attention import Forest, tree_attention

pytestmark = pytest.mark.gpu

# The lengths of the segments, and the segment above each.
CASES = {
    "uneven groups": ([70, 30, 1, 50, 60, 2, 50, 190], [-1, 0, 0, -1, 3, 3, -1, 6]),
    "prefixes of prefixes": ([70, 30, 1, 50, 60, 2, 50, 190], [-1, 0, 1, 2, 0, 4, 4, -1]),
    "one token each": ([5, 1, 1, 7, 1, 1, 1], [-1, 0, 0, -1, 3, 4, 3]),
    "sequences without responses": ([90, 3, 2, 5, 120, 400], [-1, -1, 1, 1, -1, -1]),
    "only sequences": ([129, 3, 1], [-1, -1, -1]),
}
KERNELS = [attention.TORCH_VARLEN, attention.REFERENCE]
if importlib.util.find_spec("flash_attn"):
    KERNELS.append(attention.FLASH_ATTN)


def run(case, q, k, v, grad):
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    forest = Forest(*map(torch.tensor, CASES[case]), q.device)
    out = tree_attention(q, k, v, forest)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), grad))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [(4, 4, 64), (6, 2, 128), (14, 2, 64)])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_differ_only_by_rounding(case, kernel, heads, dtype, monkeypatch):
    generator, total = torch.Generator().manual_seed(0), sum(CASES[case][0])
    shapes = [(total, heads[i], heads[2]) for i in (0, 1, 1, 0)]
    given = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    # the CPU kernel, which tests/model compares with ordinary attention
    truth = run(case, *(x.double() for x in given))
    monkeypatch.setattr(attention, "kernel_for", lambda *_: kernel)
    results = run(case, *(x.cuda() for x in given))
    for result, expected in zip(results, truth, strict=True):
        assert result.dtype == dtype
        error = float((result.double().cpu() - expected).norm() / expected.norm())
        assert 0 < error < 2 * torch.finfo(dtype).eps
