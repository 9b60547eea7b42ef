"""A second implementation of every token loss, written from its publication, token by token, in
float64; and batches for it.

Autograd differentiates the definitions. Each returns, for the tokens of one response that are not
masked, the loss, whether the ratio is clipped from below and from above, and the log-ratio that the
metrics are about.
"""

import math
import sys
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch

from maxrl_fast.ops import LOSSES, linear_policy_gradient_loss, policy_gradient_loss
from maxrl_fast.ops.loss_kernel import AGGREGATIONS, KL_ESTIMATORS

LENGTHS = [4, 0, 1, 9, 3, 5]
T, S, V = sum(LENGTHS), len(LENGTHS), 7
CU_SEQLENS = torch.tensor([0, *LENGTHS]).cumsum(0)
HOW = ["kernel", "reference", "linear"]
# Numbers that are not the defaults, all different, so that no two options can be swapped.
OTHER = {
    "gmpo": {"low": 0.15, "high": 0.35},
    "vespo": {"k_positive": 1.5, "lambda_positive": 2.5, "k_negative": 0.7, "lambda_negative": 1.2},
    "sapo": {"tau_positive": 0.8, "tau_negative": 1.7},
    "dppo": {"low": 0.05, "high": 0.1, "kl": 0.03},
    "dispo": {"low_positive": 0.9, "high_positive": 1.3, "low_negative": 0.7, "high_negative": 1.1},
    "entropy_adv": {"alpha": 0.3, "kappa": 1.6},
    "kl_cov": {"share": 0.3, "coef": 0.4},
    "clip_cov": {"share": 0.2, "low": 0.05, "high": 1.5},
    "lp_reg": {"share": 0.5, "min_p": 0.05, "low": 0.3, "high": 0.5},
    "simko": {"alpha": 0.3, "k": 2, "tau": 0.4, "penalty": 1.7},
}
# The definitions of these have one advantage for a response.
OF_RESPONSES = ("gmpo", "vespo")


def limited(x):
    return x.clamp(-20, 20)


def clipped(a, ratio, low, high, dual=None):
    """Return ppo's loss of a token, and whether it is clipped from below and above."""
    value = torch.maximum(-a * ratio, -a * ratio.clamp(1 - low, 1 + high))
    if dual and a < 0 and value > -a * dual:
        value = 0 * value - a * dual
    return value, bool(ratio < 1 - low and a < 0), bool(ratio > 1 + high and a > 0)


# --- by token: of the advantage, the limited log-ratio x, the log-prob, the options, and what else
# is known of the token


def reinforce(a, x, logp, o, _):
    return -a * logp, False, False


def ppo(a, x, logp, o, _):
    return clipped(a, x.exp(), *o["clips"])


def cispo(a, x, logp, o, _):
    (low, high, _), ratio = o["clips"], float(x.detach().exp())
    return -min(max(ratio, 1 - low), 1 + high) * a * logp, ratio < 1 - low, ratio > 1 + high


def topr_token(a, x, logp, o, _):
    ratio = float(x.detach().exp())
    return -a * logp * (min(ratio, 1) if a < 0 else 1), False, a < 0 and ratio > 1


def sapo(a, x, logp, o, _):
    tau = o["tau_negative" if a < 0 else "tau_positive"]
    return -a * 4 / tau / (1 + (-tau * (x.exp() - 1)).exp()), False, False


def dppo(a, x, logp, o, _):
    moved = float((logp.exp() - (logp - x).exp()).detach())
    low, high = a < 0 and moved < -o["low"], a > 0 and moved > o["high"]
    return (0 if low or high else -a * x.exp()) + o["kl"] * x**2, low, high


def dispo(a, x, logp, o, _):
    sign, ratio = "negative" if a < 0 else "positive", float(x.detach().exp())
    low, high = o[f"low_{sign}"], o[f"high_{sign}"]
    return -min(max(ratio, low), high) * a * logp, ratio < low, ratio > high


