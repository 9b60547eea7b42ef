"""The CUDA kernels of a decoder layer on an emulated GPU: against float64, and the decoder with
them against the plain one.
"""

import contextlib
import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from maxrl_fast.model import layer_kernels
from maxrl_fast.model.layer_kernels import KERNELS, layer_ops
from maxrl_fast.model.layer_ops import TORCH_OPS, Rotary
from maxrl_fast.model.linear import add_adapters, full_tensor
from maxrl_fast.ops import dispatch
from maxrl_fast.records import Rollouts
from maxrl_fast.rollout.device_decoder import DeviceDecoder
from maxrl_fast.training.passes import run_batch
from maxrl_fast.training.sharding import shard
from tests.batches import make_prompts, one_batch
from tests.emulation.test_kernels import CPU, emulated_gpu
from tests.layers import (
    MATRICES,
    NORMS,
    ROTATIONS,
    TOLERANCE,
    check_chosen_rows,
    check_norm,
    check_rotation,
    check_swiglu,
    with_gradients,
)
from tests.model.test_linear import ALL
from tests.models import tiny_decoder
from tests.rollout.test_decode_model import check_hidden_states

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("is_reverse")]

DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


@pytest.fixture(autouse=True)
def few_partials(is_reverse, monkeypatch):
    if is_reverse:
        monkeypatch.setattr(layer_kernels, "_MOST_PARTIALS", 3)  # several rows in every partial sum


@DTYPES
@pytest.mark.parametrize("shape", NORMS, ids=str)
def test_addition_and_rms_norm(shape, dtype):
    check_norm(*shape, dtype, CPU, emulated_gpu)


@DTYPES
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("shape", ROTATIONS, ids=str)
def test_rotation_of_heads(shape, has_norms, dtype):
    check_rotation(*shape, has_norms, dtype, CPU, emulated_gpu)


@DTYPES
@pytest.mark.parametrize("shape", MATRICES, ids=str)
def test_swiglu(shape, dtype):
    check_swiglu(*shape, dtype, CPU, emulated_gpu)


@DTYPES
@pytest.mark.parametrize("shape", MATRICES, ids=str)
def test_chosen_rows(shape, dtype):
    check_chosen_rows(*shape, dtype, CPU, emulated_gpu)


def test_a_position_outside_the_table_gives_nan():
    with emulated_gpu():
        rotary = Rotary(torch.ones(3, 1, 8), torch.ones(3, 1, 8), torch.tensor([0, 3, -1, 2]))
        q, k, _ = KERNELS.rotate_heads(torch.ones(4, 6 * 16), (2, 2, 2), None, rotary)
    assert (
        q.isnan().all(-1).all(-1).tolist()
        == k.isnan().any(-1).any(-1).tolist()
        == [False, True, True, False]
    )


def test_large_gates_saturate():
    gate = torch.tensor([[-1e30, -200.0, -90.0, 0.0, 90.0, 200.0, 1e30, torch.nan]])
    with emulated_gpu():
        packed = torch.cat([gate, torch.ones(1, 8)], 1)
        out, grad = with_gradients(KERNELS.swiglu, [packed], torch.float32)
    torch.testing.assert_close(out, F.silu(gate), equal_nan=True)
    assert grad[0, :7].isfinite().all()
    assert grad[0, 7].isnan()


def test_no_rows():
    with emulated_gpu():
        for results in (
            with_gradients(
                lambda x, w: KERNELS.add_rms_norm(x, x, w, 1e-6),
                (torch.ones(0, 8), torch.ones(8)),
                torch.float32,
            ),
            with_gradients(KERNELS.swiglu, [torch.ones(0, 16)], torch.float32),
        ):
            assert all(x.numel() == 0 or (x == 0).all() for x in results)


