"""The table of group advantages: the formula of each estimator, its source, what it needs, and its effective weight.

Notation: N rewards r of one prompt, C of them correct and F = N - C wrong; mean and std are over the group. S_i is the mean of
the maximum over the size-k subsets that contain i, S_-i over the size-k subsets without i, M_-i over the size-(k-1) subsets
without i; EI_i = S_i - M_-i; p is the prompt's pass rate.

A table by rank: with ascending rewards r_(1) <= ... <= r_(N) and gaps d_j = r_(j+1) - r_(j), the advantage of r_(i) is
sum_{j < i} omega_j d_j, minus its mean over the group where the table is centred (estimator_tables.py).

`weight` is W_N(p) for rewards 0 and 1: E[(1/N) sum_i A_i grad log pi(y_i)] = W_N(p) grad p, exactly at finite N. 1/p is
maximum likelihood, 1 is the plain policy gradient. `effective_weight` computes it for every row that has one.

The rows are in rows_by_rank.py, rows_by_moments.py, rows_with_steps.py and rows_off_policy.py; a new estimator is a row in one.
"""

from dataclasses import replace

from maxrl_fast.ops import rows_by_moments, rows_by_rank, rows_off_policy, rows_with_steps
from maxrl_fast.ops.estimator import Estimator, Inputs, Size

__all__ = ["ESTIMATORS", "KERNEL_ROWS", "Estimator", "Inputs", "Size"]

ESTIMATORS: dict[str, Estimator] = {**rows_by_rank.ROWS, **rows_by_moments.ROWS, **rows_with_steps.ROWS}


def _alias(name: str, source: str, **options: float) -> Estimator:
    """Return the row of `name` for another name of the same formula, with other defaults if `options` are given."""
    row = ESTIMATORS[name]
    changed = " with " + ", ".join(f"{option} {value:g}" for option, value in options.items()) if options else ""
    formula = f"{name}{changed}: {row.formula.split(';')[0]}"
    return replace(row, formula=formula, source=source, alias_of=name, options={**row.options, **options})


ESTIMATORS |= {
    "dr_grpo": _alias("reinforce", "Dr. GRPO, Liu et al. 2025"),
    "psr": _alias("reinforce_raw", "PSR, Zhu et al. 2025, arXiv:2506.01347"),
    "grpo_verl": _alias("grpo", "grpo as verl computes it"),
    "grpo_trl": _alias("grpo", "grpo as TRL computes it", eps=1e-4),
    "pkpo_sloo_minus_one": _alias("pkpo", "PKPO, Walder & Karkhanis 2025, sloo_minus_one"),
}

ESTIMATORS |= rows_off_policy.ROWS

# The rows that the kernel runs: the table, and the steps around it.
KERNEL_ROWS = {
    **ESTIMATORS,
    "batch_std": Estimator(formula="r/(std + eps)", source="the last step of reinforce_pp", weight="", scale="std"),
    "batch_token_std": Estimator(
        formula="(r - mean over the tokens)/(std over the tokens + eps)",
        source="the last step of reinforce_pp_tokens",
        weight="",
        baseline="length_mean",
        scale="length_std",
        inputs=("lengths",),
    ),
    "size_share": Estimator(formula="r/N", source="a step of hero", weight="", scale="size"),
    "rank_fraction": Estimator(
        formula="smaller values/N", source="the first step of unlikeliness", weight="", value="order", scale="size"
    ),
}
