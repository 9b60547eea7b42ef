"""The command line of the trainer: files, repeatability, exit codes, Ctrl-C."""

import io
import json

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from maxrl_fast import ops, train
from maxrl_fast.config.names import PASS_RATES
from maxrl_fast.job.screen import Screen
from maxrl_fast.model.checkpoint import load_checkpoint
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.optimizer import LearningRate
from maxrl_fast.training.passes import Passes
from tests.models import save_checkpoint, tiny_decoder
from tests.tables import table

SMALL = [
    *"--maze-size 5 --prompts 4 --rollouts 4 --k 2 --steps 3".split(),
    *"--sft-steps 40 --sft-batch 8 --sft-lr 5e-3 --eval-prompts 6 --eval-samples 4".split(),
    *"--hidden-size 32 --intermediate-size 48 --layers 2 --heads 4 --kv-heads 2".split(),
    *"--threads 1 --dtype float32".split(),
]
TIMINGS = {"rollout_seconds", "train_seconds", "tokens_per_second"}


def run(out, *flags):
    return train.main([*SMALL, "--out", str(out), *flags])


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_timings(path):
    return [
        {key: value for key, value in record.items() if key not in TIMINGS} for record in read(path)
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "first"
    assert run(out, *"--save-every 2 --eval-every 2".split()) == 0
    return out


def test_a_run_writes_its_files(finished):
    config = json.loads((finished / "config.json").read_text())
    weight = json.loads((finished / "weight.json").read_text())
    assert weight["values"] == pytest.approx([1 - p for p in PASS_RATES])  # of maxpo with k = 2
    known = {"objective": "maxpo", "k": 2, "seed": 0, "max_new_tokens": 8}
    assert known.items() <= config.items()
    assert config["versions"]["torch"] == torch.__version__
    assert None not in config.values()
    metrics = read(finished / "metrics.jsonl")
    assert [record["step"] for record in metrics] == [1, 2, 3]
    schedule = LearningRate(*map(config.get, ("lr", "steps", "warmup_steps", "lr_schedule")))
    assert [record["lr"] for record in metrics] == [schedule.at(step) for step in (1, 2, 3)]
    wanted = "reward_mean pass_at_1 ratio_clamped frac_prompts_solved entropy grad_norm".split()
    for record in metrics:
        assert {*wanted, "response_length_mean", *TIMINGS} <= record.keys()
        # 0 where a step has no gradient
        assert (record["tokens_shared"] > 0) == (record["grad_norm"] > 0)
        assert record["tokens_shared"] < 1
        assert record["entropy"] > 0.1
        assert record["ratio"] == pytest.approx(1.0, abs=1e-4)
    evaluations = read(finished / "eval.jsonl")
    assert [record["step"] for record in evaluations] == [0, 2, 3]
    assert list(evaluations[0]["pass_at_k"]) == ["1", "2", "4"]
    assert (finished / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert not (finished / "tensorboard").exists()  # an extra
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == [
        f"step-00000{i}" for i in (0, 2, 3)
    ]
    assert (finished / "latest").resolve() == finished / "checkpoints" / "step-000003"


def test_transformers_loads_the_checkpoint(finished):
    theirs = AutoModelForCausalLM.from_pretrained(finished / "latest")
    ours = load_checkpoint(finished / "latest").state_dict()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, ours[name]), name
    start = load_checkpoint(finished / "checkpoints" / "step-000000").state_dict()
    assert (ours["model.norm.weight"] - start["model.norm.weight"]).abs().max() > 1e-6


@pytest.mark.slow
def test_the_warm_start_has_its_own_beta2(tmp_path):
    flags = {"as-beta2": ("--beta2", "0.5"), "as-sft-beta2": ("--sft-beta2", "0.5"), "default": ()}
    weights = {}
    for name, given in flags.items():
        assert run(tmp_path / name, *"--sft-steps 3 --steps 0".split(), *given) == 0
        start = tmp_path / name / "checkpoints" / "step-000000"
        weights[name] = load_checkpoint(start).model.embed_tokens.weight
    assert torch.equal(weights["as-beta2"], weights["as-sft-beta2"])
    assert not torch.equal(weights["as-sft-beta2"], weights["default"])


@pytest.mark.slow
def test_two_threads_repeat_bitwise(tmp_path):
    flags = "--threads 2 --prompts 32 --rollouts 16 --maze-size 9 --steps 2".split()
    for name in ("one", "two"):
        assert run(tmp_path / name, *flags) == 0
    assert_same_run(tmp_path / "one", tmp_path / "two")


def assert_same_run(one, two):
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert without_timings(one / name) == without_timings(two / name)
    weights = [path / "latest" / "model.safetensors" for path in (one, two)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_terminal_shows_progress(tmp_path, monkeypatch):
    output = io.StringIO()
    monkeypatch.setattr(
        train, "Screen", lambda **_: Screen(Console(file=output, force_terminal=True, width=160))
    )
    assert run(tmp_path / "run", "--eval-every", "1") == 0
    for words in ("warm start", "evaluate", "train", "3/3", "left", "reward", "held-out prompts"):
        assert words in output.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--objective maxrl --loss vespo --updates-per-step 2",
        "--objective grpo --kl-coef 0.1 --entropy-coef 0.01 --correction tis_sequence --top-p 0.9",
        "--objective dr_grpo --updates-per-step 2 --dtype bfloat16",
        "--objective rloo --loss gspo --correction icepop --updates-per-step 2",
        "--objective reinforce --loss reinforce --temperature 0.8 --lr-schedule cosine",
        "--objective pkpo --k 2 --token-budget 50 --loss luspo",
        "--objective maxpo_off_policy --k 2 --updates-per-step 2",
        "--objective pacs --score grpo --updates-per-step 2",
        "--objective opo --loss gmpo --updates-per-step 2",
        "--objective grpo --loss sapo --loss-options tau_positive=0.8 tau_negative=1.2 "
        "--updates-per-step 2",
        "--objective rl_zvp --correction mis",
        "--objective rloo --correction sequence_mask --correction-options delta=0.001 "
        "--updates-per-step 2",
    ],
)
def test_every_objective_and_loss_changes_the_policy(tmp_path, flags):
    assert train.main([*base(), "--out", str(tmp_path / "run"), *flags.split()]) == 0
    assert max(record["reward_mean"] for record in read(tmp_path / "run" / "metrics.jsonl")) > 0
    assert all(
        ("pacs_accuracy" in record) == ("pacs" in flags)
        for record in read(tmp_path / "run" / "metrics.jsonl")
    )
    before, after = (
        load_checkpoint(tmp_path / "run" / "checkpoints" / f"step-00000{i}") for i in (0, 3)
    )
    assert not torch.equal(before.model.norm.weight, after.model.norm.weight)


