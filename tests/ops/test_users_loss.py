import math
from functools import partial

import pytest
import torch

from maxrl_fast.algorithms.losses import find_loss
from maxrl_fast.algorithms.options import REQUIRED, Share
from maxrl_fast.ops import (
    LOSSES,
    linear_policy_gradient_loss,
    policy_gradient_loss,
    token_logprobs,
    token_loss,
)
from tests.ops.loss_definitions import HOW, T, V, computed, example
from tests.tables import table


def ppo(t, *, clip_low, clip_high):
    """As the fused one, in words.

    More of it.
    """
    return torch.maximum(
        -t.advantages * t.ratio, -t.advantages * t.ratio.clamp(1 - clip_low, 1 + clip_high)
    )


def test_options_and_formula_come_from_the_signature():
    def mine(t, *, share: Share, clip_high, tau: float = 2.0, on: bool = True):
        """-A logp,
        as ever."""
        return -share * tau * t.advantages * t.logprobs

    row = find_loss(mine)
    assert (row.name, row.formula, row.clips) == ("mine", "-A logp, as ever", False)
    assert {key: option.default for key, option in row.options.items()} == {
        "share": REQUIRED,
        "tau": 2.0,
    }
    assert find_loss(mine) is row
    assert find_loss(ppo).clips
    assert find_loss(ppo).formula == "As the fused one, in words"
    e = example() | {"loss": mine}
    one, two = (
        policy_gradient_loss(**e, loss_options={"share": 0.5} | given)[0]
        for given in ({}, {"tau": 4})
    )
    assert two.item() == pytest.approx(2 * one.item())
    with pytest.raises(ValueError, match="loss mine needs share, a number above 0 and at most 1"):
        policy_gradient_loss(**e)


class Callable:
    """Not a function, and without a name."""

    def __call__(self, t):
        return -t.advantages * t.logprobs


def test_any_callable_is_a_loss_with_the_same_terms_as_those_by_name():
    e = example() | {"kl_coef": 0.1, "entropy_coef": 0.05, "clip_high": 0.1}
    reinforce = partial(lambda t, x: -x * t.advantages * t.logprobs, x=1)
    for own, name in ((Callable(), "reinforce"), (reinforce, "reinforce"), (ppo, "ppo")):
        actual, expected = (computed("kernel", **e, loss=loss) for loss in (own, name))
        torch.testing.assert_close(actual[:2], expected[:2], rtol=1e-11, atol=1e-13)
        for key in ("tokens", "dropped_tokens", "ratio", "kl", "entropy", "logprob_diff"):
            assert actual[2][key].item() == pytest.approx(expected[2][key].item(), rel=1e-12)


def has_no_gradient(t):
    return -t.advantages * t.ratio.detach()


@pytest.mark.parametrize(
    ("loss", "message"),
    table(r"""
    lambda t: t.logprobs.sum() | must return torch.float64 \[T\] = \[22\], got torch.float64 of
      shape \(\)
    lambda t: 1.0 | must return torch.float64 \[T\] = \[22\], got float
    has_no_gradient | has_no_gradient must have a gradient in the logprobs or the entropy .*, got
      none
    lambda t, u: t.logprobs | after Tokens must be keyword-only numbers, got u
    lambda *, tau=1.0: None | must take Tokens as its first parameter
    """),
)
def test_functions_that_are_no_loss_are_refused(loss, message):
    e = example()
    hidden, weight = e.pop("logits").requires_grad_(), torch.eye(V).double()
    with pytest.raises(ValueError, match=message):
        policy_gradient_loss(hidden, **e, loss=eval(loss))
    with pytest.raises(ValueError, match=message):
        linear_policy_gradient_loss(hidden, weight, **e, loss=eval(loss))


@pytest.mark.parametrize("how", HOW)
def test_a_loss_that_is_not_finite_is_refused_for_tokens_that_are_not_masked(how):
    """Where a policy has become NaN, that is not the function's doing: the loss is NaN, as the
    losses by name are.
    """

    def mine(t):
        return -t.advantages * t.ratio / (t.advantages != 5) + 0 * t.old_logprobs

    e = example() | {"advantages": torch.ones(T).double(), "loss": mine}
    e["advantages"][4] = 5 / e["importance_weights"][2]
    with pytest.raises(ValueError, match="loss mine must be finite, got -inf at token 4"):
        computed(how, **e)
    e["mask"][4] = False
    loss, gradient, _ = computed(how, **e)
    assert loss.isfinite()
    assert gradient.isfinite().all()
    e["old_logprobs"][7] = math.nan
    with pytest.raises(ValueError, match="loss mine must be finite, got nan at token 7"):
        computed(how, **e)
    e["old_logprobs"][7] = -1
    e["logits"][7] = math.nan
    assert computed(how, **e)[0].isnan()


