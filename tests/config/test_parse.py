"""Flags, TOML, defaults; bad input is refused in one sentence."""

import re
from pathlib import Path

import pytest

from maxrl_fast.config import options
from maxrl_fast.config.checks import check
from maxrl_fast.config.options import Config
from maxrl_fast.config.parse import parse, parse_options
from maxrl_fast.config.resolve import resolve
from maxrl_fast.distributed.ranks import Ranks
from maxrl_fast.errors import InputError
from maxrl_fast.tasks.maze import MazeTask


def resolved(*flags):
    config = parse(flags)
    check(config)
    return resolve(config, MazeTask(9)).flat()


def test_defaults_are_resolved():
    options = resolved("--objective", "maxpo")
    assert (options["k"], options["max_new_tokens"], options["sft_steps"], options["aggregation"]) == (4, 32, 100, "token_mean")
    assert re.fullmatch(r"runs/maxpo-\d{8}-\d{6}", options["out"])
    assert options["device"] in ("cpu", "cuda")
    assert resolved("--device", "cpu")["dtype"] == "float32"  # on every CPU, whatever instructions it has
    assert resolved("--device", "cpu", "--dtype", "bfloat16")["dtype"] == "bfloat16"
    assert resolved("--objective", "maxrl")["order"] == 15
    assert resolved("--objective", "dr_grpo")["aggregation"] == "seq_sum_constant"
    assert resolved("--objective", "dr_grpo", "--aggregation", "token_mean")["aggregation"] == "token_mean"
    assert (options["loss"], options["beta"], options["score"]) == ("ppo", None, None)
    pacs = resolved("--objective", "pacs")
    assert (pacs["loss"], pacs["aggregation"], pacs["k"]) == ("reinforce", "seq_mean_token_sum", None)
    assert (options["importance_cap"], pacs["importance_cap"]) == (0.0, 0.0)
    assert resolved("--rollout", "vllm")["importance_cap"] == 2.0
    assert resolved("--rollout", "vllm", "--importance-cap", "5")["importance_cap"] == 5.0
    assert resolved("--rollout", "vllm", "--objective", "pacs")["importance_cap"] == 0.0
    assert resolved("--top-p", "0.9")["importance_cap"] == 2.0
    assert (pacs["beta"], pacs["score"], pacs["class_weight"]) == (1.0, "rloo", "balanced")
    assert pacs["ref_reset_interval"] is None
    assert resolved("--objective", "pacs_paper", "--beta", "0.1")["ref_reset_interval"] == 50
    assert resolved("--objective", "pacs_paper", "--ref-reset-interval", "0")["ref_reset_interval"] == 0
    assert resolved("--model", "x")["sft_steps"] == 0
    assert resolved("--model", "x", "--sft-steps", "3")["sft_steps"] == 3


def test_a_flag_overrides_the_file(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('objective = "maxrl"\norder = 3\nmaze_size = 11\nlr = 5e-4\ncompile = true\n')
    options = resolved("--config", str(file), "--maze-size", "13")
    assert (options["objective"], options["order"], options["maze_size"]) == ("maxrl", 3, 13)
    assert (options["lr"], options["compile"]) == (5e-4, True)
    assert resolved("--config", str(file), "--no-compile")["compile"] is False


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("maze_sise = 9", r"unknown key 'maze_sise'; did you mean 'maze_size'\?"),
        ("xyzzy = 9", "unknown key 'xyzzy'$"),
        ("lr = ", "readable TOML file"),
        ("lr = [1]", r"lr must be a number or a string, got \[1\]"),
        ("[task]\nmaze_size = 9", "task must be a number or a string"),
        ('config = "x"', "unknown key 'config'"),
        ("compile = 1", "compile must be true or false, got 1"),
    ],
)
def test_bad_files_are_refused(tmp_path, content, message):
    file = tmp_path / "run.toml"
    file.write_text(content)
    with pytest.raises(InputError, match=message):
        parse(["--config", str(file)])


