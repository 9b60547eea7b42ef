"""in_place gives the same numbers, takes no more memory, and raises an error if another operation needs the logits."""

import inspect

import pytest
import torch

from maxrl_fast.ops import LOSSES, policy_gradient_loss, token_logprobs
from maxrl_fast.ops.token_batch import prepare
from maxrl_fast.ops.token_loss_kernel import loss_arguments

T, H, V = 12, 8, 50
GENERATOR = torch.Generator().manual_seed(0)
HIDDEN, WEIGHT = torch.randn(T, H, generator=GENERATOR), torch.randn(V, H, generator=GENERATOR)
BATCH = (torch.arange(T), torch.tensor([1.0, -2.0]), torch.tensor([0, 5, 12]))


OPTIONS = {"loss": "ppo"}


def loss_of(logits, **options):
    return policy_gradient_loss(logits, *BATCH, **OPTIONS | options)[0]


def computed_logits():
    return HIDDEN @ WEIGHT.clone().requires_grad_().T


@pytest.mark.parametrize("loss", [name for name, row in LOSSES.items() if row.rows is None])
@pytest.mark.parametrize("scale", [1.0, 2.5])
def test_the_gradient_replaces_the_logits(loss, scale):
    logp, _ = token_logprobs(HIDDEN @ WEIGHT.T, BATCH[0])
    old = logp + 0.2 * torch.randn(T, generator=torch.Generator().manual_seed(1))
    options = {"loss": loss, "old_logprobs": old, "clip_high": 9.0}
    options["aggregation"] = "seq_mean_token_sum"
    results = []
    exact = {"rtol": 0, "atol": 0} if LOSSES[loss].fused else {"rtol": 1e-4, "atol": 1e-5}  # a function's is scaled once more
    for in_place in (False, True):
        torch.manual_seed(0)
        weight = WEIGHT.clone().requires_grad_()
        logits = HIDDEN @ weight.T
        loss_value = loss_of(logits, **options, in_place=in_place)
        (scale * loss_value).backward()
        results.append((loss_value.detach(), weight.grad))
    assert results[0][1].abs().max() > 1e-3
    torch.testing.assert_close(results[1], results[0], **exact)
    logits = computed_logits()
    kept = logits.detach()
    torch.manual_seed(0)
    value = loss_of(logits, **options, in_place=True)
    torch.manual_seed(0)
    expected = HIDDEN.matmul(WEIGHT.T).requires_grad_()
    torch.testing.assert_close(kept, torch.autograd.grad(loss_of(expected, **options), expected)[0], **exact)
    assert value.requires_grad


def test_a_view_of_the_logits_may_be_given():
    weight = WEIGHT.clone().requires_grad_()
    padded = (HIDDEN @ weight.T).view(3, 4, V)
    loss_of(padded.view(T, V), in_place=True).backward()
    (expected,) = torch.autograd.grad(loss_of(HIDDEN @ weight.T), weight)
    torch.testing.assert_close(weight.grad, expected, rtol=0, atol=0)


def later_use(logits):
    return loss_of(logits, in_place=True) + logits.logsumexp(-1).sum()


def another_loss(logits):
    return loss_of(logits, in_place=True) + loss_of(logits)


def twice_in_place(logits):
    return loss_of(logits, in_place=True) + loss_of(logits, in_place=True)


def later_use_of_the_base_tensor(logits):
    padded = logits.view(3, 4, V)
    return loss_of(padded.view(T, V), in_place=True) + padded.sum()


def earlier_use_that_saved_the_logits(logits):
    return logits.square().sum() + loss_of(logits, in_place=True)


