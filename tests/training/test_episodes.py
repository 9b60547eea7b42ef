"""Training on episodes: what environments inserted is read, and only what the policy wrote is
learned from.
"""

import dataclasses

import pytest
import torch

from maxrl_fast.records import Samples
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.loss_settings import LossSettings
from maxrl_fast.training.packing import Packer
from maxrl_fast.training.passes import run_batch
from tests.batches import make_prompts
from tests.episodes import naive_logprobs, random_parts, rollouts_of
from tests.models import tiny_decoder

NUM_ROLLOUTS = 4


def samples_of(seed, vocabulary=32):
    """Return prompts and episodes as lists, and as samples: with a small vocabulary many begin
    alike, also across an insertion.
    """
    generator = torch.Generator().manual_seed(seed)
    prompts = [
        torch.randint(vocabulary, (n,), generator=generator).tolist() for n in (5, 1, 2)
    ]
    episodes = [
        random_parts(generator, vocabulary) for _ in range(NUM_ROLLOUTS * len(prompts))
    ]
    return prompts, episodes, Samples(make_prompts(prompts), rollouts_of(episodes))


def parts_of(packer, budget):
    sequences = torch.arange(len(packer.rollouts))
    if budget == "alone":
        return [sequences[s : s + 1] for s in sequences.tolist()]
    return packer.split(sequences, budget)


@pytest.mark.parametrize("budget", ["alone", 1, 13, 40, 10_000])
@pytest.mark.parametrize("merge_cost", [0.0, 0.2, 1.0, 1e9])
@pytest.mark.parametrize("vocabulary", [2, 32])
def test_packed_episodes_equal_each_alone_with_dense_attention(vocabulary, merge_cost, budget):
    """Log-probs and the gradient of their weighted sum, in float64."""
    prompts, episodes, samples = samples_of(vocabulary, vocabulary)
    model = tiny_decoder().double()
    weights = torch.randn(
        len(samples.rollouts.tokens), generator=torch.Generator().manual_seed(1)
    ).double()
    naive = torch.cat(
        [
            naive_logprobs(model, prompts[s // NUM_ROLLOUTS], parts)
            for s, parts in enumerate(episodes)
        ]
    )
    expected = torch.autograd.grad(weights @ naive, [*model.parameters()])
    packer = Packer(samples.prompts, samples.rollouts, torch.ones(len(episodes)), merge_cost)
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
    if budget == 10_000 and merge_cost == 0:
        rows = [
            [*prompts[s // NUM_ROLLOUTS], *(x for part in parts for x in part)][:-1]
            for s, parts in enumerate(episodes)
        ]
        assert read == len({tuple(row[:n]) for row in rows for n in range(1, len(row) + 1)})
        assert packer.rows.lengths.tolist() == [*map(len, rows)]
