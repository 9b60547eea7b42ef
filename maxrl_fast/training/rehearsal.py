"""Score a few rollouts before any training, so that a reward that cannot work does not first cost a warm start."""

from dataclasses import replace

from maxrl_fast.training.collect import RolloutCollector, check_binary

NUM_PROMPTS, NUM_ROLLOUTS, MOST_TOKENS = 2, 2, 256
WHEN = "before the first step"


def rehearse(collector: RolloutCollector) -> str:
    """Score two short rollouts of each of the first two prompts, the same on all ranks.

    Return a warning if some of the rewards failed; it is empty if none did. Nothing that is learned depends on this.

    Raises:
        RewardError: if all rewards fail.
        InputError: if the parameters of a reward function do not fit, or rewards must be 0 or 1 and one is not.
    """
    scorer = collector.scorer.rehearsal()
    if not scorer.has_source and not collector.needs_binary:
        return ""
    prompts = collector.task.prompts("train", 0, NUM_PROMPTS).to(collector.device)
    scorer.check(prompts)
    sampling = replace(collector.sampling, max_new_tokens=min(collector.sampling.max_new_tokens, MOST_TOKENS))
    rollouts = collector.engine.generate(prompts, NUM_ROLLOUTS, sampling, seed=collector.seed, step=0)
    rewards = scorer.score(prompts, rollouts)
    complaint = scorer.failures(collector.ranks, WHEN)[1]
    if collector.needs_binary:
        check_binary(rewards.nan_to_num().view(len(prompts), NUM_ROLLOUTS), prompts, WHEN)
    return complaint
