"""Rollout engines: they take prompts and return sampled responses with their log-probs."""

import contextlib
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor

from maxrl_fast.algorithms.options import DERIVED, Count, Positive, Share
from maxrl_fast.errors import EngineError, InputError, NonFiniteError
from maxrl_fast.model.policy_model import PolicyModel, PolicySizes
from maxrl_fast.records import SEQUENCE, Prompts, Rollouts, Samples, cumulative, ranges, unpack
from maxrl_fast.runtime.background import Progress, no_progress
from maxrl_fast.runtime.device import memory_bytes
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Environments, EpisodeTask, Reply, Task
from maxrl_fast.tasks.scorer import Scorer

# Counter-based random numbers: a sample's do not depend on the rest of the batch.


def _signed(x: int) -> int:
    return (x & (2**64 - 1)) - (2**64 if x & 2**63 else 0)


_INCREMENT = _signed(0x9E3779B97F4A7C15)
_MULTIPLIERS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser (Steele, Lea, Flood 2014), a bijection of int64; products wrap."""

    def logical_shift(x: Tensor, bits: int) -> Tensor:
        return (x >> bits) & (2 ** (64 - bits) - 1)

    x = (x ^ logical_shift(x, 30)) * _MULTIPLIERS[0]
    x = (x ^ logical_shift(x, 27)) * _MULTIPLIERS[1]
    return x ^ logical_shift(x, 31)


def sample_keys(seed: int, step: int, prompt_ids: Tensor, sample_ids: Tensor) -> Tensor:
    key = torch.zeros_like(prompt_ids)
    for coordinate in (seed, step, prompt_ids, sample_ids):
        key = _mix((key ^ coordinate) + _INCREMENT)
    return key


def uniforms(keys: Tensor, positions: Tensor | int) -> Tensor:
    """Return one float32 number in [0, 1) with 24 random bits per key, for the tokens at
    `positions`."""
    offset = (positions + 1) * _INCREMENT
    bits = _mix(keys + (_signed(offset) if isinstance(offset, int) else offset))
    return ((bits >> 40) & (2**24 - 1)).float() * 2.0**-24


ENGINES = ("native", "vllm")  # the names that --rollout takes
MAX_BATCH = {"cpu": 1024, "cuda": 16384}  # samples decoded at a time; larger batches are no faster


def default_cache_bytes(device: torch.device) -> int:
    return memory_bytes(device) // (4 if device.type == "cuda" else 8)


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled; the filters apply after the temperature, in this order."""

    temperature: float  # 0: greedy decoding
    max_new_tokens: int  # of one response, with what environments insert
    stop_ids: tuple[int, ...]  # a response, or a turn of an episode, ends with the first of these
    top_k: int = 0  # keep the k most probable tokens; 0: all
    top_p: float = 1.0  # nucleus sampling
    # keep tokens with at least min_p times the probability of the most probable one
    min_p: float = 0.0
    max_turns: int = 1  # of an episode, with environments
    # gives the length at which a response ends before its last token, as at a stop text, or None
    end_of: Callable[[list[int]], int | None] | None = None

    @property
    def greedy(self) -> "Sampling":
        return replace(self, temperature=0.0)

    @property
    def filters_tokens(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True)
class Decoding:
    """How responses are sampled."""

    max_new_tokens: Count = DERIVED
    """Response limit in tokens. By default the task's; 32 for 9x9 mazes."""
    temperature: Positive = 1.0
    """Temperature of the sampling and of the loss."""
    top_p: Share = 1.0
    """Sample from the likeliest tokens with this sum of probabilities; 1: from all."""
    kv_cache_gb: Positive | None = None
    """KV cache of the engine, in 1e9 bytes. By default an eighth of the memory, of a GPU's a
    quarter."""

    def rules(self, task: Task, **filters: Any) -> Sampling:
        """Return how the responses of a task are sampled."""
        limits = self.temperature, self.max_new_tokens, task.stop_ids
        return Sampling(*limits, top_p=self.top_p, end_of=getattr(task, "end_of", None), **filters)


