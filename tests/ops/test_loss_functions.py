"""The token losses that are functions against definitions written from their publications, token by token, in float64.

The definitions are differentiated by autograd. Each returns the losses of the tokens of one response that are not masked, and
which of them are clipped from below and above. x is log(pi / pi_old), limited to +-20.
"""

import math
import sys
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

from maxrl_fast.algorithms.losses.chosen_tokens import clip_cov, kl_cov
from maxrl_fast.algorithms.losses.entropy import highest_entropies, nucleus_entropy, siren
from maxrl_fast.algorithms.losses.registry import find_loss
from maxrl_fast.algorithms.tokens import Tokens
from maxrl_fast.ops import LOSSES, linear_policy_gradient_loss, policy_gradient_loss, token_logprobs

LENGTHS = [4, 0, 1, 9, 3, 5]
T, S, V = sum(LENGTHS), len(LENGTHS), 7
CU_SEQLENS = torch.tensor([0, *LENGTHS]).cumsum(0)
FUNCTIONS = [name for name, row in LOSSES.items() if not row.fused]
LOW, HIGH, DUAL = 0.1, 0.3, 2.5  # clip_low, clip_high, dual_clip
# Numbers that are not the defaults, all different, so that no two options can be swapped.
OTHER = {
    "gmpo": {"low": 0.15, "high": 0.35},
    "vespo": {"k_positive": 1.5, "lambda_positive": 2.5, "k_negative": 0.7, "lambda_negative": 1.2},
    "sapo": {"tau_positive": 0.8, "tau_negative": 1.7},
    "dppo": {"low": 0.05, "high": 0.1, "kl": 0.03},
    "dispo": {"low_positive": 0.9, "high_positive": 1.3, "low_negative": 0.7, "high_negative": 1.1},
    "kl_cov": {"share": 0.3, "coef": 0.4},
    "clip_cov": {"share": 0.2, "low": 0.05, "high": 1.5},
    "lp_reg": {"share": 0.5, "min_p": 0.05, "low": 0.3, "high": 0.5},
    "simko": {"alpha": 0.3, "k": 2, "tau": 0.4, "penalty": 1.7},
}


def ppo(a, ratio, low=LOW, high=HIGH, dual=math.inf):
    value = torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high))
    if a < 0 and value > -a * dual:
        value = 0 * value - a * dual
    return value, bool(ratio < 1 - low and a < 0), bool(ratio > 1 + high and a > 0)


def of_sequence(value, n, low=False, high=False):
    """Return a response's loss as that of each of its n tokens, an nth of it."""
    return [(value / n, low, high)] * n


def _luspo(r, o):
    """Liu et al. 2026: the length times GSPO's clipped ratio of the sequence."""
    n = len(r.a)
    s = (r.logp - r.old).mean().clamp(-20, 20).exp()
    value, low, high = ppo(r.a[0], s, dual=DUAL)
    return of_sequence(n * value, n, low, high)


def _gmpo(r, o):
    """Zhao et al. 2025, algorithm 1: a geometric mean of ratios that are clipped where the advantage pushes them."""
    x, sign = r.logp - r.old, 1 if r.a[0] >= 0 else -1
    clipped = sign * torch.minimum(sign * x, sign * x.clamp(-o["low"], o["high"]))
    values = of_sequence(-len(x) * r.a[0] * clipped.mean().clamp(-20, 20).exp(), len(x))
    moved = (sign * x > (o["high"] if sign > 0 else o["low"])).tolist()
    return [(v, m and r.a[0] < 0, m and r.a[0] > 0) for (v, _, _), m in zip(values, moved, strict=True)]


def _vespo(r, o):
    """phi(w) = w^k e^(-lambda w), divided by its value at 1, of the product of all ratios."""
    w = math.exp(min(max(float(r.x.detach().sum()), -20), 20))
    k, rate = (o[f"{name}_{'negative' if r.a[0] < 0 else 'positive'}"] for name in ("k", "lambda"))
    return [(-(w**k) * math.exp(-rate * (w - 1)) * a * logp, False, False) for a, logp in zip(r.a, r.logp, strict=True)]


def _topr(r, o):
    """Eq. 8: the score function of a whole trajectory, with its ratio limited to [0, 1] where the reward is negative."""
    w = math.exp(min(max(float(r.x.detach().sum()), -20), 20))
    values = zip(r.a, r.logp, strict=True)
    return [(-a * logp * (min(1, w) if a < 0 else 1), False, a < 0 and w > 1) for a, logp in values]


