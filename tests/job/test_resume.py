"""A run that is stopped and resumed has bitwise the same samples, metrics and weights as a run that
was not stopped.
"""

import contextlib
import errno
import json
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from maxrl_fast import train
from maxrl_fast.config.changes import checkpoints_of
from maxrl_fast.errors import NonFiniteError
from maxrl_fast.evaluation.kept_samples import sample_lines
from maxrl_fast.job import launch
from maxrl_fast.job import learner_state as state
from maxrl_fast.job.progress import Progress
from maxrl_fast.job.run_files import RunFiles
from maxrl_fast.runtime.files import DamagedError, locked, verify_checksums
from maxrl_fast.tasks.guess import GuessEpisodes
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.training.learner import Learner
from tests.models import save_checkpoint, tiny_decoder
from tests.test_train import SMALL, base, read, without_timings

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
JOB = [
    *base(),
    *"--sft-steps 40 --steps 6 --eval-every 2 --save-every 2 --keep-checkpoints 0".split(),
]
# What each keeps from step to step: adapters and a reference policy, which may be reset; a critic;
# quantiles; the anchor of an entropy; draws of tokens.
CHAIN = "--task chain --chain-length 8 --reward-threshold .1 --updates-per-step 2 --objective "
OBJECTIVES = {
    "maxpo": "--objective maxpo --k 2",
    "lora": "--objective maxrl --kl-coef 0.1 --lora-rank 2 --loss gspo",
    "pacs": "--objective pacs_paper --ref-reset-interval 4 --updates-per-step 2",
    "critic": "--objective ppo --updates-per-step 2 --gae-lambda 0.9",
    "riskpo": f"{CHAIN} riskpo --bundle-size 2",
    "simko": f"{CHAIN} grpo --loss simko --loss-options alpha=.2 k=2 tau=.4 --siren .5",
    "clip_cov": f"{CHAIN} grpo --loss clip_cov --loss-options share=.1 low=0 high=9 "
    "--top-entropy .3",
}


def run(out, *flags):
    return train.main([*JOB, "--out", str(out), *flags])


def assert_same(one, two):
    for log in "metrics eval eval_prompts pass_rates warnings".split():
        logs = [path / f"{log}.jsonl" for path in (one, two)]
        first, second = (without_timings(x) if x.exists() else None for x in logs)
        assert first == second, log
    assert read(one / "rollouts.jsonl") == read(two / "rollouts.jsonl") != []
    for name in ("model.safetensors", "state/state-00000-00000.safetensors"):
        expected, tensors = load_file(one / "latest" / name), load_file(two / "latest" / name)
        assert expected.keys() == tensors.keys()
        for key, tensor in expected.items():
            assert torch.equal(tensor, tensors[key]), key
    assert os.readlink(one / "latest") == os.readlink(two / "latest")
    assert os.readlink(one / "best") == os.readlink(two / "best")


def stop_at(monkeypatch, when, number=signal.SIGTERM):
    """Send the signal during this update."""
    update = Learner.update

    def stopped(self, *arguments, **options):
        if options["when"] == when:
            signal.raise_signal(number)
        return update(self, *arguments, **options)

    monkeypatch.setattr(Learner, "update", stopped)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder of an uninterrupted run of maxpo."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert run(out, *OBJECTIVES["maxpo"].split()) == 0
    return out


def stop_and_resume(monkeypatch, out, job, *stops):
    arguments = [*job, "--out", str(out)]
    for when in stops:
        stop_at(monkeypatch, when)
        assert train.main(arguments) == 128 + signal.SIGTERM
        monkeypatch.undo()
        kind, _, number = when.rpartition(" step ")
        name = f"{kind.replace(' ', '-')}-" if kind else "step-"
        assert (out / "latest").resolve().name == f"{name}{int(number.split()[-1]):06d}"
        torch.rand(3), random.random()  # other draws of the process must not matter
        arguments = ["--resume", str(out)]
    assert train.main(arguments) == 0


def resumes_bitwise(monkeypatch, folder, job, *stops):
    """Compare a whole run of a job with one that is stopped during each of these updates. A
    diagnosis of the whole run changes nothing.
    """
    assert train.main([*job, "--diagnose-every", "1", "--out", str(folder / "whole")]) == 0
    stop_and_resume(monkeypatch, folder / "stopped", job, *stops)
    assert_same(folder / "whole", folder / "stopped")
    return read(folder / "whole" / "metrics.jsonl")


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_stopped_run_resumes_bitwise(tmp_path, monkeypatch, name):
    flags, is_chain = OBJECTIVES[name].split(), CHAIN in OBJECTIVES[name]
    job = [*JOB[2:], *flags, "--sft-steps", "0"] if is_chain else [*JOB, *flags]
    stops = ("step 3",) if is_chain else ("warm start step 23", "step 1", "step 4")
    steps = resumes_bitwise(monkeypatch, tmp_path, job, *stops)
    assert any(step["grad_norm"] > 0 for step in steps)
    if name == "riskpo":
        assert len({step["riskpo_quantile_high"] for step in steps}) > 1
    if name == "simko":
        assert len({step["siren_anchor"] for step in steps}) == 1
        assert steps[-1]["siren_entropy"] != steps[-1]["siren_anchor"] > 0
    if name in ("simko", "clip_cov"):
        assert any(step["tokens_chosen"] >= 2 for step in steps)
    assert all(("entropy_threshold" in step) == (name == "clip_cov") for step in steps)


