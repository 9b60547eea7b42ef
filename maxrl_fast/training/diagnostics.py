"""What each prompt does to the gradient of a step: how strongly it pulls, and which one made it NaN or infinite."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from maxrl_fast.model.decoder import Decoder
from maxrl_fast.model.linear import whole
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.training.collect import Collected
from maxrl_fast.training.packing import Packer

if TYPE_CHECKING:
    from maxrl_fast.training.learner import Learner


def prompt_gradient_norms(
    learner: "Learner",
    prompts: Prompts,
    rollouts: Rollouts,
    advantages: Tensor,
    sequences: Tensor,
    beat: Callable[[], None] = lambda: None,
) -> list[float]:
    """Norms of each prompt's own part of the gradient of the loss over all rollouts, as in figures 6 and 8 of the MaxRL paper;
    0 where nothing is learned. All ranks compute all of them, by a backward pass; gradients are zero after it.

    Args:
        advantages: [S].
        sequences: int64, ascending, the rollouts with a reward.
        beat: is called after each prompt.
    """
    # As in Learner.update: to the last bit the same on all ranks, who must make the same passes.
    advantages = learner.ranks.from_first(advantages.clone())
    lengths = rollouts.lengths[sequences]
    packer, denominator = learner.packer(prompts, rollouts, advantages), learner.settings.denominator(lengths)
    learning = sequences[learner.settings.can_teach(advantages[sequences]) & (lengths > 0)].cpu()
    group, norms = learning // packer.num_rollouts, [0.0] * len(prompts)
    for g in group.unique().tolist():
        _zero_gradients(learner.model)
        for part in packer.split(learning[group == g], learner.token_budget):
            learner.loss(packer.pack(part), denominator)[0].backward()
        gradients = [p.grad for p in learner.model.parameters() if p.grad is not None]
        norms[g] = float(whole(nn.utils.get_total_norm(gradients)))
        beat()
    _zero_gradients(learner.model)
    return norms


def diagnosis(step: int, collected: Collected, gradient_norms: list[float]) -> dict[str, Any]:
    """A line of diagnostics.jsonl: of each prompt its index, the mean of its known rewards (0 where none is), and the norm
    [G] of its part of the gradient."""
    rewards, valid = collected.rewards, collected.valid
    known = torch.ones_like(rewards) if valid is None else valid.float()
    rates = (rewards * known).sum(1) / known.sum(1).clamp_min(1)
    return {
        "step": step,
        "ids": collected.prompts.ids.tolist(),
        "pass_rate": [round(rate, 6) for rate in rates.tolist()],
        "grad_norm": gradient_norms,
    }


def find_non_finite(learner: "Learner", packer: Packer, sequences: Tensor, denominator: float) -> str:
    """What became non-finite, and for which prompt: every prompt again, alone, on all ranks alike."""
    model = learner.model
    for name, parameter in model.named_parameters():
        if not whole(parameter.detach()).isfinite().all():
            return f"the weight {name} is not finite"
    sequences = sequences.cpu()
    group = sequences // packer.num_rollouts
    for g in group.unique().tolist():
        where = f"for prompt {int(packer.prompts.ids[g])}"
        own = sequences[group == g]
        if not packer.advantages[own.to(packer.advantages.device)].isfinite().all():
            return f"an advantage is not finite {where}"
        _zero_gradients(model)
        for part in packer.split(own, learner.token_budget):
            loss, _ = learner.loss(packer.pack(part), denominator)
            if not loss.isfinite():
                return f"the loss is {float(loss.detach())} {where}"
            loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and not whole(parameter.grad).isfinite().all():
                return f"the gradient of {name} is not finite {where}"
    return "the gradient summed over the prompts is not finite, though each prompt's own is"


def _zero_gradients(model: Decoder) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
