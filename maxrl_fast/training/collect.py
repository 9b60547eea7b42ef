"""Collects a step's samples and rewards, in rounds where a schedule asks for them."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated

import torch
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.records import PROMPT, SEQUENCE, Prompts, Rollouts, Samples
from maxrl_fast.rollout import Engine, RolloutRequest, Sampling, check_finite, check_rewards
from maxrl_fast.rollout.sampling_and_scoring import ScoredSamples, sample_and_score
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.scorer import MetricAccumulator, Scorer
from maxrl_fast.tasks.texts import response_texts
from maxrl_fast.training.policy_reward import PolicyReward
from maxrl_fast.training.schedule import Schedule
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

    It falls linearly to -factor at the limit, the length of the longest response."""

    limit: int
    buffer: int
    factor: float = 1.0

    def __call__(self, lengths: Tensor) -> Tensor:
        """Return the penalty (<= 0) of each length, float32 of the same shape."""
        return (self.factor / self.buffer * (self.limit - self.buffer - lengths).float()).clamp_max(
            0.0
        )


@dataclass(frozen=True)
class RolloutBatch(Samples):
    """The training data of a step, the same on all ranks."""

    step: int
    # S, from the engine; `rollouts` may have other log-probs, weights or reference answers
    raw_rollouts: Annotated[Rollouts, SEQUENCE]
    # [G, N] float32, the task's rewards; 0 if not known
    task_rewards: Annotated[Tensor, PROMPT]
    rewards: Annotated[Tensor, PROMPT]  # [G, N] float32, which the objective sees
    # [G, N] bool, whose reward is known; None: all. A rollout that was not drawn has no tokens
    valid: Annotated[Tensor | None, PROMPT]
    # [G], reward of the greedy response to each prompt
    greedy_rewards: Annotated[Tensor | None, PROMPT]
    # [any number, N] of all sampled groups, including replaced ones; NaN if not known or not drawn
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
    # [S], where the objective needs them
    texts: Annotated[tuple[str, ...] | None, SEQUENCE] = None
    # [G, N] int64, rollouts of the prompt after the round of each; 0 if it was not drawn
    drawn_by: Annotated[Tensor | None, PROMPT] = None
    masks_truncated: bool = False  # their tokens are not in the loss
    sampled_after: int | None = None  # the step whose weights sampled it

    @property
    def num_sampled(self) -> int:
        """Number of prompts sampled, including replaced ones."""
        return len(self.all_rewards)

    @property
    def has_reward(self) -> Tensor:
        """[G, N] bool, rollouts whose reward is known."""
        return torch.ones_like(self.rewards, dtype=torch.bool) if self.valid is None else self.valid

    @property
    def frac_drawn(self) -> float:  # of the S samples
        return 1.0 if self.drawn_by is None else float((self.drawn_by > 0).float().mean())

    @property
    def scored_indices(self) -> Tensor:
        """Samples with a known reward, the ones trained on: int64 on the host, ascending."""
        return self.sequences if self.valid is None else self.sequences[self.valid.flatten().cpu()]

    def regrouped(self, count: int) -> "RolloutBatch":
        """Return the same samples as groups of `count`: parts of these groups, or several."""
        groups = torch.arange(len(self.rollouts) // count, device=self.rewards.device)
        owner = groups * count // self.num_rollouts
        greedy, terms = self.greedy_rewards, self.reward_terms
        return replace(
            self,
            prompts=self.prompts.select(owner),
            task_rewards=self.task_rewards.view(-1, count),
            rewards=self.rewards.view(-1, count),
            valid=None if self.valid is None else self.valid.view(-1, count),
            greedy_rewards=None if greedy is None else greedy[owner],
            reward_terms=None if terms is None else terms.view(-1, count, terms.shape[-1]),
        )

    def weighted(self, weights: Tensor) -> "RolloutBatch":
        """Return the batch with factors [T] multiplied into the importance weights."""
        if self.rollouts.importance_weights is not None:
            weights = weights * self.rollouts.importance_weights
        return replace(self, rollouts=replace(self.rollouts, importance_weights=weights))

    def in_loss(self, sequences: Tensor) -> Tensor:
        """Return those of the samples, int64 on the host, whose tokens are in the loss."""
        if not self.masks_truncated:
            return sequences
        return sequences[~self.raw_rollouts.truncated.cpu()[sequences]]

    def minibatches(self, count: int) -> list[Tensor]:
        """Split the groups into `count` equal shares: the scored samples of each, on the host."""
        shares = self.sequences.chunk(count)
        valid = None if self.valid is None else self.valid.flatten().cpu()
        return list(shares) if valid is None else [share[valid[share]] for share in shares]


@dataclass(frozen=True)
class RolloutCollector:
    """Samples and scores a step's rollouts.

    Args:
        schedule: says how many rollouts each prompt gets; None: N.
        needs: of the objective; parts not with a schedule.
        policy_reward: scores the responses instead of the scorer; not where the objective needs
            greedy responses or parts.
        length_penalty: added to the rewards that the objective sees.
        shares_engine: whether the engine samples for several ranks, which call it together.
        truncated: of --truncated: keep, zero or mask."""

    task: Task
    engine: Engine
    scorer: Scorer
    sampling: Sampling
    num_prompts: int  # G
    num_rollouts: int  # N
    seed: int = 0
    device: torch.device = CPU
    schedule: Schedule | None = None
    needs: Needs = Needs()
    policy_reward: PolicyReward | None = None
    length_penalty: LengthPenalty | None = None
    clock: Stopwatch = field(default_factory=Stopwatch)
    ranks: Ranks = field(default_factory=Ranks)
    shares_engine: bool = False
    truncated: str = "keep"

    def collect(self, step: int, first_prompt: int) -> RolloutBatch:
        """Return G prompts from index `first_prompt` on, N rollouts of each, or as many as the
        schedule says, and their rewards; all ranks must call this."""
        of_rewards = MetricAccumulator()
        if self.schedule is None:
            prompts = self._prompts(first_prompt, self.num_prompts)
            batch = self._sample(step, prompts, 0, self.num_rollouts, of_rewards)
        else:
            batch = self._in_rounds(self.schedule, step, first_prompt, of_rewards)
        return self._finished(replace(batch, metrics=batch.metrics | of_rewards.over(self.ranks)))

    def _prompts(self, first_prompt: int, count: int) -> Prompts:
        with self.clock("rollout"):
            return self.task.prompts("train", first_prompt, count).to(self.device)

    def _in_rounds(
        self, schedule: Schedule, step: int, first_prompt: int, of_rewards: MetricAccumulator
    ) -> RolloutBatch:
        """Sample until the schedule asks for nothing. Samples are kept in blocks:

        prompt   0 1 2   0 2   2 2     of each block, three rounds of 3, 2 and 2 blocks
        block    0 1 2   3 4   5 6
        table    0 3 - -
                 1 - - -                a row for each prompt; -: not drawn
                 2 4 5 6"""
        size, prompts = schedule.block, Prompts.none(self.device)
        width, parts, num_blocks = self.num_rollouts // size, list[RolloutBatch](), 0
        table = torch.full((0, width), -1, device=self.device)
        ends = torch.zeros_like(table)  # rollouts of the prompt after the round of each block
        rewards = torch.full((0, self.num_rollouts), torch.nan, device=self.device)
        drawn = (table >= 0).sum(1) * size
        while (more := schedule.more(step, rewards, drawn)).any():
            if further := len(more) - len(prompts):
                new = self._prompts(first_prompt + len(prompts), further)
                prompts = Prompts.concatenate([prompts, new]) if len(prompts) else new
                table = torch.cat([table, table.new_full((further, width), -1)])
                ends = torch.cat([ends, ends.new_zeros(further, width)])
                drawn = torch.cat([drawn, drawn.new_zeros(further)])
            if (more % size).any() or (drawn + more > self.num_rollouts).any():
                raise InputError(
                    f"--schedule must ask for multiples of {size} rollouts, at most "
                    f"{self.num_rollouts} of a prompt, got {more.tolist()}"
                )
            # a call for all prompts that have, and get, as many
            for begun, count in sorted({*zip(drawn.tolist(), more.tolist(), strict=True)}):
                if not count:
                    continue
                asked = ((drawn == begun) & (more == count)).nonzero()[:, 0]
                part = self._sample(step, prompts.select(asked), begun, count, of_rewards)
                parts.append(part.regrouped(size))
                blocks = num_blocks + torch.arange(len(asked) * count // size, device=self.device)
                places = slice(begun // size, (begun + count) // size)
                table[asked, places] = blocks.view(len(asked), -1)
                ends[asked, places] = begun + count
                num_blocks += len(blocks)
            known = torch.cat([part.all_rewards.view(-1, size) for part in parts])
            known = torch.cat([known, known.new_full((1, size), torch.nan)])  # at -1
            rewards, drawn = known[table].flatten(1), (table >= 0).sum(1) * size
        metrics = schedule.metrics(step, rewards, drawn)
        chosen = schedule.chosen(step, rewards)  # [G]
        warnings = [part.warning for part in parts if part.warning]
        others = (text.removeprefix(f"step {step}: ") for text in warnings[1:])
        errors = Counter[str]()
        for part in parts:
            errors.update(part.metrics)
        order = table[chosen].flatten() % (num_blocks + 1)  # -1: the last block
        whole = RolloutBatch.concatenate([*parts, undrawn(parts[0])]).select(order)
        is_known = ~rewards[chosen].isnan()
        return replace(
            whole.regrouped(self.num_rollouts),
            valid=None if is_known.all() else is_known,
            all_rewards=rewards,
            num_tokens=sum(part.num_tokens for part in parts),
            rollout_seconds=sum(part.rollout_seconds for part in parts),
            metrics=dict(errors) | metrics,
            warning="; ".join([*warnings[:1], *others]),
            drawn_by=ends[chosen].repeat_interleave(size, 1),
        )

    def _finished(self, batch: RolloutBatch) -> RolloutBatch:
        """Add what only the objective sees: the length penalty, the texts if it needs them, and all
        ranks' components.

        Metrics, kept rollouts and the schedule see the rewards without the penalty."""
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

    def _sample(
        self, step: int, prompts: Prompts, begun: int, count: int, of_rewards: MetricAccumulator
    ) -> RolloutBatch:
        """Return `count` samples of each prompt, from number `begun` on; add the metrics of their
        rewards to `of_rewards`."""
        clock, ranks, scorer, needs = self.clock, self.ranks, self.scorer, self.needs
        first, own = ranks.part(len(prompts))  # the prompts that this rank samples
        seconds = -clock.total("rollout")
        scorer.pop_metrics()  # drop those of an evaluation, or of greedy responses
        part = prompts.take(first, own)
        asked = part, count, self.sampling, self.seed, step
        has_more = begun + count < self.num_rollouts
        request = RolloutRequest(
            *asked, first_sample=begun, beat=clock.beat, keeps_prompts=has_more
        )
        sampled = self._sample_and_score(request)
        with clock("rollout"):
            rollouts = ranks.gather(sampled.rollouts)
            check_finite(rollouts, prompts, step)
        seconds += clock.total("rollout")
        of_rank = slice(first * count, (first + own) * count)
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
        rewards = rewards.view(len(prompts), count)
        terms = self._each_reward(rewards, components) if needs.parts else None
        of_rewards.update(scorer.pop_metrics())
        if needs.greedy:
            one = replace(request, num_samples=1, sampling=self.sampling.greedy, first_sample=0)
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
            masks_truncated=self.truncated == "mask",
            term_weights=tuple(scorer.weights.values()),
            answer_lengths=answer_lengths,
        )

    def _sample_and_score(self, request: RolloutRequest) -> ScoredSamples:
        scorer = self.scorer if self.policy_reward is None else None
        how = self.clock, self.shares_engine, self.truncated == "zero"
        return sample_and_score(self.engine, self.task, scorer, request, *how)

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
            f"{when}: this objective needs rewards of 0 or 1, got {rewards[group, rollout]:g} for "
            f"prompt {prompts.ids[group]}; --reward-threshold makes them so"
        )


def undrawn(batch: RolloutBatch) -> RolloutBatch:
    """Return a group, of the batch's first prompt, whose samples were not drawn: without tokens."""
    one = batch.select(torch.zeros(1, dtype=torch.int64, device=batch.rewards.device))
    bounds, truncated = map(torch.zeros_like, (one.rollouts.cu_seqlens, one.rollouts.truncated))
    nothing = replace(one.rollouts.select(bounds[:0]), cu_seqlens=bounds, truncated=truncated)
    zeros = torch.zeros_like(one.rewards)
    return replace(
        one,
        rollouts=nothing,
        raw_rollouts=nothing,
        task_rewards=zeros,
        rewards=zeros,
        components=({},) * len(one.rollouts),
    )
