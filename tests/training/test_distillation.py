"""On-policy distillation: the gradients of its estimators, enumerated; the exact divergence in the
learner; the teacher's prompt.
"""

import dataclasses
import itertools

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.records import Rollouts, Samples
from maxrl_fast.rollout import Sampling
from maxrl_fast.rollout.native import NativeEngine
from maxrl_fast.training.learner import Learner, frozen_copy
from maxrl_fast.training.loss_settings import LossSettings
from tests.batches import make_prompts, one_batch
from tests.models import response_logits, tiny_decoder

PROMPTS = make_prompts([[5, 6, 7, 8], [9, 1], [1, 2, 3, 4, 5, 6, 7]])
TEACHERS = make_prompts([[5, 6, 7, 8, 11, 12], [9, 1, 3], [1, 2, 3, 4, 5, 6, 7, 30, 2]])
ROLLOUTS = Rollouts.given([[1, 2, 3, 9], [1, 2, 8], [6], [7, 7, 4, 2, 1], [3, 3], [5, 6, 7]])
FULL = LossSettings("reinforce", "token_mean", kl="full", kl_coef=0.7, temperature=0.9)


@pytest.mark.parametrize(("kl", "is_reverse"), [("k1", False), ("k2", True), ("k3", False)])
def test_the_mean_gradient_of_an_estimator(kl, is_reverse):
    """Over all tokens of a vocabulary, by their probability: k2's is the gradient of the reverse
    KL, k1's is 0, and k3's is of the forward KL."""
    generator = torch.Generator().manual_seed(0)
    z, q = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    z.requires_grad_()
    p, log_q = z.detach().softmax(-1), q.log_softmax(-1)
    reverse, forward = (
        torch.autograd.grad(value, z)[0]
        for value in (
            (z.softmax(-1) * (z.log_softmax(-1) - log_q)).sum(),
            (log_q.exp() * (log_q - z.log_softmax(-1))).sum(),
        )
    )
    logits = z.expand(7, 7)  # row v is the same state, in which token v was sampled
    mean = torch.zeros(7, dtype=torch.float64)
    for v in range(7):
        loss, _ = ops.policy_gradient_loss(
            logits[v : v + 1],
            torch.tensor([v]),
            torch.zeros(1, dtype=torch.float64),
            torch.tensor([0, 1]),
            loss="reinforce",
            ref_logprobs=log_q[v : v + 1],
            kl=kl,
            kl_coef=1.0,
        )
        mean += p[v] * torch.autograd.grad(loss, z)[0]
    expected = {"k1": torch.zeros_like(reverse), "k2": reverse, "k3": forward}[kl]
    assert float((mean - expected).abs().max()) < 1e-12
    assert (float((mean - reverse).abs().max()) < 1e-12) == is_reverse
    assert float(reverse.abs().max()) > 0.05


def learner(model, settings, reference=None, budget=10_000):
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    return Learner(model, sgd, settings, 1e9, budget, torch.float32, reference)


def logits_of(model, prompts):
    return response_logits(model, one_batch(prompts, ROLLOUTS), torch.float32)


def expected_gradients(model, teacher, prompts, divergence, weights):
    """Return the gradients of sum_t weights_t D_t, by autograd of whole logits."""
    log_p = (logits_of(model, PROMPTS).double() / 0.9).log_softmax(-1)
    log_q = (logits_of(teacher, prompts).detach().double() / 0.9).log_softmax(-1)
    kl = torch.nn.functional.kl_div
    if divergence == "jsd":
        mixture = (log_p.exp() / 2 + log_q.exp() / 2).log()
        terms = [kl(mixture, x, log_target=True, reduction="none") / 2 for x in (log_p, log_q)]
        values = sum(terms).sum(-1)
    else:
        pair = (log_q, log_p) if divergence == "reverse" else (log_p, log_q)
        values = kl(*pair, log_target=True, reduction="none").sum(-1)
    parameters = dict(model.named_parameters())
    gradients = torch.autograd.grad((weights * values).sum(), list(parameters.values()))
    return dict(zip(parameters, gradients, strict=True)), values.detach()


