"""The decoder: checkpointed activations and compiled layers give the same outputs and gradients."""

import copy

import pytest
import torch

from maxrl_fast.model.decoder import Decoder
from maxrl_fast.records import Rollouts
from tests.batches import make_prompts, one_batch
from tests.models import response_logits, tiny_decoder

PROMPTS = make_prompts([[5, 6, 7, 8], [9, 1], [1, 2, 3, 4, 5, 6, 7]])
ROLLOUTS = Rollouts.given([[1, 2], [3], [4, 5, 6], [7, 8], [11, 12, 13, 14, 15], [2, 3]])
FAMILIES = [{}, {"model_type": "qwen3"}, {"model_type": "llama", "tie_word_embeddings": False}]


def run(model, dtype=torch.float32, batch=None):
    batch = batch or one_batch(PROMPTS, ROLLOUTS)
    logits = response_logits(model, batch, dtype)
    loss = logits.log_softmax(-1).gather(1, batch.targets[:, None]).sum()
    model.zero_grad()
    loss.backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointed_activations_give_bitwise_identical_gradients(family, dtype):
    model = tiny_decoder(**family)
    logits, gradients = run(model, dtype)
    model.checkpoint_activations = True
    calls = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(1))
    logits_again, gradients_again = run(model, dtype)
    assert len(calls) == 2  # the backward pass recomputes the forward pass
    assert torch.equal(logits, logits_again)
    for name, gradient in gradients.items():
        assert gradient.abs().max() > 1e-3
        assert torch.equal(gradient, gradients_again[name]), name


@pytest.mark.slow
def test_compiled_layers_give_the_same_gradients_and_are_compiled_once():
    model = tiny_decoder(num_hidden_layers=4)
    compiled = copy.deepcopy(model)
    compiled.compile_layers()
    torch._dynamo.reset()
    compilations = torch._dynamo.utils.counters["stats"]
    compilations.clear()
    run(compiled)
    first = compilations["unique_graphs"]
    assert 2 <= first <= 4  # before and after attention, and possibly both again for the last layer
    other = one_batch(
        PROMPTS.take(0, 2), Rollouts.given([[1, 2, 3, 4, 5, 6, 7], [3], [4, 5, 6], [7, 8]])
    )
    for batch in (one_batch(PROMPTS, ROLLOUTS), other):
        logits, gradients = run(model, batch=batch)
        logits_compiled, gradients_compiled = run(compiled, batch=batch)
        torch.testing.assert_close(logits_compiled, logits, rtol=1e-4, atol=1e-4)
        for name, gradient in gradients.items():
            assert (
                float((gradients_compiled[name] - gradient).abs().max() / gradient.abs().max())
                < 1e-4
            ), name
    assert compilations["unique_graphs"] <= first + 2  # lengths are dynamic


def test_weights_equal_the_state_dict_without_tied_copies():
    for tied in (True, False):
        model = tiny_decoder(tie_word_embeddings=tied)
        weights = dict(model.weights())
        assert ("lm_head.weight" in weights) != tied
        assert weights.keys() | {"lm_head.weight"} == model.state_dict().keys()
        assert Decoder.count(model.config) == sum(weight.numel() for weight in model.parameters())
        assert all(
            torch.equal(weight, model.state_dict()[name]) for name, weight in weights.items()
        )