def slowed(monkeypatch, name, wait):
    """Let the writing of one checkpoint call `wait` first."""
    write = state.save_state

    def slow(folder, tensors, rank):
        if name in str(folder):
            wait()
        write(folder, tensors, rank)

    monkeypatch.setattr("maxrl_fast.job.checkpoints.save_state", slow)


def test_training_goes_on_while_a_checkpoint_is_written(whole, tmp_path, monkeypatch):
    """The checkpoint of step 2 is written after the update of step 3, and has the state of step
    2.
    """
    update, has_updated, waited = Learner.update, threading.Event(), []

    def spy(self, *arguments, **options):
        metrics = update(self, *arguments, **options)
        if options["when"] == "step 3":
            has_updated.set()
        return metrics

    monkeypatch.setattr(Learner, "update", spy)
    slowed(monkeypatch, "step-000002", lambda: waited.append(has_updated.wait(60)))
    assert run(tmp_path / "run", *OBJECTIVES["maxpo"].split()) == 0
    assert waited == [True]
    assert_same(whole, tmp_path / "run")
    folders = [path / "checkpoints" / "step-000002" for path in (whole, tmp_path / "run")]
    for name in ("model.safetensors", STATE):
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    size, _ = json.loads((folders[1] / "progress.json").read_text())["logs"]["metrics"]
    lines = (tmp_path / "run" / "metrics.jsonl").read_bytes()[:size].splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_an_error_waits_for_the_checkpoint_that_is_being_written(tmp_path, monkeypatch, capsys):
    update = Learner.update

    def fail(self, *arguments, **options):
        if options["when"] == "step 3":
            raise NonFiniteError("the loss is nan")
        return update(self, *arguments, **options)

    monkeypatch.setattr(Learner, "update", fail)
    slowed(monkeypatch, "step-000002", lambda: time.sleep(0.5))
    assert run(tmp_path / "run", *OBJECTIVES["maxpo"].split()) == 1
    newest = tmp_path / "run" / "checkpoints" / "step-000002"
    assert f"the loss is nan; the last good checkpoint is {newest}" in capsys.readouterr().err
    assert (tmp_path / "run" / "latest").resolve() == newest


def test_a_run_extended_at_a_constant_rate_equals_a_longer_run(tmp_path, capsys):
    flags = "--objective maxpo --k 2 --lr-schedule constant --eval-every 0".split()
    assert run(tmp_path / "whole", *flags) == 0
    assert run(tmp_path / "twice", *flags, "--steps", "3") == 0
    capsys.readouterr()
    assert train.main(["--resume", str(tmp_path / "twice"), "--steps", "6"]) == 0
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
    whole, tmp_path, monkeypatch, capsys
):
    out, file = copied(whole, tmp_path), tmp_path / "run.toml"
    file.write_text("objective = 'maxpo'\nk = 2\neval_every = 3\nsteps = 6\n")
    monkeypatch.chdir(tmp_path)
    # Not the other options of JOB; the folder by another name, a task by its default.
    more = ["--resume", "run", "--out", str(out), "--config", str(file)]
    assert train.main([*more, *"--device auto --task maze".split()]) == 0
    assert (
        "options: the run's own, from its config.json, but for eval_every: 2 before, 3 now\n"
        in capsys.readouterr().out
    )
    file.write_text("kl_coef = 0.2\n")
    assert train.main(["--resume", "run", "--config", str(file)]) == 2
    assert "(kl_coef: 0.0 before, 0.2 now)" in capsys.readouterr().err


def test_another_objective_on_resume_brings_its_own_defaults(whole, tmp_path, capsys):
    out = copied(whole, tmp_path)
    changed = "--objective pacs --steps 7 --allow-changes".split()
    assert train.main(["--resume", str(out), *changed]) == 0
    printed = capsys.readouterr()
    assert (
        "loss: ppo before, reinforce now; aggregation: token_mean before, seq_mean_token_sum now"
        in printed.err
    )
    assert "learning rate" in printed.out
    assert "in the warm start" not in printed.out  # which is over


