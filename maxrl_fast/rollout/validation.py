"""What vLLM or an engine of the user's returned, checked before anything reads it."""

from dataclasses import dataclass

import torch

from maxrl_fast.errors import EngineError
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.records import Rollouts
from maxrl_fast.rollout import Engine, RolloutRequest

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
