import dataclasses
import math

import pytest
import torch

from maxrl_fast.algorithms.losses import find_loss
from maxrl_fast.algorithms.tokens import Tokens
from maxrl_fast.records import Samples
from maxrl_fast.training.learner import LossSettings, _seed
from maxrl_fast.training.trainer import step_metrics
from tests.batches import collected, one_batch
from tests.models import response_logits, tiny_decoder, updated
from tests.training.test_learner import PROMPTS, sampled
from tests.training.test_learner import learner as make_learner

# a group of equal rewards
ADVANTAGES = torch.tensor([1.0, 1.5, 0.7, -0.8, 0, 0, 0, 0, 2.0, 1.2, -0.3, 1.5])
ANCHOR = 0.3


def own_loss(t: Tokens, *, power: float = 2.0) -> torch.Tensor:
    return (
        -t.advantages * t.ratio
        + 0.1 * (t.sequence_mean(t.log_ratio).detach() * t.logprobs).abs() ** power
    )


def settings_of(loss, aggregation="token_mean", more=None, **options):
    return LossSettings(loss, aggregation, 0.1, 0.3, loss_options=options, seed=4, **(more or {}))


SIMKO = {"alpha": 0.3, "k": 2, "tau": 0.5, "penalty": 2.0}
ALL = {"top_entropy": 0.6, "siren": 0.5, "temperature": 0.7, "entropy_coef": 0.05}
CASES = {  # and the number of responses computed; None: the direct computation says it
    "kl_cov": (settings_of("kl_cov", share=0.15, coef=0.7), 12),
    "lp_reg": (settings_of("lp_reg", share=0.4, min_p=0.3), 8),
    "clip_cov": (settings_of("clip_cov", share=0.1, low=0.05, high=3.0), 8),
    "simko": (settings_of("simko", **SIMKO), 8),
    "gspo, high entropies": (
        settings_of("gspo", "seq_mean_token_mean", {"top_entropy": 0.4}),
        None,
    ),
    "siren": (settings_of("ppo", more={"siren": 0.7}), 12),
    "all": (settings_of("simko", "seq_mean_token_sum", ALL, **SIMKO), 12),
    # of each token alone: by the kernel, and by functions
    "ppo": (settings_of("ppo"), 8),
    "sapo": (settings_of("sapo"), 8),
    "gspo": (settings_of("gspo", "seq_mean_token_mean"), 8),
    "dppo": (settings_of("dppo", kl=0.1), 12),
    "own": (settings_of(own_loss, power=1.5), 12),
    "entropy_adv": (settings_of("entropy_adv", kappa=0.5), 8),
    "entropy_adv, high entropies": (settings_of("entropy_adv", more={"top_entropy": 0.9}), 8),
}


def off_policy(model):
    rollouts, generator = sampled(model), torch.Generator().manual_seed(0)
    noise = 0.3 * torch.randn(len(rollouts.tokens), generator=generator)
    weights = 0.5 + torch.rand(len(rollouts.tokens), generator=generator)
    given = {"logprobs": rollouts.logprobs + noise, "importance_weights": weights}
    given["sampler_weights"] = weights.square()  # the rest would be of an objective
    return Samples(PROMPTS, dataclasses.replace(rollouts, **given))


def learner(model, settings, budget=10_000, anchor=ANCHOR, lr=0.05):
    sgd = torch.optim.SGD(model.parameters(), lr=lr)
    state = {"siren_anchor": torch.tensor([anchor]).double()}
    return make_learner(model, settings, budget, sgd, objective_state=state)


def update(trained, samples, sequences=range(12), advantages=ADVANTAGES, lr=0.05):
    chosen = torch.tensor([*sequences]).long()
    return updated(trained, samples, advantages, chosen, when="step 3", lr=lr, draw=(3, 1))


def nucleus_entropy(row):
    """Return the entropy of the fewest most probable tokens with 0.8 of the probability [V]."""
    kept, total = [], 0.0
    for v in row.argsort(descending=True).tolist():
        if total < 0.8:
            kept.append(v)
        total += float(row.detach()[v])
    q = row[kept] / row[kept].sum()
    return -(q * q.log()).sum()