def test_another_objective_on_resume_begins_with_its_own_state(tmp_path, capsys):
    flags = "--objective grpo --steps 1".split()
    assert run(tmp_path / "run", *flags) == 0
    for number, name in enumerate(
        ("riskpo --bundle-size 2", "rloo", "riskpo --bundle-size 1"), start=2
    ):
        changed = ["--objective", *name.split(), "--steps", str(number), "--allow-changes"]
        assert train.main(["--resume", str(tmp_path / "run"), *changed]) == 0, (
            capsys.readouterr().err
        )
        last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
        assert last["step"] == number
        assert ("riskpo_quantile_low" in last) == name.startswith("riskpo")


def test_another_loss_on_resume_brings_its_own_defaults(tmp_path, capsys):
    flags = "--objective rloo --loss sapo --loss-options tau_positive=0.8 --steps 1".split()
    assert run(tmp_path / "run", *flags) == 0
    changed = "--loss luspo --steps 2 --allow-changes".split()
    assert train.main(["--resume", str(tmp_path / "run"), *changed]) == 0
    options = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (options["loss"], options.get("loss_options")) == ("luspo", None)
    assert options["aggregation"] == "seq_mean_token_sum"
    assert "aggregation: " in capsys.readouterr().err  # what changes is said


def test_one_command_with_resume_auto_starts_a_run_resumes_it_and_says_when_it_is_finished(
    whole, tmp_path, monkeypatch, capsys
):
    out, command = (
        tmp_path / "run",
        [*OBJECTIVES["maxpo"].split(), "--resume", "auto", "--allow-changes"],
    )
    stop_at(monkeypatch, "step 4")
    assert run(out, *command) == 128 + signal.SIGTERM
    monkeypatch.undo()
    assert run(out, *command) == 0
    assert f"from {out / 'checkpoints' / 'step-000004'}\n" in capsys.readouterr().out
    assert_same(whole, out)
    assert run(out, *command) == 0
    printed = capsys.readouterr().out
    assert "the run is finished: it had done all its 6 steps" in printed
    assert "held-out prompts" in printed
    assert_same(whole, out)


def test_resume_auto_restarts_a_run_without_checkpoints_with_the_options_of_the_command(
    whole, tmp_path, capsys
):
    out = tmp_path / "run"
    out.mkdir()
    # a process that was killed while it wrote its first file
    for name in ("lock", ".config.json.partial"):
        (out / name).touch()
    assert (
        run(out, *"--objective rloo --lr 0.5 --steps 0 --save-every 0 --resume auto".split()) == 0
    )
    shutil.rmtree(out / "checkpoints")
    assert run(out, *OBJECTIVES["maxpo"].split(), "--resume", "auto") == 0
    assert (
        f"{out} has no checkpoint yet: the run restarts from the beginning"
        in capsys.readouterr().err
    )
    assert_same(whole, out)


def test_resume_auto_is_refused_with_other_options_and_in_a_folder_of_something_else(
    whole, tmp_path, capsys
):
    out = copied(whole, tmp_path)
    assert run(out, *OBJECTIVES["maxpo"].split(), *"--resume auto --lr 0.5".split()) == 2
    assert "(lr: 0.0003 before, 0.5 now)" in capsys.readouterr().err
    assert train.main([*JOB, "--resume", "auto"]) == 2
    assert "--resume auto needs --out DIR" in capsys.readouterr().err
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").touch()
    assert run(tmp_path / "notes", *"--k 2 --resume auto".split()) == 2
    assert "which holds something else" in capsys.readouterr().err


def test_the_lock_of_a_process_that_is_ending_is_waited_for(tmp_path):
    first, said = contextlib.ExitStack(), []
    first.enter_context(locked(tmp_path))

    def end(message):
        said.append(message)
        first.close()

    with locked(tmp_path, limit=60, tell=end):
        assert said == [
            f"{tmp_path} is in use by process {os.getpid()} on {socket.gethostname()}: waiting up "
            "to 60 s for it to end"
        ]


def copied(run, tmp_path):
    return Path(shutil.copytree(run, tmp_path / "run", symlinks=True))


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


STATE = "state/state-00000-00000.safetensors"


