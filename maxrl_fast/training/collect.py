"""A step's rollouts and their rewards: sampled, scored, and with dynamic sampling replaced where a group says nothing."""

from collections import Counter
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from maxrl_fast.config.options import Config
from maxrl_fast.distributed.ranks import Ranks
from maxrl_fast.errors import InputError
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.rewards.scoring import Scorer
from maxrl_fast.rollout import Engine, Sampling, check_finite, check_rewards
from maxrl_fast.run.control import Stopwatch
from maxrl_fast.tasks import Task


@dataclass(frozen=True)
class Collected:
    """What a step learns from, the same on all ranks."""

    prompts: Prompts  # G
    rollouts: Rollouts  # S = G N
    rewards: Tensor  # [G, N] float32, 0 where unknown
    valid: Tensor | None  # [G, N] bool, which of them are known; None: all
    greedy_rewards: Tensor | None  # [G], of the likeliest response to each prompt
    sampled_rewards: Tensor  # [any number, N], of all sampled groups, those replaced included; NaN where unknown
    num_tokens: int  # of all responses that were sampled, but for the likeliest
    rollout_seconds: float
    numbers: dict[str, float]  # what is to be reported beside the usual
    complaint: str  # of failed rewards, empty where none did

    @property
    def num_sampled(self) -> int:
        """Prompts that were sampled for it."""
        return len(self.sampled_rewards)


class Collector:
    """Samples and scores a step's rollouts.

    Args:
        config: resolved.
        needs_greedy: whether the likeliest response to each prompt is to be scored too.
        needs_binary: whether rewards must be 0 or 1.
    """

    def __init__(
        self,
        config: Config,
        task: Task,
        engine: Engine,
        scorer: Scorer,
        clock: Stopwatch,
        ranks: Ranks,
        needs_greedy: bool = False,
        needs_binary: bool = False,
    ):
        self._task, self._engine, self._scorer, self._clock, self._ranks = task, engine, scorer, clock, ranks
        self._sampling, self._seed, self._device = Sampling.of(config, task), config.run.seed, torch.device(config.run.device)
        self._num_prompts, self._num_rollouts = config.rollout.prompts, config.rollout.rollouts
        self._num_batches = max(config.rollout.dynamic_sampling, 1)
        self._needs_greedy, self._needs_binary = needs_greedy, needs_binary

    def collect(self, step: int, next_prompt: int) -> Collected:
        """G prompts from `next_prompt` on, N rollouts of each, and their rewards.

        With dynamic sampling (DAPO, Yu et al. 2025), groups whose known rewards are all equal give way to others that are
        sampled for them, up to the limit; where that is reached, some stay to fill the step.

        Raises:
            NonFiniteError, RewardError: naming the step and the prompt.
            InputError: where rewards must be 0 or 1, and one is not.
        """
        batches: list[Collected] = []
        errors, answers, num_alive = Counter[str](), Counter[str](), 0
        while num_alive < self._num_prompts and len(batches) < self._num_batches:
            batch = self._sample(step, next_prompt + len(batches) * self._num_prompts, answers)
            batches.append(batch)
            errors.update(batch.numbers)
            num_alive += int(is_alive(batch.sampled_rewards).sum())
        numbers = dict(errors) | self._scorer.answer_rates(answers, self._ranks)
        complaints = [batch.complaint for batch in batches if batch.complaint]
        complaint = "; ".join([*complaints[:1], *(text.removeprefix(f"step {step}: ") for text in complaints[1:])])
        if self._num_batches == 1:
            return replace(batches[0], numbers=numbers)
        whole = _joined(batches)
        alive = is_alive(whole.sampled_rewards)
        # The living first, each part in the order in which it was sampled: with enough of them, the earliest.
        chosen = torch.argsort(~alive, stable=True)[: self._num_prompts].sort().values
        numbers |= {"num_prompts_sampled": len(alive), "frac_prompts_alive": float(alive.float().mean())}
        return replace(_chosen(whole, chosen, self._num_rollouts), numbers=numbers, complaint=complaint)

    def _sample(self, step: int, first_prompt: int, answers: Counter[str]) -> Collected:
        """A batch of prompts; what their answers are like is added to `answers`."""
        clock, ranks, engine = self._clock, self._ranks, self._engine
        first, own = ranks.part(self._num_prompts)  # of the prompts, this rank's to sample
        with clock("rollout") as lap:
            prompts = self._task.prompts("train", first_prompt, self._num_prompts).to(self._device)
            part = prompts.take(first, own)
            sampled = engine.generate(part, self._num_rollouts, self._sampling, seed=self._seed, step=step)
            rollouts = ranks.concatenate_rollouts(sampled)
            check_finite(rollouts, prompts, step)
        self._scorer.take_answers()  # of an evaluation, or of greedy responses
        with clock("reward"):
            rewards = ranks.concatenate(self._scorer.score(part, sampled)).view(len(prompts), self._num_rollouts)
        answers.update(self._scorer.take_answers())
        greedy_rewards = None
        if self._needs_greedy:
            with clock("rollout"):
                greedy = engine.generate(part, 1, self._sampling.greedy, seed=self._seed, step=step)
            with clock("reward"):
                greedy_rewards = ranks.concatenate(self._scorer.score(part, greedy))
            rewards = rewards.masked_fill(greedy_rewards.isnan()[:, None], float("nan"))  # as if all had failed
        failed, complaint = self._scorer.failures(ranks, f"step {step}")
        valid = ~rewards.isnan() if complaint else None  # failed rewards are NaN, and their rollouts in no group
        known = rewards.nan_to_num() if complaint else rewards
        check_rewards(known, prompts, step)
        if self._needs_binary:
            check_binary(known, prompts, step)
        numbers: dict[str, float] = {f"reward_{kind}": count for kind, count in failed.items()}
        return Collected(
            prompts=prompts,
            rollouts=rollouts,
            rewards=known,
            valid=valid,
            greedy_rewards=greedy_rewards,
            sampled_rewards=rewards,
            num_tokens=len(rollouts.tokens),
            rollout_seconds=lap.seconds,
            numbers=numbers,
            complaint=complaint,
        )


