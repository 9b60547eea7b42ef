"""The losses of the literature against their definitions, each written here from its publication, response by response, in
float64, and differentiated by autograd."""

import math
import typing

import pytest
import torch

from maxrl_fast.config.options import LossName
from maxrl_fast.ops import LOSSES, linear_policy_gradient_loss, policy_gradient_loss, token_logprobs
from maxrl_fast.ops import token_loss as module
from maxrl_fast.ops.losses import loss_numbers
from tests.statistics import statistics_for

LENGTHS = [4, 1, 6, 3, 5]
T, S, V = sum(LENGTHS), len(LENGTHS), 7
CU_SEQLENS = torch.tensor([0, *LENGTHS]).cumsum(0)
# Numbers that are not the defaults, all different, so that no two options can be swapped.
OTHER = {
    "gmpo": {"low": 0.15, "high": 0.35},
    "vespo": {"k_positive": 1.5, "lambda_positive": 2.5, "k_negative": 0.7, "lambda_negative": 1.2},
    "sapo": {"tau_positive": 0.8, "tau_negative": 1.7},
    "dppo": {"low": 0.05, "high": 0.1, "kl": 0.03},
    "dispo": {"low_positive": 0.9, "high_positive": 1.3, "low_negative": 0.7, "high_negative": 1.1},
}
NEW = ["luspo", "gmpo", "vespo", "sapo", "dppo", "dispo", "topr", "topr_token"]


def _luspo(a, logp, old, option):
    """Liu et al. 2026: the length times GSPO's clipped ratio of the sequence, which is one number."""
    s = (logp - old).mean().exp()
    return len(logp) * torch.minimum(a[0] * s, a[0] * s.clamp(0.9, 1.3))


def _gmpo(a, logp, old, option):
    """Zhao et al. 2025, algorithm 1: a geometric mean of ratios that are clipped where the advantage pushes them."""
    low, high = option["low"], option["high"]
    sign = torch.where(a >= 0, 1.0, -1.0)
    x = logp - old
    clipped = sign * torch.minimum(sign * x, sign * x.clamp(-low, high))
    return a[0] * clipped.mean().exp()


def _vespo(a, logp, old, option):
    """phi(w) = w^k e^(-lambda w), divided by its value at 1, of the product of all ratios."""
    w = (logp - old).detach().exp().prod()
    total = 0.0
    for advantage, lp in zip(a, logp, strict=True):
        k, rate = (option[f"{x}_{'positive' if advantage >= 0 else 'negative'}"] for x in ("k", "lambda"))
        total = total + w**k * math.exp(-rate * float(w)) / math.exp(-rate) * advantage * lp
    return total


def _sapo(a, logp, old, option):
    total = 0.0
    for advantage, ratio in zip(a, (logp - old).exp(), strict=True):
        tau = option["tau_positive" if advantage > 0 else "tau_negative"]
        total = total + advantage * 4 / tau / (1 + (-tau * (ratio - 1)).exp())
    return total


def _dppo(a, logp, old, option):
    p, q = logp.detach().exp(), old.exp()
    keep = ~torch.where(a > 0, p - q > option["high"], p - q < -option["low"])
    return (keep * a * (logp - old).exp() - option["kl"] * (logp - old) ** 2).sum()


def _dispo(a, logp, old, option):
    total = 0.0
    for advantage, lp, ratio in zip(a, logp, (logp - old).detach().exp(), strict=True):
        sign = "positive" if advantage >= 0 else "negative"
        total = total + min(max(ratio, option[f"low_{sign}"]), option[f"high_{sign}"]) * advantage * lp
    return total


def _topr(a, logp, old, option):
    """Eq. 8: the score function of a whole trajectory, with its ratio limited to [0, 1] where the reward is negative."""
    pi, mu = logp.detach().sum().exp(), old.sum().exp()
    return sum(advantage * lp * (1.0 if advantage > 0 else min(1.0, pi / mu)) for advantage, lp in zip(a, logp, strict=True))


