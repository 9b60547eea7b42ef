"""The kernels of a decoder layer on a GPU: against float64, and a policy's update with them against
the CPU's.
"""

import contextlib
import copy

import pytest
import torch

from maxrl_fast.model.decoder import Decoder
from maxrl_fast.model.layer_kernels import KERNELS, layer_ops
from maxrl_fast.model.linear import can_join
from maxrl_fast.records import Rollouts, Samples
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.loss_settings import LossSettings
from maxrl_fast.training.optimizer import make_optimizer
from tests.batches import make_prompts
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
FAMILIES = pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
# The relative error of each gradient; bfloat16 joins q, k and v, and gate and up. A CPU that
# rounds to bfloat16 is off by at most 0.041.
GRADIENTS = [(torch.float32, 1e-3), (torch.bfloat16, 6e-2)]
# sizes that the kernels have in half precision too
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
PROMPTS = make_prompts([[5, 6, 7, 8], [9, 1], [1, 2, 3, 4, 5, 6, 7]])
ROLLOUTS = Rollouts.given([[1, 2], [3], [4, 5, 6], [7, 8], [11, 12, 13, 14, 15], [2, 3]])


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


def policy(family: str) -> Decoder:
    """Return a policy whose smaller weights do not multiply what is rounded."""
    model = tiny_decoder(model_type=family, **SIZES)
    with torch.no_grad():
        for matrix in (p for p in model.parameters() if p.dim() == 2):
            matrix.mul_(0.5)
    return model


def gradients(model: Decoder, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Return the hidden states of a few tokens and the gradients of every weight."""
    model = model.to(device)
    tokens, positions = TOKENS.to(device), POSITIONS.to(device)
    hidden = model(
        tokens,
        positions,
        lambda layer, q, k, v: q + (k * v).sum(1, keepdim=True),
        torch.tensor([5, 2], device=device),
        dtype,
    )
    model.zero_grad()
    hidden.float().square().sum().backward()
    return [
        x.detach().float().cpu()
        for x in (hidden, *(p.grad for p in model.parameters() if p.grad is not None))
    ]


def joins(model: Decoder, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether q, k and v, and gate and up, are one matrix multiplication, before the kernels."""
    c, x, layer = model.config, torch.empty(0, dtype=dtype, device=device), model.model.layers[0]
    attention, mlp = layer.self_attn, layer.mlp
    assert layer_ops(c.hidden_size, c.intermediate_size, c.head_dim, dtype, device) is KERNELS
    joined = [
        can_join(layers, x)
        for layers in (
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (mlp.gate_proj, mlp.up_proj),
        )
    ]
    assert joined[0] == joined[1]
    return joined[0]


def updated(model: Decoder, dtype: torch.dtype, device: torch.device):
    """Return the loss of an update and the gradients of its weights, by name."""
    model = model.to(device)
    optimizer = make_optimizer(model, beta2=0.99, weight_decay=0.01)
    settings = LossSettings("reinforce", "token_mean")
    learner = Learner(model, optimizer, settings, 1e9, 10_000, dtype)
    samples = Samples(PROMPTS.to(device), ROLLOUTS.to(device))
    advantages = torch.tensor([1.0, -0.5, 2.0, -1.0, 0.5, 1.5], device=device)
    metrics = learner.update(samples, advantages, samples.sequences, when="step 1", lr=1e-3)
    return metrics.loss, {name: p.grad.cpu() for name, p in model.named_parameters()}


@FAMILIES
@pytest.mark.parametrize(("dtype", "tolerance"), GRADIENTS)
def test_outputs_and_gradients_equal_the_cpus(family, dtype, tolerance):
    model = policy(family)
    expected = gradients(model, torch.float32, torch.device("cpu"))
    actual = gradients(model, dtype, GPU)
    assert joins(model, dtype, GPU) == (dtype != torch.float32)
    for a, e in zip(actual, expected, strict=True):
        assert (a - e).norm() <= tolerance * e.norm()


@FAMILIES
def test_an_update_in_bfloat16_has_the_gradients_of_float32(family):
    model = policy(family)
    loss, expected = updated(copy.deepcopy(model), torch.float32, torch.device("cpu"))
    gpu_loss, actual = updated(model, torch.bfloat16, GPU)
    assert joins(model, torch.bfloat16, GPU)
    assert gpu_loss == pytest.approx(loss, rel=1e-2)
    norm = sum(e.square().sum() for e in expected.values()).sqrt()
    for name, e in expected.items():
        cosine = torch.cosine_similarity(actual[name].flatten(), e.flatten(), dim=0)
        assert cosine > (0.999 if e.norm() > 0.02 * norm else 0.98), name
