"""What a token loss is given: vectors [T] of packed responses, and sums over unmasked tokens."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

# Log-ratios to the sampling and the reference policy are limited to +-20, probabilities 5e8 apart,
# so that one wrong log-prob cannot make a loss infinite. kMaxLogRatio of csrc/token_loss.h is the
# same.
MAX_LOG_RATIO = 20.0


@dataclass
class Tokens:
    """T tokens of S packed responses. Floating tensors are float64: they are small next to the
    logits. Only logprobs and entropy have a gradient. Masked tokens have advantage 0 and log-probs
    of 0, and count nowhere."""

    logprobs: Tensor  # [T], log pi of each token
    entropy: Tensor  # [T], nats
    old_logprobs: Tensor  # [T], of the sampling policy
    ref_logprobs: Tensor  # [T], of the reference policy; old_logprobs where there is none
    advantages: Tensor  # [T], times the importance weights
    mask: Tensor  # [T] bool
    # [S+1] int64: response s has the tokens cu_seqlens[s] to cu_seqlens[s + 1] - 1
    cu_seqlens: Tensor
    importance_weights: Tensor | float = 1.0  # [T], or 1 for all; the advantages have them already
    targets: Any = None  # Tensor [T] int64, for losses that ask for logits
    statistics: Any = None  # Tensor [T, ...], of the loss's `statistics`
    weights: Any = None  # Tensor [T], of the token's loss in the total
    generator: torch.Generator | None = None  # on a CPU, for draws
    # numbers [] that what compares the tokens of an update adds; over a step integers are summed,
    # others averaged
    metrics: dict[str, Tensor] = field(default_factory=dict)
    clipped_low: Tensor = field(init=False)  # [T] bool, where the loss marks them
    clipped_high: Tensor = field(init=False)
    # [T], the log-ratio for the metric `ratio`, where it is that of the whole response
    metric_log_ratio: Tensor | None = None

    def __post_init__(self) -> None:
        self.clipped_low = self.clipped_high = torch.zeros_like(self.mask)

    def at(self, part: slice) -> "Tokens":
        """Return some of the tokens."""
        given = {x.name: getattr(self, x.name) for x in fields(self) if x.init}
        own = {name: x[part] for name, x in given.items() if isinstance(x, Tensor)}
        bounds = (self.cu_seqlens - part.start).clamp(0, len(own["mask"]))
        return replace(self, **own | {"cu_seqlens": bounds})

    @property
    def log_ratio(self) -> Tensor:
        """Return log(pi / pi_old) [T], limited; beyond the limit its gradient is 0."""
        return limited(self.logprobs - self.old_logprobs)

    @property
    def ratio(self) -> Tensor:
        return self.log_ratio.exp()

    def mark_clipped(self, low: Tensor, high: Tensor) -> None:
        """Count these tokens, [T] bool each, in the metrics clipped_low and clipped_high."""
        self.clipped_low, self.clipped_high = low.detach(), high.detach()

    def sequence_sum(self, x: Tensor) -> Tensor:
        """Return the sum of x [T] over each token's response, [T]."""
        lengths = self.cu_seqlens.diff()
        sums = sequence_sums(torch.where(self.mask, x, 0.0), lengths)
        return sums.repeat_interleave(lengths, output_size=len(x))

    def sequence_mean(self, x: Tensor) -> Tensor:
        """Return the mean of x [T] over each token's response, [T]."""
        return self.sequence_sum(x) / self.sequence_sum(torch.ones_like(x)).clamp_min(1)

    def sequence_ratio(self, log_ratio: Tensor) -> Tensor:
        """Return exp(log_ratio), equal within a response [T]; tokens have their own log-prob's
        gradient."""
        self.metric_log_ratio = value = log_ratio.detach()
        has_gradient = value.abs() <= MAX_LOG_RATIO
        own = torch.where(has_gradient, self.logprobs - self.logprobs.detach(), 0.0)
        return (value.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) + own).exp()

    def sequence_quantile(self, x: Tensor, q: float) -> Tensor:
        """Return the quantile q of x [T] in each token's response, as torch.quantile, [T]; infinity
        without tokens. By two sorts: the lengths would have to come from a GPU."""
        if not len(x):
            return x
        counts = self.sequence_sum(torch.ones_like(x))  # of each token's response, [T]
        sequence = torch.repeat_interleave(self.cu_seqlens.diff(), output_size=len(x))
        # By response, within it the unmasked values first, ascending: two stable sorts.
        kept = x.masked_fill(~self.mask, torch.inf)
        order = kept.argsort(stable=True)
        ordered = kept[order[sequence[order].argsort(stable=True)]]  # [T]
        last = (counts - 1).clamp_min(0)
        position = q * last  # of the quantile among them, between two integers
        low, starts = position.floor(), self.cu_seqlens[:-1][sequence]
        first, second = (ordered[starts + torch.minimum(i, last).long()] for i in (low, low + 1))
        return torch.where(counts > 0, first + (position - low) * (second - first), torch.inf)

    def by_sign(self, positive: float, negative: float) -> Tensor:
        """Return `negative` for the tokens with A < 0 and `positive` for the others, [T]."""
        return torch.full_like(self.advantages, positive).masked_fill(self.advantages < 0, negative)


def limited(log_ratio: Tensor) -> Tensor:
    """Return log-ratios within +-MAX_LOG_RATIO, beyond it without a gradient. NaN stays."""
    limits = log_ratio.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.where(log_ratio.abs() > MAX_LOG_RATIO, limits, log_ratio)


def sequence_sums(values: Tensor, lengths: Tensor) -> Tensor:
    """Return the sums [S] of packed values [T] over sequences of these lengths."""
    # Not index_add, which adds in a varying order on a GPU.
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True)