def _topr_token(a, logp, old, option):
    ratio = (logp - old).detach().exp()
    return (torch.where(a > 0, 1.0, ratio.clamp(0, 1)) * a * logp).sum()


OBJECTIVE = {name: globals()[f"_{name}"] for name in NEW}
# Whose objective above is the mean over a response, as the ratio of a sequence makes it; the others' are sums over tokens.
OF_SEQUENCE = {"luspo": "seq_mean_token_sum", "gmpo": "seq_mean_token_mean"}


def aggregation_of(name):
    return OF_SEQUENCE.get(name, "token_mean")


def numbers(name, given=None):
    return dict(zip(LOSSES[name].options, loss_numbers(name, given), strict=True))


def example(spread=0.3, seed=3, per_token=False, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits = 2 * draw(T, V)
    targets = logits.argmax(1).where(torch.arange(T) % 2 == 0, torch.randint(V, (T,), generator=generator))
    old = token_logprobs(logits, targets)[0] + spread * draw(T)
    advantages = draw(T) if per_token else torch.tensor([1.5, -2.0, -0.7, 0.9, -1.1], dtype=torch.float64)
    return {
        "logits": logits.to(dtype),
        "targets": targets,
        "advantages": advantages.to(dtype),
        "cu_seqlens": CU_SEQLENS,
        "old_logprobs": old.to(dtype),
    }


def definition(name, logits, e, mask, option):
    """Return the loss of the definition, averaged over tokens or responses that are not masked."""
    logp = torch.log_softmax(logits, -1).gather(1, e["targets"][:, None])[:, 0]
    a = e["advantages"] if len(e["advantages"]) == T else e["advantages"].repeat_interleave(torch.tensor(LENGTHS))
    total = logits.sum() * 0
    for start, stop in zip(CU_SEQLENS[:-1].tolist(), CU_SEQLENS[1:].tolist(), strict=True):
        keep = torch.arange(start, stop)[mask[start:stop]]
        if len(keep):
            total = total - OBJECTIVE[name](a[keep], logp[keep], e["old_logprobs"][keep], option)
    return total / (S if name in OF_SEQUENCE else int(mask.sum()))


def computed(how, monkeypatch, **arguments):
    """Return the loss, its gradient in the logits and the metrics: of a kernel, of the reference or of the linear loss."""
    logits = arguments.pop("logits").detach().requires_grad_()
    if how == "linear":  # hidden @ weight.T is the logits
        loss, metrics = linear_policy_gradient_loss(logits, torch.eye(V, dtype=logits.dtype), **arguments, chunk_tokens=4)
    else:
        with monkeypatch.context() as patch:
            patch.setattr(module, "has_kernels", lambda device: how == "kernel")
            loss, metrics = policy_gradient_loss(logits, **arguments)
    return loss, torch.autograd.grad(loss, logits)[0], metrics


MASKS = [torch.ones(T, dtype=torch.bool), torch.arange(T) % 3 != 1]


@pytest.mark.parametrize("how", ["kernel", "reference", "linear"])
@pytest.mark.parametrize("spread", [0.02, 0.3, 1.5])
@pytest.mark.parametrize("name", NEW)
def test_values_and_gradients_are_those_of_the_definition(name, spread, how, monkeypatch):
    for seed, mask in ((3, MASKS[0]), (4, MASKS[1])):
        for given in (None, OTHER.get(name)):
            e = example(spread, seed)
            logits = e["logits"].clone().requires_grad_()
            expected = definition(name, logits, e, mask, numbers(name, given))
            (gradient,) = torch.autograd.grad(expected, logits)
            assert gradient.abs().max() > 1e-4 or (name, spread) == ("luspo", 1.5)  # where all responses are clipped
            options = {"loss": name, "loss_options": given, "aggregation": aggregation_of(name), "mask": mask}
            options |= {"clip_low": 0.1, "clip_high": 0.3}  # luspo's alone
            loss, actual, _ = computed(how, monkeypatch, **e, **options)
            assert loss.item() == pytest.approx(expected.item(), rel=1e-10, abs=1e-12)
            torch.testing.assert_close(actual, gradient, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("how", ["kernel", "reference", "linear"])
@pytest.mark.parametrize("name", [name for name in NEW if name not in OF_SEQUENCE])
def test_advantages_per_token(name, how, monkeypatch):
    e = example(0.3, per_token=True)
    e["advantages"][5::4] = 0  # these tokens still belong to the ratio of their sequence
    logits = e["logits"].clone().requires_grad_()
    expected = definition(name, logits, e, MASKS[1], numbers(name))
    loss, actual, _ = computed(how, monkeypatch, **e, loss=name, mask=MASKS[1])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-10)
    torch.testing.assert_close(actual, torch.autograd.grad(expected, logits)[0], rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("how", ["kernel", "reference"])
def test_gmpo_clips_each_token_by_the_sign_of_its_own_advantage(how, monkeypatch):
    e, log_ratio = example(0.0), torch.tensor([0.9, 0.1, -0.9, 0.7, -0.3], dtype=torch.float64)
    e = {"logits": e["logits"][:5], "targets": e["targets"][:5], "old_logprobs": e["old_logprobs"][:5] - log_ratio}
    advantages = torch.tensor([1.0, -1.0, -2.0, 0.0, 1.0]).double()
    e |= {"advantages": advantages, "advantages_per_token": True, "cu_seqlens": torch.tensor([0, 5])}
    ratio = math.exp((0.4 + 0.1 - 0.4 + 0.4 - 0.3) / 5)
    loss, gradient, metrics = computed(how, monkeypatch, **e, loss="gmpo", denominator=1.0)
    assert loss.item() == pytest.approx(ratio, rel=1e-12)  # times minus the sum of the advantages
    assert (gradient.abs().sum(1) > 0).tolist() == [False, True, False, False, True]
    assert (metrics["clipped_high"].item(), metrics["clipped_low"].item()) == (0.25, 0.25)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("old", ["the policy's", "absent"])
def test_the_first_update_has_the_gradient_of_reinforce(name, old, monkeypatch):
    e = example(0.0)
    own = statistics_for(name, T, chosen=False)
    if old == "absent":
        del e["old_logprobs"]
    for aggregation in {aggregation_of(name), LOSSES[name].aggregation or "seq_mean_token_mean"}:
        _, expected, _ = computed("kernel", monkeypatch, **e, loss="reinforce", aggregation=aggregation)
        for how in ("kernel", "reference", "linear"):
            _, gradient, metrics = computed(how, monkeypatch, **e, **own, loss=name, aggregation=aggregation)
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-15)
            assert metrics["ratio"].item() == pytest.approx(1, rel=1e-14)
            if old == "absent":  # otherwise rounding puts some ratios above 1, where topr's weight ends
                assert metrics["clipped_low"].item() == metrics["clipped_high"].item() == 0


@pytest.mark.parametrize("how", ["kernel", "reference", "linear"])
@pytest.mark.parametrize("name", LOSSES)
def test_equal_rewards_have_no_gradient_but_for_the_divergence_of_dppo(name, how, monkeypatch):
    """Groups of one and groups with equal rewards have advantage 0."""
    e = example(0.3) | {"advantages": torch.zeros(S, dtype=torch.float64)}
    e["old_logprobs"][2] = -math.inf
    options = {"loss": name, "aggregation": aggregation_of(name), **statistics_for(name, T, chosen=False)}
    loss, gradient, metrics = computed(how, monkeypatch, **e, **options)
    if name != "dppo":
        assert loss.item() == 0
        assert not gradient.any()
        assert metrics["dropped_tokens"].item() == T
        return
    logits = e["logits"].clone().requires_grad_()
    x = (torch.log_softmax(logits, -1).gather(1, e["targets"][:, None])[:, 0] - e["old_logprobs"]).clamp(-20, 20)
    expected = 1e-3 * x.square().mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0], rtol=1e-10, atol=1e-15)
    assert metrics["dropped_tokens"].item() == 0
    assert not computed(how, monkeypatch, **e, **options, loss_options={"kl": 0})[1].any()


