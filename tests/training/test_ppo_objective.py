import copy
import dataclasses
import math

import pytest
import torch
from torch.nn import functional as F

from maxrl_fast.errors import NonFiniteError
from maxrl_fast.job.describe import count
from maxrl_fast.model.linear import LoraLinear, add_adapters
from maxrl_fast.records import Rollouts, Samples
from maxrl_fast.training.learner import Critic, LossSettings, critic_model, make_optimizer
from maxrl_fast.training.objectives.classes import (
    PpoObjective,
    explained_variance,
    gae_advantages,
    state_values,
    update_critic,
    whitened,
)
from maxrl_fast.training.passes import num_critic_weights
from tests.batches import collected
from tests.models import tiny_decoder
from tests.training.test_learner import PROMPTS, learner, sampled

LENGTHS = [3, 1, 0, 7, 16, 2, 33, 0, 1]
CU_SEQLENS = torch.tensor([0, *LENGTHS]).cumsum(0)
T = sum(LENGTHS)


def numbers(seed, size=T):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_definition(values, rewards, lengths, gamma, gae_lambda):
    advantages, start = [], 0
    for reward, length in zip(rewards, lengths, strict=True):
        v = [*values[start : start + length], 0.0]
        deltas = [gamma * v[t + 1] - v[t] + reward * (t == length - 1) for t in range(length)]
        for t in range(length):
            powers = enumerate(deltas[t:])
            advantages.append(sum((gamma * gae_lambda) ** i * delta for i, delta in powers))
        start += length
    return torch.tensor(advantages, dtype=torch.float64)


@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (0.9, 0.95), (1.0, 0.0), (0.0, 0.3)])
def test_advantages_are_the_double_sum(gamma, gae_lambda):
    values, rewards = numbers(0), numbers(1, len(LENGTHS))
    actual = gae_advantages(values, rewards, CU_SEQLENS, gamma, gae_lambda)
    expected = by_definition(values.tolist(), rewards.tolist(), LENGTHS, gamma, gae_lambda)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert actual.abs().min() > 1e-4
    single = gae_advantages(values.float(), rewards.float(), CU_SEQLENS, gamma, gae_lambda)
    torch.testing.assert_close(single, expected, rtol=1e-4, atol=1e-5)


def test_no_token_and_values_that_are_not_finite():
    for num_responses in (0, 2):
        rewards, cu_seqlens = torch.zeros(num_responses), torch.zeros(num_responses + 1).long()
        assert not len(gae_advantages(torch.zeros(0), rewards, cu_seqlens, 1.0, 1.0))
    values = numbers(0)
    values[CU_SEQLENS[4] :] = torch.nan  # of later responses: nothing of them reaches the others
    advantages = gae_advantages(values, numbers(1, len(LENGTHS)), CU_SEQLENS, 0.9, 0.95)
    assert advantages[: CU_SEQLENS[4]].isfinite().all()


def test_where_one_token_counts_or_all_are_equal_nothing_is_whitened_or_explained():
    """test_ppo_objective.py has the values of a step."""
    one, values = torch.arange(T) == 4, numbers(0)
    for advantages, counts in (
        (values, one),
        (values, one & False),
        (0 * values + 0.5, one | True),
    ):
        assert not whitened(advantages, counts).any()
    assert explained_variance(values, 0 * values + 0.1) == 0
    assert explained_variance(values[:0], values[:0]) == 0


REWARDS = torch.tensor([[1.0, 0, 0.5, 1], [0, 0, 0, 0], [1, 0, 0, 1]])


def responses(model):
    rollouts, generator = sampled(model), torch.Generator().manual_seed(1)
    lists = [part.tolist() for part in rollouts.tokens.split(rollouts.lengths.tolist())]
    lists[2], lists[11] = [], []
    given = Rollouts.given(lists)
    noise = torch.rand(len(given.tokens), generator=generator)
    return dataclasses.replace(given, logprobs=-noise - 2)


