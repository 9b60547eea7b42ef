"""Guess a hidden number in a few turns: a turn is one number, and the reply says whether the hidden
one is higher or lower.

A tree of t guesses covers 2^t - 1 numbers, so no policy solves more than 15 of 31 in four turns: of
the pass rates p(x) the mean is at most 15/31, and the mean of log p(x) at most log(15/31), which
only a policy with p(x) = 15/31 for every number reaches.

    python -m maxrl_fast.train --task examples/guess.py:GuessTask --objective maxrl --prompts 31
"""

import random
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.records import Prompts, Rollouts, unpack
from maxrl_fast.rewards import Outcome, Progress, no_progress
from maxrl_fast.tasks import Reply, decode_words, word_tokenizer_files

WORDS = ("<pad>", "<bos>", "<eos>", "<unk>", "HIGHER", "LOWER", "CORRECT")
PAD, BOS, EOS, UNK, HIGHER, LOWER, CORRECT = range(7)  # number x has the id CORRECT + x


class GuessEpisodes:
    """The games of S samples with these hidden numbers, as token ids. A turn that is not a number
    and <eos> loses the game."""

    def __init__(self, hidden: list[int], max_turns: int):
        self._hidden = hidden
        self._turns_left = [max_turns] * len(hidden)
        self._rewards = [0.0] * len(hidden)
        self._replies: list[Reply] = []

    def submit(self, sample: int, turn: list[int]) -> None:
        guess, hidden, left = turn[0], self._hidden[sample], self._turns_left[sample] - 1
        is_guess = len(turn) == 2 and guess > CORRECT and left >= 0
        if is_guess and guess == hidden:
            self._rewards[sample] = 1.0
        is_last = not is_guess or guess == hidden or left == 0
        self._turns_left[sample] = 0 if is_last else left
        word = CORRECT if guess == hidden else HIGHER if guess < hidden else LOWER
        self._replies.append(Reply(sample, [word], is_last))

    def replies(self, wait: bool) -> list[Reply]:
        replies, self._replies = self._replies, []
        return replies

    def finish(self) -> list[Outcome]:
        return [Outcome(reward) for reward in self._rewards]

    def close(self) -> None:
        """Nothing runs."""


class GuessTask:
    """Hidden numbers from 1 to `num_numbers`, by index: of each `num_numbers` prompts in order,
    every number is hidden in one. The prompt is always <bos>; the number is its column `answer`.
    Both splits have the same numbers, in another order."""

    fingerprint = ""
    num_test_prompts: int | None = None
    has_demonstrations = True
    stop_ids: tuple[int, ...] = (EOS,)
    prompt_length = 1
    reward: str | None = None
    answer_limit: int | None = None

    def __init__(self, seed: int = 0, num_numbers: int = 31, max_turns: int = 4):
        self.seed, self.num_numbers, self.max_turns = seed, num_numbers, max_turns
        self.words = (*WORDS, *map(str, range(1, num_numbers + 1)))
        self.vocab_size = len(self.words)
        self.max_new_tokens = 3 * max_turns - 1  # each reply is one token
        self.name = f"guess a number from 1 to {num_numbers} in {max_turns} turns"

    def number(self, split: str, index: int) -> int:
        """Return the number that prompt `index` hides."""
        rng = random.Random(f"guess {split} {self.seed} {index // self.num_numbers}")
        order = sorted(range(1, self.num_numbers + 1), key=lambda number: rng.random())
        return order[index % self.num_numbers]

    def prompts(self, split: str, start: int, count: int) -> Prompts:
        ids = range(start, start + count)
        return Prompts(
            torch.full((count,), BOS),
            torch.arange(count + 1),
            torch.tensor(ids),
            tuple({"prompt": WORDS[BOS], "answer": self.number(split, i)} for i in ids),
        )

    def environments(
        self, prompts: Prompts, num_samples: int, beat: Progress = no_progress
    ) -> GuessEpisodes:
        hidden = [CORRECT + line["answer"] for line in prompts.columns or ()]
        return GuessEpisodes([x for x in hidden for _ in range(num_samples)], self.max_turns)

    def demonstrations(self, start: int, count: int) -> tuple[Prompts, Rollouts]:
        """Games that were won by drawing each guess from all numbers that were still possible."""
        prompts = self.prompts("train", start, count)
        tokens = torch.full((count, self.max_new_tokens), PAD)
        lengths = torch.zeros(count, dtype=torch.int64)
        for i, line in enumerate(prompts.columns or ()):
            hidden = line["answer"]
            guesses = self._won_game(hidden, random.Random(f"guess {self.seed} {start + i}"))
            turns = [
                (CORRECT + guess, EOS, HIGHER if guess < hidden else LOWER) for guess in guesses
            ]
            row = torch.tensor(turns).flatten()[:-1]
            tokens[i, : len(row)], lengths[i] = row, len(row)
        given = (tokens == HIGHER) | (tokens == LOWER)
        none = torch.zeros(tokens.shape)
        return prompts, Rollouts.from_padded(tokens, none, lengths, lengths < 0, given)

    def _won_game(self, hidden: int, rng: random.Random) -> list[int]:
        while True:
            guesses, low, high = list[int](), 1, self.num_numbers
            while len(guesses) < self.max_turns:
                guess = low + int(rng.random() * (high - low + 1))
                guesses.append(guess)
                if guess == hidden:
                    return guesses
                low, high = (guess + 1, high) if guess < hidden else (low, guess - 1)

    def score(self, prompts: Prompts, rollouts: Rollouts) -> Tensor:
        """Play the turns of the responses again."""
        episodes = self.environments(prompts, len(rollouts) // len(prompts))
        for sample, tokens in enumerate(unpack(rollouts.tokens, rollouts.lengths)):
            turn: list[int] = []
            for token in tokens:
                turn.append(token)
                if token == EOS:
                    episodes.submit(sample, turn)
                    turn = []
        return torch.tensor([x.reward for x in episodes.finish()], device=rollouts.tokens.device)

    def answer(self, response: str) -> str:
        return response.strip()

    def decode(self, tokens: list[int], with_special: bool = False) -> str:
        return decode_words(self.words, tokens)

    def tokenizer_files(self) -> dict[str, Any]:
        return word_tokenizer_files(self.words, self.vocab_size)
