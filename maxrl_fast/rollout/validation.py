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
class CheckedEngine:
    """An engine whose rollouts are checked; `name` is for messages."""

    engine: Engine
    name: str
    vocab_size: int

    def describe(self) -> str:
        return self.engine.describe()

    def load_weights(self, model: PolicyModel) -> None:
        self.engine.load_weights(model)

    def sleep(self) -> None:
        self.engine.sleep()

    def generate(self, request: RolloutRequest) -> Rollouts:
        """Raises EngineError on rollouts that cannot be true."""
        rollouts = self.engine.generate(request)
        if wrong := find_wrong(rollouts, request, self.vocab_size):
            whose = f"step {request.step}: the rollout engine {self.name}"
            raise EngineError(f"{whose} returned {wrong}")
        return rollouts


def find_wrong(rollouts: Rollouts, request: RolloutRequest, vocab_size: int) -> str:
    """Return what is wrong with an engine's answer to a request, with prompt and sample; "" if
    nothing is. Log-probs may be NaN, which an engine returns where it does not know them."""
    device, num_sequences = request.prompts.tokens.device, request.num_sequences
    sampling, limit = request.sampling, request.sampling.max_new_tokens
    if not isinstance(rollouts, Rollouts):
        return f"{type(rollouts).__name__}, wanted Rollouts"
    if fault := rollouts.find_wrong(num_sequences, device):
        return fault
    for name in ("importance_weights", "sampler_weights", "ref_logprobs"):
        if getattr(rollouts, name) is not None:
            return f"{name}, wanted None: the trainer computes them"
    if not num_sequences:
        return ""
    tokens, cu_seqlens, logprobs = rollouts.tokens, rollouts.cu_seqlens, rollouts.logprobs
    lengths = rollouts.lengths
    wrong = (lengths < 1) | (lengths > limit)
    if wrong.any():
        s = int(wrong.nonzero()[0])
        return f"{int(lengths[s])} tokens for {request.name_of(s)}, wanted 1 to {limit}"
    sequence = torch.repeat_interleave(lengths, output_size=len(tokens))  # [T]
    # [T] bool, the tokens before an insertion
    precedes = torch.zeros_like(tokens, dtype=torch.bool)
    if (inserted := rollouts.inserted) is not None:
        if sampling.max_turns == 1:
            return "insertions, wanted none at max_turns 1"
        is_anchor = inserted.lengths > 0  # [T], something stands before the token
        if is_anchor[cu_seqlens[:-1]].any():
            return "an insertion before the first token of a response"
        if ((inserted.tokens < 0) | (inserted.tokens >= vocab_size)).any():
            return f"an inserted token outside the vocabulary of {vocab_size}"
        precedes[:-1] = is_anchor[1:]
        whole = lengths + inserted.cu_seqlens[cu_seqlens].diff()
        if int(whole.amax()) > limit:
            s = int(whole.argmax())
            counted = f"{int(whole[s])} tokens and inserted ones"
            return f"{counted} for {request.name_of(s)}, wanted at most {limit}"
    #     tokens   7 2 | 5 5 5 | 8 2      with the stop token 2 and max_new_tokens 3
    #     stops    . x | . . . | . x      only a last token may be one, or one before an insertion
    #     truncated  . |     x |   .      a response without one was truncated
    is_last = torch.zeros_like(tokens, dtype=torch.bool)
    is_last[cu_seqlens[1:] - 1] = True
    stop_ids = torch.tensor(sampling.stop_ids, dtype=torch.int64, device=device)
    stops = torch.isin(tokens, stop_ids)
    ended = stops[cu_seqlens[1:] - 1]
    # a reply that leaves no room truncates an episode after a stop token
    is_wrong = (
        rollouts.truncated == ended if sampling.max_turns == 1 else ~rollouts.truncated & ~ended
    )
    rules = {
        f"a token outside the vocabulary of {vocab_size}": (tokens < 0) | (tokens >= vocab_size),
        "a log-prob above 0": logprobs > ROUNDING,
        f"a log-prob below {LOWEST:g}": logprobs.isfinite() & (logprobs < LOWEST),
        "a stop token before the last token": stops & ~is_last & ~precedes,
        "an insertion after another token than a stop token": precedes & ~stops,
        "a wrong `truncated`, which is true exactly where no stop token ends a response": is_last
        & is_wrong[sequence],
    }
    if not torch.stack([broken.any() for broken in rules.values()]).any():
        return ""
    rule, broken = next((rule, broken) for rule, broken in rules.items() if broken.any())
    t = int(broken.nonzero()[0])
    s = int(sequence[t])
    place, value = t - int(cu_seqlens[s]), f"{int(tokens[t])} with log-prob {float(logprobs[t]):g}"
    return f"{rule}: token {place} of {request.name_of(s)}, {value}"
