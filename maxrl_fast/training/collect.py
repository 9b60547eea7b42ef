"""Collects a step's samples and rewards, in rounds where a schedule asks for them."""

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from maxrl_fast.algorithms.options import CountOrZero, Limit, Positive
from maxrl_fast.errors import InputError
from maxrl_fast.records import PROMPT, SEQUENCE, Prompts, Rollouts, Samples
from maxrl_fast.rewards.options import Reward
from maxrl_fast.rollout import (
    Decoding,
    Engine,
    RolloutRequest,
    Sampling,
    ScoredSamples,
    check_finite,
    check_rewards,
    sample_and_score,
)
from maxrl_fast.runtime.background import Stopwatch
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task, response_texts
from maxrl_fast.tasks.scorer import MetricAccumulator, Scorer
from maxrl_fast.training.answers import PolicyReward
from maxrl_fast.training.schedule import Carried, Drawn, Schedule, ScheduleOptions

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Needs:
    reference: bool = False  # a frozen copy of the policy from the start of reinforcement learning
    greedy: bool = False  # rewards of greedy responses
    binary: bool = False  # rewards of 0 or 1
    expects_binary: bool = False  # the same, but others are computable and only a warning
    parts: bool = False  # each of several rewards, not only their sum
    texts: bool = False  # the responses as text
    answers: bool = False  # probabilities of reference answers, in place of each response's own
    token_weights: bool = False  # a factor per token in the loss
    critic: bool = False  # a value function of the state before each token, trained with the policy


@dataclass(frozen=True)
class Shaping(Reward):
    """How responses are scored."""

    reward_source: Literal["given", "vote", "logprob", "mean_logprob", "rlpr"] = "given"
    """given: by the task or --reward; vote: 1 for the prompt's most frequent answer, else 0;
    logprob: the policy's, of the reference answer after the reasoning; mean_logprob: its mean over
    tokens; rlpr: RLPR's."""
    overlong_buffer: CountOrZero = 0
    """DAPO's overlong punishment, in the last tokens before --max-new-tokens; 0: none."""
    overlong_penalty: Positive = 1.0
    """Reward that a response of --max-new-tokens tokens loses."""
    truncated: Literal["keep", "zero", "mask"] = "keep"
    """Responses cut by the length limit: as others, with reward 0, or out of the loss."""

    def length_penalty(self, lengths: Tensor, limit: int) -> Tensor:
        """DAPO's (Yu et al. 2025, eq. 13), as in verl: docs/tasks.md."""
        left = (limit - self.overlong_buffer - lengths).float()
        return (self.overlong_penalty / self.overlong_buffer * left).clamp_max(0.0)


@dataclass(frozen=True)
class SamplingOptions(ScheduleOptions, Decoding):
    """How responses are sampled."""

    ahead: Annotated[int, Limit("an integer from 0 to 4", lambda x: 0 <= x <= 4)] = 0
    """Sample while the policy trains, from weights this many updates old; 0: do not."""


