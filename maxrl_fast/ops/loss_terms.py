"""What a token loss computes, apart from the tensors: one record from the caller to the kernel."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from torch import Tensor
from typing_extensions import Self

from maxrl_fast.algorithms.arguments import check_choice, check_finite, check_number
from maxrl_fast.algorithms.losses.registry import TokenLoss, find_loss

KL_ESTIMATORS = ("k1", "k2", "k3", "k3+")
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_constant"]
AGGREGATIONS = get_args(Aggregation)

# what the kernels take of LossTerms: LossTerms of csrc/token_loss.h, as types of an operator
KERNEL_TERMS = {
    "loss": "str",
    "clip_low": "float",
    "clip_high": "float",
    "dual_clip": "float",
    "kl": "str",
    "kl_coef": "float",
    "entropy_coef": "float",
}


@dataclass(frozen=True)
class LossTerms:
    """The arguments of policy_gradient_loss, which explains them, that are the same for all tokens,
    checked. The trainer makes them once for a run."""

    loss: str | Callable[..., Tensor] = "ppo"
    aggregation: str = "token_mean"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl: str = "k3"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    loss_options: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        spec = self.spec
        spec.resolve(self.loss_options)
        check_choice("aggregation", self.aggregation, AGGREGATIONS)
        if self.aggregation != (needed := spec.aggregation or self.aggregation):
            wanted = f"{needed} for {self.loss}, whose loss it is a part of"
            raise ValueError(f"aggregation must be {wanted}, got {self.aggregation}")
        check_choice("kl", self.kl, KL_ESTIMATORS)
        numbers = {
            name: check_number(
                name, getattr(self, name), "a number of at least 0", lambda x: x >= 0
            )
            for name in ("clip_low", "clip_high")
        }
        if self.dual_clip is not None:
            numbers["dual_clip"] = check_number(
                "dual_clip", self.dual_clip, "a number above 1", lambda x: x > 1
            )
        for name in ("kl_coef", "entropy_coef"):
            numbers[name] = check_finite(name, getattr(self, name))
        for name, number in numbers.items():  # as floats, whatever kind of number was given
            object.__setattr__(self, name, number)

    @property
    def spec(self) -> TokenLoss:
        return find_loss(self.loss)

    @property
    def options(self) -> tuple[tuple[str, float], ...]:
        return tuple(self.spec.resolve(self.loss_options).items())

    @property
    def clips(self) -> dict[str, float]:
        dual_clip = math.inf if self.dual_clip is None else self.dual_clip
        return {"clip_low": self.clip_low, "clip_high": self.clip_high, "dual_clip": dual_clip}

    @property
    def needs_every_token(self) -> bool:
        """Whether tokens with advantage 0 have a gradient too."""
        own = self.spec.is_users if self.spec.all_tokens is None else self.spec.all_tokens
        return bool(self.kl_coef or self.entropy_coef or own)

    @property
    def of_masked(self) -> Self:
        """The terms of the loss whose tokens this loss masks."""
        return replace(self, loss=self.spec.masks, loss_options=None)

    @property
    def of_kernel(self) -> tuple[Any, ...]:
        """The values of KERNEL_TERMS."""
        return (self.spec.name, *self.clips.values(), self.kl, self.kl_coef, self.entropy_coef)