def one_token(name, advantage, log_ratio, how, monkeypatch, p=0.5):
    """Return the gradient in the log-prob of a response of one token of probability p, over -A, and the metrics."""
    logits = torch.tensor([[math.log(p), math.log(1 - p)]], dtype=torch.float64, requires_grad=True)
    logp = torch.log_softmax(logits, -1)[0, 0]
    arguments = (torch.tensor([0]), torch.tensor([advantage], dtype=torch.float64), torch.tensor([0, 1]))
    with monkeypatch.context() as patch:
        patch.setattr(module, "has_kernels", lambda device: how == "kernel")
        loss, metrics = policy_gradient_loss(
            logits, *arguments, old_logprobs=logp.detach()[None] - log_ratio, loss=name, aggregation="seq_mean_token_sum"
        )
    slope = torch.autograd.grad(loss, logits)[0][0, 0] / (1 - p)
    return slope.item() / -advantage, {side: int(metrics[f"clipped_{side}"].item()) for side in ("low", "high")}


def side_of(log_ratio):
    return {"low": int(log_ratio < 0), "high": int(log_ratio > 0)}


NOWHERE = {"low": 0, "high": 0}


@pytest.mark.parametrize("how", ["kernel", "reference"])
def test_both_sides_of_each_bound(how, monkeypatch):
    """One step inside a bound the ratio counts; one step outside it is clipped, for the sign of the advantage that is."""

    def run(name, advantage, log_ratio, p=0.5):
        return one_token(name, advantage, log_ratio, how, monkeypatch, p)

    step = 1e-6
    for sign, bound in ((1, 0.4), (-1, -0.4)):  # gmpo: beyond log-ratios of .4 in the advantage's direction
        inside, outside = bound - sign * step, bound + sign * step
        assert run("gmpo", sign, inside) == (pytest.approx(math.exp(inside)), NOWHERE)
        assert run("gmpo", sign, outside) == (0, side_of(bound))
        assert run("gmpo", -sign, outside) == (pytest.approx(math.exp(outside)), NOWHERE)
    for sign, q in ((1, 0.3), (-1, 0.7)):  # dppo: the probability was q and is .5
        for beyond, change in ((False, -step), (True, step)):
            x = math.log(0.5 / (q - sign * change))
            pull = 2e-3 * x / -sign
            expected = (pytest.approx(pull), side_of(x)) if beyond else (pytest.approx(math.exp(x) + pull), NOWHERE)
            assert run("dppo", sign, x) == expected
            assert run("dppo", -sign, x) == (pytest.approx(math.exp(x) - pull), NOWHERE)
    for sign, low, high in ((1, 0.8, 11), (-1, 0, 101)):  # dispo
        for ratio in (0.79, 0.81, 10.9, 11.1, 100.0, 102.0):
            clipped = {"low": int(ratio < low), "high": int(ratio > high)}
            assert run("dispo", sign, math.log(ratio)) == (pytest.approx(min(max(ratio, low), high)), clipped)
    for name in ("topr", "topr_token"):
        for ratio in (0.3, 0.99, 1.01, 5.0):
            assert run(name, 1, math.log(ratio)) == (1, NOWHERE)
            assert run(name, -1, math.log(ratio)) == (pytest.approx(min(ratio, 1)), side_of(max(0, ratio - 1)))
    for sign, tau in ((1, 1.0), (-1, 1.05)):  # sapo never clips
        for ratio in (0.1, 1.0, 3.0, 40.0, 5e8):
            gate = 1 / (1 + math.exp(-min(tau * (ratio - 1), 700)))
            assert run("sapo", sign, math.log(ratio)) == (pytest.approx(4 * gate * (1 - gate) * ratio, abs=1e-12), NOWHERE)
    for sign, k, rate in ((1, 2, 3), (-1, 3, 2)):  # vespo
        for ratio in (0.1, 1.0, 3.0):
            assert run("vespo", sign, math.log(ratio)) == (pytest.approx(math.exp(rate - rate * ratio) * ratio**k), NOWHERE)


