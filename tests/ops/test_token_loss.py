"""The token losses against their formulas, computed token by token in Python floats, and edge cases."""

import math
from functools import partial

import pytest
import torch

from maxrl_fast import _C
from maxrl_fast.ops import linear_policy_gradient_loss, policy_gradient_loss, token_logprobs
from maxrl_fast.ops._gate import check_fields
from maxrl_fast.ops.token_loss_kernel import LossSums

WRONG = {"old_logprobs": -1e4, "ref_logprobs": 100.0}
LENGTHS = [3, 1, 4]
T, V = sum(LENGTHS), 7


@pytest.fixture
def example():
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits = 2 * draw(T, V)
    targets = torch.randint(V, (T,), generator=generator)
    logp = torch.log_softmax(logits / 0.7, -1).gather(1, targets[:, None])[:, 0]
    return {
        "logits": logits,
        "targets": targets,
        "advantages": torch.tensor([1.5, -2.0, -0.7], dtype=torch.float64),
        "cu_seqlens": torch.tensor([0, 3, 4, 8]),
        "old_logprobs": logp + 0.5 * draw(T),  # ratios far outside the clip range on both sides
        "ref_logprobs": logp + 0.3 * draw(T),
        "temperature": 0.7,
    }


def clamped(log_ratio):
    return min(max(log_ratio, -20.0), 20.0)


def slow_loss(e, *, loss, kl, kl_coef, entropy_coef, aggregation, low, high, dual, mask, denominator):
    rows = (e["logits"] / e["temperature"]).tolist()
    total, start, counted = 0.0, 0, 0
    for length, advantage in zip(LENGTHS, e["advantages"].tolist(), strict=True):
        tokens = []
        for t in range(start, start + length):
            normaliser = math.log(sum(math.exp(x) for x in rows[t]))
            p = [math.exp(x - normaliser) for x in rows[t]]
            tokens.append((t, rows[t][e["targets"][t]] - normaliser, -sum(x * math.log(x) for x in p)))
        tokens = [token for token in tokens if mask[token[0]]]
        differences = [logp - float(e["old_logprobs"][t]) for t, logp, _ in tokens]
        values = []
        for (t, logp, entropy), difference in zip(tokens, differences, strict=True):
            rho = math.exp(clamped(sum(differences) / len(differences) if loss == "gspo" else difference))
            clipped = min(max(rho, 1 - low), 1 + high)
            if loss == "reinforce":
                value = -advantage * logp
            elif loss == "cispo":
                value = -clipped * advantage * logp
            else:
                value = max(-advantage * rho, -advantage * clipped)
                if dual and advantage < 0:
                    value = min(value, -advantage * dual)
            d = clamped(logp - float(e["ref_logprobs"][t]))
            value += kl_coef * {"k1": d, "k2": d * d / 2, "k3": math.exp(-d) + d - 1, "k3+": math.exp(-d) + d - 1}[kl]
            values.append(value - entropy_coef * entropy)
        counted += len(values)
        total += sum(values) / (max(len(values), 1) if aggregation == "seq_mean_token_mean" else 1)
        start += length
    return total / (denominator or (counted if aggregation == "token_mean" else len(LENGTHS)))


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_constant"])
@pytest.mark.parametrize("loss", ["reinforce", "ppo", "cispo", "gspo"])
def test_values(example, loss, aggregation):
    masks = [[True] * T, [True, False, True, True, False, True, True, True]]
    for mask in masks:
        for kl, kl_coef, entropy_coef, dual in (("k1", 0.0, 0.0, None), ("k2", 0.3, 0.2, 1.1), ("k3", 0.3, 0.0, None)):
            options = {"loss": loss, "kl": kl, "kl_coef": kl_coef, "entropy_coef": entropy_coef, "aggregation": aggregation}
            denominator = 40.0 if aggregation == "seq_sum_constant" else None
            actual, metrics = policy_gradient_loss(
                **example,
                **options,
                clip_low=0.1,
                clip_high=0.3,
                dual_clip=dual,
                mask=torch.tensor(mask),
                denominator=denominator,
            )
            expected = slow_loss(example, **options, low=0.1, high=0.3, dual=dual, mask=mask, denominator=denominator)
            assert abs(expected) > 1e-2
            assert actual.item() == pytest.approx(expected, rel=1e-12)
            assert metrics["tokens"].item() == sum(mask)


