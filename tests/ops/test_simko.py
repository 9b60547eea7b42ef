"""simko against its definition, written from the authors' code token by token, in float64, and differentiated by autograd.

Their code takes the K most probable tokens of the current policy at every update, and divides the probability of the token of
rank k by that which the sampling policy gave to its own token of rank k. Here the K tokens are those of the sampling policy,
and each ratio is of one token. The old log-probs cancel in both: sg(rho) / sg(rho_k) rho_k has the value rho and the gradient
rho grad log pi(k), but for the 1e-8 that is added to sg(rho_k), which the definition below has and the loss leaves out.
"""

import math
from dataclasses import replace

import pytest
import torch

from maxrl_fast.ops import policy_gradient_loss, row_statistics, simko_tokens
from maxrl_fast.ops.token_batch import TokenBatch, loss_terms
from maxrl_fast.ops.token_loss_kernel import loss_arguments
from tests.ops.test_losses import computed

LENGTHS = [9, 1, 14, 0, 10]
T, V = sum(LENGTHS), 23
CU_SEQLENS = torch.tensor([0, *LENGTHS]).cumsum(0)
DEFAULTS = {"alpha": 0.01, "k": 3, "tau": 0.8, "penalty": 1.1}
OTHER = {"alpha": 0.3, "k": 2, "tau": 0.4, "penalty": 1.7}
CLIPS = {"clip_low": 0.25, "clip_high": 0.35}


def example(spread, seed=0, dtype=torch.float64):
    """Return logits of a policy and of the one that has sampled, whose log-ratios are about `spread`, and a batch of tokens."""
    generator = torch.Generator().manual_seed(seed)
    sampler = (2 * torch.randn(T, V, generator=generator, dtype=torch.float64)).to(dtype)
    logits = sampler + (spread * torch.randn(T, V, generator=generator, dtype=torch.float64)).to(dtype)
    targets = torch.multinomial(sampler.double().softmax(-1), 1, generator=generator)[:, 0]
    targets = torch.where(torch.arange(T) % 2 == 0, sampler.argmax(-1), targets)
    advantages = torch.tensor([1.5, -2.0, -0.7, 0.4, 0.9], dtype=torch.float64).to(dtype)
    batch = {"targets": targets, "advantages": advantages, "cu_seqlens": CU_SEQLENS}
    return logits, sampler, batch | {"mask": torch.rand(T, generator=generator) < 0.9}


def of_sampler(sampler, batch, option, temperature=1.0):
    """Return what the loss takes of the sampling policy, as a trainer computes it."""
    rows = row_statistics(sampler, batch["targets"], top_k=option["k"], temperature=temperature)
    advantages = batch["advantages"].repeat_interleave(torch.tensor(LENGTHS))
    is_top = rows.top_tokens[:, 0] == batch["targets"]
    chosen = simko_tokens(rows.entropy, is_top, advantages, CU_SEQLENS, batch["mask"], tau=option["tau"])
    return {"old_logprobs": rows.logprobs, "token_statistics": chosen, "top_tokens": rows.top_tokens}


