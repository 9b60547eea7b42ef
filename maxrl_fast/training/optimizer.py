"""AdamW on float32 weights, its schedule, and the gradient variance from its moments."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from maxrl_fast.model.linear import local_shard
from maxrl_fast.runtime.device import to_host


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up to `peak`, then constant, or cosine decay to a tenth of the peak."""

    peak: float
    steps: int
    warmup_steps: int
    schedule: str = "cosine"  # or "constant"

    def at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 1."""
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        progress = (step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1)
        return self.peak * (0.55 + 0.45 * math.cos(math.pi * progress))


def make_optimizer(model: nn.Module, beta2: float, weight_decay: float) -> torch.optim.AdamW:
    """Build a fused AdamW with weight decay on matrices only; `Learner.update` sets the learning
    rate.

    Weights, gradients and moments are float32, so that changes too small for bfloat16 add up.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() >= 2]
    vectors = [p for p in trained if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, beta2), fused=True)


def zero_gradients(model: nn.Module) -> None:
    gradients = [local_shard(p.grad) for p in model.parameters() if p.grad is not None]
    if gradients:
        torch._foreach_zero_(gradients)


@torch.no_grad()
def moment_variance(optimizer: torch.optim.Optimizer) -> float:
    """Estimate the gradient's variance from Adam's moments (MaxPO paper): sum over parameters, with
    sharded weights over this rank's shard, of v_hat - m_hat^2. Waits once for the device."""
    betas, numbers, total = list[tuple[float, float]](), list[Tensor](), 0.0
    for group in optimizer.param_groups:
        states = [optimizer.state[p] for p in group["params"] if "exp_avg" in optimizer.state[p]]
        if not states:
            continue
        betas.append(group["betas"])
        first, second = (
            [local_shard(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq")
        )
        squares = torch.stack(torch._foreach_norm(first)).double().square().sum()
        sums = torch.stack([x.sum(dtype=torch.float64) for x in second]).sum()
        numbers += [states[0]["step"], sums, squares]
    values = iter([float(x) for x in to_host(*numbers)])
    for (beta1, beta2), step, sum_, square in zip(betas, values, values, values, strict=True):
        total = total + sum_ / (1 - beta2**step) - square / (1 - beta1**step) ** 2
    return total
