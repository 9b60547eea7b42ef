"""Rows of estimators.py with a step before or after the kernel: they need more than the rewards of one group."""

from maxrl_fast.ops import estimator_steps as steps
from maxrl_fast.ops.estimator import STD, Estimator

ROWS: dict[str, Estimator] = {
    "reinforce_pp": Estimator(
        formula="r - mean, then divided by (std over the batch + eps)",
        source="REINFORCE++ with baseline, Hu et al. 2025, arXiv:2501.03262",
        weight="depends on the batch",
        baseline="mean",
        options={"eps": 1e-8, "ddof": 1.0},
        affine=steps.quarter,
        after=steps.standardised,
    ),
    "reinforce_pp_tokens": Estimator(
        formula="x = r - mean, then (x - m)/(s + eps), m and s: mean and std of x over all tokens of the batch",
        source="REINFORCE++ with baseline, Hu et al. 2025, arXiv:2501.03262, as verl and OpenRLHF compute it",
        weight="depends on the batch",
        baseline="mean",
        options={"eps": 1e-8, "ddof": 1.0},
        inputs=("lengths",),
        affine=steps.quarter,
        after=steps.standardised,
    ),
    "differential_smoothing": Estimator(
        formula="grpo (ddof 0) - tau (mean logp) where r = 1, + tau (mean logp) where r = 0; tau .05",
        source="Differential Smoothing, Gai et al. 2025",
        weight="depends on the log-probs",
        baseline="mean",
        scale="std",
        options={"tau": 0.05, "eps": 1e-6, "ddof": 0.0},
        inputs=("logprobs",),
        after=steps.smoothed,
    ),
    "unlikeliness": Estimator(
        formula="grpo of r (1 - penalty rank/N), rank of the mean logp, 0 for the least likely; penalty .25",
        source="Rewarding the Unlikely, He et al. 2025, arXiv:2506.02355",
        weight="depends on the log-probs",
        baseline="mean",
        scale="std",
        options={"penalty": 0.25, **STD},
        inputs=("logprobs",),
        before=steps.penalise_likely,
    ),
    "self": Estimator(
        formula="grpo, 0 for prompts whose greedy rollout is correct",
        source="SELF, Nguyen et al. 2025, as compared in MaxRL, Table 3",
        weight="depends on the greedy rollout",
        baseline="mean",
        scale="std",
        options=STD,
        inputs=("greedy_correct",),
        after=steps.unless_greedy_correct,
    ),
}
