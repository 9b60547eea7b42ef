"""The tokens that the loss of an update treats differently from the others.

They are chosen over all samples of the update, from what is known before it, so that the choice is the same however the samples
are cut into micro-batches, and on all ranks.
"""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from maxrl_fast.ops import LOSSES, clip_cov_tokens, kl_cov_tokens, lp_reg_proxies, simko_tokens
from maxrl_fast.ops.row_statistics import RowStatistics
from maxrl_fast.records import gather_sequences
from maxrl_fast.training.collect import Collected
from maxrl_fast.training.learner import Learner, LossSettings
from maxrl_fast.transfers import to_device, to_host

_TIE = 1e-5  # nats; entropies this near may be equal but for rounding, as those of the first tokens of a prompt's responses


@dataclass
class TokenChoice:
    """Chooses tokens for a learner, whose loss says whether it needs token_statistics.

    Args:
        top_entropy: share of an update's tokens, those with the highest entropies, that have a policy gradient (Wang et al.
            2025, arXiv:2506.01939); 1: all. It takes one forward pass of the sampling policy over each step's samples.
        seed: of the run, for choices at random.
    """

    learner: Learner
    top_entropy: float = 1.0
    seed: int = 0
    _entropies: Tensor | None = field(default=None, repr=False)  # [T]
    _rows: RowStatistics | None = field(default=None, repr=False)  # of the sampling policy
    _thresholds: dict[int, Tensor] = field(default_factory=dict, repr=False)  # of each update, []
    _counts: dict[int, Tensor] = field(default_factory=dict, repr=False)  # of each update, []

    def begin(self, collected: Collected) -> None:
        """Take a step's samples, before the first update on them."""
        self._thresholds, self._counts = {}, {}
        if LOSSES[self.learner.settings.loss].rows:
            self._rows = self._row_statistics(collected)
        if self.top_entropy < 1 and self._rows is not None:
            self._entropies = self._rows.entropy
        elif self.top_entropy < 1:
            self._entropies = self.learner.entropies(self.learner.model, collected, collected.sequences)

    def _row_statistics(self, collected: Collected) -> RowStatistics:
        options = self.learner.settings.own_options
        top_k, min_p = int(options.get("k", 1)), options.get("min_p", 1.0)
        return self.learner.row_statistics(self.learner.model, collected, top_k=top_k, min_p=min_p)

    def apply(self, samples: Collected, advantages: Tensor, sequences: Tensor, update: int) -> Collected:
        """Return the samples as an update on `sequences` takes them.

        Args:
            advantages: [S] of all samples.
            sequences: int64, ascending, on the host.
            update: its number within the step, from 0.
        """
        index, cu_seqlens = to_device(advantages.device, *gather_sequences(samples.rollouts.cu_seqlens.cpu(), sequences))
        chosen = samples
        if LOSSES[self.learner.settings.loss].statistic is not None:
            chosen = self._with_statistics(samples, advantages, index, cu_seqlens, update)
        return chosen if self.top_entropy == 1 else chosen.weighted(self._of_high_entropy(index, update))

    def _with_statistics(
        self, samples: Collected, advantages: Tensor, index: Tensor, cu_seqlens: Tensor, update: int
    ) -> Collected:
        """Return the samples with the statistics that the loss needs, of the tokens of the update: those at `index`, which
        `cu_seqlens` cuts into sequences."""
        rollouts, ranks = samples.rollouts, self.learner.ranks
        of_tokens = torch.repeat_interleave(advantages, rollouts.lengths, output_size=len(rollouts.tokens))
        if rollouts.importance_weights is not None:
            of_tokens = of_tokens * rollouts.importance_weights
        top_tokens = None
        if self._rows is None:
            generator = _generator(self.seed, samples.step, update)
            statistics = _chosen(self.learner.settings, rollouts.logprobs[index], of_tokens[index], generator).float()
            is_chosen = statistics != 0
        else:
            rows = RowStatistics(*(values[index] for values in self._rows))
            tokens = rollouts.tokens[index], rollouts.logprobs[index], of_tokens[index]
            statistics, is_chosen = _from_rows(self.learner.settings, rows, *tokens, cu_seqlens)
            top_tokens = self._rows.top_tokens if LOSSES[self.learner.settings.loss].top_tokens else None
        of_update = ranks.from_first(statistics)  # bitwise identical on all ranks
        self._counts[update] = is_chosen.sum()
        by_token = torch.zeros_like(rollouts.logprobs).index_copy(0, index, of_update)
        return replace(samples, rollouts=replace(rollouts, token_statistics=by_token, top_tokens=top_tokens))

    def _of_high_entropy(self, index: Tensor, update: int) -> Tensor:
        """Return a factor of each token [T], 1 for those of the update's tokens that have a policy gradient, 0 for others."""
        assert self._entropies is not None, "begin comes first"
        keep, self._thresholds[update] = highest(self._entropies[index], self.top_entropy)
        factors = torch.zeros_like(self._entropies).index_copy(0, index, keep.float())
        return self.learner.ranks.from_first(factors)

    def end(self) -> dict[str, float]:
        """Return metrics of the step: the number of chosen tokens, and the mean of the entropies at which tokens are kept."""
        metrics = {}
        if self._counts:
            metrics["tokens_chosen"] = torch.stack([*self._counts.values()]).sum()
        if self._thresholds:
            metrics["entropy_threshold"] = torch.stack([*self._thresholds.values()]).mean()
        return {name: float(value) for name, value in zip(metrics, to_host(*metrics.values()), strict=True)}