@dataclass(frozen=True)
class RolloutBatch(Samples):
    """The training data of a step, the same on all ranks."""

    step: int
    # as the engine sampled them; `rollouts` may have other log-probs, weights or answers
    raw_rollouts: Annotated[Rollouts, SEQUENCE]
    task_rewards: Annotated[Tensor, PROMPT]  # [G, N] float32; 0 if not known
    rewards: Annotated[Tensor, PROMPT]  # [G, N] float32, which the objective sees
    # [any number, N] of all sampled groups, also replaced ones; NaN if not known or not drawn
    all_rewards: Tensor
    num_tokens: int  # of all sampled responses, not counting greedy ones
    components: Annotated[tuple[dict[str, float], ...], SEQUENCE]  # [S], of the rewards
    # [G, N] bool, whose reward is known; None: all. A rollout that was not drawn has no tokens
    valid: Annotated[Tensor | None, PROMPT] = None
    greedy_rewards: Annotated[Tensor | None, PROMPT] = None  # [G], of greedy responses
    rollout_seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)  # of sampling, scoring, correction
    warning: str = ""  # about failed rewards
    # [G, N, R] float32, each of several rewards; NaN if it does not apply or is not known
    reward_terms: Annotated[Tensor | None, PROMPT] = None
    term_weights: tuple[float, ...] = ()  # [R]
    # [S] int64, tokens of the reference answer at the end of each response; 0: no answer
    answer_lengths: Annotated[Tensor | None, SEQUENCE] = None
    texts: Annotated[tuple[str, ...] | None, SEQUENCE] = None  # [S], where an objective needs them
    # [G, N] int64, rollouts of the prompt after the round of each; 0 if it was not drawn
    drawn_by: Annotated[Tensor | None, PROMPT] = None
    masks_truncated: bool = False  # their tokens are not in the loss
    sampled_after: int | None = None  # the step whose weights sampled it
    num_new: int | None = None  # prompts that are not of an earlier step; None: all
    # [S], what the check of each response said; None: a checkpoint of before
    messages: Annotated[tuple[str, ...] | None, SEQUENCE] = None

    @property
    def num_sampled(self) -> int:  # new prompts, including replaced ones
        return len(self.all_rewards) if self.num_new is None else self.num_new

    @property
    def has_reward(self) -> Tensor:  # [G, N] bool
        return torch.ones_like(self.rewards, dtype=torch.bool) if self.valid is None else self.valid

    @property
    def frac_drawn(self) -> float:  # of the S samples
        return 1.0 if self.drawn_by is None else float((self.drawn_by > 0).float().mean())

    def in_loss(self, sequences: Tensor) -> Tensor:
        """Return the samples, int64 on the host, whose tokens are in the loss."""
        if not self.masks_truncated:
            return sequences
        return sequences[~self.raw_rollouts.truncated.cpu()[sequences]]

    def minibatches(self, count: int) -> list[Tensor]:
        """Split the groups into `count` equal shares: the scored samples of each, on the host."""
        shares = self.sequences.chunk(count)
        valid = None if self.valid is None else self.valid.flatten().cpu()
        return list(shares) if valid is None else [share[valid[share]] for share in shares]

    def grouped(self, prompts: Prompts, num_rollouts: int) -> "RolloutBatch":
        """Return the same samples as `num_rollouts` to each of these prompts."""
        names = ("task_rewards", "rewards", "greedy_rewards", "reward_terms", "drawn_by")
        own: dict[str, Any] = {n: x for n in names if (x := getattr(self, n)) is not None}
        own = {n: x.reshape(len(prompts), num_rollouts, *x.shape[2:]) for n, x in own.items()}
        return replace(self, prompts=prompts, **own)

    def nothing(self) -> "RolloutBatch":
        """Return a sample that was not drawn, of a batch of one to each prompt."""
        one = self.select(torch.zeros(1, dtype=torch.int64, device=self.rewards.device))
        none, rewards = Rollouts.given([[]]).to(self.rewards.device), one.rewards * torch.nan
        return replace(
            one,
            raw_rollouts=none,
            rollouts=none,
            rewards=rewards,
            drawn_by=torch.zeros_like(rewards, dtype=torch.int64),
            components=({},),
            messages=("",),
        )