def _topr_token(a, x, logp, o, _):
    ratio = float(x.detach().exp())
    return -a * logp * (min(ratio, 1) if a < 0 else 1), False, a < 0 and ratio > 1


def _sapo(a, x, logp, o, _):
    tau = o["tau_negative" if a < 0 else "tau_positive"]
    return -a * 4 / tau / (1 + (-tau * (x.exp() - 1)).exp()), False, False


def _dppo(a, x, logp, o, _):
    moved = float((logp.exp() - (logp - x).exp()).detach())
    low, high = a < 0 and moved < -o["low"], a > 0 and moved > o["high"]
    return (0 if low or high else -a * x.exp()) + o["kl"] * x**2, low, high


def _dispo(a, x, logp, o, _):
    sign, ratio = "negative" if a < 0 else "positive", float(x.detach().exp())
    low, high = o[f"low_{sign}"], o[f"high_{sign}"]
    return -min(max(ratio, low), high) * a * logp, ratio < low, ratio > high


def _kl_cov(a, x, logp, o, t):
    return -a * x.exp() + (o["coef"] * x.abs() if t.chosen else 0), False, False


def _clip_cov(a, x, logp, o, t):
    return (0 * x, a < 0, a > 0) if t.chosen else ppo(a, x.exp(), dual=DUAL)


def _lp_reg(a, x, logp, o, t):
    """With k3 of the policy and its own distribution without the tokens below min_p times the greatest probability."""
    p = t.log_p.detach().exp()
    p = torch.where(p >= o["min_p"] * p.max(), p, 0.0)
    proxy = (p / p.sum())[t.target]
    if not t.chosen or logp.exp() >= proxy:
        return ppo(a, x.exp(), o["low"], o["high"])
    inverse = proxy / logp.exp()
    return -a * x.exp() + inverse - inverse.log() - 1, False, False


def _simko(a, x, logp, o, t):
    """Each of the k most probable tokens has a ratio of the value rho and its own gradient."""
    ratio, top = x.exp(), sorted(range(V), key=lambda i: -float(t.log_p[i]))[: int(o["k"])]
    if a > 0 and t.is_high and abs(x) < 20:
        own = [ratio.detach() * (t.log_p[i] - t.log_p[i].detach()).exp() for i in top]
        ratio = (1 - o["alpha"]) * ratio + o["alpha"] * sum(own) / len(own)
    return ppo(a * (o["penalty"] if a < 0 and t.is_high and top[0] == t.target else 1), ratio, dual=DUAL)


def covariances(a, logp, kept):
    mean_a, mean_logp = (math.fsum(x[t] for t in kept) / len(kept) for x in (a, logp))
    return {t: (a[t] - mean_a) * (logp[t] - mean_logp) for t in kept}


def chosen_tokens(name, a, logp, kept, o):
    """Return the tokens that the loss treats differently, by sorting."""
    if name in ("kl_cov", "clip_cov"):
        of, count = covariances(a, logp, kept), max(1, math.floor(Fraction(str(o["share"])) * len(kept)))
        if name == "kl_cov":
            return sorted(kept, key=lambda t: (-of[t], t))[:count]
        between = [t for t in kept if o["low"] < of[t] < o["high"]]
        return [between[i] for i in torch.randperm(len(between))[:count].tolist()]
    negative = sorted((logp[t], t) for t in kept if a[t] < 0)
    return [t for _, t in negative[: math.floor(Fraction(str(o["share"])) * len(negative))]] if name == "lp_reg" else []


def quantile(values, q):
    return float(torch.quantile(torch.tensor(values, dtype=torch.float64), q))


