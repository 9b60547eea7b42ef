"""Diversity equals values computed by hand, and the mean over all pairs of responses."""

import random
import shutil
from collections import Counter
from itertools import combinations
from math import sqrt

import pytest
import torch

from maxrl_fast.evaluation.diversity import EmbeddingDiversity, NGramDiversity
from tests.tables import refused


def by_pairs(responses):
    vectors = [
        Counter(tuple(r[i : i + n]) for n in (1, 2, 3) for i in range(len(r) - n + 1))
        for r in responses
    ]

    def product(a, b):
        return sum(a[x] * b[x] for x in a)

    pairs = [*combinations(vectors, 2)]
    cosines = [product(a, b) / sqrt(product(a, a) * product(b, b)) for a, b in pairs]
    return 1 - sum(cosines) / len(pairs)


def measured(responses):
    return NGramDiversity()(responses, ["" for _ in responses])


@pytest.mark.parametrize(
    ("responses", "expected"),
    [
        ([[5, 6, 7]] * 4, 0),
        ([[1, 2], [3, 4], [5, 6, 7, 8]], 1),
        # (1), (2), (1 2) against (1), (3), (1 3): one of three dimensions is shared
        ([[1, 2], [1, 3]], 2 / 3),
        ([[1, 2], [2, 1]], 1 / 3),  # (2 1) is not (1 2)
        # counts matter: 3, 2, 1 of the grams (1), (1 1), (1 1 1) against 1 of (1)
        ([[1, 1, 1], [1]], 1 - 3 / sqrt(14)),
    ],
)
def test_diversity_by_hand(responses, expected):
    assert measured(responses) == pytest.approx(expected, abs=1e-12)


def test_n_gram_diversity_is_the_mean_over_all_pairs():
    rng = random.Random(0)
    for size in (2, 3, 8):
        lengths, tokens = [rng.randint(1, 12) for _ in range(size)], (0, 7, 150000, 150001)
        responses = [rng.choices(tokens, k=length) for length in lengths]
        assert measured(responses) == pytest.approx(by_pairs(responses), rel=1e-10)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """Save a tiny BERT whose tokens are words, and return its directory."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("embedder")
    words = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "up", "down", "left", "right"])}
    reader = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    reader.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=reader, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(directory)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes["intermediate_size"] = 16
    model = BertModel(BertConfig(vocab_size=6, max_position_embeddings=8, **sizes))
    with torch.no_grad():
        model.embeddings.word_embeddings.weight.normal_()  # distinct words, so that texts differ
    model.save_pretrained(directory)
    return directory


def test_embeddings_are_means_over_tokens_without_the_padding(embedder):
    from transformers import BertModel

    diversity = EmbeddingDiversity(embedder, torch.device("cpu"))
    model = BertModel.from_pretrained(embedder).eval()
    texts = {"up down": [2, 3], "left": [4], "right right up left down": [5, 5, 2, 4, 3]}
    texts[" ".join(["up"] * 20)] = [2] * 8
    with torch.no_grad():
        hidden = {text: model(torch.tensor([ids])).last_hidden_state for text, ids in texts.items()}
    alone = {text: x[0].mean(0) for text, x in hidden.items()}
    for text, vector in zip(texts, diversity.embed(list(texts)), strict=True):
        torch.testing.assert_close(vector, alone[text], rtol=1e-4, atol=1e-5)
    drawn = ["up down", "left", "left", "right right up left down"]
    pairs = [torch.cosine_similarity(alone[a], alone[b], 0) for a, b in combinations(drawn, 2)]
    expected = 1 - float(sum(pairs)) / 6
    assert diversity([[0]] * 4, drawn) == pytest.approx(expected, abs=1e-5)
    assert expected > 0.05
    assert diversity([[0]] * 2, ["left", "left"]) == pytest.approx(0, abs=1e-6)


def test_embeddings_are_pooled_by_the_rule_of_the_model(embedder, tmp_path):
    folder = shutil.copytree(embedder, tmp_path / "model")
    (folder / "1_Pooling").mkdir()
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]]) > 0
    for mode, place in (("lasttoken", -1), ("cls_token", 0), ("max_tokens", None)):
        (folder / "1_Pooling/config.json").write_text(f'{{"pooling_mode_{mode}": true}}')
        if place is None:
            with refused("must have the pooling lasttoken, cls_token or mean_tokens"):
                EmbeddingDiversity(folder, torch.device("cpu"))
            break
        diversity = EmbeddingDiversity(folder, torch.device("cpu"))
        diversity._tokenizer.padding_side = "left"
        hidden = diversity._model(torch.tensor([[0, 2, 3], [5, 2, 4]]), mask).last_hidden_state
        expected = torch.stack([hidden[0, 1:][place], hidden[1][place]]).detach()
        torch.testing.assert_close(diversity.embed(["up down", "right up left"]), expected)
