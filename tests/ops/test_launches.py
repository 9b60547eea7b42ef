"""How many launches operators take on a GPU, counted on a CPU that is treated as one."""

import importlib

import pytest
import torch
from torch import Tensor

from maxrl_fast import _C, ops
from maxrl_fast.ops import dispatch
from maxrl_fast.ops.logit_chunks import Chunks
from tests.ops.operators import Operators


@pytest.fixture
def launches(monkeypatch):
    """Run CPU kernels in place of CUDA kernels, without the checks of values that only a CPU makes.
    Return a function that runs another and lists its launches: kernels of this package, and
    operators of PyTorch that neither allocate nor give a view."""
    operators = Operators()
    names = []

    def run_kernel(call, name, **arguments):
        names.append(name)
        if name != "scale":  # the tests scale by 1
            getattr(_C, f"{name}_cpu")(**arguments, num_threads=1)

    def of(run):
        operators.calls.clear()
        names.clear()
        with operators:
            run()
        idle = ("maxrl_fast::", "aten::empty", "aten::new_empty", "aten::promote_types")
        others = (call.function for call in operators.calls if not call.function.is_view)
        return names + [
            function.name() for function in others if not function.name().startswith(idle)
        ]

    monkeypatch.setattr(dispatch.KernelLaunch, "_run", run_kernel)
    monkeypatch.setattr(dispatch, "is_gpu", lambda device: True)
    monkeypatch.setattr(_C, "LOSS_WORKSPACE", 64, raising=False)
    for module in ("pacs", "token_batch", "group_advantage"):
        monkeypatch.setattr(
            importlib.import_module(f"maxrl_fast.ops.{module}"),
            "is_host_readable",
            lambda tensor: False,
        )
    return of


@pytest.mark.parametrize("options", [{"estimator": "grpo"}, {"estimator": "maxpo", "k": 2}])
def test_a_group_advantage_is_one_kernel(launches, options):
    rewards = torch.rand(3, 4)
    ops.group_advantage(rewards, **options)  # fills the cache of tables
    assert launches(lambda: ops.group_advantage(rewards, **options)) == ["group_advantage"]


def test_the_metrics_of_a_token_loss_are_few_launches(launches):
    logits = torch.randn(6, 9, requires_grad=True)
    batch = (torch.arange(6), torch.tensor([1.0, -1.0]), torch.tensor([0, 2, 6]))
    names = launches(lambda: ops.policy_gradient_loss(logits, *batch, denominator=6.0))
    assert names[0] == "token_loss"
    others = (
        "aten::_to_copy aten::_to_copy aten::clamp_min aten::div.Tensor aten::full aten::full "
        "aten::index_select aten::repeat_interleave.Tensor aten::sub.Tensor aten::sub.Tensor "
        "aten::zeros"
    ).split()
    assert sorted(names[1:]) == others, sorted(names[1:])


def linear_gradients(**options: object) -> list[Tensor]:
    """Return losses, log-probabilities and gradients from hidden states, at an odd vocabulary and
    odd chunks.
    """
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator).requires_grad_() for n in (30, 71))
    targets = torch.randint(71, (30,), generator=generator)
    batch = (targets, torch.tensor([1.0, 0.0, -2.0]), torch.tensor([0, 9, 14, 30]))
    old = -5 * torch.rand(30, generator=generator)
    loss, metrics = ops.linear_policy_gradient_loss(
        hidden, weight, *batch, old_logprobs=old, chunk_tokens=7, **options
    )
    loss.backward()
    logprobs, entropy = ops.linear_token_logprobs(hidden, weight, targets, chunk_tokens=7)
    of_logprobs = torch.autograd.grad((logprobs + entropy).sum(), (hidden, weight))
    return [
        loss.detach(),
        hidden.grad,
        weight.grad,
        logprobs.detach(),
        entropy.detach(),
        *of_logprobs,
        *metrics.values(),
    ]


def test_rows_of_a_chunk_of_logits_are_aligned(request, monkeypatch):
    options = {"kl_coef": 0.1, "ref_logprobs": torch.full((30,), -4.0)}
    expected = linear_gradients(**options)
    strides, original = [], Chunks.__init__

    def remembered(self, *arguments):
        original(self, *arguments)
        strides.append(self.buffer.stride())

    monkeypatch.setattr(Chunks, "__init__", remembered)
    request.getfixturevalue("launches")  # from here on as on a GPU
    torch.testing.assert_close(linear_gradients(**options), expected, rtol=1e-5, atol=1e-6)
    assert set(strides) == {(128, 1)}  # V = 71