def halve(path):
    os.truncate(path, path.stat().st_size // 2)


def listed(name):
    """Replace the list of files by one that has this name."""
    return lambda path: path.write_text(json.dumps({name: {"bytes": 1, "sha256": ""}}))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        (STATE, flip_a_bit, "has changed since it was written"),
        (STATE, halve, r"has [\d,]+ bytes, [\d,]+ were written"),
        (STATE, Path.unlink, "is missing"),
        ("model.safetensors", flip_a_bit, "has changed since it was written"),
        ("progress.json", flip_a_bit, "has changed since it was written"),
        ("checksums.json", halve, "cannot be read"),
        ("checksums.json", Path.unlink, "is missing"),
        ("checksums.json", listed("../../config.json"), "not a file of"),
        ("checksums.json", listed("/dev/zero"), "not a file of"),
    ],
)
def test_damage_of_a_checkpoint_is_named(whole, tmp_path, file, damage, message):
    folder = Path(shutil.copytree(whole / "checkpoints" / "step-000004", tmp_path / "copy"))
    verify_checksums(folder)
    damage(folder / file)
    with pytest.raises(DamagedError, match=message) as error:
        verify_checksums(folder)
    assert str(folder / file) in str(error.value)


def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(whole, tmp_path, capsys):
    out = copied(whole, tmp_path)
    shutil.rmtree(out / "checkpoints" / "step-000006")
    file = out / "checkpoints" / "step-000004" / STATE
    flip_a_bit(file)
    assert train.main(["--resume", str(out)]) == 0
    output = capsys.readouterr()
    warning = next(line for line in output.err.splitlines() if line.startswith("warning: "))
    assert f"{file} has changed since it was written" in warning
    assert f"from {out / 'checkpoints' / 'step-000002'}\n" in output.out
    assert_same(whole, out)


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(whole, tmp_path, capsys):
    out = copied(whole, tmp_path)
    for directory in checkpoints_of(out):
        flip_a_bit(directory / STATE)
    before = (out / "metrics.jsonl").read_bytes()
    assert train.main(["--resume", str(out)]) == 2
    assert "none of the" in capsys.readouterr().err
    assert (out / "metrics.jsonl").read_bytes() == before


def test_a_changed_log_is_refused_by_name(whole, tmp_path, capsys):
    out = copied(whole, tmp_path)
    flip_a_bit(out / "metrics.jsonl")
    assert train.main(["--resume", str(out)]) == 2
    assert re.search(
        r"metrics.jsonl must begin with the [\d,]+ bytes that it had", capsys.readouterr().err
    )
    (out / "metrics.jsonl").unlink()
    assert train.main(["--resume", str(out)]) == 0
    assert (
        f"warning: {out / 'metrics.jsonl'} is missing: it is recreated" in capsys.readouterr().err
    )


def test_damaged_checkpoints_do_not_displace_good_ones(whole, tmp_path, monkeypatch):
    out = copied(whole, tmp_path)
    for name in ("step-000004", "step-000006"):
        flip_a_bit(out / "checkpoints" / name / STATE)
    stop_at(monkeypatch, "step 3")
    assert train.main(["--resume", str(out), "--keep-checkpoints", "1"]) == 143
    monkeypatch.undo()
    assert (out / "latest").resolve().name == "step-000003"
    assert {"step-000003", "damaged-step-000004"} <= {
        path.name for path in (out / "checkpoints").iterdir()
    }
    assert train.main(["--resume", str(out)]) == 0
    assert_same(whole, out)


def test_metrics_without_checkpoints_are_kept(whole, tmp_path, capsys):
    out = copied(whole, tmp_path)
    (out / "checkpoints").rename(tmp_path / "elsewhere")
    before = (out / "metrics.jsonl").read_bytes()
    assert train.main(["--resume", str(out)]) == 2
    assert "has metrics but no checkpoints" in capsys.readouterr().err
    assert (out / "metrics.jsonl").read_bytes() == before


def test_options_of_a_resume_that_saved_nothing_are_forgotten(whole, tmp_path, monkeypatch):
    """A run that was resumed with other options, and killed before it saved, resumes with its own
    options.
    """
    out = copied(whole, tmp_path)
    shutil.rmtree(out / "checkpoints" / "step-000006")
    monkeypatch.setattr(Learner, "update", lambda *_, **__: os._exit(9))
    child = os.fork()
    if not child:
        train.main(["--resume", str(out), "--lr", "0.5", "--allow-changes"])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    monkeypatch.undo()
    assert train.main(["--resume", str(out)]) == 0
    assert_same(whole, out)


