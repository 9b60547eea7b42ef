from dataclasses import dataclass

import torch
from torch import Tensor

from maxrl_fast.ops.loss_kernel import LossTerms


@dataclass(frozen=True)
class LossSettings(LossTerms):
    """The terms of the loss of a run, and what the learner adds to them.

    Args:
        temperature: of the policy whose log-probs the loss is about.
        max_new_tokens: the constant of seq_sum_constant.
        divergence: of linear_divergence, with its beta.
        divergence_coef: coefficient of the exact divergence from the reference policy.
        top_entropy: fraction of an update's tokens, with the highest entropies, that have a policy
            gradient; 1: all.
        siren: coefficient of SIREN's term; 0: none.
        sequence_mask: delta of far_responses, whose tokens have no policy gradient; None: no mask.
        seed: of losses that draw tokens.
    """

    temperature: float = 1.0
    max_new_tokens: int = 1
    divergence: str = "reverse"
    beta: float = 0.5
    divergence_coef: float = 0.0
    top_entropy: float = 1.0
    siren: float = 0.0
    sequence_mask: float | None = None
    seed: int = 0

    def denominator(self, lengths: Tensor) -> float:
        """Return the denominator of the summed loss of responses of these lengths [S]."""
        if self.aggregation == "token_mean":
            return float(lengths.sum())
        per_response = self.max_new_tokens if self.aggregation == "seq_sum_constant" else 1
        return float(len(lengths) * per_response)

    @property
    def over_batch(self) -> bool:
        """Whether a token's loss depends on other responses of the update."""
        return (
            self.spec.over_batch
            or self.top_entropy < 1
            or self.siren != 0
            or self.sequence_mask is not None
        )

    def has_gradient(self, advantages: Tensor) -> Tensor:
        """Return which sequences [S] have a gradient; not if the loss is over_batch."""
        if self.divergence_coef or self.needs_every_token:
            return torch.ones_like(advantages, dtype=torch.bool)
        return advantages != 0