def entropy_adv(a, x, logp, o, t):
    entropy = -float((t.log_p.detach().exp() * t.log_p.detach()).sum())
    return clipped(a + min(o["alpha"] * t.w * entropy, abs(a) / o["kappa"]), x.exp(), *o["clips"])


def kl_cov(a, x, logp, o, t):
    return -a * x.exp() + (o["coef"] * x.abs() if t.chosen else 0), False, False


def lp_reg(a, x, logp, o, t):
    """With k3 of the policy and its own distribution without the tokens below min_p times the
    greatest probability.
    """
    p = t.log_p.detach().exp()
    p = torch.where(p >= o["min_p"] * p.max(), p, 0.0)
    proxy = (p / p.sum())[t.target]
    if not t.chosen or logp.exp() >= proxy:
        return clipped(a, x.exp(), o["low"], o["high"])
    inverse = proxy / logp.exp()
    return -a * x.exp() + inverse - inverse.log() - 1, False, False


def simko(a, x, logp, o, t):
    """Each of the k most probable tokens has a ratio of the value rho and its own gradient."""
    ratio, top = x.exp(), sorted(range(V), key=lambda i: -t.log_p[i].item())[: int(o["k"])]
    if a > 0 and t.is_high and abs(x) < 20:
        own = [ratio.detach() * (t.log_p[i] - t.log_p[i].detach()).exp() for i in top]
        ratio = (1 - o["alpha"]) * ratio + o["alpha"] * sum(own) / len(own)
    return clipped(
        a * (o["penalty"] if a < 0 and t.is_high and top[0] == t.target else 1), ratio, *o["clips"]
    )


# --- by response: of lists or vectors of its tokens; they return the log-ratio of the metrics too


def gspo(r, o):
    """Zheng et al. 2025; with advantages per token GSPO-token: each token has the gradient of its
    own log-prob.
    """
    mean = (r.logp - r.old).mean().detach()
    return [
        clipped(a, limited(mean + x - x.detach()).exp(), *o["clips"])
        for a, x in zip(r.a, r.logp, strict=True)
    ], mean


def of_sequence(value, n, low=False, high=False):
    """Return a response's loss as that of each of its n tokens, an nth of it."""
    return [(value / n, low, high)] * n


def gmpo(r, o):
    """Zhao et al. 2025, algorithm 1: a geometric mean of ratios that are clipped where the
    advantage pushes them.
    """
    x, sign = r.logp - r.old, 1 if r.a[0] >= 0 else -1
    mean = (sign * torch.minimum(sign * x, sign * x.clamp(-o["low"], o["high"]))).mean()
    values = of_sequence(-len(x) * r.a[0] * limited(mean).exp(), len(x))
    moved = (sign * x > (o["high"] if sign > 0 else o["low"])).tolist()
    return [
        (v, m and r.a[0] < 0, m and r.a[0] > 0) for (v, _, _), m in zip(values, moved, strict=True)
    ], mean


def vespo(r, o):
    """phi(w) = w^k e^(-lambda w), divided by its value at 1, of the product of all ratios."""
    total = r.x.detach().sum()
    w, sign = float(limited(total).exp()), "negative" if r.a[0] < 0 else "positive"
    phi = w ** o[f"k_{sign}"] * math.exp(-o[f"lambda_{sign}"] * (w - 1))
    return [(-phi * a * x, False, False) for a, x in zip(r.a, r.logp, strict=True)], total


def topr(r, o):
    """Eq. 8: the score function of a whole trajectory, with its ratio limited to [0, 1] where the
    reward is negative.
    """
    total = r.x.detach().sum()
    w = float(limited(total).exp())
    values = zip(r.a, r.logp, strict=True)
    return [
        (-a * x * (min(1, w) if a < 0 else 1), False, a < 0 and w > 1) for a, x in values
    ], total


BY_RESPONSE = {f.__name__: f for f in (gspo, gmpo, vespo, topr)}
BY_TOKEN = {
    f.__name__: f
    for f in (
        *(reinforce, ppo, cispo, topr_token, sapo, dppo, dispo, entropy_adv),
        *(kl_cov, lp_reg, simko),
    )
} | {"clip_cov": ppo}


