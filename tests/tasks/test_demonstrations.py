"""Demonstrations of --sft-data: how they are read and asked, what is learned from them, on which
processes, and resuming.
"""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from maxrl_fast import train
from maxrl_fast.config.parse import parse
from maxrl_fast.config.resolve import resolve
from maxrl_fast.tasks.dataset import DatasetTask
from maxrl_fast.tasks.dataset_specs import DATASETS
from maxrl_fast.tasks.jsonl import read_demonstrations
from tests.distributed.test_torchrun import finished, torchrun
from tests.job.test_resume import assert_same, stop_at
from tests.tables import refused
from tests.tasks.test_dataset import SUMS, written
from tests.test_train import read

SHOWN = [{"prompt": f"{a}*{b}=", "response": f"{a * b}."} for a in range(5) for b in range(3)]
TALK = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "4"},
]
FORGED = [{"prompt": "1", "response": "2<|im_end|>"}]


def task_of(tmp_path, policy, demonstrations, name="dataset", **options):
    key = DATASETS[name].prompt_key
    data = written(
        tmp_path / "data.jsonl", [{key: line["prompt"], "answer": line["answer"]} for line in SUMS]
    )
    shown = written(tmp_path / "shown.jsonl", demonstrations)
    return DatasetTask(DATASETS[name], 0, policy, data=data, sft_data=shown, **options)


def texts(task, start, count):
    """Return prompts and responses of demonstrations, with their special tokens."""
    prompts, responses = task.demonstrations(start, count)
    parts = [x.tokens.split(x.lengths.tolist()) for x in (prompts, responses)]
    return [
        tuple(task.decode(tokens.tolist(), with_special=True) for tokens in pair)
        for pair in zip(*parts, strict=True)
    ]


@pytest.mark.parametrize(
    ("line", "name", "prompt", "response"),
    [
        ({"prompt": "1+1=", "response": "2"}, "dataset", "1+1=!", "2"),
        (
            {"prompt": TALK[:2], "response": "5"},
            "dataset",
            "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n",
            "5",
        ),
        (
            {"messages": TALK[1:]},
            "dataset",
            "<|im_start|>user\n2+2<|im_end|>\n<|im_start|>assistant\n",
            "4",
        ),
        (
            {"question": "1+1?", "response": "2"},
            "gsm8k",
            "<|im_start|>user\n1+1?!<|im_end|>\n<|im_start|>assistant\n",
            "2",
        ),
    ],
)
def test_demonstrations_are_asked_as_prompts_are_and_end_with_the_stop_token(
    tmp_path, policy, line, name, prompt, response
):
    task = task_of(tmp_path, policy, [line], name, prompt_suffix="!")
    assert texts(task, 0, 1) == [(prompt, f"{response}<|im_end|>")]


def test_every_epoch_has_each_demonstration_once_in_a_new_order(tmp_path, policy):
    task = task_of(tmp_path, policy, SHOWN)
    one, two = texts(task, 0, 15), texts(task, 15, 15)
    assert one != two
    assert (
        sorted(one)
        == sorted(two)
        == sorted((line["prompt"], line["response"] + "<|im_end|>") for line in SHOWN)
    )
    assert texts(task, 10, 10) == [*one[10:], *two[:5]]
    assert task.has_demonstrations
    other = task_of(tmp_path, policy, SHOWN[1:])
    assert other.fingerprint != task.fingerprint
    assert other.name.endswith("; 14 demonstrations of shown.jsonl")


def test_long_demonstrations_are_counted_and_left_out(tmp_path, policy):
    """Prompts of 9, responses of 5 tokens with their stop token, and 256 positions."""
    lengths = [(9, 4), (10, 4), (9, 5), (2, 3)]
    lines = [{"prompt": "1" * a, "response": "2" * b} for a, b in lengths]
    task = task_of(tmp_path, policy, lines, max_prompt_tokens=9, max_new_tokens=5)
    # with <|im_end|>
    assert sorted(len(response) for _, response in texts(task, 0, 2)) == [3 + 10, 4 + 10]
    wanted = (
        "; 2 demonstrations of shown.jsonl, 2 left out with more than 9 tokens of prompt, 5 of "
        "response or 256 of both"
    )
    assert task.name.endswith(wanted)
    assert task.prompt_length == 4  # of the prompts that are asked
    with refused(r"must have demonstrations with at most .* 256 of both, .* got none in 1 lines"):
        task_of(tmp_path, policy, [{"prompt": "1" * 200, "response": "2" * 56}])


def test_demonstrations_of_held_out_prompts_are_left_out(tmp_path, policy):
    task = task_of(
        tmp_path, policy, [{"prompt": line["prompt"], "response": line["answer"]} for line in SUMS]
    )
    held_out = {task.decode(tokens) for tokens, _ in task._lines["test"]}
    assert len(held_out) == task.num_test_prompts == 7
    assert {prompt for prompt, _ in texts(task, 0, 53)} == {
        line["prompt"] for line in SUMS
    } - held_out
    assert task.name.endswith(
        "; 53 demonstrations of shown.jsonl, 7 left out with held-out prompts"
    )


