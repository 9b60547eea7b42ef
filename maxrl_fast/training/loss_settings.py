from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from maxrl_fast.algorithms.losses.masks import highest_entropies, near_responses
from maxrl_fast.algorithms.tokens import Tokens
from maxrl_fast.ops.loss_kernel import LossTerms


@dataclass(frozen=True)
class LossSettings(LossTerms):
    """The terms of the loss of a run, and what the learner adds to them."""

    temperature: float = 1.0  # of the policy whose log-probs the loss is about
    max_new_tokens: int = 1  # the constant of seq_sum_constant
    divergence: str = "reverse"  # of linear_divergence, with its beta
    beta: float = 0.5
    divergence_coef: float = 0.0  # of the exact divergence from the reference policy
    top_entropy: float = 1.0  # part of an update's tokens, by entropy, with a policy gradient
    siren: float = 0.0  # coefficient of SIREN's term; 0: none
    # delta of near_responses, whose tokens have a policy gradient; None: all have
    sequence_mask: float | None = None
    seed: int = 0  # of losses that draw tokens

    def denominator(self, lengths: Tensor) -> float:
        if self.aggregation == "token_mean":
            return float(lengths.sum())
        per_response = self.max_new_tokens if self.aggregation == "seq_sum_constant" else 1
        return float(len(lengths) * per_response)

    @property
    def masks(self) -> list[Callable[[Tokens], Tensor]]:
        """What returns which tokens [T] bool keep their advantage."""
        found = list[Callable[[Tokens], Tensor]]()
        if self.sequence_mask is not None:
            found.append(partial(near_responses, delta=self.sequence_mask))
        if self.top_entropy < 1:
            found.append(partial(highest_entropies, share=self.top_entropy))
        if self.spec.masks:
            found.append(partial(self.spec.compare, options=dict(self.options)))
        return found

    @property
    def over_batch(self) -> bool:
        """Whether a token's loss depends on other responses of the update."""
        return bool(self.masks or self.spec.statistics or self.siren)

    def has_gradient(self, advantages: Tensor) -> Tensor:
        if self.divergence_coef or self.siren or self.needs_every_token:
            return torch.ones_like(advantages, dtype=torch.bool)
        return advantages != 0
