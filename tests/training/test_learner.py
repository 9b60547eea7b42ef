"""The learner: updates however they are cut into micro-batches, metrics, non-finite values."""

import dataclasses

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.errors import NonFiniteError, TeacherError
from maxrl_fast.records import Rollouts, Samples
from maxrl_fast.rollout import RolloutRequest, Sampling
from maxrl_fast.rollout.native import NativeEngine
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.loss_settings import LossSettings
from maxrl_fast.training.optimizer import LearningRate, make_optimizer
from tests.batches import make_prompts, one_batch
from tests.models import response_logits, tiny_decoder

PPO = LossSettings(loss="ppo", aggregation="token_mean")
PROMPTS = make_prompts([[5, 6, 7, 8], [9, 1], [1, 2, 3, 4, 5, 6, 7]])


def sampled(model, num_samples=4, limit=9):
    return NativeEngine(model, torch.float32).generate(
        RolloutRequest(PROMPTS, num_samples, Sampling(1.0, limit, (3,)), 1, 1)
    )


def learner(model, settings=PPO, budget=10_000, optimizer=None, **options):
    optimizer = optimizer or make_optimizer(model, beta2=0.99, weight_decay=0.01)
    return Learner(model, optimizer, settings, 1e9, budget, torch.float32, **options)


def update(model, rollouts, advantages, sequences=None, lr=1e-3, **options):
    sequences = torch.arange(len(advantages)) if sequences is None else sequences
    trained = learner(model, **options)
    samples = Samples(PROMPTS, trained.with_reference(Samples(PROMPTS, rollouts)))
    return trained.update(samples, advantages, sequences, when="step 7", lr=lr)


def gradients(model, rollouts, advantages, **options):
    """Return the gradients of an update with learning rate 0."""
    update(
        model,
        rollouts,
        advantages,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        lr=0.0,
        **options,
    )
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def worst_difference(a, b):
    return max(
        float((a[name] - b[name]).abs().max() / b[name].abs().max().clamp_min(1e-6)) for name in a
    )


def test_seq_sum_constant_divides_by_the_longest_possible_responses():
    model = tiny_decoder()
    rollouts = sampled(model)
    advantages = torch.randn(12, generator=torch.Generator().manual_seed(2))
    settings = LossSettings("reinforce", "seq_sum_constant", max_new_tokens=9)
    logits = response_logits(model, one_batch(PROMPTS, rollouts), torch.float32).detach()
    wanted, _ = ops.policy_gradient_loss(
        logits,
        rollouts.tokens,
        advantages,
        rollouts.cu_seqlens,
        loss="reinforce",
        aggregation="seq_sum_constant",
        denominator=12 * 9,
    )
    assert update(model, rollouts, advantages, settings=settings).loss == pytest.approx(
        wanted.item(), rel=1e-5
    )


ALIKE = Rollouts.given(
    [
        *([1, 2, 3, 4, 9], [1, 2, 3, 8], [1, 2, 5], [1, 2, 3, 4, 9]),
        *([6], [6, 7, 1], [6, 7, 1, 2, 3], [4, 7]),
        *([1, 1, 1], [1, 1, 2], [1, 1], [2, 1, 1]),
    ]
)


