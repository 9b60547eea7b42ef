"""Runs whose policy transformers runs: they resume bitwise, and several ranks compute what one
does.
"""

import json
import signal

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from maxrl_fast import evaluate, train
from maxrl_fast.model.linear import LoraLinear
from maxrl_fast.model.policy import load_policy
from maxrl_fast.tasks.maze import MazeTask
from tests.distributed.test_torchrun import finished, torchrun
from tests.families import tiny_config, tiny_model
from tests.job.test_resume import assert_same, stop_at
from tests.test_train import read

pytestmark = pytest.mark.slow

TASK = MazeTask(5, 0)
JOB = [
    *"--task maze --maze-size 5 --prompts 4 --rollouts 4 --k 2 --steps 4 --sft-steps 20".split(),
    *"--lr 1e-3".split(),
    *(
        "--sft-batch 8 --sft-lr 5e-3 --eval-prompts 4 --eval-samples 2 --threads 1 --save-every 2"
    ).split(),
    *"--dtype float32 --kl-coef 0.1 --keep-checkpoints 0".split(),
]
RUNS = {
    "windows, soft caps and adapters": (
        "gemma2",
        "--lora-rank 2 --lora-targets q_proj,down_proj".split(),
    ),
    "experts": ("qwen3_moe", ["--checkpoint-activations"]),
}


CHAIN = [  # in which every group has some reward, so that no gradient is mere rounding
    *("--task chain --chain-length 8 --prompts 4 --rollouts 8 --k 2 --steps 3 --lr 1e-2").split(),
    *"--warmup-steps 1 --eval-prompts 4 --eval-samples 2 --threads 1 --dtype float32".split(),
]


def model(family, directory, vocab_size=TASK.vocab_size):
    """Save a tiny model of a task's vocabulary."""
    tokens = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0)
    tiny_model(tiny_config(family, vocab_size=vocab_size, **tokens)).save_pretrained(directory)
    return directory


def run(directory, out, *flags):
    return train.main([*JOB, "--model", str(directory), "--out", str(out), *flags])


@pytest.mark.parametrize("name", RUNS)
def test_a_stopped_run_resumes_bitwise(name, tmp_path, monkeypatch, capfd):
    family, flags = RUNS[name]
    start = model(family, tmp_path / "model")
    assert run(start, tmp_path / "whole", *flags) == 0
    printed = capfd.readouterr().out
    assert f"3-layer {family} decoder (transformers 5" in " ".join(printed.split())
    assert "log-probs equal those of the model's own forward pass" in " ".join(printed.split())
    assert "rollout engine: plain (transformers 5" in " ".join(printed.split())
    assert (
        "attention: C++ (torch flash where a layer has a sliding window, a soft cap or sinks)"
        in " ".join(printed.split())
    )
    assert (
        json.loads((tmp_path / "whole" / "config.json").read_text())["model_backend"]
        == "transformers"
    )
    metrics = read(tmp_path / "whole" / "metrics.jsonl")
    assert max(record["grad_norm"] for record in metrics) > 1e-5

    stop_at(monkeypatch, "step 3")
    assert run(start, tmp_path / "stopped", *flags) == 128 + signal.SIGTERM
    monkeypatch.undo()
    torch.rand(3)
    assert train.main(["--resume", str(tmp_path / "stopped")]) == 0
    assert_same(tmp_path / "whole", tmp_path / "stopped")

    latest = tmp_path / "whole" / "latest"
    _, found = AutoModelForCausalLM.from_pretrained(latest, output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    out = tmp_path / "evaluated"
    flags = f"--threads 1 --eval-prompts 4 --samples 2 --out {out}"
    assert evaluate.main([str(latest), *flags.split()]) == 0
    assert json.loads((out / "eval.json").read_text())["checkpoint"].endswith("step-000004")


def test_adapters_are_saved_as_peft_reads_them(tmp_path, capsys):
    """peft computes W + (alpha / r) B A, with A and B under these names."""
    start = model("gemma2", tmp_path / "model")
    flags = "--lora-rank 2 --lora-alpha 6 --lora-targets q_proj,down_proj"
    assert run(start, tmp_path / "run", *flags.split()) == 0
    latest = tmp_path / "run" / "latest"
    config = json.loads((latest / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 6.0)
    assert config["target_modules"] == ["down_proj", "q_proj"]
    assert config["base_model_name_or_path"] == str(start)
    assert run(latest / "adapter", tmp_path / "other") == 2
    assert "has them merged" in " ".join(capsys.readouterr().err.split())
    before, after = load_file(start / "model.safetensors"), load_file(latest / "model.safetensors")
    adapters = load_file(latest / "adapter" / "adapter_model.safetensors")
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) == 6 == len(adapters) / 2
    for name in changed:
        path = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = adapters[f"{path}.lora_A.weight"], adapters[f"{path}.lora_B.weight"]
        torch.testing.assert_close(after[name], before[name] + 3.0 * b @ a, rtol=1e-5, atol=1e-6)
    policy = load_policy(
        latest, task="maze", vocab_size=TASK.vocab_size, prompt_length=30, max_new_tokens=8
    )
    assert not any(isinstance(module, LoraLinear) for module in policy.modules())


def test_two_ranks_compute_what_one_does(tmp_path):
    job = [
        *CHAIN,
        *"--kl-coef 0.1 --model".split(),
        str(model("qwen3_moe", tmp_path / "model", vocab_size=8)),
    ]
    assert train.main([*job, "--out", str(tmp_path / "alone")]) == 0
    command = ["-m", "maxrl_fast.train", *job, "--out", str(tmp_path / "together")]
    command += ["--sharding", "full"]
    process = torchrun(2, *command)
    output = finished(process, 300)
    assert process.returncode == 0, output
    for one, two in zip(
        *(read(tmp_path / out / "metrics.jsonl") for out in ("alone", "together")), strict=True
    ):
        for key in ("reward_mean", "grad_norm", "entropy", "kl", "response_length_mean"):
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key
    ours, theirs = (
        load_file(tmp_path / out / "latest" / "model.safetensors") for out in ("alone", "together")
    )
    assert ours.keys() == theirs.keys()
    for key, weight in ours.items():
        torch.testing.assert_close(theirs[key], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model-backend", "transformers"], "--model-backend needs --model"),
        (
            "--model-backend native --model MODEL".split(),
            "model_type must be one of qwen2, qwen3, llama, got 'gemma2'",
        ),
        (
            "--model-backend transformers --model MODEL --compile".split(),
            "--compile is for the native decoder, got --model-backend transformers",
        ),
        (
            ["--model", "MODEL", "--compile"],
            "--compile is for the native decoder, got a policy of transformers",
        ),
        ("--model MODEL --lora-rank 2 --lora-targets gate".split(), "lora_targets must be among"),
    ],
)
def test_wrong_options_are_refused(flags, message, tmp_path, capfd):
    start = model("gemma2", tmp_path / "model")
    flags = [str(start) if flag == "MODEL" else flag for flag in flags]
    assert train.main([*JOB, "--out", str(tmp_path / "run"), *flags]) == 2
    assert message in " ".join(capfd.readouterr().err.split())
