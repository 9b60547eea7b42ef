"""Collects a step's samples and rewards, with dynamic sampling."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Annotated

import torch
from torch import Tensor

from maxrl_fast.algorithms.group import Group
from maxrl_fast.errors import InputError
from maxrl_fast.records import PROMPT, SEQUENCE, Prompts, Rollouts, Samples
from maxrl_fast.rollout import Engine, RolloutRequest, Sampling, check_finite, check_rewards
from maxrl_fast.rollout.sampling_and_scoring import ScoredSamples, sample_and_score
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.scorer import MetricAccumulator, Scorer
from maxrl_fast.tasks.texts import response_texts
from maxrl_fast.training.policy_reward import PolicyReward
from maxrl_fast.training.stopwatch import Stopwatch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Needs:
    """What an objective needs."""

    reference: bool = False  # a frozen copy of the policy from the start of reinforcement learning
    greedy: bool = False  # the reward of the greedy response to each prompt
    binary: bool = False  # rewards of 0 or 1
    expects_binary: bool = False  # the same, but others are computable and only a warning
    parts: bool = False  # each of several rewards, not only their sum
    texts: bool = False  # the responses as text
    components: bool = False  # the components of the rewards of all ranks
    # the reward is the probability of the reference answer, which replaces each response's own
    answers: bool = False
    token_weights: bool = False  # a factor per token in the loss
    # a value function V of the state before each token, trained with the policy
    critic: bool = False
    logprob_passes: int = 0  # forward passes over a step's samples, in addition to the loss's own


@dataclass(frozen=True)
class LengthPenalty:
    """DAPO's length penalty (Yu et al. 2025, section 3.4, eq. 13), as in verl's reward manager:

        min(0, factor (limit - buffer - length) / buffer)

    It falls linearly to -factor at the limit, the length of the longest response.
    """

    limit: int
    buffer: int
    factor: float = 1.0

    def __call__(self, lengths: Tensor) -> Tensor:
        """Return the penalty (<= 0) of each length, float32 of the same shape."""
        return (self.factor / self.buffer * (self.limit - self.buffer - lengths).float()).clamp_max(
            0.0
        )


@dataclass(frozen=True)
class StdFilter:
    """RLPR's filter (Yu et al. 2025, arXiv:2506.18254), with the constants of its code: from step
    11 on, the standard deviation of a group's rewards must be `share` of the average over steps."""

    share: float
    average: Tensor  # [1] float64, of the learner's state; NaN at the start

    def bound(self, step: int) -> float:
        return self.share * float(self.average) if step > 10 else 0.0

    def observe(self, rewards: Tensor, step: int) -> None:
        """Add a step to the average: the mean of steps 6 to 10, then a moving average."""
        own = deviations(rewards)
        mean = own[own.isfinite()].mean().cpu()
        if step > 5 and mean.isfinite():
            weight = 1 / (step - 5) if step <= 10 else 0.01
            self.average.nan_to_num_(float(mean)).lerp_(mean, weight)


@dataclass(frozen=True)
class RolloutBatch(Samples):
    """The training data of a step, the same on all ranks."""

    step: int
    # S, from the engine; `rollouts` may have other log-probs, weights or reference answers
    raw_rollouts: Annotated[Rollouts, SEQUENCE]
    # [G, N] float32, the task's rewards; 0 if not known
    task_rewards: Annotated[Tensor, PROMPT]
    rewards: Annotated[Tensor, PROMPT]  # [G, N] float32, which the objective sees
    valid: Annotated[Tensor | None, PROMPT]  # [G, N] bool, whose reward is known; None: all
    # [G], reward of the greedy response to each prompt
    greedy_rewards: Annotated[Tensor | None, PROMPT]
    # [any number, N] of all sampled groups, including replaced ones; NaN if not known
    all_rewards: Tensor
    num_tokens: int  # of all sampled responses, not counting greedy ones
    rollout_seconds: float
    metrics: dict[str, float]  # of sampling, scoring and the correction
    warning: str  # about failed rewards; empty if none failed
    # [S], of this rank's rewards; {} for other ranks' samples, unless the objective needs them
    components: Annotated[tuple[dict[str, float], ...], SEQUENCE]
    # [G, N, R] float32, each of several rewards; NaN if it does not apply or is not known
    reward_terms: Annotated[Tensor | None, PROMPT] = None
    term_weights: tuple[float, ...] = ()  # [R]
    # [S] int64, tokens of the reference answer at the end of each response; 0: no answer
    answer_lengths: Annotated[Tensor | None, SEQUENCE] = None
    texts: tuple[str, ...] = ()  # [S], where the objective needs them

    @property
    def num_sampled(self) -> int:
        """Number of prompts sampled, including replaced ones."""
        return len(self.all_rewards)

    @property
    def has_reward(self) -> Tensor:
        """[G, N] bool, rollouts whose reward is known."""
        return torch.ones_like(self.rewards, dtype=torch.bool) if self.valid is None else self.valid

    @property
    def scored_indices(self) -> Tensor:
        """Samples with a known reward, the ones trained on: int64 on the host, ascending."""
        return self.sequences if self.valid is None else self.sequences[self.valid.flatten().cpu()]

    def weighted(self, weights: Tensor) -> "RolloutBatch":
        """Return the batch with factors [T] multiplied into the importance weights."""
        if self.rollouts.importance_weights is not None:
            weights = weights * self.rollouts.importance_weights
        return replace(self, rollouts=replace(self.rollouts, importance_weights=weights))

    def minibatches(self, count: int) -> list[Tensor]:
        """Split the groups into `count` equal shares: the scored samples of each, on the host."""
        shares = self.sequences.chunk(count)
        valid = None if self.valid is None else self.valid.flatten().cpu()
        return list(shares) if valid is None else [share[valid[share]] for share in shares]


