"""A task of your own: digits to sort.

The guide docs/adding_a_task.md explains it.

    python -m maxrl_fast.train --task examples/sort_task.py:SortTask --length 4
"""

import random
import zlib
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from maxrl_fast.errors import InputError
from maxrl_fast.records import Prompts, Rollouts, pack
from maxrl_fast.tasks import decode_words, word_tokenizer_files

WORDS = ("<pad>", "<bos>", "<eos>", "<unk>", *"0123456789", "SORT")
VOCAB_SIZE = 16
PAD, BOS, EOS, UNK, ZERO = range(5)
SORT = 14
MIN_LENGTH, MAX_LENGTH = 2, 64
TEST_SHARE = 5  # one collection of digits in about this many is held out, whatever its order


class SortTask:
    """Prompts of digits. The response must be the same digits in ascending order, then <eos>.

    Args:
        length: number of digits in a prompt.
        seed: seed of the digits.

    Raises:
        InputError: if the length is not from 2 to 64.
    """

    vocab_size = VOCAB_SIZE
    fingerprint = ""
    num_test_prompts: int | None = None
    has_demonstrations = True
    stop_ids: tuple[int, ...] = (EOS,)
    reward: str | None = None
    answer_limit: int | None = None

    def __init__(self, length: int = 6, seed: int = 0):
        if not MIN_LENGTH <= length <= MAX_LENGTH:
            raise InputError(f"length must be from {MIN_LENGTH} to {MAX_LENGTH}, got {length}")
        self.length, self.seed = length, seed
        self.name = f"sort {length} digits"
        self.prompt_length = length + 2
        self.max_new_tokens = length + 1

    def digits(self, split: str, index: int) -> list[int]:
        """Return the digit tokens of prompt `index` of `split`, "train" or "test"."""
        rng = random.Random(f"sort {self.length} {split} {self.seed} {index}")
        while True:
            # random() is the only draw whose stream Python promises to keep from version to
            # version.
            tokens = [ZERO + int(rng.random() * 10) for _ in range(self.length)]
            if (zlib.crc32(bytes(sorted(tokens))) % TEST_SHARE == 0) == (split == "test"):
                return tokens

    def prompts(self, split: str, start: int, count: int) -> Prompts:
        """Return prompts `start` to `start + count - 1` of `split`: <bos>, the digits, SORT."""
        indices = range(start, start + count)
        tokens, cu_seqlens = pack([[BOS, *self.digits(split, i), SORT] for i in indices])
        return Prompts(tokens, cu_seqlens, torch.arange(start, start + count))

    def demonstrations(self, start: int, count: int) -> tuple[Prompts, Rollouts]:
        """Return training prompts, each with one rollout: the sorted digits and <eos>."""
        answers = [[*sorted(self.digits("train", i)), EOS] for i in range(start, start + count)]
        return self.prompts("train", start, count), Rollouts.given(answers)

    def score(self, prompts: Prompts, rollouts: Rollouts) -> Tensor:
        """Return rewards [S] float32: 1 for the sorted digits and <eos>, else 0."""
        digits = prompts.tokens.view(len(prompts), -1)[:, 1:-1]  # [G, length]
        right = pad(digits.sort(1).values, (0, 1), value=EOS)  # [G, length + 1]
        right = right.repeat_interleave(len(rollouts.lengths) // len(prompts), 0)  # [S, length + 1]
        tokens = pad(rollouts.padded_tokens(PAD), (0, self.length + 1), value=PAD)[
            :, : self.length + 1
        ]
        return (tokens == right).all(1).float()

    def answer(self, response: str) -> str:
        """Return the digits before <eos>."""
        digits, end, _ = response.partition("<eos>")
        return digits.strip() if end else ""

    def decode(self, tokens: list[int], with_special: bool = False) -> str:
        """Return the words of these tokens, special ones too."""
        return decode_words(WORDS, tokens)

    def tokenizer_files(self) -> dict[str, Any]:
        """Return the files of a tokenizer with one token per word."""
        return word_tokenizer_files(WORDS, VOCAB_SIZE)
