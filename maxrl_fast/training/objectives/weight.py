"""W_N(p) of a run's objective: the weight of a prompt's gradient, by its pass rate p. A run writes
it into its folder, so that the report need not import PyTorch."""

from collections.abc import Sequence
from typing import Any

import torch

from maxrl_fast.algorithms.estimators import ESTIMATORS, find_estimator
from maxrl_fast.ops import effective_weight
from maxrl_fast.runtime.loading import is_code
from maxrl_fast.training.objectives.registry import METHODS

MOST_ROLLOUTS = 2048  # memory is quadratic in N, in float64


def weight_of(options: dict[str, Any], pass_rates: Sequence[float]) -> dict[str, Any]:
    """Return {"values": W_N(p) at these pass rates}, exact at the N of these options, or {"reason":
    why there is none}."""
    name, n = options["objective"], options["rollouts"]
    if name in METHODS and name not in ESTIMATORS:
        return {"reason": f"{name} has no W_N(p): it learns from more than a group's rewards"}
    if is_code(name):
        return {"reason": f"{name} is a custom objective, whose W_N(p) is not known"}
    if n > MOST_ROLLOUTS:
        return {"reason": f"rollouts per prompt must be 1 to {MOST_ROLLOUTS:,}, got {n}"}
    known = {"k", "order", *find_estimator(name).options}
    given = {key: options[key] for key in known if options.get(key) is not None}
    try:
        weights = effective_weight(name, n, torch.tensor(pass_rates, dtype=torch.float64), **given)
    except ValueError as error:
        return {"reason": str(error)}
    if not weights.isfinite().all():
        return {"reason": f"the weight of {name} is not finite"}
    return {"values": weights.tolist()}
