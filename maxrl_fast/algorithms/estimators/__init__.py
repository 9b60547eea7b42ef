"""The estimators of group advantages, by family. Importing this package fills the registry.

Notation: N rewards r of one prompt, C of them correct and F = N - C wrong; mean and std are over
the group. S_i is the mean of the maximum over the size-k subsets that contain i, S_-i over the
size-k subsets without i, M_-i over the size-(k-1) subsets without i; EI_i = S_i - M_-i; p is the
prompt's pass rate. d_j are the gaps of the ascending rewards (`Group`).

`weight` is W_N(p) for rewards 0 and 1: E[(1/N) sum_i A_i grad log pi(y_i)] = W_N(p) grad p, exactly
at finite N. 1/p is maximum likelihood, 1 is the plain policy gradient. `ops.effective_weight`
computes it for every estimator that has one.
"""

from maxrl_fast.algorithms.estimator import ESTIMATORS, Estimator, Kernel, Size, alias, estimator
from maxrl_fast.algorithms.estimators import (
    max_at_k,
    moments,
    of_batch,
    off_policy,
    several_rewards,
    with_inputs,
)
from maxrl_fast.algorithms.group import Group

__all__ = ["ESTIMATORS", "Estimator", "Group", "Kernel", "Size", "alias", "estimator"]
__all__ += ["max_at_k", "moments", "of_batch", "off_policy", "several_rewards", "with_inputs"]