@pytest.mark.slow
def test_a_run_resumes_with_another_correction(tmp_path):
    """Options of the run's correction that the other does not take are left out; a config.json of
    before has no correction.
    """
    assert run(tmp_path / "run", *"--correction tis --importance-cap 3".split()) == 0
    more = ("--resume", str(tmp_path / "run"), "--allow-changes", "--steps")
    flags = (*"--correction icepop --correction-options low=0.4".split(),)
    assert train.main([*more, "4", *flags]) == 0
    assert train.main([*more, "5", "--correction", "none"]) == 0
    file = tmp_path / "run" / "config.json"
    config = json.loads(file.read_text())
    assert (config["correction"], config.get("importance_cap")) == ("none", None)
    old = {name: value for name, value in config.items() if not name.startswith("correction")}
    for steps, cap, correction in (("6", 2.0, "tis"), ("7", 0.0, "none")):
        file.write_text(json.dumps(old | {"importance_cap": cap}))
        assert train.main([*more, steps]) == 0
        assert json.loads(file.read_text())["correction"] == correction
    counts = ["importance_weight" in record for record in read(tmp_path / "run" / "metrics.jsonl")]
    assert counts == [True, True, True, True, False, True, False]


@pytest.mark.slow
def test_training_a_checkpoint_of_another_family(tmp_path):
    model = tiny_decoder(model_type="llama", tie_word_embeddings=False, dtype="bfloat16")
    task, start = MazeTask(5), tmp_path / "start"
    save_checkpoint(start, model.config, model.weights(), task.tokenizer_files(), task.stop_ids)
    flags = *"--task maze --checkpoint-activations --sft-steps 5 --model".split(), str(start)
    assert run(tmp_path / "run", *flags) == 0
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "latest")
    assert (theirs.config.model_type, theirs.dtype) == ("llama", torch.float32)
    assert not torch.equal(theirs.model.norm.weight.float(), model.model.norm.weight)


