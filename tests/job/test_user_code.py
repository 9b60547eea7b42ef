import pytest

from maxrl_fast import train
from tests.runs import CHAIN_TASK

CODE = """
import sys
from maxrl_fast.rollout.native import CpuEngine
from examples.chain import ChainTask
calls = 0
def failed(is_real=True):
    global calls
    calls += is_real
    return is_real and calls == NUMBER and FAILURE
def loss(tokens):
    return -tokens.advantages * tokens.logprobs * (failed(len(tokens.logprobs) != 7) or 1)
def objective(rewards):
    values = rewards - rewards.mean(1, keepdim=True)
    return values[: -1 if failed(rewards.shape == (2, 4)) else None]
class Task(ChainTask):
    def score(self, *given):
        failed()
        return super().score(*given)
class Engine(CpuEngine):
    def generate(self, *given):
        failed()
        return super().generate(*given)
"""
FLAGS = (
    "--steps 3 --prompts 2 --rollouts 4 --eval-prompts 2 --eval-samples 1 --save-every 1 "
    "--sft-steps 0 --hidden-size 16 --layers 1 --heads 1 --kv-heads 1 --threads 1 --device cpu "
)
KEPT = ", after step 1; the last good checkpoint is "
CASES = [
    ("loss", "sys.exit(0)", 2, "SystemExit: 0 (code.py, line 9)" + KEPT),
    ("objective", "True", 2, "got torch.float32 of shape (1, 4)"),
    ("rollout:Engine", "[][1]", 4, "IndexError: list index out of range (code.py, line 9)" + KEPT),
    ("task:Task", "sys.exit(7)", 1, "SystemExit: 7 (code.py, line 9)"),  # the first evaluation
]


@pytest.mark.parametrize(("option", "failure", "number", "message"), CASES)
def test_failing_code_is_one_error(option, failure, number, message, tmp_path, capsys):
    option, _, name = option.partition(":")
    file, is_first = tmp_path / "code.py", number == 1
    file.write_text(CODE.replace("FAILURE", failure).replace("NUMBER", str(number)))
    flags = f"{FLAGS} --task {CHAIN_TASK} --objective rloo --out {tmp_path}/run".split()
    if f"--{option}" in flags:
        flags[flags.index(f"--{option}") + 1] = f"{file}:{name or option}"
    else:
        flags += [f"--{option}", f"{file}:{name or option}"]
    assert train.main(flags) == (2 if is_first else 1)
    error = " ".join(capsys.readouterr().err.split("error: ")[-1].split())
    assert message in error
    assert is_first or (KEPT in error and error.endswith("--resume --allow-changes."))
