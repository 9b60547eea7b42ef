"""Command lines, with a digest of what they change of the default job's options, or the first words
of the sentence that refuses them, as recorded in command_lines.toml."""

import json
import os
import sys
import zlib
from pathlib import Path

import pytest

from maxrl_fast.config.read import parse, parse_options, read_toml
from maxrl_fast.config.resolve import resolve
from maxrl_fast.config.rules import options_of_part
from maxrl_fast.errors import InputError
from maxrl_fast.evaluate import parse_evaluation
from maxrl_fast.model.checkpoint import hf_config
from maxrl_fast.tasks.maze import MazeTask
from tests.models import TINY

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
RECORD = tomllib.loads((Path(__file__).parent / "command_lines.toml").read_text())
LINES = {key: dict(x.split(" | ") for x in RECORD[key].strip().splitlines()) for key in RECORD}
# of a machine or a moment
UNRECORDED = ("out", "device", "dtype", "threads", "config", "resume", "place", "task_seed")
CODE = """
from maxrl_fast.algorithms.estimators import Group

class Sort:
    def __init__(self, seed, model, *, length: int = 6): ...
class Engine:
    def __init__(self, model, dtype, *, speed: float = 1.0): ...
def bonus(g: Group, *, strength: float = 1.0): return strength * g.rewards
def flat(t, *, slope: float = 1.0): return -slope * t.advantages * t.logprobs
def reward(prompt, response): return 1.0
"""
RUN = {"objective": "maxrl", "order": 3, "steps": 90, "seed": 5, "maze_size": 11, "lr": 0.5}
RUN |= {"max_new_tokens": 40, "loss": "ppo", "clip_low": 0.1, "aggregation": "token_mean"}
FILES = {
    "custom.py": CODE,
    "policy/config.json": json.dumps(hf_config(TINY)),
    "run/config.json": json.dumps(RUN),
    "run/checkpoints/step-000000/config.json": "{}",
    "run/latest/config.json": "{}",
    "early/config.json": json.dumps(RUN),
    "tis/config.json": json.dumps(RUN | {"correction": "tis", "importance_cap": 3.0}),
    "old/config.json": '{"steps": 5, "estimator_options": "eps=1"}',
    "half/config.json": "{}",
    "half/progress.json": "{}",
    "run.toml": 'objective = "maxrl"\norder = 3\nmaze_size = 11\nlr = 5e-4\n'
    "checkpoint_activations = true\n",
    "bad_key.toml": "maze_sise = 9",
    "bad_table.toml": "seed = 1\n\n[task]\nmaze_size = 9",
    "bad_value.toml": "seed = 1\nlr = 'fast'",
    "bad_config.toml": "seed = 1\nresume = 'run'",
    "long.toml": f"steps = {'9' * 4300}",
    "some.yaml": "lr: 1",
}


def values_of(line: str) -> dict[str, object]:
    """The options that a command line resolves to; of a hub's model only those that are parsed."""
    words = line.replace("RECIPES", str(ROOT / "examples")).split()
    if words[0] == "evaluate":
        config, _ = parse_evaluation(words[1:])
        return config.flat()
    config = parse(words)
    # Python and config.json give the options as their values
    options = {x: y for x, y in config.flat().items() if x not in ("resume", "allow_changes")}
    again = parse_options(options).flat()
    once, twice = config.flat() | again, again | config.flat()
    assert json.dumps(once, sort_keys=True) == json.dumps(twice, sort_keys=True)
    if str(config.model.model).startswith("hf://") or not Path(config.model.model or ".").exists():
        return config.flat()
    return resolve(config, MazeTask(9), warn=lambda said: None).flat()


def difference(line: str) -> str:
    """What a command line changes of the default job's values besides what it says itself."""
    values, words = values_of(line), line.replace("=", " ").split()
    said = {word[2:].replace("-", "_"): x for word, x in zip(words, [*words[1:], ""], strict=True)}
    if "config" in said:
        file = read_toml(Path(said["config"].replace("RECIPES", str(ROOT / "examples"))))
        said = {name: str(x.value) for name, x in file.items()} | said
    default = values_of("evaluate policy --task maze" if words[0] == "evaluate" else "--steps 200")
    changed = [
        f"{name}={json.dumps(x).replace(os.getcwd() + '/', '').replace(' ', '')}"
        for name, x in sorted(values.items())
        if x != default.get(name) and name not in UNRECORDED and str(x) != said.get(name)
    ]
    of_maze = options_of_part("task", "maze")
    gone = [f"-{x}" for x in sorted(default.keys() - values.keys() - {*UNRECORDED, *of_maze})]
    return " ".join([*changed, *gone])


def refusal(line: str) -> str:
    with pytest.raises(InputError) as caught:
        values_of(line)
    return str(caught.value).replace(os.getcwd() + "/", "").replace(str(ROOT) + "/", "")


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)


def test_right_command_lines_resolve_to_their_recorded_values():
    for line, recorded in LINES["right"].items():
        changed = difference(line)
        digest = f"{zlib.crc32(changed.encode()) & 0xFFFF:04x}"
        assert digest == recorded, (line, changed)


def test_wrong_command_lines_are_refused_with_their_recorded_sentence():
    for line, sentence in LINES["wrong"].items():
        assert refusal(line).startswith(sentence), line