@pytest.mark.parametrize("loss", ["ppo", "gmpo", "clip_cov", "lp_reg"])
def test_an_update_by_trees_equals_one_of_every_sample_alone(loss):
    generator = torch.Generator().manual_seed(0)
    noise, weights = torch.rand(2, len(ALIKE.tokens), generator=generator, dtype=torch.float64)
    advantages = torch.randn(12, generator=generator).double()
    results = []
    for budget in (10_000, 1):  # at 1 each micro-batch is one sample
        model = tiny_decoder().double()
        sgd = torch.optim.SGD(model.parameters(), lr=0.0)
        settings = LossSettings(loss, ops.LOSSES[loss].aggregation or "token_mean", kl_coef=0.1)
        learning = Learner(
            model, sgd, settings, 1e9, budget, torch.float64, reference=tiny_decoder(1).double()
        )
        own = learning.passes.logprobs(model, Samples(PROMPTS, ALIKE), torch.arange(12))
        rollouts = dataclasses.replace(
            learning.with_reference(Samples(PROMPTS, ALIKE)),
            logprobs=own + 0.3 * noise - 0.15,
            importance_weights=0.5 + weights,
        )
        metrics = learning.update(
            Samples(PROMPTS, rollouts), advantages, torch.arange(12), when="step 1", lr=0.0
        )
        results.append((metrics, {n: p.grad.clone() for n, p in model.named_parameters()}))
    (tree, shared), (alone, expected) = results
    assert alone.num_tokens == tree.num_tokens_alone == 79 > 3 * tree.num_tokens
    assert tree.loss == pytest.approx(alone.loss, rel=1e-6)
    assert max(float(x.abs().max()) for x in expected.values()) > 1e-2
    assert worst_difference(shared, expected) < 1e-12


def test_logprobs_are_bitwise_the_same_however_much_is_shared():
    """Of at least 64 rows, for linear layers of fewer are PyTorch's, which depend on the batch."""
    generator = torch.Generator().manual_seed(0)
    prompts = make_prompts(torch.randint(1, 32, (3, 200), generator=generator).tolist())
    responses = torch.randint(1, 32, (12, 90), generator=generator)
    for s, alike in enumerate((0, 30, 7, 20, 0, 40, 41, 3, 0, 1, 0, 20)):
        responses[s, :alike] = responses[s - 1, :alike]
    rollouts = Rollouts.given([x[: 68 + s].tolist() for s, x in enumerate(responses)])
    samples, model, results = Samples(prompts, rollouts), tiny_decoder(), []
    # all that is alike, in one micro-batch and in several, then prompts alone, then nothing
    for cost, budget, levels in ((0.0, 10_000, 3), (0.0, 400, 3), (1.0, 10_000, 1), (0.0, 1, 3)):
        learning = learner(model, budget=budget)
        learning.passes = dataclasses.replace(learning.passes, merge_cost=cost)
        packed = learning.passes.packer(samples).pack(torch.arange(12))
        assert len(packed.forest.levels) == levels
        results.append(learning.passes.logprobs(model, samples, torch.arange(12)))
    assert results[0].std() > 0.5
    for other in results[1:]:
        assert torch.equal(results[0], other)


def test_a_step_with_zero_gradient_only_decays_the_weights():
    model = tiny_decoder()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    metrics = update(model, sampled(model), torch.zeros(12))
    assert (metrics.loss, metrics.grad_norm, metrics.num_sequences) == (0.0, 0.0, 0)
    decay = 1 - 1e-3 * 0.01
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name] * (decay if tensor.dim() == 2 else 1.0))


def test_on_policy_metrics():
    model = tiny_decoder()
    rollouts = sampled(model)
    metrics = update(model, rollouts, torch.ones(12))
    n = len(rollouts.tokens)
    assert metrics.num_targets == n
    assert metrics.ratio / n == pytest.approx(1.0, abs=1e-5)
    assert metrics.logprob_diff / n < 1e-5
    assert (metrics.clipped_low, metrics.clipped_high) == (0.0, 0.0)
    shifted = dataclasses.replace(rollouts, logprobs=rollouts.logprobs - 0.5)
    metrics = update(tiny_decoder(), shifted, torch.ones(12))
    assert metrics.ratio / n == pytest.approx(2.718281828**0.5, rel=1e-4)
    assert metrics.logprob_diff / n == pytest.approx(0.5, rel=1e-4)
    assert metrics.clipped_high == n
    gspo = update(
        tiny_decoder(), shifted, torch.ones(12), settings=dataclasses.replace(PPO, loss="gspo")
    )
    assert gspo.logprob_diff / n == pytest.approx(0.5, rel=1e-4)
    reinforce = update(
        tiny_decoder(), shifted, torch.ones(12), settings=dataclasses.replace(PPO, loss="reinforce")
    )
    assert reinforce.clipped_high == 0  # REINFORCE does not clip
    # dppo's (log rho)^2 is also there where the advantage is 0
    for options, num_sequences in (({}, 12), ({"kl": 0.0}, 6)):
        dppo = dataclasses.replace(PPO, loss="dppo", loss_options=options)
        half = update(tiny_decoder(), shifted, torch.tensor([1.0, 0.0]).repeat(6), settings=dppo)
        assert half.num_sequences == num_sequences
    assert metrics.ratio_clamped == 0
    shifted.logprobs[[1, 4]] = -1e4
    metrics = update(tiny_decoder(), shifted, -torch.ones(12))
    assert metrics.ratio_clamped == 2
    assert metrics.loss < 1e9  # without the clamp it would be infinite, and end the run


