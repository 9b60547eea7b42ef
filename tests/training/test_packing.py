"""Packing: which position predicts which target, what responses share, and which rank gets which
groups.
"""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from maxrl_fast.records import Rollouts
from maxrl_fast.training.packing import Packer, least_gain, merge_cost
from tests.batches import make_prompts, one_batch
from tests.fuzzing import settings
from tests.models import TINY

PROMPTS = make_prompts([[10, 11, 12], [20]])
ROLLOUTS = Rollouts.given([[1, 2], [3], [4, 5, 6], [7, 8]])  # two to each prompt


def test_the_stream_and_its_targets():
    batch = one_batch(PROMPTS, ROLLOUTS)
    # each prompt, then its responses without their last token; [3] adds none
    assert batch.tokens.tolist() == [10, 11, 12, 1, 20, 4, 5, 7]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 1]
    assert batch.forest.lengths.tolist() == [3, 1, 1, 2, 1]
    assert batch.forest.parents.tolist() == [-1, 0, -1, 2, 2]
    assert batch.targets.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    predicted_from = batch.tokens[batch.rows][batch.target_rows]
    assert predicted_from.tolist() == [12, 1, 12, 20, 4, 5, 20, 7]
    assert [x.tolist() for x in batch.by_row] == [[0, 2, 1, 3, 6, 4, 5, 7], [0, 2, 3, 5, 6, 7, 8]]
    assert batch.cu_seqlens.tolist() == [0, 2, 3, 6, 8]


def test_a_part_of_the_rollouts_has_its_own_numbers():
    numbers = torch.arange(8.0)  # of the tokens of ROLLOUTS
    rollouts = replace(ROLLOUTS, logprobs=-numbers, importance_weights=10 * numbers)
    batch = Packer(PROMPTS, rollouts, torch.tensor([0.1, 0.2, 0.3, 0.4])).pack(torch.tensor([1, 2]))
    assert batch.target_index.tolist() == [2, 3, 4, 5]
    assert batch.targets.tolist() == [3, 4, 5, 6]
    assert batch.old_logprobs.tolist() == [-2, -3, -4, -5]
    assert batch.importance_weights.tolist() == [20, 30, 40, 50]
    assert batch.by_token(batch.advantages).tolist() == pytest.approx([0.2, 0.3, 0.3, 0.3])


def test_what_costs_more_to_share_is_repeated():
    """Merging 3 response tokens with the second prompt costs 3 x 0.34 tokens, more than reading its
    single token again.
    """
    batch = one_batch(PROMPTS, ROLLOUTS, merge_cost=0.34)
    assert batch.tokens.tolist() == [10, 11, 12, 1, 20, 4, 5, 20, 7]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1]
    assert batch.forest.parents.tolist() == [-1, 0, -1, -1]
    assert batch.tokens[batch.rows][batch.target_rows].tolist() == [12, 1, 12, 20, 4, 5, 20, 7]


def tries(rows):
    """Return the number of distinct beginnings of rows of tokens."""
    return len({tuple(row[:n]) for row in rows for n in range(1, len(row) + 1)})