def direct(model, samples, settings):
    rollouts, row = samples.rollouts, find_loss(settings.loss)
    logits = response_logits(model, one_batch(PROMPTS, rollouts), torch.float32).double()
    log_p = (logits / settings.temperature).log_softmax(-1)
    logprobs = log_p.gather(1, rollouts.tokens[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    a = ADVANTAGES.double().repeat_interleave(rollouts.lengths) * rollouts.importance_weights
    if settings.top_entropy < 1:
        count = -(-len(a) * round(100 * settings.top_entropy) // 100)
        threshold = entropy.topk(count).values[-1].detach()
        a = a * (entropy >= threshold - 1e-5)
    options = row.resolve(settings.loss_options)
    old, mask = rollouts.logprobs.double(), torch.ones_like(a, dtype=torch.bool)
    tokens = Tokens(
        logprobs, entropy, old, old, a, mask, rollouts.cu_seqlens, targets=rollouts.tokens,
        generator=torch.Generator().manual_seed(_seed(4, 3, 1)),
        importance_weights=rollouts.sampler_weights.double(),
    )  # fmt: skip
    tokens.metrics |= {"entropy_threshold": threshold} if settings.top_entropy < 1 else {}
    if row.over_batch:
        detached = dataclasses.replace(tokens, logprobs=logprobs.detach(), entropy=entropy.detach())
        tokens.statistics = row.compare(detached, options)
        tokens.metrics |= detached.metrics
    if row.masks:
        tokens.advantages, row, options = a * tokens.statistics, find_loss(row.masks), {}
    given = [tokens, log_p] if row.reads_logits else [tokens]
    values = row.bind(options, clip_low=0.1, clip_high=0.3, dual_clip=math.inf)(*given)
    parts = (values - settings.entropy_coef * entropy).split(rollouts.lengths.tolist())
    is_mean = settings.aggregation == "seq_mean_token_mean"
    loss = sum(x.mean() if is_mean else x.sum() for x in parts)
    loss = loss / (len(a) if settings.aggregation == "token_mean" else 12)
    means = []
    for rows in log_p.exp().split(rollouts.lengths.tolist()) if settings.siren else ():
        h = torch.stack([nucleus_entropy(row) for row in rows])
        peaks = h[h > h.detach().quantile(0.8)]
        means.append(peaks.mean() if len(peaks) else 0 * h.sum())
    mean = sum(means) / max(len(means), 1)
    if settings.siren:
        tokens.metrics |= {"siren_entropy": mean, "siren_anchor": torch.tensor(ANCHOR)}
    total = loss + settings.siren * (mean - ANCHOR) ** 2
    (of_rows,) = torch.autograd.grad(total, log_p, retain_graph=True)
    count = sum(bool(x.any()) for x in of_rows.split(rollouts.lengths.tolist()))
    gradients = torch.autograd.grad(total, [*model.parameters()])
    return loss.item(), gradients, tokens, count


@pytest.mark.parametrize("name", CASES)
def test_an_update_is_that_of_the_whole_batch_however_it_is_cut(name):
    settings, num_responses = CASES[name]
    samples = off_policy(model := tiny_decoder())
    loss, gradients, tokens, count = direct(model, samples, settings)
    before, metrics = [p.detach().clone() for p in model.parameters()], []
    for budget in (1, 25):
        trained = learner(tiny_decoder(), settings, budget)
        metrics.append(update(trained, samples))
        for p, gradient, weight in zip(trained.model.parameters(), gradients, before, strict=True):
            size = float(gradient.abs().max())
            torch.testing.assert_close(p.grad, gradient, rtol=1e-3, atol=1e-4 * size + 1e-7)
            torch.testing.assert_close(
                p, weight - 0.05 * gradient, rtol=1e-6, atol=5e-5 * size + 1e-6
            )
    assert max(float(gradient.abs().max()) for gradient in gradients) > 1e-2
    for done in metrics:
        assert done.loss == pytest.approx(loss, rel=1e-4, abs=1e-6)
        assert done.num_sequences == (count if num_responses is None else num_responses)
        expected = {key: value.item() for key, value in tokens.metrics.items()}
        assert done.own == pytest.approx(expected, rel=1e-5)
        assert done.clipped_low + done.clipped_high == int(
            (tokens.clipped_low | tokens.clipped_high).sum()
        )
        same = {
            key: pytest.approx(value, rel=1e-5, abs=1e-6)
            for key, value in vars(metrics[0]).items()
            if key != "num_tokens"
        }
        assert {key: value for key, value in vars(done).items() if key != "num_tokens"} == same
    assert tokens.metrics.get("tokens_chosen", 2) >= 2


def test_each_update_compares_its_own_tokens_under_the_policy_that_it_begins_with():
    settings = settings_of("kl_cov", more={"top_entropy": 0.5}, share=0.2)
    samples, sequences = off_policy(tiny_decoder()), torch.arange(4, 12)
    alone = Samples(PROMPTS.take(1, 2), samples.rollouts.select(sequences))
    one, other = learner(tiny_decoder(), settings), learner(tiny_decoder(), settings)
    assert update(one, samples, sequences).own == update(other, alone, range(8), ADVANTAGES[4:]).own
    for p, expected in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(p, expected, rtol=1e-5, atol=1e-6)
    parts = [update(x, samples, sequences) for x in (one, learner(tiny_decoder(), settings))]
    later, first = (part.own["entropy_threshold"] for part in parts)
    assert later != first  # the weights have changed, and with them the entropies
    record = step_metrics(
        collected(samples, ADVANTAGES.view(3, 4)), ADVANTAGES.view(3, 4), parts, 0.1, 1.0
    )
    assert record["entropy_threshold"] == pytest.approx((later + first) / 2)
    assert record["tokens_chosen"] == sum(part.own["tokens_chosen"] for part in parts)


def test_a_draw_depends_on_seed_step_and_update_alone():
    samples, draws = off_policy(tiny_decoder()), {}
    for seed, step, number in ((0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0), (2**62 + 1, 1, 0)):
        settings = dataclasses.replace(CASES["clip_cov"][0], seed=seed)
        for budget in (1, 10_000):
            torch.manual_seed(budget)  # the global generator plays no part
            trained = learner(tiny_decoder(), settings, budget)
            plan = trained.plan(samples, ADVANTAGES, torch.arange(12), (step, number))
            drawn = plan.packer.rollouts.importance_weights == 0
            assert torch.equal(draws.setdefault((seed, step, number), drawn), drawn)
    assert len({tuple(drawn.tolist()) for drawn in draws.values()}) == len(draws)
