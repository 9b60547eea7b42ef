import math
from dataclasses import replace

import pytest
import torch

from maxrl_fast.records import Inserted, Rollouts, cumulative, pack
from maxrl_fast.rollout import RolloutRequest, Sampling, find_wrong
from tests.batches import make_prompts

PROMPTS = make_prompts([[5, 6], [9]])
SAMPLING = Sampling(1.0, 3, (2,))


def answer(responses=((7, 2), (5, 5, 5), (8, 2), (2,)), **changes):
    """Return the rollouts of two responses to each prompt, with other values for some fields."""
    tokens, cu_seqlens = pack(responses)
    truncated = torch.tensor([response[-1:] != (2,) for response in responses])
    return replace(
        Rollouts(tokens, cu_seqlens, torch.full((len(tokens),), -0.5), truncated), **changes
    )


def wrong(rollouts, prompts=PROMPTS, sampling=SAMPLING):
    return find_wrong(rollouts, RolloutRequest(prompts, 2, sampling), vocab_size=10)


def test_what_is_right_passes():
    assert wrong(answer()) == ""
    for unknown in (math.nan, -math.inf):  # check_finite names it
        assert wrong(answer(logprobs=torch.full((8,), unknown))) == ""
    assert wrong(answer(logprobs=torch.full((8,), 9e-4))) == ""  # rounding
    every = answer(truncated=torch.ones(4, dtype=torch.bool))
    assert wrong(every, sampling=replace(SAMPLING, stop_ids=())) == ""
    nothing = torch.zeros(0, dtype=torch.int64)
    none = Rollouts(nothing, torch.zeros(1, dtype=torch.int64), torch.zeros(0), torch.zeros(0) > 0)
    assert wrong(none, PROMPTS.take(0, 0)) == ""


TOKENS = answer().tokens


@pytest.mark.parametrize(
    ("rollouts", "message"),
    [
        (None, "NoneType, wanted Rollouts"),
        (answer(tokens=TOKENS.tolist()), "tokens of list, wanted a tensor"),
        (answer(tokens=TOKENS.int()), "tokens torch.int32 [8] on cpu, wanted torch.int64 of one"),
        (answer(tokens=TOKENS.to("meta")), "tokens torch.int64 [8] on meta, wanted"),
        (answer(logprobs=torch.zeros(7)), "logprobs of 7 values, wanted 8"),
        (answer(cu_seqlens=torch.tensor([1, 2, 5, 7, 8])), "cu_seqlens from 1 to 8, wanted 0 to"),
        (answer(cu_seqlens=torch.tensor([0, 2, 2, 5, 8])), "0 tokens for sample 1 of prompt 0"),
        (answer(cu_seqlens=torch.tensor([0, 2, 1, 4, 8])), "cu_seqlens that does not ascend"),
        (answer(((7, 2), (5, 5, 5), (8, 8, 8, 2), (2,))), "4 tokens for sample 0 of prompt 1, wan"),
        (
            answer(((7, 2), (5, 5, 10), (8, 2), (2,))),
            "a token outside the vocabulary of 10: token 2 of sample 1 of prompt 0, 10 with log-pr",
        ),
        (
            answer(logprobs=torch.tensor([-1.0] * 6 + [0.01, -1.0])),
            "a log-prob above 0: token 1 of sample 0 of prompt 1, 2 with log-prob 0.01",
        ),
        (answer(logprobs=torch.full((8,), -1e29)), "a log-prob below -10000: token 0 of sample 0"),
        (answer(importance_weights=torch.ones(8)), "importance_weights, wanted None"),
        (answer(((7, 2), (5, 2, 5), (8, 2), (2,))), "a stop token before the last token: token 1"),
        (answer(truncated=torch.tensor([False, True, True, False])), "a wrong `truncated`, which"),
    ],
)
def test_what_cannot_be_true_is_named(rollouts, message):
    assert wrong(rollouts).startswith(message)


EPISODES = Sampling(1.0, 6, (2,), max_turns=3)


def episodes(tokens=(4, 7, 2), before=(2, 2, 5), bounds=None, **changes):
    """Return 7 2 [4 7] 5, 8 2 [2] 2, a truncated 2 and 5 5; insertions are in brackets."""
    counts = torch.bincount(torch.tensor(before), minlength=9)
    bounds = cumulative(counts) if bounds is None else torch.tensor(bounds)
    inserted = Inserted(torch.tensor(tokens), bounds)
    truncated = torch.tensor([True, False, True, True])
    return answer(
        ((7, 2, 5), (8, 2, 2), (2,), (5, 5)),
        **{"truncated": truncated, "inserted": inserted} | changes,
    )


def test_insertions_that_are_right_pass():
    assert wrong(episodes(), sampling=EPISODES) == ""
    assert wrong(answer(), sampling=EPISODES) == ""


@pytest.mark.parametrize(
    ("rollouts", "message"),
    [
        (episodes(inserted=Inserted(None, None)), "inserted.tokens of NoneType, wanted a tensor"),
        (episodes((4, 7)), "inserted.cu_seqlens from 0 to 3, wanted 0 to the 2 tokens"),
        (episodes(bounds=(0, 0, 0, 2, 1, 1, 3, 3, 3, 3)), "inserted.cu_seqlens that does not asc"),
        (episodes(before=(2, 2, 3)), "an insertion before the first token of a response"),
        (episodes((4, 10, 2)), "an inserted token outside the vocabulary of 10"),
        (
            episodes((4, 7, 7, 7, 2), (2, 2, 2, 2, 5)),
            "7 tokens and inserted ones for sample 0 of prompt 0, wanted at most 6",
        ),
        (episodes(before=(2, 2, 8)), "a stop token before the last token: token 1 of sample 1"),
        (episodes((4, 7, 2, 1), (2, 2, 5, 8)), "an insertion after another token than a stop"),
        (episodes(truncated=torch.zeros(4) > 0), "a wrong `truncated`"),
    ],
)
def test_insertions_that_cannot_be_true_are_named(rollouts, message):
    assert wrong(rollouts, sampling=EPISODES).startswith(message)
    one_turn = replace(EPISODES, max_turns=1)
    assert wrong(episodes(), sampling=one_turn) == "insertions, wanted none at max_turns 1"
