"""The objectives by name, their options, and how they are built."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Literal

from maxrl_fast.algorithms.estimator import Ddof, Eps
from maxrl_fast.algorithms.estimators import ESTIMATORS, Estimator
from maxrl_fast.algorithms.known import method_hint
from maxrl_fast.algorithms.options import (
    DERIVED,
    Count,
    CountOrZero,
    Default,
    Help,
    NotNegative,
    Option,
    Positive,
    Refusal,
    UnitInterval,
    check_options,
    options_of,
)
from maxrl_fast.errors import InputError
from maxrl_fast.ops.register import own_estimator, try_out
from maxrl_fast.runtime.loading import is_code, load_code
from maxrl_fast.training.objectives.distill import DistillObjective
from maxrl_fast.training.objectives.group import GroupObjective
from maxrl_fast.training.objectives.objective import Objective
from maxrl_fast.training.objectives.off_policy import OffPolicyObjective
from maxrl_fast.training.objectives.pacs import PacsObjective
from maxrl_fast.training.objectives.ppo import PpoObjective
from maxrl_fast.training.objectives.riskpo import RiskpoObjective
from maxrl_fast.training.objectives.verifree import VerifreeObjective
from maxrl_fast.training.objectives.zvp import ZvpObjective

DEFAULT_K = 4
_BASELINES = ("leave_two_out",)  # a baseline only; its gradient is zero


@dataclass(frozen=True)
class ObjectiveRow:
    """An objective that is not an estimator.

    Args:
        make: builds the objective from the updates per step; its keyword-only parameters are the
        objective's options. formula, needs, source: texts that `python -m maxrl_fast.objectives`
        prints, as for estimators. loss: its token loss without --loss. min_rollouts: smallest N.
        takes_one_naive: whether N = 1 is allowed with --score naive. presets: the defaults of a
        run's other options, where they are the objective's.
        refuses: options that it does not go with.
    """

    make: Callable[..., Objective]
    formula: str
    needs: str
    source: str
    loss: str = "ppo"
    min_rollouts: int = 1
    takes_one_naive: bool = False
    presets: Mapping[str, Any] = field(default_factory=dict)
    refuses: tuple[Refusal, ...] = ()

    @cached_property
    def options(self) -> dict[str, Option]:
        return options_of(self.make)


Beta = Annotated[Positive, Help("Scale of PACS's reward proxies, in reward per nat of log-ratio.")]
Score = Annotated[
    Literal["rloo", "grpo", "dr_grpo", "naive"],
    Help(
        "Score of a rollout in its group whose cross-entropy PACS minimises: rloo, grpo, dr_grpo "
        "or naive."
    ),
]
ClassWeight = Annotated[
    Literal["balanced", "none"],
    Help("PACS's weights of correct and wrong rollouts: balanced in every group, or none."),
]


def _pacs(
    updates_per_step: int,
    *,
    beta: Beta = 1.0,
    score: Score = "rloo",
    class_weight: ClassWeight = "balanced",
) -> Objective:
    return PacsObjective(beta, score, class_weight, updates_per_step)


def _pacs_paper(
    updates_per_step: int,
    *,
    beta: Beta = 1.0,
    score: Score = "rloo",
    class_weight: ClassWeight = "balanced",
    ref_reset_interval: Annotated[
        CountOrZero,
        Help(
            "Steps after which the policy becomes the reference policy of pacs_paper and the "
            "optimizer restarts; 0: never."
        ),
    ] = 50,
) -> Objective:
    return PacsObjective(
        beta,
        score,
        class_weight,
        updates_per_step,
        has_actor=True,
        ref_reset_interval=ref_reset_interval,
    )


def _rl_zvp(
    _: int,
    *,
    alpha: Annotated[Positive, Help("Weight of the tokens' entropies, per nat.")] = 0.1,
    eps: Eps = 1e-6,
    ddof: Ddof = 1,
) -> Objective:
    return ZvpObjective(alpha, eps, ddof)


def _riskpo(
    _: int,
    *,
    bundle_size: Annotated[Count, Help("Prompts in a bundle of riskpo; it divides --prompts.")] = 5,
) -> Objective:
    return RiskpoObjective(bundle_size)


def _ppo(
    _: int,
    *,
    gae_gamma: Annotated[
        UnitInterval,
        Help("Discount of the reward per token in the generalized advantage estimates of ppo."),
    ] = 1.0,
    gae_lambda: Annotated[
        UnitInterval,
        Help(
            "Lambda of these estimates: 1 is the return minus the value; smaller relies more on "
            "the critic."
        ),
    ] = 1.0,
    value_clip: Annotated[
        NotNegative,
        Help(
            "Values of ppo's critic gain nothing by moving further than this from those before the "
            "step; 0: no limit."
        ),
    ] = 0.2,
    critic_lr: Annotated[
        Positive,
        Default("2e-3; with --model 1e-5, with --lora-rank too 1e-4"),
        Help("Learning rate of ppo's critic, constant from the first step."),
    ] = DERIVED,
) -> Objective:
    return PpoObjective(gae_gamma, gae_lambda)  # the others are the critic's


def has_teacher(options: Mapping[str, Any]) -> bool:
    """Whether the reference policy of these options is not the policy, or reads something else."""
    return options["reference"] is not None or options["teacher_prompt"] is not None


_PACS = (
    "-B beta dL/dr_i, where L is the cross-entropy of R under sigmoid(score) and r = beta "
    "(log-ratio to the reference)"
)
_PACS_NEEDS = "rewards 0 or 1, N >= 2 (N >= 1 with --score naive)"
OWN: dict[str, ObjectiveRow] = {
    "pacs": ObjectiveRow(
        _pacs,
        formula=f"{_PACS}; the reference is the sampling policy",
        needs=_PACS_NEEDS,
        source="PACS, eq. 8, code",
        loss=PacsObjective.loss,
        min_rollouts=2,
        takes_one_naive=True,
    ),
    "pacs_paper": ObjectiveRow(
        _pacs_paper,
        formula=f"{_PACS}; plus the log-likelihood of R; the reference is reset every "
        "--ref-reset-interval steps",
        needs=_PACS_NEEDS,
        source="PACS, eqs. 5, 8",
        loss=PacsObjective.loss,
        min_rollouts=2,
        takes_one_naive=True,
        refuses=(
            Refusal(
                "pacs_paper with --reference or --teacher-prompt needs --ref-reset-interval 0, got "
                "{ref_reset_interval}",
                lambda c: c["ref_reset_interval"] and has_teacher(c),
            ),
        ),
    ),
    "rl_zvp": ObjectiveRow(
        _rl_zvp,
        formula="grpo; token t of a group with equal rewards: alpha H_t where all r = 1, -alpha "
        "(max H - H_t) where all r = 0, "
        "H_t its entropy, max over its response; alpha .1",
        needs="rewards 0 or 1, N >= 1; one more forward pass over these groups",
        source="RL-ZVP, Le et al. 2025, arXiv:2509.21880 (from the paper; no code found)",
    ),
    "riskpo": ObjectiveRow(
        _riskpo,
        formula="(1.5 c + x)/2.5, over the stds of s in the bundle and of r in the group; s: sum "
        "of the n-th rewards of 5 "
        "prompts, a and b its tracked .2 and .9 quantiles; x = ((s - a)+ - (s - b)+ + a - b)/.7, c "
        "= -(a - s)+/.2",
        needs="N >= 2; --prompts a multiple of --bundle-size",
        source="RiskPO, Ren et al. 2025, arXiv:2510.00911, as the authors' script sets it",
        min_rollouts=2,
        refuses=(
            Refusal(
                "prompts must be a multiple of bundle_size, got {prompts} and {bundle_size}",
                lambda c: c["prompts"] % c["bundle_size"],
            ),
        ),
    ),
    "verifree": ObjectiveRow(
        lambda _: VerifreeObjective(),
        formula="rloo of R = pi(y* | x, z) for the tokens of the reasoning z, R for those of the "
        "reference answer y* put "
        "after it",
        needs="N >= 2; a task with reference answers; one more forward pass",
        source="VeriFree, Zhou et al. 2025, arXiv:2505.21493, as the authors' code",
        loss=VerifreeObjective.loss,
        min_rollouts=2,
    ),
    "ppo": ObjectiveRow(
        _ppo,
        formula="A_t = sum_l (gamma lambda)^l d_(t+l), whitened over the batch's tokens; d_t = r_t "
        "+ gamma V_(t+1) - V_t, r at "
        "the last token; the critic V: a copy of the policy with a value head, trained on A + V",
        needs="N >= 1; memory and work of a second model that is trained",
        source="PPO, Schulman et al. 2017, arXiv:1707.06347; GAE, arXiv:1506.02438",
    ),
    "distill": ObjectiveRow(
        lambda _: DistillObjective(),
        formula="0: only the divergence from the teacher is learned (--kl-coef)",
        needs="N >= 1; --reference or --teacher-prompt; no rewards",
        source="on-policy distillation: GKD, Agarwal et al. 2024, arXiv:2306.13649; Lu et al. "
        "(Thinking Machines) 2025",
        loss=DistillObjective.loss,
        presets={"kl": "k2", "kl_coef": 1.0, "rollouts": 1},
        refuses=(
            Refusal(
                "distill needs --kl-coef above 0 and a teacher, --reference or --teacher-prompt, "
                "got kl_coef {kl_coef:g}, reference {reference} and teacher_prompt "
                "{teacher_prompt}",
                lambda c: not (c["kl_coef"] and has_teacher(c)),
            ),
        ),
    ),
}
OBJECTIVES = (*(name for name in ESTIMATORS if name not in _BASELINES), *OWN)


def is_custom(name: str) -> bool:
    return name not in OBJECTIVES and is_code(name)


def objective_options(name: str) -> dict[str, Option]:
    """Return an objective's options: the ones in the signature of its function.

    Raises InputError for an unknown objective, or a custom one cannot be loaded.
    """
    if name not in OBJECTIVES and not is_custom(name):
        raise InputError(
            "objective must be one that `python -m maxrl_fast.objectives` lists, such as maxpo, "
            f"maxrl, pacs, grpo and ppo, or FILE.py:FUNCTION, got {name!r:.80}"
            f"{method_hint(name, OBJECTIVES)}",
            "objective",
        )
    if name in OWN:
        return OWN[name].options
    row = _row(name)
    return ({} if row.size is None else {row.size.name: row.size.option}) | dict(row.options)


def objective_defaults(name: str, num_rollouts: int) -> dict[str, Any]:
    """Return the defaults of an objective's options at N rollouts; None where one must be given or
    the configuration works it out.

    Raises InputError as `objective_options`.
    """
    defaults = {option: row.default for option, row in objective_options(name).items()}
    size = None if name in OWN else _row(name).size
    if size is not None:
        largest = num_rollouts - size.below_n
        if size.name == "k":
            largest = max(size.smallest, min(DEFAULT_K, largest))
        defaults[size.name] = largest
    return defaults


def _row(name: str) -> Estimator:
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    function = load_code("objective", name, "FUNCTION")
    if not callable(function):
        raise InputError(f"--objective {name} must be a function of rewards, got {function!r:.80}")
    try:
        return own_estimator(function)
    except ValueError as error:
        raise InputError(str(error)) from error


def objective_presets(name: str) -> Mapping[str, Any]:
    return OWN[name].presets if name in OWN else {}


def default_loss(name: str) -> str:
    if name in OWN:
        return OWN[name].loss
    takes_ratios = (name in ESTIMATORS or is_custom(name)) and "log_ratios" in _row(name).inputs
    return OffPolicyObjective.loss if takes_ratios else GroupObjective.loss


def make_objective(
    name: str, given: Mapping[str, Any], num_rollouts: int, updates_per_step: int = 1
) -> Objective:
    """Build the objective of a run; options that are not `given` take their defaults.

    Raises:
        ValueError: if an option does not fit the objective or N.
        InputError: if a custom objective cannot be loaded.
    """
    options = objective_defaults(name, num_rollouts) | dict(given)
    if name in OWN:
        own = OWN[name]
        if num_rollouts < own.min_rollouts and not (
            own.takes_one_naive and options["score"] == "naive"
        ):
            but = ", but with --score naive" if own.takes_one_naive else ""
            raise ValueError(
                f"{name} needs at least {own.min_rollouts} rollouts per prompt{but}, got "
                f"{num_rollouts}"
            )
        check_options(name, own.options, options)
        return own.make(updates_per_step, **options)
    row = _row(name)
    if num_rollouts < row.min_rollouts:
        raise ValueError(
            f"{row.name} needs at least {row.min_rollouts} rollouts per prompt, got {num_rollouts}"
        )
    row.resolve_size(num_rollouts, options.get("k"), options.get("order"))
    given = {
        key: value for key, value in options.items() if key in row.options and value is not None
    }
    check_options(row.name, row.options, given)
    estimator = name if name in ESTIMATORS else row
    per_token = try_out(row, estimator, num_rollouts, **options).dim() == 1
    if "log_ratios" not in row.inputs:
        return GroupObjective(estimator, options, per_token=per_token)
    if len(row.inputs) > 1 or per_token:
        others = "; it may ask for k and valid besides them, and must return [G, N]"
        raise ValueError(f"{row.name} asks for log_ratios, which change with every update{others}")
    return OffPolicyObjective(estimator, options)
