import math
from dataclasses import replace
from itertools import chain

import pytest
import torch

from maxrl_fast.records import Inserted, Rollouts, cumulative, pack
from maxrl_fast.rewards import Outcome, RewardSource, failure
from maxrl_fast.rollout import RolloutRequest, Sampling, find_wrong, sample_and_score
from maxrl_fast.tasks.scorer import Scorer
from maxrl_fast.training.answers import PolicyReward
from maxrl_fast.training.collect import Needs, RolloutCollector, Shaping
from maxrl_fast.training.schedule import ScheduleOptions
from tests.batches import make_prompts
from tests.random_episodes import CountingEngine, CountingTask, num_turns, played
from tests.tables import refused

G, N = 3, 2
CPU = torch.device("cpu")


def collector_of(task, scorer=None, **options):
    sampling, scorer = Sampling(1.0, 32, task.stop_ids), scorer or Scorer(task, None)
    sizes = ScheduleOptions(G, N)
    return RolloutCollector(task, CountingEngine(), scorer, sampling, sizes, **options)


def rewards_of(ids, num_samples=N):
    return [[num_turns(i, n) / 3 for n in range(num_samples)] for i in ids]


def test_a_step_of_episodes():
    task = CountingTask({(1, 0), (2, 1)})
    batch = collector_of(task, needs=Needs(texts=True)).collect(5, 0)
    episodes = [played(i, n, 3) for i in range(G) for n in range(N)]
    assert batch.raw_rollouts.turns() == episodes
    assert [*batch.texts] == [task.decode([*chain(*parts)]) for parts in episodes]
    known = [[True, True], [False, True], [True, False]]
    assert batch.has_reward.tolist() == known
    expected = torch.tensor(rewards_of(range(G)))
    torch.testing.assert_close(batch.rewards, expected * torch.tensor(known), rtol=0, atol=1e-7)
    assert batch.all_rewards.isnan().tolist() == [[not x for x in row] for row in known]
    assert batch.minibatches(1)[0].tolist() == [0, 1, 3, 4]
    assert batch.metrics["reward_exception"] == 2
    assert batch.metrics["reward/turns"] == pytest.approx((1 + 2 + 3 + 3) / 4)
    assert batch.metrics["reward/tool_errors"] == 0.5
    wanted = "step 5: 2 of 6 rewards failed (exception 2), for example: environment (1, 0) broke"
    assert batch.warning == wanted
    assert batch.components[1] == {"turns": 2.0, "tool_errors": 0.5}
    assert batch.num_tokens == len(batch.rollouts.tokens)
    assert task.events == ["finish"]


def test_a_truncated_episode_has_the_reward_0_where_it_failed_too():
    task, zero = CountingTask({(1, 0), (2, 0)}), Shaping(truncated="zero")
    batch = collector_of(task, shaping=zero).collect(1, 0)
    assert batch.raw_rollouts.truncated.nonzero()[:, 0].tolist() == [1, 4]
    expected = torch.tensor(rewards_of(range(G))).flatten()
    expected[[1, 2, 4]] = 0
    torch.testing.assert_close(batch.rewards.flatten(), expected)
    assert batch.has_reward.flatten().tolist() == [True, True, False, True, True, True]
    assert batch.components[1] == {"turns": 0.0, "tool_errors": 0.0}
    assert batch.metrics["reward/turns"] == (1 + 0 + 3 + 0 + 1) / 5
    assert batch.metrics["rewards_zeroed"] == pytest.approx(2 / 6)


class Lengths(RewardSource):
    name = "lengths"

    def __init__(self):
        self.rows = []

    def outcomes(self, rows, group):
        self.rows += rows
        for i, row in enumerate(rows):
            words = float(len(row["response"].split()))
            scored = Outcome(words, {"words": words})
            yield i, scored if words <= 10 else failure("timeout", "too long")


def test_a_reward_function_sees_whole_episodes():
    """Groups are whole, as functions of lists need them; an episode that failed stays without a
    reward, and counts once where its reward fails too."""
    task, source = CountingTask({(1, 0), (2, 0)}), Lengths()
    batch = collector_of(task, Scorer(task, source)).collect(1, 0)
    episodes = [played(i, n, 3) for i in range(G) for n in range(N)]
    texts = [task.decode([*chain(*parts)]) for parts in episodes]
    assert [row["response"] for row in source.rows] == texts
    words = [len(text.split()) for text in texts]
    known = [s not in (2, 4) and words[s] <= 10 for s in range(6)]
    assert 2 < known.count(False) < 6
    assert batch.has_reward.flatten().tolist() == known
    assert batch.rewards.flatten().tolist() == [a * b for a, b in zip(words, known, strict=True)]
    assert batch.components[0] == {"turns": 1.0, "tool_errors": 0.5, "words": float(words[0])}
    assert batch.metrics["reward_exception"] == 2
    assert batch.metrics["reward_timeout"] == known.count(False) - 2
    assert batch.warning.startswith(f"step 1: {known.count(False)} of 6 rewards failed")
    assert task.events == ["finish"]


class Broken(CountingEngine):
    def generate(self, request):
        raise KeyboardInterrupt


def test_environments_are_closed_after_any_exception():
    task = CountingTask()
    request = RolloutRequest(task.prompts("train", 0, 2), 2, Sampling(1.0, 32, task.stop_ids))
    with pytest.raises(KeyboardInterrupt):
        sample_and_score(Broken(), task, Scorer(task, None), request)
    assert task.events == ["close"]
    source = Lengths()
    source.score = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        sample_and_score(CountingEngine(), task, Scorer(task, source), request)
    assert task.events == ["close", "finish", "close"]


@pytest.mark.parametrize("option", ["rlpr", "vote", "verifree"])
def test_rewards_of_one_turn_refuse_episodes(option):
    is_objective = option == "verifree"
    flag = "--objective" if is_objective else "--reward-source"
    sentence = f"^{flag} {option} needs responses of one turn, got episodes of maze 5x5$"
    with refused(sentence):
        PolicyReward.of(option, CountingTask(), None, 1, option * is_objective)


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
