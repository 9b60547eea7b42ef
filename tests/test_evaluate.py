"""The command line `python -m maxrl_fast.evaluate`: what it computes, writes, compares and
refuses."""

import json
import re
from itertools import combinations

import pytest
import torch

from maxrl_fast import evaluate
from maxrl_fast.evaluation.coverage import bootstrap, pass_at_k
from maxrl_fast.evaluation.evaluator import Evaluator
from maxrl_fast.report.page import read_folder
from maxrl_fast.tasks.maze import MazeTask
from tests import brute_force
from tests.models import save_checkpoint, tiny_decoder
from tests.runs import read as read_lines
from tests.tables import table
from tests.tool_episodes import save_tool_policy

RUNTIME = (*"--threads 1 --dtype float32".split(),)
MAZE7 = ("--task", "maze", "--maze-size", "7")
SMALL = (*RUNTIME, *"--eval-prompts 12 --samples 4 --bootstrap 40".split())


@pytest.fixture(scope="module")
def finished(maze_run, tmp_path_factory):
    out = tmp_path_factory.mktemp("evaluations") / "finished"
    assert run(maze_run, "--out", out) == 0
    return out


@pytest.fixture(scope="module")
def first(maze_run, tmp_path_factory):
    out = tmp_path_factory.mktemp("evaluations") / "first"
    assert run(maze_run / "checkpoints" / "step-000000", "--out", out) == 0
    return out


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "untrained"
    model, task = tiny_decoder(), MazeTask(5)
    save_checkpoint(directory, model.config, model.weights(), task.tokenizer_files(), task.stop_ids)
    return directory


def run(checkpoint, *flags):
    return evaluate.main([str(checkpoint), *SMALL, *map(str, flags)])


def read(out):
    text = (out / "eval.json").read_text()
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def samples_of(out):
    return read_lines(out / "samples.jsonl")


def test_evaluating_a_run_reproduces_its_last_evaluation(maze_run, finished):
    *_, last = read_lines(maze_run / "eval.jsonl")
    results = read(finished)
    for k in ("1", "2", "4"):
        assert results["pass_at_k"][k]["mean"] == pytest.approx(last["pass_at_k"][k], abs=1e-12)
    for name in ("response_length_mean", "truncated", "num_tokens", "reward_errors"):
        assert results[name] == last[name]
    assert 0 < results["pass_at_k"]["1"]["mean"] < 1
    options = results["options"]
    wanted = {"maze_size": 7, "seed": 4, "task_seed": 4, "samples": 4, "eval_prompts": 12}
    wanted["max_new_tokens"] = 17  # 18 is the default
    assert wanted.items() <= options.items()
    assert options["k"] == [1, 2, 4]
    assert results["run"] == str(maze_run)
    assert results["checkpoint"] == str(maze_run / "checkpoints" / "step-000006")
    assert results["name"] == "maze-step-000006"
    assert results["versions"]["torch"] == torch.__version__
    assert results["task_options"] == ["maze_size"]


def test_the_results_follow_from_the_samples(finished):
    results, samples = read(finished), samples_of(finished)
    assert [sample["id"] for sample in samples] == [i for i in range(12) for _ in range(4)]
    task = MazeTask(7, seed=4)
    assert samples[4]["prompt"] == task.decode(task.prompts("test", 1, 1).tokens.tolist())
    groups = [samples[i : i + 4] for i in range(0, 48, 4)]
    counts = [sum(sample["reward"] == 1 for sample in group) for group in groups]
    assert results["per_prompt"]["num_correct"] == counts
    assert results["per_prompt"]["id"] == list(range(12))
    assert results["solved"] == pytest.approx(sum(count > 0 for count in counts) / 12)
    for k in (1, 2, 4):
        passes = [float(brute_force.pass_at_k(4, count, k)) for count in counts]
        [interval] = bootstrap(torch.tensor(passes)[:, None], 40, 0.95, seed=4)
        assert results["pass_at_k"][str(k)] == pytest.approx(interval, abs=1e-6)
        # rewards are 0 and 1
        assert results["max_at_k"][str(k)]["mean"] == pytest.approx(sum(passes) / 12)
    assert list(results["coverage"]) == ["1", "2", "4"]
    assert results["coverage"]["4"]["mean"] == pytest.approx(results["solved"])
    assert results["maj_at_k"]["1"]["mean"] == pytest.approx(sum(counts) / 48)
    for name, of in (("response_length_mean", "tokens"), ("truncated", "truncated")):
        assert results[name] == pytest.approx(sum(sample[of] for sample in samples) / 48)
    answers = [
        [tuple(MazeTask(7).answer(x["response"]).split()) for x in group] for group in groups
    ]
    distinct = [len({x for x in group if x}) / 4 for group in answers]
    assert results["distinct_answers"] == pytest.approx(sum(distinct) / 12)
    assert 0.25 < results["distinct_answers"] < 1