def highest(entropies: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Return which of the entropies [n] are the highest, and the lowest of these [].

    Of n entropies the ceil(share * n) highest are kept, and all that equal the lowest of them up to rounding. This is what
    TRL's top_entropy_quantile keeps where share * n is an integer.
    """
    if not len(entropies):
        return torch.zeros_like(entropies, dtype=torch.bool), entropies.new_zeros(())
    count = math.ceil(round(share * len(entropies), 6))  # .2 x 15 is 3.0000000000000004
    threshold = entropies.sort(descending=True).values[max(count, 1) - 1]
    return entropies >= threshold - _TIE, threshold


def _chosen(settings: LossSettings, logprobs: Tensor, advantages: Tensor, generator: torch.Generator) -> Tensor:
    """Return the statistics [n] that the loss needs, from the log-probs [n] and advantages [n] of an update's tokens."""
    share, *bounds = settings.numbers
    if settings.loss == "kl_cov":
        return kl_cov_tokens(logprobs, advantages, share=share)
    assert settings.loss == "clip_cov", settings.loss
    low, high = bounds
    return clip_cov_tokens(logprobs, advantages, share=share, low=low, high=high, generator=generator)


def _from_rows(
    settings: LossSettings, rows: RowStatistics, tokens: Tensor, logprobs: Tensor, advantages: Tensor, cu_seqlens: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the statistics [n] that the loss needs of an update's tokens [n], from the rows of the sampling policy for them,
    and which tokens [n] are treated differently."""
    options = settings.own_options
    if settings.loss == "lp_reg":
        log_proxy = rows.log_proxy(options["min_p"])
        statistics = lp_reg_proxies(log_proxy, logprobs, advantages, share=options["share"])
        return statistics, statistics > -math.inf
    assert settings.loss == "simko", settings.loss
    is_top = rows.top_tokens[:, 0] == tokens
    chosen = simko_tokens(rows.entropy, is_top, advantages, cu_seqlens, tau=options["tau"])
    return chosen.float(), chosen


def _generator(seed: int, step: int, update: int) -> torch.Generator:
    """Return a generator that depends on nothing else, so that a resumed run draws what an unbroken one does."""
    (mixed,) = np.random.SeedSequence((seed, step, update)).generate_state(1, np.uint64).tolist()
    return torch.Generator().manual_seed(mixed >> 1)
