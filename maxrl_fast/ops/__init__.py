"""The fused operators, importable without the trainer: `from maxrl_fast import ops`.

Differentiable operators can be differentiated once, in reverse mode: `create_graph=True`, forward
mode and torch.func.grad raise RuntimeError.

Arguments that do not fit raise ValueError, or TypeError if they must be tensors. On a GPU, where
checks of values would wait, results become NaN in place of an error, and infinite beyond a dtype.
"""

from maxrl_fast.algorithms.estimators import ESTIMATORS
from maxrl_fast.algorithms.losses import LOSSES, token_loss
from maxrl_fast.algorithms.tokens import Tokens
from maxrl_fast.ops.divergence import linear_divergence
from maxrl_fast.ops.group_advantage import (
    effective_weight,
    expected_improvement,
    group_advantage,
    grpo_advantage,
    leave_two_out_baseline,
    maxpo_advantage,
    maxrl_advantage,
    rloo_advantage,
)
from maxrl_fast.ops.loss import (
    linear_policy_gradient_loss,
    linear_token_logprobs,
    policy_gradient_loss,
    token_logprobs,
)
from maxrl_fast.ops.pacs import log_ratio_reward, pacs_loss

__all__ = [
    "ESTIMATORS",
    "LOSSES",
    "Tokens",
    "effective_weight",
    "expected_improvement",
    "group_advantage",
    "grpo_advantage",
    "leave_two_out_baseline",
    "linear_divergence",
    "linear_policy_gradient_loss",
    "linear_token_logprobs",
    "log_ratio_reward",
    "maxpo_advantage",
    "maxrl_advantage",
    "pacs_loss",
    "policy_gradient_loss",
    "rloo_advantage",
    "token_logprobs",
    "token_loss",
]
