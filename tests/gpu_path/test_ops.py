import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.ops import LOSSES
from maxrl_fast.ops.loss_kernel import AGGREGATIONS
from tests.gpu_path.pretend import GPU

T, S, V = 24, 4, 32


@pytest.fixture
def tokens(gpu):
    return {
        "targets": gpu.put(torch.arange(T) % V),
        "advantages": gpu.put(torch.arange(1.0, S + 1)),
        "cu_seqlens": gpu.put(torch.arange(S + 1) * (T // S)),
    }


def logits(gpu):
    with gpu:
        return torch.empty(T, V, dtype=torch.bfloat16, device=GPU, requires_grad=True)


@pytest.mark.parametrize(("place", "loss"), [*enumerate(LOSSES)])
def test_a_loss(gpu, tokens, loss, place):
    aggregation = LOSSES[loss].aggregation or AGGREGATIONS[place % len(AGGREGATIONS)]
    values, x = gpu.put(torch.arange(float(T))), logits(gpu)
    options = dict.fromkeys(("old_logprobs", "ref_logprobs", "importance_weights"), values)
    options |= {
        **{"kl_coef": 0.1, "entropy_coef": 0.1},
        "mask": gpu.put(torch.arange(T) % 3 > 0),
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
