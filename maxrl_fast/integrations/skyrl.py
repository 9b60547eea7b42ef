"""SkyRL: `trainer.algorithm.advantage_estimator=maxrl_fast/NAME`, which importing this module
before `ray.init` registers. SkyRL pickles registered functions by reference for its workers, so
maxrl_fast must be installed there too."""

import functools
from typing import Any

from maxrl_fast.integrations.rollouts import advantages_and_returns, names


def register(name: str, **options: Any) -> None:
    from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry

    if name not in names():
        raise ValueError(f"the estimator must be one of {', '.join(names())}, got {name!r:.80}")
    key = f"maxrl_fast/{name}"
    if key in AdvantageEstimatorRegistry.list_available():
        AdvantageEstimatorRegistry.unregister(key)
    AdvantageEstimatorRegistry.register(
        key, functools.partial(advantages_and_returns, name, options)
    )


def _register_all() -> None:
    from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry

    # includes the driver's, with its options, once Ray runs
    known = AdvantageEstimatorRegistry.list_available()
    for name in names():
        if f"maxrl_fast/{name}" not in known:
            register(name)


_register_all()
