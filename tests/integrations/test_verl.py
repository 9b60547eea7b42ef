"""The plug-in inside the real verl, in its own environment with the installed wheel: `make
test-integrations`.
"""

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


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
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
    _, said = run("import verl", MAXRL_FAST_VERL_LINEAR="yes")
    assert "maxrl_fast is not registered with verl" in said
    assert "MAXRL_FAST_VERL_LINEAR must be 0 or 1, got 'yes'" in said


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


def logprobs_of_verls_forward(dtype=None):
    """Return log-probs, entropies and the gradient of the output matrix of a tiny model with verl's
    fused kernels.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from verl.models.transformers.monkey_patch import apply_monkey_patch

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 37}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    model, options = Qwen2ForCausalLM(Qwen2Config(**sizes)), {"fused_kernels_backend": "torch"}
    apply_monkey_patch(model, use_remove_padding=False, use_fused_kernels=True, **options)
    ids = torch.randint(37, (3, 11))
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        out = model(input_ids=ids, temperature=0.7, return_dict=True)
    (out.log_probs.float() + 0.3 * out.entropy.float()).mul(
        torch.linspace(-1, 1, 11)
    ).sum().backward()
    return out.log_probs.detach(), out.entropy.detach().float(), model.lm_head.weight.grad


@pytest.mark.parametrize(("dtype", "tolerance"), [(None, 1e-5), (torch.bfloat16, 0.05)])
def test_the_fused_output_layer_replaces_that_of_verl(monkeypatch, dtype, tolerance):
    from verl.utils.experimental import torch_functional

    from maxrl_fast.integrations import verl as plugin

    theirs = logprobs_of_verls_forward(dtype)
    calls, apply = [], plugin.FusedLinear.apply
    monkeypatch.setattr(
        plugin.FusedLinear, "apply", staticmethod(lambda *a: calls.append(1) or apply(*a))
    )
    monkeypatch.setattr(
        torch_functional, "FusedLinearForPPOFunction", torch_functional.FusedLinearForPPOFunction
    )
    plugin.use_fused_linear()
    ours = logprobs_of_verls_forward(dtype)
    assert calls == [1]
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert (a - b).abs().max() <= tolerance * b.abs().max()