def test_evaluations_are_compared_prompt_by_prompt(maze_run, finished, first, tmp_path, capsys):
    own, theirs = (read(x)["per_prompt"]["num_correct"] for x in (finished, first))
    assert own != theirs
    gains = pass_at_k(4, torch.tensor(own), 2) - pass_at_k(4, torch.tensor(theirs), 2)
    wanted = bootstrap(gains[:, None], 40, 0.95, seed=4)[0]
    assert run(maze_run, "--against", first, "--out", tmp_path / "again") == 0
    gain = read(tmp_path / "again")["against"][str(first)]["2"]
    assert gain == pytest.approx(wanted, abs=1e-12)
    assert run(maze_run, "--samples", "3", "--out", tmp_path / "few") == 0
    capsys.readouterr()
    flags = ("--bootstrap", "40", "--seed", "4")
    others = map(str, (first, tmp_path / "few"))
    assert evaluate.main([str(finished), "--against", *others, *flags]) == 0
    text, error = capsys.readouterr()
    error = " ".join(error.split())
    assert f"{gain['mean']:+.3f} ({gain['low']:+.3f}, {gain['high']:+.3f})" in text
    assert all(x in text for x in (f"A  {finished}", f"B  {first}", f"C  {tmp_path / 'few'}"))
    assert f"warning: {tmp_path / 'few'} is not of the same prompts, samples and sampling" in error
    assert "it differs in samples: 4 and 3" in error
    assert str(first) not in error


def test_the_same_seed_repeats_and_another_does_not(maze_run, finished, tmp_path):
    assert run(maze_run, "--out", tmp_path / "again") == 0
    same, latest = (tmp_path / "again/samples.jsonl").read_bytes(), (maze_run / "latest").resolve()
    assert same == (finished / "samples.jsonl").read_bytes()
    # a run's folder means its latest checkpoint
    assert read(tmp_path / "again")["checkpoint"] == str(latest)
    assert run(latest, "--out", tmp_path / "third", "--eval-prompts", "3") == 0
    third = (tmp_path / "third" / "samples.jsonl").read_bytes()
    assert third
    assert same.startswith(third)  # a sample does not depend on how many prompts there are
    assert run(latest, "--out", tmp_path / "fourth", "--seed", "5") == 0
    fourth = samples_of(tmp_path / "fourth")
    again = samples_of(tmp_path / "again")
    assert [s["prompt"] for s in fourth] == [s["prompt"] for s in again]  # the run's mazes
    assert [s["response"] for s in fourth] != [s["response"] for s in again]


