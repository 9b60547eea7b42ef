"""Packing: which stream position predicts which target, worked out by hand."""

import torch

from maxrl_fast.batching import micro_batches
from maxrl_fast.records import Rollouts
from tests.batches import make_prompts, one_batch

PROMPTS = make_prompts([[10, 11, 12], [20]])
ROLLOUTS = Rollouts.given([[1, 2], [3], [4, 5, 6], [7, 8]])  # two to each prompt


def test_the_stream_and_its_targets():
    batch = one_batch(PROMPTS, ROLLOUTS)
    assert batch.tokens.tolist() == [10, 11, 12, 20, 1, 4, 5, 7]  # prompts, then responses without their last token
    assert batch.positions.tolist() == [0, 1, 2, 0, 3, 1, 2, 1]
    assert batch.targets.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    predicted_from = batch.tokens[batch.rows][batch.target_rows]
    assert predicted_from.tolist() == [12, 1, 12, 20, 4, 5, 20, 7]
    assert batch.cu_seqlens.tolist() == [0, 2, 3, 6, 8]


def test_micro_batches_cover_every_chosen_sequence_once_within_the_budget():
    generator = torch.Generator().manual_seed(0)
    prompts = make_prompts([[1] * int(n) for n in torch.randint(1, 9, (6,), generator=generator)])
    rollouts = Rollouts.given([[2] * int(n) for n in torch.randint(1, 12, (18,), generator=generator)])
    chosen = torch.tensor([0, 2, 3, 4, 5, 8, 9, 10, 12, 13, 15, 16, 17])
    for budget in (1, 12, 30, 10_000):
        batches = list(micro_batches(prompts, rollouts, torch.ones(18), chosen, budget))
        assert torch.equal(torch.cat([batch.sequences for batch in batches]), chosen)
        for batch in batches:
            assert len(batch.tokens) <= budget or len(batch.sequences) == 1
            assert batch.cu_seqlens[-1] == rollouts.lengths[batch.sequences].sum()
    assert len(batches) == 1
    assert list(micro_batches(prompts, rollouts, torch.ones(18), chosen[:0], 10)) == []
