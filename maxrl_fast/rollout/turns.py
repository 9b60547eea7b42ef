"""The turns of episodes, between an engine and its environments."""

import torch

from maxrl_fast.errors import EngineError
from maxrl_fast.rollout import Environments, Reply, Sampling


class Turns:
    """The episodes of the S samples of a call of generate. Engines submit turns, and put the
    tokens of replies into their samples."""

    def __init__(
        self, environments: Environments, num_samples: int, sampling: Sampling, vocab_size: int
    ):
        self.environments, self.vocab_size = environments, vocab_size
        self.limit, self.max_turns = sampling.max_new_tokens, sampling.max_turns
        self.lengths = [0] * num_samples  # tokens of each episode, at its last turn or reply
        self.counts = [0] * num_samples  # its turns
        self.due = set[int]()  # samples whose replies have not come
        # [S, limit] bool, the tokens that environments wrote
        self.given = torch.zeros(num_samples, self.limit, dtype=torch.bool)
        # [S] bool, the samples whose reply left no room
        self.truncated = torch.zeros(num_samples, dtype=torch.bool)

    def submit(self, sample: int, turn: list[int]) -> bool:
        """Submit a turn that a stop token ended; return whether the sample waits for a reply."""
        self.lengths[sample] += len(turn)
        self.counts[sample] += 1
        self.due.add(sample)
        self.environments.submit(sample, turn)
        return self.counts[sample] < self.max_turns

    def replies(self, wait: bool) -> list[Reply]:
        """Return the replies to samples that wait, as they are to be carried out: one that leaves
        no room for another sampled token ends its episode.

        Raises EngineError on replies that cannot be true.
        """
        replies = self.environments.replies(wait)
        if wait and not replies:
            raise EngineError("the environments returned no reply when one was waited for")
        return [reply for reply in map(self._checked, replies) if reply is not None]

    def _checked(self, reply: Reply) -> Reply | None:
        sample, tokens = reply.sample, reply.tokens
        if sample not in self.due:
            raise EngineError(f"the environments replied to sample {sample}, which has none due")
        self.due.remove(sample)
        if self.counts[sample] == self.max_turns:  # its episode has ended without this reply
            return None
        if reply.is_last:
            return reply
        whose = f"the environment of sample {sample} replied with"
        if not tokens:
            raise EngineError(f"{whose} no tokens, and not that the episode ends")
        for token in tokens:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                wanted = f"outside the vocabulary, 0 to {self.vocab_size - 1}"
                raise EngineError(f"{whose} a token {wanted}: {token!r:.80}")
        start = self.lengths[sample]
        end = start + len(tokens)
        if end >= self.limit:
            self.truncated[sample] = True
            return Reply(sample, [], is_last=True)
        self.given[sample, start:end] = True
        self.lengths[sample] = end
        return reply