def poison_weight(model, rollouts, advantages):
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")


def poison_advantage(model, rollouts, advantages):
    advantages[5] = float("inf")


def poison_logprob(model, rollouts, advantages):
    rollouts.logprobs[rollouts.cu_seqlens[9]] = float("nan")


@pytest.mark.parametrize(
    ("poison", "message"),
    [
        (poison_weight, r"step 7: the weight model.norm.weight is not finite"),
        (poison_advantage, r"step 7: an advantage is not finite for prompt 1"),
        (poison_logprob, r"step 7: the loss is nan for prompt 2"),
    ],
)
def test_non_finite_values_stop_the_update_and_are_named(poison, message):
    model = tiny_decoder()
    rollouts, advantages = sampled(model), torch.ones(12)
    poison(model, rollouts, advantages)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(NonFiniteError, match=message):
        update(model, rollouts, advantages)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.nan_to_num(7.0), before[name].nan_to_num(7.0)), name


def test_a_teacher_that_overflows_is_named():
    model, teacher = tiny_decoder(), tiny_decoder()
    torch.nn.init.constant_(teacher.model.norm.weight, 1e38)
    settings = dataclasses.replace(PPO, kl_coef=0.1)
    with pytest.raises(TeacherError, match=r"step 7: the reference policy's .* for prompt 0"):
        update(model, sampled(model), torch.ones(12), settings=settings, reference=teacher)


