"""TRL: a GRPOTrainer with the loss of PACS.

    from trl_pacs import PACSTrainer  # with examples/ on the PYTHONPATH

    trainer = PACSTrainer(...)  # everything as for a GRPOTrainer; rewards are 0 or 1

The advantages have the gradient of the PACS loss (algorithms/estimators/of_training.py); the
reference is the sampling policy. At the first update they follow from the rewards. Later updates
recompute them from the whole groups of the micro-batch.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from trl import GRPOTrainer

from maxrl_fast import ops
from maxrl_fast.integrations.trl import AdvantageMixin


class PACSTrainer(AdvantageMixin, GRPOTrainer):  # type: ignore[misc]  # TRL has no types
    """A GRPOTrainer with the loss of PACS; TRL's `loss_type` has no effect, and nothing is clipped.

    Args:
        pacs_beta: scale of the reward proxies, in reward per nat. TRL's `beta` is for its KL.
        pacs_score, pacs_weight: score and weight of `ops.pacs_loss`.
        others: as for GRPOTrainer. With several updates per batch, per_device_train_batch_size must
            be a multiple of num_generations, and prompts must be text.

    Raises:
        ValueError: if groups would be split, or a reward is neither 0 nor 1.
    """

    def __init__(
        self,
        *args: Any,
        pacs_beta: float = 1.0,
        pacs_score: str = "rloo",
        pacs_weight: str = "balanced",
        **kwargs: Any,
    ) -> None:
        self.pacs_beta, self.pacs_options = pacs_beta, {"score": pacs_score, "weight": pacs_weight}
        super().__init__(*args, **kwargs)
        self.loss_type = "luspo"  # the sum over tokens, the mean over responses
        # micro-batches; TRL stores old log-probs by the same rule
        every = self.args.steps_per_generation * self.num_iterations
        self.is_off_policy = self.args.gradient_accumulation_steps % every != 0
        size = self.args.per_device_train_batch_size
        if self.is_off_policy and size % self.num_generations:
            wanted = (
                f"a multiple of num_generations = {self.num_generations}, as PACS learns from "
                "whole groups"
            )
            raise ValueError(f"per_device_train_batch_size must be {wanted}, got {size}")

    def group_advantages(
        self, rewards: Tensor, valid: Tensor, lengths: Tensor, proxies: Tensor | None = None
    ) -> Tensor:
        """Return -beta B dL/dr [G, N] at the proxies [G, N]; None: all are 0. `lengths` are not
        used."""
        # [number of valid rollouts]
        known = (torch.zeros_like(rewards) if proxies is None else proxies)[valid].requires_grad_()
        with torch.enable_grad():
            offsets = pad(valid.sum(1).cumsum(0), (1, 0))
            loss, _ = ops.pacs_loss(
                known, rewards[valid], offsets, denominator=1.0, **self.pacs_options
            )
            (gradient,) = torch.autograd.grad(loss, known)
        advantages = torch.zeros_like(rewards)
        advantages[valid] -= self.pacs_beta * gradient
        return advantages

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if not (self.is_off_policy and self.model.training):
            return output
        if "pixel_values" in output:
            raise ValueError(
                "PACSTrainer with several updates per batch takes prompts of text, got images"
            )
        rewards, valid = self.global_rewards()
        output["outcomes"] = self.own(
            rewards.masked_fill(~valid, torch.nan), len(output["advantages"])
        )
        # As [groups, N, ...], because TRL shuffles and splits the first dimension.
        return {
            name: x.unflatten(0, (-1, self.num_generations)) if _has_rows(x) else x
            for name, x in output.items()
        }

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        inputs = dict(inputs)
        # without it TRL's ratio is 1, with the gradient of the log-probs
        sampled = inputs.pop("old_per_token_logps", None)
        if self.is_off_policy and self.model.training:
            shape = inputs["outcomes"].shape  # [groups, N]
            inputs = {name: x.flatten(0, 1) if _has_rows(x) else x for name, x in inputs.items()}
            ratios = self._log_ratios(model, inputs, sampled.flatten(0, 1)).view(shape).cpu()
            outcomes = inputs.pop("outcomes").view(shape).cpu()
            valid = ~outcomes.isnan()
            advantages = self.group_advantages(
                outcomes.nan_to_num(), valid, valid, self.pacs_beta * ratios
            )
            inputs["advantages"] = advantages.flatten().to(self.accelerator.device)
        loss: Tensor = super()._compute_loss(model, inputs)
        return loss

    @torch.no_grad()
    def _log_ratios(self, model: Any, inputs: dict[str, Any], sampled: Tensor) -> Tensor:
        """Return log pi(y) - log pi_sampled(y) of each response [S], float32, without tool
        tokens."""
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        logprobs, *_ = self._get_per_token_logps_and_entropies(
            model, ids, attention, sampled.size(1)
        )
        mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
        return ((logprobs - sampled).double() * mask).sum(1).float()


def _has_rows(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0
