"""The parts of a decoder layer on a CPU, for any sizes, strides and numbers of threads.

tests/kernels has the sizes that every device takes, and the decoder."""

import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from maxrl_fast import _C
from maxrl_fast.model.layer_kernels import CPU_DTYPES, KERNELS, TORCH_OPS, Rotary, choose_rows
from tests.fuzzing import settings
from tests.kernels.test_layer import norm_of, numbers, rotation_of, trained, with_gradients
from tests.models import on_threads, tiny_decoder

ROWS, SIZES = st.sampled_from([0, 1, 2, 7, 65, 1000]), st.integers(1, 300)


def assert_close(actual, expected, tolerance=1e-12):
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        if e.numel():
            assert (a.double() - e).abs().max() <= tolerance * max(1.0, float(e.abs().max()))


def check(function, inputs):
    expected, actual = (
        with_gradients(function(parts), inputs, torch.float64) for parts in (TORCH_OPS, KERNELS)
    )
    assert_close(actual, expected)


def rotation_inputs(rows, counts, half, has_norms):
    inputs = [numbers(rows, sum(counts) * 2 * half)]
    inputs += [1 + numbers(2 * half, seed=1 + i) / 2 for i in range(2 if has_norms else 0)]
    angles = numbers(rows + 3, 1, half, seed=4).float()
    return inputs, Rotary(angles.cos(), angles.sin(), (torch.arange(rows) * 5) % (rows + 3))


def chosen_by(rows):
    def function(parts):
        return lambda x: choose_rows(x, rows) if parts is KERNELS else x.index_select(0, rows)

    return function


@settings(40)
@given(ROWS, SIZES, st.booleans())
@pytest.mark.usefixtures("instructions")
def test_norms_and_swiglu_equal_pytorchs_for_any_size(rows, size, has_delta):
    inputs = [numbers(rows, size), 1 + numbers(size, seed=1) / 2]
    check(norm_of, inputs + [numbers(rows, size, seed=2)] * has_delta)
    check(lambda parts: parts.swiglu, [3 * numbers(rows, 2 * size)])


@settings(40)
@given(ROWS, st.integers(1, 3), st.integers(1, 2), st.integers(1, 70), st.booleans())
@pytest.mark.usefixtures("instructions")
def test_rotated_heads_equal_pytorchs_for_any_size(rows, shared, kv_heads, half, has_norms):
    counts = shared * kv_heads, kv_heads, kv_heads
    inputs, rotary = rotation_inputs(min(rows, 65), counts, half, has_norms)
    check(lambda parts: rotation_of(parts, rotary, counts), inputs)


@settings(30)
@given(st.sampled_from([1, 5, 300]), st.sampled_from([0, 1, 4, 900]), SIZES, st.booleans())
def test_chosen_rows_have_pytorchs_gradient(num_rows, num_chosen, size, is_strided):
    generator = torch.Generator().manual_seed(size)
    rows = torch.randint(num_rows, (num_chosen, 2), generator=generator)[:, 0]
    check(chosen_by(rows if is_strided else rows.contiguous()), [numbers(num_rows, size)])


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_results_are_bitwise_the_same_for_any_number_of_threads(dtype):
    cases = [(norm_of, [numbers(700, 131), numbers(131, seed=1), numbers(700, 131, seed=2)])]
    for half in (8, 33):
        inputs, rotary = rotation_inputs(500, (4, 2, 2), half, True)
        cases.append((lambda parts, r=rotary: rotation_of(parts, r, (4, 2, 2)), inputs))
    cases.append((lambda parts: parts.swiglu, [3 * numbers(500, 2 * 131)]))
    cases.append((chosen_by(torch.arange(900) * 7 % 400), [numbers(500, 131)]))
    for number, (function, inputs) in enumerate(cases):
        expected, *others = [
            with_gradients(function(KERNELS), inputs, dtype) for _ in on_threads(1, 2, 3)
        ]
        for actual in others:
            assert all(map(torch.equal, actual, expected)), number


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


def test_a_chosen_row_that_does_not_exist_is_refused():
    x, rows = torch.ones(4, 8, requires_grad=True), torch.tensor([0, 1, 2, 3])
    chosen = choose_rows(x, rows)
    rows.data[3] = 4
    with pytest.raises(ValueError, match="a chosen row does not exist"):
        chosen.sum().backward()


def test_a_frozen_matrix_has_no_gradient_in_memory():
    model, plain = tiny_decoder(), tiny_decoder()
    for layer in (*model.model.layers, *plain.model.layers):
        layer.self_attn.q_proj.requires_grad_(False)
        layer.mlp.up_proj.requires_grad_(False)
    actual, expected = trained(model, torch.float32), trained(plain.double(), torch.float64)
    assert_close(actual, expected, tolerance=1e-5)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    held = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in gradients}
    assert sum(held.values()) == sum(x.nbytes for x in gradients)
