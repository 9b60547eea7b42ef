import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from maxrl_fast import train
from tests.runs import CHAIN_TASK, resumes_bitwise, without_timings
from tests.tables import table
from tests.tasks.test_dataset import save_byte_level_policy, written

SMALL = "--maze-size 7 --prompts 4 --eval-prompts 4 --eval-samples 2 --threads 1 --steps 2"


def run(out, *flags):
    return train.main([*SMALL.split(), "--out", str(out), *map(str, flags)])


@pytest.fixture
def teacher(maze_run):
    return maze_run / "checkpoints" / "step-000006"


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["--lora-rank 2", "--kl full --divergence forward"])
def test_a_distillation_resumes_bitwise(tmp_path, teacher, flags, capsys):
    teacher = shutil.copytree(teacher, tmp_path / "teacher")
    job = "--objective distill --hidden-size 64 --sft-steps 0 --lr-schedule constant".split()
    job += [*flags.split(), "--reference", teacher]
    assert run(tmp_path / "whole", *job, "--steps", 4) == 0
    assert run(tmp_path / "run", *job) == 0
    assert train.main(["--resume", str(tmp_path / "run"), "--steps", "4"]) == 0
    whole, lines = (without_timings(tmp_path / x / "metrics.jsonl") for x in ("whole", "run"))
    assert lines == whole
    assert lines[0]["kl"] > 0.01
    assert lines[0]["response_length_mean"] > 0
    shown = capsys.readouterr()
    assert ("  kl " in shown.out, "had equal rewards" in shown.err) == (True, False)
    change(teacher / "model.safetensors")
    assert train.main(["--resume", str(tmp_path / "run"), "--steps", "5"]) == 2
    assert "the file of --reference: changed" in capsys.readouterr().err


def change(path):
    """Write another header: other numbers in a file of the same size are not noticed."""
    save_file(load_file(path), path, {"format": "pt", "by": "another"})


@pytest.mark.parametrize(
    ("flags", "sentence"),
    table("""
    --objective distill --task CHAIN --reference {} | a vocabulary of 8
    --reference {} JSD --jsd-beta 1 | --jsd-beta must be from 1e-7 to 1 - 1e-7, got 1
    --kl-coef 1 --kl full --loss kl_cov --reference {} | depends on other responses
    """),
)
def test_bad_teachers_are_refused(tmp_path, teacher, capsys, flags, sentence):
    jsd = "--kl-coef 1 --kl full --divergence jsd"
    words = [*SMALL.split(), "--out", str(tmp_path / "run")]
    words = words[2 * ("CHAIN" in flags) :]  # which has no --maze-size
    code = train.main(
        [*words, *flags.replace("JSD", jsd).replace("CHAIN", CHAIN_TASK).format(teacher).split()]
    )
    said = " ".join(capsys.readouterr().err.split())
    assert code == 2, said
    assert sentence in said
    assert not (tmp_path / "run").exists()


def test_a_teacher_with_other_tokens_is_refused(tmp_path, teacher, capsys):
    other = shutil.copytree(teacher, tmp_path / "other")
    fields = json.loads((other / "tokenizer.json").read_text())
    fields["added_tokens"][5]["content"] = "other"
    (other / "tokenizer.json").write_text(json.dumps(fields))
    assert run(tmp_path / "run", "--objective", "distill", "--reference", other) == 2
    assert "must have the policy's tokenizer" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_the_feedback_of_a_reward_reaches_the_teacher(tmp_path, monkeypatch):
    code = "def f(response):\n    return {'reward': len(response) % 2, 'feedback': 'odd?'}\n"
    (tmp_path / "reward.py").write_text(code)
    data = written(tmp_path / "data.jsonl", [{"prompt": f"{i}: say"} for i in range(40)])
    flags = f"--task dataset --data {data} --model {save_byte_level_policy(tmp_path)} --steps 4"
    flags += f" --objective rloo --reward {tmp_path}/reward.py:f --kl full --kl-coef .1"
    flags += " --teacher-prompt feedback --ahead 1 --max-new-tokens 12 --prompts 4 --rollouts 4"
    flags += " --eval-prompts 2 --eval-samples 2 --reward-workers 1 --threads 1 --dtype float32"
    for step in resumes_bitwise(monkeypatch, tmp_path, flags.split(), "step 2"):
        assert step["frac_with_teacher"] == pytest.approx(1 - step["reward_mean"])
        assert step["kl"] > 0
