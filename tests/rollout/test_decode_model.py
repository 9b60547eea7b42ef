import contextlib

import pytest
import torch

from maxrl_fast.model import flash
from maxrl_fast.rollout.device_decoder import DeviceEngine
from tests.models import POSITIONS, TOKENS, adapted, tiny_decoder

FAMILIES = [
    {},
    {"tie_word_embeddings": False},
    {"model_type": "qwen3"},
    {"model_type": "llama", "tie_word_embeddings": False, "num_key_value_heads": 1},
]


def causal(layer, q, k, v):
    seen = torch.ones(1, len(q), len(q), dtype=torch.bool).tril()
    return flash.attend(q[None], k[None] * (1 + layer), v[None], seen)[0][0]


def check_hidden_states(model, tolerance, around_decoding=contextlib.nullcontext):
    for rows in (torch.arange(6), torch.tensor([5, 2])):
        with torch.no_grad():
            expected = model(TOKENS, POSITIONS, causal, rows)
        with around_decoding(), torch.no_grad():
            decoder = DeviceEngine(model, torch.float32)
            decoder.load_weights(model)
            hidden = decoder.model(TOKENS, POSITIONS, causal, None if len(rows) == 6 else rows)
        assert expected.std() > 0.3
        torch.testing.assert_close(hidden, expected, rtol=tolerance, atol=tolerance)
        ours, theirs = decoder.model.logits(hidden).float(), model.logits(expected)
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_hidden_states_equal_the_decoders(family):
    check_hidden_states(tiny_decoder(**family), 1e-5)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_weight_is_loaded_in_place_under_its_name(family):
    model, old = adapted(tiny_decoder(**family)), tiny_decoder(seed=1, **family)
    decoder = DeviceEngine(model, torch.bfloat16)
    decoder.load_weights(old)
    addresses = {name: weight.data_ptr() for name, weight in decoder.model.named_parameters()}
    decoder.load_weights(model)
    expected, actual = dict(model.weights()), dict(decoder.model.named_parameters())
    assert actual.keys() == expected.keys() == addresses.keys()
    for name, weight in actual.items():
        assert torch.equal(weight, expected[name].to(torch.bfloat16)), name
        assert weight.data_ptr() == addresses[name], name
    assert len(set(addresses.values())) == len(addresses)
    assert sum(w.numel() for w in actual.values()) == sum(w.numel() for w in old.parameters())