@pytest.mark.parametrize("name", ["replace_symlink", "RunFiles.write_config", "RunFiles.log_marks"])
def test_a_full_disk_is_reported_for_files_beside_a_checkpoint(tmp_path, monkeypatch, capsys, name):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"maxrl_fast.job.checkpoints.{name}", full)
    if name == "RunFiles.write_config":  # while RunFiles is built it would be bad input
        monkeypatch.setattr("maxrl_fast.job.run_files.RunFiles.__init__", with_write_config(full))
    assert run(tmp_path / "run", *OBJECTIVES["maxpo"].split()) == 1
    assert re.search(
        r"error: cannot write .*No space left on device.* checkpoint", capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("write", "code", "number"),
    [
        ("runtime.files.os.pwrite", 1, errno.ENOSPC),
        ("job.run_files.write_json", 2, errno.EROFS),
        ("job.run_files.LogFile", 1, errno.ENOSPC),
        ("job.tensorboard.TensorBoard", 2, errno.EROFS),
    ],
)
def test_a_disk_that_refuses_the_first_writes_gives_one_sentence(
    tmp_path, monkeypatch, capfd, write, code, number
):
    error = OSError(number, os.strerror(number))

    def refuse(*_):
        raise error

    monkeypatch.setattr(f"maxrl_fast.{write}", refuse)
    flags = [*OBJECTIVES["maxpo"].split(), "--log-to", "tensorboard"]
    assert run(tmp_path / "run", *flags) == code
    assert capfd.readouterr().err == f"error: cannot write to --out {tmp_path / 'run'}: {error}\n"


def test_a_folder_in_place_of_a_link_gives_one_sentence(whole, tmp_path, monkeypatch, capfd):
    out = copied(whole, tmp_path)
    (out / "latest").unlink()
    (out / "latest").mkdir()
    assert train.main(["--resume", str(out)]) == 2
    assert (
        capfd.readouterr().err == f"error: {out / 'latest'} must be a symbolic link, got a folder\n"
    )
    update = Learner.update

    def in_the_way(self, *arguments, **options):
        (tmp_path / "new" / "latest").mkdir(exist_ok=True)
        return update(self, *arguments, **options)

    monkeypatch.setattr(Learner, "update", in_the_way)
    assert run(tmp_path / "new", *OBJECTIVES["maxpo"].split(), "--sft-steps", "1") == 1
    output = capfd.readouterr()
    assert output.err.startswith(f"error: cannot write {tmp_path / 'new/latest'}: ")
    assert output.err.count("\n") == 1
    assert re.search("checkpoint +none was written", output.out)


def with_write_config(full):
    """Return RunFiles.__init__ with a disk that is full only after it."""
    start = RunFiles.__init__

    def started(self, *arguments):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunFiles, "write_config", lambda self: None)
            start(self, *arguments)

    return started


def test_an_old_checkpoint_that_cannot_be_removed_is_ignored(whole, tmp_path, monkeypatch):
    rmtree = shutil.rmtree

    def refused(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError("in use")
        rmtree(path, ignore_errors=True)

    monkeypatch.setattr("maxrl_fast.job.checkpoints.shutil.rmtree", refused)
    assert run(tmp_path / "run", *OBJECTIVES["maxpo"].split(), "--keep-checkpoints", "1") == 0
    monkeypatch.undo()
    assert_same(whole, tmp_path / "run")


def test_warnings_are_the_same_after_resuming(tmp_path, monkeypatch):
    reward = tmp_path / "reward.py"
    reward.write_text("def nothing(prompt, response):\n    return 0\n")
    flags = ["--reward", f"{reward}:nothing"]
    job = [*JOB, *"--objective rloo --reward-workers 1 --steps 14".split(), *flags]
    resumes_bitwise(monkeypatch, tmp_path, job, "step 12")
    warnings = read(tmp_path / "whole" / "warnings.jsonl")
    assert [record["kind"] for record in warnings] == ["equal_rewards", "no_reward"]


def test_a_folder_with_only_a_lock_is_accepted(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").write_text("process 1 on nowhere\n")
    assert run(tmp_path / "run", *OBJECTIVES["maxpo"].split(), "--steps", "1") == 0


def test_a_run_killed_before_its_first_checkpoint_restarts(whole, tmp_path, capsys):
    out = copied(whole, tmp_path)
    shutil.rmtree(out / "checkpoints")
    for log in ("metrics", "eval"):
        os.truncate(out / f"{log}.jsonl", 0)
    assert train.main(["--resume", str(out)]) == 0
    assert "has no checkpoint yet" in capsys.readouterr().err
    assert_same(whole, out)


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (
            "--lr 0.5",
            2,
            "trained with other options or files (lr: 0.0003 before, 0.5 now); --allow-changes",
        ),
        ("--seed 1 --beta2 0.5", 2, "(beta2: 0.99 before, 0.5 now; seed: 0 before, 1 now)"),
        (
            "--steps 8",
            2,
            "(steps: 6 before, 8 now, on which the learning rate of --lr-schedule cosine depends); "
            "--allow-changes",
        ),
        (
            "--steps 8 --allow-changes",
            0,
            "resumes with other options or files (steps: 6 before, 8 now, on which",
        ),
        (
            "--steps 3 --allow-changes",
            2,
            "--steps must be at least 6, the number of steps done, got 3",
        ),
        (
            "--token-budget 100",
            0,
            "will not be bitwise identical (token_budget: 4096 before, 100 now)",
        ),
        ("--eval-every 3", 0, ""),
        # it would rewrite the last evaluation
        ("--eval-prompts 9", 2, "(eval_prompts: 6 before, 9 now)"),
        ("--eval-samples 9", 2, "(eval_samples: 4 before, 9 now)"),
        ("--out elsewhere", 2, "--resume writes into the run's own folder"),
        (
            "--lora-rank 3 --allow-changes",
            2,
            "has another shape (lora_rank: 0 before, 3 now), which cannot change on resuming",
        ),
        ("--layers 3 --allow-changes", 2, "has another shape (layers: 2 before, 3 now)"),
    ],
)
def test_other_options_on_resume(whole, tmp_path, capsys, flags, code, message):
    out = copied(whole, tmp_path)
    assert train.main(["--resume", str(out), *flags.split()]) == code
    error = capsys.readouterr().err
    assert message in error
    assert bool(error) == bool(message)
    options = json.loads((out / "config.json").read_text())
    assert (options["lora_rank"], options["lr"], options["steps"]) == (
        0,
        3e-4,
        8 if "--steps 8" in flags and not code else 6,
    )