def logits_changed_afterwards(logits):
    loss = loss_of(logits, in_place=True)
    logits.detach().zero_()
    return loss


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (later_use, "the logits were used after"),
        (another_loss, "the logits were used after"),
        (twice_in_place, "the logits were used after"),
        (later_use_of_the_base_tensor, "the logits were used after"),
        (earlier_use_that_saved_the_logits, "modified by an inplace operation"),
        (logits_changed_afterwards, "the logits were changed after"),
    ],
)
@pytest.mark.parametrize("loss", ["ppo", "sapo"])
def test_other_uses_of_the_logits_are_refused(use, message, loss, monkeypatch):
    monkeypatch.setitem(OPTIONS, "loss", loss)
    value = use(computed_logits())
    with pytest.raises(RuntimeError, match=message):
        value.backward()


def test_an_earlier_use_that_saved_nothing_is_allowed():
    weight = WEIGHT.clone().requires_grad_()
    logits = HIDDEN @ weight.T
    (logits.sum() + loss_of(logits, in_place=True)).backward()
    other = HIDDEN @ weight.T
    (expected,) = torch.autograd.grad(other.sum() + loss_of(other), weight)
    torch.testing.assert_close(weight.grad, expected)


def test_logits_that_cannot_be_overwritten_are_refused():
    with pytest.raises(ValueError, match="in_place needs logits that were computed, got a leaf"):
        loss_of(torch.randn(T, V, requires_grad=True), in_place=True)
    with pytest.raises(ValueError, match="in_place needs logits whose rows are contiguous"):
        loss_of((WEIGHT.clone().requires_grad_() @ HIDDEN.T).T, in_place=True)
    loss = loss_of(computed_logits(), in_place=True)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran already"):
        loss.backward()


def test_without_a_gradient_the_logits_are_unchanged():
    logits = HIDDEN @ WEIGHT.T
    before = logits.clone()
    loss_of(logits, in_place=True)
    assert torch.equal(logits, before)
    with torch.no_grad():
        loss_of(computed_logits(), in_place=True)


def prepared_loss(shape, *rows, **options):
    """Return the TokenBatch and LossTerms of policy_gradient_loss with these options."""
    parameters = inspect.signature(policy_gradient_loss).parameters.values()
    given = {x.name: x.default for x in parameters if x.kind is x.KEYWORD_ONLY and x.name != "in_place"} | options
    return prepare(torch.float32, torch.device("cpu"), shape, *rows, **given)[:2]


def test_operators_pass_opcheck():
    batch, terms = prepared_loss((T, V), *BATCH, old_logprobs=-torch.rand(T), aggregation="seq_mean_token_mean")
    logits, ops = HIDDEN @ WEIGHT.T, torch.ops.maxrl_fast
    arguments = loss_arguments(batch, terms)
    rows = (logits.clone().requires_grad_(), batch.targets, None, 0.7)
    torch.library.opcheck(ops.token_loss.default, (logits.clone().requires_grad_(), *arguments, True))
    torch.library.opcheck(ops.token_loss.default, (logits, *arguments, False))
    torch.library.opcheck(ops.token_loss_.default, (logits.clone(), *arguments))
    torch.library.opcheck(ops.token_logprobs.default, rows)
    slopes = (torch.rand(T), torch.rand(T))
    torch.library.opcheck(ops.token_logprobs_backward.default, (logits, batch.targets, None, 0.7, *slopes))
    torch.library.opcheck(ops.token_logprobs_backward_.default, (logits.clone(), batch.targets, None, 0.7, *slopes))


@pytest.mark.parametrize(
    "options", [{}, {"loss": "gmpo", "loss_options": {"low": 0.1}, "old_logprobs": torch.full((T,), -4.0)}]
)
def test_it_compiles_as_one_graph(options):
    options = {"temperature": 0.5, **options}
    compiled = torch.compile(lambda z: loss_of(2 * z, **options), fullgraph=True, backend="aot_eager")
    logits = (HIDDEN @ WEIGHT.T).requires_grad_()
    eager = loss_of(2 * logits, **options)
    value = compiled(logits)
    assert value.item() == eager.item()
    torch.testing.assert_close(torch.autograd.grad(value, logits), torch.autograd.grad(eager, logits))