def cut(rollouts: Rollouts, sampling: Sampling) -> Rollouts:
    """End responses where `sampling.end_of`, which no engine knows, ends them: later tokens count
    as never sampled, and a response that ends is not truncated."""
    if sampling.end_of is None:
        return rollouts
    ends = [*map(sampling.end_of, unpack(rollouts.tokens, rollouts.lengths))]
    is_cut = torch.tensor([end is not None for end in ends], device=rollouts.tokens.device)
    given = torch.tensor([end or 0 for end in ends], device=rollouts.tokens.device)
    lengths = torch.where(is_cut, given, rollouts.lengths)
    kept = ranges(rollouts.cu_seqlens[:-1], lengths)
    return replace(
        rollouts,
        tokens=rollouts.tokens[kept],
        logprobs=rollouts.logprobs[kept],
        cu_seqlens=cumulative(lengths),
        truncated=rollouts.truncated & ~is_cut,
    )


@dataclass(frozen=True)
class RolloutRequest:
    """The responses, or with `environments` the episodes, that an engine is asked for. The random
    numbers of a sample depend only on the seed, the step, its prompt's id, its number and the
    position of a token."""

    prompts: Prompts  # G
    num_samples: int  # N, of each prompt
    sampling: Sampling
    seed: int = 0
    step: int = 0
    environments: Environments | None = None  # of the S = G N samples; None: a response is one turn
    beat: Progress = no_progress  # called while samples are made, for --stall-limit
    first_sample: int = 0  # number of the first one of each prompt: others were made before
    # further samples may be asked for: the C++ decoder keeps the prompts' keys and values
    keeps_prompts: bool = False

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.num_samples

    def keys(self) -> Tensor:
        """Return the keys of random.uniforms, int64 [S]."""
        ids = self.prompts.ids
        samples = torch.arange(self.num_samples, device=ids.device) + self.first_sample
        of_samples = ids.repeat_interleave(self.num_samples), samples.repeat(len(ids))
        return sample_keys(self.seed, self.step, *of_samples)

    def name_of(self, sample: int) -> str:
        group, number = divmod(sample, self.num_samples)
        return f"sample {self.first_sample + number} of prompt {int(self.prompts.ids[group])}"

    def check(self, model: PolicySizes) -> None:
        """Raise InputError for what no engine can serve with a policy of these sizes."""
        prompts, sampling, lengths = self.prompts, self.sampling, self.prompts.lengths
        counts = len(prompts), self.num_samples, sampling.max_new_tokens, sampling.max_turns
        names = "number of prompts", "num_samples", "max_new_tokens", "max_turns"
        for name, count in zip(names, counts, strict=True):
            if count < 1:
                raise InputError(f"{name} must be at least 1, got {count}")
        if int(lengths.min()) < 1:
            empty = int(prompts.ids[lengths.argmin()])
            raise InputError(f"prompts must have at least one token, got prompt {empty} with none")
        ends = int(prompts.tokens.min()), int(prompts.tokens.max())
        for what, tokens in (("prompt tokens", ends), ("stop ids", sampling.stop_ids)):
            for token in tokens:
                if not 0 <= token < model.vocab_size:
                    wanted = f"must be in the vocabulary, 0 to {model.vocab_size - 1}"
                    raise InputError(f"{what} {wanted}, got {token}")
        longest = int(lengths.max())
        if longest + sampling.max_new_tokens > model.max_position_embeddings:
            raise InputError(
                "a prompt and its response must fit the model's context of "
                f"{model.max_position_embeddings} tokens, got prompt "
                f"{int(prompts.ids[lengths.argmax()])} of {longest} tokens and max_new_tokens "
                f"{sampling.max_new_tokens}"
            )
        tau, top_k = sampling.temperature, sampling.top_k
        top_p, min_p = sampling.top_p, sampling.min_p
        if not (0 <= tau < math.inf and top_k >= 0 and 0 < top_p <= 1 and 0 <= min_p <= 1):
            raise InputError(
                "sampling needs a finite temperature >= 0, top_k >= 0, 0 < top_p <= 1 and "
                f"0 <= min_p <= 1, got {tau}, {top_k}, {top_p} and {min_p}"
            )


