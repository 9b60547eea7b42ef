import json
import re
import time

import pytest

from maxrl_fast import train
from maxrl_fast.algorithms.options import options_of
from maxrl_fast.config.changes import FREE, ROUNDING, changes
from maxrl_fast.config.options import SHAPE, Config
from maxrl_fast.config.read import ELSEWHERE, hint, parse, parse_options
from maxrl_fast.config.resolve import evaluation_schedule, resolve
from maxrl_fast.config.rules import SECTIONS, owners_by_option, unused_options
from maxrl_fast.evaluate import parse_evaluation
from maxrl_fast.job.build import build_loss_settings
from maxrl_fast.job.run_files import free_folder
from maxrl_fast.model.checkpoint import hf_config
from maxrl_fast.tasks.maze import MazeTask
from tests.models import TINY
from tests.tables import refused


def resolved(*flags):
    config = parse(flags)
    return resolve(config, MazeTask(9)).flat()


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("", (50, 106)),  # 3 x 106 x 16 of 200 x 512 samples
        ("--steps 59", (0, 0)),  # 31 prompts
        ("--steps 60", (15, 32)),
        ("--steps 4000 --eval-prompts 40", (1000, 40)),
        ("--eval-every 7", (7, 256)),
        ("--eval-every 0", (0, 256)),
    ],
)
def test_evaluations_between_the_ends_cost_a_twentieth_of_the_samples(flags, wanted):
    task = MazeTask(9)
    assert evaluation_schedule(resolve(parse(flags.split()), task), task) == wanted


def test_defaults_are_resolved():
    options = resolved("--objective", "maxpo")
    known = {"k": 4, "max_new_tokens": 32, "sft_steps": 100, "aggregation": "token_mean"}
    known |= {"loss": "ppo", "correction": "none", "lr": 3e-4, "sft_lr": 2e-3, "eval_prompts": 256}
    assert known.items() <= options.items()
    assert {"beta", "score", "importance_cap"}.isdisjoint(options)
    name = re.compile(r"runs/maxpo-\d{8}-\d{6}")
    assert name.fullmatch(str(free_folder(None, "runs", options["objective"])))
    assert options["device"] in ("cpu", "cuda")
    # on every CPU, whatever instructions it has
    assert resolved("--device", "cpu")["dtype"] == "float32"
    assert resolved("--device", "cpu", "--dtype", "bfloat16")["dtype"] == "bfloat16"