def definition(name, logits, e, o):
    """Return the mean loss over tokens or responses, and the metrics."""
    log_p = torch.log_softmax(logits / e["temperature"], -1)
    logp = log_p.gather(1, e["targets"][:, None])[:, 0]
    factors = (e["advantages"], e["importance_weights"])
    a, weights = (x if len(x) == T else x.repeat_interleave(torch.tensor(LENGTHS)) for x in factors)
    a, kept = (a * weights).tolist(), e["mask"].nonzero()[:, 0].tolist()
    chosen = chosen_tokens(name, a, logp.tolist(), kept, o)
    entropies = (-(log_p.exp() * log_p).sum(-1)).tolist()
    results = {}
    for start, stop in zip(CU_SEQLENS[:-1].tolist(), CU_SEQLENS[1:].tolist(), strict=True):
        own = [t for t in kept if start <= t < stop]
        if not own:
            continue
        x = (logp - e["old_logprobs"])[own].clamp(-20, 20)
        if LOSSES[name].by_sequence:
            r = SimpleNamespace(a=[a[t] for t in own], logp=logp[own], old=e["old_logprobs"][own], x=x)
            results |= zip(own, globals()[f"_{name}"](r, o), strict=True)
            continue
        threshold = quantile([entropies[t] for t in own], o.get("tau", 0.5))
        for i, t in enumerate(own):
            token = SimpleNamespace(chosen=t in chosen, log_p=log_p[t], target=int(e["targets"][t]))
            token.is_high = entropies[t] > threshold
            results[t] = globals()[f"_{name}"](a[t], x[i], logp[t], o, token)
    total = sum(value for value, _, _ in results.values()) / (S if name == "luspo" else len(kept))
    read = [t for t in kept if a[t] != 0 or (name in ("kl_cov", "dppo") and float(results[t][0]) != 0)]
    metrics = {"tokens": len(kept), "dropped_tokens": len(kept) - len(read)}
    for i, side in ((1, "clipped_low"), (2, "clipped_high")):
        metrics[side] = sum(bool(results[t][i]) for t in read) / max(len(read), 1)
    return total, metrics


def example(spread=0.3, seed=3, per_token=False):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits = 2 * draw(T, V)
    targets = logits.argmax(1).where(torch.arange(T) % 2 == 0, torch.randint(V, (T,), generator=generator))
    old = token_logprobs(logits, targets, temperature=0.7)[0] + spread * draw(T)
    advantages = draw(T) if per_token else torch.tensor([1.5, -2.0, -0.7, 0.9, -1.1, 0.0]).double()
    if per_token:
        advantages[5::4] = 0  # these tokens still belong to the ratio of their response
    batch = {"logits": logits, "targets": targets, "advantages": advantages, "cu_seqlens": CU_SEQLENS, "old_logprobs": old}
    return batch | {"temperature": 0.7, "importance_weights": 0.5 + draw(S).abs(), "mask": torch.arange(T) % 5 != seed % 7}


def computed(how, monkeypatch, **arguments):
    """Return the loss, its gradient in the logits and the metrics."""
    leaf = arguments.pop("logits").detach().requires_grad_()
    logits = leaf * 1
    if how == "linear":  # hidden @ weight.T is the logits
        loss, metrics = linear_policy_gradient_loss(logits, torch.eye(V, dtype=leaf.dtype), **arguments, chunk_tokens=4)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules[policy_gradient_loss.__module__], "has_kernels", lambda device: how != "reference")
            in_place = how == "in place" and find_loss(arguments["loss"]).rows is None
            loss, metrics = policy_gradient_loss(logits, **arguments, in_place=in_place)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0], metrics


HOW = ["kernel", "reference", "linear", "in place"]


def aggregation_of(name):
    return LOSSES[name].aggregation or "token_mean"


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_value_gradient_and_metrics_are_those_of_the_definition(name, how, monkeypatch):
    options, sizes = {key: option.default for key, option in LOSSES[name].options.items()}, []
    cases = [(0.02, 3, False), (0.3, 4, False), (1.5, 5, False), (30.0, 6, False)]
    if name not in ("luspo", "gmpo", "vespo"):  # whose definitions have one advantage for a response
        cases.append((0.3, 4, True))
    for spread, seed, per_token in cases:
        for given in (None, OTHER.get(name, {})):
            e = example(spread, seed, per_token)
            if spread == 0.3:
                e["old_logprobs"][3] -= 21
                e["old_logprobs"][10] += 21
            logits = e["logits"].clone().requires_grad_()
            torch.manual_seed(seed)
            expected, metrics = definition(name, logits, e, options | (given or {}))
            (gradient,) = torch.autograd.grad(expected, logits)
            sizes.append(float(gradient.abs().max()))
            clips = {"clip_low": LOW, "clip_high": HIGH, "dual_clip": DUAL}
            torch.manual_seed(seed)
            loss, actual, computed_metrics = computed(
                how, monkeypatch, **e, **clips, loss=name, loss_options=given, aggregation=aggregation_of(name)
            )
            assert loss.item() == pytest.approx(expected.item(), rel=1e-9, abs=1e-11)
            torch.testing.assert_close(actual, gradient, rtol=1e-8, atol=1e-12)
            assert {key: float(computed_metrics[key]) for key in metrics} == pytest.approx(metrics)
    assert sum(size > 1e-3 for size in sizes) > 3