def check_binary(rewards: Tensor, prompts: Prompts, step: int) -> None:
    """Raise InputError naming the first prompt with a reward [G, N] that is neither 0 nor 1."""
    broken = ((rewards != 0) & (rewards != 1)).nonzero()
    if len(broken):
        group, rollout = broken[0].tolist()
        raise InputError(
            f"step {step}: this objective needs rewards of 0 or 1, got {float(rewards[group, rollout]):g} for prompt "
            f"{int(prompts.ids[group])}; --reward-threshold makes them so"
        )


def is_alive(rewards: Tensor) -> Tensor:
    """Which groups [G] have known rewards [G, N] that differ."""
    known = ~rewards.isnan()
    largest, smallest = (rewards.masked_fill(~known, fill) for fill in (-torch.inf, torch.inf))
    return known.any(1) & (largest.amax(1) > smallest.amin(1))


def _joined(batches: list[Collected]) -> Collected:
    """All groups of several batches."""
    greedy = [batch.greedy_rewards for batch in batches if batch.greedy_rewards is not None]
    rewards = torch.cat([batch.sampled_rewards for batch in batches])
    return Collected(
        prompts=Prompts.concatenate([batch.prompts for batch in batches]),
        rollouts=Rollouts.concatenate([batch.rollouts for batch in batches]),
        rewards=rewards.nan_to_num(),
        valid=~rewards.isnan() if rewards.isnan().any() else None,
        greedy_rewards=torch.cat(greedy) if greedy else None,
        sampled_rewards=rewards,
        num_tokens=sum(batch.num_tokens for batch in batches),
        rollout_seconds=sum(batch.rollout_seconds for batch in batches),
        numbers={},
        complaint="",
    )


def _chosen(whole: Collected, groups: Tensor, num_rollouts: int) -> Collected:
    """What is left with some of the groups; `sampled_rewards` stay those of all."""
    sequences = (groups[:, None] * num_rollouts + torch.arange(num_rollouts, device=groups.device)).flatten()
    return replace(
        whole,
        prompts=whole.prompts.select(groups),
        rollouts=whole.rollouts.select(sequences),
        rewards=whole.rewards[groups],
        valid=None if whole.valid is None else whole.valid[groups],
        greedy_rewards=None if whole.greedy_rewards is None else whole.greedy_rewards[groups],
    )
