"""The files of a run beside its metrics: samples, diagnostics and timings. Trackers get the same
numbers."""

import json
import sys
import types

import pytest
import torch

from maxrl_fast import train
from maxrl_fast.job.run_files import cut_log
from maxrl_fast.model.linear import full_tensor
from maxrl_fast.records import Rollouts, Samples
from maxrl_fast.tasks.maze import WORDS, MazeTask
from maxrl_fast.training.diagnostics import prompt_gradient_norms
from maxrl_fast.training.learner import Learner, UpdatePlan
from maxrl_fast.training.loss_settings import LossSettings
from maxrl_fast.training.optimizer import make_optimizer
from tests.batches import make_prompts
from tests.models import tiny_decoder
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


def test_the_text_of_the_held_out_prompts_is_written_once(maze_run):
    task = MazeTask(7, seed=4)
    texts = [task.decode(task.prompts("test", i, 1).tokens.tolist()) for i in range(12)]
    lines = [{"id": i, "prompt": text} for i, text in enumerate(texts)]
    assert read(maze_run / "eval_prompts.jsonl") == lines


def test_diagnostics_cover_every_prompt_of_the_step(maze_run):
    records = read(maze_run / "diagnostics.jsonl")
    metrics = {record["step"]: record for record in read(maze_run / "metrics.jsonl")}
    assert [record["step"] for record in records] == [2, 4, 6]
    for record in records:
        known = metrics[record["step"]]
        assert len(record["ids"]) == len(record["pass_rate"]) == len(record["grad_norm"]) == 4
        assert sum(record["pass_rate"]) / 4 == pytest.approx(known["reward_mean"], abs=1e-5)
        assert record["grad_norm"].count(0) / 4 == known["frac_groups_zero_variance"]
        assert known["grad_norm"] <= sum(record["grad_norm"]) * 1.0001  # triangle inequality
    timings = json.loads((maze_run / "timings.json").read_text())
    assert {"warm start", "evaluation", "rollout", "update", "diagnosis"} <= set(timings)
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


def test_prompt_gradient_norms_equal_autograd():
    model = tiny_decoder()
    prompts = make_prompts([[1, 2, 3], [4, 5], [6, 7, 8, 9]])
    rollouts = Rollouts.given([[(3 * s + i) % 11 for i in range(1 + s % 5)] for s in range(12)])
    advantages = torch.randn(12, generator=torch.Generator().manual_seed(1))
    advantages[4:8] = 0  # a zero-variance group
    settings = LossSettings(loss="reinforce", aggregation="seq_mean_token_mean")
    optimizer = make_optimizer(model, beta2=0.99, weight_decay=0.01)
    learner = Learner(model, optimizer, settings, 0.1, 16, torch.float32)
    samples = Samples(prompts, rollouts)
    norms = prompt_gradient_norms(learner, samples, advantages, torch.arange(12))
    assert not any(p.grad is not None and p.grad.any() for p in model.parameters())
    expected = [0.0] * 3
    plan = UpdatePlan(torch.arange(12), settings.denominator(rollouts.lengths))
    for g in (0, 2):
        model.zero_grad()
        batch = learner.passes.packer(samples, advantages).pack(torch.arange(4 * g, 4 * g + 4))
        learner.loss(batch, plan)[0].backward()
        gradient = torch.cat([full_tensor(p.grad).flatten() for p in model.parameters()])
        expected[g] = float(gradient.norm())
    assert norms == pytest.approx(expected, rel=1e-4)
    assert norms[1] == 0
    assert norms[0] > 0


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
    """Where no rollouts are kept and nothing is diagnosed, their files are not made."""
    calls, functions = [], {"log": lambda numbers, step: calls.append(("log", step, numbers))}
    functions["init"] = lambda **options: calls.append(("init", options))
    installed(name, finish=lambda: calls.append(("finish",)), **functions)
    out = tmp_path / "one-run"
    flags = f"--sft-steps 0 --steps 2 --keep-rollouts 0 --log-to {name} --out {out}".split()
    assert train.main([*SMALL, *flags]) == 0
    assert not {"rollouts.jsonl", "diagnostics.jsonl"} & {path.name for path in out.iterdir()}
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
