"""verl: `algorithm.adv_estimator=maxrl_fast/NAME`, in every process that imports verl, through the
entry point `verl.plugins`.

Options of an estimator are set by `+algorithm.maxrl_fast.k=4`. The environment variable
MAXRL_FAST_VERL_LINEAR=1 also replaces verl's fused output layer by `ops.linear_token_logprobs`.
verl logs a plug-in's exception only at DEBUG, so this module logs messages.
"""

import functools
import logging
import os
from typing import Any

import torch
from torch import Tensor

LINEAR = "MAXRL_FAST_VERL_LINEAR"
_LOGGER = logging.getLogger(__name__)


def group_advantage(
    name: str,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any = None,
    config: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Options come from verl's `algorithm.maxrl_fast`."""
    from maxrl_fast.integrations.rollouts import advantages_and_returns

    options = None if config is None else config.get("maxrl_fast", None)
    return advantages_and_returns(name, options or {}, token_level_rewards, response_mask, index)


def register() -> list[str]:
    """Register the estimators for which verl has the inputs; return their names in verl."""
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, register_adv_est

    from maxrl_fast.integrations.rollouts import names

    added = {f"maxrl_fast/{name}": name for name in names()}
    for key in added.keys() - ADV_ESTIMATOR_REGISTRY.keys():
        register_adv_est(key)(functools.partial(group_advantage, added[key]))
    return list(added)


class FusedLinear:
    """Replaces verl's FusedLinearForPPOFunction, which computes the logits twice in PyTorch."""

    @staticmethod
    def apply(
        hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, _: int
    ) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies [...] float32 from hidden [..., H] and weight [V, H]."""
        from maxrl_fast import ops

        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
        rows = hidden.reshape(-1, hidden.shape[-1])
        logprobs, entropy = ops.linear_token_logprobs(
            rows, weight, targets.reshape(-1), temperature=temperature
        )
        return logprobs.view(targets.shape), entropy.view(targets.shape)


def use_fused_linear() -> None:
    from verl.utils.experimental import torch_functional

    torch_functional.FusedLinearForPPOFunction = FusedLinear


def _load() -> None:
    try:
        linear = os.environ.get(LINEAR, "0")
        if linear not in ("0", "1"):
            raise ValueError(f"{LINEAR} must be 0 or 1, got {linear!r}")
        _LOGGER.warning(
            "maxrl_fast registered with verl: algorithm.adv_estimator=%s", ", ".join(register())
        )
        if linear == "1":
            use_fused_linear()
            _LOGGER.warning(
                "maxrl_fast computes the log-probs of verl's fused output layer (backend torch)"
            )
    except Exception:
        _LOGGER.exception("maxrl_fast is not registered with verl")
        raise


_load()