def covariances(a, logp, kept):
    mean_a, mean_logp = (math.fsum(x[t] for t in kept) / len(kept) for x in (a, logp))
    return {t: (a[t] - mean_a) * (logp[t] - mean_logp) for t in kept}


def chosen_tokens(name, a, logp, kept, o):
    """Return the tokens that the loss treats differently, by sorting."""
    if name in ("kl_cov", "clip_cov"):
        of = covariances(a, logp, kept)
        count = max(1, math.floor(Fraction(str(o["share"])) * len(kept)))
        if name == "kl_cov":
            return sorted(kept, key=lambda t: (-of[t], t))[:count]
        between = [t for t in kept if o["low"] < of[t] < o["high"]]
        return [between[i] for i in torch.randperm(len(between))[:count].tolist()]
    if name != "lp_reg":
        return []
    negative = sorted((logp[t], t) for t in kept if a[t] < 0)
    return [t for _, t in negative[: math.floor(Fraction(str(o["share"])) * len(negative))]]


def quantile(values, q):
    return float(torch.quantile(torch.tensor(values, dtype=torch.float64), q))


def divergence(kl, d):
    k3 = (-d).exp() + d - 1
    return {"k1": d, "k2": d**2 / 2, "k3": k3, "k3+": d**2 / 2 + (k3 - d**2 / 2).detach()}[kl]


def definition(logits, e, loss, *, clip_low, clip_high, dual_clip, kl, kl_coef, entropy_coef,
               aggregation, denominator, loss_options):  # fmt: skip
    tau, mask = e["temperature"], e["mask"]
    o = {key: option.default for key, option in LOSSES[loss].options.items()} | (loss_options or {})
    o["clips"] = clip_low, clip_high, dual_clip
    log_p = torch.log_softmax(logits / (tau[:, None] if isinstance(tau, torch.Tensor) else tau), -1)
    logp = log_p.gather(1, e["targets"][:, None])[:, 0]
    factors = (e["advantages"], e["importance_weights"])
    a, weights = (x if len(x) == T else x.repeat_interleave(torch.tensor(LENGTHS)) for x in factors)
    a = (a * weights).tolist()
    kept = list(range(T)) if mask is None else mask.nonzero()[:, 0].tolist()
    chosen = chosen_tokens(loss, a, logp.tolist(), kept, o)
    if loss == "clip_cov":
        a = [0.0 if t in chosen else x for t, x in enumerate(a)]
    entropies = -(log_p.exp() * log_p).sum(-1)
    numbers = entropies.tolist()
    total, read = logits.sum() * 0, []
    for start, stop in zip(CU_SEQLENS[:-1].tolist(), CU_SEQLENS[1:].tolist(), strict=True):
        own = [t for t in kept if start <= t < stop]
        if not own:
            continue
        difference = (logp - e["old_logprobs"])[own]
        r = SimpleNamespace(
            a=[a[t] for t in own], logp=logp[own], old=e["old_logprobs"][own], x=limited(difference)
        )
        if loss in BY_RESPONSE:
            results, measured = BY_RESPONSE[loss](r, o)
            measured = [measured] * len(own)
        else:
            threshold = quantile([numbers[t] for t in own], o.get("tau", 0.5))
            results, measured = [], difference
            for i, t in enumerate(own):
                token = SimpleNamespace(chosen=t in chosen, is_high=numbers[t] > threshold)
                token.log_p, token.target = log_p[t], int(e["targets"][t])
                token.w = weights[t].item()
                results.append(BY_TOKEN[loss](a[t], r.x[i], logp[t], o, token))
        for t, (value, low, high), ratio, x in zip(own, results, measured, difference, strict=True):
            d = logp[t] - e["ref_logprobs"][t]
            k = divergence(kl, limited(d))
            if not (a[t] or kl_coef or entropy_coef or loss in ("kl_cov", "dppo")):
                continue
            value = value + kl_coef * k - entropy_coef * entropies[t]
            total = total + value / (len(own) if aggregation == "seq_mean_token_mean" else 1)
            ratio, d = ratio.detach(), d.detach()
            is_clamped = bool(ratio.abs() > 20 or d.abs() > 20)
            moved = limited(ratio).exp(), is_clamped, low, high
            read.append((*moved, k.detach(), numbers[t], x.detach().abs()))
    names = "ratio ratio_clamped clipped_low clipped_high kl entropy logprob_diff".split()
    columns = zip(*read, strict=True) if read else [[0.0]] * 7
    means = [float(sum(column)) / max(len(read), 1) for column in columns]
    metrics = dict(zip(names, means, strict=True))
    metrics |= {"tokens": len(kept), "dropped_tokens": len(kept) - len(read)}
    size = max(len(kept), 1) if aggregation == "token_mean" else S
    return total / (denominator or size), metrics


