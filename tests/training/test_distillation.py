import dataclasses

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.config.read import parse
from maxrl_fast.config.resolve import resolve
from maxrl_fast.job.build import RunContext
from maxrl_fast.job.build_parts import build_policy, build_run_task
from maxrl_fast.records import Rollouts, Samples
from maxrl_fast.training.learner import LossSettings
from tests.batches import THREE_PROMPTS as PROMPTS
from tests.batches import make_prompts, one_batch
from tests.models import response_logits, tiny_decoder, updated
from tests.random_episodes import naive_logprobs, naive_rows, random_parts, rollouts_of
from tests.training.test_learner import learner

TEACHERS = make_prompts([[5, 6, 7, 8, 11, 12], [9, 1, 3], [1, 2, 3, 4, 5, 6, 7, 30, 2]])
BY_ROLLOUT = make_prompts([[4, 5, 6, 7, 8], [5, 6], [9], [3, 9, 1], [7], [2, 1, 2, 3, 30, 2]])
ROLLOUTS = Rollouts.given([[1, 2, 3, 9], [1, 2, 8], [6], [7, 7, 4, 2, 1], [3, 3], [5, 6, 7]])
FULL = LossSettings("reinforce", "token_mean", divergence_coef=0.7, temperature=0.9)


def logits_of(model, prompts):
    return response_logits(model, one_batch(prompts, ROLLOUTS), torch.float32)


def expected_gradients(model, teacher, prompts, divergence, weights, advantages):
    """jsd is 0.8 KL(Q || M) + 0.2 KL(P || M), with M = 0.8 Q + 0.2 P, and Q the teacher's."""
    log_p = (logits_of(model, PROMPTS).double() / 0.9).log_softmax(-1)
    log_q = (logits_of(teacher, prompts).detach().double() / 0.9).log_softmax(-1)

    def kl(a, b):
        return torch.nn.functional.kl_div(b, a, log_target=True, reduction="none").sum(-1)

    mixture = (0.2 * log_p.exp() + 0.8 * log_q.exp()).log()
    values = {
        "reverse": kl(log_p, log_q),
        "forward": kl(log_q, log_p),
        "jsd": 0.2 * kl(log_p, mixture) + 0.8 * kl(log_q, mixture),
    }[divergence]
    parameters = dict(model.named_parameters())
    policy = advantages * log_p.gather(1, ROLLOUTS.tokens[:, None])[:, 0]
    gradients = torch.autograd.grad((weights * values - policy).sum(), [*parameters.values()])
    return dict(zip(parameters, gradients, strict=True)), values.detach()


@pytest.mark.parametrize(
    ("divergence", "aggregation", "read", "budget", "is_self"),
    [
        ("reverse", "token_mean", TEACHERS, 12, False),
        ("reverse", "seq_mean_token_mean", None, 10_000, False),
        ("forward", "token_mean", None, 12, False),
        ("jsd", "seq_mean_token_mean", TEACHERS, 12, False),
        ("reverse", "token_mean", TEACHERS, 10_000, True),
        ("reverse", "token_mean", BY_ROLLOUT, 12, True),
        ("forward", "seq_mean_token_mean", BY_ROLLOUT, 10_000, False),
    ],
)
def test_the_exact_divergence_of_an_update(divergence, aggregation, read, budget, is_self):
    """Rollouts without a teacher have the weight 0, and count in the mean."""
    model, teacher = tiny_decoder(), None if is_self else tiny_decoder(1).requires_grad_(False)
    own = {"aggregation": aggregation, "divergence": divergence, "jsd_beta": 0.8}
    settings = dataclasses.replace(FULL, **own)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    trained = learner(model, settings, budget, sgd, reference=teacher)
    has_teacher, advantages = torch.ones(6), torch.zeros(6)
    samples = Samples(PROMPTS, ROLLOUTS, teacher_prompts=read)
    if read is BY_ROLLOUT:
        has_teacher[[1, 4]], advantages[1] = 0.0, 0.5
        samples = dataclasses.replace(samples, teacher_weights=has_teacher)
    metrics = updated(trained, samples, advantages, torch.arange(6), when="step 1", lr=0.0)
    lengths = ROLLOUTS.lengths
    scale = 1 / 18 if aggregation == "token_mean" else 1 / 6 / lengths
    weights, advantages = (
        (x * scale).repeat_interleave(lengths) for x in (0.7 * has_teacher, advantages)
    )
    prompts, teacher = read or PROMPTS, teacher or model
    given = model, teacher, prompts, divergence, weights, advantages
    expected, values = expected_gradients(*given)
    own = (logits_of(teacher, prompts) / 0.9).log_softmax(-1).gather(1, ROLLOUTS.tokens[:, None])
    found = trained.with_reference(samples).ref_logprobs
    torch.testing.assert_close(found, own[:, 0].detach(), rtol=1e-5, atol=1e-5)
    total = (values * (weights > 0)).sum()
    assert metrics.num_sequences == (5 if read is BY_ROLLOUT else 6)
    assert metrics.kl == pytest.approx(float(total), rel=1e-4)
    if read is not BY_ROLLOUT:
        assert metrics.loss == pytest.approx(float((weights * values).sum()), rel=1e-4)
    assert max(float(x.abs().max()) for x in expected.values()) > 1e-2
    for name, parameter in model.named_parameters():
        scale = float(expected[name].abs().max())
        assert float((parameter.grad - expected[name]).abs().max()) < 1e-4 * scale + 1e-7, name


