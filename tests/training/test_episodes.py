import pytest
import torch

from maxrl_fast.records import Samples
from maxrl_fast.training.learner import Learner, LossSettings
from maxrl_fast.training.packing import Packer
from maxrl_fast.training.passes import run_batch
from tests.batches import make_prompts
from tests.models import tiny_decoder, updated
from tests.random_episodes import naive_logprobs, random_parts, rollouts_of
from tests.training.test_packing import tries

NUM_ROLLOUTS = 4


def samples_of(seed, vocabulary=32):
    """Return prompts and episodes as lists, and as samples: with a small vocabulary many begin
    alike, also across an insertion.
    """
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in (5, 1, 2)]
    episodes = [random_parts(generator, vocabulary) for _ in range(NUM_ROLLOUTS * len(prompts))]
    return prompts, episodes, Samples(make_prompts(prompts), rollouts_of(episodes))


def parts_of(packer, budget):
    sequences = torch.arange(len(packer.rollouts))
    if budget == "alone":
        return [sequences[s : s + 1] for s in sequences.tolist()]
    return packer.split(sequences, budget)


@pytest.mark.parametrize(
    ("vocabulary", "shares_all", "budget"),
    [(2, True, "alone"), (2, True, 10_000), (2, False, 13), (32, True, 40), (32, False, 1)],
)
def test_packed_episodes_equal_each_alone_with_dense_attention(vocabulary, shares_all, budget):
    prompts, episodes, samples = samples_of(vocabulary, vocabulary)
    model = tiny_decoder().double()
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(len(samples.rollouts.tokens), generator=generator).double()
    own_prompts = [prompt for prompt in prompts for _ in range(NUM_ROLLOUTS)]
    naive = torch.cat([naive_logprobs(model, *x) for x in zip(own_prompts, episodes, strict=True)])
    expected = torch.autograd.grad(weights @ naive, [*model.parameters()])
    packer = Packer(samples.prompts, samples.rollouts, torch.ones(len(episodes)), shares_all)
    ours, total = torch.zeros_like(naive), torch.zeros((), dtype=torch.float64)
    read = 0
    for part in parts_of(packer, budget):
        batch = packer.pack(part)
        read += len(batch.tokens)
        assert torch.equal(batch.targets, samples.rollouts.tokens[batch.target_index])
        assert torch.equal(batch.old_logprobs, samples.rollouts.logprobs[batch.target_index])
        hidden = run_batch(model, batch, torch.float64)
        logprobs = (hidden @ model.output_matrix.T).log_softmax(-1)
        logprobs = logprobs.gather(1, batch.targets[:, None])[:, 0]
        ours[batch.target_index] = logprobs.detach()
        total = total + weights[batch.target_index] @ logprobs
    assert (ours - naive).abs().max() < 1e-12
    gradients = torch.autograd.grad(total, [*model.parameters()])
    for own, reference in zip(gradients, expected, strict=True):
        assert reference.abs().max() > 1e-3
        assert (own - reference).abs().max() < 1e-12 * max(1.0, float(reference.abs().max()))
    if budget == 10_000:
        rows = [
            [*prompt, *(x for part in parts for x in part)][:-1]
            for prompt, parts in zip(own_prompts, episodes, strict=True)
        ]
        assert read == tries(rows)
        assert packer.rows.lengths.tolist() == [*map(len, rows)]


LOSSES = {
    "reinforce": LossSettings("reinforce", "token_mean"),
    "sequences": LossSettings("reinforce", "seq_mean_token_mean", temperature=0.8),
    "constant": LossSettings("reinforce", "seq_sum_constant", max_new_tokens=24),
}


@pytest.mark.parametrize(
    ("loss", "budget"), [("reinforce", 30), ("sequences", 1), ("constant", 10_000)]
)
def test_updates_learn_from_sampled_tokens_alone(loss, budget):
    """The gradient is that of the loss of dense log-probs, whose averages count sampled tokens."""
    prompts, episodes, samples = samples_of(5)
    settings, model = LOSSES[loss], tiny_decoder()
    advantages = torch.randn(len(episodes), generator=torch.Generator().manual_seed(2))
    advantages[2] = 0.0
    lengths = [sum(map(len, parts[::2])) for parts in episodes]
    own = [
        naive_logprobs(model, prompts[s // NUM_ROLLOUTS], parts, settings.temperature)
        for s, parts in enumerate(episodes)
    ]
    sizes = {"seq_mean_token_mean": [12 * n for n in lengths], "seq_sum_constant": [12 * 24] * 12}
    sizes = sizes.get(settings.aggregation, [sum(lengths)] * 12)
    terms = [-a * x.sum() / size for a, x, size in zip(advantages, own, sizes, strict=True)]
    parameters = dict(model.named_parameters())
    expected = torch.autograd.grad(torch.stack(terms).sum(), [*parameters.values()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    learner = Learner(model, optimizer, settings, 1e9, budget, torch.float32)
    metrics = updated(learner, samples, advantages, samples.sequences, when="step 1", lr=0.0)
    for (name, parameter), gradient in zip(parameters.items(), expected, strict=True):
        assert gradient.abs().max() > 1e-4
        assert (parameter.grad - gradient).abs().max() < 2e-4 * gradient.abs().max(), name
    assert metrics.num_targets == sum(lengths) - lengths[2]
    rows = [sum(map(len, parts)) - 1 for parts in episodes]
    alone = sum(len(prompts[s // NUM_ROLLOUTS]) + row for s, row in enumerate(rows) if s != 2)
    assert metrics.num_tokens_alone == alone
    logprobs = learner.passes.logprobs(model, samples, torch.tensor([1, 5, 6]))
    wanted = torch.cat([own[s] for s in (1, 5, 6)]).detach()
    torch.testing.assert_close(logprobs, wanted, rtol=1e-4, atol=1e-4)
