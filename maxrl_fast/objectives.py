"""The objectives of the trainer: an estimator of the advantage and how the token losses are averaged."""

from dataclasses import dataclass

from maxrl_fast.ops.advantage import ESTIMATORS, Estimator


@dataclass(frozen=True)
class Objective:
    estimator: str  # a name in ops.ESTIMATORS
    aggregation: str = "token_mean"

    @property
    def row(self) -> Estimator:
        return ESTIMATORS[self.estimator]


OBJECTIVES = {
    "maxpo": Objective("maxpo"),
    "maxrl": Objective("maxrl"),
    "grpo": Objective("grpo", "seq_mean_token_mean"),
    "dr_grpo": Objective("dr_grpo", "seq_sum_constant"),
    "rloo": Objective("rloo"),
    "reinforce": Objective("reinforce"),
    "pkpo": Objective("pkpo"),
}
