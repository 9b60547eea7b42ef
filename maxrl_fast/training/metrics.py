"""What a training step reports: a line of metrics.jsonl, and the short form of it on the screen."""

from collections.abc import Sequence

from torch import Tensor

from maxrl_fast.training.collect import Collected
from maxrl_fast.training.learner import UpdateMetrics


def step_metrics(
    step: int,
    collected: Collected,
    advantages: Tensor,
    updates: Sequence[UpdateMetrics],
    lr: float,
    seconds: dict[str, float],
) -> dict[str, float]:
    """Means over the rollouts of the step, of rewards over all that were sampled; of the loss, and of the gradient's norm and
    moments over the updates; of ratios, clips, divergence and logprob_diff over the tokens trained on.

    Args:
        advantages: [G, N].
    """
    rewards, rollouts = collected.sampled_rewards, collected.rollouts
    solved = rewards > 0.5  # NaN, of a reward that is not known, is not
    known = rewards[~rewards.isnan()]
    num_targets = sum(update.num_targets for update in updates)

    def over_updates(name: str) -> float:
        return sum(getattr(update, name) for update in updates) / len(updates)

    def over_targets(name: str, otherwise: float = 0.0) -> float:
        return sum(getattr(update, name) for update in updates) / num_targets if num_targets else otherwise

    return {
        "step": step,
        "reward_mean": float(known.mean()),
        "pass_at_1": float((known > 0.5).float().mean()),
        "frac_prompts_solved": float(solved.any(1).float().mean()),
        "frac_groups_dead": float((advantages == 0).all(1).float().mean()),
        # Minus the mean log-prob of what was sampled estimates the entropy without bias, whatever the engine.
        "entropy": float(-rollouts.logprobs.mean()),
        "response_length_mean": float(rollouts.lengths.float().mean()),
        "truncated": float(rollouts.truncated.float().mean()),
        **{name: over_updates(name) for name in ("loss", "grad_norm", "moment_variance")},
        "ratio": over_targets("ratio", otherwise=1.0),
        **{name: over_targets(name) for name in ("clipped_low", "clipped_high", "kl", "logprob_diff")},
        "lr": lr,
        "num_sequences_trained": sum(update.num_sequences for update in updates),
        "num_tokens": collected.num_tokens,
        "tokens_per_second": collected.num_tokens / sum(seconds.values()),
        **seconds,
    }


def summary(record: dict[str, float]) -> str:
    """One line of it."""
    return (
        f"reward {record['reward_mean']:.3f}  solved {record['frac_prompts_solved']:.3f}  "
        f"entropy {record['entropy']:.3f}  length {record['response_length_mean']:.1f}  "
        f"grad {record['grad_norm']:.2f}  {record['tokens_per_second']:,.0f} tokens/s"
    )