def quantile(values, tau):
    ordered, at = sorted(values), tau * (len(values) - 1)
    low = math.floor(at)
    return ordered[low] + (at - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def definition(logits, sampler, batch, option, temperature=1.0, guard=1e-8):
    """Return the mean loss of the tokens, how many take part with A > 0, and how many with A < 0."""
    log_p, log_q = (x.double().div(temperature).log_softmax(-1) for x in (logits, sampler))
    entropies = (-(log_q.exp() * log_q).sum(-1)).tolist()
    keep, total, spread, punished = batch["mask"].tolist(), logits.sum() * 0, 0, 0
    for s, (start, stop) in enumerate(zip(CU_SEQLENS[:-1].tolist(), CU_SEQLENS[1:].tolist(), strict=True)):
        kept = [t for t in range(start, stop) if keep[t]]
        if not kept:
            continue
        threshold = quantile([entropies[t] for t in kept], option["tau"])
        for t in kept:
            a, y = float(batch["advantages"][s]), int(batch["targets"][t])
            top = sorted(range(V), key=lambda i: (-log_q[t, i].item(), i))[: option["k"]]
            ratio = rho = (log_p[t, y] - log_q[t, y]).exp()
            if a > 0 and entropies[t] > threshold:
                ratio = (1 - option["alpha"]) * rho
                for k in top:
                    rho_k = (log_p[t, k] - log_q[t, k]).exp()
                    ratio = ratio + option["alpha"] / option["k"] * rho.detach() / (rho_k.detach() + guard) * rho_k
                spread += 1
            if a < 0 and entropies[t] > threshold and y == top[0]:
                a *= option["penalty"]
                punished += 1
            low, high = 1 - CLIPS["clip_low"], 1 + CLIPS["clip_high"]
            total = total + torch.maximum(-a * ratio, -a * ratio.clamp(low, high))
    return total / sum(keep), spread, punished


@pytest.mark.parametrize("how", ["kernel", "reference", "linear"])
@pytest.mark.parametrize("spread", [0.1, 0.6])
@pytest.mark.parametrize("option", [DEFAULTS, OTHER, {**OTHER, "k": 8, "alpha": 1.0}])
def test_values_and_gradients_are_those_of_the_definition(option, spread, how, monkeypatch):
    if how == "linear":
        monkeypatch.setattr("tests.ops.test_losses.V", V)
    for seed, temperature in ((0, 1.0), (1, 0.7)):
        logits, sampler, batch = example(spread, seed)
        z = logits.clone().requires_grad_()
        expected, num_spread, num_punished = definition(z, sampler, batch, option, temperature)
        assert num_spread >= 2
        assert num_punished >= 1
        (gradient,) = torch.autograd.grad(expected, z)
        batch |= of_sampler(sampler, batch, option, temperature)
        arguments = {"logits": logits, **batch, **CLIPS, "loss": "simko", "loss_options": option, "temperature": temperature}
        loss, actual, _ = computed(how, monkeypatch, **arguments)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-7)  # the definition's 1e-8
        assert (actual - gradient).norm() <= 1e-7 * gradient.norm()
        exact, _, _ = definition(z, sampler, batch, option, temperature, guard=0.0)
        assert loss.item() == pytest.approx(exact.item(), rel=1e-11)
        torch.testing.assert_close(actual, torch.autograd.grad(exact, z)[0], rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.usefixtures("instructions")
def test_each_dtype(dtype, in_place):
    logits, sampler, batch = example(0.1, dtype=dtype)
    batch["advantages"] = batch["advantages"].float()
    z = logits.double().requires_grad_()
    expected, _, _ = definition(z, sampler, batch, OTHER)
    (gradient,) = torch.autograd.grad(expected, z)
    batch |= of_sampler(sampler, batch, OTHER)
    leaf = logits.requires_grad_()
    loss, _ = policy_gradient_loss(leaf * 1, **batch, **CLIPS, loss="simko", loss_options=OTHER, in_place=in_place)
    (actual,) = torch.autograd.grad(loss, leaf)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 3e-3}[dtype]  # two roundings at K + 1 tokens
    assert (actual.double() - gradient).norm() <= tolerance * gradient.norm()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
def test_top_tokens_of_few_bits_are_compared_with_a_large_vocabulary(dtype):
    arguments = {"advantages": torch.ones(1), "cu_seqlens": torch.tensor([0, 2]), "loss": "simko"}
    arguments |= {"token_statistics": torch.ones(2), "old_logprobs": torch.zeros(2), "advantages_per_token": False}
    logits, targets, tops = torch.randn(2, 300), torch.tensor([3, 299]), torch.tensor([[1, 50, 127], [3, 2, 0]])
    expected, _ = policy_gradient_loss(logits, targets, top_tokens=tops, **arguments)
    actual, _ = policy_gradient_loss(logits, targets, top_tokens=tops.to(dtype), **arguments)
    assert torch.equal(actual, expected)


def test_the_operator_takes_no_top_tokens_that_do_not_fit_its_loss():
    """The kernel reads K of them for each token, on trust."""
    arguments = {"cu_seqlens": torch.tensor([0, 2]), "advantages": torch.ones(1), "advantages_per_token": False}
    batch = TokenBatch(
        targets=torch.tensor([0, 1]),
        importance_weights=None,
        importance_weights_per_token=False,
        old_logprobs=None,
        ref_logprobs=None,
        temperature=1.0,
        mask=None,
        sequence_tokens=None,
        denominator=torch.ones((), dtype=torch.float64),
        token_statistics=torch.ones(2),
        **arguments,
    )
    for loss, shape, message in (
        ("simko", (2, 2), r"top_tokens must be a contiguous torch.int64 tensor of shape \(2, 3\)"),
        ("simko", None, r"loss simko takes top_tokens \[T, 3\]"),
        ("ppo", (2, 3), "loss ppo takes no top_tokens"),
    ):
        top_tokens = None if shape is None else torch.zeros(shape, dtype=torch.int64)
        given = loss_arguments(replace(batch, top_tokens=top_tokens), loss_terms(loss, 0.2, 0.2, None, "k3", 0.0, 0.0))
        with pytest.raises(ValueError, match=message):
            torch.ops.maxrl_fast.token_loss(torch.randn(2, 9), *given, True)
