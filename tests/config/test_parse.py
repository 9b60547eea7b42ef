import json
import re
import time

import pytest

from maxrl_fast import train
from maxrl_fast.algorithms.options import options_of
from maxrl_fast.config.options import Config
from maxrl_fast.config.read import parse, parse_evaluation, parse_options
from maxrl_fast.config.resolve import evaluation_schedule, resolve, tensor_parallel
from maxrl_fast.config.rules import SECTIONS, loss_options, owners_by_option
from maxrl_fast.job.build import build_loss_settings
from maxrl_fast.model.checkpoint import hf_config
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks.maze import MazeTask
from tests.models import TINY
from tests.tables import refused, table


def resolved(*flags):
    config = parse(flags)
    return resolve(config, MazeTask(9)).flat()


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("", (50, 106)),  # 3 x 106 x 16 of 200 x 512 samples
        ("--steps 59", (0, 0)),  # 31 prompts
        ("--steps 60", (15, 32)),
        ("--steps 4000", (1000, 256)),
        ("--eval-prompts 40", (50, 40)),
        ("--eval-every 7", (7, 256)),
        ("--eval-every 0", (0, 256)),
    ],
)
def test_evaluations_between_the_ends_cost_a_twentieth_of_the_samples(flags, wanted):
    task = MazeTask(9)
    schedule = evaluation_schedule(resolve(parse(flags.split()), task), task)
    assert (schedule.every, schedule.num_prompts) == wanted


def test_defaults_are_resolved():
    options = resolved("--objective", "maxpo")
    known = {"k": 4, "max_new_tokens": 32, "sft_steps": 100, "aggregation": "token_mean"}
    known |= {"loss": "ppo", "correction": "none", "lr": 3e-4, "sft_lr": 2e-3, "eval_prompts": 256}
    assert known.items() <= options.items()
    assert {"beta", "score", "importance_cap"}.isdisjoint(options)
    assert re.fullmatch(r"runs/maxpo-\d{8}-\d{6}", options["out"])
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
    # as from the config.json of a run; a name that another part has is after the loss's
    assert parse_options(config.flat()).parts == config.parts
    assert loss_options(parse_options({"loss": "dppo", "dppo_kl": 0}))["kl"] == 0.0


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
        ("seed = 1\nlr = nan", "lr must be a finite number above 0, got nan (lr: {}, line 2)"),
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


@pytest.mark.parametrize(
    ("flags", "message"),
    table("""
    --config many.toml | many.toml, line 1: unknown option k0
    --config long.toml | steps must be from 0 to 2^31 - 1, got 99
    --config some.yaml | some.yaml: Expected '=' after a key
    """),
)
def test_hostile_options_are_refused_at_once(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "many.toml").write_text("".join(f"k{i} = 1\n" for i in range(20_000)))
    (tmp_path / "long.toml").write_text(f"steps = {'9' * 4300}\n")
    (tmp_path / "some.yaml").write_text("lr: 1\n")
    start = time.monotonic()
    assert train.main([*flags.split(), "--dry-run"]) == 2
    assert time.monotonic() - start < 10
    error = capsys.readouterr().err
    assert " ".join(message.split()) in " ".join(error.split())
    assert len(error) < 300, error


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


def test_vllm_engines_divide_the_processes():
    def sharing(number, size):
        flags = ["--rollout", "vllm", "--vllm-tensor-parallel", str(number)]
        return tensor_parallel(resolve(parse(flags), MazeTask(9), Ranks(0, size)))

    assert (sharing(1, 3), sharing(2, 4)) == (1, 2)
    for number, size in ((2, 1), (2, 3), (4, 2)):
        with refused(f"must divide the number of processes, {size}, got {number}"):
            sharing(number, size)


def test_every_option_has_help_and_every_name_is_used_once():
    groups = [options_of(group) for group in Config.groups().values()]
    names = [name for own in (*groups, *map(owners_by_option, SECTIONS)) for name in own]
    assert {name for name in names if names.count(name) > 1} == set()
    assert {name for own in groups for name, option in own.items() if not option.help} == set()