def test_learning_rates():
    rate = LearningRate(peak=1.0, steps=10, warmup_steps=4, schedule="cosine")
    rates = [rate.at(step) for step in range(1, 11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[6] == pytest.approx(0.55)
    assert rates[9] == pytest.approx(0.1)
    assert dataclasses.replace(rate, schedule="constant").at(9) == 1.0
    assert dataclasses.replace(rate, warmup_steps=0).at(1) < 1.0


def test_updates_below_bfloat16_precision_add_up():
    """Steps of lr 1e-5 on weights near 1 are 400 times smaller than bfloat16's spacing there; the
    float32 masters keep them.
    """
    model = tiny_decoder()
    start = model.model.norm.weight.detach().clone()
    optimizer = make_optimizer(model, beta2=0.99, weight_decay=0.0)
    trained = Learner(model, optimizer, PPO, 1e9, 10_000, torch.bfloat16)
    rollouts = sampled(model)
    advantages = torch.randn(12, generator=torch.Generator().manual_seed(0))
    for _ in range(20):
        trained.update(
            Samples(PROMPTS, rollouts), advantages, torch.arange(12), when="step 1", lr=1e-5
        )
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert {x.dtype for state in optimizer.state.values() for x in state.values()} == {
        torch.float32
    }
    moved = (model.model.norm.weight - start).abs()
    assert moved.median() > 1e-4
    assert (start.bfloat16() == (start + 1e-5).bfloat16()).float().mean() > 0.9


def test_moment_variance_is_the_sum_of_second_minus_squared_first_moments():
    model = tiny_decoder()
    trained = learner(model, optimizer=make_optimizer(model, beta2=0.95, weight_decay=0.01))
    generator = torch.Generator().manual_seed(0)
    first = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    second = {
        name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()
    }
    for step in (1, 2, 3):
        rollouts, advantages = sampled(model), torch.randn(12, generator=generator)
        metrics = trained.update(
            Samples(PROMPTS, rollouts), advantages, torch.arange(12), when="step", lr=1e-3
        )
        expected = 0.0
        for name, p in model.named_parameters():
            first[name] = 0.9 * first[name] + 0.1 * p.grad
            second[name] = 0.95 * second[name] + 0.05 * p.grad.double().square()
            expected += float(
                (second[name] / (1 - 0.95**step) - (first[name] / (1 - 0.9**step)).square()).sum()
            )
        assert metrics.moment_variance == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert expected > 1e-3


def test_empty_responses_are_skipped_but_counted():
    """With one empty response of four, means over sequences divide by four."""
    model = tiny_decoder()
    rollouts = sampled(model, num_samples=1)
    empty = Rollouts(
        rollouts.tokens,
        torch.cat([rollouts.cu_seqlens[:2], rollouts.cu_seqlens[1:]]),
        rollouts.logprobs,
        torch.zeros(4, dtype=torch.bool),
    )
    prompts = make_prompts([[5, 6, 7, 8], [1], [9, 1], [1, 2, 3, 4, 5, 6, 7]])
    advantages = torch.tensor([1.0, 2.0, -1.0, 0.5])
    settings = LossSettings(loss="reinforce", aggregation="seq_mean_token_mean")
    sgd = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.0), "settings": settings}
    three = learner(model, **sgd).update(
        Samples(PROMPTS, rollouts), advantages[[0, 2, 3]], torch.arange(3), when="", lr=0.0
    )
    four = learner(model, **sgd).update(
        Samples(prompts, empty), advantages, torch.arange(4), when="", lr=0.0
    )
    assert four.num_sequences == 3
    assert four.loss == pytest.approx(three.loss * 3 / 4, rel=1e-6)
    assert four.grad_norm == pytest.approx(three.grad_norm * 3 / 4, rel=1e-5)


# of losses over the batch: test_over_batch.py
@pytest.mark.parametrize(("loss", "budget"), [("ppo", 10_000), ("sapo", 25), ("gspo", 25)])
def test_factors_of_tokens_are_importance_weights_of_every_loss(loss, budget):
    """Of the loss of all responses at once, with an advantage per response and a weight per token,
    some of them 0.
    """
    model, generator = tiny_decoder(), torch.Generator().manual_seed(4)
    rollouts = sampled(model)
    noise = 0.5 * torch.randn(len(rollouts.tokens), generator=generator)
    weights = 2 * torch.rand(len(rollouts.tokens), generator=generator)
    weights[::3] = 0
    rollouts = dataclasses.replace(
        rollouts, logprobs=rollouts.logprobs + noise, importance_weights=weights
    )
    advantages = torch.randn(12, generator=generator)
    aggregation, batch = ops.LOSSES[loss].aggregation or "token_mean", one_batch(PROMPTS, rollouts)
    expected, _ = ops.policy_gradient_loss(
        response_logits(model, batch, torch.float32),
        batch.targets,
        advantages,
        batch.cu_seqlens,
        old_logprobs=batch.old_logprobs,
        importance_weights=weights,
        loss=loss,
        aggregation=aggregation,
    )
    grads = dict(
        zip(
            dict(model.named_parameters()),
            torch.autograd.grad(expected, [*model.parameters()]),
            strict=True,
        )
    )
    settings = LossSettings(loss=loss, aggregation=aggregation)
    actual = gradients(model, rollouts, advantages, settings=settings, budget=budget)
    assert max(float(g.abs().max()) for g in grads.values()) > 1e-3
    assert worst_difference(actual, grads) < 1e-3
