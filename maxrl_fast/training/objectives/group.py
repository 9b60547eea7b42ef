"""The interface of objectives, which choose the advantages, and those of an estimator."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import is_host_readable
from maxrl_fast.algorithms.estimator import RATIOS
from maxrl_fast.algorithms.estimators import Estimator, find_estimator
from maxrl_fast.algorithms.estimators.max_at_k import stopped_maxrl
from maxrl_fast.algorithms.method import Method, Registry
from maxrl_fast.algorithms.tokens import MAX_LOG_RATIO
from maxrl_fast.errors import InputError
from maxrl_fast.ops import log_ratio_reward
from maxrl_fast.ops.group_advantage import example_inputs, group_advantage
from maxrl_fast.records import Rollouts, sequence_sums
from maxrl_fast.runtime.device import host_numbers, to_device, to_host
from maxrl_fast.runtime.loading import place_of
from maxrl_fast.training.collect import Needs as Needs
from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import Learner


@dataclass
class ObjectiveStep:
    # The samples to train on. An objective with advantages [T] of tokens has
    # batch.weighted(advantages) and gives every response the advantage 1.
    batch: RolloutBatch
    values: Tensor  # the advantages [S] of all samples

    def advantages(self, sequences: Tensor) -> Tensor:
        """Return the advantages [S] of all samples for an update on `sequences`: whole groups'
        samples with a reward, int64 on the host. Samples that no update has used yet may have 0."""
        return self.values

    def finish(self) -> dict[str, float]:
        """After the last update, train what else is trained; return metrics of the step."""
        return {}


class Objective(ABC):
    """Chooses the A_i of the loss -sum_i A_i sum_t log pi(y_it | x_i, y_i<t) over a denominator, or
    of another loss of the log-prob ratios."""

    loss: str = "ppo"  # a name of ops.policy_gradient_loss; default of --loss
    aggregation: str = "token_mean"  # how token losses are averaged; default of --aggregation
    owns_loss: bool = False  # options cannot change these two, and importance weights do not apply
    min_rollouts: int = 1

    @property
    def needs(self) -> Needs:
        return Needs()

    @property
    def state(self) -> dict[str, Tensor]:
        """What steps hand on, host tensors by name, as before the first. The learner keeps them in
        `objective_state`; checkpoints load them in place."""
        return {}

    def learns_from_equal_rewards(self, num_rollouts: int) -> bool:
        """Whether a group of all-0 or all-1 rewards has nonzero advantages."""
        return True

    @abstractmethod
    def begin(self, batch: RolloutBatch, learner: Learner) -> ObjectiveStep:
        """Take a step's samples and rewards before its first update."""


# the objectives that are no estimators: the function is a dataclass, whose fields are its options
_REGISTRY = Registry(Method)
OBJECTIVE_CLASSES, objective = _REGISTRY.methods, _REGISTRY.register


@dataclass
class GroupObjective(Objective):
    """The advantages of an estimator, for every update anew where it asks for log-ratios."""

    estimator: str | Estimator  # its name, or the row of a custom function
    options: dict[str, Any]  # of the estimator, and k or order
    # It returns an advantage for each token, [T]. The learner gets them as factors of the tokens,
    # and 1 for each response that has one.
    per_token: bool = False
    stop_at: int = 0  # of stopped_maxrl, which replaces the estimator; 0: not
    updates_per_step: int = 1

    def __post_init__(self) -> None:
        self.row = row = find_estimator(self.estimator)
        self.loss, self.aggregation, self.owns_loss = row.loss, row.aggregation, row.owns_loss
        # the input that changes with every update, "" if there is none
        self.ratio = next((name for name in RATIOS if name in row.inputs), "")

    @property
    def needs(self) -> Needs:
        row = self.row
        return Needs(
            reference="ref_log_ratios" in row.inputs,
            greedy=not {"greedy_correct", "greedy_rewards"}.isdisjoint(row.inputs),
            binary=row.binary or self.stop_at > 0,
            expects_binary=row.for_binary,
            parts="reward_parts" in row.inputs,
            texts="texts" in row.inputs,
            token_weights=self.per_token,
        )

    @property
    def state(self) -> dict[str, Tensor]:
        return {name: torch.tensor(x, dtype=torch.float64) for name, x in self.row.state.items()}

    def learns_from_equal_rewards(self, num_rollouts: int) -> bool:
        if self.row.of_run:
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
    """With log-ratios every update recomputes the advantages, by one more forward pass over its
    samples, for the gradient of -(1/S) sum_i A_i log pi(y_i)."""

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
        row, metrics = objective.row, dict[str, Tensor]()
        greedy, terms = cast(Tensor, batch.greedy_rewards), cast(Tensor, batch.reward_terms)
        valid = batch.valid if row.takes_valid else None  # else failed rewards are 0
        self.changed = {name: self.learner.objective_state[name].clone() for name in row.state}
        # on demand: an estimator takes few, and reading the prompts' indices waits for the device
        known: dict[str, Callable[[], Any]] = {
            "lengths": lambda: rollouts.lengths.view(rewards.shape),
            "logprobs": lambda: _mean_logprobs(rollouts).view(rewards.shape),
            "greedy_correct": lambda: greedy > 0.5,  # [G]
            "greedy_rewards": lambda: greedy,  # [G]
            "reward_parts": lambda: terms.movedim(-1, 0),  # [R, G, N]
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
        if "reward_parts" in inputs:
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
        """Return the policy's entropies [T], in nats, at the tokens of chosen rollouts, bool [G,
        N], and 0 at others."""
        batch, sequences = self.batch, chosen.flatten().nonzero()[:, 0].cpu()
        entropies = torch.zeros_like(batch.rollouts.logprobs)
        if len(sequences):
            index, *_ = batch.rollouts.at(sequences)
            passes, given = self.learner.passes, (self.learner.model, batch, sequences)
            entropies[index] = passes.compute(passes.logprobs_and_entropies, *given)[:, 1]
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
        (groups,) = to_device(values.device, (sequences // batch.num_rollouts).unique())
        log_ratios = torch.zeros_like(values)
        if self.others is not None:
            logprobs = self.learner.passes.logprobs(self.learner.model, batch, sequences)
            index, cu_seqlens, chosen = batch.rollouts.at(sequences)
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
        means = dict[str, Any]()
        for name in chain(*self.metrics[:1]):
            means[name] = sum(x[name] for x in self.metrics) / len(self.metrics)
        if self.ratios:
            ratios = torch.cat(self.ratios)
            means["sequence_ratio_mean"] = ratios.mean()
            means |= {"sequence_ratio_min": ratios.amin(), "sequence_ratio_max": ratios.amax()}
        return host_numbers(means)


class _OverPrompts(ObjectiveStep):
    """The loss is to be averaged over an update's prompts, of which hard ones have more rollouts,
    and not over M responses or their tokens: advantages are times the mean number."""

    def advantages(self, sequences: Tensor) -> Tensor:
        num_prompts = len((sequences // self.batch.num_rollouts).unique())
        return self.values * (len(self.batch.in_loss(sequences)) / max(num_prompts, 1))


def _mean_logprobs(rollouts: Rollouts) -> Tensor:
    return sequence_sums(rollouts.logprobs, rollouts.lengths) / rollouts.lengths.clamp_min(1)


def _grouped(values: Sequence[Any], num_rollouts: int) -> list[Sequence[Any]]:
    return [values[i : i + num_rollouts] for i in range(0, len(values), num_rollouts)]
