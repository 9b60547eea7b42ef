"""What both vLLM engines share: versions, requests, results and the names of weights."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.records import Rollouts, pack, padded_slots, unpack
from maxrl_fast.rollout import RolloutRequest, Sampling
from maxrl_fast.rollout.episodes import Turns, finished

PROCESSED, RAW = "processed_logprobs", "raw_logprobs"  # of vLLM's --logprobs-mode
# the first version that --rollout vllm supports, and the first one that it does not
NEEDS = ((0, 32), (0, 34))
# whose logits vLLM reads from the embedding: it refuses a weight lm_head
WITHOUT_HEAD = ("gemma2", "gemma3n_text")
# sampled at a time; vLLM's warm-up allocates the logits of all, several times
MAX_SEQUENCES = 1024
VERSIONS = tuple(".".join(map(str, version)) for version in NEEDS)

# tokens, their log-probs, and whether the length limit ended it
Sample = tuple[list[int], Sequence[float], bool]


def check_version(version: str, advice: str = "") -> None:
    numbers = tuple(int(x) if x.isdecimal() else 0 for x in version.split("+")[0].split(".")[:2])
    if not NEEDS[0] <= numbers < NEEDS[1]:
        wanted = f"from {VERSIONS[0]} to below {VERSIONS[1]}"
        raise InputError(f"--rollout vllm needs a version of vLLM {wanted}, got {version}{advice}")


def logprobs_mode(filters_tokens: bool) -> str:
    """Return vLLM's --logprobs-mode for log-probs of the whole distribution at the temperature.

    Processed log-probs are after the temperature and the filters, renormalised; raw ones are before
    all of these. So with a filter raw ones are right at temperature 1; at others vLLM has none.
    """
    return RAW if filters_tokens else PROCESSED


def sampling_parameters(sampling: Sampling, num_samples: int) -> dict[str, Any]:
    """Greedy samples are equal, so only one is requested."""
    return {
        "n": 1 if sampling.temperature == 0 else num_samples,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "max_tokens": sampling.max_new_tokens,
        "stop_token_ids": list(sampling.stop_ids),
        "logprobs": 0,  # only of the sampled token
        "detokenize": False,
        # the end-of-text token of the configuration; stop_token_ids still apply
        "ignore_eos": True,
    }


def play(
    request: RolloutRequest,
    turns: Turns,
    ask: Callable[[int, list[int], dict[str, Any]], None],
    answers: Callable[[], tuple[Iterable[tuple[int, Sequence[int], Sequence[float]]], bool]],
    mode: str,
) -> Rollouts:
    """Play episodes as requests of vLLM: one for each turn, with all tokens before it.

    Args:
        request: of all ranks that share the engine.
        turns: of this rank's samples, whose episodes are returned.
        ask: has the turn of a sample sampled, given the tokens before it and parameters.
        answers: returns finished turns, (sample, tokens, log-probs), and whether there are more.
        mode: see `rollouts_of`.
    """
    sampling, ids = request.sampling, request.prompts.ids.tolist()
    prompts = unpack(request.prompts.tokens, request.prompts.lengths)
    tokens: list[list[int]] = [[] for _ in range(request.num_sequences)]
    logprobs: list[list[float]] = [[] for _ in tokens]

    def next_turn(sample: int) -> None:
        """The seed depends on what precedes the turn, and not on when it is sampled."""
        prompt, number = divmod(sample, request.num_samples)
        number += request.first_sample
        length, key = len(tokens[sample]), (request.seed, request.step, ids[prompt])
        parameters = sampling_parameters(sampling, 1) | {
            "max_tokens": sampling.max_new_tokens - length,
            # of the first turn: as sample `number` of a request for all samples of the prompt
            "seed": hash((*key, number, length)) % 2**62 if length else hash(key) % 2**62 + number,
        }
        ask(sample, prompts[prompt] + tokens[sample], parameters)

    def sample_on() -> tuple[list[tuple[int, list[int]]], bool]:
        (found, is_running), ended = answers(), []
        for sample, turn, chosen in found:
            tokens[sample].extend(turn)
            logprobs[sample].extend(chosen)
            if turn[-1] in sampling.stop_ids:
                ended.append((sample, list(turn)))
        return ended, is_running

    def feed(sample: int, reply: list[int]) -> None:
        if reply:
            tokens[sample].extend(reply)
            logprobs[sample].extend([0.0] * len(reply))
            next_turn(sample)

    for sample in range(request.num_sequences):
        next_turn(sample)
    turns.play(sample_on, feed)
    own: list[list[Sample]] = [
        [(tokens[s], logprobs[s], tokens[s][-1] not in sampling.stop_ids)] for s in turns.own
    ]
    whole, size = rollouts_of(own, 1, sampling, mode), turns.given.shape
    slots = padded_slots(whole.lengths, size[1])
    padded = torch.zeros(size, dtype=torch.int64), torch.zeros(size)  # tokens and log-probs
    padded[0].view(-1)[slots], padded[1].view(-1)[slots] = whole.tokens, whole.logprobs
    return finished(turns, *padded, whole.lengths, whole.truncated)


def rollouts_of(
    samples: list[list[Sample]], num_samples: int, sampling: Sampling, mode: str
) -> Rollouts:
    """Return the rollouts of vLLM's samples; a greedy sample is repeated `num_samples` times.

    Log-probs are 0 for greedy ones, and NaN where vLLM's mode does not give the right ones.
    """
    is_greedy = sampling.temperature == 0
    repeats = num_samples if is_greedy else 1
    chosen = [sample for of_prompt in samples for sample in of_prompt * repeats]
    packed, cu_seqlens = pack([tokens for tokens, _, _ in chosen])
    logprobs = torch.tensor([x for _, of_sample, _ in chosen for x in of_sample])
    if is_greedy:
        logprobs.zero_()
    elif sampling.temperature != 1 if mode == RAW else sampling.filters_tokens:
        logprobs.fill_(torch.nan)
    truncated = torch.tensor([cut for _, _, cut in chosen], dtype=torch.bool)
    return Rollouts(packed, cu_seqlens, logprobs, truncated)


def named_weights(
    model: PolicyModel, dtype: torch.dtype, alone: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Yield them one at a time, in vLLM's dtype, without a second copy of them all. With sharded
    weights, all ranks must iterate together. alone: a decoder of text within another model has the
    names that it has alone."""
    within = "language_model." if alone else "\n"
    tied, head = _tied_name(model).replace(within, ""), None
    for nested, weight in model.weights():
        cast, name = weight.to(dtype), nested.replace(within, "")
        if name == tied:
            head = cast
        yield name, cast
    if head is not None:
        yield "lm_head.weight", head


def _tied_name(model: PolicyModel) -> str:
    """Return the name of the embedding that vLLM also needs as the output matrix; "" if none."""
    if not model.config.tie_word_embeddings or model.config.model_type in WITHOUT_HEAD:
        return ""
    names = (
        name for name, parameter in model.named_parameters() if parameter is model.lm_head.weight
    )
    return next(names).removeprefix("hf.")  # where transformers keeps the model in its policy
