import json
import os
import re
import sys

import pytest
import torch

from maxrl_fast import evaluate, train
from maxrl_fast.config.read import parse
from maxrl_fast.errors import InputError
from maxrl_fast.job.build_parts import build_engine, build_task
from maxrl_fast.runtime.loading import load_code
from maxrl_fast.tasks.maze import MazeTask
from tests.models import tiny_decoder
from tests.runs import ROOT, base, read
from tests.tables import table

SORT, NAIVE = ROOT / "examples" / "sort_task.py", ROOT / "examples" / "naive_engine.py"
ARGS = ("--length", "3")
SIZES = [*base()[2:], "--objective", "maxrl"]  # without --maze-size
OWN = """

def centred(rewards):
    return rewards - rewards.mean(1, keepdim=True)


def soft(t, *, tau: float = 1.0):
    return -t.advantages * (4 / tau) * torch.sigmoid(tau * (t.ratio - 1))
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    written(tmp_path / "sorting_plugin.py", SORT.read_text() + OWN)
    written(tmp_path / "naive_plugin.py", NAIVE.read_text())
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    load_code.cache_clear()
    for module in ("sorting_plugin", "naive_plugin"):
        sys.modules.pop(module, None)


def written(path, text):
    path.write_text(text)
    return path


def refused(capsys, *flags):
    assert train.main([*SIZES, "--dry-run", *flags]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def test_a_class_is_a_task_and_a_function_a_reward_that_is_not_run_to_find_out(tmp_path):
    text = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Mine: pass\n"
    file = written(tmp_path / "mine.py", text + "def score(prompt, response): return 1.0\n")
    parse(["--task", f"{file}:score", "--data", "d.jsonl"])
    with pytest.raises(InputError, match="unknown option --length"):
        parse(["--task", f"{file}:score", "--length", "3"])
    assert not (tmp_path / "ran").exists()
    with pytest.raises(InputError, match=r"--data is not used by task .*mine\.py:Mine, but by"):
        parse(["--task", f"{file}:Mine", "--data", "d.jsonl"])


def own_task(tmp_path, body):
    text = f"from examples.sort_task import SortTask\nclass Own(SortTask):\n    {body}\n"
    return ["--task", f"{written(tmp_path / 'own.py', text)}:Own"]


@pytest.mark.parametrize(
    ("body", "message"),
    table(r"""
    prompts = None | --task .*own\.py:Own must have the method prompts\(split, start, count\), which
        it does not
    def prompts(self, split, start): ... | --task .*own\.py:Own must have the method
        prompts\(split, start, count\), got prompts\(split, start\)
    def __init__(self): self.x = {}['key'] | KeyError: 'key' \(own\.py, line 3\)
    """),
)
def test_a_class_that_is_no_task_is_refused_with_what_it_lacks(body, message, tmp_path, capsys):
    assert re.match(f"error: {message}", refused(capsys, *own_task(tmp_path, body)))


def test_methods_that_are_only_inherited_from_the_protocol_are_missing(tmp_path, capsys):
    text = "from maxrl_fast.tasks import Task\nclass Own(Task):\n    name = 'own'\n"
    said = refused(capsys, "--task", f"{written(tmp_path / 'own.py', text)}:Own")
    assert "must have the method prompts(split, start, count), which it does not" in said


def test_a_task_gets_its_arguments_the_seed_and_the_model(tmp_path):
    body = "def __init__(self, model=None, **more):\n        super().__init__(**more)\n"
    body += "        self.seen = model, more"
    file = own_task(tmp_path, body)[1]
    assert build_task(file, {}, seed=5).seen == (None, {})
    task = build_task(file, {"length": 4}, seed=5, model=tmp_path)
    assert (task.seen, task.name) == ((tmp_path, {"length": 4}), "sort 4 digits")
    assert build_task(f"{SORT}:SortTask", {}, seed=5).seed == 5


def engine_of(name, *flags):
    config = parse(["--rollout", name, "--max-new-tokens", "8", *flags])
    return build_engine(config, tiny_decoder(), MazeTask(5), torch.float32, 4)


def test_a_class_that_is_no_engine_is_refused(tmp_path):
    base = "from examples.naive_engine import NaiveEngine\nclass Own(NaiveEngine):\n    "
    file = written(tmp_path / "own.py", base + "def generate(self, prompts, num_samples): ...\n")
    wanted = r"must have the method generate\(request\), got generate\(prompts, num_samples\)"
    with pytest.raises(InputError, match=wanted):
        engine_of(f"{file}:Own")
    with pytest.raises(
        InputError, match=r"NaiveEngine must take .* unexpected keyword argument .cache_bytes"
    ):
        engine_of(f"{NAIVE}:NaiveEngine", "--kv-cache-gb", "1")


@pytest.mark.slow
def test_modules_train_as_their_files_do_and_resume(site, tmp_path, capsys):
    modules = "sorting_plugin", "sorting_plugin", "naive_plugin"
    files = SORT, site / "sorting_plugin.py", NAIVE
    for name, (task, objective, engine) in (("modules", modules), ("files", files)):
        flags = f"--task {task}:SortTask --objective {objective}:centred --sft-steps 120"
        flags += f" --loss {objective}:soft --soft-tau .8"  # an objective has tau
        flags += f" --rollout {engine}:NaiveEngine --out {tmp_path / name}"
        assert train.main([*SIZES, *ARGS, *flags.split()]) == 0
    weights = (tmp_path / x / "latest" / "model.safetensors" for x in ("modules", "files"))
    assert len({path.read_bytes() for path in weights}) == 1
    assert read(tmp_path / "files" / "metrics.jsonl")[-1]["reward_mean"] > 0
    assert json.loads((tmp_path / "files" / "config.json").read_text())["correction"] == "tis"
    flags = f"--eval-prompts 6 --samples 4 --rollout {NAIVE}:NaiveEngine".split()
    flags += ["--out", str(tmp_path / "evaluated")]
    assert evaluate.main([str(tmp_path / "files"), *flags]) == 0
    result = json.loads((tmp_path / "evaluated" / "eval.json").read_text())
    assert result["options"]["length"] == 3
    resume = ["--resume", str(tmp_path / "modules")]
    more = "--steps 4 --lr-schedule constant --allow-changes".split()
    assert train.main([*resume, *more]) == 0
    for name in ("sorting_plugin.py", "naive_plugin.py"):
        (site / name).write_text((site / name).read_text() + "\n")
    capsys.readouterr()
    assert train.main([*resume, "--length", "4"]) == 2
    said = capsys.readouterr().err
    assert "length: " in said
    for name in ("task", "objective", "loss", "rollout"):
        assert f"the file of --{name}: changed" in said


@pytest.mark.slow
def test_a_function_that_a_task_names_scores_in_worker_processes(tmp_path):
    text = f"""
import os
from examples.sort_task import SortTask

def score(prompt, response):
    return float(os.getpid() != {os.getpid()})

class Own(SortTask):
    reward = f"{{__file__}}:score"
"""
    task = f"--task {written(tmp_path / 'own.py', text)}:Own"
    flags = f"{task} --steps 1 --sft-steps 0 --out {tmp_path / 'run'}"
    assert train.main([*SIZES, *flags.split()]) == 0
    assert read(tmp_path / "run" / "metrics.jsonl")[0]["reward_mean"] == 1.0
