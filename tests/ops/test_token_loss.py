"""The four fused losses against their formulas, written here token by token and differentiated by autograd, and edge cases."""

import math
import random
import sys

import pytest
import torch

from maxrl_fast import _C
from maxrl_fast.ops import linear_policy_gradient_loss, policy_gradient_loss, token_logprobs
from maxrl_fast.ops._gate import check_fields
from maxrl_fast.ops.token_batch import AGGREGATIONS, KL_ESTIMATORS
from maxrl_fast.ops.token_loss_kernel import LossSums

FUSED = ["reinforce", "ppo", "cispo", "gspo"]
LENGTHS = [3, 0, 1, 7]
T, S, V = sum(LENGTHS), len(LENGTHS), 9
CU_SEQLENS = torch.tensor([0, *LENGTHS]).cumsum(0)


def limited(x):
    return x.clamp(-20, 20)


def policy_term(loss, a, logp, x, low, high, dual):
    """Return the term of a token with the log-ratio x, and whether its ratio is clipped from below and above."""
    if loss == "reinforce":
        return -a * logp, False, False
    rho = limited(x).exp()
    clipped = rho.clamp(1 - low, 1 + high)
    if loss == "cispo":
        return -clipped.detach() * a * logp, rho < 1 - low, rho > 1 + high
    value = torch.maximum(-a * rho, -a * clipped)
    if dual and a < 0 and value > -a * dual:
        value = 0 * value - a * dual
    return value, rho < 1 - low and a < 0, rho > 1 + high and a > 0


def divergence(kl, d):
    k3 = (-d).exp() + d - 1
    return {"k1": d, "k2": d**2 / 2, "k3": k3, "k3+": d**2 / 2 + (k3 - d**2 / 2).detach()}[kl]


def definition(logits, e, *, loss="ppo", kl="k3", kl_coef=0.0, entropy_coef=0.0, aggregation="token_mean", clip_low=0.2,
               clip_high=0.2, dual_clip=None, mask=None, denominator=None):  # fmt: skip
    """Return the loss and the metrics."""
    tau = e["temperature"]
    log_p = torch.log_softmax(logits / (tau[:, None] if isinstance(tau, torch.Tensor) else tau), -1)
    kept = [True] * T if mask is None else mask.tolist()
    total, counted, read = logits.sum() * 0, 0, []
    for s in range(S):
        own = [t for t in range(*CU_SEQLENS[s : s + 2].tolist()) if kept[t]]
        logp = [log_p[t, e["targets"][t]] for t in own]
        x = [lp - e["old_logprobs"][t] for lp, t in zip(logp, own, strict=True)]
        counted += len(own)
        for lp, each, t in zip(logp, x, own, strict=True):
            a = float(e["advantages"][t if len(e["advantages"]) == T else s] * e["importance_weights"][s])
            if a == kl_coef == entropy_coef == 0:
                continue
            # With advantages per token GSPO-token: each token has the gradient of its own log-prob.
            ratio = (sum(x) / len(x)).detach() + lp - lp.detach() if loss == "gspo" else each
            value, low, high = policy_term(loss, a, lp, ratio, clip_low, clip_high, dual_clip) if a else (0 * lp, False, False)
            if not a and loss == "cispo":
                _, low, high = policy_term(loss, 1.0, lp, ratio, clip_low, clip_high, dual_clip)
            d = lp - e["ref_logprobs"][t]
            k, entropy = divergence(kl, limited(d)), -(log_p[t].exp() * log_p[t]).sum()
            value = value + kl_coef * k - entropy_coef * entropy
            total = total + value / (len(own) if aggregation == "seq_mean_token_mean" else 1)
            is_clamped = float(ratio.abs()) > 20 or float(d.abs()) > 20
            read.append([float(v) for v in (limited(ratio).exp(), is_clamped, low, high, k, entropy, each.abs())])
    means = [sum(column) / len(read) for column in zip(*read, strict=True)] if read else [0.0] * 7
    metrics = dict(zip(LossSums._fields[1:], [counted, counted - len(read), *means], strict=True))
    return total / (denominator or (max(counted, 1) if aggregation == "token_mean" else S)), metrics


