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
    known = rewards if batch.valid is None else rewards[~rewards.isnan()]
    is_zero = advantages.view(batch.rewards.shape) == 0
    means = {
        "reward_mean": known.double().mean(),  # a sum of large rewards overflows float32
        "pass_at_1": (known > 0.5).float().mean(),
        "frac_prompts_solved": (rewards > 0.5).any(1).float().mean(),  # NaN is not
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

    def total(name: str, of: Sequence[UpdateMetrics] = updates) -> float:
        return sum(getattr(update, name) for update in of)

    for name in ("loss", "grad_norm"):
        numbers[name] = total(name) / len(updates)
    for name in TOKEN_METRICS:
        # in later updates the policy's change would look like an error of the rollout engine
        read = updates[:1] if name == "logprob_diff" else updates
        num_targets = total("num_targets", read)
        numbers[name] = total(name, read) / num_targets if num_targets else float(name == "ratio")
    own = dict[str, float]()
    for name in dict.fromkeys(name for update in updates for name in update.own):
        values = [update.own[name] for update in updates if name in update.own]
        own[name] = sum(values) if isinstance(values[0], int) else sum(values) / len(values)
    alone = total("num_tokens_alone")
    return {
        "step": batch.step,
        **numbers,
        "lr": lr,
        "num_sequences_trained": total("num_sequences"),
        "tokens_shared": 1 - total("num_tokens") / alone if alone else 0.0,
        "num_tokens": batch.num_tokens,
        "tokens_per_second": batch.num_tokens / (batch.rollout_seconds + train_seconds),
        "rollout_seconds": batch.rollout_seconds,
        "train_seconds": train_seconds,
        **own,
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