# --- batches, and the package's loss of them


def example(spread=0.3, seed=3, per_token=False, vocab=V):
    """Return the arguments of policy_gradient_loss, in float64; every other target is the most
    probable token.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits = 2 * draw(T, vocab)
    targets = logits.argmax(1).where(
        torch.arange(T) % 2 == 0, torch.randint(vocab, (T,), generator=generator)
    )
    logp = torch.log_softmax(logits / 0.7, -1).gather(1, targets[:, None])[:, 0]
    advantages = draw(T) if per_token else torch.tensor([1.5, -2.0, -0.7, 0.9, -1.1, 0.0]).double()
    if per_token:
        advantages[5::4] = 0  # these tokens still belong to the ratio of their response
    return {
        **{"logits": logits, "targets": targets, "advantages": advantages, "temperature": 0.7},
        "cu_seqlens": CU_SEQLENS,
        "old_logprobs": logp + spread * draw(T),
        "ref_logprobs": logp + spread * draw(T),
        "importance_weights": 0.5 + draw(S).abs(),
        "mask": torch.arange(T) % 5 != seed % 7,
    }


def in_float32(batch):
    return {
        name: x.float() if torch.is_tensor(x) and x.is_floating_point() else x
        for name, x in batch.items()
    }


def drawn_options(choice, loss):
    """Draw all that a loss can be combined with; `choice` takes a sequence."""
    bounds, row = [0.1, 0.2, 0.3, 0, math.inf], LOSSES[loss]
    aggregation = row.aggregation or choice(AGGREGATIONS)
    return {
        "clip_low": choice(bounds),
        "clip_high": choice(bounds),
        "dual_clip": choice([None, 1.1, 2.5]),
        "kl": choice(KL_ESTIMATORS),
        "kl_coef": choice([0.0, 0.3]),
        "entropy_coef": choice([0.0, -0.2, 0.1]),
        "aggregation": aggregation,
        "loss_options": choice([None, OTHER.get(loss)]),
        "denominator": 40.0 if aggregation == "seq_sum_constant" else choice([None, 6.0]),
    }


def computed(how, logits, **arguments):
    leaf, slope = logits.detach().requires_grad_(), 1.0
    with pytest.MonkeyPatch.context() as patch:
        if how == "linear":  # 30 tanh(hidden @ weight.T / 30) is the logits, and few rows at a time
            patch.setattr("maxrl_fast.ops.logit_chunks.default_chunk", lambda *_: 8)
            slope = (1 - (logits.detach() / 30) ** 2).nan_to_num(1.0)
            leaf = (30 * torch.atanh(logits.detach() / 30)).requires_grad_()
            weight = torch.eye(leaf.shape[1], dtype=leaf.dtype)
            arguments |= {"chunk_tokens": 4, "softcap": 30.0}
            loss, metrics = linear_policy_gradient_loss(leaf, weight, **arguments)
        else:
            module = sys.modules[policy_gradient_loss.__module__]
            patch.setattr(module, "has_kernels", lambda device: how != "reference")
            loss, metrics = policy_gradient_loss(leaf, **arguments)
        gradient = torch.autograd.grad(3 * loss, leaf)[0] / slope / 3
    return loss.detach(), gradient, metrics


def aggregation_of(name, otherwise="token_mean"):
    return LOSSES[name].aggregation or otherwise
