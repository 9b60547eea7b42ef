import itertools

import pytest
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from maxrl_fast.model import linear
from maxrl_fast.model.linear import Linear, add_adapters, packed
from maxrl_fast.records import Rollouts
from maxrl_fast.rollout.device_decoder import DeviceEngine
from maxrl_fast.training.learner import make_optimizer
from tests.batches import make_prompts, one_batch
from tests.kernels.test_layer import numbers, with_gradients
from tests.models import adapted, on_threads, response_logits, save_checkpoint, tiny_decoder
from tests.tables import refused

BATCH = one_batch(
    make_prompts([[5, 6, 7, 8], [9, 1]]), Rollouts.given([[1, 2], [3], [4, 5, 6], [7, 8]])
)


def test_weights_equal_the_state_dict_without_tied_copies():
    for tied in (True, False):
        model = tiny_decoder(tie_word_embeddings=tied)
        weights = dict(model.weights())
        assert ("lm_head.weight" in weights) != tied
        assert weights.keys() | {"lm_head.weight"} == model.state_dict().keys()
        assert all(torch.equal(x, model.state_dict()[name]) for name, x in weights.items())


def test_new_adapters_do_not_change_outputs_and_only_they_are_trained():
    model = tiny_decoder()
    logits = response_logits(model, BATCH, torch.float32)
    add_adapters(model, 3, 6.0, "q_proj, down_proj", seed=0)
    assert torch.equal(response_logits(model, BATCH, torch.float32), logits)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {".".join(name.split(".")[-2:]) for name in trained} == {
        *"q_proj.lora_a q_proj.lora_b down_proj.lora_a down_proj.lora_b".split()
    }
    groups = make_optimizer(model, beta2=0.99, weight_decay=0.01).param_groups
    optimized = sum(p.numel() for group in groups for p in group["params"])
    assert optimized == 2 * (3 * (32 + 32) + 3 * (48 + 32))


@pytest.mark.parametrize(
    "changes", [{}, {"model_type": "qwen3"}, {"model_type": "llama", "tie_word_embeddings": False}]
)
def test_merged_weights_give_the_same_outputs(tmp_path, changes):
    model, plain = adapted(tiny_decoder(**changes)), tiny_decoder(**changes)
    name, v = "model.layers.1.self_attn.v_proj.weight", model.model.layers[1].self_attn.v_proj
    logits = response_logits(model, BATCH, torch.float32)
    assert (logits - response_logits(plain, BATCH, torch.float32)).abs().max() > 0.5
    by_name = dict(model.weights())
    expected = plain.state_dict()[name] + 2.0 * (v.lora_b @ v.lora_a)
    torch.testing.assert_close(by_name[name], expected.detach())
    plain.load_state_dict(by_name, strict=False)
    actual = response_logits(plain, BATCH, torch.float32)
    torch.testing.assert_close(actual, logits, rtol=1e-4, atol=1e-4)

    save_checkpoint(tmp_path / "merged", model.config, model.weights(), {}, (2,))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(theirs.state_dict()[name], by_name[name])
    decoder = DeviceEngine(model, torch.float32)
    torch.testing.assert_close(dict(decoder.model.named_parameters())[name], by_name[name])


def test_adapter_gradients_follow_from_the_merged_matrix():
    """dA = s B^T dW and dB = s dW A^T."""
    model, plain = adapted(tiny_decoder(), "q_proj"), tiny_decoder()
    plain.load_state_dict(dict(model.weights()), strict=False)
    for m in (model, plain):
        response_logits(m, BATCH, torch.float32).log_softmax(-1)[:, 3].sum().backward()
    for layer, other in zip(model.model.layers, plain.model.layers, strict=True):
        q, by_matrix = layer.self_attn.q_proj, other.self_attn.q_proj.weight.grad
        assert by_matrix.abs().max() > 0.1
        expected = 2.0 * q.lora_b.T @ by_matrix, 2.0 * by_matrix @ q.lora_a.T
        for actual, wanted in zip((q.lora_a.grad, q.lora_b.grad), expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=1e-4)
        assert q.weight.grad is None


def test_the_reference_shares_frozen_weights():
    model = adapted(tiny_decoder())
    reference = model.copied().requires_grad_(False)
    assert reference.model.embed_tokens.weight is model.model.embed_tokens.weight
    own, copied = (x.model.layers[0].mlp.up_proj.lora_a for x in (model, reference))
    assert copied is not own
    assert own.requires_grad
    assert not any(p.requires_grad for p in reference.parameters())
    logits = (response_logits(x, BATCH, torch.float32) for x in (model, reference))
    assert torch.equal(*logits)


def test_unknown_targets_are_refused():
    with refused(r"lora_targets must be among .*q_proj.*, got 'qkv_proj'"):
        add_adapters(tiny_decoder(), 3, 6.0, "q_proj,qkv_proj", seed=0)
    with refused(r"got 'lm_head'"):
        add_adapters(tiny_decoder(), 3, 6.0, "lm_head", seed=0)