def test_the_options_of_a_loss_reach_the_learner():
    assert resolved("--loss", "luspo")["aggregation"] == "seq_mean_token_sum"
    config = parse("--loss vespo --k-negative 2.5 --lambda-negative 1".split())
    assert build_loss_settings(resolve(config, MazeTask(9))).loss_options == {
        **{"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 2.5, "lambda_negative": 1.0},
    }
    clipped = resolve(parse("--clip-low .1 --clip-high .3".split()), MazeTask(9))
    own = build_loss_settings(clipped)
    assert (own.clip_low, own.clip_high) == (0.1, 0.3)
    # as from the config.json of a run; a name that another part has is after the loss's
    assert parse_options(config.flat()).parts == config.parts
    assert parse_options({"loss": "dppo", "dppo_kl": 0}).parts["loss"]["kl"] == 0.0


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint with 512 positions, without weights."""
    (tmp_path / "config.json").write_text(json.dumps(hf_config(TINY)))
    return str(tmp_path)


def test_the_tasks_response_limit_is_lowered_to_the_positions_with_a_warning(checkpoint):
    task, said = MazeTask(9), []  # prompts of 94 tokens

    def limit(*flags, most=1000):
        task.max_new_tokens = most
        return resolve(
            parse(["--task", "maze", "--model", checkpoint, *flags]), task, warn=said.append
        ).sampling.max_new_tokens

    assert (limit(most=418), said) == (418, [])
    assert limit(most=419) == 418
    [sentence] = said
    assert sentence.startswith(
        f"responses end after 418 tokens instead of the task's 419: {checkpoint} has 512 positions"
    )
    assert limit("--max-new-tokens", "418") == 418
    with refused("--max-new-tokens must be at most 418, got 419"):
        limit("--max-new-tokens", "419")
    task.prompt_length = 512
    with refused(r"at most 0, got .* up to 512 tokens \(a lower --max-prompt-tokens"):
        limit()


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("seed = 1\nlr = nan", "{}, line 2: lr must be a finite number above 0, got nan"),
        ("k = 16", "got 16; --rollouts sets N (k: {}, line 1)"),
        (
            "objective = 'grpo'\nk = 4",
            "{}, line 2: k is not used by objective grpo, but by maxpo, "
            "expected_improvement, ei_l1o, pkpo, ...",
        ),
    ],
)
def test_a_value_of_a_file_that_is_refused_has_its_line_unless_a_flag_gives_it(
    tmp_path, capsys, content, place
):
    file = tmp_path / "run.toml"
    file.write_text(content)
    assert train.main(["--config", str(file)]) == 2
    assert capsys.readouterr().err.endswith(place.format(file) + "\n")
    assert train.main(f"--config {file} --lr inf --objective maxpo --k 99 --heads 5".split()) == 2
    assert str(file) not in capsys.readouterr().err


def test_a_file_of_many_unknown_keys_is_refused_at_once(tmp_path, capsys):
    file = tmp_path / "many.toml"
    file.write_text("".join(f"k{i} = 1\n" for i in range(20_000)))
    start = time.monotonic()
    assert train.main(["--config", str(file)]) == 2
    assert time.monotonic() - start < 10
    assert capsys.readouterr().err.endswith("many.toml, line 1: unknown option k0\n")


def test_an_evaluation_takes_the_task_of_its_run_unless_another_is_given(tmp_path):
    options = {"objective": "maxrl", "task": "gsm8k", "data": "/d", "max_new_tokens": 7, "seed": 3}
    (tmp_path / "config.json").write_text(json.dumps(options))
    (tmp_path / "latest").mkdir()

    def taken(*flags):
        config, _ = parse_evaluation([str(tmp_path), *flags])
        limit, seed = config.sampling.max_new_tokens, config.sampling.seed
        return str(config.flat().get("data")), limit, seed, config.place.task_seed

    assert taken() == ("/d", 7, 3, 3)
    assert taken("--data", "/e", "--seed", "4") == ("/e", 7, 4, 3)
    assert taken("--task", "gsm8k", "--test-data", "/e") == ("/d", 7, 3, 3)
    assert taken("--task", "math") == ("None", None, 3, 3)
    with refused("--data is not used by task maze"):
        taken("--task", "maze", "--data", "/e")


def test_a_folder_is_new_or_has_what_a_kill_leaves(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda form: "now")
    for name in ("grpo-now", "grpo-now-1"):
        out = free_folder(None, str(tmp_path), "grpo")
        assert out.name == name
        out.mkdir()
    for name in ("lock", ".eval.json.partial"):
        (out / name).touch()
        assert free_folder(out, "evaluations", "") == out
    (out / "notes").touch()
    with refused("--out must be a new or empty folder, got .*, which holds something else"):
        free_folder(out, "evaluations", "")


def test_vllm_engines_divide_the_processes():
    def sharing(number, size):
        flags = ["--rollout", "vllm", "--vllm-tensor-parallel", str(number)]
        return resolve(parse(flags), MazeTask(9), size).tensor_parallel

    assert (sharing(1, 3), sharing(2, 4)) == (1, 2)
    for number, size in ((2, 1), (2, 3), (4, 2)):
        with refused(f"must divide the number of processes, {size}, got {number}"):
            sharing(number, size)


def test_every_option_has_help_and_every_name_is_used_once():
    groups = [options_of(group) for group in Config.groups().values()]
    names = [name for own in (*groups, *map(owners_by_option, SECTIONS)) for name in own]
    assert {name for name in names if names.count(name) > 1} == set()
    assert {name for own in groups for name, option in own.items() if not option.help} == set()


BELOW = float.fromhex("0x1.fffffffffffffp-1")  # the largest number below 1


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("prompts", (1, 2**31 - 1), (0, 2**31)),
        ("steps", (0, 2**31 - 1), (-1, 2**31)),
        ("seed", (0, 2**63 - 1), (-1, 2**63)),
        ("lr", (1e-300, None), (0, float("nan"), float("inf"))),
        ("kl_coef", (0, 1e300), (-1e-9, float("inf"))),
        ("reward_threshold", (-1, None), (float("inf"), float("nan"))),
        ("max_reward_error_rate", (0, 1), (-1e-9, 1.001)),
        ("top_p", (1e-9, 1), (0, 1.001)),
        ("kv_cache_gb", (1e-9, None), (0,)),
        ("beta2", (0, BELOW), (-1e-9, 1)),
    ],
)
def test_limits_on_both_sides(name, right, wrong):
    for value in right:
        assert Config.options()[name].convert(value, name) == value
    for value in wrong:
        with refused(f"{name} must be .*, got {value}"):
            Config.options()[name].convert(value, name)


def test_a_condition_that_refuses_says_what_the_option_needs():
    def said(name, *flags, **options):
        return unused_options({**parse(flags).values, **options}).get(name)

    vllm = "--rollout", "vllm"
    assert said("vllm_tensor_parallel", *vllm, vllm_url="x") == "cannot be used with --vllm-url"
    assert said("vllm_tensor_parallel", *vllm) is None
    assert (said("kl"), said("kl", kl_coef=0.1)) == ("needs --kl-coef", None)
    assert said("divergence", kl="full") == "needs --kl full"
    assert said("hidden_size", model="x") == ""


def test_what_a_resumed_run_may_change():
    before = {"lr": 1e-3, "steps": 90, "threads": 2, "save_every": 50, "layers": 4, "out": "a"}
    assert changes(before, dict.fromkeys(before, 77)) == [
        "lr: 0.001 before, 77 now",
        "steps: 90 before, 77 now",
        "layers: 4 before, 77 now",
    ]
    assert ROUNDING < FREE
    assert {"lr", "eval_prompts", "seed"}.isdisjoint(FREE)
    assert "layers" in SHAPE
    assert Config.options().keys() >= SHAPE | (FREE - {"vllm_url", "vllm_tensor_parallel"})


def test_a_misspelled_option_is_found_by_its_spelling():
    assert hint("maze_sise", {"maze_size"}) == "; did you mean --maze-size?"
    assert hint("xyzzy", Config.options()) == ""
    assert hint("use_vllm", Config.options()) == "; did you mean --rollout vllm?"
    assert ELSEWHERE["num_generations"] == "rollouts"
