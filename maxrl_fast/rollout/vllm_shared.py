"""What both vLLM engines share: versions, requests, results and the names of weights."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.records import Prompts, Rollouts, pack, padded_slots, unpack
from maxrl_fast.rollout import Sampling
from maxrl_fast.rollout.turns import Turns

PROCESSED, RAW = "processed_logprobs", "raw_logprobs"  # of vLLM's --logprobs-mode
# the first version that --rollout vllm supports, and the first one that it does not
NEEDS = ((0, 32), (0, 34))
# whose logits vLLM reads from the embedding: it refuses a weight lm_head
WITHOUT_HEAD = ("gemma2", "gemma3n_text")
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


class TurnRequests:
    """The episodes of a call of generate as requests of vLLM: one for each turn, with all tokens
    before it, of which vLLM has the keys and values in its prefix cache."""

    def __init__(
        self, prompts: Prompts, num_samples: int, sampling: Sampling, seed: int, step: int
    ):
        self.prompts, self.ids = unpack(prompts.tokens, prompts.lengths), prompts.ids.tolist()
        self.num_samples, self.sampling, self.key = num_samples, sampling, (seed, step)
        self.tokens: list[list[int]] = [[] for _ in range(len(prompts) * num_samples)]
        self.logprobs: list[list[float]] = [[] for _ in self.tokens]

    def request(self, sample: int) -> tuple[list[int], dict[str, Any]]:
        """Return the tokens before a sample's next turn, and its sampling parameters. The seed
        depends on what precedes the turn, and not on when it is sampled."""
        prompt, number = divmod(sample, self.num_samples)
        length = len(self.tokens[sample])
        key = (*self.key, self.ids[prompt])
        parameters = sampling_parameters(self.sampling, 1) | {
            "max_tokens": self.sampling.max_new_tokens - length,
            # of the first turn: as sample `number` of a request for all samples of the prompt
            "seed": hash((*key, number, length)) % 2**62 if length else hash(key) % 2**62 + number,
        }
        return self.prompts[prompt] + self.tokens[sample], parameters

    def add_turn(self, sample: int, tokens: Sequence[int], logprobs: Sequence[float]) -> bool:
        """Return whether a stop token ended the turn."""
        self.tokens[sample].extend(tokens)
        self.logprobs[sample].extend(logprobs)
        return self.tokens[sample][-1] in self.sampling.stop_ids

    def add_reply(self, sample: int, tokens: list[int]) -> None:
        self.tokens[sample].extend(tokens)
        self.logprobs[sample].extend([0.0] * len(tokens))

    def rollouts(self, samples: range, turns: Turns, mode: str) -> Rollouts:
        """Return the episodes of these samples, whose turns these are."""
        stop_ids, limit = self.sampling.stop_ids, self.sampling.max_new_tokens
        whole = rollouts_of(
            [
                [(self.tokens[s], self.logprobs[s], self.tokens[s][-1] not in stop_ids)]
                for s in samples
            ],
            1,
            self.sampling,
            mode,
        )
        slots, size = padded_slots(whole.lengths, limit), (len(samples), limit)
        tokens, logprobs = torch.zeros(size, dtype=torch.int64), torch.zeros(size)
        tokens.view(-1)[slots], logprobs.view(-1)[slots] = whole.tokens, whole.logprobs
        truncated = whole.truncated | turns.truncated
        return Rollouts.from_padded(tokens, logprobs, whole.lengths, truncated, turns.given)


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


def named_weights(model: PolicyModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield them one at a time, in vLLM's dtype, without a second copy of them all. With sharded
    weights, all ranks must iterate together."""
    tied, head = _tied_name(model), None
    for name, weight in model.weights():
        cast = weight.to(dtype)
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
