"""TRL: a GRPOTrainer with the advantages of any estimator of `ops.ESTIMATORS`, and log-probs by our
operator.

    from maxrl_fast.integrations.trl import MaxPOTrainer

    trainer = MaxPOTrainer(..., estimator_options={"k": 8})  # everything else as for a GRPOTrainer

TRL has no hook for advantages, so the mixin overrides two private methods of GRPOTrainer. Tested
with TRL 1.16.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import trl
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer import utils

from maxrl_fast import ops

if TYPE_CHECKING:
    _Base: TypeAlias = Any  # the mixin is combined with a GRPOTrainer
else:
    _Base = object


class GroupAdvantages(_Base):  # type: ignore[misc]
    """Replaces a GRPOTrainer's advantages by `group_advantages`, in its batches and its logs.

    A rollout for which every reward function returned None or NaN is left out of its group and gets
    advantage 0. TRL's `scale_rewards` has no effect.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if GRPOTrainer in cls.__mro__ and cls.__mro__.index(GRPOTrainer) < cls.__mro__.index(
            GroupAdvantages
        ):
            raise TypeError(
                f"the bases of {cls.__name__} must have the mixin before GRPOTrainer, got it after"
            )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name in ("_calculate_rewards", "_generate_and_score_completions", "_compute_loss"):
            if not hasattr(GRPOTrainer, name):  # the override would never be called
                raise RuntimeError(
                    f"maxrl_fast needs the GRPOTrainer of TRL 1.16, got TRL {trl.__version__}, "
                    f"which has no {name}"
                )
        super().__init__(*args, **kwargs)
        if self.multi_objective_aggregation != "sum_then_normalize":
            raise ValueError(
                "multi_objective_aggregation must be sum_then_normalize, as estimators take the "
                f"weighted sum of the rewards, got {self.multi_objective_aggregation}"
            )
        for size in {self.num_generations, self.num_generations_eval}:  # fail before training
            self.group_advantages(
                torch.zeros(1, size), torch.ones(1, size).bool(), torch.ones(1, size).long()
            )

    def group_advantages(self, rewards: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
        """Return advantages [G, N] from rewards [G, N], which are 0 where not `valid`; all on the
        CPU.

        `lengths` [G, N] are response lengths in tokens. The groups are the groups of all processes.
        """
        raise NotImplementedError

    def global_rewards(self) -> tuple[Tensor, Tensor]:
        """Return the weighted reward sums [S] of all processes, and which are known [S], on the
        CPU."""
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


class AdvantageMixin(GroupAdvantages):
    """For a subclass of GRPOTrainer: `class MyTrainer(AdvantageMixin, GRPOTrainer)`.

    Args:
        estimator: a name in `ops.ESTIMATORS` that needs only rewards and lengths.
        estimator_options: arguments of `ops.group_advantage`, such as k.
        others: as for GRPOTrainer.

    Raises ValueError where these, num_generations and the rewards do not fit each other.
    """

    estimator: str = "maxrl"
    estimator_options: Mapping[str, Any] = {}

    def __init__(
        self,
        *args: Any,
        estimator: str | None = None,
        estimator_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self.estimator = self.estimator if estimator is None else estimator
        self.estimator_options = (
            self.estimator_options if estimator_options is None else estimator_options
        )
        super().__init__(*args, **kwargs)

    def group_advantages(self, rewards: Tensor, valid: Tensor, lengths: Tensor) -> Tensor:
        options = dict(self.estimator_options)
        if self.estimator in ops.ESTIMATORS and "lengths" in ops.ESTIMATORS[self.estimator].inputs:
            options["lengths"] = lengths
        is_valid = None if valid.all() else valid
        return ops.group_advantage(rewards, self.estimator, valid=is_valid, **options)


class MaxRLTrainer(AdvantageMixin, GRPOTrainer):  # type: ignore[misc]
    """A GRPOTrainer with MaxRL advantages; `estimator_options={"order": T}` truncates them."""


class MaxPOTrainer(AdvantageMixin, GRPOTrainer):  # type: ignore[misc]
    """A GRPOTrainer with MaxPO advantages; `estimator_options={"k": K}`, default 4."""

    estimator = "maxpo"
    estimator_options: Mapping[str, Any] = {"k": 4}


_ChunkedLogProbFunction = utils._ChunkedLogProbFunction


class _LinearLogprobs:
    """Replaces TRL's autograd function for the two outputs of GRPO; other calls go to TRL's."""

    @staticmethod
    def apply(
        hidden: Tensor,  # [T, H]
        weight: Tensor,  # [V, H]
        bias: Tensor | None,
        targets: Tensor,  # [T]
        temperature: float,
        chunk_size: int,
        softcap: float | None,
        scale: float,
        outputs: tuple[str, ...],
    ) -> tuple[Tensor | None, ...]:
        if set(outputs) - {"log_probs", "entropy"}:
            return _ChunkedLogProbFunction.apply(
                hidden, weight, bias, targets, temperature, chunk_size, softcap, scale, outputs
            )
        if bias is not None:
            raise ValueError(
                "use_linear_logprobs takes an output layer without a bias, got one with a bias"
            )
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        # softcap tanh(scale z / softcap) / temperature; the scale is folded into the other two
        # numbers
        logprobs, entropy = ops.linear_token_logprobs(
            hidden,
            weight,
            targets,
            temperature=temperature / scale,
            softcap=(softcap or 0.0) / scale,
        )
        return logprobs, entropy if "entropy" in outputs else None, None, None, None


def use_linear_logprobs() -> None:
    """Let `ops.linear_token_logprobs` compute log-probs and entropies of all GRPOTrainers.

    It replaces the private `_ChunkedLogProbFunction` of TRL's `add_fused_lm_head`.
    """
    utils._ChunkedLogProbFunction = _LinearLogprobs
