"""The objectives by name, their options, and how they are built."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from maxrl_fast.algorithms.estimators import ESTIMATORS, Estimator
from maxrl_fast.algorithms.options import check_options
from maxrl_fast.errors import InputError
from maxrl_fast.ops.register import own_estimator, try_out
from maxrl_fast.runtime.plugins import is_file, is_installed, load_plugin
from maxrl_fast.training.group_objective import GroupObjective
from maxrl_fast.training.objective import Objective
from maxrl_fast.training.off_policy_objective import OffPolicyObjective
from maxrl_fast.training.pacs_objective import PacsObjective
from maxrl_fast.training.ppo_objective import PpoObjective
from maxrl_fast.training.riskpo_objective import RiskpoObjective
from maxrl_fast.training.verifree_objective import VerifreeObjective
from maxrl_fast.training.zvp_objective import ZvpObjective

DEFAULT_K, DEFAULT_BUNDLE = 4, 5
_BASELINES = ("leave_two_out",)  # a baseline only; its gradient is zero


@dataclass(frozen=True)
class ObjectiveRow:
    """An objective that has its own class instead of an estimator.

    Args:
        make: builds the objective from its options and the number of updates per step.
        formula, needs, source: texts that `python -m maxrl_fast.objectives` prints, as for estimators.
        loss: its token loss without --loss.
        options: defaults; None where the configuration works the value out.
        min_rollouts: smallest N.
        takes_one_naive: whether N = 1 is allowed with --score naive.
    """

    make: Callable[[dict[str, Any], int], Objective]
    formula: str
    needs: str
    source: str
    loss: str = "ppo"
    options: Mapping[str, Any] = field(default_factory=dict)
    min_rollouts: int = 1
    takes_one_naive: bool = False


def _make_pacs(options: dict[str, Any], updates_per_step: int) -> Objective:
    return PacsObjective(**options, updates_per_step=updates_per_step)


def _make_pacs_paper(options: dict[str, Any], updates_per_step: int) -> Objective:
    return PacsObjective(**options, updates_per_step=updates_per_step, has_actor=True)


def _make_zvp(options: dict[str, Any], updates_per_step: int) -> Objective:
    check_options("rl_zvp", ESTIMATORS["grpo"].options, {name: options[name] for name in ("eps", "ddof")})
    return ZvpObjective(**options)


_PACS = "-B beta dL/dr_i, where L is the cross-entropy of R under sigmoid(score) and r = beta (log-ratio to the reference)"
_PACS_NEEDS = "rewards 0 or 1, N >= 2 (N >= 1 with --score naive)"
_PACS_OPTIONS: dict[str, Any] = {"beta": 1.0, "score": "rloo", "class_weight": "balanced"}
OWN: dict[str, ObjectiveRow] = {
    "pacs": ObjectiveRow(
        _make_pacs,
        formula=f"{_PACS}; the reference is the sampling policy",
        needs=_PACS_NEEDS,
        source="PACS, eq. 8, code",
        loss=PacsObjective.loss,
        options=_PACS_OPTIONS,
        min_rollouts=2,
        takes_one_naive=True,
    ),
    "pacs_paper": ObjectiveRow(
        _make_pacs_paper,
        formula=f"{_PACS}; plus the log-likelihood of R; the reference is reset every --ref-reset-interval steps",
        needs=_PACS_NEEDS,
        source="PACS, eqs. 5, 8",
        loss=PacsObjective.loss,
        options=_PACS_OPTIONS | {"ref_reset_interval": 50},
        min_rollouts=2,
        takes_one_naive=True,
    ),
    "rl_zvp": ObjectiveRow(
        _make_zvp,
        formula="grpo; token t of a group with equal rewards: alpha H_t where all r = 1, -alpha (max H - H_t) where all r = 0, "
        "H_t its entropy, max over its response; alpha .1",
        needs="rewards 0 or 1, N >= 1; one more forward pass over these groups",
        source="RL-ZVP, Le et al. 2025, arXiv:2509.21880 (from the paper; no code found)",
        options={"alpha": 0.1, "eps": 1e-6, "ddof": 1},
    ),
    "riskpo": ObjectiveRow(
        lambda options, _: RiskpoObjective(**options),
        formula="(1.5 c + x)/2.5, over the stds of s in the bundle and of r in the group; s: sum of the n-th rewards of 5 "
        "prompts, a and b its tracked .2 and .9 quantiles; x = ((s - a)+ - (s - b)+ + a - b)/.7, c = -(a - s)+/.2",
        needs="N >= 2; --prompts a multiple of --bundle-size",
        source="RiskPO, Ren et al. 2025, arXiv:2510.00911, as the authors' script sets it",
        options={"bundle_size": DEFAULT_BUNDLE},
        min_rollouts=2,
    ),
    "verifree": ObjectiveRow(
        lambda *_: VerifreeObjective(),
        formula="rloo of R = pi(y* | x, z) for the tokens of the reasoning z, R for those of the reference answer y* put "
        "behind it",
        needs="N >= 2; a task with reference answers; one more forward pass",
        source="VeriFree, Zhou et al. 2025, arXiv:2505.21493, as the authors' code",
        loss=VerifreeObjective.loss,
        min_rollouts=2,
    ),
    "ppo": ObjectiveRow(
        lambda options, _: PpoObjective(options["gae_gamma"], options["gae_lambda"]),  # the other options configure the critic
        formula="A_t = sum_l (gamma lambda)^l d_(t+l), whitened over the batch's tokens; d_t = r_t + gamma V_(t+1) - V_t, r at "
        "the last token; the critic V: a copy of the policy with a value head, trained on A + V",
        needs="N >= 1; memory and work of a second model that is trained",
        source="PPO, Schulman et al. 2017, arXiv:1707.06347; GAE, arXiv:1506.02438",
        options={"gae_gamma": 1.0, "gae_lambda": 1.0, "value_clip": 0.2, "critic_lr": None},
    ),
}
OBJECTIVES = (*(name for name in ESTIMATORS if name not in _BASELINES), *OWN)


def is_custom(name: str) -> bool:
    return name not in OBJECTIVES and (is_file(name) or is_installed("objective", name))


def objective_options(name: str, num_rollouts: int) -> dict[str, Any]:
    """Return an objective's options with their defaults; None where one must be given or the configuration works it out.

    Raises InputError if a custom objective cannot be loaded.
    """
    if name in OWN:
        return dict(OWN[name].options)
    row, largest_k = _row(name), num_rollouts if is_custom(name) else DEFAULT_K
    sizes: dict[str, Any] = {}
    if row.size is not None:
        sizes[row.size.name] = min(DEFAULT_K, largest_k) if row.size.name == "k" else num_rollouts - 1
    flags = {option for other in ESTIMATORS.values() for option in other.options}  # a custom function may have more
    options: dict[str, Any] = {key: option.default for key, option in row.options.items() if key in flags}
    if options.get("ddof") is not None:
        options["ddof"] = int(options["ddof"])  # the run's options hold an integer
    return sizes | options


def _row(name: str) -> Estimator:
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    function = load_plugin("objective", name, "FUNCTION")
    if not callable(function):
        raise InputError(f"--objective {name} must be a function of rewards, got {function!r:.80}")
    try:
        return own_estimator(function)
    except ValueError as error:
        raise InputError(str(error)) from error


def default_loss(name: str) -> str:
    if name in OWN:
        return OWN[name].loss
    takes_ratios = (name in ESTIMATORS or is_custom(name)) and "log_ratios" in _row(name).inputs
    return OffPolicyObjective.loss if takes_ratios else GroupObjective.loss


def make_objective(name: str, given: Mapping[str, Any], num_rollouts: int, updates_per_step: int = 1) -> Objective:
    """Build the objective of a run; options that are not `given` take their defaults.

    Raises:
        ValueError: if an option does not fit the objective or N.
        InputError: if a custom objective cannot be loaded.
    """
    options = objective_options(name, num_rollouts) | dict(given)
    if name in OWN:
        own = OWN[name]
        if num_rollouts < own.min_rollouts and not (own.takes_one_naive and options["score"] == "naive"):
            but = ", but with --score naive" if own.takes_one_naive else ""
            raise ValueError(f"{name} needs at least {own.min_rollouts} rollouts per prompt{but}, got {num_rollouts}")
        return own.make(options, updates_per_step)
    row = _row(name)
    if num_rollouts < row.min_rollouts:
        raise ValueError(f"{row.name} needs at least {row.min_rollouts} rollouts per prompt, got {num_rollouts}")
    row.resolve_size(num_rollouts, options.get("k"), options.get("order"))
    given = {key: value for key, value in options.items() if key in row.options and value is not None}
    check_options(row.name, row.options, given)
    estimator = name if name in ESTIMATORS else row
    try_out(row, estimator, num_rollouts, **options)
    return (OffPolicyObjective if "log_ratios" in row.inputs else GroupObjective)(estimator, options)
