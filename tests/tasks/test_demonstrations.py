import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from maxrl_fast import train
from maxrl_fast.tasks.dataset import DatasetTask
from maxrl_fast.tasks.dataset_specs import DATASETS
from maxrl_fast.tasks.sources import read_demonstrations
from tests.tables import refused
from tests.tasks.test_dataset import SUMS, texts_of, written

SHOWN = [{"prompt": f"{a}*{b}=", "response": f"{a * b}."} for a in range(5) for b in range(3)]
TALK = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "4"},
]
SYSTEM, USER = "<|im_start|>system\nAdd.<|im_end|>\n", "<|im_start|>user\n"
BEGIN = "<|im_end|>\n<|im_start|>assistant\n"
FORGED = [{"prompt": "1", "response": "2<|im_end|>"}]


def task_of(tmp_path, policy, demonstrations, name="dataset", **options):
    key = DATASETS[name].prompt_key
    lines = [{key: line["prompt"], "answer": line["answer"]} for line in SUMS]
    data = written(tmp_path / "data.jsonl", lines)
    shown = written(tmp_path / "shown.jsonl", demonstrations)
    options |= {"data": (data,), "sft_data": shown, "needs_reward": False}
    return DatasetTask(name, 0, policy, **options)


def texts(task, start, count):
    shown = task.demonstrations(start, count)
    return [*zip(*(texts_of(task, x, with_special=True) for x in shown), strict=True)]


@pytest.mark.parametrize(
    ("line", "name", "prompt", "response"),
    [
        ({"prompt": "1+1=", "response": "2"}, "dataset", "1+1=!", "2"),
        ({"prompt": TALK[:2], "response": "5"}, "dataset", SYSTEM + USER + "2+2" + BEGIN, "5"),
        ({"messages": TALK[1:]}, "dataset", USER + "2+2" + BEGIN, "4"),
        ({"question": "1?", "response": "2"}, "gsm8k", USER + "1?!" + BEGIN, "2"),
    ],
)
def test_demonstrations_are_asked_as_prompts_are_and_end_with_the_stop_token(
    tmp_path, policy, line, name, prompt, response
):
    task = task_of(tmp_path, policy, [line], name, prompt_suffix="!")
    assert texts(task, 0, 1) == [(prompt, f"{response}<|im_end|>")]


def test_demonstrations_are_part_of_the_fingerprint(tmp_path, policy):
    task, other = task_of(tmp_path, policy, SHOWN), task_of(tmp_path, policy, SHOWN[1:])
    wanted = sorted((line["prompt"], line["response"] + "<|im_end|>") for line in SHOWN)
    assert sorted(texts(task, 15, 15)) == wanted
    assert task.has_demonstrations
    assert other.fingerprint != task.fingerprint
    assert "14 demonstrations of shown.jsonl" in other.describe()


def test_long_demonstrations_are_counted_and_left_out(tmp_path, policy):
    """Prompts of 9, responses of 5 tokens with their stop token, and 256 positions."""
    lengths = [(9, 4), (10, 4), (9, 5), (2, 3)]
    lines = [{"prompt": "1" * a, "response": "2" * b} for a, b in lengths]
    task = task_of(tmp_path, policy, lines, max_prompt_tokens=9, max_new_tokens=5)
    # with <|im_end|>
    assert sorted(len(response) for _, response in texts(task, 0, 2)) == [3 + 10, 4 + 10]
    (told,) = (x for x in task.describe() if "demonstrations" in x)
    wanted = "of 4: those with at most 9 tokens of prompt, 5 of response and 256 of both"
    assert told.startswith(f"2 demonstrations of shown.jsonl {wanted}")
    assert task.prompt_length == 4  # of the prompts that are asked
    with refused("must have demonstrations with at most .* 256 of both, .* got none in 1 lines"):
        task_of(tmp_path, policy, [{"prompt": "1" * 200, "response": "2" * 56}])


def test_demonstrations_of_held_out_prompts_are_left_out(tmp_path, policy):
    shown = [{"prompt": line["prompt"], "response": line["answer"]} for line in SUMS]
    task = task_of(tmp_path, policy, shown)
    held_out = {task.decode(tokens) for tokens, _ in task._lines["test"]}
    assert len(held_out) == task.num_test_prompts == 7
    prompts = {prompt for prompt, _ in texts(task, 0, 53)}
    assert prompts == {line["prompt"] for line in SUMS} - held_out
    assert any(x.startswith("53 demonstrations of shown.jsonl of 60") for x in task.describe())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"prompt": "1", "answer": "2"}, "at 'response', .*; it has the keys 'prompt"),
        ({"messages": TALK[:2]}, "line 1: a demonstration must have text at 'response'"),
    ],
)
def test_lines_without_a_prompt_or_a_response_are_refused(tmp_path, line, message):
    with refused(message):
        read_demonstrations(written(tmp_path / "shown.jsonl", [line]), "prompt")


def test_special_tokens_in_responses_are_refused_unless_allowed(tmp_path, policy):
    with refused(r"shown.jsonl, line 1: a response must not have the special token '<\|im_end\|>'"):
        task_of(tmp_path, policy, FORGED)
    task = task_of(tmp_path, policy, FORGED, allow_special_tokens=True)
    assert texts(task, 0, 1) == [("1", "2<|im_end|>")]  # not two stop tokens


@pytest.fixture
def job(tmp_path, policy):
    (tmp_path / "reward.py").write_text(
        "def score(prompt, response, answer):\n    return float(len(response))\n"
    )
    data, shown = written(tmp_path / "sums.jsonl", SUMS), written(tmp_path / "shown.jsonl", SHOWN)
    return (
        f"--task {tmp_path}/reward.py:score --data {data} --sft-data {shown} --sft-batch 15 "
        "--sft-steps 1 --sft-lr 1e-2 --objective rloo --prompts 4 --rollouts 2 --steps 1 "
        "--max-new-tokens 5 --eval-prompts 2 --eval-samples 2 --threads 1 --dtype float32 "
        f"--reward-workers 1 --model {policy} --out {tmp_path}/run"
    ).split()


def test_the_warm_start_learns_the_responses_alone(job, policy, tmp_path, capsys):
    """Its loss is the mean of -log p of the responses' tokens, their stop tokens too."""
    assert train.main(job) == 0
    out = capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    logprobs = []
    shown = task_of(tmp_path, policy, SHOWN).demonstrations(0, 15)
    for prompt, response in zip(*(x.tokens.split(x.lengths.tolist()) for x in shown), strict=True):
        with torch.no_grad():
            logits = model(torch.cat([prompt, response])[None]).logits[0, len(prompt) - 1 : -1]
        logprobs += logits.log_softmax(1)[range(len(response)), response].tolist()
    assert f"loss {-sum(logprobs) / len(logprobs):.3f}" in out
    progress = json.loads((tmp_path / "run" / "latest" / "progress.json").read_text())["progress"]
    assert progress["next_prompt"] == 4  # of the one step: the warm start took none
