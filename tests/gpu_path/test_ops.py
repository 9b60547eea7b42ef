"""The operators never wait for the device, whatever their options: checks of values are for tensors
of the host.
"""

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.ops import LOSSES
from maxrl_fast.ops.loss_terms import AGGREGATIONS
from tests.gpu import test_token_loss
from tests.gpu_path.pretend import GPU

T, S, V = 24, 4, 32


@pytest.fixture
def tokens(gpu):
    """The arguments that belong to T tokens in S responses."""
    return {
        "targets": gpu.put(torch.arange(T) % V),
        "advantages": gpu.put(torch.arange(1.0, S + 1)),
        "cu_seqlens": gpu.put(torch.arange(S + 1) * (T // S)),
    }


def logits(gpu):
    with gpu:
        return torch.empty(T, V, dtype=torch.bfloat16, device=GPU, requires_grad=True)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss(gpu, tokens, loss, aggregation):
    aggregation = LOSSES[loss].aggregation or aggregation
    values, x = gpu.put(torch.arange(float(T))), logits(gpu)
    options = {
        "old_logprobs": values,
        "ref_logprobs": values,
        "importance_weights": values,
        "kl_coef": 0.1,
    }
    options |= {
        "mask": gpu.put(torch.arange(T) % 3 > 0),
        "entropy_coef": 0.1,
        "temperature": gpu.put(torch.ones(T)),
    }
    if aggregation == "seq_sum_constant":
        options["denominator"] = gpu.put(torch.tensor(100.0))
    with gpu.watch():
        total, metrics = ops.policy_gradient_loss(
            x, **tokens, loss=loss, aggregation=aggregation, **options
        )
        total.backward()
    # A share of the tokens is a number of tokens, which the host must know.
    assert bool(gpu.waits) == ("share" in LOSSES[loss].options), str(gpu)
    assert x.grad.device == metrics["kl"].device == GPU


def test_log_probs(gpu, tokens):
    x = logits(gpu)
    with gpu.watch():
        logprobs, entropy = ops.token_logprobs(x, tokens["targets"])
        (logprobs.sum() + entropy.sum()).backward()
    assert not gpu.waits, str(gpu)
    assert gpu.launches["token_logprobs"] == gpu.launches["token_logprobs_backward"] == 1


def test_rewards_and_loss_of_pacs(gpu, tokens):
    with gpu:
        logprobs, reference = (torch.empty(T, device=GPU, requires_grad=i == 0) for i in range(2))
    labels, offsets = gpu.put(torch.tensor([0.0, 1.0, 1.0, 0.0])), gpu.put(torch.tensor([0, 1, 4]))
    with gpu.watch():
        proxies = ops.log_ratio_reward(
            logprobs, reference, tokens["cu_seqlens"], mask=gpu.put(torch.ones(T, dtype=torch.bool))
        )
        ops.pacs_loss(proxies, labels, offsets)[0].backward()
    assert not gpu.waits, str(gpu)
    kernels = ("log_ratio_reward", "log_ratio_reward_backward")
    assert [gpu.launches[name] for name in kernels] == [1, 1]
    assert gpu.num_launches <= 120, str(gpu)
    assert logprobs.grad.device == GPU


LAYOUTS = {
    "offsets": {"offsets": torch.tensor([0, 3, 3, 12])},
    "ids in any order": {"group_ids": torch.arange(12) % 5},
    "valid": {"valid": (torch.arange(12) % 4 > 0).view(2, 6)},
}


@pytest.mark.parametrize("estimator", ["maxpo", "maxrl", "grpo", "reinforce_pp", "qae"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_advantages_of_uneven_groups(gpu, layout, estimator):
    """A mask is not read; with offsets or ids their values are, to pad to the largest group."""
    rewards = (torch.arange(12) % 2).float()
    rewards = gpu.put(rewards.view(2, 6) if layout == "valid" else rewards)
    arguments = {name: gpu.put(x) for name, x in LAYOUTS[layout].items()} | (
        {"k": 2} if estimator == "maxpo" else {}
    )
    for _ in range(2):  # the first call makes tables, which are kept
        with gpu.watch():
            advantages = ops.group_advantage(rewards, estimator, **arguments)
    assert advantages.device == GPU
    assert len(gpu.waits) <= (0 if layout == "valid" else 2), str(gpu)


def test_what_must_not_wait_on_a_gpu_does_not(gpu, monkeypatch):
    """The test of tests/gpu that forbids synchronization, which raises there."""
    before = []
    monkeypatch.setattr(test_token_loss, "DEVICE", GPU)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        torch.cuda, "set_sync_debug_mode", lambda mode: before.append(len(gpu.waits))
    )
    with gpu.watch():
        test_token_loss.test_no_operator_waits_for_the_device()
    first, last = before
    assert gpu.waits[first:last] == []
    assert gpu.launches["token_loss"] == 1 + 2 * len(test_token_loss.OPTIONS)
    assert gpu.launches["token_logprobs_backward"] >= 2 * len(test_token_loss.FUNCTIONS)
