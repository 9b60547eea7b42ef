import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.ops import LOSSES
from maxrl_fast.ops.loss_kernel import AGGREGATIONS
from maxrl_fast.runtime.device import to_device
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


def test_kernels_are_counted_and_views_and_allocations_are_not(gpu):
    x = gpu.put(torch.arange(12.0))
    with gpu.watch():
        y = x.view(3, 4).t()[1:]
        z = torch.empty_like(y)
        z.copy_(y + 1)
    assert gpu.launches == {"add": 1, "copy_": 1}
    assert z.device == GPU
    assert not gpu.waits


READS = {
    "item": lambda x: x[0].item(),
    "list": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "nonzero": lambda x: (x > 2).nonzero(),
    "boolean index": lambda x: x[x > 2],
    "assignment by an index": lambda x: x.index_put_((x > 2,), torch.zeros((), device=GPU)),
    "unique": torch.unique,
    "repeat_interleave": torch.repeat_interleave,
    "data": lambda x: torch.tensor([1, 2], device=GPU),
    "pageable memory": lambda x: torch.arange(4).to(GPU, non_blocking=True),
}


@pytest.mark.parametrize("read", READS)
def test_what_makes_the_host_wait_is_found(gpu, read):
    x = gpu.put(torch.tensor([0, 1, 2, 3]))
    with gpu.watch():
        READS[read](x)
    assert gpu.waits


def test_what_does_not_make_the_host_wait_is_not_found(gpu):
    x = gpu.put(torch.tensor([0, 1, 2, 3]))
    with gpu.watch():
        torch.repeat_interleave(x, x, output_size=6)
        torch.where(x > 1, x, 0).clamp(1, 2)[x] = x
        to_device(GPU, torch.arange(3), torch.arange(4))
        torch.full((3,), 2.0, device=GPU)
    assert not gpu.waits