def with_critic(model, clip=0.2, settings=None, budget=10_000):
    """Return a learner with a critic whose value head is not 0, and whose layers are not the
    policy's any more.
    """
    trained = critic_model(model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in (p for p in trained.parameters() if p.requires_grad):
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    one = learner(model, settings or LossSettings(loss="ppo", aggregation="token_mean"), budget)
    one.critic = Critic(trained, make_optimizer(trained, 0.99, 0.01), 1e-3, clip, trained)
    return one


def plain_values(critic, rollouts):
    values = []

    def attention(layer, q, k, v, *_):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1)

    for s, response in enumerate(rollouts.tokens.split(rollouts.lengths.tolist())):
        if len(response):
            prompt = PROMPTS.take(s // 4, 1).tokens
            tokens = torch.cat([prompt, response])[:-1]
            rows = torch.arange(len(prompt) - 1, len(tokens))
            hidden = critic(tokens, torch.arange(len(tokens)), attention, rows, torch.float64)
            values.append(hidden @ critic.lm_head.weight)
    return torch.cat(values)


def exact_values(one, rollouts):
    return plain_values(copy.deepcopy(one.critic.model).double(), rollouts).detach()


@pytest.mark.parametrize(("clip", "budget"), [(0.0, 10_000), (0.1, 1), (0.1, 25)])
def test_an_update_of_the_critic_has_the_gradient_of_the_definition(clip, budget):
    model = tiny_decoder()
    rollouts, one = responses(model), with_critic(model, clip, budget=budget)
    critic, generator = one.critic, torch.Generator().manual_seed(3)
    size = len(rollouts.tokens)
    old = (exact_values(one, rollouts) + 0.2 * torch.randn(size, generator=generator)).float()
    returns = torch.rand(size, generator=generator)
    chosen = torch.tensor([0, 1, 2, 3, 8, 10, 11])
    is_chosen = torch.isin(torch.arange(12).repeat_interleave(rollouts.lengths), chosen)

    reference = copy.deepcopy(critic.model).double()
    v = plain_values(reference, rollouts)
    clamped = torch.minimum(torch.maximum(v, old.double() - clip), old.double() + clip)
    errors = (v - returns) ** 2
    if clip:
        clipped = (clamped - returns) ** 2 > errors
        assert 0.1 < clipped.double().mean() < 0.9
        errors = torch.maximum(errors, (clamped - returns) ** 2)
    expected = 0.5 * errors[is_chosen].mean()
    expected.backward()

    critic.lr = 0.0
    loss, norm = update_critic(one, Samples(PROMPTS, rollouts), old, returns, chosen, when="step 1")
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    gradients = dict(reference.named_parameters())
    whole_norm = math.sqrt(sum(float(p.grad.square().sum()) for p in gradients.values()))
    assert norm == pytest.approx(whole_norm, rel=1e-3)
    scale = min(1.0, 1.0 / whole_norm)  # the clipped gradient
    for name, parameter in critic.model.named_parameters():
        wanted = scale * gradients[name].grad
        largest = float(wanted.abs().max())
        assert largest > 1e-6, name
        torch.testing.assert_close(parameter.grad.double(), wanted, rtol=1e-3, atol=1e-3 * largest)
    assert all(p.grad is None for p in model.parameters())  # the policy has no part in it


@pytest.mark.parametrize("has_unknown", [False, True])
def test_a_step_of_the_policy_has_whitened_advantages_of_each_token(has_unknown):
    model = tiny_decoder()
    rollouts, one = responses(model), with_critic(model)
    valid = torch.ones(3, 4, dtype=torch.bool)
    if has_unknown:
        valid[0, 1] = valid[2, 0] = False
    samples = collected(Samples(PROMPTS, rollouts), REWARDS * valid, valid if has_unknown else None)
    counts = valid.flatten().repeat_interleave(rollouts.lengths)
    values = exact_values(one, rollouts)
    given = (REWARDS * valid).flatten().tolist()
    raw = by_definition(values.tolist(), given, rollouts.lengths.tolist(), 0.99, 0.9)
    whitened = (raw - raw[counts].mean()) / (raw[counts].var() + 1e-8).sqrt() * counts

    step = PpoObjective(gae_gamma=0.99, gae_lambda=0.9).begin(samples, one)
    factors = step.batch.rollouts.importance_weights
    assert factors.abs().max() > 1
    torch.testing.assert_close(factors.double(), whitened, rtol=1e-3, atol=1e-3)
    assert torch.equal(step.advantages(samples.minibatches(1)[0]), torch.ones(12))

    returns, values, metrics = (raw + values)[counts], values[counts], step.finish()
    errors = returns - values
    assert metrics["value_mean"] == pytest.approx(float(values.mean()), rel=1e-3)
    explained = 1 - float(errors.var(correction=0) / returns.var(correction=0))
    assert metrics["explained_variance"] == pytest.approx(explained, rel=1e-2)
    assert metrics["value_loss"] == pytest.approx(0.5 * float(errors.square().mean()), rel=1e-3)
    assert metrics["critic_grad_norm"] > 1e-2


def test_the_critic_learns_once_for_each_minibatch():
    model = tiny_decoder()
    one = with_critic(model)
    samples = collected(Samples(PROMPTS, responses(model)), REWARDS)
    before = copy.deepcopy(one.critic.model.state_dict())

    def moved():
        return [(before[name] != x).any() for name, x in one.critic.model.state_dict().items()]

    step = PpoObjective().begin(samples, one)
    for share in samples.minibatches(3):
        step.advantages(share)
    assert not any(moved())
    step.finish()
    assert {int(state["step"]) for state in one.critic.optimizer.state.values()} == {3}
    assert all(moved())
    assert not one.optimizer.state  # the policy's


@pytest.mark.parametrize(("tied", "rank"), [(True, 0), (False, 3)])
def test_the_critic_is_a_copy_of_what_is_trained(tied, rank):
    model = tiny_decoder(tie_word_embeddings=tied)
    if rank:
        add_adapters(model, rank, 8.0, "q_proj,down_proj", seed=0)
    critic = critic_model(model)
    assert count(critic, is_trained=True) == num_critic_weights(model)
    policy, own = dict(model.named_parameters()), dict(critic.named_parameters())
    shared = {name for name, p in own.items() if p is policy.get(name)}
    assert shared == {name for name, p in own.items() if not p.requires_grad}
    assert own["lm_head.weight"].shape == (32,)
    assert not own["lm_head.weight"].any()
    assert sum(isinstance(module, LoraLinear) for module in critic.modules()) == (4 if rank else 0)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.requires_grad):
            parameter += 1
    holder = Critic(critic, make_optimizer(critic, 0.99, 0.01), 1e-3, 0.2, critic)
    holder.start_from(model)
    for name, parameter in critic.named_parameters():
        assert name == "lm_head.weight" or torch.equal(parameter, policy[name]), name
    assert model.lm_head.weight.shape == (32, 32)  # the policy keeps its own


