"""The fused operators, importable without the trainer: `from maxrl_fast import ops`.

What is differentiable can be differentiated once, in reverse mode: `create_graph=True`, the forward mode and torch.func.grad
raise RuntimeError.
"""

from maxrl_fast.algorithms.estimators import ESTIMATORS
from maxrl_fast.ops.covariance import clip_cov_tokens, kl_cov_tokens
from maxrl_fast.ops.effective_weight import effective_weight
from maxrl_fast.ops.group_advantage import (
    expected_improvement,
    group_advantage,
    grpo_advantage,
    leave_two_out_baseline,
    maxpo_advantage,
    maxrl_advantage,
    rloo_advantage,
)
from maxrl_fast.ops.linear_loss import linear_policy_gradient_loss, linear_token_logprobs
from maxrl_fast.ops.losses import LOSSES
from maxrl_fast.ops.low_probability import lp_reg_proxies
from maxrl_fast.ops.pacs import log_ratio_reward, pacs_loss
from maxrl_fast.ops.register import register_estimator
from maxrl_fast.ops.row_statistics import linear_row_statistics, row_statistics
from maxrl_fast.ops.token_loss import policy_gradient_loss, token_logprobs
from maxrl_fast.ops.top_tokens import simko_tokens

__all__ = [
    "ESTIMATORS",
    "LOSSES",
    "clip_cov_tokens",
    "effective_weight",
    "expected_improvement",
    "group_advantage",
    "grpo_advantage",
    "kl_cov_tokens",
    "leave_two_out_baseline",
    "linear_policy_gradient_loss",
    "linear_row_statistics",
    "linear_token_logprobs",
    "log_ratio_reward",
    "lp_reg_proxies",
    "maxpo_advantage",
    "maxrl_advantage",
    "pacs_loss",
    "policy_gradient_loss",
    "register_estimator",
    "rloo_advantage",
    "row_statistics",
    "simko_tokens",
    "token_logprobs",
]