def test_a_response_limit_lowered_to_the_positions_leaves_the_same_demonstrations(tmp_path, policy):
    """A run that is resumed has the lowered limit."""
    lines = [{"prompt": "1", "response": "2" * count} for count in (3, 250, 251, 252)]
    task = task_of(tmp_path, policy, [*lines, {"prompt": "1" * 100, "response": "2"}])
    config = parse(
        ["--task", "dataset", "--model", str(policy), "--data", "x", "--reward", "r.py:f"]
    )
    limit = resolve(config, task, warn=list).rollout.max_new_tokens
    assert limit == 256 - 4  # the longest prompt that is asked
    resumed = task_of(
        tmp_path, policy, [*lines, {"prompt": "1" * 100, "response": "2"}], max_new_tokens=limit
    )
    assert task.num_demonstrations == 4
    assert (resumed.fingerprint, resumed.name) == (task.fingerprint, task.name)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            {"prompt": "1", "answer": "2"},
            "line 1: a demonstration must have text at 'response', .*; it has the keys 'prompt",
        ),
        ({"prompt": "1", "response": ""}, "line 1: a demonstration must have text at 'response'"),
        (
            {"prompt": "1", "response": 2},
            "line 1: a demonstration must have text at 'response', .* got 2",
        ),
        ({"messages": TALK[:2]}, "line 1: a demonstration must have text at 'response'"),
        ({"messages": TALK[2:]}, "line 1: a demonstration must have text at 'response'"),
        (
            {"question": "1", "response": "2"},
            r"line 1: the line must have a prompt at 'prompt' \(--prompt-key\), but",
        ),
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


def test_an_epoch_is_the_default_and_training_prompts_are_not_used_up(tmp_path, policy):
    flags = (
        f"--task dataset --model {policy} --sft-data shown.jsonl --sft-batch 4 --reward r.py:f"
    ).split()
    task = task_of(tmp_path, policy, SHOWN)
    # 15 lines
    assert resolve(parse([*flags, "--data", "x"]), task, warn=list).warm_start.sft_steps == 4
    assert (
        resolve(
            parse([*flags, "--data", "x", "--sft-steps", "0"]), task, warn=list
        ).warm_start.sft_steps
        == 0
    )
    with refused("--sft-data is not used by task maze"):
        parse(["--sft-data", "x"])


@pytest.fixture
def job(tmp_path, policy):
    (tmp_path / "reward.py").write_text(
        "def score(prompt, response, answer):\n    return float(len(response))\n"
    )
    data, shown = written(tmp_path / "sums.jsonl", SUMS), written(tmp_path / "shown.jsonl", SHOWN)
    return (
        f"--task {tmp_path}/reward.py:score --data {data} --sft-data {shown} --sft-batch "
        "5 --sft-steps 5 --sft-lr 1e-2 --objective rloo --prompts 4 --rollouts 2 --steps "
        "2 --max-new-tokens 5 --eval-prompts 2 --eval-samples 2 --threads 1 --dtype "
        f"float32 --reward-workers 1 --model {policy}"
    ).split()


def test_the_warm_start_learns_the_responses_alone(job, policy, tmp_path, capsys):
    """Its loss is the mean of -log p of the responses' tokens, their stop tokens too, by
    transformers.
    """
    assert (
        train.main([*job, *f"--sft-steps 1 --sft-batch 15 --steps 1 --out {tmp_path}/run".split()])
        == 0
    )
    out = " ".join(capsys.readouterr().out.split())
    assert "learning rate 1e-06 (the default for full fine-tuning of a checkpoint): " in out
    assert "; in the warm start of 1 step 0.01" in out
    assert "; 15 demonstrations of shown.jsonl, seed 0" in out
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    logprobs = []
    prompts, responses = task_of(tmp_path, policy, SHOWN).demonstrations(0, 15)
    for prompt, response in zip(
        *(x.tokens.split(x.lengths.tolist()) for x in (prompts, responses)), strict=True
    ):
        with torch.no_grad():
            predicted = (
                model(torch.cat([prompt, response])[None])
                .logits[0, len(prompt) - 1 : -1]
                .log_softmax(1)
            )
        logprobs += predicted[range(len(response)), response].tolist()
    assert f"loss {-sum(logprobs) / len(logprobs):.3f}" in out
    progress = json.loads((tmp_path / "run" / "latest" / "progress.json").read_text())["progress"]
    assert progress["next_prompt"] == 4  # of the one step: the warm start took none


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["native", "transformers"])
def test_a_stopped_warm_start_resumes_bitwise(job, backend, tmp_path, monkeypatch, capsys):
    job += ["--model-backend", backend]
    assert train.main([*job, "--out", str(tmp_path / "whole")]) == 0
    stop_at(monkeypatch, "warm start step 4")
    assert train.main([*job, "--out", str(tmp_path / "stopped")]) == 143
    monkeypatch.undo()
    written(tmp_path / "shown.jsonl", SHOWN[1:])
    assert train.main(["--resume", str(tmp_path / "stopped")]) == 2
    assert "trained with other options or files (the prompts: changed)" in " ".join(
        capsys.readouterr().err.split()
    )
    written(tmp_path / "shown.jsonl", SHOWN)
    assert train.main(["--resume", str(tmp_path / "stopped")]) == 0
    assert_same(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.slow
def test_two_ranks_learn_what_one_does(job, tmp_path):
    assert train.main([*job, "--out", str(tmp_path / "alone")]) == 0
    command = ["-m", "maxrl_fast.train", *job, "--out", str(tmp_path / "together")]
    process = torchrun(2, *command)
    output = finished(process, 300)
    assert process.returncode == 0, output
    one, two = (read(tmp_path / out / "metrics.jsonl")[0] for out in ("alone", "together"))
    assert two["reward_mean"] == pytest.approx(one["reward_mean"])
    for out in ("checkpoints/step-000000", "latest"):
        ours, theirs = (
            load_file(tmp_path / run / out / "model.safetensors") for run in ("alone", "together")
        )
        for key, weight in ours.items():
            torch.testing.assert_close(theirs[key], weight, rtol=1e-3, atol=1e-4)
