"""The registry of group advantages: what each estimator is, where it comes from, what it needs and what it weighs.

Notation: N rewards r of one prompt, C of them correct and F = N - C not, mu and std their mean and standard deviation; S_i
the mean of the maximum over the size-k subsets that contain i, S_-i over those without i, M_-i over the size-(k-1) subsets
of the others; p the prompt's pass rate.

`weight` is W_N(p) of rewards 0 and 1: E[(1/N) sum_i A_i grad log pi(y_i)] = W_N(p) grad p, exactly at finite N. 1/p is
maximum likelihood, 1 the plain policy gradient. `effective_weight` gives the number for every row that has one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.ops import estimator_tables as tables
from maxrl_fast.ops.arguments import check_finite, check_number
from maxrl_fast.ops.groups import Groups


@dataclass(frozen=True)
class Size:
    """The k of max@k or the order of MaxRL: a whole number from `smallest` to N - `below_n`."""

    name: str
    smallest: int = 1
    below_n: int = 1
    required: bool = True  # otherwise the largest is the default

    def wanted(self, n: int | None = None) -> str:
        largest = f"N-{self.below_n}" if self.below_n else "N"
        return f"{self.smallest} <= {self.name} <= {largest}" + ("" if n is None else f" = {n - self.below_n}")


@dataclass(frozen=True)
class Inputs:
    """What the steps around the kernel see; tensors as [G, N] or [S]."""

    groups: Groups
    rewards: Tensor
    logprobs: Tensor | None  # mean log-probability of each response's tokens
    greedy_correct: Tensor | None  # bool, whether the prompt's greedy response is correct


@dataclass(frozen=True)
class Estimator:
    """A row of the registry. `value`, `baseline` and `scale` are those of csrc/group_advantage.h."""

    formula: str
    source: str
    weight: str  # W_N(p), for people
    table: Callable[[int, Any], Tensor] | None = None  # of n and the size or the quantile: ops/tables.py
    value: str = "reward"  # "rank" or "binary" with a table
    baseline: str = "zero"
    scale: str = "one"
    size: Size | None = None
    scales_by_k: bool = False  # `scale_by_k` multiplies by k
    options: Mapping[str, float | None] = field(default_factory=dict)  # name and default; None: must be given
    inputs: tuple[str, ...] = ()  # beside the rewards: lengths, logprobs, greedy_correct
    affine: Callable[[Mapping[str, float]], tuple[float, float]] = lambda options: (1.0, 0.0)  # gain and bias
    before: Callable[[Inputs, Mapping[str, float]], Tensor] | None = None  # the rewards to take instead
    after: Callable[[Tensor, Inputs, Mapping[str, float]], Tensor] | None = None  # advantages from the kernel's
    min_rollouts: int = 2  # what training with it makes sense with

    @property
    def binary(self) -> bool:
        """Whether the table goes by the number of correct rollouts, not by ranks: rewards must be 0 or 1."""
        return self.value == "binary"

    @property
    def is_centred(self) -> bool:
        """Whether every group's advantages add up to 0, so that a rollout that is alone has none."""
        return self.baseline == "mean" or (self.table is not None and self.table in _CENTRED_TABLES)

    @property
    def has_weight(self) -> bool:
        """Whether W_N(p) exists: the advantages depend on nothing but the group's own rewards."""
        return self.before is None and self.after is None

    @property
    def needs(self) -> str:
        """What a group and a call need, for people."""
        needs = [self.size.wanted() if self.size else f"N >= {self.min_rollouts}", *self.inputs]
        needs += [name for name, default in self.options.items() if default is None]
        return ", ".join([*needs, "rewards 0 or 1"] if self.binary else needs)

    def table_of(self, n: int, parameter: float) -> Tensor:
        """The table of groups of n, by the size (0: the largest) or the quantile; zeros where n is too few for the size."""
        assert self.table is not None
        if self.size is not None:
            parameter = int(parameter) or n - self.size.below_n
            if not self.size.smallest <= parameter <= n - self.size.below_n:
                return torch.zeros(2, n + self.binary, dtype=torch.float64)
        return self.table(n, parameter)

    def resolve_size(self, name: str, n: int | None, k: int | None, order: int | None) -> int:
        """The size, 0 for the largest that fits; a ValueError that states the range where it does not fit groups of n."""
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
        """A ValueError that states the range where the size does not fit groups of n (None: uneven, not known yet)."""
        assert self.size is not None
        if isinstance(size, bool) or not isinstance(size, int):
            raise ValueError(f"{name} needs a whole number as {self.size.name}, got {size!r:.80}")
        largest = _LARGEST_SIZE if n is None else n - self.size.below_n
        if not self.size.smallest <= size <= largest:
            rollouts = "" if n is None else f" for N = {n} rollouts"
            raise ValueError(f"{name} needs {self.size.wanted(n)}{rollouts}, got {size!r:.80}")

    def resolve_options(self, name: str, given: Mapping[str, float]) -> dict[str, float]:
        """All options; a ValueError on those it does not take, lacks, or that cannot be."""
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
    "false_positive_rate": ("in [0, 1)", lambda x: 0 <= x < 1),
    "false_negative_rate": ("in [0, 1)", lambda x: 0 <= x < 1),
}


