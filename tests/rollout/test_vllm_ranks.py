"""--rollout vllm on two processes of torchrun that share an engine (`make test-vllm`)."""

import re

import pytest

from tests.distributed.test_torchrun import finished, torchrun
from tests.runs import GUESS_TASK
from tests.tasks.test_guess import reference
from tests.test_train import read

pytestmark = pytest.mark.vllm

JOB = "--rollout vllm --objective grpo --lr 2e-2 --prompts 4 --kv-cache-gb 0.03".split()
JOB += "--eval-prompts 65 --eval-samples 2".split()
JOB += "--hidden-size 64 --intermediate-size 64 --layers 2 --heads 2 --kv-heads 2".split()
JOB += ["--threads", "1", "--dtype", "float32"]  # the tolerances below are for float32


def test_two_ranks_that_share_an_engine_play_their_episodes(tmp_path):
    """Their weights are sharded. Of 65 held-out prompts the last one is alone in its chunk, so that
    one rank has none.
    """
    flags = f"--task {GUESS_TASK} --sft-steps 60 --steps 3 --rollouts 8".split()
    flags += "--vllm-tensor-parallel 2".split()
    flags += "--sharding full --keep-rollouts 64 --out".split()
    process = torchrun(2, "-m", "maxrl_fast.train", *JOB, *flags, str(tmp_path / "run"))
    output = finished(process, 200)
    assert process.returncode == 0, output
    assert "tensor parallel over 2 processes" in output
    records = read(tmp_path / "run" / "metrics.jsonl")
    assert len(records) == 3
    # after every update vLLM has the new weights: a step changes log-probs by far more
    for record in records:
        assert 0 < record["logprob_diff"] < 1e-4
        assert record["importance_weight"] == pytest.approx(1, abs=1e-4)
    games = read(tmp_path / "run" / "rollouts.jsonl")
    assert {game.get("turns", 1) for game in games} >= {1, 2, 3}
    for game in games:
        turns = re.split("⟦.*?⟧", game["response"])
        replies, is_won = reference(game["answer"], turns, 4)
        assert re.findall("⟦(.*?)⟧", game["response"]) == replies[: len(turns) - 1]
        assert game["reward"] == is_won