def test_flags_override_the_runs_options(maze_run, tmp_path):
    flags = "--maze-size 9 --task-seed 1 --split train --top-p 0.9 --seed 2 --eval-prompts 5 "
    assert run(maze_run, *flags.split(), "--out", tmp_path / "out") == 0
    options = read(tmp_path / "out")["options"]
    wanted = {"maze_size": 9, "task_seed": 1, "seed": 2, "split": "train", "max_new_tokens": 32}
    assert wanted.items() <= options.items()
    task = MazeTask(9, seed=1)
    first = task.decode(task.prompts("train", 0, 1).tokens.tolist())
    assert samples_of(tmp_path / "out")[0]["prompt"] == first
    names = ["eval.json", "lock", "samples.jsonl"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names


def test_a_checkpoint_alone_takes_the_defaults_of_training(untrained, tmp_path):
    assert run(untrained, *MAZE7, "--out", tmp_path / "out") == 0
    options = read(tmp_path / "out")["options"]
    wanted = {"seed": 0, "task_seed": 0, "max_new_tokens": 18, "temperature": 1.0}
    assert wanted.items() <= options.items()
    task = MazeTask(7)
    num_distinct = len({tuple(task.prompts("test", i, 1).tokens.tolist()) for i in range(12)})
    assert num_distinct < 12
    assert read(tmp_path / "out")["num_distinct_prompts"] == num_distinct


REFUSALS = """
    {run} --max-new-tokens 1000 | positions
    {run} --out {untrained} | --out must be a new or empty folder, got {untrained}
    {run} --against {run} | {run} must be the folder of a finished evaluation
    {finished} --against {finished} --samples 5 --k 5 | --k must be at most 4, the samples of
    {finished} --against {tmp}/none | {tmp}/none must be the folder of a finished evaluation
"""


@pytest.mark.parametrize(("flags", "sentence"), table(REFUSALS))
def test_bad_input_is_refused_before_any_work(
    flags, sentence, maze_run, finished, untrained, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(Evaluator, "evaluate", lambda *_, **__: pytest.fail("it has begun to work"))
    monkeypatch.chdir(tmp_path)
    places = {"tmp": tmp_path, "run": maze_run, "finished": finished, "untrained": untrained}
    given = flags.format(**places).split()
    assert evaluate.main([*given[:1], *SMALL, *given[1:]]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert sentence.format(**places).strip() in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_an_evaluation_of_other_prompts_or_impossible_counts(finished, tmp_path, capsys):
    results = read(finished)
    for i, (change, sentence) in enumerate(
        (
            ({"settings": results["settings"] | {"prompts_sha256": "0"}}, "differs in the prompts"),
            (
                {"per_prompt": results["per_prompt"] | {"num_correct": [5] * 12}},
                "count from 0 to 4",
            ),
            (
                {"per_prompt": results["per_prompt"] | {"rewards": [[1]]}},
                "4 numbers for each prompt",
            ),
        )
    ):
        (tmp_path / "eval.json").write_text(json.dumps(results | change))
        assert evaluate.main([str(finished), "--against", str(tmp_path)]) == 2 * (i > 0)
        assert sentence in " ".join(capsys.readouterr().err.split())


def test_too_many_failed_rewards_end_the_evaluation(untrained, tmp_path, capsys):
    reward = tmp_path / "reward.py"
    reward.write_text("def score(prompt, response):\n    raise ValueError('no idea')\n")
    flags = (*MAZE7, "--reward", f"{reward}:score", "--out", tmp_path / "out")
    assert run(untrained, *flags) == 1
    error = capsys.readouterr().err
    assert "no idea" in error
    assert "nothing was kept" in error
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["lock"]
    reward.write_text("def score(prompt, response):\n    return 1\n")
    assert run(untrained, *flags) == 0  # into the same folder


def test_test_data_needs_no_other_data(tmp_path):
    (tmp_path / "f.py").write_text("def f(prompt, response, **columns):\n    return 1\n")
    line = json.dumps({"prompt": "2?", "question": "2?", "answer": "#### 2"}) + "\n"
    (tmp_path / "x.jsonl").write_text(line * 12)
    flags = (*"--max-new-tokens 4 --reward-workers 1 --task".split(),)
    model = save_tool_policy(tmp_path / "m")
    for i, task in enumerate((f"{tmp_path}/f.py:f", "gsm8k")):
        own = (*flags, task, "--test-data", tmp_path / "x.jsonl", "--out", tmp_path / f"{i}")
        assert run(model, *own) == 0
        assert read(tmp_path / f"{i}")["pass_at_k"]["1"]["mean"] == 1 - i


@pytest.mark.slow
def test_rewards_other_than_0_and_1_are_shown_by_mean_and_max(shared_run, tmp_path, capsys):
    """In a run's files and tables, evaluate, --against and the report, max@k is that of all
    subsets; a failed reward is null and counts as the lowest."""
    out, sizes = shared_run("text"), "--eval-prompts 7 --samples 6".split()
    ends, means = [record["max_at_k"] for record in read_lines(out / "eval.jsonl")], []
    assert (out / "best").resolve().name == f"step-{2 * (ends[1]['1'] > ends[0]['1']):06d}"
    first, last = (out / "checkpoints" / f"step-00000{i}" for i in (0, 2))
    assert run(first, *sizes, "--out", tmp_path / "0") == 0
    assert run(last, *sizes, "--out", tmp_path / "1", "--against", tmp_path / "0") == 0
    shown, against = capsys.readouterr().out, read(tmp_path / "1")["against"][str(tmp_path / "0")]
    assert all(x in shown for x in ("max@k (95% interval)", "max@4", "A - B"))
    firsts = []
    for i, end in enumerate(ends):
        results, samples = read(tmp_path / str(i)), samples_of(tmp_path / str(i))
        rewards = [sample["reward"] for sample in samples]
        assert results["reward_errors"] == pytest.approx(rewards.count(None) / 42)
        lowest = min(0, *(x for x in rewards if x is not None))
        known = [lowest if x is None else x for x in rewards]
        for k in (1, 2, 4):
            best = [max(x) for j in range(0, 42, 6) for x in combinations(known[j : j + 6], k)]
            found = results["max_at_k"][str(k)]
            mean = pytest.approx(sum(best) / len(best), rel=1e-6)
            assert [found["mean"], end[str(k)]] == [mean, mean]
            assert found["low"] < found["mean"] < found["high"]
            means.append(found["mean"])
        folder = read_folder((out, tmp_path / "0")[i], "")
        assert folder.score == "max_at_k"
        own = folder.prompts["evaluations"][0]
        assert sum(own["reward_mean"]) / 7 == pytest.approx(ends[0]["1"])
        firsts = firsts or [max(known[j : j + 6]) for j in range(0, 42, 6)]
        assert own["reward_max"] == pytest.approx(firsts)
        assert folder.coverage[0]["rows"][0][1] == pytest.approx(ends[0]["1"])
    assert None in rewards
    gains = [against[k]["mean"] for k in ("1", "2", "4")]
    assert gains == pytest.approx([b - a for a, b in zip(means[:3], means[3:], strict=True)])
    assert evaluate.main([str(tmp_path / "0"), "--against", str(tmp_path / "1")]) == 0
    row = rf"│ mean reward +│ +{means[0]:.3f} │ +{means[3]:.3f} │"
    assert re.search(row, capsys.readouterr().out)
