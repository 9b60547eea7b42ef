import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
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


def test_the_forward_mode_and_torch_func_are_refused(case):
    _, function, x = case
    ones = torch.ones_like(x)
    for requires_grad in (False, True):
        dual = x.clone().requires_grad_(requires_grad)
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward mode"):
            function(forward_ad.make_dual(dual, ones))
    for transform in (torch.func.grad, torch.func.hessian, torch.func.vmap):
        # by PyTorch, or before it by a check of shapes or values, which a batch of inputs hides
        with pytest.raises((RuntimeError, ValueError), match=r"."):
            transform(function)(x)


@pytest.mark.parametrize("name", [name for name in CASES if name != "attention"])
def test_compiled_code_breaks_its_graph_at_a_loss_and_runs(name):
    _, function, x = CASES[name]

    def step(x):
        return function(2 * x) + 1

    results = []
    for run in (torch.compile(step, backend="aot_eager"), step):
        leaf = x.clone().requires_grad_()
        loss = run(leaf)
        results.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
    torch.testing.assert_close(*results, rtol=1e-12, atol=0)
    assert results[0][1].abs().max() > 0


def test_tensors_without_memory_are_refused():
    with FakeTensorMode(), pytest.raises((ValueError, RuntimeError), match=r"memory|pointer|data"):
        ops.token_logprobs(torch.zeros(T, V), torch.zeros(T, dtype=torch.int64))
