"""A custom token loss: `python -m maxrl_fast.train --objective grpo --loss
examples/custom_loss.py:soft_gate`.
"""

import torch
from torch import Tensor

from maxrl_fast.ops import Tokens


def soft_gate(t: Tokens, *, tau: float = 1.0) -> Tensor:
    """-A (4 / tau) sigmoid(tau (rho - 1)), a smooth gate in place of ppo's clip."""
    return -t.advantages * (4 / tau) * torch.sigmoid(tau * (t.ratio - 1))