@pytest.mark.parametrize("old", ["the policy's", "absent"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_first_update_has_the_gradient_of_reinforce(name, old, monkeypatch):
    e = example(0.0)
    if old == "absent":
        del e["old_logprobs"]
    options = {"simko": {"alpha": 0, "penalty": 1}, "lp_reg": {"share": 1e-9}}.get(name)  # these two treat some differently
    aggregation = LOSSES[name].aggregation or "seq_mean_token_mean"
    _, expected, _ = computed("kernel", monkeypatch, **e, loss="reinforce", aggregation=aggregation)
    for how in HOW:
        _, gradient, metrics = computed(how, monkeypatch, **e, loss=name, loss_options=options, aggregation=aggregation)
        rows = torch.ones(T, dtype=torch.bool)
        if name == "clip_cov":  # its chosen tokens have none
            rows = gradient.abs().sum(1) > 0
            assert T - int(rows.sum()) <= (expected.abs().sum(1) == 0).sum() + 1
        torch.testing.assert_close(gradient[rows], expected[rows], rtol=1e-11, atol=1e-14)
        assert metrics["ratio"].item() == pytest.approx(1, rel=1e-13)
        if old == "absent":
            assert metrics["logprob_diff"] == 0


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_equal_rewards_have_no_gradient_but_for_dppo_and_the_chosen_tokens_of_kl_cov(name, how, monkeypatch):
    e = example(0.3) | {"advantages": torch.zeros(S, dtype=torch.float64)}
    loss, gradient, metrics = computed(how, monkeypatch, **e, loss=name, aggregation=aggregation_of(name))
    learns = {"dppo": "kl", "kl_cov": "coef"}.get(name)
    assert bool(gradient.any()) == (loss.item() != 0) == (learns is not None)
    num_read = metrics["tokens"] - metrics["dropped_tokens"]
    assert num_read == {"dppo": int(e["mask"].sum()), "kl_cov": 1}.get(name, 0)
    if learns:
        loss, gradient, _ = computed(how, monkeypatch, **e, loss=name, loss_options={learns: 0})
        assert loss == 0
        assert not gradient.any()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_wrong_logprobs_leave_losses_finite_and_nan_does_not_hide(name, how, monkeypatch):
    options = {"loss": name, "aggregation": aggregation_of(name)}
    e = {key: x.float() if torch.is_tensor(x) and x.is_floating_point() else x for key, x in example(0.1).items()}
    del e["mask"]
    for wrong in (-1e4, 1e4, -math.inf, math.inf):
        e["old_logprobs"][15] = wrong
        loss, gradient, metrics = computed(how, monkeypatch, **e, **options)
        assert loss.isfinite()
        assert gradient.isfinite().all()
        assert metrics["ratio"].isfinite()
        if not LOSSES[name].by_sequence:  # in the ratio of a response the others may make up for one token
            assert metrics["ratio_clamped"] * (T - metrics["dropped_tokens"]) == pytest.approx(1)
    e["old_logprobs"][15] = math.nan
    assert computed(how, monkeypatch, **e, **options)[0].isnan()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", LOSSES)
def test_masked_values_may_be_anything_and_no_tokens_give_zero(name, how, monkeypatch):
    e = example() | {"ref_logprobs": -torch.ones(T).double(), "loss": name, "aggregation": aggregation_of(name)}
    e["temperature"] = torch.full((T,), 0.7, dtype=torch.float64)
    torch.manual_seed(0)
    _, clean, _ = computed(how, monkeypatch, **e)
    masked = ~e["mask"]
    for key in ("logits", "old_logprobs", "ref_logprobs", "targets", "temperature"):
        e[key] = e[key].clone()
        e[key][masked] = -100 if key == "targets" else math.inf if key == "old_logprobs" else math.nan
    torch.manual_seed(0)
    loss, gradient, metrics = computed(how, monkeypatch, **e)
    assert loss.isfinite()
    assert torch.equal(gradient, clean)
    assert not gradient[masked].any()
    assert all(metric.isfinite() for metric in metrics.values())
    loss, gradient, metrics = computed(how, monkeypatch, **e | {"mask": torch.zeros(T, dtype=torch.bool)})
    assert loss == 0
    assert not gradient.any()
    assert not any(metrics.values())
    none = {key: x[:0] for key, x in e.items() if torch.is_tensor(x) and key != "cu_seqlens"}
    loss, gradient, _ = computed(how, monkeypatch, **e | none | {"cu_seqlens": torch.tensor([0])})
    assert (loss.item(), tuple(gradient.shape)) == (0, (0, V))


def tokens(logprobs, advantages, mask=None, cu_seqlens=None, entropy=None, seed=None):
    """Return Tokens of float64 vectors with a ratio of 1; without cu_seqlens of one response."""
    logprobs, advantages = (torch.as_tensor(x, dtype=torch.float64) for x in (logprobs, advantages))
    mask = torch.ones(len(logprobs), dtype=torch.bool) if mask is None else mask
    return Tokens(
        logprobs=logprobs,
        entropy=logprobs if entropy is None else entropy,
        old_logprobs=logprobs.detach(),
        ref_logprobs=logprobs.detach(),
        advantages=advantages,
        importance_weights=torch.ones_like(logprobs),
        mask=mask,
        cu_seqlens=torch.tensor([0, len(logprobs)]) if cu_seqlens is None else cu_seqlens,
        generator=None if seed is None else torch.Generator().manual_seed(seed),
    )


def test_of_equal_covariances_the_first_are_chosen_and_shares_are_rounded_down():
    def chosen(t, **options):
        t.logprobs.requires_grad_()
        t.old_logprobs = t.logprobs.detach() - 1
        value = kl_cov(t, coef=1.0, **options) + t.advantages * t.ratio
        assert t.metrics["tokens_chosen"] == (value > 0).sum()
        return (value > 0).tolist()

    given = [-1.0, -3, -1, -3, -1], [2.0, 0, 2, 0, 2]
    assert chosen(tokens(*given), share=0.4) == [False, True, False, True, False]
    assert chosen(tokens(*given), share=0.6) == [True, True, False, True, False]
    assert chosen(tokens([-1.0] * 5, given[1])) == [True, False, False, False, False]
    values = torch.rand(100, generator=torch.Generator().manual_seed(0))
    for share, count in ((0.29, 29), (0.57, 57), (0.285, 28)):  # .29 x 100 is 28.999999999999996
        assert sum(chosen(tokens(-values, values.flip(0)), share=share)) == count


def test_clip_cov_draws_from_the_tokens_between_its_bounds():
    generator = torch.Generator().manual_seed(0)
    logprobs, advantages = (3 * torch.randn(200, generator=generator, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(200, generator=generator) < 0.7
    kept, seen = mask.nonzero()[:, 0].tolist(), set()
    between = {t for t, x in covariances(advantages.tolist(), logprobs.tolist(), kept).items() if 0.1 < x < 2}
    for seed in range(150):
        value = clip_cov(tokens(logprobs, advantages, mask, seed=seed), share=0.04, low=0.1, high=2)
        drawn = set((mask & (value == 0)).nonzero()[:, 0].tolist())
        assert len(drawn) == int(0.04 * len(kept))
        assert drawn <= between
        seen |= drawn
    assert seen == between
    exact = [-1.0, 1, -1, 1], [-1.0, 1, 1, -1]  # covariances of 1, 1, -1, -1
    for low, high, count in ((1.0, 5.0, 0), (0.5, 1.0, 0), (0.5, 5.0, 1)):
        assert (clip_cov(tokens(*exact), low=low, high=high) == 0).sum() == count
    with pytest.raises(ValueError, match="low of clip_cov must be below its high, 1, got 5"):
        policy_gradient_loss(**example(), loss="clip_cov", loss_options={"low": 5, "high": 1})


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 1.0])
def test_the_tokens_of_the_highest_entropies(share):
    for n in (0, 1, 15, 100):
        generator = torch.Generator().manual_seed(n)
        entropy, mask = torch.rand(n, generator=generator).double(), torch.rand(n, generator=generator) < 0.8
        entropy[n // 2 :] = entropy[: n - n // 2] + 1e-9  # equal but for rounding
        t = tokens(-entropy, entropy, mask, entropy=entropy)
        counted = sorted((float(x) for x in entropy[mask]), reverse=True)
        count = math.ceil(Fraction(str(share)) * len(counted))
        least = counted[count - 1] if counted else 0.0
        assert highest_entropies(t, share).tolist() == [
            bool(m) and x >= least - 1e-6 for x, m in zip(entropy, mask, strict=True)
        ]
        assert not counted or t.metrics["entropy_threshold"] == least


def nucleus(p):
    """Return the entropy of the fewest most probable of the probabilities that have .8 together."""
    kept = []
    for x in sorted(p, reverse=True):
        if math.fsum(kept) < 0.8:
            kept.append(x)
    return -sum(x / math.fsum(kept) * math.log(x / math.fsum(kept)) for x in kept if x)


def test_the_term_of_siren():
    """H by hand, and its gradient by differences; the nucleus stays the same within them."""
    logits = 2 * torch.randn(T, V, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    logits[1, 3:] = -math.inf
    logits[2, 0] = 50.0  # one token is the nucleus
    mask = torch.arange(T) % 5 != 3

    def term(z, anchor):
        anchor = torch.tensor([anchor], dtype=torch.float64)
        t = tokens(torch.zeros(T), torch.zeros(T), mask, CU_SEQLENS)
        value = siren(t, nucleus_entropy(torch.log_softmax(z, -1)), 0.7, anchor)
        return value, t.metrics["siren_entropy"].item(), t.metrics["siren_anchor"].item()

    entropies = [nucleus(row) for row in logits.softmax(-1).tolist()]
    torch.testing.assert_close(nucleus_entropy(torch.log_softmax(logits, -1)), torch.tensor(entropies).double())
    means = []
    for start, stop in zip(CU_SEQLENS[:-1].tolist(), CU_SEQLENS[1:].tolist(), strict=True):
        own = [entropies[t] for t in range(start, stop) if mask[t]]
        above = [x for x in own if x > quantile(own, 0.8)]
        means.append(sum(above) / max(len(above), 1))
    h = sum(means) / S
    assert term(logits, math.nan) == (0, pytest.approx(h), pytest.approx(h))
    value, found, anchor = term(z := logits.clone().requires_grad_(), 0.1)
    assert (value.item(), found, anchor) == (pytest.approx(0.7 * (h - 0.1) ** 2), pytest.approx(h), 0.1)
    (gradient,) = torch.autograd.grad(value, z)
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 1e-3
    for t, v in ((0, 1), (4, 2), (9, 3), (20, 0), *gradient.abs().sum(1).topk(3).indices[:, None].expand(3, 2).tolist()):
        step = torch.zeros_like(logits)
        step[t, v % V] = 1e-6
        difference = (term(logits + step, 0.1)[0] - term(logits - step, 0.1)[0]) / 2e-6
        assert gradient[t, v % V].item() == pytest.approx(difference.item(), abs=1e-8)


@pytest.mark.parametrize("name", LOSSES)
def test_unknown_and_impossible_options_are_refused(name):
    e = example()
    with pytest.raises(ValueError, match=f"loss {name} takes (no options|the options .*), got 'slope'"):
        policy_gradient_loss(**e, loss=name, loss_options={"slope": 1.0})
    for key, option in LOSSES[name].options.items():
        for value in (math.nan, "1", None, *([-0.1, 0] if "above 0" in option.limit.wanted else [-math.inf])):
            if value is None and option.default is not None:
                continue
            with pytest.raises(ValueError, match=f"{key} of loss {name} must be {option.limit.wanted}, got"):
                policy_gradient_loss(**e, loss=name, loss_options={key: value})
    with pytest.raises(TypeError, match="loss_options must be a mapping of names to numbers, got list"):
        policy_gradient_loss(**e, loss=name, loss_options=[1.0])


def test_limits_that_two_options_or_an_aggregation_set():
    for loss, options, message in (
        ("sapo", {"tau_pos": 1.0}, r"tau_positive, tau_negative, got 'tau_pos'; did you mean 'tau_positive'\?"),
        ("dispo", {"low_negative": 102}, "low_negative of dispo must be at most its high_negative, 101, got 102"),
        ("simko", {"k": 2.5}, "k of loss simko must be an integer from 1 to 8, got 2.5"),
        ("luspo", None, r"aggregation must be seq_mean_token_sum for luspo, .* got token_mean"),
    ):
        with pytest.raises(ValueError, match=message):
            policy_gradient_loss(**example(), loss=loss, loss_options=options)


def test_every_loss_is_described():
    assert all(row.formula and row.weight and row.source for row in LOSSES.values())
