"""The parts of a decoder layer on a CPU: against PyTorch in float64, for any sizes, strides and
numbers of threads.
"""

import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.nn import functional as F

from maxrl_fast import _C
from maxrl_fast.model import decoder
from maxrl_fast.model.layer_kernels import CPU_DTYPES, KERNELS, choose_rows, layer_ops
from maxrl_fast.model.layer_ops import TORCH_OPS, HeadNorms, Rotary
from maxrl_fast.model.linear import add_adapters
from maxrl_fast.records import Rollouts
from tests.batches import make_prompts, one_batch
from tests.fuzzing import settings
from tests.layers import CPU, numbers, with_gradients
from tests.model.test_linear import ALL
from tests.models import response_logits, tiny_decoder

ROWS, SIZES = st.sampled_from([0, 1, 2, 7, 65, 1000]), st.integers(1, 300)


def assert_close(actual, expected, tolerance=1e-12):
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        if e.numel():
            assert (a.double() - e).abs().max() <= tolerance * max(1.0, float(e.abs().max()))


def norm_of(parts):
    def function(x, weight, *delta):
        return parts.add_rms_norm(x, *(delta or (None,)), weight, 1e-2)

    return function


def rotation_of(parts, rotary, counts):
    """Return a function of [q | k | v] and norms."""

    def function(packed, *norms):
        given_norms = HeadNorms(*norms, 1e-2) if norms else None
        own = (
            rotary
            if parts is KERNELS
            else Rotary(*(x.to(packed.dtype)[rotary.positions] for x in rotary[:2]))
        )
        return parts.rotate_heads(packed, counts, given_norms, own)

    return function


def rotation_inputs(rows, counts, half, has_norms):
    inputs = [numbers(rows, sum(counts) * 2 * half)]
    inputs += [1 + numbers(2 * half, seed=1 + i) / 2 for i in range(2 if has_norms else 0)]
    angles = numbers(rows + 3, 1, half, seed=4).float()
    return inputs, Rotary(angles.cos(), angles.sin(), (torch.arange(rows) * 5) % (rows + 3))


@settings(40)
@given(ROWS, SIZES, st.booleans())
@pytest.mark.usefixtures("instructions")
def test_norms_equal_pytorchs_for_any_size(rows, size, has_delta):
    inputs = [
        numbers(rows, size),
        1 + numbers(size, seed=1) / 2,
        *([numbers(rows, size, seed=2)] if has_delta else []),
    ]
    expected, actual = (
        with_gradients(norm_of(parts), inputs, torch.float64) for parts in (TORCH_OPS, KERNELS)
    )
    assert_close(actual, expected)


@settings(60)
@given(ROWS, st.integers(1, 3), st.integers(1, 2), st.integers(1, 70), st.booleans())
@pytest.mark.usefixtures("instructions")
def test_rotated_heads_equal_pytorchs_for_any_size(rows, shared, kv_heads, half, has_norms):
    counts = shared * kv_heads, kv_heads, kv_heads
    inputs, rotary = rotation_inputs(min(rows, 65), counts, half, has_norms)
    expected, actual = (
        with_gradients(rotation_of(parts, rotary, counts), inputs, torch.float64)
        for parts in (TORCH_OPS, KERNELS)
    )
    assert_close(actual, expected)


@settings(30)
@given(ROWS, SIZES)
@pytest.mark.usefixtures("instructions")
def test_swiglu_equals_pytorchs_for_any_size(rows, size):
    inputs = [3 * numbers(rows, 2 * size)]
    expected, actual = (
        with_gradients(parts.swiglu, inputs, torch.float64) for parts in (TORCH_OPS, KERNELS)
    )
    assert_close(actual, expected)


@settings(30)
@given(st.sampled_from([1, 5, 300]), st.sampled_from([0, 1, 4, 900]), SIZES)
def test_chosen_rows_have_pytorchs_gradient_however_often_they_are_chosen(
    num_rows, num_chosen, size
):
    rows = torch.randint(num_rows, (num_chosen,), generator=torch.Generator().manual_seed(size))
    expected = with_gradients(
        lambda x: x.index_select(0, rows), [numbers(num_rows, size)], torch.float64
    )
    assert_close(
        with_gradients(lambda x: choose_rows(x, rows), [numbers(num_rows, size)], torch.float64),
        expected,
    )


