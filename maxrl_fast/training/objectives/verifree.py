"""VeriFree: the probability of the reference answer is the reward, and is itself trained."""

from dataclasses import dataclass

import torch

from maxrl_fast.ops import group_advantage
from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.objectives.objective import Needs, Objective, ObjectiveStep, objective


@objective(
    "VeriFree, Zhou et al. 2025, arXiv:2505.21493, as the authors' code",
    name="verifree",
    needs="N >= 2; a task with reference answers; one more forward pass",
)
@dataclass(kw_only=True)
class VerifreeObjective(Objective):
    """rloo of R = pi(y* | x, z) for the tokens of the reasoning z, R for those of the reference
    answer y* put after it.

    So the gradient of E_z pi(y* | x, z) is the mean of A grad log pi(z | x) + R grad log pi(y* | x,
    z). A response that does not lead to an answer has R = 0 and counts as z entirely.
    """

    loss = "reinforce"
    aggregation = "seq_mean_token_sum"
    min_rollouts = 2
    needs = Needs(answers=True, token_weights=True, logprob_passes=1)

    def begin(self, batch: RolloutBatch, learner: Learner) -> ObjectiveStep:
        rollouts, answer_lengths = batch.rollouts, batch.answer_lengths
        assert answer_lengths is not None, "the collector scores by the policy"
        rewards = batch.rewards.flatten()  # [S]
        advantages = group_advantage(batch.rewards, "rloo").flatten()
        # [2S]: z and y* of each response, alternating
        factors = torch.stack([advantages, rewards], 1).flatten()
        parts = torch.stack([rollouts.lengths - answer_lengths, answer_lengths], 1).flatten()
        has_gradient = ((parts > 0) & (factors != 0)).view(-1, 2).any(1)
        of_tokens = factors.repeat_interleave(parts, output_size=len(rollouts.tokens))
        return ObjectiveStep(batch.weighted(of_tokens), has_gradient.float())
