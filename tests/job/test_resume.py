import contextlib
import functools
import json
import os
import resource
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from maxrl_fast import train
from maxrl_fast.errors import NonFiniteError
from maxrl_fast.job import checkpoints, launch
from maxrl_fast.job.run_files import Progress
from maxrl_fast.runtime.files import DamagedError, RunFolder, locked, verify_checksums
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.training.learner import Learner
from tests.models import save_checkpoint, tiny_decoder
from tests.runs import (
    CHAIN_TASK,
    JOB,
    MAZE,
    SMALL,
    assert_same,
    base,
    copied,
    exit_code,
    forked,
    read,
    resumes_bitwise,
    stop_and_resume,
    stop_at,
)
from tests.tables import table

pytestmark = pytest.mark.slow

# What each keeps from step to step: a reference policy, which is reset; a critic; quantiles, draws
# of tokens and the anchor of an entropy.
CHAIN = f"--task {CHAIN_TASK} --length 8 --reward-threshold .1 --updates-per-step 2 --objective "
OBJECTIVES = {
    "maxpo": "",
    "pacs": "--objective pacs_paper --ref-reset-interval 4 --updates-per-step 2",
    "critic": "--objective ppo --updates-per-step 2 --gae-lambda 0.9 --sft-steps 150 "
    "--sft-batch 16 --sft-lr 1e-2 --max-new-tokens 17",
    "chain": f"{CHAIN} riskpo --bundle-size 2 --loss clip_cov --share .1 --low 0 --high 9 "
    "--siren .5",
}


def run(out, *flags, job=JOB):
    return train.main([*job, "--out", str(out), *flags])


maze = functools.partial(run, job=MAZE)  # the shared run


def resume(out, *flags):
    return train.main(["--resume", str(out), *flags])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_stopped_run_resumes_bitwise(maze_run, tmp_path, monkeypatch, name):
    stops = ("warm start step 23", "step 1", "step 4")
    if name == "maxpo":
        stop_and_resume(monkeypatch, tmp_path / "stopped", MAZE, *stops)
        assert_same(maze_run, tmp_path / "stopped")
        return
    flags, is_chain = OBJECTIVES[name].split(), name == "chain"
    job = [*JOB[2:], *flags, "--sft-steps", "0"] if is_chain else [*JOB, *flags]
    steps = resumes_bitwise(monkeypatch, tmp_path, job, *(("step 3",) if is_chain else stops))
    assert any(step["grad_norm"] > 0 for step in steps)
    if is_chain:
        assert len({step["riskpo_quantile_high"] for step in steps}) > 1
        assert len({step["siren_anchor"] for step in steps}) == 1
        assert steps[-1]["siren_entropy"] != steps[-1]["siren_anchor"] > 0
        assert any(step["tokens_chosen"] >= 2 for step in steps)


def test_a_run_that_was_killed_three_times_ends_with_the_same_result(shared_run, maze_run):
    out = shared_run("killed")
    assert_same(maze_run, out)
    assert not [*(out / "checkpoints").glob(".*")]  # nor is an incomplete checkpoint left


def slowed(monkeypatch, name, wait):
    write = checkpoints.save_state

    def slow(folder, tensors, rank):
        if name in str(folder):
            wait()
        write(folder, tensors, rank)

    monkeypatch.setattr("maxrl_fast.job.checkpoints.save_state", slow)


def test_training_goes_on_while_a_checkpoint_is_written(maze_run, tmp_path, monkeypatch):
    update, has_updated, waited = Learner.optim_step, threading.Event(), []

    def spy(self, *arguments, **options):
        metrics = update(self, *arguments, **options)
        if options["when"] == "step 3":
            has_updated.set()
        return metrics

    monkeypatch.setattr(Learner, "optim_step", spy)
    slowed(monkeypatch, "step-000002", lambda: waited.append(has_updated.wait(60)))
    out = tmp_path / "run"
    assert maze(out) == 0
    assert waited == [True]
    assert_same(maze_run, out)
    whole, own = (path / "checkpoints" / "step-000002" for path in (maze_run, out))
    for name in ("model.safetensors", STATE):
        assert (whole / name).read_bytes() == (own / name).read_bytes()
    size = json.loads((own / "progress.json").read_text())["logs"]["metrics"]
    lines = (out / "metrics.jsonl").read_bytes()[:size].splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_an_error_waits_for_the_checkpoint_that_is_being_written(tmp_path, monkeypatch, capsys):
    update = Learner.optim_step

    def fail(self, *arguments, **options):
        if options["when"] == "step 3":
            raise NonFiniteError("the loss is nan")
        return update(self, *arguments, **options)

    monkeypatch.setattr(Learner, "optim_step", fail)
    slowed(monkeypatch, "step-000002", lambda: time.sleep(0.5))
    assert run(tmp_path / "run", "--k", "2", "--sft-steps", "0") == 1
    newest = tmp_path / "run" / "checkpoints" / "step-000002"
    assert f"the loss is nan; the last good checkpoint is {newest}" in capsys.readouterr().err
    assert (tmp_path / "run" / "latest").resolve() == newest


