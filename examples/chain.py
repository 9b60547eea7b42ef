"""The chain maze of the MaxPO paper (appendix G.2): one path to the goal, two actions per state,
and one action that is usually right. Options: --length (states; the paper has 1000) and --habit.

    python -m maxrl_fast.train --task examples/chain.py:ChainTask --length 16 --objective maxpo
"""

import hashlib
import random
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.tasks import ReferenceAnswer, decode_words, word_tokenizer_files

WORDS = ("<pad>", "<bos>", "<eos>", "<unk>", "LEFT", "RIGHT")
PAD, BOS, EOS, UNK, LEFT, RIGHT = range(6)
VOCAB_SIZE = 8
# Fraction of states where RIGHT leads on. We do not have the paper's value; any value near 1 makes
# the same local optimum.
HABIT = 0.9


class ChainTask:
    """A chain of `length` states from the start to the goal, the same in every episode. In each
    state one action leads to the next state, RIGHT in the fraction `habit` of them. The other
    action ends the episode; in half of the states it first takes a step into a dead end. The reward
    is the number of steps, including one into a dead end, divided by `length`. Tokens after the
    end of the episode are ignored."""

    vocab_size = VOCAB_SIZE
    num_test_prompts: int | None = None
    has_demonstrations = False
    stop_ids: tuple[int, ...] = (EOS,)
    prompt_length = 1
    reward: str | None = None
    answer_limit: int | None = None

    def __init__(self, length: int = 64, seed: int = 0, habit: float = HABIT):
        if length < 2:
            raise InputError(f"length must be at least 2, got {length}")
        rng = random.Random(f"chain {length} {seed}")
        # [length], the action that leads on from each state
        self.actions = torch.tensor(
            [RIGHT if rng.random() < habit else LEFT for _ in range(length)]
        )
        # The last state has no dead end: a step into it would earn as much as the goal.
        # [length]
        self.has_dead_end = torch.tensor(
            [rng.random() < 0.5 and state < length - 1 for state in range(length)]
        )
        self.fingerprint = hashlib.sha256(
            bytes([*self.actions.tolist(), *self.has_dead_end.tolist()])
        ).hexdigest()
        self.name = f"chain of {length} states"
        self.max_new_tokens = length

    def prompts(self, split: str, start: int, count: int) -> Prompts:
        """Both splits are the same."""
        return Prompts(
            torch.full((count,), BOS), torch.arange(count + 1), torch.arange(start, start + count)
        )

    def demonstrations(self, start: int, count: int) -> tuple[Prompts, Rollouts]:
        """A demonstration would give away the only solution."""
        raise InputError(f"--sft-steps must be 0, as {self.name} has no solutions for a warm start")

    def score(self, prompts: Prompts, rollouts: Rollouts) -> Tensor:
        """Rewards are in [0, 1]."""
        tokens = rollouts.padded_tokens(PAD)[:, : len(self.actions)]  # [S, L]
        device, width = tokens.device, tokens.shape[1]
        leads_on = tokens == self.actions.to(device)[:width]
        forward = leads_on.long().cumprod(1).sum(1)  # [S], steps before the first wrong token
        wrong = forward.clamp_max(max(width - 1, 0))[:, None]
        # A response may be shorter than the chain, and its first wrong token need not be an action.
        is_action = torch.isin(tokens, torch.tensor([LEFT, RIGHT], device=device)).gather(1, wrong)[
            :, 0
        ] & (forward < width)
        into_dead_end = is_action & self.has_dead_end.to(device)[wrong[:, 0]]
        return (forward + into_dead_end) / len(self.actions)

    def reference_answers(self, prompts: Prompts, rollouts: Rollouts) -> list[ReferenceAnswer]:
        """The way to the goal is an answer without reasoning."""
        return [ReferenceAnswer(0, [], self.actions.tolist()) for _ in range(len(rollouts))]

    def answer(self, response: str) -> str:
        return response.strip()

    def decode(self, tokens: list[int], with_special: bool = False) -> str:
        return decode_words(WORDS, tokens)

    def tokenizer_files(self) -> dict[str, Any]:
        return word_tokenizer_files(WORDS, VOCAB_SIZE)
