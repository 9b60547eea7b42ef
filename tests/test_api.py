import os
import random
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import torch

import maxrl_fast
from maxrl_fast.api import Log
from maxrl_fast.errors import InputError, NonFiniteError
from maxrl_fast.evaluate import main as evaluate
from maxrl_fast.job.run_files import flat
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.train import main
from maxrl_fast.training.learner import Learner
from tests.runs import MAZE, SMALL, assert_same_run, options_of, read, without_timings
from tests.tool_episodes import save_tool_policy

OPTIONS = options_of([*SMALL, "--sft-steps", "4"])


@pytest.mark.slow
def test_it_trains_as_the_command_does_and_leaves_the_process_as_it_was(maze_run, tmp_path, capsys):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    torch.set_num_threads(2)

    def state():
        handlers = [*map(signal.getsignal, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))]
        random_states = random.getstate(), repr(np.random.get_state())
        of_torch = torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()
        of_process = os.getcwd(), sys.stdout, sys.stderr, threading.active_count()
        return handlers, random_states, torch.get_rng_state().tolist(), of_torch, of_process

    before, out = state(), tmp_path / "run"
    capsys.readouterr()
    run = maxrl_fast.run(options_of(MAZE), out=out, quiet=True)
    assert capsys.readouterr() == ("", "")
    assert state() == before
    assert (run.exit, run.out, len(run.metrics)) == (0, out, 6)
    assert_same_run(maze_run, out)
    assert not run.policy.training
    assert set(run.policy.state_dict()) >= {"model.norm.weight"}
    reward = [record["reward_mean"] for record in read(maze_run / "metrics.jsonl")]
    assert max(reward) > 0
    assert run.metrics["reward_mean"].tolist() == reward
    records = read(maze_run / "eval.jsonl")
    assert run.evaluations["pass_at_2"].tolist() == [record["pass_at_k"]["2"] for record in records]
    rewards = [x["reward"] for x in read(out / "rollouts.jsonl")]
    assert run.log("rollouts")["reward"].tolist() == rewards != []
    passes = [f"{record['pass_at_k']['1']:.3f}" for record in (records[0], records[-1])]
    assert repr(run) == f"Run({str(out)!r}: 6 steps, pass@1 {' to '.join(passes)})"


@pytest.mark.slow
def test_options_come_from_a_file_and_keywords_in_a_thread_that_is_not_the_main_one(tmp_path):
    text = "".join(f"{name} = {value!r}\n" for name, value in OPTIONS.items())
    (file := tmp_path / "run.toml").write_text(text)
    with ThreadPoolExecutor(1) as thread:
        how = {"steps": 1, "order": None, "out": tmp_path / "run"}
        run = thread.submit(maxrl_fast.run, file, **how).result(120)
    assert len(run.metrics) == 1
    assert next(iter(run.evaluations[0])) == "step"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"steps": True}, "steps must be an integer from 0 to 2^31 - 1, got True"),
        ({"dry_run": True}, "dry_run works only on the command line"),
        ({"task": object()}, "task object must have the method"),
    ],
)
def test_wrong_options_raise_an_input_error_with_the_commands_sentence(
    tmp_path, capsys, options, sentence
):
    with pytest.raises(InputError) as raised:
        maxrl_fast.run(**options, out=tmp_path / "run")
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_task_object_trains_as_its_name_does(maze_run, tmp_path, capsys):
    options = {name: value for name, value in options_of(MAZE).items() if name != "maze_size"}
    given = maxrl_fast.run(options, task=MazeTask(7, seed=4), out=tmp_path / "given")
    for log in ("metrics.jsonl", "eval.jsonl"):
        assert without_timings(given.out / log) == without_timings(maze_run / log)
    capsys.readouterr()
    # another process does not have the object
    assert main(["--resume", str(tmp_path / "given")]) == 2
    assert "--task python:MazeTask is a Python object" in capsys.readouterr().err
    flags = "--eval-prompts 2 --samples 2 --out".split()
    assert evaluate([str(tmp_path / "given"), *flags, str(tmp_path / "evaluated")]) == 2
    assert "--task python:MazeTask is a Python object" in capsys.readouterr().err


@pytest.mark.slow
def test_a_closure_scores_responses_in_this_process(tmp_path, capsys):
    seen = []

    def score(prompt, response):
        seen.append(response)
        return len(response.split()) / 32

    ratio = {**OPTIONS, "objective": "maxrl_ratio", "k": None}
    run = maxrl_fast.run(ratio, reward=score, out=tmp_path / "run")
    [warned] = [w for w in read(run.out / "warnings.jsonl") if w["kind"] == "not_binary"]
    assert (warned["step"], "made for rewards of 0 or 1" in warned["message"]) == (1, True)
    assert "3 steps, mean reward 0." in repr(run)
    assert run.metrics["reward_mean"] == pytest.approx(
        run.metrics["response_length_mean"] / 32, rel=1e-6
    )
    assert len(seen) == 4 + 3 * 16 + 2 * 24  # the rehearsal, three steps, two evaluations
    said = capsys.readouterr().out.replace("\n", " ")
    assert "python:score: called with each response, in this process, without a time limit" in said
    assert main(["--resume", str(tmp_path / "run"), "--steps", "4", "--allow-changes"]) == 2
    assert "--reward python:score is a Python object" in capsys.readouterr().err