def test_a_run_extended_at_a_constant_rate_equals_a_longer_run(tmp_path, capsys):
    flags = "--objective maxpo --k 2 --lr-schedule constant --eval-every 0".split()
    assert run(tmp_path / "whole", *flags) == 0
    assert run(tmp_path / "twice", *flags, "--steps", "3") == 0
    capsys.readouterr()
    assert resume(tmp_path / "twice", "--steps", "6") == 0
    printed = capsys.readouterr()
    said = "options: the run's own, from its config.json, but for steps: 3 before, 6 now\n"
    assert said in printed.out
    assert not printed.err  # neither a switch nor a warning
    # its first end was evaluated too, which draws none of the random numbers of training
    file = tmp_path / "twice" / "eval.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for line in lines if '"step": 3,' not in line))
    assert_same(tmp_path / "whole", tmp_path / "twice")


def test_only_what_is_given_is_compared_and_a_file_counts_as_given(
    maze_run, tmp_path, monkeypatch, capsys
):
    out, file = copied(maze_run, tmp_path), tmp_path / "run.toml"
    file.write_text("objective = 'maxpo'\nk = 2\neval_every = 3\nsteps = 6\n")
    monkeypatch.chdir(tmp_path)
    # Not the other options of the job; the folder by another name, a task by its default.
    more = ["--out", str(out), "--config", str(file)]
    assert resume("run", *more, *"--device auto --task maze".split()) == 0
    said = "options: the run's own, from its config.json, but for eval_every: 2 before, 3 now\n"
    assert said in capsys.readouterr().out
    file.write_text("kl_coef = 0.2\n")
    assert resume("run", "--config", str(file)) == 2
    assert "(kl_coef: 0.0 before, 0.2 now)" in capsys.readouterr().err


def test_another_objective_or_loss_on_resume_brings_its_own_defaults_and_state(
    maze_run, tmp_path, capsys
):
    out = copied(maze_run, tmp_path)

    def last_after(steps, *words):
        assert resume(out, "--steps", steps, "--allow-changes", *" ".join(words).split()) == 0
        last = read(out / "metrics.jsonl")[-1]
        assert last["step"] == int(steps)
        return last, capsys.readouterr()

    last, _ = last_after("7", "--objective riskpo --bundle-size 2")
    assert "riskpo_quantile_low" in last
    last, printed = last_after("8", "--objective pacs")
    assert "riskpo_quantile_low" not in last
    assert "aggregation: token_mean before, seq_mean_token_sum now" in printed.err
    last_after("9", "--objective maxpo --loss sapo --tau-positive 0.8")
    last_after("10", "--loss luspo")
    options = json.loads((out / "config.json").read_text())
    assert (options["loss"], options.get("tau_positive")) == ("luspo", None)
    assert options["aggregation"] == "seq_mean_token_sum"


def test_one_command_with_resume_auto_starts_a_run_resumes_it_and_says_when_it_is_finished(
    maze_run, tmp_path, monkeypatch, capsys
):
    out, auto = tmp_path / "run", ["--resume", "auto", "--allow-changes"]
    stop_at(monkeypatch, "step 4")
    assert maze(out, *auto) == 128 + signal.SIGTERM
    monkeypatch.undo()
    assert maze(out, *auto) == 0
    assert f"from {out / 'checkpoints' / 'step-000004'}\n" in capsys.readouterr().out
    assert_same(maze_run, out)
    assert maze(out, *auto) == 0
    printed = capsys.readouterr().out
    assert "the run is finished: it had done all its 6 steps" in printed
    assert "held-out prompts" in printed
    assert_same(maze_run, out)