@pytest.mark.parametrize("family", ["gemma3_text", "gpt2"])
def test_policies_of_transformers_have_critics(family):
    from tests.model.test_huggingface import PROMPTS as THEIRS
    from tests.model.test_huggingface import ROLLOUTS, tiny_policy

    policy = tiny_policy(family)
    one, trained = learner(policy), critic_model(policy)
    with torch.no_grad():
        trained.lm_head.weight.copy_(torch.randn(32, generator=torch.Generator().manual_seed(0)))
    descent = torch.optim.SGD([p for p in trained.parameters() if p.requires_grad], lr=0.0)
    one.critic = Critic(trained, descent, 1e-4, 0.2, trained)
    assert count(trained, is_trained=True) == num_critic_weights(policy)
    assert trained.body is not policy.body
    samples, expected = Samples(THEIRS, ROLLOUTS), []
    values = state_values(one, samples)
    for s, response in enumerate(ROLLOUTS.tokens.split(ROLLOUTS.lengths.tolist())):
        prompt = THEIRS.take(s // samples.num_rollouts, 1).tokens
        # the critic has the policy's weights still
        _, hidden = policy.own_logits(torch.cat([prompt, response]))
        expected.append(hidden[len(prompt) - 1 : -1] @ trained.lm_head.weight.detach())
    torch.testing.assert_close(values, torch.cat(expected), rtol=1e-3, atol=1e-3)
    first, second = (
        update_critic(one, samples, values, 0 * values, samples.sequences, when="step 1")[0]
        for _ in range(2)
    )
    assert first == pytest.approx(0.5 * values.square().mean().item(), rel=1e-3)
    assert second < first - 1e-5


def test_what_is_not_finite_is_named():
    model = tiny_decoder()
    rollouts, one = responses(model), with_critic(model)
    before = copy.deepcopy(one.critic.model.state_dict())
    samples, returns = Samples(PROMPTS, rollouts), torch.full((len(rollouts.tokens),), 1e30)
    with pytest.raises(NonFiniteError, match="step 7: the critic's loss is inf"):
        update_critic(one, samples, 0 * returns, returns, samples.sequences, when="step 7")
    after = one.critic.model.state_dict()
    assert all(torch.equal(before[name], weight) for name, weight in after.items())
    samples = collected(Samples(PROMPTS, Rollouts.given([[20, 21]] * 12)), REWARDS)
    with torch.no_grad():
        # a token of the second prompt alone
        one.critic.model.model.embed_tokens.weight[9] = torch.nan
    message = "step 1: the critic's value of a token is nan for prompt 1"
    with pytest.raises(NonFiniteError, match=message):
        PpoObjective().begin(samples, one)
