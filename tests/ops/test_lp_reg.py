"""lp_reg against its definition, written from the authors' code token by token, in float64, and differentiated by autograd."""

import math

import pytest
import torch

from maxrl_fast.ops import lp_reg_proxies, policy_gradient_loss, row_statistics, token_logprobs
from tests.ops.test_losses import computed

LENGTHS = [40, 1, 60, 0, 30]
T, V = sum(LENGTHS), 23
CU_SEQLENS = torch.tensor([0, *LENGTHS]).cumsum(0)
DEFAULTS = {"share": 0.01, "min_p": 0.02, "low": 1.0, "high": 9.0}
OTHER = {"share": 0.5, "min_p": 0.05, "low": 0.3, "high": 0.5}


def example(spread, seed=0, dtype=torch.float64):
    """Return logits of a policy and of the one that has sampled, whose log-ratios are about `spread`, and a batch of tokens."""
    generator = torch.Generator().manual_seed(seed)
    sampler = (2 * torch.randn(T, V, generator=generator, dtype=torch.float64)).to(dtype)
    logits = sampler + (spread * torch.randn(T, V, generator=generator, dtype=torch.float64)).to(dtype)
    targets = torch.multinomial((sampler.double() / 2).softmax(-1), 1, generator=generator)[:, 0]
    advantages = torch.randn(T, generator=generator, dtype=torch.float64).to(dtype)
    advantages[::9] = 0
    batch = {"targets": targets, "advantages": advantages, "advantages_per_token": True, "cu_seqlens": CU_SEQLENS}
    return logits, sampler, batch | {"mask": torch.rand(T, generator=generator) < 0.9}


def proxies_of(sampler, batch, option, temperature=1.0):
    """Return the log-probs of the sampler and the token_statistics, as a trainer computes them."""
    statistics = row_statistics(sampler, batch["targets"], top_k=1, min_p=option["min_p"], temperature=temperature)
    log_proxy = statistics.log_proxy(option["min_p"])
    chosen = lp_reg_proxies(log_proxy, statistics.logprobs, batch["advantages"], batch["mask"], share=option["share"])
    return {"old_logprobs": statistics.logprobs, "token_statistics": chosen}


def definition(logits, sampler, batch, option, temperature=1.0):
    """Return the mean loss of the tokens, and how many are regularised."""
    pi, q = (x.double() / temperature for x in (logits, sampler))
    logp, old = (x.log_softmax(-1).gather(1, batch["targets"][:, None])[:, 0] for x in (pi, q))
    keep, a = batch["mask"].tolist(), batch["advantages"].double().tolist()
    negative = sorted((old[t].item(), t) for t in range(T) if keep[t] and a[t] < 0)
    protected = {t for _, t in negative[: int(option["share"] * len(negative))]}
    total, num_regularised = logits.sum() * 0, 0
    for t in range(T):
        if not keep[t]:
            continue
        p = q[t].softmax(-1)
        p = torch.where(p >= option["min_p"] * p.max(), p, 0.0)
        proxy = (p / p.sum())[batch["targets"][t]]
        ratio = (logp[t] - old[t]).exp()
        if t in protected and logp[t].exp() < proxy:
            inverse = proxy / logp[t].exp()
            total = total - a[t] * ratio + inverse - inverse.log() - 1
            num_regularised += 1
        else:
            total = total + torch.maximum(-a[t] * ratio, -a[t] * ratio.clamp(1 - option["low"], 1 + option["high"]))
    return total / sum(keep), num_regularised


@pytest.mark.parametrize("how", ["kernel", "reference", "linear"])
@pytest.mark.parametrize("spread", [0.1, 1.0])
@pytest.mark.parametrize("option", [DEFAULTS, OTHER, {**DEFAULTS, "share": 1.0}])
def test_values_and_gradients_are_those_of_the_definition(option, spread, how, monkeypatch):
    total_regularised = 0
    for seed, temperature in ((0, 1.0), (1, 0.7)):
        logits, sampler, batch = example(spread, seed)
        z = logits.clone().requires_grad_()
        expected, num_regularised = definition(z, sampler, batch, option, temperature)
        total_regularised += num_regularised
        (gradient,) = torch.autograd.grad(expected, z)
        batch |= proxies_of(sampler, batch, option, temperature)
        if how == "linear":
            monkeypatch.setattr("tests.ops.test_losses.V", V)
        arguments = {"logits": logits, **batch, "loss": "lp_reg", "loss_options": option, "temperature": temperature}
        loss, actual, _ = computed(how, monkeypatch, **arguments)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
        torch.testing.assert_close(actual, gradient, rtol=1e-9, atol=1e-13)
    assert total_regularised >= (20 if option["share"] == 1 else 1 if option is OTHER else 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("instructions")
def test_each_dtype(dtype, monkeypatch):
    logits, sampler, batch = example(0.3, dtype=dtype)
    batch["advantages"] = batch["advantages"].float()
    z = logits.double().requires_grad_()
    expected, num_regularised = definition(z, sampler, batch, OTHER)
    assert num_regularised > 3
    (gradient,) = torch.autograd.grad(expected, z)
    batch |= proxies_of(sampler, batch, OTHER)
    loss, actual, _ = computed("kernel", monkeypatch, logits=logits, **batch, loss="lp_reg", loss_options=OTHER)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 2e-3}[dtype]
    assert (actual.double() - gradient).norm() <= tolerance * gradient.norm()


