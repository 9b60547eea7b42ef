import json
import sys
import types

import pytest
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer

from maxrl_fast import train
from maxrl_fast.job.run_files import cut_log
from maxrl_fast.job.screen import Screen
from maxrl_fast.tasks.maze import WORDS, MazeTask
from tests.runs import SMALL, read


def test_the_first_samples_of_each_evaluation_are_kept(maze_run):
    samples = read(maze_run / "samples.jsonl")
    steps = [record["step"] for record in read(maze_run / "eval.jsonl")]
    assert [x["step"] for x in samples] == [step for step in steps for _ in range(32)]
    assert [x["id"] for x in samples[:9]] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    task = MazeTask(7, seed=4)
    for sample in samples:
        prompt = task.prompts("test", sample["id"], 1)
        assert sample["prompt"] == task.decode(prompt.tokens.tolist())
        words = sample["response"].split()
        assert len(words) == sample["tokens"]
        assert sample["reward"] in (0, 1)
        assert sample["truncated"] == (words[-1] not in ("DONE", WORDS[2]))


def test_each_evaluation_counts_the_correct_samples_of_every_prompt(maze_run):
    records, samples = read(maze_run / "pass_rates.jsonl"), read(maze_run / "samples.jsonl")
    assert [record["step"] for record in records] == [0, 2, 4, 6]
    for record, evaluation in zip(records, read(maze_run / "eval.jsonl"), strict=True):
        assert (record["num_samples"], record["num_prompts"]) == (4, 12)
        assert record["ids"] == list(range(12))
        assert sum(record["num_correct"]) / 48 == pytest.approx(evaluation["pass_at_k"]["1"])
        for i in range(8):  # the prompts of which all four samples are kept
            place = (record["step"], i)
            kept = [x["reward"] for x in samples if (x["step"], x["id"]) == place]
            assert record["num_correct"][i] == sum(kept)


def test_the_held_out_prompts_are_written_once_and_the_time_of_each_stage(maze_run):
    task = MazeTask(7, seed=4)
    texts = [task.decode(task.prompts("test", i, 1).tokens.tolist()) for i in range(12)]
    lines = [{"id": i, "prompt": text} for i, text in enumerate(texts)]
    assert read(maze_run / "eval_prompts.jsonl") == lines
    timings = json.loads((maze_run / "timings.json").read_text())
    assert {"warm start", "evaluation", "rollout", "update"} <= set(timings)
    assert min(timings.values()) >= 0


def lines(*steps):
    return b"".join(json.dumps({"step": step}).encode() + b"\n" for step in steps)


def test_a_log_is_cut_after_the_lines_that_it_had_at_a_checkpoint(tmp_path):
    path = tmp_path / "a.jsonl"
    size = len(lines(1, 2))
    path.write_bytes(lines(1, 2, 3) + b'{"step": 4')  # what a kill leaves
    assert not cut_log(path, size)
    assert path.read_bytes() == lines(1, 2)
    path.write_bytes(lines(1, 22))  # an edited log is cut
    assert not cut_log(path, size)
    assert path.read_bytes() == lines(1)
    assert cut_log(path, size)
    assert cut_log(tmp_path / "b.jsonl", 1)
    assert not (tmp_path / "b.jsonl").exists()


@pytest.fixture
def installed(monkeypatch):
    def install(name="wandb", **functions):
        module = types.ModuleType(name)
        vars(module).update(functions, __spec__=types.SimpleNamespace(name=name, origin="it"))
        monkeypatch.setitem(sys.modules, name, module)

    return install


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_trackers_get_the_same_numbers_as_the_logs(tmp_path, installed, name):
    calls, functions = [], {"log": lambda numbers, step: calls.append(("log", step, numbers))}
    functions["init"] = lambda **options: calls.append(("init", options))
    installed(name, finish=lambda: calls.append(("finish",)), **functions)
    out = tmp_path / "one-run"
    flags = f"--sft-steps 0 --steps 2 --keep-rollouts 0 --log-to {name} --out {out}".split()
    assert train.main([*SMALL, *flags]) == 0
    assert not (out / "rollouts.jsonl").exists()
    (_, options), *logs, last = calls
    assert {"project": "maxrl_fast", "name": "one-run"}.items() <= options.items()
    assert options["config"]["steps"] == 2
    assert options.get("id", "one-run-").startswith("one-run-")
    assert last == ("finish",)
    assert [step for _, step, _ in logs] == [0, 1, 2, 2]  # an evaluation before and after
    (record,) = [record for record in read(out / "metrics.jsonl") if record["step"] == 1]
    assert logs[1][2] == {f"metrics/{key}": value for key, value in record.items()}
    assert logs[0][2]["eval/pass_at_1"] == read(out / "eval.jsonl")[0]["pass_at_k"]["1"]


def test_a_tracker_that_fails_later_is_a_warning(tmp_path, installed, capsys):
    steps = []

    def log(numbers, step):
        steps.append(step)
        if step == 1:
            raise BrokenPipeError("its process has ended")

    installed(init=lambda **options: None, log=log, finish=lambda: 1 / 0)
    out = tmp_path / "run"
    flags = f"--sft-steps 0 --steps 2 --log-to wandb --out {out}".split()
    assert train.main([*SMALL, *flags]) == 0
    assert [record["step"] for record in read(out / "metrics.jsonl")] == [1, 2]
    assert steps == [0, 1]
    assert capsys.readouterr().err.count("warning: BrokenPipeError of the tracker") == 1


def test_in_a_file_every_statement_is_one_line(capsys):
    screen, line = Screen(), "word " * 60
    screen.info(line)
    screen.warning(line)
    with screen.stage("evaluate", 8) as stage:
        stage.advance(8)
    assert capsys.readouterr() == (f"{line}\nevaluate 8/8  0 s left\n", f"warning: {line}\n")


@pytest.mark.slow
def test_a_resumed_run_shows_every_step_once_in_tensorboard(shared_run):
    """Before it was killed, it had written steps after its last checkpoint."""
    events = EventMultiplexer({"killed": str(shared_run("killed") / "tensorboard")}).Reload()
    assert [event.step for event in events.Tensors("killed", "metrics/entropy")] == [*range(1, 7)]
    # an evaluation may be repeated
    assert sorted({x.step for x in events.Tensors("killed", "eval/pass_at_1")}) == [0, 2, 4, 6]