@dataclass(frozen=True)
class RolloutStatistics:
    """Of the native engine's last call of `generate`, for benchmarks."""

    prefill_seconds: float = 0.0  # for the prompts and the first token of each response
    decode_seconds: float = 0.0
    decode_steps: int = 0  # forward passes after the prefill
    cache_bytes: int = 0  # peak size of the KV cache, on a GPU with the tensors of a step
    # rows of these forward passes; the C++ decoder has one row for samples with the same tokens so
    # far; 0 from the PyTorch decoder
    decoded_rows: int = 0


class Engine(Protocol):
    def describe(self) -> str:
        """Describe the engine in a few words, for the start of a run."""

    def load_weights(self, model: PolicyModel) -> None:
        """Copy the policy's weights into the engine."""

    def sleep(self) -> None:
        """Free memory, if the engine can; `load_weights` must follow before `generate`."""

    def generate(self, request: RolloutRequest) -> Rollouts:
        """Sample the responses, or episodes where the request has environments.

        In an episode a stop token ends a turn, which is submitted. The episode ends with turn
        max_turns, with a reply that is the last, or truncated: by the length limit, also where a
        reply leaves no room for another sampled token. Log-probs are as in `Rollouts`; 0 at
        temperature 0. Those that the engine cannot know are NaN, and training refuses them."""


class NativeEngine(Engine):
    """What our own engines share: a copy of the policy in the compute dtype. cache_bytes: limit of
    the KV cache, in PyTorch with a step's tensors; samples beyond it wait. max_batch: samples
    decoded at a time."""

    def __init__(
        self,
        model: PolicyModel,
        dtype: torch.dtype,
        cache_bytes: int | None = None,
        max_batch: int | None = None,
    ):
        self.config, self.dtype = model.config, dtype
        self.device = device = model.lm_head.weight.device
        self.cache_bytes = default_cache_bytes(device) if cache_bytes is None else cache_bytes
        self.max_batch = MAX_BATCH[device.type] if max_batch is None else max_batch
        self.statistics = RolloutStatistics()

    def sequence_bytes(self, prompt_length: int, max_new_tokens: int) -> tuple[int, int]:
        """Of a prompt and of a response in the KV cache."""
        raise NotImplementedError

    def serve(self, request: RolloutRequest, prompt: int, own: int) -> Rollouts:
        """Serve a checked request, whose longest prompt and response have so many bytes."""
        raise NotImplementedError

    def check_fits(self, prompt_length: int, max_new_tokens: int) -> tuple[int, int]:
        prompt, own = self.sequence_bytes(prompt_length, max_new_tokens)
        if prompt + own > self.cache_bytes:
            raise InputError(
                "kv_cache_gb must hold the longest prompt and a response, "
                f"{(prompt + own) / 1e9:.3g} GB at {prompt_length} and {max_new_tokens} tokens, "
                f"got {self.cache_bytes / 1e9:.3g}"
            )
        return prompt, own

    def generate(self, request: RolloutRequest) -> Rollouts:
        request.check(self.config)
        longest = int(request.prompts.lengths.max())
        return self.serve(request, *self.check_fits(longest, request.sampling.max_new_tokens))


def check_rewards(rewards: Tensor, prompts: Prompts, step: int) -> None:
    """Raise NonFiniteError naming the first prompt with a wrong reward [G, N]."""
    for group, rollout in (~rewards.isfinite()).nonzero()[:1].tolist():
        whose = f"rollout {rollout} of prompt {int(prompts.ids[group])}"
        reward = float(rewards[group, rollout])
        raise NonFiniteError(f"step {step}: the reward of {whose} is {reward}")


