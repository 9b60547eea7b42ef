"""The plug-in inside the real verl, in its own environment with the installed wheel: `make
test-integrations`."""

import os
import subprocess
import sys
from importlib.metadata import entry_points

import numpy as np
import pytest
import torch

import maxrl_fast
from maxrl_fast.integrations.rollouts import names
from tests.integrations import uneven

pytestmark = pytest.mark.integrations


def run(code):
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


REGISTERED = (
    "from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY as r; print(*(n for n in r if "
    "'/' in n))"
)


def test_the_installed_package_is_tested():
    assert "site-packages" in maxrl_fast.__file__
    assert [point.value for point in entry_points(group="verl.plugins")] == [
        "maxrl_fast.integrations.verl"
    ]


def test_importing_verl_registers_every_estimator_and_says_so():
    printed, said = run(REGISTERED)
    assert sorted(printed.split()) == sorted(f"maxrl_fast/{name}" for name in names())
    assert "maxrl_fast registered with verl: algorithm.adv_estimator=" in said
    assert "maxrl_fast/maxpo" in said


def test_an_error_of_the_plug_in_is_said_though_verl_hides_it():
    _, said = run("import sys; sys.modules['maxrl_fast.integrations.rollouts'] = None; import verl")
    assert "maxrl_fast is not registered with verl" in said
    assert "import of maxrl_fast.integrations.rollouts halted" in said


def data_of(batch):
    from verl import DataProto

    uid = np.empty(len(batch.prompts), dtype=object)
    uid[:] = batch.prompts
    tensors = {"token_level_rewards": batch.token_level_rewards, "response_mask": batch.mask}
    return DataProto.from_dict(tensors=tensors, non_tensors={"uid": uid})


def configuration(*overrides):
    import verl.trainer
    from hydra import compose, initialize_config_dir

    with initialize_config_dir(
        config_dir=os.path.join(os.path.dirname(verl.trainer.__file__), "config"), version_base=None
    ):
        return compose("ppo_trainer", list(overrides))


def compute(batch, estimator, config):
    from verl.trainer.ppo.ray_trainer import compute_advantage

    return compute_advantage(data_of(batch), adv_estimator=estimator, config=config).batch


def compute_v1(batch, estimator, config):
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    keys = [f"{prompt}_{i}_0" for i, prompt in enumerate(batch.prompts)]
    return compute_advantage_for_multi_trajectories(
        data_of(batch), keys, estimator, config=config
    ).batch


# every estimator: test_rollouts.py
@pytest.mark.parametrize("through", [compute, compute_v1])
@pytest.mark.parametrize("name", ["maxpo", "maxrl", "opo", "noisy_verifier_forward"])
def test_verl_computes_the_estimators(name, through):
    from omegaconf import OmegaConf

    options = uneven.options_of(name)
    batch = uneven.rollouts(binary=uneven.needs_binary(name))
    got = through(batch, f"maxrl_fast/{name}", OmegaConf.create({"maxrl_fast": options}))
    expected = batch.expected(name, **options)
    assert expected.abs().max() > 0.01
    torch.testing.assert_close(
        got["advantages"], expected[:, None] * batch.mask, rtol=1e-5, atol=1e-6
    )
    assert torch.equal(got["returns"], got["advantages"])


@pytest.mark.parametrize(
    ("ours", "theirs"), [("grpo_verl", "grpo"), ("rloo", "rloo"), ("opo", "opo")]
)
def test_the_same_estimators_of_verl_agree_in_groups_of_two_and_more(ours, theirs):
    batch, config = uneven.rollouts(binary=False), configuration().algorithm
    sizes = torch.tensor([batch.prompts.count(key) for key in batch.prompts])
    a, b = (
        compute(batch, name, config)["advantages"][sizes > 1]
        for name in (f"maxrl_fast/{ours}", theirs)
    )
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_options_come_from_verls_command_line():
    config = configuration(
        "algorithm.adv_estimator=maxrl_fast/maxpo", "+algorithm.maxrl_fast.k=4"
    ).algorithm
    batch = uneven.rollouts(binary=False)
    got = compute(batch, config.adv_estimator, config)["advantages"]
    expected = batch.expected("maxpo", k=4)
    torch.testing.assert_close(got, expected[:, None] * batch.mask)
    with pytest.raises(ValueError, match="maxpo needs k"):
        compute(batch, "maxrl_fast/maxpo", configuration().algorithm)
    with pytest.raises(ValueError, match="rloo does not use k"):
        compute(batch, "maxrl_fast/rloo", config)
