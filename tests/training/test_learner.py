import dataclasses

import pytest
import torch

from maxrl_fast.errors import NonFiniteError, TeacherError
from maxrl_fast.records import Rollouts, Samples
from maxrl_fast.rollout import RolloutRequest, Sampling
from maxrl_fast.rollout.native import native_engine
from maxrl_fast.training.learner import (
    Learner,
    LearningRate,
    LossSettings,
    make_optimizer,
    take_step,
    zero_gradients,
)
from tests.batches import THREE_PROMPTS as PROMPTS
from tests.batches import make_prompts
from tests.models import tiny_decoder, updated

PPO = LossSettings(loss="ppo", aggregation="token_mean")


def sampled(model, prompts=PROMPTS, temperature=1.0, stop_ids=(3,)):
    request = RolloutRequest(prompts, 4, Sampling(temperature, 9, stop_ids), 1, 1)
    return native_engine(model, torch.float32).generate(request)


def learner(model, settings=PPO, budget=10_000, optimizer=None, **options):
    optimizer = optimizer or make_optimizer(model, beta2=0.99, weight_decay=0.01)
    return Learner(model, optimizer, settings, 1e9, budget, torch.float32, **options)


def update(model, rollouts, advantages, **options):
    trained = learner(model, **options)
    samples = Samples(PROMPTS, trained.with_reference(Samples(PROMPTS, rollouts)))
    return updated(trained, samples, advantages, samples.sequences, when="step 7", lr=1e-3)


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
    for shares_all, budget, levels in (
        (True, 10_000, 3),
        (True, 400, 3),
        (False, 10_000, 1),
        (True, 1, 3),
    ):
        learning = learner(model, budget=budget)
        learning.passes = dataclasses.replace(learning.passes, shares_all=shares_all)
        packed = learning.passes.packer(samples).pack(torch.arange(12))
        assert len(packed.forest.parts) == 1 + levels
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
    rollouts = sampled(tiny_decoder())
    metrics, n = update(tiny_decoder(), rollouts, torch.ones(12)), len(rollouts.tokens)
    assert metrics.num_targets == n
    assert metrics.ratio / n == pytest.approx(1.0, abs=1e-5)
    assert metrics.logprob_diff / n < 1e-5
    assert (metrics.clipped_low, metrics.clipped_high) == (0.0, 0.0)
    shifted = dataclasses.replace(rollouts, logprobs=rollouts.logprobs - 0.5)
    metrics = update(tiny_decoder(), shifted, torch.ones(12))
    assert metrics.ratio / n == pytest.approx(2.718281828**0.5, rel=1e-4)
    assert metrics.logprob_diff / n == pytest.approx(0.5, rel=1e-4)
    assert (metrics.clipped_high, metrics.ratio_clamped) == (n, 0)
    shifted.logprobs[[1, 4]] = -1e4
    metrics = update(tiny_decoder(), shifted, -torch.ones(12))
    assert metrics.ratio_clamped == 2
    assert metrics.loss < 1e9  # without the clamp it would be infinite, and end the run


@pytest.mark.parametrize(
    ("poisoned", "budget", "message"),
    [
        ("weight", 1, r"step 7: the weight model.norm.weight is not finite"),
        ("advantage", 1, r"step 7: the loss is -?inf for prompt 1"),
        ("logprob", 1, r"step 7: the loss is nan for prompt 2"),
        ("logprob", 10_000, r"step 7: the loss is nan for one of the prompts 0, 1, 2"),
    ],
)
def test_non_finite_values_stop_the_update_and_are_named(poisoned, budget, message):
    model = tiny_decoder()
    rollouts, advantages = sampled(model), torch.ones(12)
    if poisoned == "weight":
        model.model.norm.weight.data[3] = float("nan")
    elif poisoned == "advantage":
        advantages[5] = float("inf")
    else:
        rollouts.logprobs[rollouts.cu_seqlens[9]] = float("nan")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(NonFiniteError, match=message):
        update(model, rollouts, advantages, budget=budget)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor.nan_to_num(7.0), before[name].nan_to_num(7.0)), name


