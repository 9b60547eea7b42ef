"""Advantages without the trainer, for your own training loop: `python examples/advantages.py`.
It takes seconds.
"""

import argparse

import torch

from maxrl_fast import ops


def main() -> None:
    """Print the advantages of two groups by four estimators."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    # Two prompts with six rollouts each. One prompt is rarely solved, the other nearly always.
    rewards = torch.tensor([[0, 0, 1, 0, 0, 0], [1, 1, 1, 0, 1, 1]])  # [G, N]

    for name, advantages in {
        "RLOO": ops.rloo_advantage(rewards),
        "GRPO": ops.grpo_advantage(rewards),
        "MaxRL": ops.maxrl_advantage(rewards),
        "MaxPO, k = 3": ops.maxpo_advantage(rewards, k=3),
    }.items():
        print(
            f"{name:<13}",
            *(" ".join(f"{a:6.2f}" for a in group) + "   " for group in advantages.tolist()),
        )

    # With continuous rewards and k = N - 1, only the best rollout gains, by its distance to the
    # second.
    print(
        "max@3 of continuous rewards:",
        *ops.maxpo_advantage(torch.tensor([[0.1, 0.7, 0.2, 0.9]]), k=3).tolist(),
    )


if __name__ == "__main__":
    main()