def test_resume_auto_restarts_a_run_without_checkpoints_with_the_options_of_the_command(
    maze_run, tmp_path, capsys
):
    out = tmp_path / "run"
    out.mkdir()
    # a process that was killed while it wrote its first file
    for name in ("lock", ".config.json.partial"):
        (out / name).touch()
    flags = "--objective rloo --lr 0.5 --steps 0 --sft-steps 1 --save-every 0 --resume auto"
    assert run(out, *flags.split()) == 0
    shutil.rmtree(out / "checkpoints")
    assert maze(out, "--resume", "auto") == 0
    said = capsys.readouterr().err
    assert f"{out} has no checkpoint yet: the run restarts from the beginning" in said
    assert_same(maze_run, out)


def test_the_lock_of_a_process_that_is_ending_is_waited_for(tmp_path):
    first, said = contextlib.ExitStack(), []
    first.enter_context(locked(tmp_path))

    def end(message):
        said.append(message)
        first.close()

    with locked(tmp_path, limit=60, tell=end):
        [text] = said
    assert text.startswith(f"{tmp_path} is in use by process {os.getpid()} on ")
    assert text.endswith(": waiting up to 60 s for it to end")


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


STATE = "state/state-00000-00000.safetensors"


def halve(path):
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        (STATE, halve, "has changed since it was written"),
        (STATE, Path.unlink, "No such file"),
        ("checksums.json", halve, "cannot be read"),
        ("checksums.json", Path.unlink, "cannot be read"),
    ],
)
def test_damage_of_a_checkpoint_is_named(maze_run, tmp_path, file, damage, message):
    folder = Path(shutil.copytree(maze_run / "checkpoints" / "step-000004", tmp_path / "copy"))
    verify_checksums(folder)
    damage(folder / file)
    with pytest.raises(DamagedError, match=message) as error:
        verify_checksums(folder)
    assert str(folder / file) in str(error.value)


def test_a_run_without_a_whole_checkpoint_is_refused_and_keeps_its_metrics(
    maze_run, tmp_path, capsys
):
    out = copied(maze_run, tmp_path)
    for directory in RunFolder(out).checkpoints:
        flip_a_bit(directory / STATE)
    before = (out / "metrics.jsonl").read_bytes()
    assert resume(out) == 2
    assert "none of the" in capsys.readouterr().err
    (out / "checkpoints").rename(tmp_path / "elsewhere")
    assert resume(out) == 2
    assert "has metrics but no checkpoints" in capsys.readouterr().err
    assert (out / "metrics.jsonl").read_bytes() == before


def test_damaged_checkpoints_are_named_and_the_previous_one_is_used(
    maze_run, tmp_path, monkeypatch, capsys
):
    out = copied(maze_run, tmp_path)
    for name in ("step-000004", "step-000006"):
        flip_a_bit(out / "checkpoints" / name / STATE)
    stop_at(monkeypatch, "step 3")
    assert resume(out, "--keep-checkpoints", "1") == 143
    monkeypatch.undo()
    output = capsys.readouterr()
    file = out / "checkpoints" / "step-000004" / STATE
    assert f"{file} has changed since it was written" in output.err
    assert f"from {out / 'checkpoints' / 'step-000002'}\n" in output.out
    assert (out / "latest").resolve().name == "step-000003"
    assert {"step-000003", "damaged-step-000004"} <= {
        path.name for path in (out / "checkpoints").iterdir()
    }
    assert resume(out) == 0
    assert_same(maze_run, out)


