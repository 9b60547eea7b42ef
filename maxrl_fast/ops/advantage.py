"""Group advantages: how much better each rollout did than its group, by estimator.

Each estimator stands in `ESTIMATORS` with its formula and source. Notation: N rewards r of one prompt, mu their mean,
S_i the mean of the maximum over the size-K subsets that contain i, S_-i over those without i, M_-i over the
size-(K-1) subsets of the others.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from maxrl_fast.ops.rank_transform import rank_transform, rank_weights


@dataclass(frozen=True)
class Estimator:
    """A row of the table: `size` is k, or MaxRL's order, checked and resolved."""

    formula: str
    source: str
    compute: Callable[[Tensor, int], Tensor]  # rewards [G, N] and size -> advantages [G, N]
    min_rollouts: int = 2
    size_name: str | None = None  # "k" or "order"
    min_size: int = 1
    max_size_below_n: int = 1  # the largest size is N minus this

    def resolve_size(self, name: str, n: int, k: int | None, order: int | None) -> int:
        """The size for groups of n rollouts; a ValueError that states the range where it does not fit."""
        given = {"k": k, "order": order}
        for option, value in given.items():
            if value is not None and option != self.size_name:
                raise ValueError(f"{name} takes no {option}, got {option}={value}")
        if self.size_name is None:
            return 0
        largest = n - self.max_size_below_n
        size = given[self.size_name]
        if size is not None and not isinstance(size, int):
            raise ValueError(f"{name} needs a whole number as {self.size_name}, got {size!r}")
        if size is None:
            if self.size_name == "k":
                raise ValueError(f"{name} needs k, {self.min_size} <= k <= {self._limit()}")
            return largest  # MaxRL of full order
        if not self.min_size <= size <= largest:
            raise ValueError(
                f"{name} needs {self.min_size} <= {self.size_name} <= {self._limit()} = {largest} "
                f"for N = {n} rollouts, got {size}"
            )
        return size

    def _limit(self) -> str:
        return f"N-{self.max_size_below_n}" if self.max_size_below_n else "N"


def _ranked(kind: str, *, centred: bool = True) -> Callable[[Tensor, int], Tensor]:
    def compute(rewards: Tensor, size: int) -> Tensor:
        return rank_transform(rewards, rank_weights(kind, rewards.shape[1], size, rewards.device), centred)

    return compute


_centred = _ranked("mean")
_ei = _ranked("ei", centred=False)
_maxpo = _ranked("maxpo")


def _grpo(rewards: Tensor, size: int, eps: float = 1e-6, ddof: int = 1) -> Tensor:
    centred = _centred(rewards, 0)  # by gaps between sorted rewards: exactly 0 in a group of equal rewards
    # Summed in sorted order, so that the order of the rollouts changes nothing, not even a rounding.
    variance = centred.sort(-1).values.square().sum(-1, keepdim=True) / (rewards.shape[1] - ddof)
    return torch.where(centred == 0, 0.0, centred / (variance.sqrt() + eps))  # also with eps 0


ESTIMATORS = {
    "maxpo": Estimator(
        "S_i - S_-i = EI_i - L2O_i", "MaxPO, section 4.1 (eq. 8); EI + L2O of section 3.1", _maxpo, size_name="k"
    ),
    "maxrl": Estimator(
        "sum_{k=1..order} of maxpo_k; (r_i - mu)/mu for binary rewards at full order, 0 where mu = 0",
        "MaxRL, Algorithm 1; its order T, extended to any real reward through MaxPO",
        _ranked("maxrl"),
        size_name="order",
    ),
    "grpo": Estimator("(r_i - mu)/(std + eps)", "GRPO, Shao et al. 2024, section 4.1.2", _grpo),
    "rloo": Estimator("r_i - mean of the others", "RLOO, Kool et al. 2019; Ahmadian et al. 2024", _ranked("rloo")),
    "reinforce": Estimator("r_i - mu", "MaxRL's REINFORCE with the group's mean; Dr. GRPO, Liu et al. 2025", _centred),
    "expected_improvement": Estimator(
        "EI_i = S_i - M_-i", "MaxPO, section 3.1, eq. 5", _ei, size_name="k", min_size=2, max_size_below_n=0
    ),
    "leave_two_out": Estimator(
        "L2O_i, the mean over j != i of EI_j without i",
        "MaxPO, section 3.1, eq. 6",
        lambda rewards, k: _ei(rewards, k) - _maxpo(rewards, k),
        size_name="k",
        min_size=2,
    ),
    "pkpo": Estimator(
        "(K/N) EI_i",
        "PKPO, Walder & Karkhanis 2025, sloo_minus_one",
        lambda rewards, k: _ei(rewards, k) * (k / rewards.shape[1]),
        size_name="k",
        min_size=2,
        max_size_below_n=0,
    ),
}
ESTIMATORS["dr_grpo"] = ESTIMATORS["reinforce"]