def _checked(option: str, value: Any) -> float:
    """The option's value; a ValueError where it cannot be."""
    number = check_finite(option, value)
    return check_number(option, value, *_OPTIONS[option]) if option in _OPTIONS else number


_CENTRED_TABLES = (tables.maxpo, tables.expected_improvement_leave_one_out, tables.maxrl, tables.passk_training)
_K = Size("k")
_K_OF_PAIRS = Size("k", smallest=2)
_K_UP_TO_N = Size("k", below_n=0)
_K_OF_PAIRS_UP_TO_N = Size("k", smallest=2, below_n=0)
_STD = {"eps": 1e-6, "ddof": 1.0}
_RATES: dict[str, float | None] = {"false_positive_rate": None, "false_negative_rate": None}
_ENUMERATED = "no closed form: --weights"


def _grpo(formula: str, source: str, eps: float) -> Estimator:
    return Estimator(formula, source, _ENUMERATED, baseline="mean", scale="std", options={"eps": eps, "ddof": 1.0})


def _standardised(advantages: Tensor, inputs: Inputs, options: Mapping[str, float]) -> Tensor:
    """Divided by the standard deviation over the batch, whose mean is 0 already."""
    valid = None if inputs.groups.valid is None else inputs.groups.valid.view(1, -1)
    kernel = torch.ops.maxrl_fast.group_advantage.default
    whitened = kernel(
        advantages.view(1, -1), None, None, valid, None, "batch_std", 0.0, options["eps"], int(options["ddof"]), 1.0, 0.0, 0
    )
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
    logprobs = inputs.logprobs.to(torch.promote_types(inputs.logprobs.dtype, dtype))  # the ranks come in its dtype
    ranks = kernel(
        logprobs, groups.offsets, groups.order, groups.valid, None, "rank_fraction", 0.0, 0.0, 0, 1.0, 0.0, 0
    )  # rank/N
    return inputs.rewards.to(dtype) * (1 - options["penalty"] * ranks.to(dtype))


def _unless_greedy_correct(advantages: Tensor, inputs: Inputs, options: Mapping[str, float]) -> Tensor:
    assert inputs.greedy_correct is not None
    return advantages.masked_fill(inputs.greedy_correct.bool(), 0.0)


_PKPO = Estimator(
    "(k/N) EI_i",
    "PKPO, Walder & Karkhanis 2025, sloo_minus_one",
    "(k/N) (1-p)^(k-1)",
    tables.pkpo,
    "rank",
    size=_K_OF_PAIRS_UP_TO_N,
)

