"""Your own group advantage, in the operators (this script, in seconds) and in the trainer:

python examples/custom_advantage.py
python -m maxrl_fast.train --objective examples/custom_advantage.py:short_and_right
"""

import argparse
from collections.abc import Sequence

import torch

from maxrl_fast import ops


def above_median(rewards: torch.Tensor) -> torch.Tensor:
    """r - median, divided by the mean distance from it; 0 in a group of equal rewards."""
    distance = rewards - rewards.median(dim=-1, keepdim=True).values  # [G, N]
    spread = distance.abs().mean(dim=-1, keepdim=True)
    return torch.where(spread > 0, distance / spread.clamp_min(1e-8), 0.0)


def short_and_right(rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Among correct responses, the shorter ones are better: r (1 - length/longest), minus the mean
    of the group.
    """
    value = rewards * (1 - 0.5 * lengths / lengths.amax(dim=-1, keepdim=True))
    return value - value.mean(dim=-1, keepdim=True)


def new_texts(
    rewards: torch.Tensor,
    texts: Sequence[Sequence[str]],
    components: Sequence[Sequence[dict[str, float]]],
) -> torch.Tensor:
    """A reward is shared by the responses of a group with the same text, and the component
    "format" counts a tenth; minus the mean of the group.
    """
    counts = [[group.count(text) for text in group] for group in texts]
    formats = [[parts.get("format", 0.0) for parts in group] for group in components]
    value = rewards / rewards.new_tensor(counts) + 0.1 * rewards.new_tensor(formats)  # [G, N]
    return value - value.mean(dim=-1, keepdim=True)


def discounted(rewards: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """r - mean, times .98 for each token that follows in the response: [T], for every token."""
    value = rewards - rewards.mean(dim=-1, keepdim=True)  # [G, N]
    each = zip(value.flatten(), lengths.flatten().tolist(), strict=True)
    return torch.cat([v * 0.98 ** torch.arange(n - 1, -1, -1, device=v.device) for v, n in each])


def main() -> None:
    """Print the advantages of two groups of five."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    rewards = torch.tensor([[0.0, 0.0, 1.0, 0.0, 4.0], [1.0, 1.0, 1.0, 1.0, 1.0]])  # [G, N]
    lengths = torch.tensor([[10, 20, 30, 40, 50], [10, 20, 30, 40, 50]])
    for name, advantages in {
        "above_median": ops.group_advantage(rewards, above_median),
        "short_and_right": ops.group_advantage(
            (rewards > 0).float(), short_and_right, lengths=lengths
        ),
    }.items():
        print(
            f"{name:<15}",
            *(" ".join(f"{a:6.2f}" for a in group) + "   " for group in advantages.tolist()),
        )
    tokens = ops.group_advantage(rewards, discounted, lengths=lengths)  # [T]
    print(f"{'discounted':<15}", len(tokens), "tokens, the last ones", tokens[148:151].tolist())


if __name__ == "__main__":
    main()
