"""--rollout vllm on two processes of torchrun: an engine on each, or one engine on both (`make
test-vllm`).
"""

import json
import os
import subprocess
import sys

import pytest

from tests.distributed.test_torchrun import ROOT, finished, free_port, torchrun

pytestmark = pytest.mark.vllm

JOB = "--rollout vllm --task chain --chain-length 3 --objective grpo --lr 2e-2 --steps 10".split()
JOB += "--prompts 4 --rollouts 32 --eval-prompts 65 --eval-samples 2 --kv-cache-gb 0.03".split()
JOB += "--hidden-size 32 --intermediate-size 64 --layers 2 --heads 2 --kv-heads 2".split()
JOB += ["--threads", "1", "--dtype", "float32"]  # the tolerances below are for float32


@pytest.mark.parametrize("tensor_parallel", ["1", "2"])
def test_ranks_sample_from_the_policys_weights_and_each_prompt_once(tensor_parallel):
    """tests/rollout/vllm_ranks.py checks the samples after updates from whole, sharded and adapted
    weights.
    """
    arguments = ["-m", "tests.rollout.vllm_ranks", tensor_parallel]
    process = torchrun(2, *arguments)
    output = finished(process, 200)
    assert process.returncode == 0, output
    assert "rank 0: done" in output
    assert "rank 1: done" in output


@pytest.mark.parametrize("flags", [[], ["--vllm-tensor-parallel", "2", "--sharding", "full"]])
def test_ten_steps_on_two_ranks_learn(tmp_path, flags):
    """Of 65 held-out prompts the last one is alone in its chunk, so that one rank has none."""
    arguments = ["-m", "maxrl_fast.train", *JOB, *flags, "--out", str(tmp_path / "run")]
    process = torchrun(2, *arguments)
    output = finished(process, 200)
    assert process.returncode == 0, output
    assert ("tensor parallel over 2 processes" in output) == bool(flags)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    rewards = [record["reward_mean"] for record in records]
    assert len(rewards) == 10
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3]), rewards
    # after every update vLLM has the new weights: a step changes log-probs by far more
    for record in records:
        assert 0 < record["logprob_diff"] < 1e-4
        assert record["importance_weight"] == pytest.approx(1, abs=1e-4)


KILLED = """
import os, signal, sys
from maxrl_fast import train
from maxrl_fast.rollout.vllm import VllmEngine

sample = VllmEngine._sample

def killed(self, request):
    engine = self._llm.llm_engine
    forward, calls = type(engine).step, []
    def one_step():
        calls.append(None)
        if len(calls) == 2 and request.step == 1 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(engine)
    engine.step = one_step
    return sample(self, request)

VllmEngine._sample = killed
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("flags", [[], ["--vllm-tensor-parallel", "2"]])
def test_a_rank_killed_while_sampling_ends_the_others(tmp_path, flags):
    """The ranks are started apart, as on two machines, so that no torchrun ends one when the other
    fails.
    """
    (tmp_path / "killed.py").write_text(KILLED)
    shared = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
    }
    shared |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        str(tmp_path / "killed.py"),
        *JOB,
        *flags,
        "--out",
        str(tmp_path / "run"),
    ]
    options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    ranks = [
        subprocess.Popen(command, env=shared | {"RANK": str(rank)}, **options) for rank in range(2)
    ]
    try:
        _, error = ranks[0].communicate(timeout=120)
        assert ranks[1].wait(timeout=10) == -9
    finally:
        for rank in ranks:
            rank.kill()
    assert ranks[0].returncode == 1
    assert "error: another process of the run has ended, or cannot be reached" in error, error
    assert "Traceback" not in error
