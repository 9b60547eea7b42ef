"""Random episodes, their naive forward pass, and a task with an engine that plays them."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from maxrl_fast.model.decoder import Decoder
from maxrl_fast.records import Inserted, Rollouts
from maxrl_fast.rewards import Outcome, failure, no_progress
from maxrl_fast.tasks import Reply
from maxrl_fast.tasks.maze import DONE, MazeTask

Parts = list[list[int]]  # an episode: a turn, an insertion, a turn, ...


def random_parts(generator: torch.Generator, vocabulary: int = 32, most_turns: int = 4) -> Parts:
    """Return an episode of 1 to 4 turns of 1 to 4 tokens, with insertions of 1 to 3."""

    def tokens(most: int) -> list[int]:
        length = int(torch.randint(1, most + 1, (), generator=generator))
        return torch.randint(vocabulary, (length,), generator=generator).tolist()

    num_turns = int(torch.randint(1, most_turns + 1, (), generator=generator))
    return [tokens(3 if i % 2 else 4) for i in range(2 * num_turns - 1)]


def rollouts_of(episodes: list[Parts], seed: int = 0) -> Rollouts:
    sampled, lengths, inserted, bounds = [], [], [], [0]
    for parts in episodes:
        start = len(sampled)
        for i, part in enumerate(parts):
            if i % 2:
                inserted += part
            for token in part if i % 2 == 0 else ():
                sampled.append(token)
                bounds.append(len(inserted))
        lengths.append(len(sampled) - start)
    logprobs = -torch.rand(len(sampled), generator=torch.Generator().manual_seed(seed))
    tokens, inserted = (torch.tensor(x, dtype=torch.int64) for x in (sampled, inserted))
    truncated = torch.arange(len(episodes)) % 3 == 1
    inserted = Inserted(inserted, torch.tensor(bounds))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    return Rollouts(tokens, cu_seqlens, logprobs, truncated, inserted=inserted)


def naive_logprobs(model: Decoder, prompt: list[int], parts: Parts, temperature=1.0) -> Tensor:
    rows = naive_rows(model, prompt, parts, temperature)
    return rows.gather(1, torch.tensor([[x for part in parts[::2] for x in part]]).T)[:, 0]


def naive_rows(model: Decoder, prompt: list[int], parts: Parts, temperature=1.0) -> Tensor:
    """Return the rows of log-probs [T, V] that an episode's sampled tokens are drawn from: all of
    its tokens alone, with dense causal attention, and those of insertions skipped.
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
    logprobs = (hidden @ model.output_matrix.T / temperature).log_softmax(-1)
    return logprobs[[t - 1 for t in range(1, length) if is_sampled[t]]]


def played(index: int, n: int, most_turns: int) -> Parts:
    """Return the episode that CountingEngine plays in CountingTask: turn t of sample n of prompt i
    is (8 + n) % 24, t times, then DONE; the reply to it is the turn's length, twice.
    """
    parts: Parts = []
    for turn in range(1, most_turns + 1):
        parts.append([(8 + n) % 24] * turn + [DONE])
        if turn == num_turns(index, n) or turn == most_turns:
            break
        parts.append([turn + 1] * 2)
    return parts


def num_turns(index: int, n: int) -> int:
    """Return after how many turns the environment of sample n of prompt i ends the episode."""
    return (index + n) % 3 + 1


@dataclass
class CountingEpisodes:
    prompts: list[int]  # [S]
    samples: list[int]  # [S]
    failing: set[tuple[int, int]]
    turns: list[int]
    events: list[str]
    waiting: list[Reply] = field(default_factory=list)

    def submit(self, sample: int, turn: list[int]) -> None:
        assert turn[-1] == DONE
        self.turns[sample] += 1
        is_last = self.turns[sample] == num_turns(self.prompts[sample], self.samples[sample])
        self.waiting.append(Reply(sample, [] if is_last else [len(turn)] * 2, is_last))

    def replies(self, wait: bool) -> list[Reply]:
        found, self.waiting = self.waiting, []
        return found

    def finish(self) -> list[Outcome]:
        """The reward is the number of turns over 3, from which a binary one follows."""
        self.events.append("finish")
        outcomes = []
        for turns, *whose in zip(self.turns, self.prompts, self.samples, strict=True):
            outcome = Outcome(turns / 3)
            if (*whose,) in self.failing:
                outcome = failure("exception", f"environment {(*whose,)} broke")
            components = {"turns": float(turns), "tool_errors": 0.5}
            outcomes.append(outcome._replace(components=components))
        return outcomes

    def close(self) -> None:
        self.events.append("close")


class CountingTask(MazeTask):
    """Mazes, of which only the indices matter; `events` says how the environments ended."""

    max_turns = 3

    def __init__(self, failing: set[tuple[int, int]] | None = None) -> None:
        super().__init__(5)
        self.failing, self.events = failing or set(), list[str]()

    def environments(self, prompts, num_samples, beat=no_progress) -> CountingEpisodes:
        ids = [i for i in prompts.ids.tolist() for _ in range(num_samples)]
        samples = [*range(num_samples)] * len(prompts)
        return CountingEpisodes(ids, samples, self.failing, [0] * len(ids), self.events)


class CountingEngine:
    """Plays the episodes of CountingTask, in the order of the replies."""

    def generate(self, request):
        size, num_samples = request.num_sequences, request.num_samples
        environments, max_turns = request.environments, request.sampling.max_turns
        episodes: list[Parts] = [[] for _ in range(size)]
        going = set(range(size))

        def write(s: int) -> None:
            turn = [(8 + s % num_samples) % 24] * (len(episodes[s]) // 2 + 1) + [DONE]
            episodes[s].append(turn)
            environments.submit(s, turn)
            if (len(episodes[s]) + 1) // 2 == max_turns:
                going.discard(s)

        for s in range(size):
            write(s)
        while going:
            for reply in environments.replies(wait=True):
                if reply.sample not in going:
                    continue
                if reply.is_last:
                    going.discard(reply.sample)
                else:
                    episodes[reply.sample].append(reply.tokens)
                    write(reply.sample)
        return rollouts_of(episodes)