def check_finite(rollouts: Rollouts, prompts: Prompts, step: int) -> None:
    """Raise NonFiniteError naming the first prompt whose sampled log-probs are not finite."""
    for token in (~rollouts.logprobs.isfinite()).nonzero()[:1]:
        sequence = int(torch.searchsorted(rollouts.cu_seqlens, token, right=True)) - 1
        prompt = int(prompts.ids[sequence // (len(rollouts) // len(prompts))])
        raise NonFiniteError(
            f"step {step}: the log-probs sampled for prompt {prompt} are not finite"
        )


class Turns:
    """The episodes of a request's samples. Ranks that share an engine (`peers`) play the samples of
    all together, in one order; `own` are this rank's numbers among them."""

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
        self.lengths = dict.fromkeys(self.own, 0)  # tokens at the last turn or reply
        # [S, limit] bool, the tokens that environments wrote
        self.given = torch.zeros(len(self.own), self.limit, dtype=torch.bool)
        # [S] bool, the samples whose reply left no room
        self.truncated = torch.zeros(len(self.own), dtype=torch.bool)

    def submit(self, sample: int, turn: list[int]) -> None:
        self._counts[sample] = self._counts.get(sample, 0) + 1
        if sample in self.own:
            self.lengths[sample] += len(turn)
            self.due.add(sample)
            self.environments.submit(sample - self.own.start, turn)
        if self._counts[sample] < self.max_turns:
            self.waiting.add(sample)

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
    given = None
    if turns is not None:
        given = turns.given.to(tokens.device)
        truncated = truncated | turns.truncated.to(tokens.device)
    return Rollouts.from_padded(tokens, logprobs, lengths, truncated, given)


ROUNDING = 1e-3  # nats by which rounding may lift a log-prob above 0
LOWEST = -1e4  # nats: no token of a lower log-prob is ever sampled


@dataclass
class CheckedEngine(Engine):
    """An engine whose rollouts are checked; `name` is for messages."""

    engine: Engine
    name: str
    vocab_size: int
    is_shared: bool = False  # by several ranks, which call `generate` together

    def describe(self) -> str:
        return self.engine.describe()

    def load_weights(self, model: PolicyModel) -> None:
        self.engine.load_weights(model)

    def sleep(self) -> None:
        self.engine.sleep()

    def generate(self, request: RolloutRequest) -> Rollouts:
        rollouts = self.engine.generate(request)
        if wrong := find_wrong(rollouts, request, self.vocab_size):
            whose = f"step {request.step}: the rollout engine {self.name}"
            raise EngineError(f"{whose} returned {wrong}")
        return rollouts


def find_wrong(rollouts: Rollouts, request: RolloutRequest, vocab_size: int) -> str:
    """Return what is wrong with an answer to a request, with prompt and sample; "" if nothing is.
    Log-probs may be NaN, which an engine returns where it does not know them."""
    limit = request.sampling.max_new_tokens
    if not isinstance(rollouts, Rollouts):
        return f"{type(rollouts).__name__}, wanted Rollouts"
    if fault := rollouts.find_wrong(request.num_sequences, request.prompts.tokens.device):
        return fault
    for name in ("importance_weights", "sampler_weights", "ref_logprobs"):
        if getattr(rollouts, name) is not None:
            return f"{name}, wanted None: the trainer computes them"
    if not request.num_sequences:
        return ""
    whole, inserted = rollouts.lengths, rollouts.inserted
    for s in ((whole < 1) | (whole > limit)).nonzero()[:1, 0].tolist():
        return f"{int(whole[s])} tokens for {request.name_of(s)}, wanted 1 to {limit}"
    if inserted is not None:
        if request.sampling.max_turns == 1:
            return "insertions, wanted none at max_turns 1"
        if (inserted.lengths > 0)[rollouts.cu_seqlens[:-1]].any():
            return "an insertion before the first token of a response"
        if ((inserted.tokens < 0) | (inserted.tokens >= vocab_size)).any():
            return f"an inserted token outside the vocabulary of {vocab_size}"
        whole = whole + inserted.cu_seqlens[rollouts.cu_seqlens].diff()
        for s in (whole > limit).nonzero()[:1, 0].tolist():
            counted = f"{int(whole[s])} tokens and inserted ones"
            return f"{counted} for {request.name_of(s)}, wanted at most {limit}"
    return _wrong_token(rollouts, request, vocab_size)


def _wrong_token(rollouts: Rollouts, request: RolloutRequest, vocab_size: int) -> str:
    tokens, logprobs, cu_seqlens = rollouts.tokens, rollouts.logprobs, rollouts.cu_seqlens
    # [T] bool, the tokens before an insertion
    precedes = torch.zeros_like(tokens, dtype=torch.bool)
    if rollouts.inserted is not None:
        precedes[:-1] = rollouts.inserted.lengths[1:] > 0
    #     tokens   7 2 | 5 5 5 | 8 2      with the stop token 2 and max_new_tokens 3
    #     stops    . x | . . . | . x      only a last token may be one, or one before an insertion
    #     truncated  . |     x |   .      a response without one was truncated
    last = cu_seqlens[1:] - 1
    is_last = torch.zeros_like(precedes).index_fill(0, last, True)
    stops = torch.isin(tokens, tokens.new_tensor(request.sampling.stop_ids))
    # a reply that leaves no room truncates an episode after a stop token
    is_wrong = ~rollouts.truncated & ~stops[last]
    if request.sampling.max_turns == 1:
        is_wrong = rollouts.truncated == stops[last]
    rules = {
        f"a token outside the vocabulary of {vocab_size}": (tokens < 0) | (tokens >= vocab_size),
        "a log-prob above 0": logprobs > ROUNDING,
        f"a log-prob below {LOWEST:g}": logprobs.isfinite() & (logprobs < LOWEST),
        "a stop token before the last token": stops & ~is_last & ~precedes,
        "an insertion after another token than a stop token": precedes & ~stops,
        "a wrong `truncated`, which is true exactly where no stop token ends a response": (
            torch.zeros_like(precedes).index_copy(0, last, is_wrong)
        ),
    }
    is_broken = torch.stack([*rules.values()])
    if not is_broken.any():
        return ""
    number, t = is_broken.nonzero()[0].tolist()
    s = int(torch.searchsorted(cu_seqlens, t, right=True)) - 1
    place, value = t - int(cu_seqlens[s]), f"{int(tokens[t])} with log-prob {float(logprobs[t]):g}"
    return f"{[*rules][number]}: token {place} of {request.name_of(s)}, {value}"


@dataclass(frozen=True)
class ScoredSamples(Samples):
    # [S], NaN where scoring failed or there is no scorer
    rewards: Annotated[Tensor, SEQUENCE, torch.float32]
    # [S], of each reward; {} where there are none
    components: Annotated[tuple[dict[str, float], ...], SEQUENCE]
    messages: Annotated[tuple[str, ...], SEQUENCE]  # [S], of the scorer; "" where there are none


def sample_and_score(
    engine: Engine,
    task: Task,
    scorer: Scorer | None,
    request: RolloutRequest,
    clock: Callable[[str], AbstractContextManager[object]] = nullcontext,
    zero_truncated: bool = False,
) -> ScoredSamples:
    """Sample the responses of a request, with the environments of an EpisodeTask, and score them.

    A rank without prompts scores nothing; it takes part in sampling with an engine that it shares.
    clock: measures the stages "rollout" and "reward". zero_truncated: of `Scorer.score`."""
    prompts = request.prompts
    with contextlib.ExitStack() as not_finished:
        if isinstance(task, EpisodeTask):
            environments = task.environments(prompts, request.num_samples, request.beat)
            not_finished.callback(environments.close)
            sampling = replace(request.sampling, max_turns=task.max_turns)
            request = replace(request, sampling=sampling, environments=environments)
        with clock("rollout"):
            if len(prompts) or (isinstance(engine, CheckedEngine) and engine.is_shared):
                rollouts = cut(engine.generate(request), request.sampling)
            else:
                rollouts = Rollouts.given([]).to(prompts.tokens.device)
        if scorer is None or not len(prompts):
            rewards = torch.full((len(rollouts),), torch.nan, device=rollouts.tokens.device)
            size = len(rollouts)
            return ScoredSamples(prompts, rollouts, rewards, ({},) * size, ("",) * size)
        with clock("reward"):
            given = prompts, rollouts, request.environments, request.beat
            rewards = scorer.score(*given, zero_truncated)
        not_finished.pop_all()
    said = tuple(scorer.components), tuple(scorer.messages)
    return ScoredSamples(prompts, rollouts, rewards, *said)
