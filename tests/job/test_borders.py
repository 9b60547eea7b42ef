import shutil
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from maxrl_fast import evaluate, train
from maxrl_fast.job.run_files import RunFiles
from maxrl_fast.model.policy_model import find_nonfinite
from maxrl_fast.runtime.files import locked
from maxrl_fast.training.learner import Learner
from tests.runs import SMALL, base, copied, read
from tests.tables import refused

FATAL = {
    "policy": "--objective nsr --lr 1e39 --clip-grad 1e30 --warmup-steps 0 --lr-schedule constant",
    "critic": "--objective ppo --critic-lr 1e39",
}


@pytest.mark.parametrize("flags", FATAL.values(), ids=FATAL)
def test_an_update_that_overflows_is_never_saved(flags, tmp_path, capsys):
    out = tmp_path / "run"
    more = "--sft-steps 2 --steps 1 --save-every 1 --eval-prompts 2".split()
    assert train.main([*base(), *more, *flags.split(), "--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert "after step 1: " in error
    assert "is NaN or infinite; the last good checkpoint is" in error
    assert not (out / "checkpoints" / "step-000001").exists()
    assert (out / "latest").resolve().name == "step-000000"
    for path in (out / "checkpoints").rglob("*.safetensors"):
        assert find_nonfinite(load_file(path)) is None


def test_an_infinite_moment_is_never_saved(tmp_path, monkeypatch, capsys):
    step = torch.optim.AdamW.step

    def step_with_infinite_moment(self, *arguments):
        result = step(self, *arguments)
        list(self.state.values())[-1]["exp_avg_sq"].view(-1)[-1] = float("inf")
        return result

    monkeypatch.setattr(torch.optim.AdamW, "step", step_with_infinite_moment)
    flags = "--sft-steps 0 --steps 1 --eval-prompts 2 --out".split()
    assert train.main([*SMALL, *flags, str(tmp_path / "run")]) == 1
    assert "optimizer.exp_avg_sq." in capsys.readouterr().err
    (start,) = (tmp_path / "run").glob("checkpoints/step-*")
    assert start.name == "step-000000"  # before the first step


def test_a_checkpoint_with_one_nan_is_refused_by_name(maze_run, tmp_path, capsys):
    folder = tmp_path / "policy"
    shutil.copytree((maze_run / "latest").resolve(), folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    job = "--task maze --maze-size 7 --prompts 4 --rollouts 4 --k 2 --steps 3 --model".split()
    job += [str(folder), "--out", str(tmp_path / "run")]
    for command, words in ((train, job), (evaluate, [str(folder), "--task", "maze"])):
        assert command.main(words) == 2
        error = capsys.readouterr().err
        assert f"{folder} has NaN or infinite numbers in the weight model.norm.weight" in error


def test_checkpoints_of_another_run_are_never_removed(maze_run, tmp_path, capsys):
    out, other = copied(maze_run, tmp_path), tmp_path / "other"
    (out / "checkpoints").rename(other)
    (out / "checkpoints").symlink_to(other)
    before = sorted(other.rglob("*"))
    flags = "--steps 7 --allow-changes --keep-checkpoints 1"
    assert train.main(["--resume", str(out), *flags.split()]) == 2
    error = capsys.readouterr().err
    assert f"{out / 'checkpoints'} must be a folder of this run, got a symbolic link" in error
    assert sorted(other.rglob("*")) == before


def test_a_run_notices_that_its_folder_is_gone(tmp_path, monkeypatch, capsys):
    out, update = tmp_path / "run", Learner.optim_step

    def removing(self, *arguments, **options):
        if options["when"] == "step 2":
            while not (out / "best").exists():  # the last of the first checkpoint
                time.sleep(0.01)
            shutil.rmtree(out)
        return update(self, *arguments, **options)

    monkeypatch.setattr(Learner, "optim_step", removing)
    job = [*SMALL, *"--sft-steps 0 --steps 2 --save-every 0 --out".split(), str(out)]
    assert train.main(job) == 1
    assert "error: cannot write " in capsys.readouterr().err
    assert not out.exists()


def test_a_folder_that_cannot_be_written_is_refused_with_the_lock(tmp_path):
    (tmp_path / "lock").mkdir()
    with refused("cannot write to --out"), locked(tmp_path):
        raise AssertionError("the lock was taken")


def test_a_number_that_is_not_finite_is_null_in_a_log(tmp_path):
    files = RunFiles(tmp_path, {"objective": "reinforce", "rollouts": 4, "task": "maze"})
    record = {"step": 1, "kl": float("inf"), "by_k": {"1": float("nan")}, "all": [1.0, -1e999]}
    files.write("metrics", record)
    assert read(tmp_path / "metrics.jsonl") == [
        {"step": 1, "kl": None, "by_k": {"1": None}, "all": [1.0, None]}
    ]
