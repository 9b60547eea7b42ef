"""AdamW on float32 weights, its schedule, and its step."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor, nn

from maxrl_fast.model.linear import full_tensor
from maxrl_fast.runtime.device import to_host


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up to `peak`, then constant, or cosine decay to a tenth of the peak; steps count
    from 1."""

    peak: float
    steps: int
    warmup_steps: int
    schedule: str = "cosine"  # or "constant"

    def at(self, step: int) -> float:
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        progress = (step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1)
        return self.peak * (0.55 + 0.45 * math.cos(math.pi * progress))


def make_optimizer(model: nn.Module, beta2: float, weight_decay: float) -> torch.optim.AdamW:
    """Build a fused AdamW with weight decay on matrices only. All is float32, so that changes too
    small for bfloat16 add up."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, beta2), fused=True)


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    lr: float,
    clip_grad: float,
    refuse: Callable[[float, float], NoReturn],
    *numbers: Tensor,
) -> tuple[float, list[Tensor]]:
    """Clip the gradients and take the optimizer's step. Return the norm before clipping, and the
    numbers on the host. refuse: called with the first, the loss, and the norm where one is not
    finite; the weights are unchanged."""
    for p in model.parameters():
        if p.requires_grad and p.grad is None:  # of no sample: the optimizer would skip it
            p.grad = torch.zeros_like(p)
    norm = full_tensor(nn.utils.clip_grad_norm_(model.parameters(), clip_grad))
    # one read before the step: values that are not finite must not change the weights
    norm, *read = to_host(norm, *numbers)
    loss, grad_norm = float(read[0].flatten()[0]), float(norm)
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        refuse(loss, grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return grad_norm, read