def test_what_a_function_sees():
    """Masked tokens are 0 and the ratio is limited; only logprobs and entropy have a gradient."""
    e, seen = example(), []
    e["old_logprobs"][0] = -100
    e["logits"].requires_grad_()

    def mine(t):
        seen.append(t)
        return -t.advantages * t.ratio

    policy_gradient_loss(**e, loss=mine)
    t, mask, lengths = seen[-1], e["mask"], e["cu_seqlens"].diff()
    logp, entropy = token_logprobs(e["logits"], e["targets"], temperature=e["temperature"])
    factors = (e["advantages"] * e["importance_weights"]).repeat_interleave(lengths)
    for actual, expected, has_gradient in (
        (t.logprobs, logp, True),
        (t.entropy, entropy, True),
        (t.old_logprobs, e["old_logprobs"], False),
        (t.ref_logprobs, e["ref_logprobs"], False),
        (t.advantages, factors, False),
    ):
        assert (actual.dtype, actual.requires_grad) == (torch.float64, has_gradient)
        torch.testing.assert_close(actual, torch.where(mask, expected, 0.0))
    assert torch.equal(t.mask, mask)
    assert torch.equal(t.cu_seqlens, e["cu_seqlens"])
    assert t.ratio[0].item() == pytest.approx(math.exp(20))


@pytest.mark.usefixtures("losses_as_before")
def test_a_function_may_ask_for_logits_and_for_statistics():
    """The logits with a gradient, of some tokens at a time; the statistics of all of them first."""
    e, seen = example(), []

    def counts(t, share):
        assert not t.logprobs.requires_grad
        return (t.entropy > t.entropy[t.mask].mean()).double() * share + t.sequence_sum(t.logprobs)

    @token_loss(source="a test", statistics=counts, all_tokens=False)
    def mine(t, logits, *, share: float = 0.5):
        seen.append(len(logits))
        top = logits.log_softmax(-1).amax(-1)
        return -t.advantages * t.statistics * (t.ratio + share * top + 0 * t.targets)

    results = [computed(how, **e, loss=mine, loss_options={"share": 0.3}) for how in HOW]
    assert seen[:2] == [T, T]
    assert max(seen[2:]) < T
    for value, gradient, _ in results:
        torch.testing.assert_close(value, results[0][0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(gradient, results[0][1], rtol=1e-9, atol=1e-12)
    z = e["logits"].clone().requires_grad_()
    log_p = torch.log_softmax(z / 0.7, -1)
    logp, mask = log_p.gather(1, e["targets"][:, None])[:, 0], e["mask"]
    entropy, lengths = -(log_p.exp() * log_p).sum(-1).detach(), e["cu_seqlens"].diff()
    sums = torch.stack([x.sum() for x in torch.where(mask, logp, 0).split(lengths.tolist())])
    found = 0.3 * (entropy > entropy[mask].mean()).double() + sums.detach().repeat_interleave(
        lengths
    )
    a = (e["advantages"] * e["importance_weights"]).repeat_interleave(lengths)
    per_token = -a * found * ((logp - e["old_logprobs"]).exp() + 0.3 * log_p.amax(-1))
    expected = per_token[mask].sum() / mask.sum()
    torch.testing.assert_close(results[0][0], expected.detach(), rtol=1e-10, atol=1e-12)
    (gradient,) = torch.autograd.grad(expected, z)
    torch.testing.assert_close(results[0][1], gradient, rtol=1e-9, atol=1e-12)


@pytest.fixture
def losses_as_before():
    before = dict(LOSSES)
    yield
    LOSSES.clear()
    LOSSES.update(before)


@pytest.mark.usefixtures("losses_as_before")
def test_a_registered_function_has_a_name():
    def mine(t, *, tau: float = 1.0):
        """-tau A rho."""
        return -tau * t.advantages * t.ratio

    assert token_loss(source="nobody 2026", weight="rho")(mine) is mine
    row, e = LOSSES["mine"], example()
    assert (row.formula, row.source, row.weight) == ("-tau A rho", "nobody 2026", "rho")
    assert not row.fused
    by_name, by_function = (
        policy_gradient_loss(**e, loss=loss, loss_options={"tau": 3})[0] for loss in ("mine", mine)
    )
    assert by_name.item() == by_function.item()
    token_loss(source="the same module may register it again, as importlib.reload does")(mine)
    assert LOSSES["mine"].source != row.source
    message = r"there is a loss ppo already, in maxrl_fast\.algorithms\.losses:"
    with pytest.raises(ValueError, match=message):
        token_loss(source="")(ppo)
    assert LOSSES["ppo"].function is not ppo
