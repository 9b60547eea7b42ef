"""The estimators inside the real SkyRL, in its own environment with the installed wheel: `make
test-integrations`."""

import typing

import numpy as np
import pytest
import torch

import maxrl_fast
from maxrl_fast.integrations.rollouts import names
from tests.integrations import uneven

pytestmark = pytest.mark.integrations


@pytest.fixture(scope="module")
def skyrl():
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict  # SkyRL 0.3.0 needs Python 3.12 without this
    from maxrl_fast.integrations import skyrl

    return skyrl


def compute(batch, estimator, index=None):
    from skyrl.backends.skyrl_train.utils.ppo_utils import compute_advantages_and_returns

    index = batch.prompts if index is None else index
    return compute_advantages_and_returns(
        batch.token_level_rewards, batch.mask, index, estimator, config=None
    )


def test_the_installed_package_is_tested():
    assert "site-packages" in maxrl_fast.__file__


# every estimator: test_rollouts.py
@pytest.mark.parametrize("name", ["maxpo", "maxrl", "opo", "noisy_verifier_forward"])
def test_skyrl_computes_the_estimators(skyrl, name):
    options = uneven.options_of(name)
    skyrl.register(name, **options)
    batch = uneven.rollouts(binary=uneven.needs_binary(name))
    advantages, returns = compute(batch, f"maxrl_fast/{name}")
    expected = batch.expected(name, **options)
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(advantages, expected[:, None] * batch.mask, rtol=1e-5, atol=1e-6)
    assert torch.equal(returns, advantages)
    index = np.array([str(key) for key in batch.prompts])
    assert torch.equal(compute(batch, f"maxrl_fast/{name}", index)[0], advantages)


def test_importing_registers_every_estimator_and_options_are_given_by_register(skyrl):
    from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry as Registry

    assert {f"maxrl_fast/{name}" for name in names()} <= set(Registry.list_available())
    batch = uneven.rollouts(binary=False)
    skyrl.register("maxpo")
    with pytest.raises(ValueError, match="maxpo needs k"):
        compute(batch, "maxrl_fast/maxpo")
    for k in (2, 4):
        skyrl.register("maxpo", k=k)
        expected = batch.expected("maxpo", k=k)
        torch.testing.assert_close(
            compute(batch, "maxrl_fast/maxpo")[0], expected[:, None] * batch.mask
        )
    with pytest.raises(ValueError, match=r"the estimator must be one of maxpo, .*, got 'self'"):
        skyrl.register("self")


def test_rays_workers_have_the_estimators_of_the_driver(skyrl):
    import ray
    from skyrl.backends.skyrl_train.utils.ppo_utils import sync_registries

    skyrl.register("maxpo", k=4)
    batch = uneven.rollouts(binary=False)
    expected = compute(batch, "maxrl_fast/maxpo")[0]
    rewards, mask, prompts = batch.token_level_rewards, batch.mask, batch.prompts

    @ray.remote
    def far():
        import typing

        import typing_extensions

        typing.TypedDict = typing_extensions.TypedDict
        from skyrl.backends.skyrl_train.utils import ppo_utils

        given = rewards, mask, prompts, "maxrl_fast/maxpo"
        return [ppo_utils.compute_advantages_and_returns(*given, config=None)[0] for _ in "12"]

    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        sync_registries()
        for advantages in ray.get(far.remote(), timeout=240):
            assert torch.equal(advantages, expected)
    finally:
        ray.shutdown()