@dataclass(frozen=True)
class RolloutCollector:
    task: Task
    engine: Engine
    scorer: Scorer
    sampling: Sampling
    options: ScheduleOptions
    shaping: Shaping = Shaping()
    seed: int = 0
    device: torch.device = CPU
    schedule: Schedule | None = None  # how many rollouts each prompt gets; None: N
    # which prompts a step has; None: the next ones. Not with a schedule
    chosen: Carried | Drawn | None = None
    needs: Needs = Needs()
    # in place of the scorer; not where the objective needs greedy responses or parts
    policy_reward: PolicyReward | None = None
    clock: Stopwatch = field(default_factory=Stopwatch)
    ranks: Ranks = field(default_factory=Ranks)

    def collect(self, step: int, first_prompt: int) -> RolloutBatch:
        """Return G prompts from index `first_prompt` on, their rollouts and rewards; all ranks must
        call this."""
        means, seconds = MetricAccumulator(), -self.clock.total("rollout")
        if self.schedule is not None:
            batch = self._in_rounds(self.schedule, step, first_prompt, means)
        elif chosen := self.chosen:
            places, num_new = chosen.places(first_prompt, step)
            prompts = Prompts.concatenate([self._prompts(index, 1) for index in places])
            batch = self._sample(step, prompts, 0, self.options.rollouts, means)
            metrics = batch.metrics | chosen.observe(batch.all_rewards)
            batch = replace(batch, metrics=metrics, num_new=num_new)
        else:
            prompts = self._prompts(first_prompt, self.options.prompts)
            batch = self._sample(step, prompts, 0, self.options.rollouts, means)
        seconds += self.clock.total("rollout")
        metrics = batch.metrics | means.over(self.ranks)
        return self._finished(replace(batch, metrics=metrics, rollout_seconds=seconds))

    def _prompts(self, first_prompt: int, count: int) -> Prompts:
        with self.clock("rollout"):
            return self.task.prompts("train", first_prompt, count).to(self.device)

    def _in_rounds(
        self, schedule: Schedule, step: int, first_prompt: int, means: MetricAccumulator
    ) -> RolloutBatch:
        most, prompts, parts, num_drawn = self.options.rollouts, None, list[RolloutBatch](), 0
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
                if count:
                    asked = ((drawn == begun) & (more == count)).nonzero()[:, 0]
                    part = self._sample(step, prompts.select(asked), begun, count, means)
                    slots = torch.arange(part.rewards.numel(), device=self.device)
                    index[asked, begun : begun + count] = num_drawn + slots.view(-1, count)
                    # a batch of one to each of as many prompts, which follow at the end
                    none = Prompts(slots[:0], pad(0 * slots, (1, 0)), slots)
                    parts.append(part.grouped(none, 1))
                    num_drawn += len(slots)
            known = torch.cat([part.rewards for part in (*parts, parts[0].nothing())])
            rewards, drawn = known[index, 0], (index >= 0).sum(1)
        assert prompts is not None
        metrics, errors = schedule.metrics(step, rewards, drawn), Counter[str]()
        for part in parts:
            errors.update(part.metrics)
        chosen = schedule.chosen(step, rewards)  # [G]
        order = index[chosen].flatten() % (num_drawn + 1)  # -1: the last one
        whole = RolloutBatch.concatenate([*parts, parts[0].nothing()]).select(order)
        return replace(
            whole.grouped(prompts.select(chosen), most),
            all_rewards=rewards,
            num_tokens=sum(part.num_tokens for part in parts),
            metrics={**errors, **metrics},
            warning="; ".join(part.warning for part in parts if part.warning),
        )

    def _finished(self, batch: RolloutBatch) -> RolloutBatch:
        """Replace unknown rewards, and add what only the objective sees: the length penalty and the
        texts."""
        valid, rewards, own = ~batch.rewards.isnan(), batch.rewards.nan_to_num(), dict[str, Any]()
        # a GPU is read only where rewards can be unknown
        if batch.warning or (self.schedule is not None and not bool(valid.all())):
            own["valid"] = valid
        own["task_rewards"] = own["rewards"] = rewards
        if self.shaping.overlong_buffer:
            limit, lengths = self.sampling.max_new_tokens, batch.rollouts.lengths
            penalties = self.shaping.length_penalty(lengths, limit).view(rewards.shape)
            own["rewards"] = (rewards + penalties).masked_fill(~valid, 0.0)
            own["metrics"] = batch.metrics | {"overlong_penalty": float(penalties.mean())}
        if batch.greedy_rewards is not None:
            own["greedy_rewards"] = batch.greedy_rewards[:, 0]
        if self.needs.texts:
            own["texts"] = tuple(response_texts(self.task, batch.raw_rollouts))
        return replace(batch, **own)

    def _sample(
        self, step: int, prompts: Prompts, begun: int, count: int, means: MetricAccumulator
    ) -> RolloutBatch:
        """Return `count` samples of each prompt, from number `begun` on; rewards are NaN if not
        known, greedy ones repeated."""
        clock, ranks, scorer, needs = self.clock, self.ranks, self.scorer, self.needs
        first, own = ranks.part(len(prompts))  # the prompts that this rank samples
        scorer.pop_metrics()  # drop those of an evaluation, or of greedy responses
        asked = prompts.take(first, own), count, self.sampling, self.seed, step
        more = begun + count < self.options.rollouts
        request = RolloutRequest(*asked, beat=clock.beat, first_sample=begun, keeps_prompts=more)
        sampled = self._sample_and_score(request)
        with clock("rollout"):
            rollouts = ranks.gather(sampled.rollouts)
            check_finite(rollouts, prompts, step)
        of_rank, shape = slice(first * count, (first + own) * count), (len(prompts), count)
        learned, answer_lengths, terms, greedy = rollouts, None, None, None
        with clock("reward"):
            if self.policy_reward is None:
                rewards, parts = ranks.concatenate(sampled.rewards), [*sampled.components]
            else:
                scores = self.policy_reward.score(prompts, rollouts)
                rewards, parts = scores.rewards, scores.components[of_rank]
                learned, answer_lengths = scores.answered, scores.answer_lengths
                for name, value in chain.from_iterable(map(dict.items, parts)):
                    means.add(f"reward/{name}", value)
        rewards = rewards.view(shape)
        said = ranks.values([*zip(parts, sampled.messages, strict=True)])
        components, messages = zip(*chain(*said), strict=True)
        if needs.parts:  # NaN where one does not apply
            rows = [[x.get(name, torch.nan) for name in scorer.weights] for x in components]
            terms = torch.tensor(rows, dtype=torch.float32).to(rewards.device).view(*shape, -1)
        means.merge(scorer.pop_metrics())
        if needs.greedy:
            one = replace(request, num_samples=1, sampling=self.sampling.greedy, first_sample=0)
            found = ranks.concatenate(self._sample_and_score(one).rewards)
            greedy = found[:, None].repeat(1, count)
            rewards = rewards.masked_fill(greedy.isnan(), torch.nan)  # as if all had failed
        in_rounds = self.schedule is not None or isinstance(self.chosen, Carried)
        return RolloutBatch(
            prompts=prompts,
            rollouts=learned,
            step=step,
            raw_rollouts=rollouts,
            task_rewards=rewards,
            rewards=rewards,
            greedy_rewards=greedy,
            all_rewards=rewards,
            num_tokens=len(rollouts.tokens),
            components=components,
            messages=messages,
            reward_terms=terms,
            term_weights=tuple(scorer.weights.values()),
            answer_lengths=answer_lengths,
            drawn_by=rollouts.lengths.new_full(shape, begun + count) if in_rounds else None,
            masks_truncated=self.shaping.truncated == "mask",
            **self._failures(rewards, prompts, step),
        )

    def _failures(self, rewards: Tensor, prompts: Prompts, step: int) -> dict[str, Any]:
        """Return what a batch says of failed rewards, which are NaN; refuse others that are not
        finite, or not as the objective needs them."""
        when = f"step {step}"
        failed, warning = self.scorer.failures(self.ranks, when)
        known = rewards.nan_to_num() if warning else rewards
        check_rewards(known, prompts, step)
        if self.needs.binary:
            check_binary(known, prompts, when)
        counts = {f"reward_{kind}": number for kind, number in failed.items()}
        return {"metrics": counts, "warning": warning}

    def _sample_and_score(self, request: RolloutRequest) -> ScoredSamples:
        scorer = self.scorer if self.policy_reward is None else None
        how = self.clock, self.shaping.truncated == "zero"
        return sample_and_score(self.engine, self.task, scorer, request, *how)


def check_binary(rewards: Tensor, prompts: Prompts, when: str) -> None:
    """Raise InputError for the first reward [G, N] other than 0 and 1."""
    broken = ((rewards != 0) & (rewards != 1)).nonzero()
    if len(broken):
        group, rollout = broken[0].tolist()
        raise InputError(
            f"{when}: this objective needs rewards of 0 or 1, got {rewards[group, rollout]:g} for "
            f"prompt {prompts.ids[group]}; --reward-threshold makes them so"
        )