def test_a_run_and_its_resumption_keep_the_configuration_that_was_loaded(whole, tmp_path):
    start, out = (Path(shutil.copytree(whole / "latest", tmp_path / "start")), tmp_path / "run")
    added = {"bos_token_id": 11, "pad_token_id": 0, "its_own": [1, None]}
    wanted = {}
    for name in ("config.json", "generation_config.json"):
        wanted[name] = json.loads((start / name).read_text()) | added
        (start / name).write_text(json.dumps(wanted[name]))
    flags = f"--out {out} --task maze --model {start} --sft-steps 0 --steps 1"
    assert train.main([*SMALL, *flags.split()]) == 0
    shutil.rmtree(start)
    assert train.main(["--resume", str(out), "--steps", "2", "--allow-changes"]) == 0
    for step in (0, 1, 2):
        for name, fields in wanted.items():
            assert (
                json.loads((out / "checkpoints" / f"step-00000{step}" / name).read_text()) == fields
            )


def test_only_a_runs_folder_is_resumed(tmp_path, capsys):
    assert train.main(["--resume", str(tmp_path)]) == 2
    assert "--resume must be the folder of a run" in capsys.readouterr().err


def test_the_first_line_says_which_code_a_strangers_run_executes(tmp_path, capfd, monkeypatch):
    """The warning comes before the code: the objective's file is loaded while options are
    parsed.
    """
    objective = tmp_path / "objective.py"
    objective.write_text(
        "import sys\nprint('it runs', file=sys.stderr)\nraise SystemExit('objective')\n"
    )
    reward = f"{tmp_path / 'reward.py'}:score"
    out = tmp_path / "run"
    out.mkdir()
    own = {
        "objective": f"{objective}:advantage",
        "task": "maze",
        "reward": reward,
        "rollout": "engine.py:Engine",
    }
    (out / "config.json").write_text(json.dumps(own))
    assert train.main(["--resume", str(out)]) == 2
    assert "belongs to" not in capfd.readouterr().err
    monkeypatch.setattr("maxrl_fast.config.parse.os.getuid", lambda: os.stat(out).st_uid + 1)
    assert train.main(["--resume", str(out)]) == 2
    first, second, *_ = capfd.readouterr().err.splitlines()
    assert f"uid {os.stat(out).st_uid}" in first
    assert first.startswith(f"warning: {out} belongs to ")
    assert first.endswith(
        f"runs with your rights: objective {objective}:advantage, reward {reward}, rollout "
        "engine.py:Engine"
    )
    assert second == "it runs"


def test_the_newest_the_best_and_the_first_checkpoints_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(Progress, "is_best", lambda self, step: step == 3)
    flags = "--objective rloo --save-every 1 --keep-checkpoints 2 --eval-every 1"
    assert run(tmp_path / "run", *flags.split()) == 0
    kept = {path.name for path in checkpoints_of(tmp_path / "run")}
    assert kept == {"step-000000", "step-000003", "step-000005", "step-000006"}
    assert (tmp_path / "run" / "best").resolve().name == "step-000003"


def test_the_best_evaluation_is_the_earliest_with_the_highest_mean_reward():
    """One on a part of the prompts, at steps 3 and 5, is never the best."""
    passes = {0: 0.5, 2: 0.5, 3: 0.9, 4: 0.7, 5: 0.95, 6: 0.6, 8: 0.7}
    progress = Progress(
        evaluations={
            step: {"pass_at_k": {"1": p}, "num_prompts": 8 if step in (3, 5) else 16}
            for step, p in passes.items()
        }
    )
    assert [step for step in passes if progress.is_best(step)] == [0, 4]
    progress.evaluations[8]["max_at_k"] = {"1": 3.5}  # of rewards other than 0 and 1
    assert progress.is_best(8)