@pytest.mark.parametrize("loss", ["reinforce", "ppo", "gspo"])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_gradients(example, loss, kl):
    logits = example.pop("logits").requires_grad_()

    def value(x):
        return policy_gradient_loss(x, **example, loss=loss, kl=kl, kl_coef=0.3, entropy_coef=0.2)[0]

    assert torch.autograd.gradcheck(value, (logits,))
    assert torch.autograd.grad(value(logits), logits)[0].abs().max() > 1e-2


@pytest.mark.parametrize("ratio", [0.5, 0.79, 0.81, 1.0, 1.19, 1.21, 4.0])
@pytest.mark.parametrize("advantage", [1.3, -1.3])
@pytest.mark.parametrize(
    ("loss", "dual"), [("reinforce", None), ("ppo", None), ("ppo", 3.0), ("cispo", None), ("gspo", None), ("gspo", 3.0)]
)
def test_gradient_on_both_sides_of_each_clip(loss, dual, advantage, ratio):
    """One response of three tokens with the same ratio: the gradient in each log-prob is known."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(3, 6, generator=generator, dtype=torch.float64, requires_grad=True)
    targets, cu_seqlens = torch.tensor([2, 0, 5]), torch.tensor([0, 3])
    logp = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]

    def value(x):
        return policy_gradient_loss(
            x,
            targets,
            torch.tensor([advantage], dtype=torch.float64),
            cu_seqlens,
            old_logprobs=logp.detach() - math.log(ratio),
            loss=loss,
            dual_clip=dual,
        )[0]

    is_free = ratio <= 1.2 if advantage > 0 else ratio >= 0.8 and (dual is None or ratio < dual)
    slope = {
        "reinforce": -advantage,
        "cispo": -advantage * min(max(ratio, 0.8), 1.2),
    }.get(loss, -advantage * ratio * is_free)
    (expected,) = torch.autograd.grad(slope * logp.mean(), logits)
    (actual,) = torch.autograd.grad(value(logits), logits)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-15)
    if loss != "cispo":  # the gradient of cispo is not the derivative of its value
        assert torch.autograd.gradcheck(value, (logits,))


def test_k3_plus_has_the_value_of_k3_and_the_gradient_of_k2(example):
    logits = example.pop("logits").requires_grad_()
    example["advantages"] = torch.zeros(3, dtype=torch.float64)
    results = {}
    for kl in ("k2", "k3", "k3+"):
        loss, _ = policy_gradient_loss(logits, **example, kl=kl, kl_coef=1.0)
        results[kl] = (loss.item(), torch.autograd.grad(loss, logits)[0])
    assert results["k3+"][0] == pytest.approx(results["k3"][0], rel=1e-14)
    torch.testing.assert_close(results["k3+"][1], results["k2"][1])
    assert (results["k3"][1] - results["k2"][1]).abs().max() > 1e-3


def test_without_old_logprobs_the_gradient_is_reinforce(example):
    logits = example.pop("logits").requires_grad_()
    del example["old_logprobs"]
    loss, metrics = policy_gradient_loss(logits, **example, loss="ppo")
    reinforce, _ = policy_gradient_loss(logits, **example, loss="reinforce")
    assert metrics["ratio"].item() == 1
    assert metrics["logprob_diff"].item() == 0
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], torch.autograd.grad(reinforce, logits)[0])


def test_masked_positions_have_no_effect(example):
    mask = torch.tensor([True, True, False, True, True, True, True, True])
    clean, _ = policy_gradient_loss(**example, mask=mask, kl_coef=0.1)
    example["old_logprobs"][2] = float("nan")
    example["ref_logprobs"][2] = float("inf")
    poisoned, metrics = policy_gradient_loss(**example, mask=mask, kl_coef=0.1)
    assert poisoned.item() == clean.item()
    assert all(value.isfinite() for value in metrics.values())


def test_advantages_may_be_per_token_and_all_masked_is_zero(example):
    per_token = example | {"advantages": example["advantages"].repeat_interleave(torch.tensor(LENGTHS))}
    assert policy_gradient_loss(**per_token)[0].item() == policy_gradient_loss(**example)[0].item()
    assert policy_gradient_loss(**example, mask=torch.zeros(T, dtype=torch.bool))[0].item() == 0


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


def test_responses_of_one_token_each_need_no_keyword():
    arguments = (torch.zeros(2, 4), torch.tensor([0, 1]), torch.tensor([3.0, 5.0]), torch.tensor([0, 1, 2]))
    assert policy_gradient_loss(*arguments)[0].item() == policy_gradient_loss(*arguments, advantages_per_token=True)[0].item()


def test_lengths_that_contradict_the_keyword_are_refused(example):
    with pytest.raises(ValueError, match=r"advantages must be \[T\] = \[8\], got the shape \(3,\)"):
        policy_gradient_loss(**example, advantages_per_token=True)
    with pytest.raises(ValueError, match=r"importance_weights must be \[S\] = \[3\], got the shape \(8,\)"):
        policy_gradient_loss(**example, importance_weights=torch.ones(T), importance_weights_per_token=False)
    with pytest.raises(ValueError, match="advantages_per_token must be True or False, got 1"):
        policy_gradient_loss(**example, advantages_per_token=1)


def test_entropy_of_impossible_tokens():
    logits = torch.tensor([[0.0, 0.0, float("-inf")]])
    logp, entropy = token_logprobs(logits, torch.tensor([1]))
    torch.testing.assert_close(entropy, torch.tensor([math.log(2)]))
    torch.testing.assert_close(logp, torch.tensor([-math.log(2)]))


def test_importance_weights_multiply_only_the_advantage(example):
    per_sequence = torch.tensor([0.5, 2.0, 0.0], dtype=torch.float64)
    options = {"kl_coef": 0.3, "entropy_coef": 0.1}
    weighted = policy_gradient_loss(**example, **options, importance_weights=per_sequence)[0]
    scaled = policy_gradient_loss(**(example | {"advantages": example["advantages"] * per_sequence}), **options)[0]
    assert weighted.item() == scaled.item()
    assert abs(weighted.item() - policy_gradient_loss(**example, **options)[0].item()) > 1e-3
    per_token = per_sequence.repeat_interleave(torch.tensor(LENGTHS))
    assert policy_gradient_loss(**example, **options, importance_weights=per_token)[0].item() == weighted.item()


def test_a_temperature_per_token(example):
    temperatures = torch.linspace(0.5, 2.0, T, dtype=torch.float64)
    logits = example.pop("logits")
    whole = policy_gradient_loss(logits, **(example | {"temperature": temperatures}), entropy_coef=0.1)[0]
    scaled = policy_gradient_loss(logits / temperatures[:, None], **(example | {"temperature": 1.0}), entropy_coef=0.1)[0]
    assert whole.item() == pytest.approx(scaled.item(), rel=1e-14)


def test_metrics(example):
    """Means over the tokens with a gradient, in closed form from known log-ratios."""
    logits = example.pop("logits")
    logp, entropy = token_logprobs(logits, example["targets"], temperature=0.7)
    log_ratio = torch.tensor([0.5, -0.1, 0.0, -0.5, 0.3, -0.4, 0.1, 9.0], dtype=torch.float64)
    example |= {"old_logprobs": logp - log_ratio, "ref_logprobs": logp - 0.25}
    mask = torch.tensor([True] * 7 + [False])
    example["advantages"] = torch.tensor([1.5, -2.0, -0.7], dtype=torch.float64)
    _, metrics = policy_gradient_loss(logits, **example, kl="k2", mask=mask)
    ratio = log_ratio[:7].exp()
    expected = {
        "tokens": 7,
        "dropped_tokens": 0,
        "ratio": ratio.mean(),
        "ratio_clamped": 0,
        "clipped_low": 2 / 7,  # tokens 3 (A = -2) and 5 (A = -.7)
        "clipped_high": 1 / 7,  # token 0 (A = 1.5), not token 4 (A = -.7)
        "kl": 0.25**2 / 2,
        "entropy": entropy[:7].mean(),
        "logprob_diff": log_ratio[:7].abs().mean(),
    }
    assert set(metrics) == set(expected)
    for name, value in expected.items():
        assert metrics[name].item() == pytest.approx(float(value), rel=1e-12), name
    assert policy_gradient_loss(logits, **example, loss="cispo", mask=mask)[1]["clipped_high"].item() == pytest.approx(2 / 7)
    example["advantages"] = torch.tensor([0.0, -2.0, 0.0], dtype=torch.float64)
    _, metrics = policy_gradient_loss(logits, **example, mask=mask)
    assert (metrics["tokens"].item(), metrics["dropped_tokens"].item()) == (7, 6)
    assert metrics["ratio"].item() == pytest.approx(float(ratio[3]), rel=1e-12)


def loss_and_gradient(e, **options):
    """Return the loss of the example, its gradient in the logits, and the metrics."""
    logits = e["logits"].detach().requires_grad_()
    loss, metrics = policy_gradient_loss(logits, **{name: x for name, x in e.items() if name != "logits"}, **options)
    return loss.item(), torch.autograd.grad(loss, logits)[0], metrics


@pytest.mark.parametrize("wrong", [-1e4, 1e4, -math.inf, 100.0])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3", "k3+"])
@pytest.mark.parametrize("loss", ["reinforce", "ppo", "cispo"])
def test_one_wrong_logprob_is_clamped_and_changes_no_other_token(example, loss, kl, wrong):
    """Token 3 is a response of its own, with A = -2. Its clamped term has no gradient, and its other terms keep theirs."""
    options = {"loss": loss, "kl": kl, "kl_coef": 0.3, "entropy_coef": 0.1, "denominator": 8.0}
    logp = token_logprobs(example["logits"], example["targets"], temperature=0.7)[0]
    _, before, _ = loss_and_gradient(example, **options)
    without_kl = loss_and_gradient(example, **(options | {"kl_coef": 0.0}))[1]
    without_ratio = before
    if loss == "ppo":
        zero = example | {"advantages": torch.tensor([1.5, 0.0, -0.7], dtype=torch.float64)}
        without_ratio = loss_and_gradient(zero, **options)[1]
    if loss == "cispo":  # its ratio is a constant factor: 1.2 or .8, the bounds of the clip
        at_bound = example | {"old_logprobs": logp - math.log(1.2 if wrong < 0 else 0.8)}
        without_ratio = loss_and_gradient(at_bound, **options)[1]
    for name, expected in (("ref_logprobs", without_kl), ("old_logprobs", without_ratio)):
        spoiled = example | {name: example[name].index_fill(0, torch.tensor([3]), wrong)}
        value, gradient, metrics = loss_and_gradient(spoiled, **options)
        slow = slow_loss(spoiled, **options, aggregation="token_mean", low=0.2, high=0.2, dual=None, mask=[True] * T)
        assert value == pytest.approx(slow, rel=1e-12)
        assert metrics["ratio_clamped"].item() == pytest.approx(1 / T)
        assert torch.equal(gradient[:3], before[:3])
        assert torch.equal(gradient[4:], before[4:])
        torch.testing.assert_close(gradient[3], expected[3], rtol=1e-12, atol=1e-14)
        assert gradient[3].abs().max() > 1e-3


def test_a_wrong_logprob_clamps_the_ratio_of_its_whole_sequence(example):
    """gspo clamps the mean log-ratio, so no token of the sequence has a gradient."""
    options = {"loss": "gspo", "denominator": 8.0}
    spoiled = example | {"old_logprobs": example["old_logprobs"].index_fill(0, torch.tensor([5]), -1e4)}
    value, gradient, metrics = loss_and_gradient(spoiled, **options)
    slow = {"kl": "k1", "kl_coef": 0, "entropy_coef": 0, "aggregation": "token_mean", "low": 0.2, "high": 0.2, "dual": None}
    assert value == pytest.approx(slow_loss(spoiled, **slow, **options, mask=[True] * T), rel=1e-12)
    assert (gradient[4:] == 0).all()
    assert torch.equal(gradient[:4], loss_and_gradient(example, **options)[1][:4])
    assert metrics["ratio_clamped"].item() == pytest.approx(4 / T)
    assert metrics["ratio"].item() > 1e8


@pytest.mark.parametrize("log_ratio", [-20.001, -19.999, 19.999, 20.001])
def test_the_limits_of_the_log_ratio(log_ratio):
    """Up to 20 the gradients are those of the formulas, beyond they are 0."""
    logits = torch.randn(1, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64, requires_grad=True)
    rows = (torch.tensor([2]), torch.tensor([-1.3], dtype=torch.float64), torch.tensor([0, 1]))
    logp = torch.log_softmax(logits, -1)[0, 2]
    is_clamped = abs(log_ratio) > 20
    other = (logp.detach() - log_ratio)[None]
    loss, metrics = policy_gradient_loss(logits, *rows, old_logprobs=other, loss="ppo", clip_low=math.inf, clip_high=math.inf)
    assert loss.item() == pytest.approx(1.3 * math.exp(clamped(log_ratio)), rel=1e-9)
    assert metrics["ratio_clamped"].item() == is_clamped
    (expected,) = torch.autograd.grad(logp, logits, retain_graph=True)
    (gradient,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(gradient, (not is_clamped) * 1.3 * math.exp(log_ratio) * expected, rtol=1e-9, atol=0)
    slopes = {"k1": 1.0, "k2": log_ratio, "k3": 1 - math.exp(-log_ratio), "k3+": log_ratio}
    for kl, slope in slopes.items():
        zero = torch.zeros(1, dtype=torch.float64)
        loss, metrics = policy_gradient_loss(logits, rows[0], zero, rows[2], ref_logprobs=other, kl=kl, kl_coef=1.0)
        (gradient,) = torch.autograd.grad(loss, logits)
        torch.testing.assert_close(gradient, (not is_clamped) * slope * expected, rtol=1e-9, atol=0)
        assert metrics["ratio_clamped"].item() == is_clamped


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", ["reinforce", "ppo", "cispo", "gspo"])
def test_wrong_logprobs_leave_losses_and_gradients_finite(example, loss, dtype):
    logits = example["logits"].to(dtype)
    weight = torch.eye(V, dtype=dtype)  # hidden @ weight.T is the logits
    for old, ref in ((-1e4, 100.0), (1e4, -1e4), (-math.inf, math.inf)):
        given = example | {"advantages": torch.full((3,), -1.0), "denominator": 8.0, "loss": loss, "kl_coef": 0.1}
        given |= {"old_logprobs": torch.full((T,), old), "ref_logprobs": torch.full((T,), ref)}
        del given["logits"]
        for run in (policy_gradient_loss, partial(linear_policy_gradient_loss, weight=weight)):
            leaf = logits.detach().requires_grad_()
            value, metrics = run(leaf, **given)
            (gradient,) = torch.autograd.grad(value, leaf)
            assert value.isfinite()
            assert gradient.isfinite().all()
            assert metrics["ratio_clamped"].item() == 1
            assert all(metrics[name].isfinite() for name in ("ratio", "kl"))
    given["old_logprobs"] = torch.full((T,), math.nan)  # a clamp that hid it would train on nothing
    if loss != "reinforce":
        assert policy_gradient_loss(logits, **given)[0].isnan()


@pytest.mark.parametrize("loss", ["reinforce", "ppo", "cispo", "gspo"])
def test_the_reference_in_pytorch_equals_the_kernel(example, loss, monkeypatch):
    """The reference runs on devices without a kernel."""
    logits = example.pop("logits").requires_grad_()
    mask = torch.tensor([True, False, True, True, True, True, False, True])
    advantages = torch.tensor([1.5, 0.0, -0.7], dtype=torch.float64)
    options = example | {"advantages": advantages, "mask": mask, "loss": loss, "importance_weights": torch.rand(T).double()}
    results = []
    for entropy_coef in (0.0, 0.2):
        for has_kernels in (True, False):
            monkeypatch.setattr("maxrl_fast.ops.token_loss.has_kernels", lambda _, has=has_kernels: has)
            value, metrics = policy_gradient_loss(logits, **options, kl_coef=entropy_coef, entropy_coef=entropy_coef)
            results.append((value, torch.autograd.grad(value, logits)[0], metrics))
    options |= {name: options[name].index_fill(0, torch.tensor([2, 5]), wrong) for name, wrong in WRONG.items()}
    for has_kernels in (True, False):
        monkeypatch.setattr("maxrl_fast.ops.token_loss.has_kernels", lambda _, has=has_kernels: has)
        value, metrics = policy_gradient_loss(logits, **options, kl="k2", kl_coef=0.2)
        results.append((value, torch.autograd.grad(value, logits)[0], metrics))
    assert results[-1][2]["ratio_clamped"] > 0.2
    for kernel, reference in zip(results[::2], results[1::2], strict=True):
        torch.testing.assert_close(kernel, reference, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": torch.tensor([0, 1, 2, 3, 4, 5, 6, 7])}, r"targets must be in \[0, 7\), got 7 at token 7"),
        ({"targets": torch.zeros(7, dtype=torch.int64)}, r"targets must be integers \[T\] = \[8\]"),
        ({"cu_seqlens": torch.tensor([0, 3, 4, 9])}, "cu_seqlens must rise from 0 to T = 8"),
        ({"cu_seqlens": torch.tensor([0, 5, 4, 8])}, "cu_seqlens must rise from 0 to T = 8"),
        ({"advantages": torch.zeros(5)}, r"advantages must be \[S\] = \[3\] or \[T\] = \[8\], got the shape \(5,\)"),
        ({"mask": torch.ones(8)}, "mask must be bool"),
        ({"temperature": 0.0}, "temperature must be a finite number above 0, got 0.0"),
        ({"loss": "ppoo"}, "loss must be one of reinforce, ppo, cispo, gspo, luspo, .*, got 'ppoo'"),
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
