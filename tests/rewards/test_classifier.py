import shutil

import pytest
import torch
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM
from transformers import Qwen2ForSequenceClassification as Qwen2Classifier

from maxrl_fast import train
from maxrl_fast.rewards.models import Classifier
from tests.job.test_teacher import change
from tests.rewards.pools import rewards
from tests.tables import refused
from tests.tasks.test_dataset import save_byte_level_policy
from tests.test_train import base, read

CPU = torch.device("cpu")
ROWS = [
    {"prompt": "2+2=", "response": "4", "answer": "4"},
    {
        "prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "2+3="}],
        "response": "it is five",
    },
    {"prompt": "x", "response": "y" * 40},
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return save_byte_level_policy(tmp_path_factory.mktemp("tokenizer")).parent / "tokenizer"


def saved(tokenizer, directory, kind=Qwen2Classifier, **options):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 300}
    sizes |= {"max_position_embeddings": 256} | options
    config = Qwen2Config(**sizes)
    torch.manual_seed(0)
    shutil.copytree(tokenizer, directory)
    kind(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(("num_labels", "with_padding"), [(1, True), (2, False)])
def test_the_reward_is_the_score_of_the_conversation(tokenizer, tmp_path, num_labels, with_padding):
    directory = saved(tokenizer, tmp_path / "model", num_labels=num_labels)
    theirs = AutoTokenizer.from_pretrained(directory)
    # padding with the token that ends texts would move the place where the score is read
    if not with_padding:
        theirs.pad_token = theirs.eos_token
        theirs.save_pretrained(directory)
    scores = Classifier(f"hf:{directory}", CPU, torch.float32).score(ROWS)
    model = Qwen2Classifier.from_pretrained(directory).eval().requires_grad_(False)
    expected = []
    for row in ROWS:
        asked = row["prompt"]
        asked = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        chat = [*asked, {"role": "assistant", "content": row["response"]}]
        text = theirs.apply_chat_template(chat, tokenize=False)
        logits = model(torch.tensor([theirs(text)["input_ids"]])).logits[0]
        expected.append(float(logits[0] if num_labels == 1 else logits.softmax(0)[1]))
    assert rewards(scores) == pytest.approx(expected, abs=1e-5)
    assert len({*rewards(scores)}) == 3


def test_texts_that_are_too_long_fail_alone(tokenizer, tmp_path):
    directory = saved(tokenizer, tmp_path / "model", num_labels=1)
    model = Classifier(f"hf:{directory}", CPU, torch.float32)
    scores = model.score([ROWS[0], ROWS[0] | {"response": "y" * 300}])
    assert (scores[0].kind, scores[1].kind) == ("", "invalid")
    assert "takes 1 to 256 tokens, got 3" in scores[1].message
    assert scores[0].reward == pytest.approx(model.score([ROWS[0]])[0].reward, abs=1e-6)


def test_without_a_chat_template_the_text_is_prompt_and_response(tokenizer, tmp_path):
    directory = saved(tokenizer, tmp_path / "model", num_labels=1)
    theirs = AutoTokenizer.from_pretrained(directory)
    (directory / "chat_template.jinja").unlink()
    model = Qwen2Classifier.from_pretrained(directory).eval().requires_grad_(False)
    expected = float(model(torch.tensor([theirs("2+2=4")["input_ids"]])).logits)
    found = Classifier(f"hf:{directory}", CPU, torch.float32).score(ROWS[:1])
    assert rewards(found) == pytest.approx([expected], abs=1e-5)


def test_other_models_are_refused(tokenizer, tmp_path):
    three = saved(tokenizer, tmp_path / "three", num_labels=3)
    with refused("must have one label, or two, got 3"):
        Classifier(f"hf:{three}", CPU, torch.float32)
    decoder = saved(tokenizer, tmp_path / "lm", Qwen2ForCausalLM)
    with refused("must be a sequence classifier, but has no weights score"):
        Classifier(f"hf:{decoder}", CPU, torch.float32)


@pytest.mark.slow
def test_a_run_with_a_reward_model_beside_a_function(tokenizer, tmp_path, capsys):
    sizes = {"num_labels": 2, "max_position_embeddings": 1024}
    directory, out = saved(tokenizer, tmp_path / "model", **sizes), tmp_path / "run"
    (tmp_path / "half.py").write_text("def half(prompt, response):\n    return .5\n")
    flags = f"--reward hf:{directory} {tmp_path}/half.py:half --reward-weights 2 -1 --out {out}"
    flags += " --sft-steps 2 --steps 1 --objective rloo"
    assert train.main([*base(), *flags.split()]) == 0
    [record] = read(out / "metrics.jsonl")
    assert 0 < record["reward/model"] < 1
    assert record["reward_mean"] == pytest.approx(2 * record["reward/model"] - 0.5, rel=1e-4)
    change(directory / "model.safetensors")
    assert train.main(["--resume", str(out)]) == 2
    assert "the file of --reward: changed" in capsys.readouterr().err