@pytest.mark.parametrize("name", ["objective", "task"])
def test_a_number_as_a_name_in_a_file_is_refused(tmp_path, name):
    file = tmp_path / "run.toml"
    file.write_text(f"{name} = 0")
    with pytest.raises(InputError, match=f"{name} must be .*got '0'"):
        check(parse(["--config", str(file)]))


def test_a_missing_file_is_refused():
    with pytest.raises(InputError, match=r"readable TOML file, got nowhere\.toml"):
        parse(["--config", "nowhere.toml"])


@pytest.mark.parametrize("flags", [["--k", "x"], ["--maze-sise", "9"], ["--device", "tpu"], ["--lr"]])
def test_bad_flags_exit_with_2(flags, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(flags)
    assert stop.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_bad_values_in_a_file_exit_with_2(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text('lr = "fast"')
    with pytest.raises(SystemExit) as stop:
        parse(["--config", str(file)])
    assert stop.value.code == 2
    assert "fast" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--objective maxpoo", "objective must be one of maxpo, .*, maxrl, .*, got 'maxpoo'; did you mean 'maxpo'?"),
        ("--k 16", "maxpo needs 1 <= k <= N-1 = 15 for N = 16 rollouts, got 16"),
        ("--k 0", "maxpo needs 1 <= k <= N-1 = 15"),
        ("--rollouts 4", "maxpo needs 1 <= k <= N-1 = 3 for N = 4 rollouts, got 4"),
        ("--objective pkpo --k 1", "pkpo needs 2 <= k <= N = 16"),
        ("--objective maxrl --order 16", "maxrl needs 1 <= order <= N-1 = 15"),
        ("--objective rloo --rollouts 1", "rloo needs at least 2 rollouts per prompt, got 1"),
        ("--objective grpo --rollouts 1", "grpo needs at least 2 rollouts per prompt, got 1"),
        ("--rollouts 1", "maxpo needs at least 2 rollouts per prompt, got 1"),
        ("--objective grpo --k 4", "objective grpo takes no k"),
        ("--objective maxrl --k 4", "objective maxrl takes no k"),
        ("--objective grpo --eps -1", "eps must be at least 0, got -1"),
        ("--objective grpo --ddof 2", "ddof must be 0 or 1, got 2"),
        ("--objective grpo --tau 1", "objective grpo takes no tau"),
        ("--objective grpo --estimator-options eps=1", "--estimator-options is gone: .*--eps, --ddof, --tau, --quantile"),
        ("--chain-length 9", "task maze takes no chain_length"),
        ("--reward-workers 3", "task maze takes no reward_workers"),
        ("--task chain --maze-size 9", "task chain takes no maze_size"),
        ("--kl k2", "a run without --kl-coef takes no kl"),
        ("--lora-alpha 3", "a run without --lora-rank takes no lora_alpha"),
        ("--allow-changes", "a run without --resume takes no allow_changes"),
        ("--objective noisy_verifier_forward", "noisy_verifier_forward needs false_negative_rate"),
        ("--objective maxpo --beta 1", "maxpo takes no beta"),
        ("--objective grpo --score rloo", "grpo takes no score"),
        ("--objective pacs --k 4", "pacs takes no k"),
        ("--objective pacs --estimator-options eps=1", "--estimator-options is gone"),
        ("--objective pacs --ref-reset-interval 5", "pacs takes no ref_reset_interval"),
        ("--objective pacs --beta 0", "beta must be a finite number above 0, got 0"),
        ("--objective pacs_paper --ref-reset-interval -1", "ref_reset_interval must be at least 0, got -1"),
        ("--objective pacs --rollouts 1", "pacs needs at least 2 rollouts per prompt, but with --score naive, got 1"),
        ("--objective pacs --loss ppo", "loss must be reinforce for pacs, whose loss it is a part of, got ppo"),
        ("--objective pacs --aggregation token_mean", "aggregation must be seq_mean_token_sum for pacs"),
        ("--aggregation tokenmean", "aggregation must be one of .*did you mean 'token_mean'?"),
        ("--seed 9223372036854775808", r"seed must be in \[0, 2\^63\), got 9223372036854775808"),
        ("--prompts 0", "prompts must be at least 1, got 0"),
        ("--lr nan", "lr must be a finite number above 0, got nan"),
        ("--temperature 0", "temperature must be a finite number above 0, got 0"),
        ("--top-p 0", "top_p must be above 0 and at most 1, got 0"),
        ("--kv-cache-gb 0", "kv_cache_gb must be a finite number above 0, got 0"),
        ("--importance-cap -1", "importance_cap must be finite and at least 0, got -1"),
        ("--objective pacs --importance-cap 2", "pacs takes no importance_cap"),
        ("--beta2 1", "beta2 must be in"),
        ("--prompts 32 --updates-per-step 3", "multiple of updates_per_step, got 32 and 3"),
        ("--hidden-size 100 --heads 3", "hidden_size must be a multiple of heads, got 100 and 3"),
        ("--heads 8 --kv-heads 3", "heads must be a multiple of kv_heads, got 8 and 3"),
        ("--hidden-size 24 --heads 8", "hidden_size / heads must be even"),
    ],
)
def test_bad_options_are_named(flags, message):
    with pytest.raises(InputError, match=message):
        check(parse(flags.split()))