def test_the_operators_equal_their_fakes():
    x, weight, heads, tables = (
        torch.randn(5, 16),
        torch.ones(16),
        torch.randn(5, 2, 8),
        (torch.ones(5, 1, 4), torch.ones(5, 1, 4)),
    )
    of_head, packed = torch.ones(8), torch.randn(5, 4 * 8)
    grads = heads, heads[:, :1] + 1, heads[:, :1] + 2
    calls = {
        "add_rms_norm": [(x, x, weight, 1e-6), (x, None, weight, 1e-6)],
        "add_rms_norm_backward": [(x, x, x, weight, 1e-6), (x, None, x, weight, 1e-6)],
        "rotate_heads": [
            (packed, 2, 1, None, None, *tables, torch.arange(5), 0.0),
            (packed, 2, 1, of_head, of_head, *tables, None, 1e-6),
        ],
        "rotate_heads_backward": [
            (*grads, None, None, None, *tables, torch.arange(5), 0.0),
            (*grads, packed, of_head, of_head, *tables, None, 1e-6),
        ],
        "swiglu": [(packed,)],
        "swiglu_backward": [(x, packed)],
        "choose_rows_backward": [
            (x, *(torch.tensor(i) for i in ([1, 0, 1, 3, 0], [1, 4, 0, 2, 3], [0, 2, 4, 4, 5])), 4)
        ],
    }
    with emulated_gpu():
        for name, arguments in calls.items():
            for given in arguments:
                torch.library.opcheck(getattr(torch.ops.maxrl_fast, name).default, given)


def test_served_sizes():
    def serves(hidden, intermediate, head_dim, dtype):
        with emulated_gpu():
            return layer_ops(hidden, intermediate, head_dim, dtype, CPU) is KERNELS

    assert serves(896, 4864, 64, torch.bfloat16)
    assert serves(4096, 4, 8, torch.float32)
    assert not serves(4100, 4, 8, torch.float32)
    assert not serves(896, 4865, 64, torch.bfloat16)
    assert not serves(896, 4864, 24, torch.bfloat16)
    assert not serves(900, 4864, 64, torch.bfloat16)
    assert not serves(896, 4864, 64, torch.float64)
    # the kernels of a CPU take any sizes
    assert layer_ops(4100, 4865, 24, torch.float64, CPU) is KERNELS
    assert layer_ops(896, 4864, 64, torch.float16, CPU) is TORCH_OPS


# Families, tied and untied; the sizes are multiples of 16 bytes in every dtype.
SIZES = {"hidden_size": 40, "intermediate_size": 56, "head_dim": 16}
FAMILIES = [
    SIZES,
    {"model_type": "qwen3", "tie_word_embeddings": False, **SIZES},
    {"model_type": "llama", **SIZES},
]
PROMPTS = make_prompts([[5, 6, 7, 8], [9, 1], [1, 2, 3, 4, 5, 6, 7]])
ROLLOUTS = Rollouts.given([[1, 2], [3], [4, 5, 6], [7, 8], [11, 12, 13, 14, 15], [2, 3]])


@contextlib.contextmanager
def watched_gpu(names: list[str]) -> Iterator[None]:
    """Treat the CPU as a GPU, and add the name of every kernel that is launched to a list."""
    with emulated_gpu(), pytest.MonkeyPatch.context() as patch:
        launch = dispatch.KernelLaunch.launch
        patch.setattr(
            dispatch.KernelLaunch,
            "launch",
            lambda call, name, **a: (names.append(name), launch(call, name, **a))[1],
        )
        yield