def test_a_run_evaluates_on_a_part_of_the_prompts_at_each_quarter(tmp_path, capfd, monkeypatch):
    """33 of 64 prompts, 3 x 33 x 1 of at most 100 samples. The first evaluation's samples of these
    prompts have the same random numbers, and a killed run resumes with the same evaluations.
    """
    few = "--maze-size 5 --layers 1 --hidden-size 16 --intermediate-size 16 --heads 2 --kv-heads 1"
    job = [*few.split(), *"--sft-steps 2 --steps 5 --prompts 50 --rollouts 8 --k 2".split()]
    job += [*"--eval-prompts 64 --eval-samples 1 --threads 1 --lr 1e-9 --save-every 1".split()]
    assert train.main([*job, "--out", str(tmp_path / "whole")]) == 0
    shown, out = capfd.readouterr().out, tmp_path / "whole"
    assert "and every 2 steps on 33 prompts" in shown
    evaluations, samples = read(out / "eval.jsonl"), read(out / "samples.jsonl")
    sizes = [(x["step"], x["num_prompts"]) for x in evaluations]
    assert sizes == [(0, 64), (2, 33), (4, 33), (5, 64)]
    rates = re.findall(r"step (\d): pass@1 (\S+)  \(33 of 64 prompts\)", shown)
    assert rates == [(step, f"{evaluations[1]['pass_at_k']['1']:.3f}") for step in "0245"]
    assert all(line in shown for line in sample_lines(samples[0], 80))
    assert shown.endswith(f"next        maxrl-fast report {out}\n")
    by_step = {x["step"]: x for x in read(tmp_path / "whole" / "pass_rates.jsonl")}
    assert sorted(by_step) == [0, 5]
    # at this learning rate the policy stays as it is
    assert evaluations[1]["pass_at_k"]["1"] == sum(by_step[0]["num_correct"][:33]) / 33
    stop_at(monkeypatch, "step 3")
    assert train.main([*job, "--out", str(tmp_path / "stopped")]) == 143
    monkeypatch.undo()
    assert train.main(["--resume", str(tmp_path / "stopped")]) == 0
    assert read(tmp_path / "stopped" / "eval.jsonl") == evaluations


def command(*arguments):
    return [sys.executable, "-m", "maxrl_fast.train", *arguments]


def started(*arguments, **options):
    return subprocess.Popen(command(*arguments), cwd=ROOT, stdout=subprocess.DEVNULL, **options)


def test_a_second_process_in_one_folder_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(launch, "LOCK_LIMIT", 0.5)
    out = tmp_path / "run"
    first = started(*JOB, *"--k 2 --steps 100000 --out".split(), str(out))
    try:
        wait_until((out / "metrics.jsonl").exists, first)
        for arguments in (["--resume", str(out)], [*JOB, "--k", "2", "--out", str(out)]):
            assert train.main(arguments) == 2
        errors = capsys.readouterr().err
        assert f"{out} is in use by process {first.pid} on " in errors
        assert "holds another run" in errors
    finally:
        first.kill()
        first.wait()
    # the lock of a dead process blocks nobody
    assert (out / "lock").read_text().startswith(f"process {first.pid} on ")
    # 2 if it had done more steps
    assert train.main(["--resume", str(out), "--steps", "30", "--allow-changes"]) in (0, 2)
    assert "in use" not in capsys.readouterr().err


def wait_until(holds, process, limit=120):
    start = time.monotonic()
    while not holds():
        assert process.poll() is None, process.returncode
        assert time.monotonic() - start < limit
        time.sleep(0.002)


def limit_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


def test_a_full_disk_stops_the_run_and_keeps_the_last_good_checkpoint(whole, tmp_path, monkeypatch):
    out = tmp_path / "run"
    stop_at(monkeypatch, "step 3")
    assert run(out, *OBJECTIVES["maxpo"].split()) == 143
    monkeypatch.undo()
    full = started(
        "--resume",
        str(out),
        "--save-every",
        "1",
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=limit_files,
    )
    _, error = full.communicate(timeout=120)
    assert full.returncode == 1
    sentence = error.splitlines()[-1]
    assert sentence.startswith(
        f"error: cannot write the checkpoint {out / 'checkpoints' / 'step-000004'}: "
    )
    assert "File too large" in sentence
    assert f"the last good checkpoint is {out / 'checkpoints' / 'step-000003'}" in sentence
    assert not list((out / "checkpoints").glob(".*"))  # the incomplete checkpoint was removed
    assert train.main(["--resume", str(out)]) == 0
    assert_same(whole, out)


