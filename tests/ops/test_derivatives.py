"""Derivatives of every differentiable op: the first in reverse mode is right, the others are errors
and never zeros.
"""

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from maxrl_fast import ops
from maxrl_fast.model.attention import Forest, tree_attention

T, V, H = 6, 5, 3
GENERATOR = torch.Generator().manual_seed(0)
LOGITS, HIDDEN, WEIGHT, OLD = (
    torch.randn(shape, generator=GENERATOR, dtype=torch.float64)
    for shape in [(T, V), (T, H), (V, H), (T,)]
)
TARGETS = torch.randint(0, V, (T,), generator=GENERATOR)
BOUNDS, ADVANTAGES = torch.tensor([0, 2, T]), torch.tensor([1.0, -0.5])
FOREST = Forest(torch.tensor([2, 1, 1]), torch.tensor([-1, 0, 0]), torch.device("cpu"))


def loss(logits, **options):
    return ops.policy_gradient_loss(
        logits, TARGETS, ADVANTAGES, BOUNDS, old_logprobs=OLD, **options
    )[0]


def linear_loss(hidden, weight):
    return ops.linear_policy_gradient_loss(
        hidden, weight, TARGETS, ADVANTAGES, BOUNDS, old_logprobs=OLD
    )[0]


def divergence(hidden, weight):
    return ops.linear_divergence(hidden, weight, HIDDEN.flip(0), WEIGHT, "jsd")[0]


# The name in the error, a function of one tensor that returns a scalar, and the tensor.
CASES = {
    "policy_gradient_loss": ("policy_gradient_loss", loss, LOGITS),
    "in place": ("policy_gradient_loss", lambda x: loss(x * 1, in_place=True), LOGITS),
    "token_logprobs": (
        "token_logprobs",
        lambda x: ops.token_logprobs(x, TARGETS)[0].exp().sum(),
        LOGITS,
    ),
    "entropy": ("token_logprobs", lambda x: ops.token_logprobs(x, TARGETS)[1].sum(), LOGITS),
    "hidden": ("linear_policy_gradient_loss", lambda x: linear_loss(x, WEIGHT), HIDDEN),
    "weight": ("linear_policy_gradient_loss", lambda x: linear_loss(HIDDEN, x), WEIGHT),
    "linear logprobs": (
        "linear_token_logprobs",
        lambda x: ops.linear_token_logprobs(HIDDEN, x, TARGETS)[0].exp().sum(),
        WEIGHT,
    ),
    "divergence, hidden": ("linear_divergence", lambda x: divergence(x, WEIGHT), HIDDEN),
    "divergence, weight": ("linear_divergence", lambda x: divergence(HIDDEN, x), WEIGHT),
    "log_ratio_reward": (
        "log_ratio_reward",
        lambda x: ops.log_ratio_reward(x, OLD, BOUNDS).square().sum(),
        OLD * 2,
    ),
    "attention": (
        "tree_attention",
        lambda x: tree_attention(x, x, x, FOREST).square().sum(),
        LOGITS[:4, :4].reshape(4, 1, 4),
    ),
}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def test_the_first_derivative_in_reverse_mode(case):
    _, function, x = case
    (expected,) = torch.autograd.grad(function(y := x.clone().requires_grad_()), y)
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    difference = (function(x + 1e-6 * direction) - function(x - 1e-6 * direction)) / 2e-6
    assert (expected * direction).sum().item() == pytest.approx(
        difference.item(), rel=1e-6, abs=1e-9
    )
    for use_reentrant in (False, True):
        y = x.clone().requires_grad_()
        checkpoint(function, y, use_reentrant=use_reentrant).backward()
        assert torch.equal(y.grad, expected)


def test_a_second_derivative_is_refused(case):
    name, function, x = case
    message = rf"^{name} can be differentiated once only, got create_graph=True"
    y = x.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=message):
        # a gradient penalty would lack a term
        torch.autograd.grad(function(y), y, create_graph=True)
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.functional.hvp(function, x, torch.ones_like(x))


def test_the_forward_mode_is_refused(case):
    name, function, x = case
    message, ones = rf"^{name} can be differentiated in reverse mode only", torch.ones_like(x)
    with pytest.raises(RuntimeError, match=message):
        torch.func.jvp(function, (x,), (ones,))
    for requires_grad in (False, True):
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match=message):
            function(forward_ad.make_dual(x.clone().requires_grad_(requires_grad), ones))


def test_torch_func_is_refused(case):
    name, function, x = case
    message = rf"^{name} can be differentiated (by backward|in reverse mode)"
    for transform in (torch.func.grad, torch.func.hessian):
        with pytest.raises(RuntimeError, match=message):
            transform(function)(x)


@pytest.mark.parametrize("name", [name for name in CASES if name != "attention"])
def test_vmap_is_right_and_differentiable(name):
    """Of inputs, and of factors, as torch.autograd.functional.jacobian(vectorize=True) has them."""
    _, function, x = CASES[name]
    xs = torch.stack([x, 2 * x, -x]).requires_grad_()
    values, expected = torch.func.vmap(function)(xs), torch.stack([function(row) for row in xs])
    torch.testing.assert_close(values, expected)
    slopes = (torch.autograd.grad(y.sum(), xs, retain_graph=True)[0] for y in (values, expected))
    torch.testing.assert_close(*slopes)
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(function(x).sum(), x)
    factors = torch.tensor([1.0, -2.0], dtype=x.dtype)
    (both,) = torch.autograd.grad(function(x).sum(), x, factors, is_grads_batched=True)
    torch.testing.assert_close(both, torch.stack([slope, -2 * slope]))
