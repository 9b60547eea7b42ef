"""Objectives that weight whole responses by the ratio of the policy to the sampler: estimators with
the input log_ratios.

Every update changes the ratios, so each update recomputes the advantages with one more forward pass
over its samples. The gradient equals the gradient of -(1/S) sum_i A_i log pi(y_i), with log pi(y_i)
summed over the response.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import is_host_readable
from maxrl_fast.algorithms.tokens import MAX_LOG_RATIO
from maxrl_fast.ops import log_ratio_reward
from maxrl_fast.records import gather_sequences
from maxrl_fast.runtime.device import host_numbers, to_device, to_host
from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.objectives.group import GroupObjective
from maxrl_fast.training.objectives.objective import Needs, ObjectiveStep


@dataclass
class OffPolicyObjective(GroupObjective):
    """See GroupObjective; every update recomputes the advantages."""

    loss = "reinforce"
    owns_loss = True

    def __post_init__(self) -> None:
        self.aggregation = "seq_mean_token_sum"

    @property
    def needs(self) -> Needs:
        return Needs(logprob_passes=1)

    def begin(self, batch: RolloutBatch, learner: Learner) -> ObjectiveStep:
        rewards = batch.rewards
        at_one = self.compute(batch, rewards, batch.valid, log_ratios=torch.zeros_like(rewards))
        cu_seqlens, learns = to_host(batch.rollouts.cu_seqlens, at_one.any(1))
        values = torch.zeros_like(rewards.flatten())
        return _Step(batch, values, self, learner, cu_seqlens, learns)


@dataclass
class _Step(ObjectiveStep):
    objective: OffPolicyObjective
    learner: Learner
    cu_seqlens: Tensor  # [S+1] of the responses, on the host
    # [G] bool on the host: groups with an advantage other than 0; no ratio changes that
    learns: Tensor
    ratios: list[Tensor] = field(default_factory=list)  # of each update, one of each response

    def advantages(self, sequences: Tensor) -> Tensor:
        batch, values, shape = self.batch, self.values, self.batch.rewards.shape
        sequences = sequences.cpu()
        sequences = sequences[self.learns[sequences // batch.num_rollouts]]
        if not len(sequences):
            return values
        groups = (sequences // batch.num_rollouts).unique()
        logprobs = self.learner.passes.logprobs(self.learner.model, batch, sequences)
        index, cu_seqlens, chosen, groups = to_device(
            values.device, *gather_sequences(self.cu_seqlens, sequences), sequences, groups
        )
        own_ratios = log_ratio_reward(logprobs, batch.rollouts.logprobs[index], cu_seqlens)
        if is_host_readable(own_ratios) and bool(own_ratios.isnan().any()):
            # as on a GPU; the update then reports the non-finite value
            values[chosen] = torch.nan
            return values
        log_ratios = torch.zeros_like(values).scatter(0, chosen, own_ratios).view(shape)
        valid = None if batch.valid is None else batch.valid[groups]
        values.view(shape)[groups] = self.objective.compute(
            batch, batch.rewards[groups], valid, log_ratios=log_ratios[groups]
        )
        self.ratios.append(own_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp())
        return values

    def finish(self) -> dict[str, float]:
        if not self.ratios:
            return {}
        ratios = torch.cat(self.ratios)
        return host_numbers(
            {
                "sequence_ratio_mean": ratios.mean(),
                "sequence_ratio_min": ratios.amin(),
                "sequence_ratio_max": ratios.amax(),
            }
        )