def test_a_run_killed_four_times_ends_with_the_same_result(tmp_path):
    """Half of the kills happen while a checkpoint is being written, the others at random times."""
    job = [*SMALL, *"--sft-steps 10 --steps 150 --eval-every 50 --eval-prompts 3".split()]
    assert train.main([*job, "--out", str(tmp_path / "whole")]) == 0
    out, moments, num_in_saves = tmp_path / "killed", random.Random(0), 0
    arguments = [*job, "--save-every", "1", "--out", str(out)]
    for i in range(4):
        first_step = newest_step(out)
        process = started(*arguments)
        try:
            # A resume that did not load the checkpoint would begin with step 1.
            wait_until(lambda first=first_step: newest_step(out) > first, process)
            time.sleep(moments.uniform(0, 0.1))
            if i % 2:
                wait_until(lambda: partial(out), process)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == -signal.SIGKILL  # it was still running
        num_in_saves += bool(partial(out))
        arguments = ["--resume", str(out)]
    assert num_in_saves >= 1
    assert train.main(arguments) == 0
    assert_same(tmp_path / "whole", out)
    assert not partial(out)


KILLED = """
import importlib, os, signal, sys
from pathlib import Path
from maxrl_fast import train

module, name, out, *job = sys.argv[1:]
episodes = getattr(importlib.import_module(module), name)
submit = episodes.submit

def killed(self, sample, turn):
    submit(self, sample, turn)
    if (Path(out) / "checkpoints" / "step-000001").exists():
        os.kill(os.getpid(), signal.SIGKILL)

episodes.submit = killed
sys.exit(train.main([*job, "--out", out]))
"""


def resumes_after_a_kill_in_an_episode(episodes, whole, out, job):
    """Kill the job where a turn of a step after the first one is submitted, resume it, and compare
    it with a whole run.
    """
    words = [episodes.__module__, episodes.__name__, str(out), *job, "--save-every", "1"]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *words], cwd=ROOT, capture_output=True, timeout=300
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    assert not (out / "latest").resolve().samefile(whole / "latest")
    assert train.main(["--resume", str(out)]) == 0
    assert_same(whole, out)
    assert any("turns" in record for record in read(out / "rollouts.jsonl"))


def test_a_run_killed_in_an_episode_resumes_bitwise(tmp_path):
    job = "--task guess --objective maxrl --steps 6 --sft-steps 40 --keep-rollouts 16".split()
    job = [*JOB[: JOB.index("--maze-size")], *JOB[JOB.index("--maze-size") + 2 :], *job]
    assert train.main([*job, "--out", str(tmp_path / "whole")]) == 0
    folders = tmp_path / "whole", tmp_path / "killed"
    resumes_after_a_kill_in_an_episode(GuessEpisodes, *folders, job)


def newest_step(out):
    """Return the step of the newest complete checkpoint, or 0."""
    return max((int(path.name[5:]) for path in out.glob("checkpoints/step-*")), default=0)


def partial(out):
    """Return the names of incomplete checkpoints."""
    return (
        [name for name in os.listdir(out / "checkpoints") if name.startswith(".")]
        if (out / "checkpoints").exists()
        else []
    )


def test_a_moved_project_resumes_and_changed_contents_do_not(tmp_path, monkeypatch, capsys):
    task, model = MazeTask(5), tiny_decoder()
    flags = "--model m --task maze --objective own.py:f".split()
    folder = tmp_path / "before"
    save_checkpoint(
        folder / "m", model.config, model.weights(), task.tokenizer_files(), task.stop_ids
    )
    (folder / "own.py").write_text("def f(rewards):\n    return rewards - rewards.mean(1, True)\n")
    monkeypatch.chdir(folder)
    assert train.main([*base(), *flags, *"--steps 1 --lr-schedule constant --out o".split()]) == 0
    folder = folder.rename(tmp_path / "after")
    monkeypatch.chdir(folder)
    resumed = ["--resume", "o", *flags, "--steps"]
    assert train.main([*resumed, "2"]) == 0
    other, elsewhere = tiny_decoder(seed=1), folder / "else"
    save_checkpoint(
        elsewhere / "m", other.config, other.weights(), task.tokenizer_files(), task.stop_ids
    )
    capsys.readouterr()
    assert train.main([*resumed, "3", "--model", "else/m"]) == 2
    assert "the file of --model: changed" in " ".join(capsys.readouterr().err.split())
    (folder / "own.py").write_text("def f(rewards):\n    return rewards\n")
    assert train.main([*resumed, "3"]) == 2
    assert "the file of --objective: changed" in " ".join(capsys.readouterr().err.split())
