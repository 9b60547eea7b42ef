"""Collects a step's samples and rewards, in rounds where a schedule asks for them."""

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from maxrl_fast.errors import InputError
from maxrl_fast.records import PROMPT, SEQUENCE, Prompts, Ragged, Rollouts, Samples
from maxrl_fast.rollout import Engine, RolloutRequest, Sampling, check_finite, check_rewards
from maxrl_fast.rollout.sampling_and_scoring import ScoredSamples, sample_and_score
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.scorer import MetricAccumulator, Scorer
from maxrl_fast.tasks.texts import response_texts
from maxrl_fast.training.policy_reward import PolicyReward
from maxrl_fast.training.schedule import Carried, Schedule
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
    """DAPO's length penalty (Yu et al. 2025, eq. 13), as in verl's reward manager; `limit` is the
    length of the longest response: min(0, factor (limit - buffer - length) / buffer)."""

    limit: int
    buffer: int
    factor: float = 1.0

    def __call__(self, lengths: Tensor) -> Tensor:
        """Return the penalty (<= 0) of each length, float32 of the same shape."""
        left = (self.limit - self.buffer - lengths).float()
        return (self.factor / self.buffer * left).clamp_max(0.0)


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
    num_new: int | None = None  # prompts that are not of an earlier step; None: all

    @property
    def num_sampled(self) -> int:
        """Number of new prompts sampled, including replaced ones."""
        return len(self.all_rewards) if self.num_new is None else self.num_new

    @property
    def has_reward(self) -> Tensor:
        """[G, N] bool, rollouts whose reward is known."""
        return torch.ones_like(self.rewards, dtype=torch.bool) if self.valid is None else self.valid

    @property
    def frac_drawn(self) -> float:  # of the S samples
        return 1.0 if self.drawn_by is None else float((self.drawn_by > 0).float().mean())

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
class Drawn(Ragged):
    """Samples of one call of the engine, and what scored them: S of some prompts."""

    raw_rollouts: Annotated[Rollouts, SEQUENCE]
    rollouts: Annotated[Rollouts, SEQUENCE]
    rewards: Annotated[Tensor, SEQUENCE]  # [S], NaN if not known
    components: Annotated[tuple[dict[str, float], ...], SEQUENCE]
    reward_terms: Annotated[Tensor | None, SEQUENCE]  # [S, R]
    answer_lengths: Annotated[Tensor | None, SEQUENCE]
    greedy_rewards: Annotated[Tensor | None, SEQUENCE]  # [S], of the prompt
    ends: Annotated[Tensor, SEQUENCE]  # [S], rollouts of the prompt after the round; 0: not drawn

    def positions(self, items: Tensor) -> dict[str, Tensor]:
        return {SEQUENCE: items}

    def nothing(self) -> "Drawn":
        """Return a sample that was not drawn: without tokens."""
        one = self.select(torch.zeros_like(self.ends[:1]))
        none = Rollouts.given([[]]).to(self.rewards.device)
        own: dict[str, Any] = {"rewards": one.rewards * torch.nan, "components": ({},)}
        return replace(one, raw_rollouts=none, rollouts=none, ends=0 * one.ends, **own)


@dataclass
class Totals:
    """Of a step's calls of the engine."""

    rewards: MetricAccumulator = field(default_factory=MetricAccumulator)
    errors: Counter[str] = field(default_factory=Counter)  # failed rewards by kind
    warnings: list[str] = field(default_factory=list)
    num_tokens: int = 0