@dataclass(frozen=True)
class RolloutCollector:
    """Samples and scores a step's rollouts.

    Args:
        max_batches: largest number of batches of G prompts that dynamic sampling draws in a step;
            1: no dynamic sampling.
        needs: of the objective; parts not with dynamic sampling.
        policy_reward: scores the responses instead of the scorer; not where the objective needs
            greedy responses or parts.
        std_filter: of dynamic sampling.
        length_penalty: added to the rewards that the objective sees.
        make_prompts: returns training prompts, given the first index and the count; None: the task
            makes them.
    """

    task: Task
    engine: Engine
    scorer: Scorer
    sampling: Sampling
    num_prompts: int  # G
    num_rollouts: int  # N
    seed: int = 0
    device: torch.device = CPU
    max_batches: int = 1
    needs: Needs = Needs()
    policy_reward: PolicyReward | None = None
    std_filter: StdFilter | None = None
    length_penalty: LengthPenalty | None = None
    make_prompts: Callable[[int, int], Prompts] | None = None
    clock: Stopwatch = field(default_factory=Stopwatch)
    ranks: Ranks = field(default_factory=Ranks)

    def collect(self, step: int, first_prompt: int) -> RolloutBatch:
        """Return G prompts from index `first_prompt` on, N rollouts of each, and their rewards; all
        ranks must call this.

        Dynamic sampling (DAPO, Yu et al. 2025) replaces groups whose known rewards are all equal.
        If it reaches its limit, some of these groups fill up the step.
        """
        batches: list[RolloutBatch] = []
        errors = Counter[str]()
        of_rewards = MetricAccumulator()
        num_mixed, bound = 0, self.std_filter.bound(step) if self.std_filter else 0.0
        while num_mixed < self.num_prompts and len(batches) < self.max_batches:
            batch = self._sample(step, first_prompt + len(batches) * self.num_prompts, of_rewards)
            batches.append(batch)
            errors.update(batch.metrics)
            if self.max_batches > 1:
                num_mixed += int(is_mixed(batch.all_rewards, bound).sum())
        metrics = dict(errors) | of_rewards.over(self.ranks)
        if self.max_batches == 1:
            return self._finished(replace(batches[0], metrics=metrics))
        warnings = [batch.warning for batch in batches if batch.warning]
        others = (text.removeprefix(f"step {step}: ") for text in warnings[1:])
        rewards = torch.cat([batch.all_rewards for batch in batches])
        mixed = is_mixed(rewards, bound)
        if self.std_filter:
            self.std_filter.observe(rewards, step)
        # Prefer mixed groups, then earlier ones; the chosen groups stay in the order of sampling.
        chosen = torch.argsort(~mixed, stable=True)[: self.num_prompts].sort().values  # [G]
        metrics |= {
            "num_prompts_sampled": len(mixed),
            "frac_prompts_alive": float(mixed.float().mean()),
        }
        whole = replace(
            RolloutBatch.concatenate(batches).select(chosen),
            valid=~rewards[chosen].isnan() if rewards.isnan().any() else None,
            all_rewards=rewards,
            num_tokens=sum(batch.num_tokens for batch in batches),
            rollout_seconds=sum(batch.rollout_seconds for batch in batches),
            metrics=metrics,
            warning="; ".join([*warnings[:1], *others]),
        )
        return self._finished(whole)

    def _finished(self, batch: RolloutBatch) -> RolloutBatch:
        """Add what only the objective sees: the length penalty, the texts if it needs them, and all
        ranks' components.

        Metrics, kept rollouts and dynamic sampling see the rewards without the penalty. A group
        whose rollouts all failed therefore still counts as a group of equal rewards.
        """
        if self.length_penalty is not None:
            penalties = self.length_penalty(batch.rollouts.lengths).view(batch.rewards.shape)
            rewards = (batch.rewards + penalties).masked_fill(~batch.has_reward, 0.0)
            metrics = batch.metrics | {"overlong_penalty": float(penalties.mean())}
            batch = replace(batch, rewards=rewards, metrics=metrics)
        if self.needs.texts:
            batch = replace(batch, texts=tuple(response_texts(self.task, batch.raw_rollouts)))
        if self.needs.components:
            own = [(s, parts) for s, parts in enumerate(batch.components) if parts]
            known = dict(chain(*self.ranks.values(own)))
            whole = (known.get(s, {}) for s in range(len(batch.raw_rollouts)))
            batch = replace(batch, components=tuple(whole))
        return batch

    def _sample(self, step: int, first_prompt: int, of_rewards: MetricAccumulator) -> RolloutBatch:
        """Return one batch; add the metrics of its rewards to `of_rewards`."""
        clock, ranks, scorer, needs = self.clock, self.ranks, self.scorer, self.needs
        first, own = ranks.part(self.num_prompts)  # the prompts that this rank samples
        seconds = -clock.total("rollout")
        with clock("rollout"):
            make_prompts = self.make_prompts or partial(self.task.prompts, "train")
            prompts = make_prompts(first_prompt, self.num_prompts).to(self.device)
            part = prompts.take(first, own)
        scorer.pop_metrics()  # drop those of an evaluation, or of greedy responses
        whole = part, self.num_rollouts, self.sampling, self.seed, step
        request = RolloutRequest(*whole, beat=clock.beat)
        sampled = self._sample_and_score(request)
        with clock("rollout"):
            rollouts = ranks.gather(sampled.rollouts)
            check_finite(rollouts, prompts, step)
        seconds += clock.total("rollout")
        of_rank = slice(first * self.num_rollouts, (first + own) * self.num_rollouts)
        learned, answer_lengths, greedy_rewards = rollouts, None, None
        with clock("reward"):
            if self.policy_reward is not None:
                scores = self.policy_reward.score(prompts, rollouts)
                rewards, components = scores.rewards, tuple(scores.components[of_rank])
                learned, answer_lengths = scores.answered, scores.answer_lengths
                for name, value in chain.from_iterable(map(dict.items, components)):
                    of_rewards.add(f"reward/{name}", value)
            else:
                rewards, components = ranks.concatenate(sampled.rewards), sampled.components
        rewards = rewards.view(len(prompts), self.num_rollouts)
        terms = self._each_reward(rewards, components) if needs.parts else None
        of_rewards.update(scorer.pop_metrics())
        if needs.greedy:
            one = replace(request, num_samples=1, sampling=self.sampling.greedy)
            greedy_rewards = ranks.concatenate(self._sample_and_score(one).rewards)
            # as if all had failed
            rewards = rewards.masked_fill(greedy_rewards.isnan()[:, None], float("nan"))
        failed, warning = scorer.failures(ranks, f"step {step}")
        known = rewards.nan_to_num() if warning else rewards
        check_rewards(known, prompts, step)
        if needs.binary:
            check_binary(known, prompts, f"step {step}")
        parts: list[dict[str, float]] = [{} for _ in range(len(rollouts))]
        parts[of_rank] = components
        return RolloutBatch(
            prompts=prompts,
            rollouts=learned,
            step=step,
            raw_rollouts=rollouts,
            task_rewards=known,
            rewards=known,
            # samples without a reward are left out of their group
            valid=~rewards.isnan() if warning else None,
            greedy_rewards=greedy_rewards,
            all_rewards=rewards,
            num_tokens=len(rollouts.tokens),
            rollout_seconds=seconds,
            metrics={f"reward_{kind}": count for kind, count in failed.items()},
            warning=warning,
            components=tuple(parts),
            reward_terms=terms,
            term_weights=tuple(scorer.weights.values()),
            answer_lengths=answer_lengths,
        )

    def _sample_and_score(self, request: RolloutRequest) -> ScoredSamples:
        scorer = self.scorer if self.policy_reward is None else None
        return sample_and_score(self.engine, self.task, scorer, request, self.clock)

    def _each_reward(self, rewards: Tensor, components: Sequence[dict[str, float]]) -> Tensor:
        """Return the values [G, N, R] of each reward; NaN if it does not apply."""
        own = [[parts.get(name, torch.nan) for name in self.scorer.weights] for parts in components]
        # [S, R]
        values = self.ranks.concatenate(torch.tensor(own, dtype=torch.float32).to(rewards.device))
        return values.view(*rewards.shape, -1)


def check_binary(rewards: Tensor, prompts: Prompts, when: str) -> None:
    """Raise InputError naming the first prompt with a reward [G, N] other than 0 and 1."""
    broken = ((rewards != 0) & (rewards != 1)).nonzero()
    if len(broken):
        group, rollout = broken[0].tolist()
        raise InputError(
            f"{when}: this objective needs rewards of 0 or 1, got "
            f"{float(rewards[group, rollout]):g} for prompt "
            f"{int(prompts.ids[group])}; --reward-threshold makes them so"
        )


def deviations(rewards: Tensor) -> Tensor:
    """Return the standard deviation [G] of the known rewards of groups; inf of fewer than two."""
    group = Group(rewards.double().nan_to_num(), ~rewards.isnan())
    return group.std(group.rewards, 1)[:, 0]


def is_mixed(rewards: Tensor, bound: float = 0.0) -> Tensor:
    """Return the groups [G] whose known rewards [G, N] differ, with this standard deviation."""
    known = ~rewards.isnan()
    largest, smallest = (rewards.masked_fill(~known, fill) for fill in (-torch.inf, torch.inf))
    mixed = known.any(1) & (largest.amax(1) > smallest.amin(1))
    return mixed & ~(deviations(rewards) < bound) if bound else mixed