def test_rows_may_be_chosen_by_a_strided_list():
    rows = torch.arange(10)[::3]
    ours, pytorchs = (
        with_gradients(function, [numbers(10, 5)], torch.float64)
        for function in (lambda x: choose_rows(x, rows), lambda x: x.index_select(0, rows))
    )
    assert_close(ours, pytorchs)


def cases():
    """Give (name, our function, PyTorch's, inputs), of a few rows that need several pieces and
    vectors of all kinds.
    """
    counts = (4, 2, 2)
    inputs = [numbers(700, 131), numbers(131, seed=1), numbers(700, 131, seed=2)]
    yield "norm", norm_of(KERNELS), norm_of(TORCH_OPS), inputs
    for half in (8, 33):
        inputs, rotary = rotation_inputs(500, counts, half, True)
        ours, plain = (rotation_of(parts, rotary, counts) for parts in (KERNELS, TORCH_OPS))
        yield f"heads of {2 * half}", ours, plain, inputs
    yield "swiglu", KERNELS.swiglu, TORCH_OPS.swiglu, [3 * numbers(500, 2 * 131)]
    rows = torch.arange(900) * 7 % 400
    yield (
        "rows",
        lambda x: choose_rows(x, rows),
        lambda x: x.index_select(0, rows),
        [numbers(500, 131)],
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("instructions")
def test_rounding_errors_are_at_most_twice_pytorchs(dtype):
    for name, ours, plain, inputs in cases():
        inputs = [x.to(dtype).double() for x in inputs]
        exact, actual, theirs = (
            with_gradients(f, inputs, d)
            for f, d in ((plain, torch.float64), (ours, dtype), (plain, dtype))
        )
        for wanted, x, y in zip(exact, actual, theirs, strict=True):
            assert x.dtype == dtype
            errors = [float((z.double() - wanted).norm() / wanted.norm()) for z in (x, y)]
            assert errors[0] <= 2 * errors[1], (name, errors)


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_results_are_bitwise_the_same_for_any_number_of_threads(dtype):
    threads = torch.get_num_threads()
    try:
        for name, ours, _, inputs in cases():
            torch.set_num_threads(1)
            expected = with_gradients(ours, inputs, dtype)
            for count in (2, 3):
                torch.set_num_threads(count)
                assert all(map(torch.equal, with_gradients(ours, inputs, dtype), expected)), name
    finally:
        torch.set_num_threads(threads)


def test_each_instruction_set_that_tests_choose_sums_in_its_own_order():
    x = numbers(700, 131).float()
    results = []
    try:
        for instructions in _C.instruction_sets():
            _C.limit_instructions(instructions)
            results.append(KERNELS.add_rms_norm(x, None, torch.ones(131), 1e-6)[1])
    finally:
        _C.limit_instructions(_C.instruction_sets()[0])
    assert _C.instruction_sets()[-1] == "baseline"
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(results, 2))
    with pytest.raises(ValueError, match="does not have the instruction set 'sse'"):
        _C.limit_instructions("sse")


def test_a_position_outside_the_table_gives_nan():
    packed = torch.ones(4, 6 * 16)
    rotary = Rotary(torch.ones(3, 1, 8), torch.ones(3, 1, 8), torch.tensor([0, 3, -1, 2]))
    q, k, _ = KERNELS.rotate_heads(packed, (2, 2, 2), None, rotary)
    assert (
        q.isnan().all(-1).all(-1).tolist()
        == k.isnan().any(-1).any(-1).tolist()
        == [False, True, True, False]
    )


@pytest.mark.usefixtures("instructions")
def test_large_gates_saturate():
    gate = torch.tensor([[-1e30, -200.0, -90.0, 0.0, 90.0, 200.0, 1e30, torch.nan]])
    packed = torch.cat([gate, torch.ones(1, 8)], 1)
    out, grad = with_gradients(KERNELS.swiglu, [packed], torch.float32)
    torch.testing.assert_close(out, F.silu(gate), equal_nan=True)
    assert grad[0, :7].isfinite().all()
    assert grad[0, 7].isnan()


def test_bad_inputs_are_a_sentence():
    x = torch.ones(4, 8)
    with pytest.raises(
        ValueError, match="add_rms_norm_cpu takes float32 float64 bfloat16, got float16"
    ):
        KERNELS.add_rms_norm(x.half(), None, torch.ones(8), 1e-6)
    with pytest.raises(ValueError, match="a chosen row does not exist"):
        torch.ops.maxrl_fast.choose_rows_backward(x, torch.tensor([0, 1, 2, 3]), None, None, 3)
    assert layer_ops(8, 8, 8, torch.float16, CPU) is TORCH_OPS