def make_example(seed=3, spread=0.5):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits, targets = 2 * draw(T, V), torch.randint(V, (T,), generator=generator)
    logp = torch.log_softmax(logits / 0.7, -1).gather(1, targets[:, None])[:, 0]
    return {
        "logits": logits,
        "targets": targets,
        "advantages": torch.tensor([1.5, 0.3, -2.0, -0.7], dtype=torch.float64),
        "cu_seqlens": CU_SEQLENS,
        "old_logprobs": logp + spread * draw(T),
        "ref_logprobs": logp + spread * draw(T),
        "importance_weights": 0.5 + draw(S).abs(),
        "temperature": 0.7,
    }


@pytest.fixture
def example():
    return make_example()


def computed(how, e, **options):
    """Return the loss, its gradient in the logits, and the metrics."""
    leaf = e["logits"].detach().requires_grad_()
    rest = {name: x for name, x in e.items() if name != "logits"}
    if how == "linear":  # hidden @ weight.T is the logits
        loss, metrics = linear_policy_gradient_loss(leaf, torch.eye(V, dtype=leaf.dtype), **rest, **options)
    else:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys.modules[policy_gradient_loss.__module__], "has_kernels", lambda device: how != "reference")
            loss, metrics = policy_gradient_loss(leaf * 1, **rest, **options, in_place=how == "in place")
    return loss.detach(), torch.autograd.grad(loss, leaf)[0], metrics


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("how", ["kernel", "reference", "in place", "linear"])
@pytest.mark.parametrize("loss", FUSED)
def test_value_gradient_and_metrics_are_those_of_the_formula(loss, how):
    """With 20 draws of everything else; log-ratios beyond 20 among them."""
    generator = random.Random(loss)
    for seed in range(20):
        e, choice = make_example(seed, generator.choice([0.02, 0.5, 15])), generator.choice
        options = {"loss": loss, "clip_low": choice([0.1, 0.2]), "clip_high": choice([0.1, 0.3]), "kl": choice(KL_ESTIMATORS)}
        options |= {"dual_clip": choice([None, 1.1]), "kl_coef": choice([0.0, 0.3]), "entropy_coef": choice([0.0, -0.2])}
        options |= {"aggregation": choice(AGGREGATIONS), "mask": choice([None, torch.arange(T) % 3 != seed % 3])}
        options["denominator"] = 40.0 if options["aggregation"] == "seq_sum_constant" else choice([None, 6.0])
        if choice([True, False]):
            e["advantages"] = torch.linspace(-2, 2, T).double() * (torch.arange(T) % 4 > 0)
        if choice([True, False]):
            e["temperature"] = torch.linspace(0.5, 2, T).double()
        z = e["logits"].clone().requires_grad_()
        expected, expected_metrics = definition(z, e, **options)
        (expected_gradient,) = torch.autograd.grad(expected, z)
        value, gradient, metrics = computed(how, e, **options)
        assert value.item() == pytest.approx(expected.item(), rel=1e-10, abs=1e-13)
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-13)
        assert {name: float(x) for name, x in metrics.items()} == pytest.approx(expected_metrics, rel=1e-10, abs=1e-13)
        assert seed or gradient.abs().max() > 1e-3


