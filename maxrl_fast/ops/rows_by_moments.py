"""Rows of estimators.py whose advantages are the rewards, shifted and scaled by moments of their group."""

from maxrl_fast.ops import estimator_steps as steps
from maxrl_fast.ops.estimator import ENUMERATED, STD, Estimator

_RATES: dict[str, float | None] = {"false_positive_rate": None, "false_negative_rate": None}

ROWS: dict[str, Estimator] = {
    "maxrl_ratio": Estimator(
        formula="(r - mean)/(mean + eps), 0 where mean + eps = 0; eps 0",
        source="MaxRL, Algorithm 1",
        weight="(1-(1-p)^(N-1))/p at eps 0",
        baseline="mean",
        scale="mean",
        options={"eps": 0.0},
    ),
    "maxrl_conditional": Estimator(
        formula="r/mean, 0 where mean = 0; r N/C for rewards 0 or 1",
        source="MaxRL, eq. 6",
        weight="(1-(1-p)^N)/p",
        scale="mean",
        min_rollouts=1,
    ),
    "maxrl_control_variate": Estimator(
        formula="r/mean - 1, -1 where mean = 0; r N/C - 1 for rewards 0 or 1",
        source="MaxRL, eq. 7",
        weight="(1-(1-p)^N)/p",
        scale="mean",
        affine=steps.minus_one,
    ),
    "rloo": Estimator(
        formula="r - mean of the others = (N/(N-1)) (r - mean)",
        source="RLOO, Kool et al. 2019; Ahmadian et al. 2024",
        weight="1",
        baseline="mean",
        scale="leave_one_out",
    ),
    "reinforce": Estimator(
        formula="r - mean",
        source="MaxRL, section 2: REINFORCE with the group's mean",
        weight="(N-1)/N",
        baseline="mean",
    ),
    "reinforce_raw": Estimator(formula="r", source="REINFORCE, Williams 1992", weight="1", min_rollouts=1),
    "grpo": Estimator(
        formula="(r - mean)/(std + eps); eps 1e-6, ddof 1",
        source="GRPO, Shao et al. 2024, section 4.1.2",
        weight=ENUMERATED,
        baseline="mean",
        scale="std",
        options=STD,
    ),
    "nsr": Estimator(
        formula="r - 1",
        source="NSR, Zhu et al. 2025, arXiv:2506.01347",
        weight="1",
        affine=steps.minus_one,
        min_rollouts=1,
    ),
    "w_reinforce": Estimator(
        formula="correct_weight r - (1 - r); correct_weight .1",
        source="Weighted-REINFORCE, Zhu et al. 2025, arXiv:2506.01347",
        weight="1 + correct_weight",
        options={"correct_weight": 0.1},
        affine=steps.weighted_reinforce,
        min_rollouts=1,
    ),
    "opo": Estimator(
        formula="r - sum(length r)/sum(length)",
        source="OPO, Hao et al. 2025, arXiv:2505.23585",
        weight="(N-1)/N at equal lengths",
        baseline="length_mean",
        inputs=("lengths",),
    ),
    "noisy_verifier_backward": Estimator(
        formula="(r - mean)/(1 - rho0 - rho1): rewards (r - rho0)/(1 - rho0 - rho1), centred",
        source="RLVR under Imperfect Verifiers 2025, backward (from a secondary source)",
        weight="(N-1)/(N (1 - rho0 - rho1))",
        baseline="mean",
        options=_RATES,
        affine=steps.of_noisy_rewards,
    ),
    "noisy_verifier_forward": Estimator(
        formula="rho1 where r = 1, rho1 - 1 where r = 0",
        source="RLVR under Imperfect Verifiers 2025, forward (derived, not compared)",
        weight="1",
        options={"false_negative_rate": None},
        affine=steps.minus_correct,
        min_rollouts=1,
    ),
}
