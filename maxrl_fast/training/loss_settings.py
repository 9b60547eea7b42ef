from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.algorithms.losses.registry import TokenLoss, find_loss, learns_without_advantage


@dataclass(frozen=True)
class LossSettings:
    """Arguments of ops.policy_gradient_loss that are constant over a run, and terms that the
    learner adds.

    Args:
        top_entropy: fraction of an update's tokens, with the highest entropies, that have a policy
        gradient; 1: all. siren: coefficient of SIREN's term; 0: none. sequence_mask: delta of
        far_responses, whose tokens have no policy gradient; None: no mask. seed: of losses that
        draw tokens.
    """

    loss: str | Callable[..., Tensor]
    aggregation: str
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: str = "k3"
    kl_coef: float = 0.0
    divergence: str = "reverse"
    beta: float = 0.5  # of jsd
    entropy_coef: float = 0.0
    temperature: float = 1.0
    max_new_tokens: int = 1  # the constant of seq_sum_constant
    loss_options: Mapping[str, float] = field(default_factory=dict)
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

    @cached_property
    def row(self) -> TokenLoss:
        return find_loss(self.loss)

    @cached_property
    def options(self) -> dict[str, float]:
        return self.row.resolve(self.loss_options)

    @property
    def over_batch(self) -> bool:
        """Whether a token's loss depends on other responses of the update."""
        return (
            self.row.over_batch
            or self.top_entropy < 1
            or self.siren != 0
            or self.sequence_mask is not None
        )

    @property
    def is_kl_full(self) -> bool:
        """Whether the learner adds the exact divergence to the loss."""
        return self.kl == "full" and self.kl_coef != 0

    @property
    def keywords(self) -> dict[str, Any]:
        names = ["loss", "loss_options", "aggregation", "clip_low", "clip_high"]
        names += ["kl", "kl_coef", "entropy_coef"]
        values = {name: getattr(self, name) for name in names}
        return values | {"kl": "k3", "kl_coef": 0.0} if self.kl == "full" else values

    def has_gradient(self, advantages: Tensor) -> Tensor:
        """Return which sequences [S] have a gradient; not if the loss is over_batch."""
        if (
            self.kl_coef
            or self.entropy_coef
            or learns_without_advantage(self.row, tuple(self.options.items()))
        ):
            return torch.ones_like(advantages, dtype=torch.bool)
        return advantages != 0
