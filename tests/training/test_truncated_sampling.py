"""What a policy gradient estimates when responses are sampled with top-p, by enumeration of all
responses of two tokens.

pi is the policy, q the sampler: pi of the kept tokens over their mass m. The choices for the
probability of a sampled token in the engine's log-probs are pi itself, as ours is, or q, whose
ratio pi/q = m is below 1 although engine and policy are equal.
"""

import itertools

import pytest
import torch

from maxrl_fast.ops.token_loss import policy_gradient_loss

V, TOP_P = 5, 0.7
# of the response (a, b)
REWARD = torch.randn(V, V, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.fixture
def tables():
    """Return the logits of the first token [V], and of the second after each first one [V, V], with
    gradients.
    """
    generator = torch.Generator().manual_seed(1)
    first = (1.5 * torch.randn(V, generator=generator, dtype=torch.float64)).requires_grad_()
    return first, (
        1.5 * torch.randn(V, V, generator=generator, dtype=torch.float64)
    ).requires_grad_()


def kept_tokens(logits):
    """Return whether each token [V] is among the most probable ones that have TOP_P of the
    probability.
    """
    p, kept, mass = logits.detach().softmax(-1), torch.zeros(V, dtype=torch.bool), 0.0
    for token in p.argsort(descending=True).tolist():
        if mass >= TOP_P:
            break
        kept[token], mass = True, mass + float(p[token])
    return kept


def responses(tables):
    """Return, for each response that the sampler can give: its reward, log-probs of its tokens, and
    their log kept masses.
    """
    first, second = tables
    rows = []
    for a, b in itertools.product(range(V), repeat=2):
        if kept_tokens(first)[a] and kept_tokens(second[a])[b]:
            pairs = [(first, a), (second[a], b)]
            logp = torch.stack([logits.log_softmax(-1)[token] for logits, token in pairs])
            mass = torch.stack(
                [logits.log_softmax(-1)[kept_tokens(logits)].logsumexp(-1) for logits, _ in pairs]
            )
            rows.append((REWARD[a, b], logp, mass))
    rewards, logp, mass = (torch.stack(x) for x in zip(*rows, strict=True))
    assert 4 < len(rewards) < V * V - 4
    assert mass.exp().max() < 0.98
    return rewards, logp, mass


def gradient(value, tables):
    return torch.cat([g.flatten() for g in torch.autograd.grad(value, tables, retain_graph=True)])


def test_one_token_has_the_samplers_exact_gradient_and_the_kept_mass_only_scales_it(tables):
    """E_q[A grad log pi] = grad E_q[R], with A centred on its mean; with the ratio pi/q it is m of
    that, prompt by prompt.
    """
    first, _ = tables
    kept = kept_tokens(first)
    logp, mass = first.log_softmax(-1)[kept], first.log_softmax(-1)[kept].logsumexp(-1)
    q, rewards = (logp - mass).exp(), REWARD[kept, 0]
    exact = torch.autograd.grad((q * rewards).sum(), first, retain_graph=True)[0]
    advantages = rewards - (q.detach() * rewards).sum()
    ours = torch.autograd.grad((q.detach() * advantages * logp).sum(), first, retain_graph=True)[0]
    with_mass = torch.autograd.grad(
        (q.detach() * advantages * mass.exp().detach() * logp).sum(), first, retain_graph=True
    )[0]
    assert exact.abs().max() > 0.05
    torch.testing.assert_close(ours, exact)
    torch.testing.assert_close(with_mass, mass.exp().detach() * exact)
    assert mass.exp() < 0.98


def test_longer_responses_differ_from_the_samplers_gradient_by_the_growth_of_the_kept_mass(tables):
    """E_q[A sum_t grad log pi_t] = grad E_q[R] + E_q[A sum_t grad log m_t]."""
    rewards, logp, mass = responses(tables)
    log_q = (logp - mass).sum(1)
    q = log_q.exp()
    assert float(q.sum()) == pytest.approx(1)
    exact = gradient((q * rewards).sum(), tables)
    advantages = rewards - (q.detach() * rewards).sum()
    ours = gradient((q.detach() * advantages * logp.sum(1)).sum(), tables)
    rest = gradient((q.detach() * advantages * mass.sum(1)).sum(), tables)
    torch.testing.assert_close(ours, exact + rest)
    assert rest.abs().max() > 1e-3  # which sampling the same tokens in training would remove
    assert torch.cosine_similarity(ours, exact, dim=0) > 0.9


def test_the_product_of_the_kept_masses_gives_the_policys_gradient_on_the_kept_responses(tables):
    """E_q[W A grad log pi] with W = prod_t m_t is the gradient of the policy's own mean reward over
    what q can sample.
    """
    rewards, logp, mass = responses(tables)
    q, weight, pi = (
        (logp - mass).sum(1).exp().detach(),
        mass.sum(1).exp().detach(),
        logp.sum(1).exp(),
    )
    estimated = gradient((q * weight * rewards * logp.sum(1)).sum(), tables)
    torch.testing.assert_close(estimated, gradient((pi * rewards).sum(), tables))
    per_token = gradient((q[:, None] * mass.exp().detach() * rewards[:, None] * logp).sum(), tables)
    assert (per_token - estimated).abs().max() > 0.01  # weights per token are neither


def test_ratios_to_the_renormalised_distribution_clip_what_nothing_has_changed(tables):
    """PPO on the whole set of responses, each weighted by q: old log-probs of pi give E_q[A grad
    log pi], those of q do not.
    """
    rewards, logp, mass = responses(tables)
    q = (logp - mass).sum(1).exp().detach()
    advantages = rewards - (q * rewards).sum()
    lengths = torch.arange(0, 2 * len(rewards) + 1, 2)
    # Rows of two logits each: the log-prob of the token, and of all others together.
    rows = torch.stack([logp.flatten(), torch.log1p(-logp.flatten().exp())], 1)

    def ppo(old):
        loss, metrics = policy_gradient_loss(
            rows,
            torch.zeros(len(rows), dtype=torch.int64),
            q * advantages,
            lengths,
            old_logprobs=old.detach().flatten(),
            loss="ppo",
            clip_low=0.1,
            clip_high=0.1,
            aggregation="seq_mean_token_sum",
            denominator=1.0,
        )
        return gradient(-loss, tables), metrics

    wanted = gradient((q * advantages * logp.sum(1)).sum(), tables)
    right, metrics = ppo(logp)
    torch.testing.assert_close(right, wanted, rtol=1e-6, atol=1e-9)
    assert float(metrics["clipped_low"]) == 0
    biased, metrics = ppo(logp - mass)
    assert float(metrics["clipped_low"]) > 0.2  # negative advantages do not push
    assert (biased - wanted).abs().max() > 0.2 * wanted.abs().max()