@pytest.mark.parametrize("how", ["kernel", "reference", "linear"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NEW)
def test_wrong_logprobs_leave_losses_finite_and_nan_does_not_hide(name, dtype, how, monkeypatch):
    options = {"loss": name, "aggregation": aggregation_of(name)}
    for wrong in (-1e4, 1e4, -math.inf, math.inf):
        e = example(0.1, dtype=dtype)
        e["old_logprobs"][7] = wrong
        loss, gradient, metrics = computed(how, monkeypatch, **e, **options)
        assert loss.isfinite()
        assert gradient.isfinite().all()
        assert metrics["ratio"].isfinite()
        if LOSSES[name].sequence is None:  # in the ratio of a sequence the others may make up for one token
            assert metrics["ratio_clamped"].item() == pytest.approx(1 / T)
    e["old_logprobs"][7] = math.nan
    assert computed(how, monkeypatch, **e, **options)[0].isnan()


@pytest.mark.parametrize("how", ["kernel", "reference"])
def test_a_clamped_ratio_has_no_gradient_and_a_constant_factor_stays(how, monkeypatch):
    for log_ratio in (-21.0, 21.0):
        for name in ("gmpo", "sapo"):
            assert one_token(name, 1.0, log_ratio, how, monkeypatch)[0] == 0
        assert one_token("dppo", -1.0, abs(log_ratio), how, monkeypatch)[0] == 0
        assert one_token("topr", -1.0, log_ratio, how, monkeypatch)[0] == pytest.approx(
            math.exp(min(log_ratio + 1, 0)), rel=1e-9
        )


@pytest.mark.parametrize("name", LOSSES)
def test_unknown_and_impossible_options_are_refused(name):
    e = example()
    with pytest.raises(ValueError, match=f"(loss|loss_options of) {name} (takes no options|must be among .*), got 'slope'"):
        policy_gradient_loss(**e, loss=name, loss_options={"slope": 1.0})
    for option, row in LOSSES[name].options.items():
        wrong = [-0.1, math.inf, math.nan, "1", None] + [0] * (row.wanted == "a finite number above 0")
        for value in wrong:
            with pytest.raises(ValueError, match=f"{option} of {name} must be {row.wanted}, got"):
                policy_gradient_loss(**e, loss=name, loss_options={option: value})
    with pytest.raises(TypeError, match="loss_options must be a mapping of names to numbers, got list"):
        policy_gradient_loss(**e, loss=name, loss_options=[1.0])


def test_a_misspelt_option_is_recognised():
    with pytest.raises(ValueError, match=r"tau_positive, tau_negative, got 'tau_pos'; did you mean 'tau_positive'\?"):
        policy_gradient_loss(**example(), loss="sapo", loss_options={"tau_pos": 1.0})


def test_luspo_is_a_sum_over_each_response():
    with pytest.raises(ValueError, match=r"aggregation must be seq_mean_token_sum for luspo, .* got token_mean"):
        policy_gradient_loss(**example(), loss="luspo")


def test_every_loss_is_described_and_can_be_chosen():
    assert typing.get_args(LossName) == tuple(LOSSES)
    for name, row in LOSSES.items():
        assert row.formula, name
        assert row.weight, name
        assert row.source, name
        assert len(row.options) <= 4, name
