import json
from itertools import combinations

import pytest
import torch

EMBEDDINGS = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
WORDS = ["[PAD]", "[UNK]", "up", "down", "left", "right"]


@pytest.fixture
def embedder(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    reader = Tokenizer(models.WordLevel({x: i for i, x in enumerate(WORDS)}, unk_token="[UNK]"))
    reader.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "model"
    PreTrainedTokenizerFast(tokenizer_object=reader, pad_token="[PAD]").save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertModel(BertConfig(vocab_size=6, max_position_embeddings=8, **sizes))
    model.embeddings.word_embeddings.weight.data.copy_(EMBEDDINGS)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("mode", ["", "lasttoken", "cls_token", "max_tokens"])
def test_s_div_is_the_mean_over_all_pairs_of_correct_responses(
    mode, embedder, tmp_path, monkeypatch, capsys
):
    from transformers import BertModel

    monkeypatch.syspath_prepend("examples/papers")
    import diversity

    if mode:
        (embedder / "1_Pooling").mkdir()
        (embedder / "1_Pooling/config.json").write_text(f'{{"pooling_mode_{mode}": true}}')
    texts = ["up down", "left", "left", "right up " * 9]
    rows = [{"id": 3, "reward": 1, "response": text} for text in texts]
    rows += [{"id": 3, "reward": None, "response": "up"}, {"id": 4, "reward": 1, "response": "up"}]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if mode == "max_tokens":
        with pytest.raises(SystemExit, match="must have one of the poolings lasttoken"):
            diversity.main([str(tmp_path), str(embedder)])
        return
    diversity.main([str(tmp_path), str(embedder)])
    model, vectors = BertModel.from_pretrained(embedder).eval(), []
    for text in texts:
        ids = torch.tensor([[WORDS.index(word) for word in text.split()][:8]])
        with torch.no_grad():
            hidden = model(ids).last_hidden_state[0]
        pooled = {"lasttoken": hidden[-1], "cls_token": hidden[0]}
        vectors.append(pooled.get(mode, hidden.mean(0)))
    pairs = [float(torch.cosine_similarity(a, b, 0)) for a, b in combinations(vectors, 2)]
    expected = 1 - sum(pairs) / len(pairs)
    assert expected > 0.01
    assert capsys.readouterr().out == f"S_div {expected:.4f} over 1 problems\n"
