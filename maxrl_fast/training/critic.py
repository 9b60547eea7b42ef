"""The critic of PPO: a copy of the policy with a value head, and its loss."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from maxrl_fast.model.policy_model import Change, PolicyModel


class ValueHead(nn.Module):
    """The last layer of a critic: value = hidden state @ `weight` [H], which starts at 0."""

    def __init__(self, size: int, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, device=device))


def critic_model(policy: PolicyModel, make: Change = None) -> PolicyModel:
    """Copy an unsharded policy, with a value head as last layer; both train the same weights."""
    critic: PolicyModel = policy.copied(make, policy.lm_head)
    critic.set_output(ValueHead(policy.config.hidden_size, policy.lm_head.weight.device))
    return critic


def num_critic_weights(policy: PolicyModel) -> int:
    """Return how many weights a policy's critic would train."""
    output = (
        set() if policy.config.tie_word_embeddings else {id(p) for p in policy.lm_head.parameters()}
    )
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad and id(p) not in output)
    return trained + int(policy.config.hidden_size)


def values_of(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden.float() @ weight.float()


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Return half of max((V - R)^2, (V' - R)^2) of each value [T], V' clamped to old value +- clip,
    as in OpenAI's baselines/ppo2 and verl; with clip 0 (V - R)^2 / 2."""
    errors = (values - returns).square()
    if clip:
        clamped = torch.clamp(values, old_values - clip, old_values + clip)
        errors = torch.maximum(errors, (clamped - returns).square())
    return 0.5 * errors


@dataclass
class Critic:
    """Trained in place; `module` (sharding.distribute) runs its training passes."""

    model: PolicyModel
    optimizer: torch.optim.Optimizer
    lr: float
    value_clip: float
    module: nn.Module

    @torch.no_grad()
    def start_from(self, policy: PolicyModel) -> None:
        """Copy the policy's current weights, except the value head."""
        weights = dict(policy.named_parameters())
        for name, own in self.model.named_parameters():
            if own is not self.model.lm_head.weight and own is not weights[name]:
                own.copy_(weights[name])
