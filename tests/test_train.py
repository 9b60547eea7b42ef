import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from maxrl_fast import train
from maxrl_fast.config.changes import PASS_RATES
from maxrl_fast.config.read import parse
from maxrl_fast.config.resolve import resolve
from maxrl_fast.job.build import RunContext
from maxrl_fast.model.checkpoint import load_checkpoint
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.training.learner import LearningRate
from tests.models import save_checkpoint, tiny_decoder
from tests.runs import SMALL, TIMINGS, base, copied, read
from tests.tables import table


def run(out, *flags):
    return train.main([*SMALL, "--out", str(out), *flags])


def test_a_run_writes_its_files(maze_run):
    config = json.loads((maze_run / "config.json").read_text())
    weight = json.loads((maze_run / "weight.json").read_text())
    assert weight["values"] == pytest.approx([1 - p for p in PASS_RATES])  # of maxpo with k = 2
    known = {"objective": "maxpo", "k": 2, "seed": 4, "max_new_tokens": 17}
    assert known.items() <= config.items()
    assert config["versions"]["torch"] == torch.__version__
    assert config["task_options"] == ["maze_size"]
    assert None not in config.values()
    metrics = read(maze_run / "metrics.jsonl")
    steps = [1, 2, 3, 4, 5, 6]
    assert [record["step"] for record in metrics] == steps
    schedule = LearningRate(*map(config.get, ("lr", "steps", "warmup_steps", "lr_schedule")))
    assert [record["lr"] for record in metrics] == [schedule.at(step) for step in steps]
    wanted = "reward_mean pass_at_1 ratio_clamped frac_prompts_solved entropy grad_norm".split()
    for record in metrics:
        assert {*wanted, "response_length_mean", *TIMINGS} <= record.keys()
        # 0 where a step has no gradient
        assert (record["tokens_shared"] > 0) == (record["grad_norm"] > 0)
        assert record["tokens_shared"] < 1
        assert record["entropy"] > 0.1
        assert record["ratio"] == pytest.approx(1.0, abs=1e-4)
    evaluations = read(maze_run / "eval.jsonl")
    assert [record["step"] for record in evaluations] == [0, 2, 4, 6]
    assert list(evaluations[0]["pass_at_k"]) == ["1", "2", "4"]
    assert (maze_run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (maze_run / "checkpoints").iterdir()) == [
        f"step-00000{i}" for i in (0, 2, 4, 6)
    ]
    assert (maze_run / "latest").resolve() == maze_run / "checkpoints" / "step-000006"


def test_the_warm_start_has_its_own_beta2():
    task = MazeTask(5)
    for flags, beta2 in (("--beta2 .5", 0.5), ("--beta2 .5 --sft-beta2 .4", 0.4)):
        config = resolve(parse([*SMALL, *flags.split()]), task)
        learner = RunContext.begin(config, task, Ranks()).warm_start.learner
        assert learner.optimizer.param_groups[0]["betas"][1] == beta2


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "grpo --kl-coef 0.1 --entropy-coef 0.01 --correction tis_sequence --top-p 0.9",
        "dr_grpo --loss vespo --updates-per-step 2 --dtype bfloat16 --temperature 0.8",
        "pkpo --k 2 --token-budget 50 --loss luspo --lr-schedule cosine --correction mis",
    ],
)
def test_other_options_train(tmp_path, flags):
    flags = [*base(), "--out", str(tmp_path / "run"), "--objective", *flags.split()]
    flags += "--sft-steps 150 --sft-batch 16 --sft-lr 1e-2 --max-new-tokens 17".split()
    assert train.main(flags) == 0
    assert max(record["reward_mean"] for record in read(tmp_path / "run" / "metrics.jsonl")) > 0
    folders = (tmp_path / "run" / "checkpoints" / f"step-00000{i}" for i in (0, 3))
    before, after = (load_checkpoint(folder).model.norm.weight for folder in folders)
    assert not torch.equal(before, after)


@pytest.mark.slow
def test_a_checkpoint_of_another_family_is_trained(tmp_path):
    model = tiny_decoder(model_type="llama", tie_word_embeddings=False, dtype="bfloat16")
    task, start, out = MazeTask(5), tmp_path / "start", tmp_path / "run"
    save_checkpoint(start, model.config, model.weights(), task.tokenizer_files(), task.stop_ids)
    flags = "--task maze --checkpoint-activations --sft-steps 5 --model".split()
    assert run(out, *flags, str(start)) == 0
    theirs = AutoModelForCausalLM.from_pretrained(out / "latest")
    assert (theirs.config.model_type, theirs.dtype) == ("llama", torch.float32)
    assert not torch.equal(theirs.model.norm.weight.float(), model.model.norm.weight)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    table("""
    --hidden-size 800000000 | hidden_size must be an integer from 1 to
    --kv-cache-gb 1e-6 | kv_cache_gb must hold the longest prompt and a response
    --maze-size 31 --task maze --model {policy} | positions
    """),
)
def test_bad_input_exits_with_2_before_any_work(maze_run, tmp_path, capsys, flags, sentence):
    assert run(tmp_path / "run", *flags.format(policy=maze_run / "latest").split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert sentence in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_response_limit_beyond_the_positions_is_refused_on_resuming(maze_run, tmp_path, capsys):
    changed = "--max-new-tokens 4000 --allow-changes".split()
    assert train.main(["--resume", str(copied(maze_run, tmp_path)), *changed]) == 2
    assert "responses of 4000 tokens need" in " ".join(capsys.readouterr().err.split())


def test_a_dry_run_prints_its_options_and_writes_nothing(tmp_path, capsys):
    assert run(tmp_path / "run", "--dry-run") == 0
    text = capsys.readouterr().out
    asked = "objective = maxpo|k = 2|max_new_tokens = 18|Adam moments|KV cache|total"
    asked += "|writes up to 2 checkpoints"
    assert all(words in text for words in asked.split("|"))
    assert not (tmp_path / "run").exists()
