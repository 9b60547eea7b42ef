"""The turns of episodes, between an engine and its environments."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from maxrl_fast.errors import EngineError
from maxrl_fast.records import Rollouts
from maxrl_fast.rollout import RolloutRequest
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Reply


class Turns:
    """The episodes of a request's samples. Engines submit turns, and put the tokens of replies into
    their samples. Ranks that share an engine (`peers`) play the samples of all together, in one
    order; `own` are this rank's numbers among them."""

    def __init__(
        self,
        request: RolloutRequest,
        vocab_size: int,
        peers: Ranks | None = None,
        own: range | None = None,
    ):
        assert request.environments is not None
        self.environments, self.vocab_size = request.environments, vocab_size
        self._beat = request.beat
        self.limit, self.max_turns = request.sampling.max_new_tokens, request.sampling.max_turns
        self.own = range(request.num_sequences) if own is None else own
        self._peers = peers or Ranks()
        self._counts = dict[int, int]()  # turns of each episode
        self.waiting = set[int]()  # samples, of all ranks, that go on once their reply comes
        self.due = set[int]()  # own samples whose replies have not come
        # tokens of each own episode, at its last turn or reply
        self.lengths = dict.fromkeys(self.own, 0)
        # [S, limit] bool, the tokens that environments wrote
        self.given = torch.zeros(len(self.own), self.limit, dtype=torch.bool)
        # [S] bool, the samples whose reply left no room
        self.truncated = torch.zeros(len(self.own), dtype=torch.bool)

    def submit(self, sample: int, turn: list[int]) -> bool:
        """Submit an ended turn; return whether the sample waits for a reply."""
        self._counts[sample] = self._counts.get(sample, 0) + 1
        if sample in self.own:
            self.lengths[sample] += len(turn)
            self.due.add(sample)
            self.environments.submit(sample - self.own.start, turn)
        if self._counts[sample] < self.max_turns:
            self.waiting.add(sample)
        return sample in self.waiting

    def replies(self, wait: bool) -> list[Reply]:
        """Return the replies to samples that wait; one that leaves no room for another sampled
        token ends its episode. Raises EngineError on replies that cannot be true."""
        replies = []
        if any(sample in self.own for sample in self.waiting):
            said = self.environments.replies(wait)
            if wait and not said:
                raise EngineError("the environments returned no reply when one was waited for")
            replies = [reply for reply in map(self._checked, said) if reply is not None]
        if self._peers.size > 1:  # those of all ranks of the engine, in one order
            whole = self._peers.values([(x.sample, x.tokens, x.is_last) for x in replies])
            replies = [Reply(*reply) for of_rank in whole for reply in of_rank]
        self.waiting -= {reply.sample for reply in replies}
        return replies

    def play(
        self,
        sample_on: Callable[[], tuple[Iterable[tuple[int, list[int]]], bool]],
        feed: Callable[[int, list[int]], None],
    ) -> None:
        """Play all episodes to their ends. sample_on: samples on, and returns the ended turns with
        their samples, and whether there is more to sample without a reply. feed: continues a sample
        with the tokens of a reply; without tokens its episode ends."""
        is_running = True
        while is_running or self.waiting:
            self._beat()
            ended, is_running = sample_on()
            for sample, turn in ended:
                self.submit(sample, turn)
            for reply in self.replies(wait=not is_running) if self.waiting else ():
                feed(reply.sample, [] if reply.is_last else reply.tokens)
                is_running = True

    def _checked(self, reply: Reply) -> Reply | None:
        sample, tokens = reply.sample + self.own.start, reply.tokens
        if sample not in self.due:
            raise EngineError(
                f"the environments replied to sample {reply.sample}, which has none due"
            )
        self.due.remove(sample)
        if sample not in self.waiting:  # its episode has ended without this reply
            return None
        if reply.is_last:
            return Reply(sample, [], is_last=True)
        whose = f"the environment of sample {reply.sample} replied with"
        if not tokens:
            raise EngineError(f"{whose} no tokens, and not that the episode ends")
        for token in tokens:
            if type(token) is not int or not 0 <= token < self.vocab_size:
                wanted = f"outside the vocabulary, 0 to {self.vocab_size - 1}"
                raise EngineError(f"{whose} a token {wanted}: {token!r:.80}")
        start, row = self.lengths[sample], sample - self.own.start
        end = start + len(tokens)
        if end >= self.limit:
            self.truncated[row] = True
            return Reply(sample, [], is_last=True)
        self.given[row, start:end] = True
        self.lengths[sample] = end
        return Reply(sample, tokens, is_last=False)


def finished(
    turns: Turns | None, tokens: Tensor, logprobs: Tensor, lengths: Tensor, truncated: Tensor
) -> Rollouts:
    """Return right-padded samples [S, limit], with what environments wrote apart."""
    if turns is None:
        return Rollouts.from_padded(tokens, logprobs, lengths, truncated)
    cut, given = turns.truncated.to(tokens.device), turns.given.to(tokens.device)
    return Rollouts.from_padded(tokens, logprobs, lengths, truncated | cut, given)
