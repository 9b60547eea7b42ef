"""`python -m bench.launches`: the small operators at 1024 prompts x 16 rollouts, which on a GPU cost what a launch costs.

Forward calls: group advantages, PACS's log-ratio rewards and its loss, and an empty kernel, the floor. On a GPU the kernels
that one call starts are counted, and calls are timed in a CUDA graph too, where the CPU that asks for them does not count. The
last line is one JSON document.
"""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from bench.measure import launches, microseconds, microseconds_in_a_graph
from maxrl_fast.errors import InputError
from maxrl_fast.hardware import resolve_device, versions
from maxrl_fast.ops import group_advantage, log_ratio_reward, pacs_loss

GROUPS, SIZE, RESPONSE = 1024, 16, 64


def calls(device: torch.device) -> dict[str, Callable[[], object]]:
    """The operators by name, an empty kernel first; inputs that want gradients, so that these are computed too."""
    one = torch.zeros(1, device=device)
    rewards = (torch.rand(GROUPS, SIZE, device=device) < 0.3).float()
    labels = rewards.flatten()
    proxies = torch.randn(GROUPS * SIZE, device=device, requires_grad=True)
    logprobs = torch.randn(GROUPS * SIZE * RESPONSE, device=device, requires_grad=True)
    reference = torch.randn_like(logprobs)
    cu_seqlens = torch.arange(0, logprobs.numel() + 1, RESPONSE, device=device)
    return {
        "empty kernel": lambda: one.zero_(),
        "maxpo": lambda: group_advantage(rewards, "maxpo", k=4),
        "grpo": lambda: group_advantage(rewards, "grpo"),
        "log_ratio_reward": lambda: log_ratio_reward(logprobs, reference, cu_seqlens),
        "pacs_loss": lambda: pacs_loss(proxies, labels, SIZE),
    }


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.launches", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (default: %(default)s)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="cpu", help="default: %(default)s")
    options = parser.parse_args()
    try:
        device = resolve_device(options.device)
        if options.rounds < 1:
            raise InputError(f"--rounds must be at least 1, got {options.rounds}")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    functions = calls(device)
    result: dict[str, Any] = {
        "benchmark": "launches",
        "machine": versions() | {"threads": torch.get_num_threads(), "device": str(device)},
        "microseconds": microseconds(functions, options.rounds, device),
        "launches": None,
        "microseconds_in_a_graph": None,
    }
    if device.type == "cuda":
        result["launches"] = {name: launches(function) for name, function in functions.items()}
        result["microseconds_in_a_graph"] = microseconds_in_a_graph(functions, options.rounds, device)
    print(f"{GROUPS} prompts x {SIZE} rollouts, {device}")
    print(f"  {'':<20}{'us a call':>12}{'launches':>10}{'us in a graph':>15}")
    for name, time in result["microseconds"].items():
        count, alone = (result[key][name] if result[key] else None for key in ("launches", "microseconds_in_a_graph"))
        print(f"  {name:<20}{time:12.1f}{'' if count is None else count:>10}{'' if alone is None else f'{alone:.2f}':>15}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