def group_advantage(
    rewards: Tensor,
    estimator: str,
    *,
    k: int | None = None,
    order: int | None = None,
    eps: float | None = None,
    ddof: int | None = None,
) -> Tensor:
    """Advantages of rollouts within their groups.

    Args:
        rewards: [..., N], each row a group; any real dtype. Those that are not floating become float32.
        estimator: a name in `ESTIMATORS`.
        k: size of the max@K objective, for estimators that have one.
        order: truncation of MaxRL, 1 <= order <= N-1; default N-1, the full order.
        eps: added to grpo's standard deviation, 1e-6 by default.
        ddof: of grpo's standard deviation, 1 (sample, the default) or 0 (population).

    Returns:
        Advantages of the shape, device and (floating) dtype of `rewards`; not differentiable. A group of one has 0.

    Raises:
        ValueError: on an unknown estimator, k or order outside its range, an option the estimator does not have, or a
            reward on the CPU that is not finite (on a GPU it is not looked at, which would stall the device; a group that
            holds one becomes non-finite).
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator must be one of {', '.join(ESTIMATORS)}, got {estimator!r}")
    if rewards.dim() == 0:
        raise ValueError("rewards must have shape [..., N], got a scalar")
    chosen, n = ESTIMATORS[estimator], rewards.shape[-1]
    options = {name: value for name, value in (("eps", eps), ("ddof", ddof)) if value is not None}
    if options and estimator != "grpo":
        raise ValueError(f"{estimator} takes no {' or '.join(options)}")
    if ddof not in (None, 0, 1):
        raise ValueError(f"ddof must be 0 or 1, got {ddof}")
    rows = rewards.detach().reshape(-1, max(n, 1))
    if not rows.is_floating_point():
        rows = rows.float()
    if rows.device.type == "cpu" and not rows.isfinite().all():
        group, rollout = (~rows.isfinite()).nonzero()[0].tolist()
        raise ValueError(f"rewards must be finite, got {rows[group, rollout].item()} in group {group}, rollout {rollout}")
    if n == 0 or (n == 1 and chosen.size_name is None):
        return torch.zeros_like(rows).view(rewards.shape)
    size = chosen.resolve_size(estimator, n, k, order)
    computed = rows if rows.dtype in (torch.float32, torch.float64) else rows.float()
    return chosen.compute(computed.contiguous(), size, **options).to(rows.dtype).view(rewards.shape)


def maxpo_advantage(rewards: Tensor, k: int) -> Tensor:
    """S_i - S_-i of rewards [..., N], 1 <= k <= N-1 (MaxPO, section 4.1); its mean gradient is (1/k) grad max@k."""
    return group_advantage(rewards, "maxpo", k=k)


def expected_improvement(rewards: Tensor, k: int) -> Tensor:
    """EI_i = S_i - M_-i of rewards [..., N], 2 <= k <= N (MaxPO, eq. 5)."""
    return group_advantage(rewards, "expected_improvement", k=k)


def leave_two_out_baseline(rewards: Tensor, k: int) -> Tensor:
    """L2O_i of rewards [..., N], 2 <= k <= N-1 (MaxPO, eq. 6); expected_improvement minus this is maxpo_advantage."""
    return group_advantage(rewards, "leave_two_out", k=k)


def maxrl_advantage(rewards: Tensor, order: int | None = None) -> Tensor:
    """MaxRL of rewards [..., N]: the sum of maxpo_advantage over k = 1..order, by default N-1.

    For binary rewards and full order that is (r - mu)/mu, and 0 where nothing was solved (MaxRL, Algorithm 1).
    """
    return group_advantage(rewards, "maxrl", order=order)


def grpo_advantage(rewards: Tensor, *, eps: float = 1e-6, ddof: int = 1) -> Tensor:
    """(r_i - mu)/(std + eps) of rewards [..., N] (Shao et al. 2024); exactly 0 in a group of equal rewards."""
    return group_advantage(rewards, "grpo", eps=eps, ddof=ddof)


def rloo_advantage(rewards: Tensor) -> Tensor:
    """r_i minus the mean of the others, of rewards [..., N] (Ahmadian et al. 2024)."""
    return group_advantage(rewards, "rloo")
