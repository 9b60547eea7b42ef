"""What both vLLM engines share: versions, requests, results and the names of weights."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.records import Rollouts, pack
from maxrl_fast.rollout import Sampling

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
