"""--objective FILE.py:FUNCTION: the trainer uses a custom advantage, and checks the function before
training starts.
"""

import json
import re
from pathlib import Path

import pytest
import torch

from maxrl_fast import train
from maxrl_fast.config.checks import check, objective_of
from maxrl_fast.config.parse import parse, parse_options
from maxrl_fast.config.resolve import resolve
from maxrl_fast.records import Rollouts, Samples
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.training.learner import Learner
from tests.batches import collected, make_prompts
from tests.tables import refused
from tests.test_train import base, read

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_advantage.py"
FUNCTIONS = """
import torch

def maxpo(rewards, k):
    from maxrl_fast import ops
    return ops.maxpo_advantage(rewards, k)

def all_inputs(rewards, k, lengths, logprobs, valid, prompts):
    assert lengths.shape == logprobs.shape == valid.shape == rewards.shape
    assert len(prompts) == len(rewards)
    return rewards - rewards.mean(1, keepdim=True)

def fails(rewards):
    raise KeyError("no idea")

def raw(rewards):
    return rewards * 1.0
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return path


@pytest.mark.slow
def test_a_custom_objective_equals_the_estimator_that_it_calls(file, tmp_path):
    for name, objective in (("own", f"{file}:maxpo"), ("theirs", "maxpo")):
        assert (
            train.main(
                [*base(), "--objective", objective, "--k", "2", "--out", str(tmp_path / name)]
            )
            == 0
        )
    own, theirs = (
        (tmp_path / name / "latest" / "model.safetensors").read_bytes()
        for name in ("own", "theirs")
    )
    assert own == theirs
    options = json.loads((tmp_path / "own" / "config.json").read_text())
    assert (options["objective"], options["k"], options["loss"], options["aggregation"]) == (
        f"{file}:maxpo",
        2,
        "ppo",
        "token_mean",
    )
    assert train.main(["--resume", str(tmp_path / "own")]) == 0


@pytest.mark.slow
def test_a_custom_objective_gets_the_inputs_that_it_names(file, tmp_path, monkeypatch):
    seen, update = [], Learner.update

    def spy(self, samples, advantages, sequences, *, when, **options):
        seen.append((when, samples, advantages.clone()))
        return update(self, samples, advantages, sequences, when=when, **options)

    monkeypatch.setattr(Learner, "update", spy)
    flags = ["--objective", f"{file}:all_inputs", "--steps", "1", "--out", str(tmp_path / "run")]
    assert train.main([*base(), *flags]) == 0
    when, samples, advantages = seen[-1]
    assert when == "step 1"
    expected = samples.rewards - samples.rewards.mean(1, keepdim=True)
    assert torch.equal(advantages, expected.flatten())


def test_samples_without_a_reward_have_no_advantage(file):
    objective = objective_of(parse(["--objective", f"{file}:raw"]))
    rewards, valid = torch.ones(2, 3), torch.tensor([[True, True, False], [True, False, True]])
    samples = collected(
        Samples(make_prompts([[1], [2]]), Rollouts.given([[5, 6]] * 6)), rewards * valid, valid
    )
    objective.begin(samples, None)
    assert objective.advantages(samples.scored_indices).tolist() == [1, 1, 0, 1, 0, 1]


# what functions must return: tests/ops/test_register.py
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("fails", "fails fails on a small example: KeyError: 'no idea'"),
        ("nothing", "must be FILE.py:FUNCTION: .*mine.py has no nothing"),
    ],
)
def test_a_bad_function_is_refused_before_any_work(file, function, message):
    with refused(message):
        check(parse(["--objective", f"{file}:{function}"]))


def test_bad_options_of_a_custom_objective_are_refused(file, tmp_path):
    with refused(r"there is no file nowhere\.py"):
        check(parse(["--objective", "nowhere.py:f"]))
    with refused(r"--k is not used by objective .*raw"):
        check(parse(["--objective", f"{file}:raw", "--k", "3"]))
    with refused(
        r"dynamic_sampling leaves out groups whose rewards are equal, from which .*raw "
        r"learns",
    ):
        check(parse(["--objective", f"{file}:raw", "--dynamic-sampling", "2"]))


@pytest.mark.slow
def test_the_example_trains(tmp_path):
    flags = [
        "--objective",
        f"{EXAMPLE}:short_and_right",
        *"--steps 2 --out".split(),
        str(tmp_path / "run"),
    ]
    assert train.main([*base(), *flags]) == 0
    assert [record["step"] for record in read(tmp_path / "run" / "metrics.jsonl")] == [1, 2]


OWN_OPTIONS = """
from typing import Annotated, Literal

from maxrl_fast.algorithms.estimators import Group
from maxrl_fast.algorithms.options import Help, Positive

def sharp(
    g: Group,
    *,
    sharpness: Annotated[Positive, Help("Exponent of the centred rewards.")] = 2.0,
    side: Literal["both", "above"] = "both",
    temperature: float = 5.0,
):
    assert temperature == 5
    return g.centre(g.rewards) * sharpness * (2 if side == "above" else 1)
"""


def test_the_options_of_a_users_function_are_options_of_the_run(tmp_path, capsys):
    (tmp_path / "mine.py").write_text(OWN_OPTIONS)
    name = f"{tmp_path / 'mine.py'}:sharp"
    (tmp_path / "run.toml").write_text(f'objective = "{name}"\nsharpness = 3\n')
    config = parse(
        ["--config", str(tmp_path / "run.toml"), "--side", "above", "--temperature", "0.5"]
    )
    check(config)
    assert (config.objective.options, config.rollout.temperature) == (
        {"sharpness": 3.0, "side": "above"},
        0.5,
    )
    assert parse_options(
        {"objective": name, "sharpness": 3, "side": "above", "temperature": 0.5}
    ).flat() == {
        **config.flat(),
        "config": None,
    }
    resolved = resolve(parse(["--objective", name]), MazeTask(9))
    assert resolved.objective.options == {"sharpness": 2.0, "side": "both"}
    (tmp_path / "config.json").write_text(json.dumps(config.flat()))
    resumed = parse(["--resume", str(tmp_path), "--side", "both"])
    assert resumed.objective.options == {"sharpness": 3.0, "side": "both"}
    assert parse(["--resume", str(tmp_path), "--objective", "maxpo"]).objective.options == {}
    for flags, message in (
        (["--sharpness", "0"], "sharpness of sharp must be a finite number above 0, got 0"),
        (["--sharpness", "x"], "--sharpness must be a number, got 'x'"),
        (["--side", "up"], "--side must be one of both, above, got 'up'"),
        (["--sharpnes", "1"], r"unknown option --sharpnes; did you mean --sharpness\?"),
    ):
        with refused(message):
            check(parse(["--objective", name, *flags]))
    with pytest.raises(SystemExit):
        parse(["--objective", name, "--help"])
    assert re.search(
        r"--sharpness FLOAT\s+Exponent of the centred rewards\. \(default: 2\.0\)",
        capsys.readouterr().out,
    )