@dataclass(frozen=True)
class RolloutCollector:
    """Samples and scores a step's rollouts.

    Args:
        schedule: says how many rollouts each prompt gets; None: N.
        carried: the prompts that go on from step to step; None: all are new. Not with a schedule.
        policy_reward: scores the responses instead of the scorer; not where the objective needs
            greedy responses or parts.
        length_penalty: added to the rewards that the objective sees.
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
    carried: Carried | None = None
    needs: Needs = Needs()
    policy_reward: PolicyReward | None = None
    length_penalty: LengthPenalty | None = None
    clock: Stopwatch = field(default_factory=Stopwatch)
    ranks: Ranks = field(default_factory=Ranks)
    shares_engine: bool = False  # the engine samples for several ranks, which call it together
    truncated: str = "keep"

    def collect(self, step: int, first_prompt: int) -> RolloutBatch:
        """Return G prompts from index `first_prompt` on, N rollouts of each, or as many as the
        schedule says, and their rewards; all ranks must call this."""
        totals, seconds = Totals(), -self.clock.total("rollout")
        if self.schedule is None:
            batch = self._of_all(step, first_prompt, totals)
        else:
            batch = self._in_rounds(self.schedule, step, first_prompt, totals)
        seconds += self.clock.total("rollout")
        metrics = batch.metrics | totals.rewards.over(self.ranks)
        return self._finished(replace(batch, metrics=metrics, rollout_seconds=seconds))

    def _of_all(self, step: int, first_prompt: int, totals: Totals) -> RolloutBatch:
        """Sample N rollouts of each prompt."""
        if self.carried is None:
            prompts = self._prompts(first_prompt, self.num_prompts)
            drawn = self._sample(step, prompts, 0, self.num_rollouts, totals)
            return self._batch(step, prompts, drawn, totals)
        places, num_new = self.carried.places(first_prompt)
        prompts = Prompts.concatenate([self._prompts(index, 1) for index in places])
        drawn = self._sample(step, prompts, 0, self.num_rollouts, totals)
        batch = self._batch(step, prompts, drawn, totals)
        metrics = batch.metrics | self.carried.observe(batch.all_rewards)
        ends = drawn.ends.view(batch.rewards.shape)
        return replace(batch, metrics=metrics, drawn_by=ends, num_new=num_new)

    def _prompts(self, first_prompt: int, count: int) -> Prompts:
        with self.clock("rollout"):
            return self.task.prompts("train", first_prompt, count).to(self.device)

    def _in_rounds(
        self, schedule: Schedule, step: int, first_prompt: int, totals: Totals
    ) -> RolloutBatch:
        """Sample until the schedule asks for nothing."""
        most, prompts, parts, num_drawn = self.num_rollouts, None, list[Drawn](), 0
        # where the samples of each prompt stand in the parts, one after another; -1: not drawn
        index = torch.full((0, most), -1, device=self.device)
        rewards, drawn = torch.zeros(0, most, device=self.device), index.sum(1)
        while (more := schedule.more(step, rewards, drawn)).any():
            if further := len(more) - len(drawn):
                new = self._prompts(first_prompt + len(drawn), further)
                prompts = Prompts.concatenate([prompts, new]) if prompts else new
                index, drawn = pad(index, (0, 0, 0, further), value=-1), pad(drawn, (0, further))
            if prompts is None or (drawn + more > most).any():
                raise InputError(
                    f"--schedule must ask for at most {most} rollouts of a prompt, got "
                    f"{more.tolist()}"
                )
            # a call for all prompts that have, and get, as many
            for begun, count in sorted({*zip(drawn.tolist(), more.tolist(), strict=True)}):
                if not count:
                    continue
                asked = ((drawn == begun) & (more == count)).nonzero()[:, 0]
                part = self._sample(step, prompts.select(asked), begun, count, totals)
                numbers = num_drawn + torch.arange(len(part.rewards), device=self.device)
                index[asked, begun : begun + count] = numbers.view(-1, count)
                num_drawn += len(part.rewards)
                parts.append(part)
            known = torch.cat([x.rewards for x in (*parts, parts[0].nothing())])
            rewards, drawn = known[index], (index >= 0).sum(1)
        assert prompts is not None
        metrics = schedule.metrics(step, rewards, drawn)
        chosen = schedule.chosen(step, rewards)  # [G]
        order = index[chosen].flatten() % (num_drawn + 1)  # -1: the last one
        whole = Drawn.concatenate([*parts, parts[0].nothing()]).select(order)
        batch = self._batch(step, prompts.select(chosen), whole, totals)
        ends = whole.ends.view(batch.rewards.shape)
        return replace(batch, all_rewards=rewards, metrics=batch.metrics | metrics, drawn_by=ends)

    def _batch(self, step: int, prompts: Prompts, samples: Drawn, totals: Totals) -> RolloutBatch:
        """Return the samples of these prompts, N of each."""
        shape = len(prompts), self.num_rollouts
        rewards, greedy, terms = samples.rewards, samples.greedy_rewards, samples.reward_terms
        rewards, valid = rewards.view(shape), ~rewards.isnan().view(shape)
        # a GPU is read only where rewards can be unknown
        can_miss = bool(totals.warnings) or (self.schedule is not None and not bool(valid.all()))
        return RolloutBatch(
            prompts=prompts,
            rollouts=samples.rollouts,
            step=step,
            raw_rollouts=samples.raw_rollouts,
            task_rewards=rewards.nan_to_num(),
            rewards=rewards.nan_to_num(),
            valid=valid if can_miss else None,
            greedy_rewards=None if greedy is None else greedy.view(shape)[:, 0],
            all_rewards=rewards,
            num_tokens=totals.num_tokens,
            rollout_seconds=0.0,
            metrics=dict(totals.errors),
            warning="; ".join(totals.warnings),
            components=samples.components,
            reward_terms=None if terms is None else terms.view(*shape, -1),
            term_weights=tuple(self.scorer.weights.values()),
            answer_lengths=samples.answer_lengths,
            masks_truncated=self.truncated == "mask",
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

    def _sample(self, step: int, prompts: Prompts, begun: int, count: int, totals: Totals) -> Drawn:
        """Return `count` samples of each prompt, from number `begun` on."""
        clock, ranks, scorer, needs = self.clock, self.ranks, self.scorer, self.needs
        first, own = ranks.part(len(prompts))  # the prompts that this rank samples
        scorer.pop_metrics()  # drop those of an evaluation, or of greedy responses
        asked = prompts.take(first, own), count, self.sampling, self.seed, step
        more = begun + count < self.num_rollouts
        request = RolloutRequest(*asked, beat=clock.beat, first_sample=begun, keeps_prompts=more)
        sampled = self._sample_and_score(request)
        with clock("rollout"):
            rollouts = ranks.gather(sampled.rollouts)
            check_finite(rollouts, prompts, step)
        of_rank = slice(first * count, (first + own) * count)
        learned, answer_lengths, greedy = rollouts, None, None
        with clock("reward"):
            if self.policy_reward is not None:
                scores = self.policy_reward.score(prompts, rollouts)
                rewards, components = scores.rewards, tuple(scores.components[of_rank])
                learned, answer_lengths = scores.answered, scores.answer_lengths
                for name, value in chain.from_iterable(map(dict.items, components)):
                    totals.rewards.add(f"reward/{name}", value)
            else:
                rewards, components = ranks.concatenate(sampled.rewards), sampled.components
        terms = None
        if needs.parts:  # [S, R], NaN where one does not apply
            own_terms = [[x.get(name, torch.nan) for name in scorer.weights] for x in components]
            terms = torch.tensor(own_terms, dtype=torch.float32).to(rewards.device)
            terms = ranks.concatenate(terms)
        totals.rewards.update(scorer.pop_metrics())
        if needs.greedy:
            one = replace(request, num_samples=1, sampling=self.sampling.greedy, first_sample=0)
            greedy = ranks.concatenate(self._sample_and_score(one).rewards)
            greedy = greedy.repeat_interleave(count)
            rewards = rewards.masked_fill(greedy.isnan(), torch.nan)  # as if all had failed
        failed, warning = scorer.failures(ranks, f"step {step}")
        totals.errors.update({f"reward_{kind}": number for kind, number in failed.items()})
        totals.warnings += [warning] * bool(warning)
        totals.num_tokens += len(rollouts.tokens)
        known = (rewards.nan_to_num() if warning else rewards).view(-1, count)
        check_rewards(known, prompts, step)
        if needs.binary:
            check_binary(known, prompts, f"step {step}")
        parts: list[dict[str, float]] = [{} for _ in range(len(rollouts))]
        parts[of_rank] = components
        ends = torch.full_like(rollouts.lengths, begun + count)
        given = rewards, tuple(parts), terms, answer_lengths, greedy, ends
        return Drawn(rollouts, learned, *given)

    def _sample_and_score(self, request: RolloutRequest) -> ScoredSamples:
        scorer = self.scorer if self.policy_reward is None else None
        how = self.clock, self.shares_engine, self.truncated == "zero"
        return sample_and_score(self.engine, self.task, scorer, request, *how)


def check_binary(rewards: Tensor, prompts: Prompts, when: str) -> None:
    """Raise InputError naming the first prompt with a reward [G, N] other than 0 and 1."""
    broken = ((rewards != 0) & (rewards != 1)).nonzero()
    if len(broken):
        group, rollout = broken[0].tolist()
        raise InputError(
            f"{when}: this objective needs rewards of 0 or 1, got {rewards[group, rollout]:g} for "
            f"prompt {prompts.ids[group]}; --reward-threshold makes them so"
        )
