"""The task of guessing a number, against a plain game."""

import itertools
import json
import math
import random
import re
from fractions import Fraction
from functools import cache

import torch

from maxrl_fast import train
from maxrl_fast.records import Rollouts
from maxrl_fast.tasks.guess import BOS, CORRECT, EOS, HIGHER, LOWER, UNK, GuessTask


def reference(hidden, turns, most):
    """Return the replies to a game's turns, as words, until it ends, and whether it is won."""
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


def play(task, prompt, guesses):
    """Return the replies and the reward of one game."""
    environments, replies = task.environments(prompt, 1), []
    for guess in guesses:
        environments.submit(0, [CORRECT + guess, EOS])
        replies += environments.replies(wait=True)
    return replies, environments.finish().rewards[0]


def by_number(task):
    """Return a prompt that hides each number, by the number."""
    prompts = task.prompts("train", 0, task.num_numbers)
    parts = [prompts.take(i, 1) for i in range(task.num_numbers)]
    return {part.columns[0]["answer"]: part for part in parts}


def test_replies_and_rewards_are_those_of_a_plain_game():
    """Games of 31 x 40 samples, whose turns come in a random order."""
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
    scores = environments.finish()
    assert scores.rewards == [float(is_won) for _, is_won in expected]
    assert (scores.failures, scores.num_left) == ([], 0)
    assert 0.2 < sum(scores.rewards) / len(hidden) < 0.8
    # played again from the sampled tokens alone; turns after the end of a game do not count
    rollouts = Rollouts.given([list(itertools.chain(*of)) for of in turns])
    assert task.score(prompts, rollouts).tolist() == scores.rewards


def test_prompts_hide_every_number_once_and_depend_on_seed_split_and_index_alone():
    task = GuessTask(seed=5)
    whole = task.prompts("train", 0, 93)
    numbers = [line["answer"] for line in whole.columns]
    for block in (numbers[:31], numbers[31:62], numbers[62:]):
        assert sorted(block) == list(range(1, 32))
    assert numbers[:31] != numbers[31:62]
    part = GuessTask(seed=5).prompts("train", 40, 7)
    assert part.tokens.tolist() == [BOS] * 7  # the number is not in the prompt
    assert part.columns == whole.columns[40:47]
    assert part.ids.tolist() == whole.ids[40:47].tolist()
    assert task.prompts("test", 0, 31).columns != whole.columns[:31]
    assert GuessTask(seed=6).prompts("train", 0, 31).columns != whole.columns[:31]
    assert numbers[:8] == [13, 7, 20, 27, 8, 15, 1, 2]  # the stream must not change


def test_demonstrations_are_won_games_that_narrow_the_numbers_down():
    task = GuessTask(seed=2)
    prompts, won = task.demonstrations(10, 200)
    assert task.score(prompts, won).tolist() == [1.0] * 200
    assert prompts.columns == task.prompts("train", 10, 200).columns
    again = task.demonstrations(110, 100)[1]
    assert torch.equal(again.tokens, won.tokens[won.cu_seqlens[100] :])
    inserted = iter(won.inserted.tokens.tolist())
    before, first, num_turns = set(won.inserted.lengths.nonzero()[:, 0].tolist()), 0, []
    for line, length in zip(prompts.columns, won.lengths.tolist(), strict=True):
        guesses = [x - CORRECT for x in won.tokens[first : first + length : 2].tolist()]
        assert won.tokens[first + 1 : first + length : 2].tolist() == [EOS] * len(guesses)
        low, high = 1, 31
        for i, guess in enumerate(guesses):
            assert low <= guess <= high
            assert (first + 2 * i in before) == (i > 0)
            if guess != line["answer"]:
                assert next(inserted) == (HIGHER if guess < line["answer"] else LOWER)
                low, high = (guess + 1, high) if guess < line["answer"] else (low, guess - 1)
        first += length
        num_turns.append(len(guesses))
    assert next(inserted, None) is None
    assert set(num_turns) == {1, 2, 3, 4}


