"""The estimators of group advantages, by family. Importing this package fills the registry.

Notation: N rewards r of one prompt, C of them correct and F = N - C wrong; mean and std are over
the group. S_i is the mean of the maximum over the size-k subsets that contain i, S_-i over the
size-k subsets without i, M_-i over the size-(k-1) subsets without i; EI_i = S_i - M_-i; p is the
prompt's pass rate. d_j are the gaps of the ascending rewards (`Group`).

`weight` is W_N(p) for rewards 0 and 1: E[(1/N) sum_i A_i grad log pi(y_i)] = W_N(p) grad p, exactly
at finite N. 1/p is maximum likelihood, 1 is the plain policy gradient. `ops.effective_weight`
computes it for every estimator that has one."""

from dataclasses import replace

from maxrl_fast.algorithms.estimator import ALIASES as ALIASES
from maxrl_fast.algorithms.estimator import ESTIMATORS as ESTIMATORS
from maxrl_fast.algorithms.estimator import Estimator as Estimator
from maxrl_fast.algorithms.estimator import Group as Group
from maxrl_fast.algorithms.estimator import estimator as estimator
from maxrl_fast.algorithms.estimator import find_estimator as find_estimator
from maxrl_fast.algorithms.estimators import max_at_k as max_at_k
from maxrl_fast.algorithms.estimators import moments as moments
from maxrl_fast.algorithms.estimators import of_training as of_training

# Other names: each runs as the estimator that it stands for, with these options and this way to
# average token losses.
for _name, _of, _aggregation, _defaults in (
    ("dr_grpo", "reinforce", "seq_sum_constant", {}),  # Dr. GRPO, Liu et al. 2025
    ("grpo_trl", "grpo", "token_mean", {"eps": 1e-4}),
    ("grpo_verl", "grpo", "token_mean", {}),
    ("pkpo_sloo_minus_one", "pkpo", "token_mean", {}),  # PKPO, Walder & Karkhanis 2025
    ("psr", "reinforce_raw", "token_mean", {}),  # PSR, Zhu et al. 2025, arXiv:2506.01347
):
    _options = dict(ESTIMATORS[_of].options)
    _options |= {key: replace(_options[key], default=x) for key, x in _defaults.items()}
    ALIASES[_name] = replace(ESTIMATORS[_of], aggregation=_aggregation, options=_options)
