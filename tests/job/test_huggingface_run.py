import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

from maxrl_fast import evaluate, train
from maxrl_fast.model.linear import LoraLinear
from maxrl_fast.model.policy import load_huggingface, load_policy
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.training.learner import Learner
from tests.runs import (
    ADAPTERS,
    LORA,
    RANKS,
    assert_same,
    killed_where,
    read,
    stop_and_resume,
    tiny_policy,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def lora(shared_run):
    return shared_run("lora")


@pytest.fixture(scope="module")
def start(lora):
    return str(lora.with_name("gemma2"))


def test_a_stopped_run_resumes_bitwise(lora, start, tmp_path, monkeypatch):
    job = [*LORA, *ADAPTERS, "--model", start]
    stop_and_resume(monkeypatch, tmp_path / "stopped", job, "step 3")
    assert_same(lora, tmp_path / "stopped")
    options = json.loads((lora / "config.json").read_text())
    assert options["model_backend"] == "transformers"
    assert max(record["grad_norm"] for record in read(lora / "metrics.jsonl")) > 1e-5


def test_a_checkpoint_is_one_of_transformers_and_is_evaluated(lora, tmp_path):
    _, found = AutoModelForCausalLM.from_pretrained(lora / "latest", output_loading_info=True)
    assert not any(found[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    flags = f"--threads 1 --eval-prompts 4 --samples 2 --out {tmp_path / 'evaluated'}"
    assert evaluate.main([str(lora / "latest"), *flags.split()]) == 0
    results = json.loads((tmp_path / "evaluated" / "eval.json").read_text())
    assert results["checkpoint"].endswith("step-000004")


def test_a_run_of_a_model_that_reads_images_too_keeps_the_rest_of_it(tmp_path):
    """Qwen3.5, with layers of the gated delta rule; killed in an update, it resumes bitwise."""
    start = tiny_policy("qwen3_5", tmp_path / "start", MazeTask(5).vocab_size)
    (tmp_path / "start" / "preprocessor_config.json").write_text('{"size": 28}')
    job, out = [*LORA, "--model", start, "--out"], tmp_path / "run"
    assert train.main([*job, str(tmp_path / "whole")]) == 0
    killed_where(Learner, "optim_step", lambda *_, when, **__: when == "step 4", [*job, str(out)])
    assert (out / "latest").resolve().name == "step-000002"
    assert train.main(["--resume", str(out)]) == 0
    assert_same(tmp_path / "whole", out)
    latest = tmp_path / "run" / "latest"
    assert json.loads((latest / "preprocessor_config.json").read_text()) == {"size": 28}
    before, after = (load_file(f"{path}/model.safetensors") for path in (start, latest))
    assert before.keys() == after.keys()
    for name in before:
        is_text = name.startswith(("model.language_model.", "lm_head."))
        assert torch.equal(before[name], after[name]) != is_text, name
    whole = AutoModelForMultimodalLM.from_pretrained(latest, attn_implementation="eager")
    own = load_huggingface(latest, 64)
    tokens = torch.arange(9)
    with torch.no_grad():
        assert torch.equal(whole(input_ids=tokens[None]).logits[0], own.own_logits(tokens)[0])


def test_adapters_are_saved_as_peft_reads_them(lora, start, tmp_path, capsys):
    """peft computes W + (alpha / r) B A, with A and B under these names."""
    latest = lora / "latest"
    config = json.loads((latest / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 6.0)
    assert config["target_modules"] == ["down_proj", "q_proj"]
    assert config["base_model_name_or_path"] == start
    flags = ["--model", str(latest / "adapter"), "--out", str(tmp_path / "other")]
    assert train.main([*LORA, *flags]) == 2
    assert "has them merged" in " ".join(capsys.readouterr().err.split())
    before, after = (load_file(f"{path}/model.safetensors") for path in (start, latest))
    adapters = load_file(latest / "adapter" / "adapter_model.safetensors")
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(changed) == 6 == len(adapters) / 2
    for name in changed:
        path = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = adapters[f"{path}.lora_A.weight"], adapters[f"{path}.lora_B.weight"]
        torch.testing.assert_close(after[name], before[name] + 3.0 * b @ a, rtol=1e-5, atol=1e-6)
    sizes = {"vocab_size": MazeTask(5).vocab_size, "prompt_length": 30, "max_new_tokens": 8}
    policy = load_policy(latest, task="maze", **sizes)
    assert not any(isinstance(module, LoraLinear) for module in policy.modules())


def test_two_ranks_compute_what_one_does(shared_run, tmp_path):
    together, alone = shared_run("ranks"), tmp_path / "alone"
    model = str(together.with_name("qwen3_moe"))
    assert train.main([*RANKS, "--model", model, "--out", str(alone)]) == 0
    for one, two in zip(*(read(x / "metrics.jsonl") for x in (alone, together)), strict=True):
        for key in ("reward_mean", "grad_norm", "entropy", "kl", "response_length_mean"):
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key
    ours, theirs = (load_file(x / "latest" / "model.safetensors") for x in (alone, together))
    assert ours.keys() == theirs.keys()
    for key, weight in ours.items():
        torch.testing.assert_close(theirs[key], weight, rtol=1e-3, atol=1e-4)