@pytest.mark.parametrize("budget", [10_000, 12])
@pytest.mark.parametrize("reads_more", [False, True])
@pytest.mark.parametrize("divergence", ["reverse", "forward", "jsd"])
@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_the_exact_divergence_of_an_update(divergence, aggregation, reads_more, budget):
    model, teacher = tiny_decoder(), tiny_decoder(1)
    settings = dataclasses.replace(FULL, aggregation=aggregation, divergence=divergence)
    trained = learner(model, settings, teacher.requires_grad_(False), budget)
    more = {"teacher_prompts": TEACHERS} if reads_more else {}
    samples = Samples(PROMPTS, ROLLOUTS, **more)
    metrics = trained.update(samples, torch.zeros(6), torch.arange(6), when="step 1", lr=0.0)
    lengths = ROLLOUTS.lengths
    weights = torch.full((18,), 0.7 / 18)
    if aggregation == "seq_mean_token_mean":
        weights = 0.7 / 6 / lengths.repeat_interleave(lengths)
    prompts = TEACHERS if reads_more else PROMPTS
    expected, values = expected_gradients(model, teacher, prompts, divergence, weights)
    assert metrics.kl == pytest.approx(float(values.sum()), rel=1e-4)
    assert metrics.loss == pytest.approx(float((weights * values).sum()), rel=1e-4)
    assert max(float(x.abs().max()) for x in expected.values()) > 1e-2
    for name, parameter in model.named_parameters():
        scale = float(expected[name].abs().max())
        assert float((parameter.grad - expected[name]).abs().max()) < 1e-4 * scale + 1e-7, name
    shifted = make_prompts([[*x[1:], 0] for x in ([5, 6, 7, 8], [9, 1], [1, 2, 3, 4, 5, 6, 7])])
    wrong, _ = expected_gradients(model, teacher, shifted, divergence, weights)
    assert float((wrong[name] - expected[name]).abs().max()) > 1e-4


def test_a_teacher_that_equals_the_policy_has_no_gradient():
    model = tiny_decoder()
    trained = learner(model, FULL, frozen_copy(model))
    samples = Samples(PROMPTS, ROLLOUTS)
    metrics = trained.update(samples, torch.zeros(6), torch.arange(6), when="step 1", lr=0.0)
    assert (metrics.kl, metrics.loss, metrics.grad_norm) == pytest.approx((0, 0, 0), abs=1e-6)
    assert metrics.num_sequences == 6


@pytest.mark.parametrize("kl", ["k2", "full"])
def test_the_policy_teaches_itself_by_another_prompt(kl):
    """Without a reference policy the teacher is the policy, with its own prompts."""
    model = tiny_decoder()
    trained = learner(model, dataclasses.replace(FULL, kl=kl))
    samples = Samples(PROMPTS, ROLLOUTS, teacher_prompts=TEACHERS)
    samples = dataclasses.replace(samples, rollouts=trained.with_reference(samples))
    log_q = (logits_of(model, TEACHERS) / 0.9).log_softmax(-1)
    own = log_q.gather(1, ROLLOUTS.tokens[:, None])[:, 0]
    torch.testing.assert_close(samples.rollouts.ref_logprobs, own.detach(), rtol=1e-5, atol=1e-5)
    metrics = trained.update(samples, torch.zeros(6), torch.arange(6), when="step 1", lr=0.0)
    log_p = (logits_of(model, PROMPTS) / 0.9).log_softmax(-1)
    values = (log_p.exp() * (log_p - log_q)).sum(-1)
    if kl == "k2":
        values = (log_p.gather(1, ROLLOUTS.tokens[:, None])[:, 0] - own).square() / 2
    assert metrics.kl == pytest.approx(float(values.sum()), rel=1e-3)
    assert metrics.grad_norm > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("kl", ["k2", "full"])
def test_the_policy_becomes_its_teacher(kl):
    """The divergence of all responses of three tokens, enumerated, falls to 1%."""
    prompts, vocab, length, num_samples = make_prompts([[1]]), 8, 3, 64
    model, teacher = tiny_decoder(0, vocab_size=vocab), tiny_decoder(1, vocab_size=vocab)
    teacher.requires_grad_(False)
    for weight in teacher.parameters():
        weight *= 2 if weight.dim() == 2 else 1  # more certain than a new policy
    every = Rollouts.given([[*x] for x in itertools.product(range(vocab), repeat=length)])

    @torch.no_grad()
    def divergence():
        logits = [response_logits(x, one_batch(prompts, every), torch.float32) for x in models]
        log_p, log_q = (
            ops.token_logprobs(x, every.tokens)[0].double().view(-1, length).sum(1) for x in logits
        )
        return float((log_p.exp() * (log_p - log_q)).sum())

    models = (model, teacher)
    settings = LossSettings("reinforce", "token_mean", kl=kl, kl_coef=1.0)
    adam, engine = torch.optim.Adam(model.parameters()), NativeEngine(model, torch.float32)
    trained = Learner(model, adam, settings, 1e9, 10_000, torch.float32, teacher)
    start = divergence()
    for step in range(150):
        engine.load_weights(model)
        rollouts = engine.generate(
            prompts, num_samples, Sampling(1.0, length, ()), seed=0, step=step
        )
        samples = Samples(prompts, rollouts)
        samples = Samples(prompts, trained.with_reference(samples))
        sequences = samples.sequences
        trained.update(samples, torch.zeros(num_samples), sequences, when="a step", lr=3e-3)
    assert start > 1
    assert divergence() < 0.01 * start