def test_options_of_a_resume_that_saved_nothing_are_forgotten(maze_run, tmp_path, monkeypatch):
    out = copied(maze_run, tmp_path)
    shutil.rmtree(out / "checkpoints" / "step-000006")
    monkeypatch.setattr(Learner, "optim_step", lambda *_, **__: os._exit(9))
    assert exit_code(forked(lambda: resume(out, "--lr", "0.5", "--allow-changes"))) == 9
    monkeypatch.undo()
    assert resume(out) == 0
    assert_same(maze_run, out)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    table("""
    --lr 0.5 | 2 | trained with other options or files (lr: 0.0008 before, 0.5 now); --allow-changes
    --steps 8 | 2 | (steps: 6 before, 8 now, on which the learning rate of --lr-schedule cosine
        depends); --allow-changes
    --steps 8 --allow-changes | 0 | resumes with other options or files (steps: 6 before, 8 now, on
    --steps 3 --allow-changes | 2 | --steps must be at least 6, the number of steps done, got 3
    --token-budget 100 | 0 | will not be bitwise identical (token_budget: 4096 before, 100 now)
    --eval-every 3 | 0 |
    --eval-samples 9 | 2 | (eval_samples: 4 before, 9 now)
    --lora-rank 3 --allow-changes | 2 | has another shape (lora_rank: 0 before, 3 now), which cannot
        change on resuming
    """),
)
def test_other_options_on_resume(maze_run, tmp_path, capsys, flags, code, message):
    out = copied(maze_run, tmp_path)
    assert resume(out, *flags.split()) == int(code)
    error = capsys.readouterr().err
    assert message in error
    assert bool(error) == bool(message)
    options = json.loads((out / "config.json").read_text())
    steps = 8 if "--steps 8" in flags and code == "0" else 6
    assert (options["lora_rank"], options["lr"], options["steps"]) == (0, 8e-4, steps)


def test_a_run_and_its_resumption_keep_the_configuration_that_was_loaded(maze_run, tmp_path):
    start, out = Path(shutil.copytree(maze_run / "latest", tmp_path / "start")), tmp_path / "run"
    added = {"bos_token_id": 11, "pad_token_id": 0, "its_own": [1, None]}
    wanted = {}
    for name in ("config.json", "generation_config.json"):
        wanted[name] = json.loads((start / name).read_text()) | added
        (start / name).write_text(json.dumps(wanted[name]))
    flags = f"--out {out} --task maze --model {start} --sft-steps 0 --steps 1"
    assert train.main([*SMALL, *flags.split()]) == 0
    shutil.rmtree(start)
    assert resume(out, "--steps", "2", "--allow-changes") == 0
    for step in (0, 1, 2):
        for name, fields in wanted.items():
            kept = out / "checkpoints" / f"step-00000{step}" / name
            assert json.loads(kept.read_text()) == fields


def test_the_first_line_says_that_a_strangers_run_executes_code(tmp_path, capfd, monkeypatch):
    """The warning comes before the code: the objective's file is loaded while options are
    parsed."""
    objective = tmp_path / "objective.py"
    objective.write_text("import sys\nprint('it runs', file=sys.stderr)\nraise SystemExit('x')\n")
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.json").write_text(json.dumps({"objective": f"{objective}:advantage"}))
    assert resume(out) == 2
    assert "belongs to" not in capfd.readouterr().err
    monkeypatch.setattr("maxrl_fast.config.read.os.getuid", lambda: os.stat(out).st_uid + 1)
    assert resume(out) == 2
    first, second, *_ = capfd.readouterr().err.splitlines()
    assert first.startswith(f"warning: {out} belongs to ")
    assert f"uid {os.stat(out).st_uid}" in first
    assert first.endswith("the code that its config.json names runs with your rights")
    assert second == "it runs"