def test_vllm_engines_divide_the_processes():
    def sharing(number, size):
        flags = ["--rollout", "vllm", "--vllm-tensor-parallel", str(number)]
        return resolve(parse(flags), MazeTask(9), Ranks(0, size)).rollout.vllm_tensor_parallel

    assert sharing(1, 3) == 1
    assert sharing(2, 4) == 2
    for number, size in ((2, 1), (2, 3), (4, 2)):
        with pytest.raises(InputError, match=f"vllm_tensor_parallel must divide the number of processes, {size}, got {number}"):
            sharing(number, size)
    with pytest.raises(InputError, match="vllm_tensor_parallel must be at least 1, got 0"):
        check(parse(["--rollout", "vllm", "--vllm-tensor-parallel", "0"]))
    with pytest.raises(InputError, match="a run without --rollout vllm takes no vllm_tensor_parallel"):
        check(parse(["--vllm-tensor-parallel", "2"]))


def test_false_overrides_a_file(tmp_path):
    (tmp_path / "run.toml").write_text("compile = true\ncheckpoint_activations = true\n")
    config = parse_options({"config": tmp_path / "run.toml", "compile": False, "k": None})
    assert (config.run.compile, config.optimizer.checkpoint_activations, config.objective.k) == (False, True, None)


def test_a_file_overrides_a_switch_of_the_run_that_it_resumes(tmp_path):
    (tmp_path / "config.json").write_text('{"compile": true, "steps": 5}')
    (tmp_path / "run.toml").write_text("compile = false\n")
    assert not parse(["--resume", str(tmp_path), "--config", str(tmp_path / "run.toml")]).run.compile


def test_runs_of_one_second_have_folders_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("maxrl_fast.config.resolve.time.strftime", lambda form: "now")
    for name in ("maxpo-now", "maxpo-now-2", "maxpo-now-3"):
        out = resolved("--steps", "1")["out"]
        assert out == f"runs/{name}"
        Path(out).mkdir(parents=True)


def test_an_impossible_output_folder_is_refused():
    with pytest.raises(InputError, match="cannot read --out"):
        resolved("--out", "x" * 300)


def test_a_missing_gpu_is_reported(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(InputError, match="--device cuda needs a CUDA device, but this PyTorch finds none"):
        resolved("--device", "cuda")


def test_every_option_has_help_and_every_name_is_used_once():
    names = [name for group in vars(Config()).values() for name in vars(group)]
    assert len(names) == len(set(names))
    text = Path(options.__file__).read_text()
    for name in names:
        assert re.search(rf'\n    {name}: .*\n    """', text), f"{name} has no help"