def test_two_guesses_cover_three_of_seven_numbers():
    """All 343 strategies, played: a first guess, one after HIGHER and one after LOWER."""
    task = GuessTask(num_numbers=7, max_turns=2)
    hiding = by_number(task)

    def reward(strategy, hidden):
        first, if_higher, if_lower = strategy
        (reply,), won = play(task, hiding[hidden], [first])
        second = if_higher if reply.tokens == [HIGHER] else if_lower
        return won if reply.is_last else play(task, hiding[hidden], [first, second])[1]

    strategies = [*itertools.product(range(1, 8), repeat=3)]
    rewards = torch.tensor([[reward(s, x) for x in range(1, 8)] for s in strategies]).double()
    means = rewards.mean(1)
    assert float(means.max()) == 3 / 7
    assert len(means.unique()) == 3
    # the mean of log p is highest where all three numbers of a tree are equally likely
    trees = torch.tensor([s[2] < s[0] < s[1] for s in strategies])
    assert int(trees.sum()) == math.comb(7, 3)
    even = rewards[trees].mean(0)
    torch.testing.assert_close(even, torch.full_like(even, 3 / 7))
    weights = torch.rand(200, 35, generator=torch.Generator().manual_seed(0)).double()
    mixtures = weights / weights.sum(1, keepdim=True) @ rewards[trees]
    torch.testing.assert_close(mixtures.mean(1), torch.full((200,), 3 / 7).double())
    assert float(mixtures.log().mean(1).max()) < float(even.log().mean()) - 1e-4


@cache
def most_covered(size, turns):
    """Return the most of `size` consecutive numbers that a tree of guesses covers."""
    if not size or not turns:
        return 0
    return max(
        1 + most_covered(guess, turns - 1) + most_covered(size - 1 - guess, turns - 1)
        for guess in range(size)
    )


@cache
def uniform_tree(x, size, turns):
    """Return the probability that number x of `size` is in a random subset of 2^turns - 1 numbers,
    guessed by halves: the root is the middle of the subset."""
    half = 2 ** (turns - 1) - 1
    total = Fraction(0)
    for guess in range(half, size - half):
        p = Fraction(
            math.comb(guess, half) * math.comb(size - 1 - guess, half),
            math.comb(size, 2 * half + 1),
        )
        if x == guess:
            total += p
        elif turns > 1:
            total += p * (
                uniform_tree(x, guess, turns - 1)
                if x < guess
                else uniform_tree(x - guess - 1, size - guess - 1, turns - 1)
            )
    return total


def test_four_guesses_cover_15_of_31_numbers_and_a_policy_can_give_each_15_31():
    assert most_covered(31, 4) == 15
    assert {uniform_tree(x, 31, 4) for x in range(31)} == {Fraction(15, 31)}

    def guesses(hidden):
        """A tree over the even numbers."""
        low, high = 0, 32
        for _ in range(4):
            guess = (low + high) // 2
            yield guess
            low, high = (guess, high) if guess < hidden else (low, guess)

    task = GuessTask()
    hiding = by_number(task)
    won = [play(task, hiding[x], guesses(x))[1] for x in range(1, 32)]
    assert won == [float(x % 2 == 0) for x in range(1, 32)]


def test_a_run_plays_the_game_and_repeats(tmp_path):
    flags = [
        *"--task guess --objective maxrl --seed 3 --prompts 8 --rollouts 8 --steps 2".split(),
        *"--sft-steps 60 --hidden-size 32 --intermediate-size 64 --layers 2 --heads 2".split(),
        *"--kv-heads 1 --eval-prompts 2 --eval-samples 2 --keep-rollouts 64".split(),
        *"--device cpu --dtype float32 --threads 1".split(),
    ]
    for out in ("one", "two"):
        assert train.main([*flags, "--out", str(tmp_path / out)]) == 0
    text = (tmp_path / "one" / "rollouts.jsonl").read_text()
    assert text == (tmp_path / "two" / "rollouts.jsonl").read_text()
    games = [json.loads(line) for line in text.splitlines()]
    assert len(games) == 2 * 64
    for game in games:
        turns = re.split("⟦.*?⟧", game["response"])
        replies, is_won = reference(game["answer"], turns, 4)
        assert re.findall("⟦(.*?)⟧", game["response"]) == replies[: len(turns) - 1]
        assert game["reward"] == is_won
        assert game["tokens"] == sum(len(turn.split()) for turn in turns)
    assert {game.get("turns", 1) for game in games} >= {2, 3, 4}
    assert 0 < sum(game["reward"] for game in games) < 64
