"""What training, rollouts and checkpoints need of a policy."""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from maxrl_fast.model.linear import merged_weights
from maxrl_fast.model.recurrence import Recurrence
from maxrl_fast.ops.logit_chunks import output_product

Change = Callable[[Tensor], Tensor] | None  # of weights


@dataclass(frozen=True)
class PolicySizes:
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the feed-forward layers that a token goes through, together
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    tie_word_embeddings: bool = True
    model_type: str = "qwen2"
    dtype: str = "float32"  # of the weights in checkpoints


class PolicyModel(nn.Module):
    """A policy, whose parameters are the float32 master weights. Logits are z = logit_scale *
    hidden @ output_matrix.T, then softcap * tanh(z / softcap) unless softcap is 0."""

    config: Any  # its PolicySizes
    lm_head: Any
    backend = "native"
    logit_scale = 1.0
    softcap = 0.0
    checkpoint_activations = False
    keeps_gradients = False  # of a whole update on each rank, though sharded
    bare: "tuple[PolicyModel, ...]" = ()  # of a sharded policy: itself, unsharded, without weights

    @property
    def head_sizes(self) -> tuple[int, int, int]:
        c = self.config
        return c.num_attention_heads, c.num_key_value_heads, c.head_dim

    @property
    def device(self) -> torch.device:
        device: torch.device = self.lm_head.weight.device
        return device

    @property
    def output_matrix(self) -> Tensor:
        """[V, H]; sharded weights are gathered from forward to backward pass."""
        weight: Tensor = self.lm_head.weight
        return weight

    def scaling(self, temperature: float = 1.0) -> dict[str, Any]:
        """For logits hidden @ output_matrix.T, without `logit_scale`."""
        return {
            "temperature": temperature / self.logit_scale,
            "softcap": self.softcap / self.logit_scale,
        }

    @property
    def blocks(self) -> list[nn.Module]:
        """The decoder layers; sharded weights are gathered one layer at a time."""
        raise NotImplementedError

    def set_output(self, layer: nn.Module) -> None:
        """Replace the output layer by one with a `weight`, which may be a vector [H]."""
        raise NotImplementedError

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Callable[..., Tensor],
        rows: Tensor | None,
        dtype: torch.dtype = torch.float32,
        recurrence: Recurrence | None = None,
    ) -> Tensor:
        """Return the final hidden states [R, H] in `dtype`, after the last norm, of `rows` [R], or
        all, of a packed stream of tokens and positions [U], all int64. attention: called once a
        layer with (layer, q [U, Hq, D], k [U, Hkv, D], v [U, Hkv, D]), and an AttentionVariant if
        the layer has one. recurrence: called by layers with a state."""
        raise NotImplementedError

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every weight by its name in checkpoints: adapters merged, tied weights once. If
        sharded, all ranks must iterate together."""
        raise NotImplementedError

    def copied(self, make: Change = None, *shared: nn.Module) -> Any:
        """Copy an unsharded policy, with `make` of its weights, or copies of those that are
        trained; the others and the modules `shared` are shared."""
        memo: dict[int, Any] = {id(x): x for x in shared}
        for p in self.parameters():
            if make is not None:
                memo[id(p)] = nn.Parameter(make(p.detach()), p.requires_grad)
            elif not p.requires_grad:
                memo[id(p)] = p
        return copy.deepcopy(self, memo)

    @torch.no_grad()
    def copy_weights(self, policy: nn.Module) -> None:
        """Copy the weights of a policy like this one; its adapters are merged."""
        own = dict(itertools.chain(self.named_parameters(), self.named_buffers()))
        for name, weight in merged_weights(policy):
            own[name].copy_(weight)

    def unshard(self) -> None:
        """Gather the weights outside the layers, which gather theirs. FSDP2 overrides this."""

    def reshard(self) -> None:
        """Free what a forward pass without a backward pass leaves gathered."""

    def logits(self, hidden: Tensor) -> Tensor:
        z = output_product(hidden, self.output_matrix.to(hidden.dtype))
        z = z if self.logit_scale == 1 else self.logit_scale * z
        return self.softcap * torch.tanh(z / self.softcap) if self.softcap else z


def find_nonfinite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return the name of the first tensor with NaN or infinity, of sharded ones in this rank's
    shards. A GPU is waited for once."""
    shards = {name: getattr(x, "_local_tensor", x).detach() for name, x in tensors.items()}
    read = {name: x for name, x in shards.items() if x.is_floating_point() and x.numel()}
    # [2, number of tensors] float64: a NaN makes both extremes NaN
    extremes = [
        torch.stack(torch.aminmax(x)).to("cpu", torch.float64, non_blocking=True)
        for x in read.values()
    ]
    if any(x.is_cuda for x in read.values()):
        torch.cuda.synchronize()
    return next(
        (name for name, x in zip(read, extremes, strict=True) if not x.isfinite().all()), None
    )
