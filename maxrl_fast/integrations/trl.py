"""TRL: a GRPOTrainer with the advantages of any estimator of `ops.ESTIMATORS`.

    from maxrl_fast.integrations.trl import MaxPOTrainer

    trainer = MaxPOTrainer(..., estimator_options={"k": 8})  # everything else as for a GRPOTrainer

TRL has no hook for advantages, so the mixin overrides two private methods of GRPOTrainer. Tested
with TRL 1.16."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import trl
from torch import Tensor
from trl import GRPOTrainer

from maxrl_fast import ops

if TYPE_CHECKING:
    _Base: TypeAlias = Any  # the mixin is combined with a GRPOTrainer
else:
    _Base = object


class AdvantageMixin(_Base):  # type: ignore[misc]
    """For a subclass of GRPOTrainer, `class MyTrainer(AdvantageMixin, GRPOTrainer)`: replaces TRL's
    advantages in its batches and its logs (docs/integrations.md). A rollout for which every reward
    function returned None or NaN is left out and gets advantage 0. TRL's `scale_rewards` has no
    effect. estimator: a name in `ops.ESTIMATORS` that needs only rewards and lengths;
    estimator_options: arguments of `ops.group_advantage`, such as k."""

    estimator: str = "maxrl"
    estimator_options: Mapping[str, Any] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        bases = cls.__mro__
        if GRPOTrainer in bases and bases.index(GRPOTrainer) < bases.index(AdvantageMixin):
            raise TypeError(
                f"the bases of {cls.__name__} must have the mixin before GRPOTrainer, got it after"
            )

    def __init__(
        self,
        *args: Any,
        estimator: str | None = None,
        estimator_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        for name in ("_calculate_rewards", "_generate_and_score_completions"):
            if not hasattr(GRPOTrainer, name):  # the override would never be called
                raise RuntimeError(
                    f"maxrl_fast needs the GRPOTrainer of TRL 1.16, got TRL {trl.__version__}, "
                    f"which has no {name}"
                )
        if estimator is not None:
            self.estimator = estimator
        if estimator_options is not None:
            self.estimator_options = estimator_options
        super().__init__(*args, **kwargs)
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                "multi_objective_aggregation must be sum_then_normalize, as estimators take the "
                f"weighted sum of the rewards, got {self.multi_objective_aggregation}"
            )
        for size in {self.num_generations, self.num_generations_eval}:  # fail before training
            ones = torch.ones(1, size, dtype=torch.int64)
            self.group_advantages(torch.zeros(1, size), ones.bool(), ones)

    def group_advantages(self, rewards: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
        """Return advantages [G, N] of all processes' groups, on the CPU; rewards are 0 where not
        `valid`."""
        options = dict(self.estimator_options)
        if self.estimator in ops.ESTIMATORS and "lengths" in ops.ESTIMATORS[self.estimator].inputs:
            options["lengths"] = lengths
        is_valid = None if valid.all() else valid
        return ops.group_advantage(rewards, self.estimator, valid=is_valid, **options)

    def global_rewards(self) -> tuple[Tensor, Tensor]:
        """Return the weighted reward sums [S] of all processes, and which are known [S]."""
        rewards = self._rewards_per_func.cpu()  # [S, functions]
        return (rewards * self.reward_weights.cpu()).nansum(1), ~rewards.isnan().all(1)

    def own(self, values: Tensor, size: int) -> Tensor:
        return values[self.accelerator.process_index * size :][:size].to(self.accelerator.device)

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Tensor:
        self._rewards_per_func: Tensor = super()._calculate_rewards(*args, **kwargs)
        return self._rewards_per_func

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        n = self.num_generations if self.model.training else self.num_generations_eval
        lengths = self.accelerator.gather(output["completion_mask"].sum(1)).cpu()
        rewards, valid = (values.view(-1, n) for values in self.global_rewards())
        advantages = self.group_advantages(rewards, valid, lengths.view(-1, n)).flatten()
        output["advantages"] = self.own(advantages, len(output["advantages"]))
        # a deque that ends with TRL's advantages of these rollouts
        logged = self._logs["advantages"]
        for _ in range(min(len(advantages), len(logged))):
            logged.pop()
        logged.extend(advantages.tolist())
        return output


class MaxRLTrainer(AdvantageMixin, GRPOTrainer):  # type: ignore[misc]
    """A GRPOTrainer with MaxRL advantages; `estimator_options={"order": T}` truncates them."""


class MaxPOTrainer(AdvantageMixin, GRPOTrainer):  # type: ignore[misc]
    """A GRPOTrainer with MaxPO advantages; `estimator_options={"k": K}`, default 4."""

    estimator = "maxpo"
    estimator_options: Mapping[str, Any] = {"k": 4}
