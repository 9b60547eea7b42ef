"""The plug-in inside the real verl, in its own environment with the installed wheel: `make
test-integrations`.
"""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import maxrl_fast
from maxrl_fast import ops
from maxrl_fast.integrations.rollouts import names
from tests.integrations import uneven

pytestmark = pytest.mark.integrations


def run(code, **environment):
    """Return (standard output, standard error) of a new interpreter."""
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
    """Return verl's own configuration, as its command line makes it."""
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


@pytest.mark.parametrize("through", [compute, compute_v1])
@pytest.mark.parametrize("name", names())
def test_verl_computes_every_estimator(name, through):
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


def test_verls_remax_and_gdpo_agree():
    from verl.trainer.ppo import core_algos

    batch = uneven.rollouts(binary=False)
    ids = torch.tensor([batch.prompts.index(key) for key in batch.prompts])
    greedy = torch.arange(len(ids)).float() / 7
    last = torch.zeros_like(batch.token_level_rewards)  # an outcome reward, at the last token
    ends = (batch.mask * torch.arange(1, batch.mask.shape[1] + 1)).argmax(1)
    last[torch.arange(len(ids)), ends] = batch.rewards
    theirs, _ = core_algos.compute_remax_outcome_advantage(last, greedy, batch.mask)
    ours = ops.group_advantage(batch.rewards, "remax", group_ids=ids, greedy_rewards=greedy)
    torch.testing.assert_close(
        theirs[:, 0][batch.mask[:, 0] == 1], ours[batch.mask[:, 0] == 1], rtol=1e-5, atol=1e-6
    )

    # verl standardises over tokens: responses of one token are rollouts.
    parts = torch.stack([batch.rewards, batch.rewards.flip(0) * 5])
    one, uid = torch.ones(len(ids), 1), np.array([str(int(i)) for i in ids], dtype=object)
    normalised = [
        core_algos.compute_grpo_outcome_advantage(part[:, None], one, uid)[0] for part in parts
    ]
    alone = torch.bincount(ids)[ids] == 1  # verl's groups of one have the advantage r / (1 + eps)
    total = torch.where(alone[:, None], 0.0, normalised[0] + 0.5 * normalised[1])
    theirs = core_algos.verl_F.masked_whiten(total, one)[:, 0]
    ours = ops.group_advantage(
        parts.sum(0), "gdpo", group_ids=ids, reward_parts=parts, reward_weights=[1, 0.5], eps=1e-6
    )
    torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-4)


def test_verls_dapo_reward_manager_has_our_length_penalty():
    from verl.workers.reward_manager.dapo import DAPORewardManager

    from maxrl_fast.training.collect import LengthPenalty

    class Tokenizer:
        eos_token = "."

        def decode(self, tokens, skip_special_tokens=True):
            return "x" * len(tokens)

    buffer = SimpleNamespace(enable=True, len=4, penalty_factor=0.5, log=False)
    manager = DAPORewardManager(
        Tokenizer(), 0, lambda **_: 1.0, max_resp_len=10, overlong_buffer_cfg=buffer
    )
    lengths = torch.arange(1, 11)
    mask = torch.cat([torch.ones(10, 3), (torch.arange(10) < lengths[:, None])], 1).long()
    from verl import DataProto

    tensors = {
        "prompts": torch.ones(10, 3).long(),
        "responses": torch.ones(10, 10).long(),
        "attention_mask": mask,
    }
    others = {
        "reward_model": np.array([{"ground_truth": "x"}] * 10),
        "data_source": np.array(["here"] * 10),
    }
    rewards = manager(DataProto.from_dict(tensors=tensors, non_tensors=others)).sum(-1)
    torch.testing.assert_close(rewards, 1 + LengthPenalty(10, 4, 0.5)(lengths))


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


def test_a_nan_reward_is_left_out_of_its_group():
    batch = uneven.rollouts()
    batch.token_level_rewards[5, 0] = torch.nan
    with pytest.warns(RuntimeWarning, match="1 of 27 rewards are NaN"):
        got = compute(batch, "maxrl_fast/maxrl", configuration().algorithm)["advantages"]
    kept = [i for i in range(27) if i != 5]
    expected = uneven.one_group_at_a_time(
        "maxrl", batch.rewards[kept], [batch.prompts[i] for i in kept], None
    )
    torch.testing.assert_close(got[kept], expected[:, None] * batch.mask[kept])
    assert not got[5].any()


def test_verls_trainer_computes_the_advantages_of_the_batch_in_its_queue():
    """Run this stage of verl's training step; its whole step needs GPUs (docs/integrations.md)."""
    import ray
    import transfer_queue
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    one_store = "transfer_queue.backend.SimpleStorage.num_data_storage_units=1"
    config = configuration(
        "algorithm.adv_estimator=maxrl_fast/maxpo", "+algorithm.maxrl_fast.k=3", one_store
    )
    config.transfer_queue.enable = True
    batch = uneven.rollouts(binary=False)
    # responses are not padded there
    ends = [max(2, int((mask * torch.arange(1, len(mask) + 1)).max())) for mask in batch.mask]
    per_rollout = list(zip(batch.prompts, batch.mask, batch.token_level_rewards, ends, strict=True))
    fields = [
        {"uid": str(key), "response_mask": m[:end], "rm_scores": r[:end]}
        for key, m, r, end in per_rollout
    ]
    keys, tags = (
        [f"{batch.prompts.index(key)}_{i}_0" for i, key in enumerate(batch.prompts)],
        [{} for _ in fields],
    )
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        transfer_queue.init(config.transfer_queue)
        transfer_queue.kv_batch_put(
            keys=keys, fields=list_of_dict_to_tensordict(fields), tags=tags, partition_id="train"
        )
        meta = transfer_queue.KVBatchMeta(partition_id="train", keys=keys, tags=tags)
        PPOTrainer._compute_advantage(SimpleNamespace(config=config), meta, {})
        got = transfer_queue.kv_batch_get(
            keys=keys, partition_id="train", select_fields=["advantages"]
        )["advantages"].unbind()
    finally:
        transfer_queue.close()
        ray.shutdown()
    expected = batch.expected("maxpo", k=3)
    assert expected.abs().max() > 0.1
    for actual, advantage, (_, mask, _, end) in zip(got, expected, per_rollout, strict=True):
        torch.testing.assert_close(actual, advantage * mask[:end], rtol=1e-5, atol=1e-6)


def logprobs_of_verls_forward(dtype=None):
    """Return log-probs, entropies and the gradient of the output matrix of a tiny model with verl's
    fused kernels.
    """
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from verl.models.transformers.monkey_patch import apply_monkey_patch

    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=37, num_key_value_heads=1, tie_word_embeddings=False, **sizes)
    )
    apply_monkey_patch(
        model, use_remove_padding=False, use_fused_kernels=True, fused_kernels_backend="torch"
    )
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
