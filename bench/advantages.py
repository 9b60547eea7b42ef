"""`python -m bench.advantages`: every group advantage, against other implementations and the
cost of any operator.

The others are the MaxPO paper's O(N^2) matrix form, and view, mean and std as in TRL. All are timed
in turn, in one process, after their results were compared. There are two floors: an operator with
the same arguments that does nothing, and a copy of the rewards. With --device cuda some are timed
in a CUDA graph too; the floor is an empty kernel. The last line is one JSON document.

It takes some minutes on two cores, and `make gpu` gives it 40 seconds.
"""

import json
import sys
from collections.abc import Callable
from functools import cache, partial
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
    run_command,
)
from maxrl_fast.algorithms.estimators.max_at_k import subset_ratios
from maxrl_fast.ops import ESTIMATORS, group_advantage, log_ratio_reward

SHAPES = ((1024, 16), (256, 128), (32, 1024))
K = 4
OPTIONS = {
    "noisy_verifier_backward": {"false_positive_rate": 0.1, "false_negative_rate": 0.05},
    "noisy_verifier_forward": {"false_negative_rate": 0.05},
}
SCHEMA = "(Tensor rewards, Tensor? valid, str estimator, int size, float[] options) -> Tensor"


def view_mean_std(rewards: Tensor, n: int) -> Tensor:
    """Return grpo as TRL computes it: flat rewards viewed as [G, N]."""
    mean = rewards.view(-1, n).mean(dim=1).repeat_interleave(n, dim=0)
    deviation = rewards.view(-1, n).std(dim=1).repeat_interleave(n, dim=0)
    return (rewards - mean) / (deviation + 1e-6)


def matrix_weights(n: int, k: int) -> tuple[Tensor, Tensor]:
    """Return the weights of `matrix_form`: [n], of each rank as the maximum of k - 1 others; [n,
    n], of rank j without i.
    """
    # nothing exceeds the largest
    weights = torch.cat([subset_ratios(n - 1, k - 1).diff(), torch.zeros(1)])
    fewer = torch.cat([subset_ratios(n - 2, k - 1).diff(), torch.zeros(2)])
    j, i = torch.arange(n), torch.arange(n)[:, None]
    return weights, fewer[(j - (i < j).long()).clamp_min(0)] * (i != j)


def matrix_form(rewards: Tensor, weights: Tensor, without: Tensor) -> Tensor:
    """Return EI - L2O by the MaxPO paper's appendix E: weighted sums over the [G, N, N] matrix of
    reward differences.
    """
    ordered, order = rewards.sort(-1)
    # row i, column j: (r_i - r_j)_+
    differences = (ordered[:, :, None] - ordered[:, None, :]).clamp_min(0)
    improvement = differences @ weights
    others = differences.sum(1, keepdim=True) - differences
    baseline = (without * others).sum(-1) / (rewards.shape[1] - 1)
    return torch.zeros_like(rewards).scatter(-1, order, improvement - baseline)


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

    return {name: call(name) for name in ESTIMATORS}


@cache
def nothing_operator() -> Callable[[Tensor], Tensor]:
    """Return an operator with the same arguments and result whose kernel does nothing."""
    torch.library.define("maxrl_bench::nothing", SCHEMA)
    torch.library.impl(
        "maxrl_bench::nothing", ("CPU", "CUDA"), lambda rewards, *rest: torch.empty_like(rewards)
    )
    nothing = torch.ops.maxrl_bench.nothing.default
    return lambda rewards: nothing(rewards, None, "grpo", 0, [1e-6, 1.0])


def check_agreement(rewards: Tensor) -> None:
    """Raise RuntimeError if an implementation differs from group_advantage, or the comparison is
    empty.
    """
    exact = rewards.double()
    n = rewards.shape[1]
    pairs = {
        "matrix form": (
            matrix_form(exact, *matrix_weights(n, K)),
            group_advantage(exact, "maxpo", k=K),
        ),
        "view": (view_mean_std(exact.flatten(), n), group_advantage(exact, "grpo").flatten()),
    }
    for name, (theirs, ours) in pairs.items():
        error = float((theirs - ours).abs().max())
        if not error < 1e-6 or not float(ours.abs().max()) > 0.1:
            raise RuntimeError(f"{name}: the advantages differ by {error}")


def even_groups(rewards: Tensor, rounds: int) -> dict[str, float]:
    n = rewards.shape[1]
    flat = rewards.flatten()
    weights = [table.to(rewards) for table in matrix_weights(n, K)]
    functions: dict[str, Callable[[], object]] = {
        "floor: an operator that does nothing": partial(nothing_operator(), rewards),
        "floor: a copy of the rewards": rewards.clone,
        **estimator_calls(rewards),
        "peer: grpo by view, mean, std": partial(view_mean_std, flat, n),
        "peer: maxpo by matrix": partial(matrix_form, rewards, *weights),
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
        nothing, copy = (
            times[f"floor: {floor}"]
            for floor in ("an operator that does nothing", "a copy of the rewards")
        )
        print(
            f"\n{shape}, k = {result['k']}, microseconds per call: doing nothing {nothing:.1f}, "
            f"copying {copy:.1f}"
        )
        print("  " + ", ".join(f"{name} {times[name]:.1f}" for name in times if name in ESTIMATORS))
        for name, time_of_peer in times.items():
            if name.startswith("peer: "):
                ours = "maxpo" if "maxpo" in name else "grpo"
                print(
                    f"  {name[6:]}: {time_of_peer:,.1f}, {time_of_peer / times[ours]:,.1f} times "
                    f"{ours} here"
                )
    if "gpu" in result:
        for name, figures in result["gpu"].items():
            print(f"  {name}, 1024x16: {figures}")


def main() -> int:
    options = argument_parser("advantages", __doc__, rounds=25).parse_args()
    result = measure(options.rounds, prepare(options))
    report(result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