@pytest.mark.parametrize("ratio", [0.79, 0.81, 1.19, 1.21, 4.0])
@pytest.mark.parametrize("advantage", [1.3, -1.3])
@pytest.mark.parametrize(("loss", "dual"), [("ppo", None), ("ppo", 3.0), ("cispo", None), ("gspo", 3.0)])
def test_gradient_on_both_sides_of_each_clip(loss, dual, advantage, ratio):
    """One response of three tokens with the same ratio: the gradient in each log-prob is known."""
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([2, 0, 5])
    logp = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
    rows = (targets, torch.tensor([advantage], dtype=torch.float64), torch.tensor([0, 3]))
    value, _ = policy_gradient_loss(logits, *rows, old_logprobs=logp - math.log(ratio), loss=loss, dual_clip=dual)
    is_free = ratio <= 1.2 if advantage > 0 else ratio >= 0.8 and (dual is None or ratio < dual)
    slope = -advantage * (min(max(ratio, 0.8), 1.2) if loss == "cispo" else ratio * is_free)
    (expected,) = torch.autograd.grad(slope * logp.mean(), logits)
    torch.testing.assert_close(torch.autograd.grad(value, logits)[0], expected, rtol=1e-12, atol=1e-15)


def test_without_old_logprobs_the_gradient_is_reinforce(example):
    del example["old_logprobs"]
    _, expected, _ = computed("kernel", example, loss="reinforce")
    for loss in FUSED:
        _, gradient, metrics = computed("kernel", example, loss=loss)
        assert (metrics["ratio"].item(), metrics["logprob_diff"].item()) == (1, 0)
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("log_ratio", [-20.001, -19.999, 19.999, 20.001])
def test_the_limits_of_the_log_ratio(log_ratio):
    """Up to 20 the gradients are those of the formulas, beyond they are 0."""
    logits = torch.randn(1, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64, requires_grad=True)
    targets, cu_seqlens = torch.tensor([2]), torch.tensor([0, 1])
    logp = torch.log_softmax(logits, -1)[0, 2]
    (expected,) = torch.autograd.grad(logp, logits)
    other, is_clamped = (logp.detach() - log_ratio)[None], abs(log_ratio) > 20
    ratio = math.exp(min(max(log_ratio, -20), 20))
    for loss in ("ppo", "gspo"):
        free = {"loss": loss, "clip_low": math.inf, "clip_high": math.inf, "old_logprobs": other}
        value, metrics = policy_gradient_loss(logits, targets, torch.tensor([-1.3], dtype=torch.float64), cu_seqlens, **free)
        assert value.item() == pytest.approx(1.3 * ratio, rel=1e-9)
        assert metrics["ratio_clamped"].item() == is_clamped
        (gradient,) = torch.autograd.grad(value, logits)
        torch.testing.assert_close(gradient, (not is_clamped) * 1.3 * ratio * expected, rtol=1e-9, atol=0)
    for kl, slope in {"k1": 1.0, "k2": log_ratio, "k3": 1 - math.exp(-log_ratio), "k3+": log_ratio}.items():
        zero = torch.zeros(1, dtype=torch.float64)
        value, _ = policy_gradient_loss(logits, targets, zero, cu_seqlens, ref_logprobs=other, kl=kl, kl_coef=1.0)
        (gradient,) = torch.autograd.grad(value, logits)
        torch.testing.assert_close(gradient, (not is_clamped) * slope * expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("how", ["kernel", "reference", "linear"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", FUSED)
def test_wrong_logprobs_leave_losses_and_gradients_finite(example, loss, dtype, how):
    e = example | {"logits": example["logits"].to(dtype), "advantages": torch.full((S,), -1.0), "denominator": 8.0}
    for old, ref in ((-1e4, 100.0), (1e4, -1e4), (-math.inf, math.inf)):
        e |= {"old_logprobs": torch.full((T,), old), "ref_logprobs": torch.full((T,), ref)}
        value, gradient, metrics = computed(how, e, loss=loss, kl_coef=0.1)
        assert value.isfinite()
        assert gradient.isfinite().all()
        assert metrics["ratio_clamped"].item() == 1
        assert all(metrics[name].isfinite() for name in ("ratio", "kl"))
    e["old_logprobs"] = torch.full((T,), math.nan)  # a clamp that hid it would train on nothing
    assert computed(how, e, loss=loss)[0].isnan() == (loss != "reinforce")


@pytest.mark.parametrize("name", ["advantages", "importance_weights"])
def test_equal_numbers_of_tokens_and_responses_need_the_keyword(name):
    """One response is empty, so two numbers could belong to the two responses or to the two tokens."""
    arguments = {"logits": torch.zeros(2, 4), "targets": torch.tensor([0, 1]), "cu_seqlens": torch.tensor([0, 0, 2])}
    arguments |= {"advantages": torch.ones(1).expand(2), "advantages_per_token": True, name: torch.tensor([3.0, 5.0])}
    keyword = f"{name}_per_token"
    for per_token, factor in ((False, 5), (True, 4)):
        loss, _ = policy_gradient_loss(**arguments | {keyword: per_token}, loss="reinforce")
        assert loss.item() == pytest.approx(factor * math.log(4))
    with pytest.raises(ValueError, match=f"since T = S = 2: give {keyword}=True or {keyword}=False"):
        policy_gradient_loss(**arguments | {keyword: None}, loss="reinforce")
    one_each = arguments | {"cu_seqlens": torch.tensor([0, 1, 2]), "advantages_per_token": None}
    assert policy_gradient_loss(**one_each)[0].item() == policy_gradient_loss(**one_each | {keyword: True})[0].item()


def test_entropy_of_impossible_tokens():
    logp, entropy = token_logprobs(torch.tensor([[0.0, 0.0, float("-inf")]]), torch.tensor([1]))
    torch.testing.assert_close(entropy, torch.tensor([math.log(2)]))
    torch.testing.assert_close(logp, torch.tensor([-math.log(2)]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": torch.arange(T)}, r"targets must be in \[0, 9\), got 9 at token 9"),
        ({"targets": torch.zeros(7, dtype=torch.int64)}, r"targets must be integers \[T\] = \[11\]"),
        ({"cu_seqlens": torch.tensor([0, 3, 4, 4, 9])}, "cu_seqlens must rise from 0 to T = 11"),
        ({"cu_seqlens": torch.tensor([0, 5, 4, 5, 11])}, "cu_seqlens must rise from 0 to T = 11"),
        ({"advantages": torch.zeros(5)}, r"advantages must be \[S\] = \[4\] or \[T\] = \[11\], got the shape \(5,\)"),
        ({"advantages_per_token": True}, r"advantages must be \[T\] = \[11\], got the shape \(4,\)"),
        ({"importance_weights_per_token": True}, r"importance_weights must be \[T\] = \[11\], got the shape \(4,\)"),
        ({"advantages_per_token": 1}, "advantages_per_token must be True or False, got 1"),
        ({"mask": torch.ones(T)}, "mask must be bool"),
        ({"old_logprobs": torch.ones(3)}, r"old_logprobs must be \[T\] = \[11\], got the shape \(3,\)"),
        ({"temperature": 0.0}, "temperature must be a finite number above 0, got 0.0"),
        ({"dual_clip": 1}, "dual_clip must be a number above 1, got 1"),
        ({"kl": "k4"}, "kl must be one of"),
        ({"aggregation": "mean"}, "aggregation must be one of"),
        ({"kl_coef": 0.1, "ref_logprobs": None}, "ref_logprobs must be given"),
        ({"aggregation": "seq_sum_constant"}, "needs a denominator"),
    ],
)
def test_bad_options(example, options, message):
    with pytest.raises(ValueError, match=message):
        policy_gradient_loss(**(example | options))


def test_a_compiled_module_with_other_sums_is_refused(monkeypatch):
    check_fields("LossSums", LossSums._fields)
    monkeypatch.setitem(_C.FIELDS, "LossSums", LossSums._fields[::-1])
    with pytest.raises(ImportError, match=r"maxrl_fast._C does not fit .* its LossSums has the fields \('logprob_diff',"):
        check_fields("LossSums", LossSums._fields)