def test_compile_compiles_the_layers(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(Decoder, "compile_layers", lambda self: calls.append(self))
    assert run(tmp_path / "run", *"--compile --steps 0 --sft-steps 1".split()) == 0
    assert len(calls) == 1


@pytest.mark.slow
def test_lora_changes_only_its_target_weights(finished, tmp_path, capsys):
    flags = "--lora-rank 2 --lora-targets q_proj,down_proj --lr 0.01 --task maze --model".split()
    flags.append(str(finished / "latest"))
    assert run(tmp_path / "run", *flags) == 0
    assert "576 of them trained (LoRA)" in capsys.readouterr().out.replace("\n", " ")
    before, after = (
        load_checkpoint(path / "latest").state_dict() for path in (finished, tmp_path / "run")
    )
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert changed == {
        f"model.layers.{i}.{name}.weight"
        for i in range(2)
        for name in ("self_attn.q_proj", "mlp.down_proj")
    }
    assert run(tmp_path / "bad", *"--lora-rank 2 --lora-targets qkv".split()) == 2
    assert "lora_targets must be among" in capsys.readouterr().err


def base():
    """Return SMALL without --k, which only some objectives take."""
    at = SMALL.index("--k")
    return [*SMALL[:at], *SMALL[at + 2 :]]


@pytest.mark.slow
def test_training_from_a_checkpoint(finished, tmp_path):
    flags = (*"--task maze --sft-steps 0 --model".split(), str(finished / "latest"))
    assert run(tmp_path / "more", *flags) == 0
    first = load_checkpoint(tmp_path / "more" / "checkpoints" / "step-000000").state_dict()
    assert torch.equal(
        first["model.norm.weight"],
        load_checkpoint(finished / "latest").state_dict()["model.norm.weight"],
    )
    assert (
        read(tmp_path / "more" / "eval.jsonl")[0]["pass_at_k"]
        == read(finished / "eval.jsonl")[-1]["pass_at_k"]
    )


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--objective maxpo --k 3", lambda r, _: ops.maxpo_advantage(r, 3)),
        (
            "--objective grpo --eps 0.5 --ddof 0",
            lambda r, _: ops.grpo_advantage(r, eps=0.5, ddof=0),
        ),
        ("--objective dr_grpo", lambda r, _: r - r.mean(1, keepdim=True)),
        (
            "--objective opo",
            lambda r, s: ops.group_advantage(r, "opo", lengths=s.lengths.view(4, 4)),
        ),
        ("--objective remax", lambda r, _: r - torch.tensor([[1.0], [0], [0], [1]])),
        (
            "--objective reinforce --max-new-tokens 8 --overlong-buffer 4",
            lambda r, s: ops.group_advantage(
                r - (s.lengths.view(4, 4) - 4).clamp_min(0) / 4, "reinforce"
            ),
        ),
    ],
)
def test_the_learner_gets_the_objectives_advantages(tmp_path, monkeypatch, flags, expected):
    rewards, seen = (
        torch.tensor([[0.0, 1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 1.0], [0, 0, 0, 0], [1, 0, 1, 0]]),
        [],
    )
    update = Learner.update

    def spy(self, samples, advantages, sequences, *, when, **options):
        seen.append((when, advantages.clone(), samples.rollouts, self.settings.aggregation))
        return update(self, samples, advantages, sequences, when=when, **options)

    monkeypatch.setattr(Learner, "update", spy)

    def score(self, prompts, rollouts):
        is_greedy = len(rollouts.lengths) == len(prompts)
        return torch.tensor([1.0, 0, 0, 1]) if is_greedy else rewards[: len(prompts)].flatten()

    monkeypatch.setattr(MazeTask, "score", score)
    more = "--steps 1 --sft-steps 0 --eval-prompts 4 --out".split()
    assert train.main([*base(), *flags.split(), *more, str(tmp_path / "run")]) == 0
    when, advantages, rollouts, aggregation = seen[-1]
    assert when == "step 1"
    torch.testing.assert_close(advantages, expected(rewards, rollouts).flatten())
    own = {"grpo": "seq_mean_token_mean", "dr_grpo": "seq_sum_constant"}
    assert aggregation == own.get(flags.split()[1], "token_mean")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    table("""
    --objective maxpoo | did you mean 'maxpo'?
    --k 4 | maxpo needs 1 <= k <= N-1 = 3 for N = 4 rollouts, got 4
    --maze-size 8 | odd number from 5 to 31, got 8
    --maze-size 3 | odd number from 5 to 31, got 3
    --rollouts 1 | maxpo needs at least 2 rollouts per prompt, got 1
    --hidden-size 800000000 | GB of weights, this machine
    --layers 1000000000 | GB of weights, this machine
    --hidden-size 8000000000000000000 | got
    --kv-cache-gb 1e-6 | kv_cache_gb must hold the longest prompt and a response
    --model /nowhere | --model requires --task: gsm8k,
    --task maze --model /nowhere | --model must be the folder of a checkpoint, got /nowhere, which
        is not there
    """),
)
def test_bad_input_exits_with_2_before_any_work(tmp_path, capsys, flags, sentence):
    assert run(tmp_path / "run", *flags.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert sentence in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_the_folder_of_another_run_is_refused_and_unchanged(finished, capsys):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    assert run(finished) == 2
    assert "holds another run" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def test_a_checkpoint_that_does_not_fit_the_task_is_refused(finished, tmp_path, capsys):
    flags = "--maze-size 31 --task maze --model".split()
    assert run(tmp_path / "run", *flags, str(finished / "latest")) == 2
    assert "positions" in capsys.readouterr().err


def test_a_response_limit_beyond_the_positions_is_refused_on_resuming(finished, capsys):
    assert (
        train.main(["--resume", str(finished), "--max-new-tokens", "4000", "--allow-changes"]) == 2
    )
    assert "responses of 4000 tokens need" in " ".join(capsys.readouterr().err.split())


def test_a_dry_run_prints_its_options_and_writes_nothing(tmp_path, capsys):
    assert run(tmp_path / "run", "--dry-run") == 0
    text = capsys.readouterr().out
    asked = "objective = maxpo|k = 2|max_new_tokens = 8|Adam moments|key/value cache|GFLOP"
    assert all(words in text for words in asked.split("|"))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_non_finite_values_stop_the_run_with_the_last_good_checkpoint(
    tmp_path, capsys, monkeypatch
):
    update = Learner.update

    def poisoned(self, samples, advantages, sequences, *, when, **options):
        if when == "step 2":
            advantages = advantages + 1.0
            advantages[5] = float("nan")  # a rollout of the second prompt
        return update(self, samples, advantages, sequences, when=when, **options)

    monkeypatch.setattr(Learner, "update", poisoned)
    assert run(tmp_path / "run", "--save-every", "1") == 1
    error = capsys.readouterr().err
    # after 320 of the warm start and 4 of step 1
    assert "step 2: an advantage is not finite for prompt 325" in error
    assert "checkpoints/step-000001" in error
    assert len(read(tmp_path / "run" / "metrics.jsonl")) == 1
    load_checkpoint(tmp_path / "run" / "latest")


def test_out_of_gpu_memory_is_reported_with_advice(tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(Passes, "logprobs", full)
    assert run(tmp_path / "run", "--importance-cap", "2") == 1
    error = capsys.readouterr().err
    assert error.startswith("error: CUDA out of memory; a lower --token-budget")
    assert error.endswith("--resume resumes from the last checkpoint\n")
