"""W_N(p) of a run's objective: how strongly it pulls on prompts of a pass rate p."""

from typing import Any

import torch

from maxrl_fast.errors import InputError
from maxrl_fast.objectives import OBJECTIVES, estimator_options
from maxrl_fast.ops import effective_weight

MOST_ROLLOUTS = 2048  # beyond, the square of it in float64 is more memory than a picture is worth
PASS_RATES: list[float] = torch.logspace(-3, 0, 181, dtype=torch.float64).clamp(max=1).tolist()


def weight_of(options: dict[str, Any]) -> dict[str, Any]:
    """{"values": W_N(p) at PASS_RATES, exact at the N of these options of config.json}, or {"reason": why there is none}."""
    name, n = options.get("objective"), options.get("rollouts")
    if not isinstance(name, str) or name not in OBJECTIVES:
        return {"reason": "the objective is not known" + ("" if name is None else f": {name!r:.80}")}
    estimator = OBJECTIVES[name].estimator
    if estimator is None:
        return {"reason": f"{name} learns from outcomes by cross-entropy and has no W_N(p)"}
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MOST_ROLLOUTS:
        return {"reason": f"rollouts per prompt must be 1 to {MOST_ROLLOUTS:,}, got {n!r:.80}"}
    try:
        more: dict[str, Any] = estimator_options(str(options.get("estimator_options") or ""))
        more |= {"scale_by_k": True} if options.get("scale_by_k") is True else {}
        weights = effective_weight(
            estimator, n, torch.tensor(PASS_RATES, dtype=torch.float64), k=options.get("k"), order=options.get("order"), **more
        )
    except (InputError, ValueError, TypeError) as error:
        return {"reason": str(error)}
    return {"values": weights.tolist()}
