import torch

from maxrl_fast.model.decoder import Decoder
from tests.models import tiny_decoder


def test_weights_equal_the_state_dict_without_tied_copies():
    for tied in (True, False):
        model = tiny_decoder(tie_word_embeddings=tied)
        weights = dict(model.weights())
        assert ("lm_head.weight" in weights) != tied
        assert weights.keys() | {"lm_head.weight"} == model.state_dict().keys()
        assert Decoder.count(model.config) == sum(weight.numel() for weight in model.parameters())
        assert all(torch.equal(x, model.state_dict()[name]) for name, x in weights.items())
