"""The chain of the MaxPO paper (appendix G.2): a maze with one way through, two actions a step, and a habit for a trap."""

import hashlib
import random
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.tasks.words import decode_words, word_tokenizer_files

WORDS = ("<pad>", "<bos>", "<eos>", "<unk>", "LEFT", "RIGHT")
PAD, BOS, EOS, UNK, LEFT, RIGHT = range(6)
VOCAB_SIZE = 8
HABIT = 0.9  # of the states have RIGHT as the way on. The paper's share was lost; any near 1 makes the same trap.


class ChainTask:
    """A walk of `length` states from the start to the goal, the same in every episode.

    Each state has one action that leads on; the other ends the episode, in half of the states after a step into a dead end.
    The reward is the fraction of the `length` steps that were taken forward, that step included: always taking the commoner
    action earns a good deal, and never more. What is sampled after the end of the episode counts for nothing.

    Args:
        length: states, and the longest response.
        seed: of the chain.
        habit: share of the states where RIGHT is the way on.

    Raises:
        InputError: where the length is below 2.
    """

    vocab_size = VOCAB_SIZE
    num_test_prompts: int | None = None
    has_demonstrations = False
    stop_ids: tuple[int, ...] = (EOS,)
    prompt_length = 1
    reward: str | None = None
    answer_limit: int | None = None

    def __init__(self, length: int = 64, seed: int = 0, habit: float = HABIT):
        if length < 2:
            raise InputError(f"chain_length must be at least 2, got {length}")
        rng = random.Random(f"chain {length} {seed}")
        self.actions = torch.tensor([RIGHT if rng.random() < habit else LEFT for _ in range(length)])  # [length], the way on
        # Not in the last state, where it would be worth as much as the goal.
        self.has_dead_end = torch.tensor([rng.random() < 0.5 and state < length - 1 for state in range(length)])  # [length]
        self.fingerprint = hashlib.sha256(bytes([*self.actions.tolist(), *self.has_dead_end.tolist()])).hexdigest()
        self.name = f"chain of {length} states"
        self.max_new_tokens = length

    def prompts(self, split: str, start: int, count: int) -> Prompts:
        """The start of the chain, `count` times; there is nothing to hold out."""
        return Prompts(torch.full((count,), BOS), torch.arange(count + 1), torch.arange(start, start + count))

    def demonstrations(self, start: int, count: int) -> tuple[Prompts, Rollouts]:
        """None: they would give the only way away."""
        raise InputError(f"{self.name} has no solutions for a warm start; --sft-steps must be 0")

    def score(self, prompts: Prompts, rollouts: Rollouts) -> Tensor:
        """Rewards [S] float32 in [0, 1]."""
        tokens = rollouts.padded_tokens(PAD)[:, : len(self.actions)]  # [S, L]
        device, width = tokens.device, tokens.shape[1]
        is_right = tokens == self.actions.to(device)[:width]
        forward = is_right.long().cumprod(1).sum(1)  # [S], steps on the way, before the first other
        fall = forward.clamp_max(max(width - 1, 0))[:, None]
        # A response may end before the chain does, or hold what is no action.
        is_action = torch.isin(tokens, torch.tensor([LEFT, RIGHT], device=device)).gather(1, fall)[:, 0] & (forward < width)
        into_dead_end = is_action & self.has_dead_end.to(device)[fall[:, 0]]
        return (forward + into_dead_end) / len(self.actions)

    def answer(self, response: str) -> str:
        """The walk itself."""
        return response.strip()

    def decode(self, tokens: list[int]) -> str:
        """The words of these tokens."""
        return decode_words(WORDS, tokens)

    def tokenizer_files(self) -> dict[str, Any]:
        """A tokenizer with one token a word."""
        return word_tokenizer_files(WORDS, VOCAB_SIZE)
