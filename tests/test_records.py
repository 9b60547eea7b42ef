import dataclasses
from itertools import chain

import pytest
import torch

from maxrl_fast.records import Rollouts
from tests.random_episodes import random_parts, rollouts_of


def episodes(count, seed=0, most_turns=4):
    generator = torch.Generator().manual_seed(seed)
    return [random_parts(generator, most_turns=most_turns) for _ in range(count)]


def assert_equal(ours, theirs):
    for name, value in vars(theirs).items():
        if name == "inserted":
            assert (ours.inserted is None) == (value is None)
            for part, tensor in vars(value).items() if value else ():
                assert torch.equal(getattr(ours.inserted, part), tensor), part
        elif value is not None:
            assert torch.equal(getattr(ours, name), value), name


@pytest.mark.parametrize("seed", range(2))
def test_selected_episodes_keep_their_insertions(seed):
    whole = episodes(9, seed)
    rollouts = rollouts_of(whole)
    more = {"importance_weights": 2 * rollouts.logprobs, "ref_logprobs": 3 * rollouts.logprobs}
    rollouts = dataclasses.replace(rollouts, **more)
    for chosen in ([3, 4], [8, 0, 5, 5], [*range(9)], [2], []):
        selected = rollouts.select(torch.tensor(chosen, dtype=torch.int64))
        assert selected.turns() == [whole[s] for s in chosen]
        expected = rollouts_of([whole[s] for s in chosen])
        assert torch.equal(selected.inserted.cu_seqlens, expected.inserted.cu_seqlens)
        assert torch.equal(selected.cu_seqlens, expected.cu_seqlens)
        assert torch.equal(selected.importance_weights, 2 * selected.logprobs)
        assert torch.equal(selected.ref_logprobs, 3 * selected.logprobs)
        assert selected.truncated.tolist() == [s % 3 == 1 for s in chosen]


def test_concatenated_episodes_keep_their_insertions():
    parts = [episodes(3, 1), episodes(2, 2, most_turns=1), episodes(4, 3)]
    rollouts = [rollouts_of(part, seed) for seed, part in enumerate(parts)]
    assert len(rollouts[1].inserted.tokens) == 0
    for second in (rollouts[1], dataclasses.replace(rollouts[1], inserted=None)):
        whole = Rollouts.concatenate([rollouts[0], second, rollouts[2]])
        assert whole.turns() == [*chain(*parts)]
        expected = rollouts_of([*chain(*parts)])
        assert torch.equal(whole.inserted.cu_seqlens, expected.inserted.cu_seqlens)
        assert torch.equal(whole.tokens, expected.tokens)
    one_turn = [dataclasses.replace(part, inserted=None) for part in rollouts]
    assert Rollouts.concatenate(one_turn).inserted is None
    assert one_turn[0].select(torch.tensor([0])).inserted is None


@pytest.mark.parametrize("seed", range(2))
def test_padded_episodes_are_packed(seed):
    whole = episodes(7, seed)
    expected = rollouts_of(whole)
    width = max(len([*chain(*parts)]) for parts in whole) + 2
    tokens = torch.full((7, width), 99)
    logprobs = torch.full((7, width), torch.nan)
    given = torch.zeros(7, width, dtype=torch.bool)
    own = iter(expected.logprobs.tolist())
    for s, parts in enumerate(whole):
        place = 0
        for i, part in enumerate(parts):
            for token in part:
                tokens[s, place], given[s, place] = token, i % 2 == 1
                if i % 2 == 0:
                    logprobs[s, place] = next(own)
                place += 1
    lengths = torch.tensor([len([*chain(*parts)]) for parts in whole])
    packed = Rollouts.from_padded(tokens, logprobs, lengths, expected.truncated, given)
    assert_equal(packed, expected)
    alone = Rollouts.from_padded(tokens, logprobs, lengths, expected.truncated, given & False)
    assert alone.inserted is None
    assert alone.lengths.tolist() == lengths.tolist()
