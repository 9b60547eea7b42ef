"""Objectives that need more than the rewards of one group: two processes take the same steps as
one.
"""

import pytest
from safetensors.torch import load_file

from tests.distributed.test_torchrun import assert_same_metrics, read, run_job

pytestmark = pytest.mark.slow

REWARDS = """
def is_even(prompt, response):
    return float(len(response.split()) % 2 == 0)

def share_of_right(prompt, response):
    return response.count("RIGHT") / (1 + len(response.split()))
"""
OF_REWARDS = {  # with 6 prompts on each of two processes, a bundle is of both
    "gdpo": "--reward {0}:is_even {0}:share_of_right",
    "rl_zvp": "",
    "riskpo": "--reward {0}:share_of_right --bundle-size 4",
}


@pytest.mark.parametrize("name", OF_REWARDS)
def test_steps_are_the_same_on_two_processes(name, tmp_path):
    """Each process samples 6 prompts, and each update learns from 6 of the 12: prompts of both
    processes.
    """
    (tmp_path / "rewards.py").write_text(REWARDS)
    flags = f"--objective {name} {OF_REWARDS[name].format(tmp_path / 'rewards.py')}".split()
    flags += "--updates-per-step 2 --prompts 12 --rollouts 4 --steps 4 --maze-size 5".split()
    for num_ranks in (1, 2):
        run_job(tmp_path / str(num_ranks), num_ranks, *flags, "--diagnose-every", "2")
    alone, together = tmp_path / "1", tmp_path / "2"
    assert_same_metrics(alone, together)
    assert all(record["grad_norm"] > 1e-3 for record in read(alone, "metrics"))
    for expected, result in zip(
        read(alone, "diagnostics"), read(together, "diagnostics"), strict=True
    ):
        assert max(expected["grad_norm"]) > 1e-3
        norms = pytest.approx(expected["grad_norm"], rel=1e-2, abs=1e-5)
        assert result == {**expected, "grad_norm": norms}
    weights, others = (load_file(run / "latest" / "model.safetensors") for run in (alone, together))
    before = load_file(alone / "checkpoints" / "step-000000" / "model.safetensors")
    for key, weight in weights.items():
        change = (weight - before[key]).abs().max()
        assert change > 1e-5, key
        assert (others[key] - weight).abs().max() < 0.02 * change, key
