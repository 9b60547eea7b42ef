"""What a policy gradient estimates when responses are sampled with top-p, by enumeration of all
responses of two tokens.

pi is the policy, q the sampler: pi of the kept tokens over their mass m. The engine's log-probs of
sampled tokens may be of pi, as ours are, or of q, whose ratio pi/q = m is below 1.
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
    generator = torch.Generator().manual_seed(1)
    first = (1.5 * torch.randn(V, generator=generator, dtype=torch.float64)).requires_grad_()
    return first, (
        1.5 * torch.randn(V, V, generator=generator, dtype=torch.float64)
    ).requires_grad_()


def kept_tokens(logits):
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


def test_gradients_with_each_weight_of_a_token(tables):
    """The table of docs/rollout.md: weights of 1, of the product of the kept masses, and of the
    token's own.
    """
    rewards, logp, mass = responses(tables)
    q = (logp - mass).sum(1).exp()
    assert float(q.detach().sum()) == pytest.approx(1)
    exact, q = gradient((q * rewards).sum(), tables), q.detach()
    advantages = rewards - (q * rewards).sum()
    ours = gradient((q * advantages * logp.sum(1)).sum(), tables)
    rest = gradient((q * advantages * mass.sum(1)).sum(), tables)
    torch.testing.assert_close(ours, exact + rest)
    assert rest.abs().max() > 1e-3  # which sampling the same tokens in training would remove
    assert torch.cosine_similarity(ours, exact, dim=0) > 0.9
    weight = mass.sum(1).exp().detach()
    of_product = gradient((q * weight * rewards * logp.sum(1)).sum(), tables)
    policys = gradient((logp.sum(1).exp() * rewards).sum(), tables)
    torch.testing.assert_close(of_product, policys)
    per_token = gradient((q[:, None] * mass.exp().detach() * rewards[:, None] * logp).sum(), tables)
    assert (per_token - of_product).abs().max() > 0.01  # weights per token are neither


def test_for_one_token_the_second_term_is_0_and_the_kept_mass_only_scales_it(tables):
    first, _ = tables
    kept = kept_tokens(first)
    logp, mass = first.log_softmax(-1)[kept], first.log_softmax(-1)[kept].logsumexp(-1)
    q, rewards = (logp - mass).exp(), REWARD[kept, 0]
    (exact,) = torch.autograd.grad((q * rewards).sum(), first, retain_graph=True)
    q, scale = q.detach(), mass.exp().detach()
    advantages = rewards - (q * rewards).sum()
    assert exact.abs().max() > 0.05
    assert scale < 0.98
    for weight in (1.0, scale):
        value = (q * weight * advantages * logp).sum()
        (actual,) = torch.autograd.grad(value, first, retain_graph=True)
        torch.testing.assert_close(actual, weight * exact)


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
