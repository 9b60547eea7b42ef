"""The script at a tiny size: each method continues from one warm start until it has sampled its
tokens. No ranking of methods is checked."""

import json
import subprocess
import sys

import pytest

from tests.papers.load import FOLDER, load

distillation = load("distillation")

TINY = [
    *"--seeds 1 --maze-size 5 --sft-steps 20 --teacher-steps 2 --prompts 2 --tokens 400".split(),
    *"--evaluations 2 --eval-mazes 4 --coefficients 0 0.5".split(),
]


def test_a_distilled_policy_has_the_teacher_of_its_seed(tmp_path):
    settings = distillation.DistillationSettings(work=tmp_path)
    folders = {f"{name}-seed0": tmp_path / name for name in ("teacher", "start")}
    options = distillation.METHODS["distill, k2"]
    one = distillation.distillation_run(settings, "distill, k2", options, 0, folders)
    assert one.options["reference"] == str(tmp_path / "teacher/checkpoints/step-000090")
    assert one.options["lr"] == settings.distill_lr


@pytest.mark.slow
def test_the_command_trains_each_method_until_its_tokens_and_draws(tmp_path):
    command = [sys.executable, FOLDER / "distillation.py", *TINY]
    folders = ["--out", tmp_path, "--work", tmp_path / "work"]
    run = subprocess.run([*command, *folders], capture_output=True, text=True, check=True)
    assert "distill, full" in run.stdout
    assert (tmp_path / "distillation.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "distillation.json").read_text())["results"]
    terms = [f"{name}, {x}" for name in distillation.OBJECTIVES for x in ("0", "0.5")]
    assert [one["method"] for one in results["runs"]] == [*distillation.METHODS, *terms]
    starts = [one["evaluations"][0] for one in results["runs"]]
    assert all(start == starts[0] for start in starts)
    for one in results["runs"]:
        tokens = [x["tokens"] for x in one["evaluations"]]
        assert tokens[0] == 0 < 200 <= tokens[1] <= tokens[2] >= 400
        assert one["evaluations"][-1]["step"] == len(one["kl"])
        has_teacher = "distill" in one["method"] or "0.5" in one["method"]
        assert (min(one["kl"]) > 1e-4) == has_teacher
    (teacher,) = results["teachers"]
    assert 0 <= teacher["1"] <= teacher["16"] <= 1
