"""in_place writes the gradient over the logits, and raises an error if another operation needs
them."""

import pytest
import torch

from maxrl_fast.ops import policy_gradient_loss

T, H, V = 12, 8, 50
GENERATOR = torch.Generator().manual_seed(0)
HIDDEN, WEIGHT = torch.randn(T, H, generator=GENERATOR), torch.randn(V, H, generator=GENERATOR)
BATCH = (torch.arange(T), torch.tensor([1.0, -2.0]), torch.tensor([0, 5, 12]))


def loss_of(logits, in_place=True, loss="ppo", **options):
    return policy_gradient_loss(logits, *BATCH, loss=loss, in_place=in_place, **options)[0]


def computed_logits():
    return HIDDEN @ WEIGHT.clone().requires_grad_().T


def view(logits):
    """Return the logits as a padded batch, and a view of that."""
    padded = logits.view(3, 4, V)
    return padded, padded.view(T, V)


def padded_used_afterwards(logits, **options):
    padded, rows = view(logits)
    return loss_of(rows, **options) + padded.sum()


@pytest.mark.parametrize(
    "use",
    [lambda z, **o: loss_of(view(z)[1], **o), lambda z, **o: z.sum() + loss_of(z, **o)],
    ids=["a view of the logits", "an earlier use that saved nothing"],
)
def test_uses_of_the_logits_that_are_allowed(use):
    gradients = []
    for in_place in (True, False):
        weight = WEIGHT.clone().requires_grad_()
        gradients += torch.autograd.grad(use(HIDDEN @ weight.T, in_place=in_place), weight)
    torch.testing.assert_close(*gradients)


def changed_afterwards(logits, **options):
    loss = loss_of(logits, **options)
    logits.detach().zero_()
    return loss


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda z, **o: loss_of(z, **o) + z.logsumexp(-1).sum(), "the logits were used after"),
        (lambda z, **o: loss_of(z, **o) + loss_of(z, False, **o), "the logits were used after"),
        (lambda z, **o: loss_of(z, **o) + loss_of(z, **o), "the logits were used after"),
        (padded_used_afterwards, "the logits were used after"),
        (lambda z, **o: z.square().sum() + loss_of(z, **o), "modified by an inplace operation"),
        (changed_afterwards, "the logits were changed after"),
    ],
)
def test_other_uses_of_the_logits_are_refused(use, message):
    value = use(computed_logits())
    with pytest.raises(RuntimeError, match=message):
        value.backward()


def test_logits_that_cannot_be_overwritten_are_refused():
    """The fuzz tests have their layouts."""
    leaf = torch.randn(T, V, requires_grad=True)
    shared = (leaf * 1).flatten().as_strided((T, V), (1, 1))
    for logits, message in (
        (leaf.view(T, V), "logits that were computed, got a leaf"),
        (shared, "logits whose rows do not share memory"),
    ):
        with pytest.raises(ValueError, match=f"in_place needs {message}"):
            loss_of(logits)
    loss = loss_of(computed_logits())
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward ran already"):
        loss.backward()


def test_without_a_gradient_the_logits_are_unchanged():
    logits = HIDDEN @ WEIGHT.T
    before = logits.clone()
    loss_of(logits)
    with torch.no_grad():
        loss_of(logits.requires_grad_() * 1)
    assert torch.equal(logits, before)
