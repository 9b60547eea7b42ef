"""Linear layers that compute in the dtype of their input, optionally with a low-rank adapter (LoRA, Hu et al. 2021)."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from maxrl_fast.errors import InputError


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class LoraLinear(Linear):
    """A linear layer with a frozen matrix W and a trained low-rank update: W + (alpha / rank) B A."""

    ADAPTER = ("lora_a", "lora_b")

    def __init__(self, base: Linear, rank: int, alpha: float, generator: torch.Generator):
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.requires_grad_(False)
        self.scale = alpha / rank
        device = base.weight.device
        # A is initialised like a linear layer and B with zeros, so that training starts from W itself.
        bound = 1 / math.sqrt(base.in_features)
        a = torch.empty(rank, base.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_a = nn.Parameter(a.to(device))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, device=device))

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(x, self.lora_a.to(x.dtype))  # [..., rank]
        return super().forward(x) + self.scale * F.linear(low, self.lora_b.to(x.dtype))

    def merged(self) -> Tensor:
        """Return W + (alpha / rank) B A, [out, in] float32."""
        a, b, weight = (whole(x.detach()) for x in (self.lora_a, self.lora_b, self.weight))
        return torch.addmm(weight, b, a, alpha=self.scale)


def own_part(x: Tensor) -> Tensor:
    """Return this rank's part of a tensor that may be sharded over ranks."""
    local: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return local


def whole(x: Tensor) -> Tensor:
    """Return the whole tensor, gathered from all ranks if it is sharded."""
    full: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return full


def add_adapters(model: nn.Module, rank: int, alpha: float, targets: str, seed: int) -> None:
    """Freeze a model and add adapters to its linear layers named in `targets`.

    Args:
        targets: names separated by commas, such as "q_proj,v_proj"; not the output matrix.

    Raises:
        InputError: if no layer has one of the names.
    """
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    wanted = {name.strip() for name in targets.split(",")}
    found = {name: module for name, module in model.named_modules() if isinstance(module, Linear) and name.count(".") > 1}
    names = {name.rpartition(".")[2] for name in found}
    for name in sorted(wanted - names):
        raise InputError(f"lora_targets must be among {', '.join(sorted(names))}, got {name!r}")
    for path, base in found.items():
        parent, _, name = path.rpartition(".")
        if name in wanted:
            setattr(model.get_submodule(parent), name, LoraLinear(base, rank, alpha, generator))
