"""Forward passes that all ranks run together, and per-token values of a model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from maxrl_fast.model.attention import PLAIN_ATTENTION, AttentionVariant, tree_attention
from maxrl_fast.model.layer_kernels import choose_rows
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.model.recurrence import Run, over_forest
from maxrl_fast.ops import linear_token_logprobs
from maxrl_fast.records import Samples
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.training.packing import MicroBatch, Packer

TokenValues = Callable[[PolicyModel, MicroBatch, Tensor], Tensor]  # hidden [T, H] -> [T, n]
Kept = list[tuple[Tensor, Tensor]]  # of each micro-batch its sequences and numbers [n]


def run_batch(module: nn.Module, batch: MicroBatch, dtype: torch.dtype) -> Tensor:
    """Return the hidden states [T, H] that predict the batch's targets, in `dtype`."""

    def attention(
        layer: int, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant = PLAIN_ATTENTION
    ) -> Tensor:
        return tree_attention(q, k, v, batch.forest, variant)

    def recurrence(layer: tuple[int, int], run: Run, hidden: Tensor) -> Tensor:
        return over_forest(run, hidden, batch.forest.padded)[0]

    hidden = module(batch.tokens, batch.positions, attention, batch.rows, dtype, recurrence)
    return choose_rows(hidden, batch.target_rows, batch.by_row)


class Pass(NamedTuple):
    batch: MicroBatch
    sequences: Tensor  # int64, on the host
    is_padding: bool  # a dummy pass: keeps collectives in step, with zero gradient
    is_last: bool


@dataclass(frozen=True)
class Passes:
    """Splits samples into micro-batches of at most `token_budget` tokens for all ranks, which must
    call each method together, and computes per-token values of a model."""

    ranks: Ranks
    token_budget: int
    dtype: torch.dtype
    temperature: float
    shares_all: bool  # of what samples begin with: see Packer
    shares_weights: bool

    def packer(self, samples: Samples, advantages: Tensor | None = None) -> Packer:
        if advantages is None:
            advantages = torch.zeros(len(samples.rollouts), device=samples.rollouts.tokens.device)
        return Packer(samples.prompts, samples.rollouts, advantages, self.shares_all)

    def micro_batches(self, packer: Packer, sequences: Tensor) -> Iterator[Pass]:
        """Yield this rank's passes over the chosen sequences. All ranks run the same number,
        because each exchanges gradients or sharded weights: a rank with fewer micro-batches repeats
        the shortest response."""
        shares = packer.share(sequences, self.ranks.size)
        parts = [packer.split(share, self.token_budget) for share in shares]
        own, num_passes = parts[self.ranks.rank], max(map(len, parts))
        for i in range(num_passes):
            is_padding = i >= len(own)
            chosen = packer.shortest(sequences) if is_padding else own[i]
            yield Pass(packer.pack(chosen), chosen, is_padding, i == num_passes - 1)

    def accumulate(
        self,
        module: Any,
        packer: Packer,
        sequences: Tensor,
        loss_of: Callable[[MicroBatch], tuple[Tensor, Tensor]],
    ) -> Kept:
        """Add the gradients of the chosen sequences' losses. loss_of: returns the loss to
        differentiate, and numbers float64 to keep."""
        kept = []
        for batch, chosen, is_padding, is_last in self.micro_batches(packer, sequences):
            # the last pass exchanges gradients; earlier ones add to this rank's, if they fit
            if isinstance(module, DistributedDataParallel):
                module.require_backward_grad_sync = is_last
            elif module.keeps_gradients:
                module.set_requires_gradient_sync(is_last)
            loss, numbers = loss_of(batch)
            (0 * loss if is_padding else loss).backward()
            if not is_padding:
                kept.append((chosen, numbers))
        return kept

    def total(self, kept: Kept, count: int, device: torch.device) -> Tensor:
        """Add the kept numbers [count] over micro-batches and ranks."""
        none = torch.zeros(count, dtype=torch.float64, device=device)
        return self.ranks.sum(sum((numbers for _, numbers in kept), none))

    def logprobs(self, model: PolicyModel, samples: Samples, *shares: Tensor) -> Tensor:
        return self.compute(self.logprobs_and_entropies, model, samples, *shares)[:, 0]

    def logprobs_and_entropies(
        self, model: PolicyModel, batch: MicroBatch, hidden: Tensor
    ) -> Tensor:
        """Return [T, 2] float32 of a micro-batch, from the hidden states that predict its tokens;
        entropies in nats."""
        scaling = model.scaling(self.temperature)
        values = linear_token_logprobs(hidden, model.output_matrix, batch.targets, **scaling)
        return torch.stack([value.float() for value in values], 1)

    @torch.no_grad()
    def compute(
        self, values: TokenValues, model: PolicyModel, samples: Samples, *shares: Tensor
    ) -> Tensor:
        """Return `values` [T, n] float32 of the chosen samples' tokens, packed; the samples are
        ascending, and micro-batches hold samples of one share."""
        packer, rollouts = self.packer(samples), samples.rollouts
        batches = (self.micro_batches(packer, share.cpu()) for share in shares)
        results = None
        for batch, _, is_padding, _ in chain.from_iterable(batches):
            if not is_padding or self.shares_weights or results is None:
                computed = values(model, batch, run_batch(model, batch, self.dtype))
                model.reshard()
                if results is None:
                    results = computed.new_zeros(len(rollouts.tokens), computed.shape[1])
            if not is_padding:
                results[batch.target_index] = computed
        results = self.ranks.sum(rollouts.logprobs.new_zeros(0, 2) if results is None else results)
        sequences = torch.cat(shares).cpu()
        return results if len(sequences) == len(rollouts) else results[packer.positions(sequences)]