@pytest.mark.parametrize(("reads_more", "budget"), [(False, 10_000), (True, 25)])
def test_a_teacher_of_episodes(reads_more, budget):
    """Tokens that environments wrote are read by both and compared by neither; against the forward
    pass of each episode alone."""
    generator = torch.Generator().manual_seed(4)
    prompts, more = [[5, 1], [7]], [[5, 1, 9, 9], [3, 7, 2]]
    episodes = [random_parts(generator, 4) for _ in range(6)]
    rollouts = rollouts_of(episodes)
    assert len(rollouts.inserted.tokens) > 4
    model, teacher = tiny_decoder(), tiny_decoder(1).requires_grad_(False)
    trained = learner(model, FULL, budget, reference=teacher)
    given = {"teacher_prompts": make_prompts(more)} if reads_more else {}
    samples = Samples(make_prompts(prompts), rollouts, **given)
    found = trained.with_reference(samples).ref_logprobs
    metrics = updated(trained, samples, torch.zeros(6), torch.arange(6), when="step 1", lr=0.0)
    pairs = [(prompts[s // 3], (more if reads_more else prompts)[s // 3]) for s in range(6)]
    expected, terms = [], []
    for (prompt, read), parts in zip(pairs, episodes, strict=True):
        expected.append(naive_logprobs(teacher, read, parts, 0.9))
        log_p, log_q = naive_rows(model, prompt, parts, 0.9), naive_rows(teacher, read, parts, 0.9)
        terms.append((log_p.exp() * (log_p - log_q)).sum(-1))
    torch.testing.assert_close(found, torch.cat(expected), rtol=1e-5, atol=1e-5)
    total = torch.cat(terms).sum()
    assert metrics.kl == pytest.approx(total.item(), rel=1e-4)
    embedding = model.model.embed_tokens.weight
    (gradient,) = torch.autograd.grad(0.7 / len(rollouts.tokens) * total, embedding)
    assert float(gradient.abs().max()) > 1e-3
    torch.testing.assert_close(embedding.grad, gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("is_self", [False, True])
def test_each_step_asks_its_teacher_about_its_own_responses(monkeypatch, is_self):
    """Without a reference it is the policy as the step finds it, which reads the answer."""
    flags = "--task maze --maze-size 7 --prompts 2 --rollouts 2 --hidden-size 32 --layers 1"
    flags += " --objective maxrl --kl-coef 1 --kl k2 --lr 0.01 --threads 1 --steps 3 --sft-steps 0"
    flags += " --device cpu --dtype float32" + " --teacher-prompt answer" * is_self
    config = parse(flags.split())
    task = build_run_task(config)
    config = resolve(config, task)
    model, teacher = build_policy(config, task), None if is_self else build_policy(config, task)
    if teacher is not None:
        teacher.requires_grad_(False).lm_head.weight.mul_(2)
    trainer = RunContext(config, task, model, teacher).trainer
    pass_, seen = trainer.learner.forward_backward, []

    def watched(samples, *arguments, **keywords):
        read = samples.prompts if teacher else samples.teacher_prompts
        assert torch.equal(read.ids, samples.prompts.ids)
        batch = one_batch(read, samples.rollouts)
        logits = response_logits(model if is_self else teacher, batch, torch.float32)
        expected = ops.token_logprobs(logits, batch.targets)[0].detach()
        torch.testing.assert_close(samples.rollouts.ref_logprobs, expected, rtol=1e-4, atol=1e-5)
        seen.append(len(expected))
        pass_(samples, *arguments, **keywords)

    monkeypatch.setattr(trainer.learner, "forward_backward", watched)
    for n in range(3):
        trainer.step(n + 1, 2 * n)
    assert len(seen) == 3
    assert min(seen) > 0
