"""Linear layers that compute in their input's dtype, optionally with LoRA (Hu et al. 2021)."""

import itertools
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from maxrl_fast.errors import InputError
from maxrl_fast.ops import dispatch
from maxrl_fast.ops.dispatch import KernelLaunch, check_first_order

FEWEST_ROWS = 64  # below it, packing the matrix costs too much
LARGEST_MATRIX = 1 << 20  # numbers; PyTorch's products of larger ones are as fast


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None = None) -> Tensor:
    if has_kernel(x, weight):
        product: Tensor = Product.apply(x, weight, bias, added)
        return product
    if added is None:
        return F.linear(x, weight, bias)
    added = added if bias is None else added + bias
    # without gradients `added` is not needed any more, and addmm would copy it
    add = torch.Tensor.addmm if torch.is_grad_enabled() else torch.Tensor.addmm_
    return add(added, x, weight.t())


class Linear(nn.Linear):
    # the weight and bias of several layers, of which this is the first
    joint: tuple[Tensor, Tensor | None] | None = None

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        """Return x W^T + bias + added, for x [..., in]; `added` [U, out] needs x [U, in]."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return _product(x, self.weight.to(x.dtype), bias, added)


def can_join(layers: Sequence[nn.Module], x: Tensor | None = None) -> bool:
    """Whether no layer has adapters, and all or none are trained: a joint product would also
    compute the gradient of a frozen matrix. On a GPU, for x, only weights that are rounded anyway:
    a copy of those that FSDP2 has gathered would be kept until the backward pass."""
    is_plain = all(type(layer) is Linear for layer in layers)
    if is_plain and x is not None and dispatch.is_gpu(x.device):
        is_plain = layers[0].weight.dtype != x.dtype
    return is_plain and len({layer.weight.requires_grad for layer in layers}) == 1


class _Joined(torch.autograd.Function):
    """Matrices below each other, rounded in the same pass; their gradients are parts of one."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> Tensor:
        ctx.sizes = [len(weight) for weight in weights]
        ctx.dtype = weights[0].dtype
        joint = weights[0].new_empty(sum(ctx.sizes), weights[0].shape[1], dtype=dtype)
        torch.cat(weights, out=joint)
        return joint

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *grad.to(ctx.dtype).split(ctx.sizes)


def packed(layers: Sequence[Linear], x: Tensor) -> Tensor:
    """Return the layers' outputs next to each other, by one product if they `can_join`."""
    if layers[0].joint is not None:
        return F.linear(x, *layers[0].joint)
    if not can_join(layers, x):
        return torch.cat([layer(x) for layer in layers], -1)
    weight = _Joined.apply(x.dtype, *(layer.weight for layer in layers))
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    return _product(x, weight, torch.cat(biases).to(x.dtype) if biases else None)


class LoraLinear(Linear):
    """W, frozen, plus the trained low-rank update (alpha / rank) B A."""

    ADAPTER = ("lora_a", "lora_b")

    def __init__(self, base: nn.Linear, rank: int, alpha: float, generator: torch.Generator):
        super().__init__(base.in_features, base.out_features, base.bias is not None, "meta")
        self.weight, self.bias = base.weight, base.bias
        self.requires_grad_(False)
        self.rank, self.alpha, self.scale = rank, alpha, alpha / rank
        device = base.weight.device
        # A is initialised like a linear layer and B with zeros: training starts from W.
        bound = 1 / math.sqrt(base.in_features)
        a = torch.empty(rank, base.in_features).uniform_(-bound, bound, generator=generator)
        self.lora_a = nn.Parameter(a.to(device))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank, device=device))

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        low = F.linear(x, self.lora_a.to(x.dtype))  # [..., rank]
        return super().forward(x, added) + self.scale * F.linear(low, self.lora_b.to(x.dtype))

    def merged(self) -> Tensor:
        a, b, weight = (full_tensor(x.detach()) for x in (self.lora_a, self.lora_b, self.weight))
        return torch.addmm(weight, b, a, alpha=self.scale)


def local_shard(x: Tensor) -> Tensor:
    local: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return local


def full_tensor(x: Tensor) -> Tensor:
    full: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return full


def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield weights and buffers by name: adapters merged, shards gathered, tied weights once."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        buffers = module.named_buffers(recurse=False)
        hidden = module._non_persistent_buffers_set
        if isinstance(module, LoraLinear):
            hidden = hidden | set(LoraLinear.ADAPTER)
        for own, tensor in itertools.chain(module.named_parameters(recurse=False), buffers):
            if id(tensor) in seen or own in hidden:
                continue
            seen.add(id(tensor))
            is_adapted = isinstance(module, LoraLinear) and own == "weight"
            yield f"{name}.{own}", module.merged() if is_adapted else full_tensor(tensor.detach())