def test_a_loss_that_is_not_finite_stops_the_step_where_gradients_are():
    def refuse(loss, norm):
        raise NonFiniteError(f"{loss} {norm}")

    zero_gradients(model := tiny_decoder())
    optimizer, numbers = make_optimizer(model, 0.99, 0.0), torch.tensor([torch.inf, 1.0])
    with pytest.raises(NonFiniteError, match=r"inf 0\.0"):
        take_step(model, optimizer, 1e-3, 1.0, refuse, numbers)
    assert not optimizer.state


def test_a_teacher_that_overflows_is_named():
    model, teacher = tiny_decoder(), tiny_decoder()
    torch.nn.init.constant_(teacher.model.norm.weight, 1e38)
    settings = dataclasses.replace(PPO, kl_coef=0.1)
    with pytest.raises(TeacherError, match=r"step 7: the reference policy's .* for one of"):
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
    samples = Samples(PROMPTS, sampled(model))
    advantages = torch.randn(12, generator=torch.Generator().manual_seed(0))
    for _ in range(20):
        updated(trained, samples, advantages, torch.arange(12), when="step 1", lr=1e-5)
    moments = [x for state in optimizer.state.values() for x in state.values()]
    assert {x.dtype for x in (*model.parameters(), *moments)} == {torch.float32}
    assert (model.model.norm.weight - start).abs().median() > 1e-4
    assert (start.bfloat16() == (start + 1e-5).bfloat16()).float().mean() > 0.9


def test_empty_responses_are_skipped_but_counted():
    """With one empty response of four, means over sequences divide by four."""
    model = tiny_decoder()
    settings = LossSettings(loss="reinforce", aggregation="seq_mean_token_mean")
    results = []
    for others, prompts in (([], []), ([[]], [[1]])):
        rollouts = Rollouts.given([[4, 5, 3], *others, [6], [7, 8]])
        prompts = make_prompts([[5, 6, 7, 8], *prompts, [9, 1], [1, 2, 3]])
        advantages = torch.tensor([1.0, *[2.0] * len(others), -1.0, 0.5])
        trained = learner(model, settings, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
        samples = Samples(prompts, rollouts)
        results.append(updated(trained, samples, advantages, samples.sequences, when="", lr=0.0))
    three, four = results
    assert four.num_sequences == 3
    assert four.loss == pytest.approx(three.loss * 3 / 4, rel=1e-6)
    assert four.grad_norm == pytest.approx(three.grad_norm * 3 / 4, rel=1e-5)


def test_passes_add_up_and_the_step_clips_their_sum():
    model = tiny_decoder()
    trained, parts = learner(model), []
    trained.clip_grad = 1e-3
    samples = Samples(PROMPTS, sampled(model))
    halves = [(torch.arange(a, a + 4), torch.linspace(-1, 2, 12) + a) for a in (0, 8)]

    def gradient():
        return torch.cat([p.grad.flatten() for p in model.parameters()]).clone()

    for sequences, advantages in halves:
        trained.forward_backward(samples, advantages, sequences)
        parts.append((gradient(), trained.optim_step(when="step 1", lr=0.0)))
    for sequences, advantages in halves:
        trained.forward_backward(samples, advantages, sequences)
    whole = gradient()
    torch.testing.assert_close(whole, parts[0][0] + parts[1][0])
    metrics = trained.optim_step(when="step 2", lr=0.0)
    assert metrics.grad_norm == pytest.approx(float(whole.norm()), rel=1e-4)
    assert float(gradient().norm()) == pytest.approx(1e-3, rel=1e-3)
    for name in ("loss", "num_tokens", "num_targets", "num_sequences", "ratio"):
        summed = sum(getattr(of_half, name) for _, of_half in parts)
        assert getattr(metrics, name) == pytest.approx(summed, rel=1e-5)


def test_an_interrupted_pass_discards_the_sum(monkeypatch):
    model = tiny_decoder()
    trained = learner(model)
    given = Samples(PROMPTS, sampled(model)), torch.ones(12), torch.arange(12)
    loss, gradients = trained.loss, []

    def interrupted(*arguments):
        loss(*arguments)[0].backward()
        raise KeyboardInterrupt

    for fails in (False, True):
        if fails:
            monkeypatch.setattr(trained, "loss", interrupted)
            with pytest.raises(KeyboardInterrupt):
                trained.forward_backward(*given)
            monkeypatch.undo()
        trained.forward_backward(*given)
        gradients.append(model.lm_head.weight.grad.clone())
    torch.testing.assert_close(*gradients)
