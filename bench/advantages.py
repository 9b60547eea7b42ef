"""`python -m bench.advantages`: every group advantage, beside view, mean and std as in TRL.

All are timed in turn, in one process, after the results were compared; the floor is a copy of the
rewards. With --device cuda some are timed in a CUDA graph too; there the floor is an empty kernel.
The last line is one JSON document. It takes some minutes on two cores.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.measure import (
    argument_parser,
    describe,
    keep,
    machine,
    microseconds,
    microseconds_in_a_graph,
    prepare,
    print_host_time,
    run_command,
)
from maxrl_fast.ops import ESTIMATORS, group_advantage, log_ratio_reward

SHAPES = ((1024, 16), (256, 128), (32, 1024))
K = 4
OPTIONS = {
    "noisy_verifier_backward": {"false_positive_rate": 0.1, "false_negative_rate": 0.05},
    "noisy_verifier_forward": {"false_negative_rate": 0.05},
}


def view_mean_std(rewards: Tensor, n: int) -> Tensor:
    """Return grpo as TRL computes it: flat rewards viewed as [G, N]."""
    mean = rewards.view(-1, n).mean(dim=1).repeat_interleave(n, dim=0)
    deviation = rewards.view(-1, n).std(dim=1).repeat_interleave(n, dim=0)
    return (rewards - mean) / (deviation + 1e-6)


def estimator_calls(rewards: Tensor) -> dict[str, Callable[[], Tensor]]:
    lengths = torch.randint(1, 2000, rewards.shape).to(rewards.device)
    known = {
        "lengths": lengths,
        "logprobs": -torch.rand(rewards.shape).to(rewards.device),
        "greedy_correct": rewards > 0.5,
    }
    known |= {"log_ratios": torch.randn(rewards.shape).mul(0.1).to(rewards.device)}
    known |= {
        "greedy_rewards": rewards.flip(-1),
        "reward_parts": torch.stack([(rewards > 0.5).float(), rewards.flip(-1)]),
    }

    def call(name: str) -> Callable[[], Tensor]:
        row = ESTIMATORS[name]
        keywords: dict[str, Any] = {key: known[key] for key in row.inputs} | OPTIONS.get(name, {})
        if row.size is not None and row.size.required:
            keywords["k"] = K
        values = (rewards > 0.5).float() if row.binary else rewards
        return lambda: group_advantage(values, name, **keywords)

    return {name: call(name) for name, row in ESTIMATORS.items() if not row.of_run}


def check_agreement(rewards: Tensor) -> None:
    """Raise RuntimeError if the other implementation differs from group_advantage, or the
    comparison is empty."""
    exact = rewards.double()
    theirs = view_mean_std(exact.flatten(), rewards.shape[1])
    ours = group_advantage(exact, "grpo").flatten()
    error = float((theirs - ours).abs().max())
    if not error < 1e-6 or not float(ours.abs().max()) > 0.1:
        raise RuntimeError(f"view: the advantages differ by {error}")


def even_groups(rewards: Tensor, rounds: int) -> dict[str, float]:
    n = rewards.shape[1]
    flat = rewards.flatten()
    functions: dict[str, Callable[[], object]] = {
        "floor: a copy of the rewards": rewards.clone,
        **estimator_calls(rewards),
        "peer: grpo by view, mean, std": partial(view_mean_std, flat, n),
    }
    return microseconds(functions, rounds, rewards.device)


def on_gpu(rounds: int, device: torch.device) -> dict[str, Any]:
    """Return the time of small operators at 1024 x 16 in a CUDA graph, without the CPU's part of a
    launch; the floor is an empty kernel.
    """
    one, rewards = torch.zeros(1, device=device), torch.randn(1024, 16, device=device)
    logprobs = torch.randn(1024 * 16 * 64, device=device, requires_grad=True)
    reference = torch.randn_like(logprobs)
    cu_seqlens = torch.arange(0, logprobs.numel() + 1, 64, device=device)
    calls: dict[str, Callable[[], object]] = {
        "empty kernel": lambda: one.zero_(),
        "maxpo": partial(group_advantage, rewards, "maxpo", k=K),
        "grpo": partial(group_advantage, rewards, "grpo"),
        "log_ratio_reward": partial(log_ratio_reward, logprobs, reference, cu_seqlens),
    }
    return {"microseconds_in_a_graph": microseconds_in_a_graph(calls, rounds, device)}


def measure(rounds: int, device: torch.device) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    check_agreement(torch.randn(64, 16, generator=generator))
    shapes: dict[str, Any] = {}
    result: dict[str, Any] = {
        "benchmark": "advantages",
        "machine": machine(device),
        "k": K,
        "microseconds": shapes,
    }
    for g, n in SHAPES:
        rewards = torch.randn(g, n, generator=generator).to(device)
        shapes[f"{g}x{n}"] = even_groups(rewards, rounds)
        keep(result)
    return result if device.type == "cpu" else result | {"gpu": on_gpu(rounds, device)}


def report(result: dict[str, Any]) -> None:
    print(describe(result["machine"]))
    for shape, times in result["microseconds"].items():
        copy = times["floor: a copy of the rewards"]
        print(f"\n{shape}, k = {result['k']}, microseconds per call: copying {copy:.1f}")
        print("  " + ", ".join(f"{name} {times[name]:.1f}" for name in times if name in ESTIMATORS))
        for name, time_of_peer in times.items():
            if name.startswith("peer: "):
                ratio = time_of_peer / times["grpo"]
                print(f"  {name[6:]}: {time_of_peer:,.1f}, {ratio:,.1f} times grpo here")
    if "gpu" in result:
        for name, figures in result["gpu"].items():
            print(f"  {name}, 1024x16: {figures}")


def on_host(rounds: int) -> int:
    """Print the host's time of a call for 8 x 16 rewards, beside an addition."""
    rewards = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    functions: dict[str, Callable[[], object]] = {
        "addition": partial(torch.add, rewards, rewards),
        "grpo by view, mean, std": partial(view_mean_std, rewards.flatten(), 16),
        "grpo": partial(group_advantage, rewards, "grpo"),
        "maxrl": partial(group_advantage, rewards, "maxrl"),
        "maxpo": partial(group_advantage, rewards, "maxpo", k=K),
    }
    floors = dict.fromkeys(("grpo", "maxrl", "maxpo"), "addition")
    return print_host_time("advantages --host", functions, floors, rounds)


def main() -> int:
    parser = argument_parser("advantages", __doc__, rounds=25)
    parser.add_argument("--host", action="store_true", help="only the host's time of small calls")
    options = parser.parse_args()
    device = prepare(options)
    if options.host:
        return on_host(options.rounds)
    result = measure(options.rounds, device)
    report(result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