@pytest.mark.slow
def test_interrupting_saves_and_returns_and_resume_ends_as_if_it_had_not_been(tmp_path, capfd):
    def score(prompt, response):
        return len(response) % 3 == 0

    calls = []

    def interrupting(prompt, response):
        calls.append(response)
        if len(calls) == 4 + 24 + 16 + 5:  # within the second step
            os.kill(os.getpid(), signal.SIGINT)
        return score(prompt, response)

    whole = maxrl_fast.run(OPTIONS, reward=score, out=tmp_path / "whole")
    interrupting.__name__ = "score"  # the same option
    before = signal.getsignal(signal.SIGINT)
    stopped = maxrl_fast.run(OPTIONS, reward=interrupting, out=tmp_path / "stopped")
    assert signal.getsignal(signal.SIGINT) is before
    assert (stopped.exit, len(stopped.metrics)) == (130, 2)
    assert "ended early with exit 130" in repr(stopped)
    assert (tmp_path / "stopped" / "latest").resolve().name == "step-000002"
    assert "Ctrl-C: saving and stopping after this step" in capfd.readouterr().err
    resumed = stopped.resume(reward=score)
    assert (resumed.exit, len(resumed.metrics)) == (0, 3)
    assert_same_run(whole.out, resumed.out)


@pytest.mark.slow
def test_a_script_that_torchrun_starts_trains_on_all_ranks(shared_run):
    said = shared_run("ranks").with_name("ranks.txt").read_text().splitlines()
    assert {line for line in said if line.startswith("rank:")} == {"rank:0:0:3", "rank:1:0:3"}


@pytest.mark.slow
def test_a_run_that_fails_raises_with_the_last_checkpoint(tmp_path, monkeypatch, capsys):
    pass_ = Learner.forward_backward

    def poisoned(self, samples, advantages, sequences, draw=(0, 0)):
        poison = float("nan") if draw[0] == 2 else 0.0
        pass_(self, samples, advantages + poison, sequences, draw)

    monkeypatch.setattr(Learner, "forward_backward", poisoned)
    wanted = r"step 2: the loss is nan for one of the prompts [\d, ]+; .*step-000001\. A lower --lr"
    with pytest.raises(NonFiniteError, match=wanted):
        maxrl_fast.run(OPTIONS, save_every=1, out=tmp_path / "run")
    assert capsys.readouterr().err == ""  # what is raised is not printed too


def test_rows_are_data_which_a_resumed_run_reads_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{i}: say"} for i in range(40)]
    model = str(save_tool_policy(tmp_path / "policy"))
    options = {"prompts": 4, "rollouts": 4, "eval_prompts": 3, "eval_samples": 4, "threads": 1}
    options |= {"keep_rollouts": 16}  # all
    options |= {"task": "dataset", "model": model, "objective": "rloo", "max_new_tokens": 9}
    options |= {"reward": lambda prompt, response, **columns: len(response) / 10}
    done = maxrl_fast.run(data=rows, steps=1, lr_schedule="constant", out="o", **options)
    assert done.resume(data=pandas.DataFrame(rows), steps=2).exit == 0
    [file] = tmp_path.glob("data-*.jsonl")
    assert read(file) == rows
    numbers = {"a": np.arange(2), "b": Decimal("1.5"), "c": b"c"}
    dataset = SimpleNamespace(to_list=lambda: [row | numbers for row in rows])
    with pytest.raises(InputError, match="data must be rows of JSON values"):
        maxrl_fast.run(data=[{"prompt": "a", ("b",): 1}], out="other", **options)
    texts = [x["response"] for x in done.log("rollouts") if x["step"] == 1]
    [pair, *_] = re.findall("[!-;=?-Z]{2}", "\n".join(texts))  # not in a special token
    stopped = maxrl_fast.run(data=dataset, steps=1, out="p", stop=[pair], **options)
    ended = [x.partition(pair)[0] + pair * (pair in x) for x in texts]
    assert [x["response"] for x in stopped.log("rollouts")] == ended
    [more] = set(tmp_path.glob("data-*.jsonl")) - {file}
    assert read(more)[0] == rows[0] | {"a": [0, 1], "b": "1.5", "c": None}
    image = [{"role": "user", "content": [{"type": "image", "image": {"bytes": b"c"}}]}]
    with pytest.raises(InputError, match=r"line 1: prompt must have .* each as text"):
        maxrl_fast.run(data=[{"prompt": image}], out="other", **options)


def test_importing_the_package_imports_no_torch():
    code = "import sys, maxrl_fast; assert 'torch' not in sys.modules"
    assert not hasattr(maxrl_fast, "trane")
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)


def test_a_log_has_columns_and_rows():
    rows = [
        {"step": 1, "reward_mean": 0.5, "pass_at_k": {"1": 0.25, "2": 0.5}},
        {"step": 2, "reward_mean": 0.75, "note": "bold", "ids": [1, 2]},
        {"step": 3, "reward_mean": None, "note": None, "ids": [3]},
    ]
    log = Log(map(flat, rows))
    assert log["step"].tolist() == [1, 2, 3]
    assert log["step"].dtype.kind == "i"
    np.testing.assert_array_equal(log["reward_mean"], [0.5, 0.75, np.nan])
    np.testing.assert_array_equal(log["pass_at_2"], [0.5, np.nan, np.nan])
    assert (log["note"], log["ids"]) == ([None, "bold", None], [None, [1, 2], [3]])
    with pytest.raises(KeyError, match="no column 'reward', only step, reward_mean, pass_at_1"):
        log["reward"]
    assert log[0] == {"step": 1, "reward_mean": 0.5, "pass_at_1": 0.25, "pass_at_2": 0.5}
    assert (len(log), log[1:][0]["step"], log[-1]["step"]) == (3, 2, 3)