@pytest.mark.parametrize("how", ["kernel", "reference"])
def test_one_token_by_hand(how, monkeypatch):
    """A policy of two tokens, p = .25 for the target, A = -1, and a proxy of .5: the loss is rho + 2 - log 2 - 1."""
    logits = torch.tensor([[0.0, math.log(3)]], dtype=torch.float64)
    batch = {"targets": torch.tensor([0]), "advantages": torch.tensor([-1.0]).double(), "cu_seqlens": torch.tensor([0, 1])}
    batch |= {"advantages_per_token": True, "old_logprobs": torch.tensor([0.2]).double().log()}

    def run(proxy, advantage=-1.0):
        statistics = torch.tensor([math.log(proxy) if proxy else -math.inf], dtype=torch.float64)
        given = batch | {"advantages": advantage * batch["advantages"].abs(), "token_statistics": statistics}
        loss, gradient, metrics = computed(how, monkeypatch, logits=logits, **given, loss="lp_reg")
        return loss.item(), gradient[0, 0].item() / 0.75, metrics

    value, slope, _ = run(0.5)
    assert value == pytest.approx(1.25 + 1 - math.log(2))
    assert slope == pytest.approx(1.25 + 1 - 2)  # d/dlogp: rho + 1 - proxy / p
    for proxy in (0.0, 0.2499):  # not protected, or already above the proxy
        assert run(proxy)[:2] == (pytest.approx(1.25), pytest.approx(1.25))
    value, slope, metrics = run(0.0, advantage=1.0)
    assert (value, slope) == (pytest.approx(-1.25), pytest.approx(-1.25))
    batch["old_logprobs"] = torch.tensor([0.02]).double().log()  # a ratio of 12.5, beyond 1 + 9
    value, slope, metrics = run(0.0, advantage=1.0)
    assert (value, slope, metrics["clipped_high"].item()) == (pytest.approx(-10), 0, 1)
    assert run(0.0)[:2] == (pytest.approx(12.5), pytest.approx(12.5))  # A < 0 has no upper bound
    assert run(0.5)[0] == pytest.approx(12.5 + 1 - math.log(2))


@pytest.mark.parametrize("how", ["kernel", "reference"])
def test_extreme_proxies_leave_the_loss_finite_and_nan_in_a_ratio_does_not_hide(how, monkeypatch):
    logits, sampler, batch = example(0.3)
    batch |= proxies_of(sampler, batch, {**DEFAULTS, "share": 1.0})
    batch["mask"][:] = True
    batch["token_statistics"][3] = math.inf
    batch["token_statistics"][4] = 1e4
    loss, gradient, _ = computed(how, monkeypatch, logits=logits, **batch, loss="lp_reg")
    assert loss.isfinite()
    assert gradient.isfinite().all()
    batch["old_logprobs"][4] = math.nan
    assert computed(how, monkeypatch, logits=logits, **batch, loss="lp_reg")[0].isnan()


def choice(log_proxy, logprobs, advantages, mask, share):
    """Return the same as lp_reg_proxies, with lists."""
    counted = [t for t in range(len(logprobs)) if mask[t] and advantages[t] < 0]
    chosen = sorted(counted, key=lambda t: (logprobs[t], t))[: math.floor(share * len(counted))]
    return [log_proxy[t] if t in chosen else -math.inf for t in range(len(logprobs))]


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 300])
def test_the_choice_of_tokens(num_tokens, share):
    generator = torch.Generator().manual_seed(num_tokens)
    logprobs = -torch.randint(6, (num_tokens,), generator=generator).double() / 2  # many are equal
    advantages = torch.randint(-2, 3, (num_tokens,), generator=generator).double()
    log_proxy = torch.rand(num_tokens, generator=generator).double()
    mask = torch.rand(num_tokens, generator=generator) < 0.8
    for given in (None, mask):
        keep = torch.ones(num_tokens, dtype=torch.bool) if given is None else given
        expected = choice(log_proxy.tolist(), logprobs.tolist(), advantages.tolist(), keep.tolist(), share)
        assert lp_reg_proxies(log_proxy, logprobs, advantages, given, share=share).tolist() == expected
    spoilt = logprobs.masked_fill(~mask, math.nan)
    actual = lp_reg_proxies(log_proxy, spoilt, advantages.masked_fill(~mask, math.nan), mask, share=share)
    assert torch.equal(actual, lp_reg_proxies(log_proxy, logprobs, advantages, mask, share=share))


def test_wrong_arguments_are_refused():
    x = torch.zeros(3)
    for share in (0, 1.5, math.nan, "1"):
        with pytest.raises(ValueError, match="share must be a number above 0 and at most 1, got"):
            lp_reg_proxies(x, x, x, share=share)
    with pytest.raises(ValueError, match=r"logprobs and log_proxy must be \[T\], got the shapes \(2,\) and \(3,\)"):
        lp_reg_proxies(x, x[:2], x)
    with pytest.raises(ValueError, match=r"mask must be bool, got torch\.float32"):
        lp_reg_proxies(x, x, x, x)
    with pytest.raises(TypeError, match="advantages must be a tensor, got float"):
        lp_reg_proxies(x, x, 1.0)
    with pytest.raises(ValueError, match="loss lp_reg needs token_statistics"):
        policy_gradient_loss(torch.zeros(3, 4), torch.zeros(3).long(), x, torch.tensor([0, 3]), loss="lp_reg",
                             advantages_per_token=True)  # fmt: skip


def test_a_proxy_is_never_below_the_policy_it_is_made_of():
    """So that at the first update every protected token that the filter keeps is regularised."""
    _, sampler, batch = example(0.3)
    statistics = row_statistics(sampler, batch["targets"], min_p=0.1)
    log_proxy = statistics.log_proxy(0.1)
    kept = log_proxy > -math.inf
    assert 5 < int(kept.sum()) < T
    assert (log_proxy >= statistics.logprobs)[kept].all()
    assert torch.equal(statistics.logprobs, token_logprobs(sampler, batch["targets"])[0])
