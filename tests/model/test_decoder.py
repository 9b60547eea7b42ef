"""The decoder: compiled layers give the same outputs and gradients; which weights it has."""

import copy

import pytest
import torch

from maxrl_fast.model.decoder import Decoder
from maxrl_fast.records import Rollouts
from tests.batches import make_prompts, one_batch
from tests.models import response_logits, tiny_decoder

PROMPTS = make_prompts([[5, 6, 7, 8], [9, 1], [1, 2, 3, 4, 5, 6, 7]])
ROLLOUTS = Rollouts.given([[1, 2], [3], [4, 5, 6], [7, 8], [11, 12, 13, 14, 15], [2, 3]])


def run(model, batch):
    logits = response_logits(model, batch, torch.float32)
    loss = logits.log_softmax(-1).gather(1, batch.targets[:, None]).sum()
    model.zero_grad()
    loss.backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.slow
def test_compiled_layers_give_the_same_gradients_and_are_compiled_once():
    model = tiny_decoder(num_hidden_layers=4)
    compiled = copy.deepcopy(model)
    compiled.compile_layers()
    torch._dynamo.reset()
    compilations = torch._dynamo.utils.counters["stats"]
    compilations.clear()
    shorter = Rollouts.given([[1, 2, 3, 4, 5, 6, 7], [3], [4, 5, 6], [7, 8]])
    batch, other = one_batch(PROMPTS, ROLLOUTS), one_batch(PROMPTS.take(0, 2), shorter)
    run(compiled, batch)
    first = compilations["unique_graphs"]
    assert 2 <= first <= 4  # before and after attention, and possibly both again for the last layer
    for given in (batch, other):
        logits, gradients = run(model, given)
        logits_compiled, gradients_compiled = run(compiled, given)
        torch.testing.assert_close(logits_compiled, logits, rtol=1e-4, atol=1e-4)
        for name, gradient in gradients.items():
            error = (gradients_compiled[name] - gradient).abs().max() / gradient.abs().max()
            assert error < 1e-4, name
    assert compilations["unique_graphs"] <= first + 2  # lengths are dynamic


def test_weights_equal_the_state_dict_without_tied_copies():
    for tied in (True, False):
        model = tiny_decoder(tie_word_embeddings=tied)
        weights = dict(model.weights())
        assert ("lm_head.weight" in weights) != tied
        assert weights.keys() | {"lm_head.weight"} == model.state_dict().keys()
        assert Decoder.count(model.config) == sum(weight.numel() for weight in model.parameters())
        assert all(torch.equal(x, model.state_dict()[name]) for name, x in weights.items())
