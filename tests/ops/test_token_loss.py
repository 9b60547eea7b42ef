"""The token loss against its formulas, one token at a time in Python floats."""

import math

import pytest
import torch

from maxrl_fast.ops import policy_gradient_loss, token_logprobs

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
        "old_logprobs": logp + 0.5 * draw(T),  # ratios well beyond the clip range, both ways
        "ref_logprobs": logp + 0.3 * draw(T),
        "temperature": 0.7,
    }


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
            rho = math.exp(sum(differences) / len(differences) if loss == "gspo" else difference)
            clipped = min(max(rho, 1 - low), 1 + high)
            if loss == "reinforce":
                value = -advantage * logp
            elif loss == "cispo":
                value = -clipped * advantage * logp
            else:
                value = max(-advantage * rho, -advantage * clipped)
                if dual and advantage < 0:
                    value = min(value, -advantage * dual)
            d = logp - float(e["ref_logprobs"][t])
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


def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_is_reinforce(example):
    logits = example.pop("logits").requires_grad_()
    del example["old_logprobs"]
    loss, metrics = policy_gradient_loss(logits, **example, loss="ppo")
    reinforce, _ = policy_gradient_loss(logits, **example, loss="reinforce")
    assert metrics["ratio"].item() == T
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], torch.autograd.grad(reinforce, logits)[0])


def test_masked_positions_leak_nothing(example):
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


def test_as_many_advantages_as_responses_are_one_a_response():
    """Also where that is the number of tokens, because a response is empty."""
    logits, targets = torch.zeros(2, 4), torch.tensor([0, 1])
    loss, _ = policy_gradient_loss(logits, targets, torch.tensor([3.0, 5.0]), torch.tensor([0, 0, 2]), loss="reinforce")
    assert loss.item() == pytest.approx(5 * math.log(4))


def test_entropy_of_impossible_tokens():
    logits = torch.tensor([[0.0, 0.0, float("-inf")]])
    logp, entropy = token_logprobs(logits, torch.tensor([1]))
    torch.testing.assert_close(entropy, torch.tensor([math.log(2)]))
    torch.testing.assert_close(logp, torch.tensor([-math.log(2)]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "ppoo"}, "loss must be one of reinforce, ppo, cispo, gspo, got 'ppoo'"),
        ({"kl": "k4"}, "kl must be one of"),
        ({"aggregation": "mean"}, "aggregation must be one of"),
        ({"kl_coef": 0.1, "ref_logprobs": None}, "ref_logprobs must be given"),
        ({"aggregation": "seq_sum_constant"}, "needs a denominator"),
    ],
)
def test_bad_options(example, options, message):
    with pytest.raises(ValueError, match=message):
        policy_gradient_loss(**(example | options))