def test_the_operators_pass_opcheck():
    x, weight, tables = (
        torch.randn(5, 6),
        torch.ones(6),
        (torch.ones(5, 1, 3), torch.ones(5, 1, 3), torch.arange(5)),
    )
    heads, packed, rows = torch.randn(5, 2, 6), torch.randn(5, 24), torch.tensor([0, 3, 3, 6, 1])
    grads = heads, heads[:, :1] + 1, heads[:, :1] + 2
    calls = {
        "add_rms_norm": (x, x, weight, 1e-6),
        "add_rms_norm_backward": (x, x, x, weight, 1e-6),
        "rotate_heads": (packed, 2, 1, weight, weight, *tables, 1e-6),
        "rotate_heads_backward": (*grads, packed, weight, weight, *tables, 1e-6),
        "swiglu": (packed,),
        "swiglu_backward": (torch.randn(5, 12), packed),
        "choose_rows_backward": (x, rows, None, None, 8),
    }
    for name, arguments in calls.items():
        torch.library.opcheck(getattr(torch.ops.maxrl_fast, name).default, arguments)


PROMPTS = make_prompts([[5, 6, 7, 8], [9, 1]])
ROLLOUTS = Rollouts.given([[1, 2], [3], [4, 5, 6], [7, 8]])


def trained(model, dtype):
    """Return the logits of a small batch and the gradients of all trained weights."""
    batch = one_batch(PROMPTS, ROLLOUTS)
    logits = response_logits(model, batch, dtype)
    model.zero_grad()
    logits.log_softmax(-1)[:, 3].sum().backward()
    return [logits.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("options", ["plain", "checkpointed", "lora"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_a_decoder_has_the_outputs_and_gradients_of_pytorchs_operations(
    family, options, monkeypatch
):
    model = tiny_decoder(
        model_type=family, hidden_size=33, intermediate_size=45, head_dim=6
    ).double()
    if options == "lora":
        add_adapters(model, 3, 6.0, ALL, seed=0)
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                torch.nn.init.normal_(
                    parameter, std=0.3, generator=torch.Generator().manual_seed(1)
                )
    model.checkpoint_activations = options == "checkpointed"
    actual = trained(model, torch.float64)
    chosen = []
    monkeypatch.setattr(decoder, "layer_ops", lambda *_: chosen.append(TORCH_OPS) or TORCH_OPS)
    expected = trained(model, torch.float64)
    assert chosen
    assert len(actual) > 10
    logits, *gradients = zip(actual, expected, strict=True)
    assert_close(*([x] for x in logits), tolerance=1e-6)  # logits are float32
    assert_close(*zip(*gradients, strict=True), tolerance=1e-6)


def test_a_frozen_matrix_has_no_gradient_in_memory():
    model, plain = tiny_decoder(), tiny_decoder()
    for policy in (model, plain):
        for layer in policy.model.layers:
            layer.self_attn.q_proj.requires_grad_(False)
            layer.mlp.up_proj.requires_grad_(False)
    actual, expected = trained(model, torch.float32), trained(plain.double(), torch.float64)
    assert_close(actual, expected, tolerance=1e-5)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in gradients}
    assert sum(held.values()) == sum(x.nbytes for x in gradients)


# What the profiler lists beside operators that compute: views, allocations and calls of other
# operators.
NO_WORK = (
    "as_strided detach narrow slice view view_as t transpose expand flatten "
    "unflatten select reshape split split_with_sizes chunk unbind alias resolve_conj "
    "to _to_copy type_as linear matmul rms_norm _fused_rms_norm empty empty_like "
    "empty_strided new_empty promote_types result_type zeros"
).split()


def operators(model):
    """Return how many operators of PyTorch and of this package that compute something a training
    pass calls.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        trained(model, torch.float32)
    names = [event.name.split("::") for event in profile.events()]
    return sum(
        name[0] in ("aten", "maxrl_fast") and name[1] not in NO_WORK
        for name in names
        if len(name) == 2
    )


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_layers_forward_and_backward_pass_call_few_operators(family):
    """PyTorch's operations alone called 137 (190 in Qwen3)."""
    counts = [operators(tiny_decoder(model_type=family, num_hidden_layers=n)) for n in (2, 3)]
    assert counts[1] - counts[0] <= 34, counts