def _is_adaptable(module: nn.Module) -> TypeGuard[nn.Linear]:
    plain = nn.Linear.forward, Linear.forward
    return isinstance(module, nn.Linear) and type(module).forward in plain


def add_adapters(model: nn.Module, rank: int, alpha: float, targets: str, seed: int) -> None:
    """Freeze a model and add adapters to the linear layers in `targets`, such as q_proj,v_proj."""
    model.requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    wanted = {name.strip() for name in targets.split(",")}
    layers = model.named_modules()
    found = {name: x for name, x in layers if _is_adaptable(x) and name.count(".") > 1}
    names = {name.rpartition(".")[2] for name in found}
    if not names:
        why = "whose layers have no torch.nn.Linear to adapt"
        raise InputError(f"lora_rank must be 0 for this policy, {why}")
    for name in sorted(wanted - names):
        raise InputError(f"lora_targets must be among {', '.join(sorted(names))}, got {name!r}")
    for path, base in found.items():
        parent, _, name = path.rpartition(".")
        if name in wanted:
            setattr(model.get_submodule(parent), name, LoraLinear(base, rank, alpha, generator))


def adapters(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield matrices by peft's names. If sharded, all ranks must iterate together."""
    for path, module in model.named_modules():
        if isinstance(module, LoraLinear):
            name = f"base_model.model.{path.removeprefix('hf.')}"
            yield f"{name}.lora_A.weight", full_tensor(module.lora_a.detach())
            yield f"{name}.lora_B.weight", full_tensor(module.lora_b.detach())


def adapter_config(model: nn.Module) -> dict[str, Any]:
    """Return peft's adapter_config.json; {} for a model without adapters."""
    found = {path: x for path, x in model.named_modules() if isinstance(x, LoraLinear)}
    if not found:
        return {}
    one = next(iter(found.values()))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": one.rank,
        "lora_alpha": one.alpha,
        "target_modules": sorted({path.rpartition(".")[2] for path in found}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }


def save_adapters(
    folder: Path, model: str | None, config: dict[str, Any], tensors: dict[str, Tensor]
) -> None:
    """Write an adapter of `model` as peft reads it."""
    if config:
        folder.mkdir()
        config["base_model_name_or_path"] = model
        if model is not None and model.startswith("hf://"):
            base, _, revision = model.removeprefix("hf://").partition("@")
            config |= {"base_model_name_or_path": base, "revision": revision}
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
        stored = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
        save_file(stored, folder / "adapter_model.safetensors")


# csrc/cpu/linear.cpp multiplies many float32 rows by a small matrix, for which PyTorch's library is
# slow (bench/README.md). Bias and residual are added as results are written.


def has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Under torch.autocast and when compiled PyTorch's product is used."""
    return (
        x.device.type == "cpu"
        and not dispatch.is_gpu(x.device)
        and x.dtype == weight.dtype == torch.float32
        and x.dim() == 2
        and len(x) >= FEWEST_ROWS
        and weight.shape[0] % 16 == weight.shape[1] % 16 == 0
        and 0 < weight.numel() <= LARGEST_MATRIX
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
    )


class Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, added: Tensor | None
    ) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        added = None if added is None else added.contiguous()
        ctx.save_for_backward(x, weight)
        call, (num_rows, in_size), out_size = KernelLaunch(x.device), x.shape, len(weight)
        y, float32 = x.new_empty(num_rows, out_size), torch.float32
        call.launch(
            "linear",
            **{"num_rows": num_rows, "in_size": in_size, "out_size": out_size, "x": x, "y": y},
            **call.addresses(float32, out_size, in_size, weight=weight),
            **call.addresses(float32, out_size, bias=bias),
            **call.addresses(float32, num_rows, out_size, added=added),
        )
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        check_first_order("linear")
        needs_x, needs_weight, needs_bias, needs_added = ctx.needs_input_grad
        x, weight = ctx.saved_tensors
        to = (
            torch.empty_like(x) if needs_x else None,
            torch.empty_like(weight) if needs_weight or needs_bias else None,
            x.new_empty(len(weight)) if needs_bias else None,
        )
        if any(x is not None for x in to):
            sizes = {"num_rows": len(x), "in_size": x.shape[1], "out_size": len(weight)}
            given = {"grad": grad.contiguous(), "x": x, "weight": weight}
            made = dict(zip(("grad_x", "grad_weight", "grad_bias"), to, strict=True))
            KernelLaunch(x.device).launch("linear_backward", **sizes, **given, **made)
        return to[0], to[1] if needs_weight else None, to[2], grad if needs_added else None