@settings(40)
@given(st.data())
def test_forests_of_random_samples(data):
    """Each target is read at a token whose path is the sample's row up to there; without a cost the
    stream is as short as can be, and with one no longer than all rows.
    """
    few = st.integers(1, data.draw(st.integers(1, 3)))
    group = data.draw(st.integers(1, 6))
    prompts = data.draw(st.lists(st.lists(few, min_size=1, max_size=6), min_size=1, max_size=4))
    count = group * len(prompts)
    responses = data.draw(st.lists(st.lists(few, max_size=7), min_size=count, max_size=count))
    chosen = data.draw(st.lists(st.sampled_from(range(count)), min_size=1, unique=True))
    cost = data.draw(st.sampled_from([0.0, 0.1, 1.0, 9.0]))
    chosen = torch.tensor(sorted(chosen))
    packer = Packer(make_prompts(prompts), Rollouts.given(responses), torch.ones(count), cost)
    batch = packer.pack(chosen)
    rows = [prompts[s // group] + responses[s][:-1] for s in chosen.tolist()]
    if cost == 0:
        assert len(batch.tokens) == tries(rows)
    assert tries(rows) <= len(batch.tokens) <= sum(map(len, rows))
    lengths, parents = batch.forest.lengths.tolist(), batch.forest.parents.tolist()
    paths, segment_paths = [], []
    starts = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)
    for start, length, parent in zip(starts.tolist(), lengths, parents, strict=True):
        path = list(segment_paths[parent]) if parent >= 0 else []
        for token in batch.tokens[start : start + length].tolist():
            path.append(token)
            paths.append(list(path))
        segment_paths.append(path)
    assert batch.positions.tolist() == [len(path) - 1 for path in paths]
    read_at = batch.rows[batch.target_rows].split(packer.lengths[chosen].tolist())
    for own, s in zip(read_at, chosen.tolist(), strict=True):
        prompt, response = prompts[s // group], responses[s]
        for t, at in enumerate(own.tolist()):
            assert paths[at] == prompt + response[:t]


def test_the_cheaper_layout_is_chosen():
    # Merging moves 12 x 32 numbers per token, each in the time of 300 operations. A layer needs 6
    # operations per token for each of its 7,680 weights.
    assert merge_cost(TINY, torch.device("cuda")) == pytest.approx(12 * 32 * 300 / (6 * 7680))
    assert merge_cost(TINY, torch.device("cpu")) == 0.0  # one kernel attends to both
    cost = 12 * 32 * 20 / (6 * 7680)

    def shared(prompt_length, response_lengths):
        prompts = make_prompts([[1] * prompt_length])
        batch = one_batch(
            prompts,
            Rollouts.given([[s + 2] * n for s, n in enumerate(response_lengths)]),
            merge_cost=cost,
        )
        return len(batch.forest.lengths) > len(response_lengths)

    assert shared(300, [10, 10])  # a long prompt with few rollouts
    # a short prompt with many long rollouts: 14 more tokens cost less than 1,592 merges
    assert not shared(2, [200] * 8)
    assert shared(300, [200] * 8)
    assert not shared(300, [10])


def test_on_a_gpu_only_prompts_and_whole_rows_are_shared_unless_a_forest_saves_enough():
    assert least_gain(TINY, torch.device("cuda")) == pytest.approx(1e12 / (6 * 7680))
    assert least_gain(TINY, torch.device("cpu")) == 0.0
    # Rows without their last tokens: 1 2 3 5, 1 2 3 6, twice 1 2 3 6 7, and 1 2 4
    prompts, responses = make_prompts([[1, 2]]), [[3, 5, 9], [3, 6, 9], *2 * [[3, 6, 7, 9]], [4, 9]]
    rollouts = Rollouts.given(responses)
    lengths = {}
    for gain in (0.0, 2.0, 3.0):  # what more than prompts and whole rows saves: 3 and 36 once
        packer = Packer(prompts, rollouts, torch.ones(5), 0.0, gain)
        lengths[gain] = packer.pack(torch.arange(5)).forest.lengths.tolist()
    assert lengths[0.0] == lengths[2.0] == [2, 1, 1, 1, 1, 1]
    assert lengths[3.0] == [2, 2, 2, 3, 1]


def random_rollouts():
    generator = torch.Generator().manual_seed(0)
    prompts = make_prompts([[1] * int(n) for n in torch.randint(1, 9, (6,), generator=generator)])
    return prompts, Rollouts.given(
        [[2] * int(n) for n in torch.randint(1, 12, (18,), generator=generator)]
    )


def test_micro_batches_cover_every_chosen_sequence_once_within_the_budget():
    prompts, rollouts = random_rollouts()
    chosen = torch.tensor([0, 2, 3, 4, 5, 8, 9, 10, 12, 13, 15, 16, 17])
    packer = Packer(prompts, rollouts, torch.ones(18))
    for budget in (1, 12, 30, 10_000):
        parts = packer.split(chosen, budget)
        assert torch.equal(torch.cat(parts).sort().values, chosen)
        for part in parts:
            batch = packer.pack(part)
            assert len(batch.tokens) <= budget or len(part) == 1
            assert batch.cu_seqlens[-1] == rollouts.lengths[part].sum()
            assert torch.equal(batch.targets, rollouts.tokens[batch.target_index])
    assert len(parts) == 1
    assert packer.split(chosen[:0], 10) == []


@pytest.mark.parametrize("num_ranks", [1, 4])
def test_ranks_get_whole_groups_and_similar_numbers_of_tokens(num_ranks):
    generator = torch.Generator().manual_seed(1)
    prompts = make_prompts([[1] * 20 for _ in range(32)])
    rollouts = Rollouts.given(
        [[2] * int(n) for n in torch.randint(1, 80, (32 * 4,), generator=generator)]
    )
    chosen = torch.arange(32 * 4)[torch.rand(32 * 4, generator=generator) < 0.7]
    shares = Packer(prompts, rollouts, torch.ones(32 * 4)).share(chosen, num_ranks)
    assert torch.equal(torch.cat(shares).sort().values, chosen)
    groups = [set((share // 4).tolist()) for share in shares]
    assert sum(len(g) for g in groups) == len(set().union(*groups))  # no group on two ranks
    loads = [
        20 * len(g) + int(rollouts.lengths[share].sum())
        for g, share in zip(groups, shares, strict=True)
    ]
    assert max(loads) <= 1.1 * sum(loads) / num_ranks


class Counting(TorchDispatchMode):
    """Count the operators of PyTorch that run: on a GPU each but a view is a launch."""

    def __init__(self):
        super().__init__()
        self.operators = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operators[function.name()] += 1
        return function(*args, **(kwargs or {}))


def test_a_batch_of_more_responses_needs_no_more_operators():
    counts = []
    for num_rollouts in (2, 64):
        packer = Packer(
            PROMPTS,
            Rollouts.given([[1, 2, 3]] * 2 * num_rollouts),
            torch.ones(2 * num_rollouts),
            0.34,
        )
        with Counting() as counting:
            everything = torch.arange(2 * num_rollouts)
            (part,) = packer.split(everything, 10**6)
            packer.pack(part)
        counts.append(counting.operators)
    assert sum(counts[0].values()) > 20
    assert counts[0] == counts[1]
