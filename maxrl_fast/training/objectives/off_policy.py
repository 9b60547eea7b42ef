"""Objectives that weight whole responses by the ratio of the policy to the sampler: estimators with
the input log_ratios.

Every update changes the ratios, so each update recomputes the advantages with one more forward pass
over its samples. The gradient equals the gradient of -(1/S) sum_i A_i log pi(y_i), with log pi(y_i)
summed over the response.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.algorithms.arguments import is_host_readable
from maxrl_fast.algorithms.tokens import MAX_LOG_RATIO
from maxrl_fast.errors import InputError
from maxrl_fast.ops import group_advantage, log_ratio_reward
from maxrl_fast.records import gather_sequences
from maxrl_fast.runtime.device import host_numbers, to_device, to_host
from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.objectives.group import GroupObjective
from maxrl_fast.training.objectives.objective import Needs


@dataclass
class _Step:
    batch: RolloutBatch
    learner: Learner
    options: dict[str, Any]
    cu_seqlens: Tensor  # [S+1] of the responses, on the host
    # [G] bool on the host: groups with an advantage other than 0; no ratio changes that
    learns: Tensor
    values: Tensor  # [S] advantages, filled in by each update
    # one tensor per update, one ratio per response
    ratios: list[Tensor] = field(default_factory=list)


@dataclass
class OffPolicyObjective(GroupObjective):
    """See GroupObjective; every update recomputes the advantages."""

    loss: str = "reinforce"
    owns_loss: bool = True
    _step: _Step | None = field(default=None, repr=False, compare=False)

    @property
    def aggregation(self) -> str:
        return "seq_mean_token_sum"

    @property
    def needs(self) -> Needs:
        return Needs(logprob_passes=1)

    def begin(self, batch: RolloutBatch, learner: Learner) -> RolloutBatch:
        rewards, options = batch.rewards, self.options_for(batch)
        at_one = self._estimate(batch, rewards, batch.valid, torch.zeros_like(rewards), options)
        cu_seqlens, learns = to_host(batch.rollouts.cu_seqlens, at_one.any(1))
        self._step = _Step(
            batch, learner, options, cu_seqlens, learns, torch.zeros_like(rewards.flatten())
        )
        return batch

    def advantages(self, sequences: Tensor) -> Tensor:
        step = self._step
        assert step is not None, "begin comes first"
        batch, shape = step.batch, step.batch.rewards.shape
        sequences = sequences.cpu()
        sequences = sequences[step.learns[sequences // batch.num_rollouts]]
        if not len(sequences):
            return step.values
        groups = (sequences // batch.num_rollouts).unique()
        logprobs = step.learner.passes.logprobs(step.learner.model, batch, sequences)
        index, cu_seqlens, chosen, groups = to_device(
            step.values.device, *gather_sequences(step.cu_seqlens, sequences), sequences, groups
        )
        own_ratios = log_ratio_reward(logprobs, batch.rollouts.logprobs[index], cu_seqlens)
        if is_host_readable(own_ratios) and bool(own_ratios.isnan().any()):
            # as on a GPU; the update then reports the non-finite value
            step.values[chosen] = torch.nan
            return step.values
        log_ratios = torch.zeros_like(step.values).scatter(0, chosen, own_ratios).view(shape)
        valid = None if batch.valid is None else batch.valid[groups]
        step.values.view(shape)[groups] = self._estimate(
            batch, batch.rewards[groups], valid, log_ratios[groups], step.options
        )
        step.ratios.append(own_ratios.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp())
        return step.values

    def _estimate(
        self,
        batch: RolloutBatch,
        rewards: Tensor,
        valid: Tensor | None,
        log_ratios: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        try:
            return group_advantage(
                rewards, self.estimator, valid=valid, log_ratios=log_ratios, **options
            )
        except ValueError as error:
            raise InputError(f"step {batch.step}: {error}") from error

    def end(self) -> dict[str, float]:
        step, self._step = self._step, None
        assert step is not None, "begin comes first"
        if not step.ratios:
            return {}
        ratios = torch.cat(step.ratios)
        return host_numbers(
            {
                "sequence_ratio_mean": ratios.mean(),
                "sequence_ratio_min": ratios.amin(),
                "sequence_ratio_max": ratios.amax(),
            }
        )
