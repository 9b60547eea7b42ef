"""The work of a step that --dry-run prints: what each forward pass more, and each response more,
adds to it.
"""

import re

import pytest

from maxrl_fast.config.checks import check
from maxrl_fast.config.estimates import estimate
from maxrl_fast.config.parse import parse
from maxrl_fast.config.resolve import resolve
from maxrl_fast.job.build_policy import build_policy
from maxrl_fast.runtime.device import Machine
from maxrl_fast.tasks.maze import MazeTask


def work(*flags):
    """Return the GFLOP of the rollout and of the update."""
    config = parse(["--device", "cpu", "--rollouts", "8", "--hidden-size", "1024", *flags])
    check(config)
    task = MazeTask(9)
    resolved = resolve(config, task)
    printed = estimate(
        resolved, task, build_policy(resolved, task, is_empty=True), Machine("cpu", 1, 10**10)
    )
    return [
        float(x.replace(",", ""))
        for x in re.findall(r"(?:rollout|update): ([\d,.]+) GFLOP", printed)
    ]


@pytest.mark.parametrize(
    ("flags", "passes"),
    [
        ("--objective grpo", 0),
        ("--objective grpo --kl-coef 0.1", 1),
        ("--objective grpo --top-p 0.9", 0),
        ("--objective grpo --correction icepop", 1),
        ("--objective rl_zvp", 1),
        ("--objective rl_zvp --kl-coef 0.1 --importance-cap 2", 3),
        ("--objective maxpo_off_policy --k 4", 1),
        ("--objective pacs --updates-per-step 2", 2),
        ("--objective remax", 0),
    ],
)
def test_each_forward_pass_more_is_a_third_of_forward_and_backward(flags, passes):
    _, plain = work("--objective", "grpo")
    assert work(*flags.split())[1] == pytest.approx(plain * (1 + passes / 3), rel=1e-3)


def test_greedy_responses_are_sampled_too():
    rollout, update = work("--objective", "rloo")
    task, limit = MazeTask(9), 32
    tokens = task.prompt_length + 8 * limit
    for name in ("remax", "self"):
        greedy, same = work("--objective", name)
        assert greedy == pytest.approx(
            rollout * (tokens + task.prompt_length + limit) / tokens, rel=1e-3
        )
        assert same == update