ESTIMATORS: dict[str, Estimator] = {
    "maxpo": Estimator(
        "S_i - S_-i = EI_i - L2O_i",
        "MaxPO, section 4.1, eq. 8; EI + L2O of section 3.1",
        "(1-p)^(k-1)",
        tables.maxpo,
        "rank",
        size=_K,
        scales_by_k=True,
    ),
    "expected_improvement": Estimator(
        "EI_i = S_i - M_-i",
        "MaxPO, section 3.1, eq. 5",
        "(1-p)^(k-1)",
        tables.expected_improvement,
        "rank",
        size=_K_OF_PAIRS_UP_TO_N,
        scales_by_k=True,
    ),
    "leave_two_out": Estimator(
        "L2O_i = mean over j != i of EI_j without i: a baseline",
        "MaxPO, section 3.1, eq. 6",
        "0",
        tables.leave_two_out,
        "rank",
        size=_K_OF_PAIRS,
        scales_by_k=True,
    ),
    "ei_l1o": Estimator(
        "EI_i - mean over j != i of EI_j; biased, an ablation",
        "MaxPO, section 3.1, against eq. 6",
        _ENUMERATED,
        tables.expected_improvement_leave_one_out,
        "rank",
        size=_K_OF_PAIRS_UP_TO_N,
        scales_by_k=True,
    ),
    "maxrl": Estimator(
        "sum_{k=1..order} of maxpo_k; for rewards 0 or 1 at full order (r_i - mu)/mu, 0 where mu = 0",
        "MaxRL, eq. 5 with Algorithm 1; any real reward through MaxPO",
        "(1-(1-p)^order)/p",
        tables.maxrl,
        "rank",
        size=Size("order", required=False),
    ),
    "maxrl_ratio": Estimator(
        "(r_i - mu)/(mu + eps), 0 where mu + eps = 0; eps 0",
        "MaxRL, Algorithm 1",
        "(1-(1-p)^(N-1))/p at eps 0",
        baseline="mean",
        scale="mean",
        options={"eps": 0.0},
    ),
    "maxrl_conditional": Estimator("r_i N/C, 0 where C = 0", "MaxRL, eq. 6", "(1-(1-p)^N)/p", scale="mean", min_rollouts=1),
    "maxrl_control_variate": Estimator(
        "r_i N/C - 1, -1 where C = 0", "MaxRL, eq. 7", "(1-(1-p)^N)/p", scale="mean", affine=lambda _: (1.0, -1.0)
    ),
    "rloo": Estimator(
        "r_i - mean of the others",
        "RLOO, Kool et al. 2019; Ahmadian et al. 2024",
        "1",
        baseline="mean",
        scale="leave_one_out",
    ),
    "reinforce": Estimator("r_i - mu", "MaxRL, section 2: REINFORCE with the group's mean", "(N-1)/N", baseline="mean"),
    "dr_grpo": Estimator("r_i - mu", "Dr. GRPO, Liu et al. 2025", "(N-1)/N", baseline="mean"),
    "reinforce_raw": Estimator("r_i", "REINFORCE, Williams 1992", "1", min_rollouts=1),
    "grpo": _grpo("(r_i - mu)/(std + eps); eps 1e-6, ddof 1", "GRPO, Shao et al. 2024, section 4.1.2", 1e-6),
    "grpo_verl": _grpo("(r_i - mu)/(std + 1e-6), ddof 1", "grpo as verl computes it", 1e-6),
    "grpo_trl": _grpo("(r_i - mu)/(std + 1e-4), ddof 1", "grpo as TRL computes it", 1e-4),
    "pkpo": _PKPO,
    "pkpo_sloo_minus_one": _PKPO,
    "pkpo_sloo": Estimator(
        "(k/N) S_i - (k/(N-1)) S_-i",
        "PKPO, Walder & Karkhanis 2025, sloo",
        "(k/N) (1-p)^(k-1)",
        tables.pkpo_sloo,
        "rank",
        size=_K,
    ),
    "passk_training": Estimator(
        "((N-k)/N) maxpo_i / (sqrt(rho (1-rho)) + 1e-6), rho = 1 - C(F,k)/C(N,k)",
        "Pass@k Training, Chen et al. 2025, arXiv:2508.10751, eqs. 14-15",
        _ENUMERATED,
        tables.passk_training,
        "binary",
        size=_K_UP_TO_N,
    ),
    "bon_mean": Estimator(
        "(k/N) S_i, standardised in the group",
        "The Best of N Worlds, Bagirov et al. 2025, eq. 9, BoN mean",
        _ENUMERATED,
        tables.best_of_n,
        "rank",
        baseline="mean",
        scale="std",
        size=_K_UP_TO_N,
        options=_STD,
    ),
    "bon_max_second": Estimator(
        "the best reward - the second, for the best rollout alone",
        "The Best of N Worlds, Bagirov et al. 2025, BoN max-second",
        "(1-p)^(N-1)",
        tables.max_minus_second,
        "rank",
    ),
    "psr": Estimator("r_i", "PSR, Zhu et al. 2025, arXiv:2506.01347", "1", min_rollouts=1),
    "nsr": Estimator("r_i - 1", "NSR, Zhu et al. 2025, arXiv:2506.01347", "1", affine=lambda _: (1.0, -1.0), min_rollouts=1),
    "w_reinforce": Estimator(
        "correct_weight r_i - (1 - r_i); correct_weight .1",
        "Weighted-REINFORCE, Zhu et al. 2025, arXiv:2506.01347",
        "1 + correct_weight",
        options={"correct_weight": 0.1},
        affine=lambda options: (1 + options["correct_weight"], -1.0),
        min_rollouts=1,
    ),
    "qae": Estimator(
        "(r_i - b)/(std + eps), b = inf{x : F(x) >= quantile}; quantile .4",
        "Quantile Advantage Estimation, Wu et al. 2025, arXiv:2509.22611",
        _ENUMERATED,
        tables.above_quantile,
        "rank",
        scale="std",
        options={"quantile": 0.4, **_STD},
    ),
    "opo": Estimator(
        "r_i - sum(length r)/sum(length)",
        "OPO, Hao et al. 2025, arXiv:2505.23585",
        "(N-1)/N at equal lengths",
        baseline="length_mean",
        inputs=("lengths",),
    ),
    "reinforce_pp": Estimator(
        "r_i - mu, then standardised over the batch",
        "REINFORCE++ with baseline, Hu et al. 2025, arXiv:2501.03262",
        "depends on the batch",
        baseline="mean",
        options={"eps": 1e-8, "ddof": 1.0},
        after=_standardised,
    ),
    "differential_smoothing": Estimator(
        "grpo (ddof 0) - tau (mean logp) where r_i = 1, + tau (mean logp) where r_i = 0; tau .05",
        "Differential Smoothing, Gai et al. 2025",
        "depends on the log-probs",
        baseline="mean",
        scale="std",
        options={"tau": 0.05, "eps": 1e-6, "ddof": 0.0},
        inputs=("logprobs",),
        after=_smoothed,
    ),
    "unlikeliness": Estimator(
        "grpo of r_i (1 - penalty rank/N), rank of the mean logp from 0, the least likely; penalty .25",
        "Rewarding the Unlikely, He et al. 2025, arXiv:2506.02355",
        "depends on the log-probs",
        baseline="mean",
        scale="std",
        options={"penalty": 0.25, **_STD},
        inputs=("logprobs",),
        before=_penalise_likely,
    ),
    "self": Estimator(
        "grpo, 0 for prompts whose greedy rollout is correct",
        "SELF, Nguyen et al. 2025, as compared in MaxRL, Table 3",
        "depends on the greedy rollout",
        baseline="mean",
        scale="std",
        options=_STD,
        inputs=("greedy_correct",),
        after=_unless_greedy_correct,
    ),
    "noisy_verifier_backward": Estimator(
        "(r_i - mu)/(1 - rho0 - rho1): rewards (r_i - rho0)/(1 - rho0 - rho1), centred",
        "RLVR under Imperfect Verifiers 2025, backward (from a secondary source)",
        "(N-1)/(N (1 - rho0 - rho1))",
        baseline="mean",
        options=_RATES,
        affine=lambda options: (1 / (1 - options["false_positive_rate"] - options["false_negative_rate"]), 0.0),
    ),
    "noisy_verifier_forward": Estimator(
        "rho1 where r_i = 1, rho1 - 1 where r_i = 0",
        "RLVR under Imperfect Verifiers 2025, forward (derived, not compared)",
        "1",
        options={"false_negative_rate": None},
        affine=lambda options: (1.0, options["false_negative_rate"] - 1),
        min_rollouts=1,
    ),
}

# What the kernel runs: the registry, and steps around it.
KERNEL_ROWS = {
    **ESTIMATORS,
    "batch_std": Estimator("r_i/(std + eps)", "the last step of reinforce_pp", "", scale="std"),
    "rank_fraction": Estimator("smaller values/N", "the first step of unlikeliness", "", value="order", scale="size"),
}
