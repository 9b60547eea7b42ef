import itertools
import random

import torch

from examples.guess import BOS, CORRECT, EOS, HIGHER, UNK, GuessTask
from maxrl_fast.records import Rollouts


def reference(hidden, turns, most):
    replies = []
    for number, turn in enumerate(turns, start=1):
        words = turn.split()
        if len(words) != 2 or not words[0].isdigit() or words[1] != "<eos>":
            return [*replies, "end"], False
        if int(words[0]) == hidden:
            return [*replies, "end"], True
        if number == most:
            return [*replies, "end"], False
        replies.append("HIGHER" if int(words[0]) < hidden else "LOWER")
    return replies, False


def test_replies_and_rewards_are_those_of_a_plain_game():
    task, rng = GuessTask(seed=3), random.Random(0)
    prompts = task.prompts("test", 5, 31)
    hidden = [line["answer"] for line in prompts.columns for _ in range(40)]

    def turn(number):
        guess = CORRECT + rng.choice([number, rng.randint(1, 31), rng.randint(1, 31)])
        odd = [[EOS], [guess, guess, EOS], [HIGHER, EOS], [CORRECT, EOS], [UNK, guess, EOS]]
        return rng.choice(odd) if rng.random() < 0.1 else [guess, EOS]

    turns = [[turn(number) for _ in range(rng.randint(1, 4))] for number in hidden]
    expected = [
        reference(number, [task.decode(t) for t in of], 4)
        for number, of in zip(hidden, turns, strict=True)
    ]
    environments = task.environments(prompts, 40)
    # what an engine submits: the turns up to the reply that ends the episode
    waiting = [of[: len(replies)] for of, (replies, _) in zip(turns, expected, strict=True)]
    replies = [[] for _ in hidden]
    while open_games := [s for s, of in enumerate(waiting) if of]:
        for s in rng.sample(open_games, min(len(open_games), 50)):
            environments.submit(s, waiting[s].pop(0))
        for reply in environments.replies(wait=True):
            word = "end" if reply.is_last else task.decode(reply.tokens)
            replies[reply.sample].append(word)
    assert environments.replies(wait=False) == []
    assert replies == [words for words, _ in expected]
    rewards = [outcome.reward for outcome in environments.finish()]
    assert rewards == [float(is_won) for _, is_won in expected]
    assert 0.2 < sum(rewards) / len(hidden) < 0.8
    # played again from the sampled tokens alone; turns after the end of a game do not count
    rollouts = Rollouts.given([list(itertools.chain(*of)) for of in turns])
    assert task.score(prompts, rollouts).tolist() == rewards


def test_prompts_hide_every_number_once_and_depend_on_seed_split_and_index_alone():
    columns = GuessTask(seed=5).prompts("train", 0, 62).columns
    numbers = [line["answer"] for line in columns]
    assert sorted(numbers[:31]) == sorted(numbers[31:]) == [*range(1, 32)]
    part = GuessTask(seed=5).prompts("train", 40, 7)
    assert part.tokens.tolist() == [BOS] * 7  # the number is not in the prompt
    assert part.columns == columns[40:47]
    assert numbers[:8] == [13, 7, 20, 27, 8, 15, 1, 2]  # the stream must not change


def test_demonstrations_are_won_games_that_narrow_the_numbers_down():
    task = GuessTask(seed=2)
    prompts, won = task.demonstrations(10, 200)
    assert task.score(prompts, won).tolist() == [1.0] * 200
    assert prompts.columns == task.prompts("train", 10, 200).columns
    again = task.demonstrations(110, 100)[1]
    assert torch.equal(again.tokens, won.tokens[won.cu_seqlens[100] :])
    for turns in won.turns():
        low, high = 1, 31
        for turn, reply in zip(turns[::2], turns[1::2], strict=False):
            guess = turn[0] - CORRECT
            assert low <= guess <= high
            low, high = (guess + 1, high) if reply == [HIGHER] else (low, guess - 1)
    assert {len(turns) for turns in won.turns()} == {1, 3, 5, 7}
