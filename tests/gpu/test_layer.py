"""The kernels of a decoder layer on a GPU: against float64, and a policy's update with them against
the CPU's.
"""

import contextlib

import pytest
import torch

from maxrl_fast.model.decoder import Decoder
from tests.layers import (
    MATRICES,
    NORMS,
    ROTATIONS,
    TOLERANCE,
    check_chosen_rows,
    check_norm,
    check_rotation,
    check_swiglu,
)
from tests.models import POSITIONS, TOKENS, tiny_decoder

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@DTYPES
@pytest.mark.parametrize("shape", NORMS, ids=str)
def test_addition_and_rms_norm(shape, dtype):
    check_norm(*shape, dtype, GPU, contextlib.nullcontext)


@DTYPES
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("shape", ROTATIONS, ids=str)
def test_rotation_of_heads(shape, has_norms, dtype):
    check_rotation(*shape, has_norms, dtype, GPU, contextlib.nullcontext)


@DTYPES
@pytest.mark.parametrize("shape", MATRICES, ids=str)
def test_swiglu(shape, dtype):
    check_swiglu(*shape, dtype, GPU, contextlib.nullcontext)


@DTYPES
@pytest.mark.parametrize("shape", MATRICES, ids=str)
def test_chosen_rows(shape, dtype):
    check_chosen_rows(*shape, dtype, GPU, contextlib.nullcontext)


def gradients(model: Decoder, device: torch.device) -> list[torch.Tensor]:
    """Return the hidden states of a few tokens and the gradients of every weight."""
    model = model.to(device)
    tokens, positions = TOKENS.to(device), POSITIONS.to(device)
    hidden = model(
        tokens,
        positions,
        lambda layer, q, k, v: q + (k * v).sum(1, keepdim=True),
        torch.tensor([5, 2], device=device),
    )
    model.zero_grad()
    hidden.square().sum().backward()
    return [
        x.detach().cpu()
        for x in (hidden, *(p.grad for p in model.parameters() if p.grad is not None))
    ]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_outputs_and_gradients_equal_the_cpus(family):
    model = tiny_decoder(model_type=family)
    expected, actual = gradients(model, torch.device("cpu")), gradients(model, GPU)
    for a, e in zip(actual, expected, strict=True):
        assert (a - e).norm() <= 1e-3 * e.norm()  # a GPU may multiply matrices in TF32