def test_the_newest_the_best_and_the_first_checkpoints_are_kept(tmp_path, monkeypatch):
    rmtree = shutil.rmtree

    def refused(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError("in use")
        rmtree(path, ignore_errors=True)

    monkeypatch.setattr(Progress, "is_best", lambda self, step: step == 3)
    monkeypatch.setattr("maxrl_fast.job.checkpoints.shutil.rmtree", refused)
    flags = "--objective rloo --sft-steps 0 --save-every 1 --keep-checkpoints 2 --eval-every 1"
    assert run(tmp_path / "run", *flags.split()) == 0
    kept = {path.name for path in RunFolder(tmp_path / "run").checkpoints}
    assert kept == {"step-000000", "step-000003", "step-000005", "step-000006"}
    assert (tmp_path / "run" / "best").resolve().name == "step-000003"


def test_the_best_evaluation_is_the_earliest_with_the_highest_mean_reward():
    """One on a part of the prompts, at steps 3 and 5, is never the best."""
    passes = {0: 0.5, 2: 0.5, 3: 0.9, 4: 0.7, 5: 0.95, 6: 0.6, 8: 0.7}
    sizes = {step: 8 if step in (3, 5) else 16 for step in passes}
    progress = Progress(
        evaluations={i: {"pass_at_k": {"1": p}, "num_prompts": sizes[i]} for i, p in passes.items()}
    )
    assert [step for step in passes if progress.is_best(step)] == [0, 4]
    progress.evaluations[8]["max_at_k"] = {"1": 3.5}  # of rewards other than 0 and 1
    assert progress.is_best(8)


def test_a_run_evaluates_on_a_part_of_the_prompts_at_each_quarter(tmp_path, monkeypatch):
    """33 of 64 prompts, 3 x 33 x 1 of at most 100 samples. The first evaluation's samples of these
    prompts have the same random numbers, and a stopped run resumes with the same evaluations."""
    job = "--maze-size 7 --layers 1 --hidden-size 16 --intermediate-size 16 --heads 2".split()
    job += "--kv-heads 1 --sft-steps 2 --steps 5 --prompts 50 --rollouts 8 --k 2".split()
    job += "--eval-prompts 64 --eval-samples 1 --threads 1 --lr 1e-9 --save-every 1".split()
    assert train.main([*job, "--out", str(tmp_path / "whole")]) == 0
    evaluations = read(tmp_path / "whole" / "eval.jsonl")
    sizes = [(x["step"], x["num_prompts"]) for x in evaluations]
    assert sizes == [(0, 64), (2, 33), (4, 33), (5, 64)]
    by_step = {x["step"]: x for x in read(tmp_path / "whole" / "pass_rates.jsonl")}
    assert sorted(by_step) == [0, 5]
    # at this learning rate the policy stays as it is
    assert evaluations[1]["pass_at_k"]["1"] == sum(by_step[0]["num_correct"][:33]) / 33
    stop_and_resume(monkeypatch, tmp_path / "stopped", job, "step 3")
    assert read(tmp_path / "stopped" / "eval.jsonl") == evaluations


def test_a_full_disk_stops_the_run_and_keeps_the_last_good_checkpoint(
    maze_run, tmp_path, monkeypatch, capfd
):
    out = tmp_path / "run"
    stop_at(monkeypatch, "step 3")
    assert maze(out) == 143
    monkeypatch.undo()

    def on_a_full_disk():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        return resume(out, "--save-every", "1")

    assert exit_code(forked(on_a_full_disk)) == 1
    sentence, checkpoints = capfd.readouterr().err.splitlines()[-1], out / "checkpoints"
    assert f"error: cannot write the checkpoint {checkpoints / 'step-000004'}: " in sentence
    assert "File too large" in sentence
    assert f"the last good checkpoint is {checkpoints / 'step-000003'}" in sentence
    assert not list(checkpoints.glob(".*"))  # the incomplete checkpoint was removed
    assert resume(out) == 0
    assert_same(maze_run, out)


def test_a_second_process_in_one_folder_is_refused(maze_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(launch, "LOCK_LIMIT", 0.5)
    out = copied(maze_run, tmp_path)
    with locked(out):
        assert (resume(out), maze(out)) == (2, 2)
    errors = capsys.readouterr().err
    assert f"{out} is in use by process {os.getpid()} on " in errors
    assert "holds another run" in errors

    def die():
        with locked(out):
            os._exit(9)

    assert exit_code(forked(die)) == 9  # the lock of a dead process blocks nobody
    assert f"process {os.getpid()} on " not in (out / "lock").read_text()
    assert resume(out) == 0


def test_a_moved_project_resumes_and_changed_contents_do_not(tmp_path, monkeypatch, capsys):
    task = MazeTask(5)

    def save(folder, model):
        files = task.tokenizer_files()
        save_checkpoint(folder / "m", model.config, model.weights(), files, task.stop_ids)

    flags, folder = "--model m --task maze --objective own.py:f".split(), tmp_path / "before"
    save(folder, tiny_decoder())
    (folder / "own.py").write_text("def f(rewards):\n    return rewards - rewards.mean(1, True)\n")
    monkeypatch.chdir(folder)
    more = "--sft-steps 1 --steps 1 --lr-schedule constant --out o".split()
    assert train.main([*base(), *flags, *more]) == 0
    folder = folder.rename(tmp_path / "after")
    monkeypatch.chdir(folder)
    assert resume("o", *flags, "--steps", "2") == 0
    save(folder / "else", tiny_decoder(num_hidden_layers=1))
    capsys.readouterr()
    assert resume("o", *flags, "--steps", "3", "--model", "else/m") == 2
    assert "the file of --model: changed" in " ".join(capsys.readouterr().err.split())
