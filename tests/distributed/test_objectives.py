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

def dense(prompt, response):
    words = response.split()
    return {"right": words.count("RIGHT") / (1 + len(words)), "even": float(len(words) % 2 == 0)}
"""
ADVANTAGE = """
import torch

def by_token(rewards, lengths, texts, components):
    even = torch.tensor([[parts["even"] for parts in group] for group in components])
    same = torch.tensor([[group.count(text) for text in group] for group in texts])
    values = rewards / same + even
    each = zip((values - values.mean(1, keepdim=True)).flatten(), lengths.flatten().tolist())
    return torch.cat([value * 0.8 ** torch.arange(n) for value, n in each])
"""
OF_REWARDS = {  # with 6 prompts on each of two processes, a bundle is of both
    "gdpo": "--objective gdpo --reward {0}:is_even {0}:share_of_right",
    "rl_zvp": "--objective rl_zvp",
    "riskpo": "--objective riskpo --reward {0}:share_of_right --bundle-size 4",
    "sibling": "--objective maxrl --kl full --kl-coef .5 --teacher-prompt sibling "
    "--reward {0}:is_even",
    "by_token": "--objective {1}:by_token --reward {0}:dense",
}


@pytest.mark.parametrize("name", OF_REWARDS)
def test_steps_are_the_same_on_two_processes(name, tmp_path):
    rewards, advantage = tmp_path / "rewards.py", tmp_path / "mine.py"
    rewards.write_text(REWARDS)
    advantage.write_text(ADVANTAGE)
    flags = OF_REWARDS[name].format(rewards, advantage).split()
    flags += "--updates-per-step 2 --prompts 12 --rollouts 4 --steps 4 --maze-size 7".split()
    for num_ranks in (1, 2):
        run_job(tmp_path / str(num_ranks), num_ranks, *flags)
    alone, together = tmp_path / "1", tmp_path / "2"
    assert_same_metrics(alone, together)
    assert all(record["grad_norm"] > 1e-3 for record in read(alone, "metrics"))
    weights, others = (load_file(run / "latest" / "model.safetensors") for run in (alone, together))
    before = load_file(alone / "checkpoints" / "step-000000" / "model.safetensors")
    for key, weight in weights.items():
        change = (weight - before[key]).abs().max()
        assert change > 1e-5, key
        assert (others[key] - weight).abs().max() < 0.02 * change, key
