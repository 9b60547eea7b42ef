"""The critic of PPO: a copy of the policy with a value head in place of its output matrix, and the loss of its values."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from maxrl_fast.model.policy_model import PolicyModel


class ValueHead(nn.Module):
    """The last layer of a critic: the value of a state is the product of its hidden state and `weight` [H], 0 at first."""

    def __init__(self, size: int, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, device=device))


def critic_model(policy: PolicyModel) -> PolicyModel:
    """Return a copy of a policy, not sharded, whose last layer is a value head.

    What the policy trains is trained in the copy too; weights that are never trained, as under adapters, are shared with it.
    """
    kept = {id(p): p for p in policy.parameters() if not p.requires_grad} | {id(policy.lm_head): policy.lm_head}
    critic = copy.deepcopy(policy, kept)
    critic.set_output(ValueHead(policy.config.hidden_size, policy.lm_head.weight.device))
    return critic


def num_critic_weights(policy: PolicyModel) -> int:
    """Return how many weights the critic of a policy trains; it need not be built."""
    output = set() if policy.config.tie_word_embeddings else {id(p) for p in policy.lm_head.parameters()}
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad and id(p) not in output)
    return trained + int(policy.config.hidden_size)


def values_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return the values [T] float32 of states with these hidden states [T, H], for a value head [H]."""
    return hidden.float() @ weight.float()


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Return the loss of each value [T]: half of the larger of two squared errors, that of the value V itself, and that of V
    clamped to within `clip` of the value before the step; with clip 0 the first alone.

    The clipped loss of OpenAI's PPO (baselines/ppo2), as in verl.
    """
    errors = (values - returns).square()
    if clip:
        clamped = torch.clamp(values, old_values - clip, old_values + clip)
        errors = torch.maximum(errors, (clamped - returns).square())
    return 0.5 * errors


@dataclass
class Critic:
    """A critic and its optimizer.

    Args:
        model: from `critic_model`, trained in place.
        lr: learning rate, constant over the run.
        value_clip: `clip` of `value_loss`.
        module: what runs the training passes of the model (sharding.distribute).
    """

    model: PolicyModel
    optimizer: torch.optim.Optimizer
    lr: float
    value_clip: float
    module: nn.Module

    @torch.no_grad()
    def start_from(self, policy: PolicyModel) -> None:
        """Take the weights of the policy as it is now, but for the value head."""
        weights = dict(policy.named_parameters())
        for name, own in self.model.named_parameters():
            if own is not self.model.lm_head.weight and own is not weights[name]:
                own.copy_(weights[name])
