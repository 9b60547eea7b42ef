"""The policy on several ranks: replicated (DDP) or sharded (FSDP2)."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.records import Prompts, Rollouts, pack
from maxrl_fast.runtime.device import Machine
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.training.critic import num_critic_weights
from maxrl_fast.training.packing import Packer
from maxrl_fast.training.passes import run_batch


def is_sharded(
    sharding: str, model: PolicyModel, machine: Machine, has_critic: bool = False
) -> bool:
    """Return whether to shard the weights; "auto" does on GPUs where more than half of the memory
    would be float32 weights, gradients and moments, and the rollout engine's copy."""
    if machine.processes == 1 or sharding != "auto" or machine.device != "cuda":
        return machine.processes > 1 and sharding == "full"
    critic = 16 * num_critic_weights(model) if has_critic else 0
    return _bytes(model, 20, 8) + critic > machine.memory / 2


def _bytes(model: PolicyModel, trained: float, frozen: float) -> float:
    return sum(p.numel() * (trained if p.requires_grad else frozen) for p in model.parameters())


def gradients_fit(model: PolicyModel, machine: Machine) -> bool:
    """Return whether half of the memory holds all gradients and the engine's copy, beside the
    shards."""
    part = 4 / machine.processes
    return _bytes(model, 8 + 4 * part, 4 + part) <= machine.memory / 2


def distribute(model: PolicyModel, ranks: Ranks, dtype: torch.dtype) -> nn.Module:
    """Return the module that all ranks run together; its gradients are means over the ranks. The
    model is on its device, equal on all ranks or sharded."""
    if ranks.size == 1:
        return model
    if not model.bare:
        module = DistributedDataParallel(model, gradient_as_bucket_view=True)
        _arrange_buckets(module, model, dtype)
        return module
    device = model.lm_head.weight.device
    fit = gradients_fit(model, Machine.here(device, ranks.size))
    model.keeps_gradients = not ranks.any(not fit, device)
    return model


def _arrange_buckets(module: nn.Module, model: PolicyModel, dtype: torch.dtype) -> None:
    """DDP rearranges its buckets after its first backward pass: here one whose gradients are
    discarded. With more than two ranks the order of additions depends on a gradient's place, so the
    first update of a resumed run would else round differently from an uninterrupted run."""
    device = model.lm_head.weight.device
    prompts = Prompts(*pack([[0, 0]]), torch.zeros(1, dtype=torch.int64)).to(device)
    rollouts = Rollouts.given([[0, 0]]).to(device)
    batch = Packer(prompts, rollouts, torch.zeros(1, device=device)).pack(torch.arange(1))
    hidden = run_batch(module, batch, dtype)
    (hidden @ model.output_matrix.to(dtype).t()).sum().backward()
    module.zero_grad(set_to_none=False)


def shard(model: PolicyModel, dtype: torch.dtype, device: torch.device) -> None:
    """Shard every weight in place (FSDP2), from the host one layer at a time; a layer's are
    gathered in `dtype` while it computes."""
    # imported here: they take most of a second
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # FSDP2's modules cannot be copied
    model.bare = (model.copied(lambda x: x.to("meta")),)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for layer in model.blocks:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # The loss reads the output matrix after the forward pass.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
