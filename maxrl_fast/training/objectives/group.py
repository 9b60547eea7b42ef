"""Objectives with the advantages of an estimator."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import is_host_readable
from maxrl_fast.algorithms.estimator import RATIOS, TRAINING_ESTIMATORS
from maxrl_fast.algorithms.estimators import Estimator, find_estimator
from maxrl_fast.algorithms.stopping import stopped_maxrl
from maxrl_fast.algorithms.tokens import MAX_LOG_RATIO
from maxrl_fast.errors import InputError
from maxrl_fast.ops import log_ratio_reward
from maxrl_fast.ops.group_advantage import example_inputs, group_advantage
from maxrl_fast.records import sequence_sums
from maxrl_fast.runtime.device import host_numbers, to_device, to_host
from maxrl_fast.runtime.loading import place_of
from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.objectives.objective import Needs, Objective, ObjectiveStep


@dataclass
class GroupObjective(Objective):
    """The advantages of an estimator, computed once per step, or for every update where it asks for
    log-ratios of responses."""

    estimator: str | Estimator  # its name, or the row of a custom function
    options: dict[str, Any]  # of the estimator, and k or order
    # It returns an advantage for each token, [T]. The learner gets them as factors of the tokens,
    # and 1 for each response that has one other than 0.
    per_token: bool = False
    stop_at: int = 0  # of stopped_maxrl, which replaces the estimator; 0: not
    updates_per_step: int = 1

    def __post_init__(self) -> None:
        self.estimator = TRAINING_ESTIMATORS.get(str(self.estimator), self.estimator)
        row = find_estimator(self.estimator)
        self.row, self.loss, self.owns_loss = row, row.loss, row.owns_loss
        self.aggregation = row.aggregation
        # the input that changes with every update, "" if there is none
        self.ratio = next((name for name in RATIOS if name in row.inputs), "")

    @property
    def needs(self) -> Needs:
        row = self.row
        passes = {"log_ratios": 1, "old_log_ratios": 2 * (self.updates_per_step > 1)}
        passes |= {"ref_log_ratios": 2, "entropies": 1}
        return Needs(
            reference="ref_log_ratios" in row.inputs,
            greedy=not {"greedy_correct", "greedy_rewards"}.isdisjoint(row.inputs),
            binary=row.binary or self.stop_at > 0,
            expects_binary=row.for_binary,
            parts="reward_parts" in row.inputs,
            texts="texts" in row.inputs,
            components="components" in row.inputs,
            token_weights=self.per_token,
            logprob_passes=sum(passes.get(name, 0) for name in row.inputs),
        )

    @property
    def state(self) -> dict[str, Tensor]:
        return {name: torch.tensor(x, dtype=torch.float64) for name, x in self.row.state.items()}

    def learns_from_equal_rewards(self, num_rollouts: int) -> bool:
        if self.row.name in TRAINING_ESTIMATORS:
            return not self.row.centred
        rewards = torch.tensor([[0.0], [1.0]]).expand(2, num_rollouts)  # all wrong, all correct
        inputs = example_inputs(self.row, rewards)
        return bool(group_advantage(rewards, self.row, **inputs, **self.options).any())

    def begin(self, batch: RolloutBatch, learner: Learner) -> ObjectiveStep:
        if self.stop_at:
            assert batch.drawn_by is not None
            given = batch.rewards, batch.has_reward, batch.drawn_by, self.stop_at
            return _OverPrompts(batch, stopped_maxrl(*given).to(batch.rewards).flatten())
        step = _Step(batch, torch.zeros_like(batch.rewards.flatten()), self, learner)
        if self.ratio:
            step.prepare()
            return step
        values, known = step.compute(batch), batch.has_reward.flatten()
        if values.dim() == 1:  # [T]
            of_tokens = batch.rollouts.by_token(known)
            if self.row.takes_valid:  # then T counts only the tokens of rollouts with a reward
                values = values.new_zeros(len(of_tokens)).masked_scatter(of_tokens, values)
            values = values.masked_fill(~of_tokens, 0.0)
            step.batch = batch.weighted(values)
            # NaN is not 0 either, so that the update reports it
            values = (sequence_sums(values.abs(), batch.rollouts.lengths) != 0).to(batch.rewards)
        step.values = values.flatten().masked_fill(~known, 0.0)
        return step


@dataclass
class _Step(ObjectiveStep):
    """With log-ratios every update recomputes the advantages, with one more forward pass over its
    samples. The gradient equals that of -(1/S) sum_i A_i log pi(y_i)."""

    objective: GroupObjective
    learner: Learner
    metrics: list[dict[str, Tensor]] = field(default_factory=list)  # of each update
    changed: dict[str, Tensor] = field(default_factory=dict)  # what the learner's state becomes
    others: Tensor | None = None  # [T], log-probs of the other policy; None: all ratios are 1
    learns: Tensor | None = None  # [G] bool on the host: only these can have advantages; None: all
    ratios: list[Tensor] = field(default_factory=list)  # of each update, one of each response

    def compute(self, batch: RolloutBatch, ratios: Tensor | None = None) -> Tensor:
        """Return the advantages of all or some groups of the step."""
        objective, rewards, rollouts = self.objective, batch.rewards, batch.rollouts
        row, greedy, terms = objective.row, batch.greedy_rewards, batch.reward_terms
        valid = batch.valid if row.takes_valid else None  # else failed rewards are 0
        state, metrics = self.learner.objective_state if row.state else {}, dict[str, Tensor]()
        self.changed = {name: state[name].clone() for name in row.state}
        # on demand: an estimator takes few, and reading the prompts' indices waits for the device
        known: dict[str, Callable[[], Any]] = {
            "lengths": lambda: rollouts.lengths.view(rewards.shape),
            "logprobs": lambda: rollouts.mean_logprobs.view(rewards.shape),
            "greedy_correct": lambda: None if greedy is None else greedy > 0.5,  # [G]
            "greedy_rewards": lambda: greedy,  # [G]
            "reward_parts": lambda: terms if terms is None else terms.movedim(-1, 0),  # [R, G, N]
            "prompts": batch.prompts.ids.tolist,
            "texts": lambda: _grouped(batch.texts or (), batch.num_rollouts),
            "components": lambda: _grouped(batch.components, batch.num_rollouts),
            "truncated": lambda: batch.raw_rollouts.truncated.view(rewards.shape),
            "entropies": lambda: self.entropies,
            "metrics": lambda: metrics,
            "state": lambda: self.changed,
            objective.ratio: lambda: ratios,
        }
        inputs = {name: known[name]() for name in row.inputs}
        options = dict(objective.options)
        if terms is not None:
            options["reward_weights"] = batch.term_weights
        if batch.valid is not None and options.get("order") == batch.num_rollouts - 1:
            options["order"] = None  # each group's own full order, from its number of known rewards
        try:
            values = group_advantage(rewards, objective.estimator, valid=valid, **inputs, **options)
        except ValueError as error:
            raise InputError(f"step {batch.step}: {error}{place_of(error)}") from error
        self.metrics += [metrics] * bool(metrics)
        return values

    def entropies(self, chosen: Tensor) -> Tensor:
        """Return the policy's entropies, in nats, at the tokens of chosen rollouts, bool [G, N],
        and 0 at others: [T]."""
        batch, sequences = self.batch, chosen.flatten().nonzero()[:, 0].cpu()
        entropies = torch.zeros_like(batch.rollouts.logprobs)
        if len(sequences):
            index, _ = batch.rollouts.at(sequences)
            passes, model = self.learner.passes, self.learner.model
            own = passes.compute(passes.logprobs_and_entropies, model, batch, sequences)
            entropies[index] = own[:, 1]
        if batch.valid is None or not self.objective.row.takes_valid:
            return entropies
        return entropies[batch.rollouts.by_token(batch.valid.flatten())]

    def prepare(self) -> None:
        batch, ratio, learner = self.batch, self.objective.ratio, self.learner
        self.others = batch.rollouts.ref_logprobs
        if ratio == "log_ratios":
            self.others = batch.rollouts.logprobs
            # no ratio changes which groups have advantages of 0
            (self.learns,) = to_host(self.compute(batch, torch.zeros_like(batch.rewards)).any(1))
            self.metrics.clear()
        elif ratio == "old_log_ratios":
            # by the learner, not the rollout engine: rounding would add up over a response
            moves = self.objective.updates_per_step > 1  # else the policy is the old one
            given = learner.model, batch, batch.sequences
            self.others = learner.passes.logprobs(*given) if moves else None

    def advantages(self, sequences: Tensor) -> Tensor:
        batch, values, sequences = self.batch, self.values, sequences.cpu()
        if self.learns is not None:
            sequences = sequences[self.learns[sequences // batch.num_rollouts]]
        if not self.objective.ratio or not len(sequences):
            return values
        groups = (sequences // batch.num_rollouts).unique()
        chosen, groups = to_device(values.device, sequences, groups)
        log_ratios = torch.zeros_like(values)
        if self.others is not None:
            logprobs = self.learner.passes.logprobs(self.learner.model, batch, sequences)
            index, cu_seqlens = batch.rollouts.at(sequences)
            own = log_ratio_reward(logprobs, self.others[index], cu_seqlens)
            if is_host_readable(own) and bool(own.isnan().any()):
                # as on a GPU; the update then reports the non-finite value
                values[chosen] = torch.nan
                return values
            log_ratios[chosen] = own
            self.ratios.append(own.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp())
        ratios = log_ratios.view(batch.rewards.shape)
        some = batch if len(groups) == len(ratios) else batch.select(groups)
        values.view(ratios.shape)[groups] = self.compute(some, ratios[groups])
        return values

    def finish(self) -> dict[str, float]:
        learner, interval = self.learner, self.objective.options.get("ref_reset_interval")
        if interval and self.batch.step % interval == 0:  # of pacs_paper
            learner.set_reference()
            learner.optimizer.state.clear()  # Adam's moments
        for name, value in self.changed.items():
            learner.objective_state[name].copy_(value)
        means, number = dict[str, Any](), len(self.metrics)
        for name in self.metrics[0] if number else ():
            means[name] = sum(x[name] for x in self.metrics) / number
        if self.ratios:
            ratios = torch.cat(self.ratios)
            means["sequence_ratio_mean"] = ratios.mean()
            means |= {"sequence_ratio_min": ratios.amin(), "sequence_ratio_max": ratios.amax()}
        return host_numbers(means)


class _OverPrompts(ObjectiveStep):
    """The loss is to be averaged over an update's prompts, of which hard ones have more rollouts,
    and is averaged over M responses or their tokens: advantages are times the mean number."""

    def advantages(self, sequences: Tensor) -> Tensor:
        num_prompts = len((sequences // self.batch.num_rollouts).unique())
        return self.values * (len(self.batch.in_loss(sequences)) / max(num_prompts, 1))


def _grouped(values: Sequence[Any], num_rollouts: int) -> list[Sequence[Any]]:
    return [values[i : i + num_rollouts] for i in range(0, len(values), num_rollouts)]
