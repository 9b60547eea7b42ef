"""`python -m bench.launches`: the small operators at 1024 prompts x 16 rollouts, whose cost on a
GPU is the launch.

It times forward calls of group advantages, PACS's log-ratio rewards and its loss; an empty kernel
is the floor. On a GPU it counts the kernels that one call starts, and times calls in a CUDA graph
too, which leaves out the CPU's part of a launch. The last line is one JSON document.

It takes a few seconds.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from bench.measure import (
    argument_parser,
    keep,
    launches,
    machine,
    microseconds,
    microseconds_in_a_graph,
    prepare,
    run_command,
)
from maxrl_fast.ops import group_advantage, log_ratio_reward

GROUPS, SIZE, RESPONSE = 1024, 16, 64


def calls(device: torch.device) -> dict[str, Callable[[], object]]:
    """Return a call of each operator by name, an empty kernel first. Inputs require gradients, so
    gradients are computed too."""
    one = torch.zeros(1, device=device)
    rewards = (torch.rand(GROUPS, SIZE, device=device) < 0.3).float()
    logprobs = torch.randn(GROUPS * SIZE * RESPONSE, device=device, requires_grad=True)
    reference = torch.randn_like(logprobs)
    cu_seqlens = torch.arange(0, logprobs.numel() + 1, RESPONSE, device=device)
    return {
        "empty kernel": lambda: one.zero_(),
        "maxpo": lambda: group_advantage(rewards, "maxpo", k=4),
        "grpo": lambda: group_advantage(rewards, "grpo"),
        "log_ratio_reward": lambda: log_ratio_reward(logprobs, reference, cu_seqlens),
    }


def main() -> int:
    options = argument_parser("launches", __doc__, rounds=15).parse_args()
    device = prepare(options)
    functions = calls(device)
    result: dict[str, Any] = {
        "benchmark": "launches",
        "machine": machine(device),
        "microseconds": microseconds(functions, options.rounds, device),
        "launches": None,
        "microseconds_in_a_graph": None,
    }
    keep(result)  # captures, and the profiler even more, may fail
    if device.type == "cuda":
        result["microseconds_in_a_graph"] = microseconds_in_a_graph(
            functions, options.rounds, device
        )
        keep(result)
        result["launches"] = {name: launches(function) for name, function in functions.items()}
    print(f"{GROUPS} prompts x {SIZE} rollouts, {device}")
    print(f"  {'':<20}{'us a call':>12}{'launches':>10}{'us in a graph':>15}")
    for name, time in result["microseconds"].items():
        count, in_graph = (
            result[key][name] if result[key] else None
            for key in ("launches", "microseconds_in_a_graph")
        )
        print(
            f"  {name:<20}{time:12.1f}{'' if count is None else count:>10}"
            f"{'' if in_graph is None else f'{in_graph:.2f}':>15}"
        )
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