# 1, 2, 3, 4, 5, 7 and 17 panels, and rows of weight gradients of several tiles
SIZES = [16, 32, 48, 64, 80, 112, 272]
CASES = [
    (64, 16, 16),
    *((97, k, n) for k, n in itertools.product(SIZES, SIZES[::-1])),
    (257, 128, 48),
    (513, 48, 256),
]


def inputs_of(rows, in_size, out_size, has_bias, has_added):
    shapes = [(rows, in_size), (out_size, in_size)]
    shapes += [(out_size,)] * has_bias + [(rows, out_size)] * has_added
    return [numbers(*shape, seed=i, dtype=torch.float32) for i, shape in enumerate(shapes)]


def product_of(apply, has_bias, has_added):
    def function(x, weight, *others):
        others = list(others)
        bias = others.pop(0) if has_bias else None
        return apply(x, weight, bias, others.pop(0) if has_added else None)

    return function


def by_definition(x, weight, bias, added):
    y = x @ weight.T
    y = y if bias is None else y + bias
    return y if added is None else y + added


def compared(*case):
    """Return results and gradients of ours in float32, of the definition in float64, and of
    PyTorch's in float32."""
    ours, definition = (product_of(x, *case[3:]) for x in (linear.Product.apply, by_definition))
    kinds = (ours, torch.float32), (definition, torch.float64), (definition, torch.float32)
    return (with_gradients(function, inputs_of(*case), dtype) for function, dtype in kinds)


@pytest.mark.usefixtures("instructions")
def test_results_and_gradients_err_at_most_twice_as_much_as_pytorchs():
    terms = itertools.cycle(itertools.product((False, True), repeat=2))
    for sizes, of_terms in zip(CASES, terms, strict=False):
        for ours, exact, pytorchs in zip(*compared(*sizes, *of_terms), strict=True):
            assert (ours.dtype, ours.shape) == (torch.float32, exact.shape)
            scale = float(exact.abs().max())
            assert scale > 0.1
            error, others = (float((x.double() - exact).abs().max()) for x in (ours, pytorchs))
            assert error <= 2 * others + 4e-7 * scale, sizes


@pytest.mark.usefixtures("instructions")
def test_results_are_bitwise_the_same_for_any_number_of_threads():
    inputs = inputs_of(700, 48, 80, True, True)
    function = product_of(linear.Product.apply, True, True)
    results = [with_gradients(function, inputs, torch.float32) for _ in on_threads(1, 2, 3, 8)]
    for others in results[1:]:
        assert all(map(torch.equal, results[0], others))


def test_a_layer_uses_the_kernel_where_it_has_one_and_gives_pytorchs_result():
    layer = Linear(32, 48)
    for rows, dtype in ((64, torch.float32), (63, torch.float32), (64, torch.float64)):
        x, weight = torch.randn(rows, 32, dtype=dtype), layer.weight.to(dtype)
        assert linear.has_kernel(x, weight) == (rows == 64 and dtype == torch.float32)
        torch.testing.assert_close(layer(x), F.linear(x, weight, layer.bias.to(dtype)))
    for shape in ((40, 48), (48, 40), (2048, 1024)):
        assert not linear.has_kernel(torch.zeros(64, shape[1]), torch.zeros(shape))


def test_strided_inputs_and_layers_side_by_side_are_those_of_separate_products():
    layers = [Linear(32, size) for size in (48, 16)]
    x, grad = torch.randn(100, 64)[:, ::2].requires_grad_(), torch.randn(64, 100).T
    together = packed(layers, x)
    apart = torch.cat([F.linear(x, layer.weight, layer.bias) for layer in layers], 1)
    torch.testing.assert_close(together, apart)
    parameters = [x, *(p for layer in layers for p in layer.parameters())]
    ours, pytorchs = (torch.autograd.grad(y, parameters, grad) for y in (together, apart))
    torch.testing.assert_close(ours, pytorchs, rtol=1e-5, atol=1e-5)


def test_without_rows_gradients_are_zero():
    grad, x = torch.zeros(0, 48), torch.zeros(0, 32, requires_grad=True)
    weight, bias = (torch.ones(n, requires_grad=True) for n in ((48, 32), 48))
    # memory that an allocation may get again
    occupied = [torch.full((48, 32), 7.0) for _ in range(8)]
    del occupied
    y = linear.Product.apply(x, weight, bias, None)
    results = torch.autograd.grad(y, (x, weight, bias), grad)
    assert [tuple(r.shape) for r in results] == [(0, 32), (48, 32), (48,)]
    assert not any(r.any() for r in results)


def test_autocast_gets_pytorchs_products_for_any_number_of_rows():
    layer, x = Linear(32, 48), torch.randn(64, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == layer(x[:63]).dtype == torch.bfloat16


def test_wrong_shapes_are_refused():
    x, weight = torch.zeros(64, 32), torch.zeros(48, 32)
    with pytest.raises(ValueError, match="bias must be a contiguous"):
        linear.Product.apply(x, weight, torch.zeros(32), None)
    with pytest.raises(ValueError, match="multiples of 16"):
        linear.Product.apply(torch.zeros(64, 8), torch.zeros(16, 8), None, None)
