"""The table of group advantages: the formula of each estimator, its source, what it needs, and its effective weight.

Notation: N rewards r of one prompt, C of them correct and F = N - C wrong; mean and std are over the group. S_i is the mean of
the maximum over the size-k subsets that contain i, S_-i over the size-k subsets without i, M_-i over the size-(k-1) subsets
without i; EI_i = S_i - M_-i; p is the prompt's pass rate.

A table by rank: with ascending rewards r_(1) <= ... <= r_(N) and gaps d_j = r_(j+1) - r_(j), the advantage of r_(i) is
sum_{j < i} omega_j d_j, minus its mean over the group where the table is centred (estimator_tables.py).

`weight` is W_N(p) for rewards 0 and 1: E[(1/N) sum_i A_i grad log pi(y_i)] = W_N(p) grad p, exactly at finite N. 1/p is
maximum likelihood, 1 is the plain policy gradient. `effective_weight` computes it for every row that has one.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.ops import estimator_tables as tables
from maxrl_fast.ops import off_policy
from maxrl_fast.ops.arguments import check_finite, check_number
from maxrl_fast.ops.custom_advantage import CustomAdvantage
from maxrl_fast.ops.groups import Groups


@dataclass(frozen=True)
class Size:
    """The k of max@k or the order of MaxRL: an integer from `smallest` to N - `below_n`."""

    name: str
    smallest: int = 1
    below_n: int = 1
    required: bool = True  # otherwise the largest size is the default

    def wanted(self, n: int | None = None) -> str:
        largest = f"N-{self.below_n}" if self.below_n else "N"
        return f"{self.smallest} <= {self.name} <= {largest}" + ("" if n is None else f" = {n - self.below_n}")


@dataclass(frozen=True)
class Inputs:
    """The input of the steps around the kernel, and of functions in its place; tensors are [G, N] or [S]."""

    groups: Groups
    rewards: Tensor
    lengths: Tensor | None  # int64, tokens of each response
    logprobs: Tensor | None  # mean log-probability of each response's tokens
    greedy_correct: Tensor | None  # bool, whether the prompt's greedy response is correct
    prompts: Sequence[Any] | None  # [G]
    log_ratios: Tensor | None = None  # log of the policy's probability of each response over the sampler's
    size: int = 0  # k or the order; 0: the largest
    max_group_size: int = 0  # an upper bound of the sizes of uneven groups; 0: not known


def _unchanged(_: Mapping[str, float]) -> tuple[float, float]:
    return 1.0, 0.0


@dataclass(frozen=True, kw_only=True)
class Estimator:
    """A row of the table. `value`, `baseline` and `scale` are the choices of csrc/group_advantage.h.

    Its functions are those of modules, not lambdas, so that a row can be pickled, as Ray does to send it to its workers.
    """

    formula: str  # as people write it
    table_form: str = ""  # how the kernel computes it where `table` is given: weights omega_j by rank, or by C
    source: str
    weight: str  # W_N(p), for people
    alias_of: str | None = None  # the estimator with the same formula, which may have other defaults
    table: Callable[[int, Any], Tensor] | None = None  # of n and the size or the quantile: estimator_tables.py
    value: str = "reward"  # "rank" or "binary" with a table
    baseline: str = "zero"
    scale: str = "one"
    centred: bool = False  # whether the values of the table add up to 0 in every group
    size: Size | None = None
    scales_by_k: bool = False  # whether `scale_by_k` multiplies by k
    options: Mapping[str, float | None] = field(default_factory=dict)  # name and default; None: must be given
    inputs: tuple[str, ...] = ()  # beside the rewards: lengths, logprobs, greedy_correct, prompts, log_ratios
    affine: Callable[[Mapping[str, float]], tuple[float, float]] = _unchanged  # of the options; returns gain and bias
    before: Callable[[Inputs, Mapping[str, float]], Tensor] | None = None  # returns the rewards to take instead
    after: Callable[[Tensor, Inputs, Mapping[str, float]], Tensor] | None = None  # changes the kernel's advantages
    custom: CustomAdvantage | None = None  # a function that is called instead of the kernel
    min_rollouts: int = 2  # the smallest group that training makes sense with

    @property
    def binary(self) -> bool:
        """Whether the table is indexed by the number of correct rollouts, not by rank: rewards must be 0 or 1."""
        return self.value == "binary"

    @property
    def is_centred(self) -> bool:
        """Whether the kernel's advantages of every group add up to 0, so that the advantage in a group of one is 0.

        A step `after` the kernel may change that.
        """
        return self.baseline == "mean" or self.centred

    @property
    def has_weight(self) -> bool:
        """Whether W_N(p) exists: the advantages depend only on the rewards of the group."""
        return self.before is None and self.after is None and self.custom is None

    @property
    def needs(self) -> str:
        """Return what a group and a call must have, for people."""
        needs = [self.size.wanted() if self.size else f"N >= {self.min_rollouts}", *self.inputs]
        needs += [name for name, default in self.options.items() if default is None]
        return ", ".join([*needs, "rewards 0 or 1"] if self.binary else needs)

    def table_of(self, n: int, parameter: float) -> Tensor:
        """Return the table of groups of n for the size (0: the largest) or the quantile; zeros if n is too small."""
        assert self.table is not None
        if self.size is not None:
            parameter = int(parameter) or n - self.size.below_n
            if not self.size.smallest <= parameter <= n - self.size.below_n:
                return torch.zeros(2, n + self.binary, dtype=torch.float64)
        return self.table(n, parameter)

    def resolve_size(self, name: str, n: int | None, k: int | None, order: int | None) -> int:
        """Return the size, 0 for the largest; raise ValueError with the range if it does not fit groups of n."""
        given = {"k": k, "order": order}
        for option, value in given.items():
            if value is not None and (self.size is None or option != self.size.name):
                raise ValueError(f"{name} takes no {option}, got {option}={value!r:.80}")
        if self.size is None:
            return 0
        size = given[self.size.name]
        if size is None:
            if self.size.required:
                raise ValueError(f"{name} needs {self.size.name}, {self.size.wanted()}")
            return 0
        self.check_size(name, size, n)
        return size

    def check_size(self, name: str, size: int, n: int | None) -> None:
        """Raise ValueError with the range if the size does not fit groups of n (None: uneven, not known yet)."""
        assert self.size is not None
        if isinstance(size, bool) or not isinstance(size, int):
            raise ValueError(f"{name} needs an integer as {self.size.name}, got {size!r:.80}")
        largest = _LARGEST_SIZE if n is None else n - self.size.below_n
        if not self.size.smallest <= size <= largest:
            rollouts = "" if n is None else f" for N = {n} rollouts"
            raise ValueError(f"{name} needs {self.size.wanted(n)}{rollouts}, got {size!r:.80}")

    def resolve_options(self, name: str, given: Mapping[str, float]) -> dict[str, float]:
        """Return all options; raise ValueError if one is unknown, missing or outside its range."""
        if unknown := given.keys() - self.options.keys():
            takes = f"; it takes {', '.join(self.options)}" if self.options else ""
            raise ValueError(f"{name} takes no {', '.join(sorted(unknown))}{takes}")
        options = {**self.options, **given}
        if missing := [option for option, value in options.items() if value is None]:
            raise ValueError(f"{name} needs {' and '.join(missing)}")
        resolved = {option: _checked(option, value) for option, value in options.items()}
        if not resolved.get("false_positive_rate", 0.0) + resolved.get("false_negative_rate", 0.0) < 1:
            raise ValueError("false_positive_rate and false_negative_rate must add up to less than 1")
        return resolved


_LARGEST_SIZE = 2**53  # exact as the operator's parameter; no group is larger
_OPTIONS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "ddof": ("0 or 1", lambda x: x in (0.0, 1.0)),
    "eps": ("at least 0", lambda x: x >= 0),
    "quantile": ("above 0 and at most 1", lambda x: 0 < x <= 1),
    "clamp_delta": ("at least 0", lambda x: x >= 0),
    "false_positive_rate": ("in [0, 1)", lambda x: 0 <= x < 1),
    "false_negative_rate": ("in [0, 1)", lambda x: 0 <= x < 1),
}


def _checked(option: str, value: Any) -> float:
    """Return the value of an option; raise ValueError if it is outside its range."""
    number = check_finite(option, value)
    return check_number(option, value, *_OPTIONS[option]) if option in _OPTIONS else number


_K = Size("k")
_K_OF_PAIRS = Size("k", smallest=2)
_K_UP_TO_N = Size("k", below_n=0)
_K_OF_PAIRS_UP_TO_N = Size("k", smallest=2, below_n=0)
_STD = {"eps": 1e-6, "ddof": 1.0}
_RATES: dict[str, float | None] = {"false_positive_rate": None, "false_negative_rate": None}
_ENUMERATED = "no closed form: --weights"


_QUARTER = 0.25  # of the centred rewards, exactly: a difference of rewards may be too large for their dtype


def _minus_one(_: Mapping[str, float]) -> tuple[float, float]:
    return 1.0, -1.0


def _weighted_reinforce(options: Mapping[str, float]) -> tuple[float, float]:
    return 1 + options["correct_weight"], -1.0


def _of_noisy_rewards(options: Mapping[str, float]) -> tuple[float, float]:
    return 1 / (1 - options["false_positive_rate"] - options["false_negative_rate"]), 0.0


def _minus_correct(options: Mapping[str, float]) -> tuple[float, float]:
    return 1.0, options["false_negative_rate"] - 1


def _times_beta(options: Mapping[str, float]) -> tuple[float, float]:
    return options["beta"], 0.0


def _quarter(_: Mapping[str, float]) -> tuple[float, float]:
    return _QUARTER, 0.0


def _standardised(advantages: Tensor, inputs: Inputs, options: Mapping[str, float]) -> Tensor:
    """Return quarters of advantages as advantages, divided by their standard deviation over the batch.

    With lengths, mean and deviation are over the tokens; without, over the rollouts, whose mean is 0 already.
    """
    valid, lengths = (None if x is None else x.view(1, -1) for x in (inputs.groups.valid, inputs.lengths))
    row, eps, ddof = "batch_std" if lengths is None else "batch_token_std", options["eps"] * _QUARTER, int(options["ddof"])
    kernel = torch.ops.maxrl_fast.group_advantage.default
    whitened = kernel(advantages.view(1, -1), None, None, valid, lengths, row, 0.0, eps, ddof, 1.0, 0.0, 0)
    return whitened.view_as(advantages)


def _smoothed(advantages: Tensor, inputs: Inputs, options: Mapping[str, float]) -> Tensor:
    assert inputs.logprobs is not None
    direction = 1 - 2 * inputs.rewards.to(advantages.dtype)  # -1 where correct, 1 where wrong
    return advantages + options["tau"] * direction * inputs.logprobs.to(advantages.dtype)


def _penalise_likely(inputs: Inputs, options: Mapping[str, float]) -> Tensor:
    assert inputs.logprobs is not None
    groups = inputs.groups
    kernel = torch.ops.maxrl_fast.group_advantage.default
    dtype = torch.promote_types(inputs.rewards.dtype, torch.float32)
    logprobs = inputs.logprobs.to(torch.promote_types(inputs.logprobs.dtype, dtype))  # the ranks have its dtype
    ranks = kernel(
        logprobs, groups.offsets, groups.order, groups.valid, None, "rank_fraction", 0.0, 0.0, 0, 1.0, 0.0, 0
    )  # rank/N
    return inputs.rewards.to(dtype) * (1 - options["penalty"] * ranks.to(dtype))


def _unless_greedy_correct(advantages: Tensor, inputs: Inputs, options: Mapping[str, float]) -> Tensor:
    assert inputs.greedy_correct is not None
    return advantages.masked_fill(inputs.greedy_correct.bool(), 0.0)


ESTIMATORS: dict[str, Estimator] = {
    "maxpo": Estimator(
        formula="S_i - S_-i = EI_i - L2O_i",
        table_form="omega_j = (N/j) C(j,k)/C(N-1,k), centred",
        source="MaxPO, section 4.1, eq. 8; EI + L2O of section 3.1",
        weight="(1-p)^(k-1)",
        table=tables.maxpo,
        value="rank",
        centred=True,
        size=_K,
        scales_by_k=True,
    ),
    "expected_improvement": Estimator(
        formula="EI_i = S_i - M_-i",
        table_form="omega_j = C(j,k-1)/C(N-1,k-1)",
        source="MaxPO, section 3.1, eq. 5",
        weight="(1-p)^(k-1)",
        table=tables.expected_improvement,
        value="rank",
        size=_K_OF_PAIRS_UP_TO_N,
        scales_by_k=True,
    ),
    "leave_two_out": Estimator(
        formula="L2O_i = S_-i - M_-i = mean over j != i of EI_j computed without i: a baseline",
        table_form="the table of expected_improvement minus the table of maxpo",
        source="MaxPO, section 3.1, eq. 6",
        weight="0",
        table=tables.leave_two_out,
        value="rank",
        size=_K_OF_PAIRS,
        scales_by_k=True,
    ),
    "ei_l1o": Estimator(
        formula="EI_i - mean over j != i of EI_j; biased, an ablation",
        table_form="omega_j = (N/(N-1)) C(j,k-1)/C(N-1,k-1), centred",
        source="MaxPO, section 3.1, against eq. 6",
        weight=_ENUMERATED,
        table=tables.expected_improvement_leave_one_out,
        value="rank",
        centred=True,
        size=_K_OF_PAIRS_UP_TO_N,
        scales_by_k=True,
    ),
    "maxrl": Estimator(
        formula="(r - mean)/mean for rewards 0 or 1 at order N-1, 0 where mean = 0; else the sum of maxpo over k = 1..order",
        table_form="omega_j = (N/j) (N/(N-j) (1 - C(j,order+1)/C(N,order+1)) - 1), centred; N/(N-j) at order N-1",
        source="MaxRL, eq. 5 with Algorithm 1; any real reward through MaxPO",
        weight="(1-(1-p)^order)/p",
        table=tables.maxrl,
        value="rank",
        centred=True,
        size=Size("order", required=False),
    ),
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
        affine=_minus_one,
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
        weight=_ENUMERATED,
        baseline="mean",
        scale="std",
        options=_STD,
    ),
    "pkpo": Estimator(
        formula="(k/N) EI_i = (k/N) (S_i - M_-i)",
        table_form="omega_j = (k/N) C(j,k-1)/C(N-1,k-1)",
        source="PKPO, Walder & Karkhanis 2025, sloo_minus_one",
        weight="(k/N) (1-p)^(k-1)",
        table=tables.pkpo,
        value="rank",
        size=_K_OF_PAIRS_UP_TO_N,
    ),
    "pkpo_sloo": Estimator(
        formula="(k/N) S_i - (k/(N-1)) S_-i",
        table_form="k/N times the table of S_i minus k/(N-1) times the table of S_-i, not centred",
        source="PKPO, Walder & Karkhanis 2025, sloo",
        weight="(k/N) (1-p)^(k-1)",
        table=tables.pkpo_sloo,
        value="rank",
        size=_K,
    ),
    "passk_training": Estimator(
        formula="mean over the size-k subsets with i of (max - rho)/(sqrt(rho (1-rho)) + 1e-6), rho = 1 - C(F,k)/C(N,k)",
        table_form="by C: ((N-k)/N) maxpo_i / (sqrt(rho (1-rho)) + 1e-6)",
        source="Pass@k Training, Chen et al. 2025, arXiv:2508.10751, eqs. 14-15",
        weight=_ENUMERATED,
        table=tables.passk_training,
        value="binary",
        centred=True,
        size=_K_UP_TO_N,
    ),
    "bon_mean": Estimator(
        formula="(x - mean of x)/(std of x + eps), x_i = (k/N) S_i",
        table_form="x: k/N times the table of S_i",
        source="The Best of N Worlds, Bagirov et al. 2025, eq. 9, BoN mean",
        weight=_ENUMERATED,
        table=tables.best_of_n,
        value="rank",
        baseline="mean",
        scale="std",
        size=_K_UP_TO_N,
        options=_STD,
    ),
    "bon_max_second": Estimator(
        formula="best reward - second best for the best rollout, 0 for the others",
        table_form="omega_(N-1) = 1, the others 0",
        source="The Best of N Worlds, Bagirov et al. 2025, BoN max-second",
        weight="(1-p)^(N-1)",
        table=tables.max_minus_second,
        value="rank",
    ),
    "nsr": Estimator(
        formula="r - 1",
        source="NSR, Zhu et al. 2025, arXiv:2506.01347",
        weight="1",
        affine=_minus_one,
        min_rollouts=1,
    ),
    "w_reinforce": Estimator(
        formula="correct_weight r - (1 - r); correct_weight .1",
        source="Weighted-REINFORCE, Zhu et al. 2025, arXiv:2506.01347",
        weight="1 + correct_weight",
        options={"correct_weight": 0.1},
        affine=_weighted_reinforce,
        min_rollouts=1,
    ),
    "qae": Estimator(
        formula="(r - b)/(std + eps), b = inf{x : F(x) >= quantile}; quantile .4",
        table_form="omega_j = 1; minus d_j for every gap below the quantile's rank",
        source="Quantile Advantage Estimation, Wu et al. 2025, arXiv:2509.22611",
        weight=_ENUMERATED,
        table=tables.above_quantile,
        value="rank",
        scale="std",
        options={"quantile": 0.4, **_STD},
    ),
    "opo": Estimator(
        formula="r - sum(length r)/sum(length)",
        source="OPO, Hao et al. 2025, arXiv:2505.23585",
        weight="(N-1)/N at equal lengths",
        baseline="length_mean",
        inputs=("lengths",),
    ),
    "reinforce_pp": Estimator(
        formula="r - mean, then divided by (std over the batch + eps)",
        source="REINFORCE++ with baseline, Hu et al. 2025, arXiv:2501.03262",
        weight="depends on the batch",
        baseline="mean",
        options={"eps": 1e-8, "ddof": 1.0},
        affine=_quarter,
        after=_standardised,
    ),
    "reinforce_pp_tokens": Estimator(
        formula="x = r - mean, then (x - m)/(s + eps), m and s: mean and std of x over all tokens of the batch",
        source="REINFORCE++ with baseline, Hu et al. 2025, arXiv:2501.03262, as verl and OpenRLHF compute it",
        weight="depends on the batch",
        baseline="mean",
        options={"eps": 1e-8, "ddof": 1.0},
        inputs=("lengths",),
        affine=_quarter,
        after=_standardised,
    ),
    "differential_smoothing": Estimator(
        formula="grpo (ddof 0) - tau (mean logp) where r = 1, + tau (mean logp) where r = 0; tau .05",
        source="Differential Smoothing, Gai et al. 2025",
        weight="depends on the log-probs",
        baseline="mean",
        scale="std",
        options={"tau": 0.05, "eps": 1e-6, "ddof": 0.0},
        inputs=("logprobs",),
        after=_smoothed,
    ),
    "unlikeliness": Estimator(
        formula="grpo of r (1 - penalty rank/N), rank of the mean logp, 0 for the least likely; penalty .25",
        source="Rewarding the Unlikely, He et al. 2025, arXiv:2506.02355",
        weight="depends on the log-probs",
        baseline="mean",
        scale="std",
        options={"penalty": 0.25, **_STD},
        inputs=("logprobs",),
        before=_penalise_likely,
    ),
    "self": Estimator(
        formula="grpo, 0 for prompts whose greedy rollout is correct",
        source="SELF, Nguyen et al. 2025, as compared in MaxRL, Table 3",
        weight="depends on the greedy rollout",
        baseline="mean",
        scale="std",
        options=_STD,
        inputs=("greedy_correct",),
        after=_unless_greedy_correct,
    ),
    "pacs_first_update": Estimator(
        formula="beta N^2/(4 (N-1) C) where r = 1, -beta N^2/(4 (N-1) F) where r = 0, 0 where all r are equal; beta 1",
        table_form="by C: beta times rloo of w_i (r_i - 1/2), w_i = N/(2C) where r = 1 and N/(2F) where r = 0",
        source="PACS, eq. 8: -beta B dL/dr at proxies r = 0, as on the first update after sampling",
        weight="(beta/4) (N/(N-1)) ((1-(1-p)^(N-1))/p + (1-p^(N-1))/(1-p))",
        table=tables.pacs_first_update,
        value="binary",
        centred=True,
        options={"beta": 1.0},
        affine=_times_beta,
    ),
    "noisy_verifier_backward": Estimator(
        formula="(r - mean)/(1 - rho0 - rho1): rewards (r - rho0)/(1 - rho0 - rho1), centred",
        source="RLVR under Imperfect Verifiers 2025, backward (from a secondary source)",
        weight="(N-1)/(N (1 - rho0 - rho1))",
        baseline="mean",
        options=_RATES,
        affine=_of_noisy_rewards,
    ),
    "noisy_verifier_forward": Estimator(
        formula="rho1 where r = 1, rho1 - 1 where r = 0",
        source="RLVR under Imperfect Verifiers 2025, forward (derived, not compared)",
        weight="1",
        options={"false_negative_rate": None},
        affine=_minus_correct,
        min_rollouts=1,
    ),
}


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

_OF_RATIOS: dict[str, Any] = {
    "inputs": ("log_ratios",),
    "options": {"clamp_delta": 0.0},
    "scales_by_k": False,
}
ESTIMATORS |= {
    "maxpo_off_policy": replace(
        ESTIMATORS["maxpo"],
        formula="rho_i (S_i - S_-i), subsets of the k-1 others weighted by 1 + the sum of their rho - 1",
        source="maxpo with the ratios of The Best of N Worlds, Bagirov et al. 2025, section 3.3; ops/off_policy.py",
        weight="depends on the ratios; (1-p)^(k-1) where they are 1",
        after=off_policy.maxpo,
        **_OF_RATIOS,
    ),
    "maxrl_off_policy": replace(
        ESTIMATORS["maxrl"],
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
        size=_K_UP_TO_N,
        after=off_policy.bon,
        **_OF_RATIOS,
    ),
}

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
    "rank_fraction": Estimator(
        formula="smaller values/N", source="the first step of unlikeliness", weight="", value="order", scale="size"
    ),
}
