"""verl: `algorithm.adv_estimator=maxrl_fast/NAME`, with options like `+algorithm.maxrl_fast.k=4`,
in every process that imports verl, through the entry point `verl.plugins`. verl logs a plug-in's
exception only at DEBUG, so this logs."""

import functools
import logging
from typing import Any

from torch import Tensor

_LOGGER = logging.getLogger(__name__)


def group_advantage(
    name: str,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Any = None,
    config: Any = None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
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


def _load() -> None:
    try:
        _LOGGER.warning(
            "maxrl_fast registered with verl: algorithm.adv_estimator=%s", ", ".join(register())
        )
    except Exception:
        _LOGGER.exception("maxrl_fast is not registered with verl")
        raise


_load()
