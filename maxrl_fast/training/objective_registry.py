"""The objectives by name: which options each takes, and the objective made of them."""

import inspect
from collections.abc import Mapping
from typing import Any

from maxrl_fast.ops import ESTIMATORS
from maxrl_fast.plugins import is_file, is_installed
from maxrl_fast.training.custom_objective import CustomObjective, load_function
from maxrl_fast.training.group_objective import GroupObjective
from maxrl_fast.training.objective import Objective
from maxrl_fast.training.off_policy_objective import OffPolicyObjective
from maxrl_fast.training.pacs_objective import PacsObjective
from maxrl_fast.training.riskpo_objective import RiskpoObjective
from maxrl_fast.training.zvp_objective import ZvpObjective

DEFAULT_K, DEFAULT_BUNDLE = 4, 5
_BASELINES = ("leave_two_out",)  # alone they have no gradient
_PACS = {"beta": 1.0, "score": "rloo", "class_weight": "balanced"}
_PACS_OPTIONS: dict[str, dict[str, Any]] = {"pacs": _PACS, "pacs_paper": _PACS | {"ref_reset_interval": 50}}
_ZVP_OPTIONS: dict[str, Any] = {"alpha": 0.1, "eps": 1e-6, "ddof": 1}
OBJECTIVES = (*(name for name in ESTIMATORS if name not in _BASELINES), *_PACS_OPTIONS, "rl_zvp", "riskpo")


def is_custom(name: str) -> bool:
    """Return whether an objective is a function of the user's: FILE.py:FUNCTION, or the name of an installed one."""
    return name not in OBJECTIVES and (is_file(name) or is_installed("objective", name))


def objective_options(name: str, num_rollouts: int) -> dict[str, Any]:
    """Return the options that an objective takes, with their defaults; None where one must be given.

    Raises:
        InputError: where a custom objective cannot be loaded.
    """
    if is_custom(name):
        return {"k": DEFAULT_K} if "k" in inspect.signature(load_function(name)).parameters else {}
    if name in _PACS_OPTIONS:
        return _PACS_OPTIONS[name]
    if name == "rl_zvp":
        return _ZVP_OPTIONS
    if name == "riskpo":
        return {"bundle_size": DEFAULT_BUNDLE}
    row = ESTIMATORS[name]
    sizes = {} if row.size is None else {row.size.name: DEFAULT_K if row.size.name == "k" else num_rollouts - 1}
    options = dict(row.options)
    if options.get("ddof") is not None:
        options["ddof"] = int(options["ddof"])  # type: ignore[arg-type]  # an integer among the options of a run
    return sizes | options


def make_objective(name: str, given: Mapping[str, Any], num_rollouts: int, updates_per_step: int = 1) -> Objective:
    """Return the objective of a run.

    Args:
        given: options by name; those not given take their defaults.
        num_rollouts: N.

    Raises:
        ValueError: where an option does not fit the objective or N, with a sentence.
    """
    options = objective_options(name, num_rollouts) | dict(given)
    if is_custom(name):
        return CustomObjective.of(name, num_rollouts, **options)
    if name in _PACS_OPTIONS:
        if num_rollouts < 2 and options["score"] != "naive":
            raise ValueError(f"{name} needs at least 2 rollouts per prompt, but with --score naive, got {num_rollouts}")
        return PacsObjective(**options, updates_per_step=updates_per_step, has_actor=name == "pacs_paper")
    if name == "rl_zvp":
        ESTIMATORS["grpo"].resolve_options(name, {option: options[option] for option in ("eps", "ddof")})
        return ZvpObjective(**options)
    if name == "riskpo":
        if num_rollouts < 2:
            raise ValueError(f"riskpo needs at least 2 rollouts per prompt, got {num_rollouts}")
        return RiskpoObjective(**options)
    row = ESTIMATORS[name]
    if num_rollouts < row.min_rollouts:
        raise ValueError(f"{name} needs at least {row.min_rollouts} rollouts per prompt, got {num_rollouts}")
    row.resolve_size(name, num_rollouts, options.get("k"), options.get("order"))
    row.resolve_options(name, {option: options[option] for option in row.options if options[option] is not None})
    return OffPolicyObjective(name, options) if "log_ratios" in row.inputs else GroupObjective(name, options)
