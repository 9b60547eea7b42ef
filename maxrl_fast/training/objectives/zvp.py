"""RL-ZVP: grpo, plus entropy-based token advantages in groups whose rewards are all equal."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from maxrl_fast.algorithms.estimator import Ddof, Eps
from maxrl_fast.algorithms.options import Help, Positive
from maxrl_fast.ops import group_advantage
from maxrl_fast.records import gather_sequences
from maxrl_fast.runtime.device import to_device
from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.objectives.objective import Needs, Objective, ObjectiveStep, objective
from maxrl_fast.training.schedule import is_mixed


@objective(
    "RL-ZVP, Le et al. 2025, arXiv:2509.21880 (from the paper; no code found)",
    name="rl_zvp",
    needs="rewards 0 or 1, N >= 1; one more forward pass over these groups",
)
@dataclass(kw_only=True)
class ZvpObjective(Objective):
    """grpo; token t of a group with equal rewards: alpha H_t where all r = 1, -alpha (max H - H_t)
    where all r = 0, H_t its entropy, max over its response; alpha .1.

    H_t is the entropy, in nats, of the policy's distribution of token t. Other groups have the
    advantages of grpo, with its eps and ddof.
    """

    alpha: Annotated[Positive, Help("Weight of the tokens' entropies, per nat.")] = 0.1
    eps: Eps = 1e-6
    ddof: Ddof = 1
    # one pass at most: only groups with equal rewards need it
    needs = Needs(binary=True, token_weights=True, logprob_passes=1)

    def begin(self, batch: RolloutBatch, learner: Learner) -> ObjectiveStep:
        rewards, valid = batch.rewards, batch.valid
        values = group_advantage(rewards, "grpo", valid=valid, eps=self.eps, ddof=self.ddof)
        known = batch.has_reward
        is_alike = known & ~is_mixed(rewards.masked_fill(~known, torch.nan))[:, None]
        values = torch.where(is_alike, 2 * rewards - 1, values)
        chosen = is_alike.flatten().nonzero()[:, 0]
        if len(chosen):
            batch = batch.weighted(self._by_entropy(batch, learner, chosen))
        return ObjectiveStep(batch, values.flatten())

    def _by_entropy(self, batch: RolloutBatch, learner: Learner, sequences: Tensor) -> Tensor:
        """Return the factor of each token [T], 1 outside the chosen sequences."""
        rollouts, chosen = batch.rollouts, sequences.cpu()
        # [tokens of the sequences]
        entropies = learner.passes.entropies(learner.model, batch, chosen)
        index, cu_seqlens = to_device(
            entropies.device, *gather_sequences(rollouts.cu_seqlens.cpu(), chosen)
        )
        lengths = cu_seqlens.diff()
        # [sequences]
        largest = torch.segment_reduce(entropies, "max", lengths=lengths, unsafe=True)
        is_correct = (batch.rewards.flatten()[sequences] == 1).repeat_interleave(
            lengths, output_size=len(index)
        )
        below = largest.repeat_interleave(lengths, output_size=len(index)) - entropies
        factors = self.alpha * torch.where(is_correct, entropies, below)
        return torch.ones(len(rollouts.tokens), device=entropies.device).index_copy(
            0, index, factors
        )
