"""Objectives that need more than the rewards of one group: two processes take the same steps as
one.
"""

import pytest
from safetensors.torch import load_file

from tests.distributed.test_torchrun import TIMES, read, run_job
from tests.objectives_with_more import NAMES, flags_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_the_same_on_two_processes(name, tmp_path):
    """Each process samples 6 prompts, and each update learns from 6 of the 12: prompts of both
    processes.
    """
    flags = [
        *flags_of(name, tmp_path),
        *"--prompts 12 --rollouts 4 --steps 4 --maze-size 5".split(),
    ]
    for num_ranks in (1, 2):
        run_job(tmp_path / str(num_ranks), num_ranks, *flags, "--diagnose-every", "2")
    alone, together = tmp_path / "1", tmp_path / "2"
    for expected, result in zip(read(alone, "metrics"), read(together, "metrics"), strict=True):
        assert expected["grad_norm"] > 1e-3
        assert expected.keys() == result.keys()
        for key in expected.keys() - TIMES:
            assert result[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5), (
                expected["step"],
                key,
            )
    for expected, result in zip(
        read(alone, "diagnostics"), read(together, "diagnostics"), strict=True
    ):
        assert max(expected["grad_norm"]) > 1e-3
        assert result == {
            **expected,
            "grad_norm": pytest.approx(expected["grad_norm"], rel=1e-2, abs=1e-5),
        }
    weights, others = (load_file(run / "latest" / "model.safetensors") for run in (alone, together))
    before = load_file(alone / "checkpoints" / "step-000000" / "model.safetensors")
    for key, weight in weights.items():
        change = (weight - before[key]).abs().max()
        assert change > 1e-5, key
        assert (others[key] - weight).abs().max() < 0.02 * change, key
