"""Random episodes, a naive forward pass over one of them, and a task with environments, for the
tests.
"""

import math
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from maxrl_fast.model.decoder import Decoder
from maxrl_fast.records import Inserted, Rollouts, pack
from maxrl_fast.rewards import Scores
from maxrl_fast.rollout import Reply
from maxrl_fast.tasks.maze import MazeTask

Parts = list[list[int]]  # an episode: a turn, an insertion, a turn, ...


def random_parts(generator: torch.Generator, vocabulary: int = 32, most_turns: int = 4) -> Parts:
    """Return an episode of 1 to 4 turns of 1 to 4 tokens, with insertions of 1 to 3."""

    def tokens(most: int) -> list[int]:
        length = int(torch.randint(1, most + 1, (), generator=generator))
        return torch.randint(vocabulary, (length,), generator=generator).tolist()

    num_turns = int(torch.randint(1, most_turns + 1, (), generator=generator))
    return [tokens(3 if i % 2 else 4) for i in range(2 * num_turns - 1)]


def rollouts_of(episodes: list[Parts], seed: int = 0) -> Rollouts:
    """Return episodes as rollouts with log-probs, built token by token."""
    sampled, lengths, inserted, before = [], [], [], []
    for parts in episodes:
        start = len(sampled)
        for i, part in enumerate(parts):
            if i % 2:
                before.append(len(sampled))
                inserted.append(part)
            else:
                sampled += part
        lengths.append(len(sampled) - start)
    tokens, cu_seqlens = pack(inserted)
    logprobs = -torch.rand(len(sampled), generator=torch.Generator().manual_seed(seed))
    return Rollouts(
        torch.tensor(sampled, dtype=torch.int64),
        torch.tensor([0, *lengths]).cumsum(0),
        logprobs,
        torch.arange(len(episodes)) % 3 == 1,
        inserted=Inserted(tokens, cu_seqlens, torch.tensor(before, dtype=torch.int64)),
    )


def naive_logprobs(model: Decoder, prompt: list[int], parts: Parts) -> Tensor:
    """Return the log-probs of an episode's sampled tokens: all of its tokens alone, with dense
    causal attention, and those of insertions skipped.
    """
    tokens, is_sampled = list(prompt), [False] * len(prompt)
    for i, part in enumerate(parts):
        tokens += part
        is_sampled += [i % 2 == 0] * len(part)
    length = len(tokens)
    is_later = torch.ones(length, length, dtype=torch.bool).triu(1)

    def attention(layer, q, k, v):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(q.shape[2])
        weights = scores.masked_fill(is_later, -math.inf).softmax(-1)
        return torch.einsum("hij,jhd->ihd", weights, v)

    positions = torch.arange(length)
    dtype = model.lm_head.weight.dtype
    hidden = model(torch.tensor(tokens), positions, attention, positions, dtype)
    logprobs = (hidden @ model.output_matrix.T).log_softmax(-1)
    chosen = [t for t in range(1, length) if is_sampled[t]]
    return torch.stack([logprobs[t - 1, tokens[t]] for t in chosen])