def trained(model, dtype):
    batch = one_batch(PROMPTS, ROLLOUTS)
    logits = F.linear(run_batch(model, batch, dtype), model.output_matrix.to(dtype))
    model.zero_grad()
    logits.log_softmax(-1)[:, 3].sum().backward()
    return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("options", ["plain", "checkpointed", "lora"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.get("model_type", "qwen2"))
def test_the_decoder_with_kernels_has_the_same_outputs_and_gradients(family, options):
    model = tiny_decoder(**family)
    if options == "lora":
        add_adapters(model, 3, 6.0, ALL, seed=0)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                torch.nn.init.normal_(
                    parameter, std=0.3, generator=torch.Generator().manual_seed(1)
                )
    expected = trained(model, torch.float32)
    model.checkpoint_activations = options == "checkpointed"
    names = []
    with watched_gpu(names):
        actual = trained(model, torch.float32)
    passes = 2 if options == "checkpointed" else 1
    assert names.count("swiglu") == 2 * passes
    assert names.count("swiglu_backward") == 2
    assert names.count("add_rms_norm") == 4 * passes + 1
    # adapters: no gradient below the first norm
    assert names.count("add_rms_norm_backward") == (4 if options == "lora" else 5)
    assert len(actual) == len(expected) > 4
    for a, e in zip(actual, expected, strict=True):
        assert e.abs().max() > 1e-3
        assert (a - e).norm() <= 2e-5 * e.norm()


def test_sharded_weights_have_the_same_gradients():
    """FSDP2 on one rank: the kernels get the gathered weights of a layer."""
    model = tiny_decoder(model_type="qwen3", **SIZES)
    expected = trained(model, torch.float32)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 0.05)):
            sharded, names = copy.deepcopy(model), []
            shard(sharded, dtype, torch.device("cpu"))
            with watched_gpu(names):
                actual = [full_tensor(x) for x in trained(sharded, dtype)]
            assert names.count("swiglu_backward") == names.count("rotate_heads_backward") == 2
            assert len(actual) == len(expected)
            for a, e in zip(actual, expected, strict=True):
                assert (a - e).norm() <= tolerance * e.norm()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.get("model_type", "qwen2"))
def test_the_decoder_in_bfloat16_is_no_further_from_float64_with_kernels(family):
    """Where weights are rounded, q, k and v are one matrix multiplication, and gate and up."""
    model, products = tiny_decoder(**family), []
    exact = trained(model, torch.float64)
    plain = trained(model, torch.bfloat16)
    linear = F.linear
    with emulated_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "linear", lambda *x: (products.append(len(x[1])), linear(*x))[1])
        actual = trained(model, torch.bfloat16)
    assert products == 2 * [8 * 16, 40, 2 * 56] + [32]
    error, of_plain = (
        sum(((a - e).norm() / e.norm()) ** 2 for a, e in zip(given, exact, strict=True))
        for given in (actual, plain)
    )
    assert error < 1.5 * of_plain


def test_a_compiled_decoder_keeps_the_operations_of_pytorch(monkeypatch):
    model = tiny_decoder(**SIZES)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    model.compile_layers()
    names = []
    with watched_gpu(names):
        trained(model, torch.float32)
        assert DeviceDecoder(model, torch.float32, compiled=True).model.ops is TORCH_OPS
        assert DeviceDecoder(model, torch.float32).model.ops is KERNELS
    assert names == ["chosen_rows_backward"]  # after the layers


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.get("model_type", "qwen2"))
def test_decoding_in_kernels_has_the_decoders_hidden_states(family):
    names = []
    check_hidden_states(tiny_decoder(**family), 1e-5, lambda: watched_gpu(names))
    # Of the decoding model alone: 2 layers of 4 launches, and the first norm; twice, with and
    # without chosen rows.
    assert names.count("rotate_heads") == names.count("swiglu") == 4
    assert names.count("add_rms_norm") == 10


def test_a_launch_refuses_what_it_cannot_read():
    x, ones = torch.ones(4, 8), torch.ones(8)
    with emulated_gpu():
        with pytest.raises(
            ValueError, match=r"delta must be a contiguous torch.float32 tensor of shape \(4, 8\)"
        ):
            KERNELS.add_rms_norm(x, torch.ones(4, 16)[:, ::2], ones, 1e-6)
        with pytest.raises(
            ValueError, match=r"packed must be a contiguous torch.float32 tensor of shape \(4, 8\)"
        ):
            KERNELS.swiglu(torch.ones(4, 16)[:, ::2])
        with pytest.raises(ValueError, match="swiglu needs tensors and rows aligned to 16 bytes"):
            KERNELS.swiglu(torch.ones(33)[1:].view(4, 8))
        with pytest.raises(
            ValueError, match="hidden_size must be a multiple of 4 up to 4096, got 6"
        ):
            KERNELS.add_rms_norm(torch.ones(4, 6), None, torch.ones(6), 1e-6)
        rotary = Rotary(torch.ones(4, 1, 6), torch.ones(4, 1, 6))
        with pytest.raises(ValueError, match="head_dim must be a multiple of 8 up to 256, got 12"):
            KERNELS.rotate_heads(torch.ones(4, 36), (1, 1, 1), None, rotary)
