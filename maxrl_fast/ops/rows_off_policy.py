"""Rows of estimators.py for rollouts that another policy sampled: a step after the kernel takes the ratios of responses."""

from dataclasses import replace
from typing import Any

from maxrl_fast.ops import estimator_tables as tables
from maxrl_fast.ops import off_policy
from maxrl_fast.ops.estimator import Estimator
from maxrl_fast.ops.rows_by_rank import K_UP_TO_N
from maxrl_fast.ops.rows_by_rank import ROWS as BY_RANK

_OF_RATIOS: dict[str, Any] = {
    "inputs": ("log_ratios",),
    "options": {"clamp_delta": 0.0},
    "scales_by_k": False,
}
ROWS: dict[str, Estimator] = {
    "maxpo_off_policy": replace(
        BY_RANK["maxpo"],
        formula="rho_i (S_i - S_-i), subsets of the k-1 others weighted by 1 + the sum of their rho - 1",
        source="maxpo with the ratios of The Best of N Worlds, Bagirov et al. 2025, section 3.3; ops/off_policy.py",
        weight="depends on the ratios; (1-p)^(k-1) where they are 1",
        after=off_policy.maxpo,
        **_OF_RATIOS,
    ),
    "maxrl_off_policy": replace(
        BY_RANK["maxrl"],
        formula="the sum of maxpo_off_policy over k = 1..order",
        source="maxrl with the ratios of The Best of N Worlds, Bagirov et al. 2025, section 3.3; ops/off_policy.py",
        weight="depends on the ratios; (1-(1-p)^order)/p where they are 1",
        after=off_policy.maxrl,
        **_OF_RATIOS,
    ),
    "bon_off_policy": Estimator(
        formula="(k/N) S_i, subsets weighted by 1 + the sum of their rho - 1",
        table_form="at rho = 1 k/N times the table of S_i",
        source="The Best of N Worlds, Bagirov et al. 2025, section 3.3, off-policy BoN",
        weight="depends on the ratios; (k/N) (1-p)^(k-1) where they are 1",
        table=tables.best_of_n,
        value="rank",
        size=K_UP_TO_N,
        after=off_policy.bon,
        **_OF_RATIOS,
    ),
}
