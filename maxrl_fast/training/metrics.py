"""The metrics of a training step: a line of metrics.jsonl, and its summary on the screen."""

from collections.abc import Sequence

from torch import Tensor

from maxrl_fast.runtime.device import host_numbers
from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import TOKEN_METRICS, UpdateMetrics


def step_metrics(
    batch: RolloutBatch,
    advantages: Tensor,
    updates: Sequence[UpdateMetrics],
    lr: float,
    train_seconds: float,
) -> dict[str, float]:
    """Return the metrics of a step (docs/metrics.md), given its advantages [S]. A loss's own are
    summed over the updates if they are integers, else averaged."""
    rewards, rollouts = batch.all_rewards, batch.raw_rollouts
    solved = rewards > 0.5  # False for an unknown reward (NaN)
    known = rewards if batch.valid is None else rewards[~rewards.isnan()]
    is_zero = advantages.view(batch.rewards.shape) == 0
    means = {
        "reward_mean": known.double().mean(),  # a sum of large rewards overflows float32
        "pass_at_1": (known > 0.5).float().mean(),
        "frac_prompts_solved": solved.any(1).float().mean(),
        "frac_groups_zero_variance": is_zero.all(1).float().mean(),
        # The mean of -log-prob of the samples is an unbiased estimate of the entropy; with top-p it
        # is too low.
        "entropy": -rollouts.logprobs.mean(),
        "response_length_mean": rollouts.lengths.float().mean(),
        "truncated": rollouts.truncated.float().mean(),
    }
    if batch.masks_truncated:
        masked = (rollouts.lengths * rollouts.truncated).sum()
        means["tokens_masked"] = masked / max(len(rollouts.tokens), 1)
    numbers = host_numbers(means)
    if (drawn := batch.frac_drawn) < 1:
        numbers |= {name: numbers[name] / drawn for name in ("response_length_mean", "truncated")}
    seconds = {"rollout_seconds": batch.rollout_seconds, "train_seconds": train_seconds}

    def over_updates(name: str) -> float:
        return sum(getattr(update, name) for update in updates) / len(updates)

    def over_targets(name: str) -> float:
        # in later updates the policy's change would look like an error of the rollout engine
        read = updates[:1] if name == "logprob_diff" else updates
        if num_targets := sum(update.num_targets for update in read):
            return sum(getattr(update, name) for update in read) / num_targets
        return float(name == "ratio")

    names = dict.fromkeys(name for update in updates for name in update.own)
    own = {name: [update.own[name] for update in updates if name in update.own] for name in names}

    def together(values: Sequence[float]) -> float:
        return sum(values) if isinstance(values[0], int) else sum(values) / len(values)

    computed = sum(update.num_tokens for update in updates)
    alone = sum(update.num_tokens_alone for update in updates)
    return {
        "step": batch.step,
        **numbers,
        **{name: over_updates(name) for name in ("loss", "grad_norm")},
        **{name: over_targets(name) for name in TOKEN_METRICS},
        "lr": lr,
        "num_sequences_trained": sum(update.num_sequences for update in updates),
        "tokens_shared": 1 - computed / alone if alone else 0.0,
        "num_tokens": batch.num_tokens,
        "tokens_per_second": batch.num_tokens / sum(seconds.values()),
        **seconds,
        **{name: together(values) for name, values in own.items()},
    }


def summary(record: dict[str, float]) -> str:
    more = f"kl {record['kl']:.3g}  " if record["kl"] else ""
    if "lag" in record:
        waits = {"training": record["wait_seconds"], "sampling": record["sampler_wait_seconds"]}
        longer = max(waits, key=waits.__getitem__)
        more += f"{longer} waits {waits[longer]:.1f} s  "
    more += f"draws {record['draws_mean']:.1f}  " if "draws_mean" in record else ""
    return (
        f"reward {record['reward_mean']:.3f}  solved {record['frac_prompts_solved']:.3f}  "
        f"{more}entropy {record['entropy']:.3f}  length {record['response_length_mean']:.1f}  "
        f"grad {record['grad_norm']:.2f}  {record['tokens_per_second']:,.0f} sampled tokens/s"
    )
