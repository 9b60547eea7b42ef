"""SIREN: a term of the loss that keeps the policy's entropy near its value at the start of reinforcement learning.

It uses the tokens with the highest entropies of each response alone, and the nucleus of each distribution alone.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from maxrl_fast.ops.top_tokens import sequence_quantiles
from maxrl_fast.records import gather_sequences
from maxrl_fast.training.collect import Collected
from maxrl_fast.training.learner import Learner
from maxrl_fast.transfers import to_device, to_host

QUANTILE = 0.8  # of a response's entropies, above which they count


def no_anchor() -> Tensor:
    return torch.full((1,), torch.nan, dtype=torch.float64)


@dataclass
class Siren:
    """SIREN (arXiv:2509.25133), which adds coef (H - H_anchor)^2 to the loss of every update.

    H is the mean over responses of the mean over some of their tokens of the entropy of the nucleus that has SIREN_NUCLEUS
    of the probability: of the tokens whose entropy is above the QUANTILE of their response, as in the authors' code. A response
    without such a token, as one of one token, counts with 0. H_anchor is H at the first update of the run.

    The term has the gradient of the sum of slope_t h_t, slope_t = 2 coef (H - H_anchor) dH/dh_t, with the entropies h_t of the
    policy before the update, which take one more forward pass.

    Attributes:
        anchor: float64 [1], H_anchor; NaN before the first update. A checkpoint keeps it.
    """

    learner: Learner
    coef: float
    anchor: Tensor = field(default_factory=no_anchor)
    _entropies: dict[int, float] = field(default_factory=dict, repr=False)  # H at each update of the step

    def apply(self, samples: Collected, sequences: Tensor, update: int) -> Collected:
        """Return the samples with the slopes of their tokens' entropies, times the denominator of the loss, for an update on
        `sequences`, int64 on the host.

        Args:
            update: its number within the step, from 0. One without samples, whose rewards all failed, has no entropy.
        """
        if not len(sequences):
            return samples
        rollouts, learner = samples.rollouts, self.learner
        entropies = learner.nucleus_entropies(learner.model, samples, sequences)  # [tokens of the sequences]
        index, cu_seqlens = gather_sequences(rollouts.cu_seqlens.cpu(), sequences)
        denominator = learner.settings.denominator(cu_seqlens.diff())
        index, cu_seqlens = to_device(entropies.device, index, cu_seqlens)
        shares = peak_shares(entropies, cu_seqlens)
        (total,) = to_host((shares * entropies.double()).sum())
        mean = self._entropies[update] = float(total)
        if bool(self.anchor.isnan()):
            self.anchor.fill_(mean)
        slopes = 2 * self.coef * (mean - float(self.anchor)) * denominator * shares
        slopes = learner.ranks.from_first(slopes.float())
        slopes = torch.zeros_like(rollouts.logprobs).index_copy(0, index, slopes)
        return replace(samples, rollouts=replace(rollouts, entropy_slopes=slopes))

    def end(self) -> dict[str, float]:
        """Return metrics of the step: H, averaged over its updates, and H_anchor."""
        updates, self._entropies = self._entropies, {}
        return {"siren_entropy": sum(updates.values()) / max(len(updates), 1), "siren_anchor": float(self.anchor)}


def peak_shares(entropies: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Return each token's share [T] float64 in the mean over responses of the mean over the tokens above the QUANTILE of their
    response, interpolated linearly; 0 for the others."""
    lengths = cu_seqlens.diff()
    of_token = torch.repeat_interleave(lengths, output_size=len(entropies))  # the response of each token
    values = entropies.double()
    is_above = values > sequence_quantiles(values, cu_seqlens, torch.ones_like(of_token, dtype=torch.bool), QUANTILE)
    counts = values.new_zeros(len(lengths)).index_add(0, of_token, is_above.double())
    return is_above / (counts.clamp_min(1) * max(len(lengths), 1))[of_token]
