"""Compares log-probs at the start of a run: a transformers policy with the model's own forward
pass, a third-party engine with the policy."""

import torch
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.model.huggingface import HuggingFacePolicy
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.ops import linear_token_logprobs
from maxrl_fast.records import Prompts, Rollouts, pack, unpack
from maxrl_fast.rollout import Engine, RolloutRequest, Sampling
from maxrl_fast.training.packing import Packer
from maxrl_fast.training.passes import run_batch

LIMIT = 1e-3  # nats; float32 rounds a log-prob by 1e-5 or so
ENGINE_LIMIT = 0.3  # nats per token on average; bfloat16 and routers account for a tenth of this
LONGEST = 600  # tokens of a sequence, if the model's window is shorter
MIN_TOKENS = 24


@torch.no_grad()
def check_exact(policy: PolicyModel) -> str:
    """Compare log-probs of four random responses to two prompts, longer than the model's sliding
    window, with the model's own eager forward pass in float32. Return a sentence for the first
    lines of a run; "" for the native decoder, which has no other."""
    if not isinstance(policy, HuggingFacePolicy):
        return ""
    device, sizes = policy.lm_head.weight.device, policy.config
    generator = torch.Generator().manual_seed(0)
    longest = min(_length(policy), sizes.max_position_embeddings)
    first = longest - longest // 4
    words = torch.tensor([*{*range(sizes.vocab_size)}.difference(sizes.images)])
    # prompts differ in length; some responses end within a sliding window, some beyond it
    lengths = first, first // 2 + 1, longest // 4 - 1, longest // 5, longest // 6, longest // 4 - 2
    drawn = [words[torch.randint(len(words), (n,), generator=generator)].tolist() for n in lengths]
    try:
        ours = _logprobs(policy, drawn[:2], drawn[2:], device)
    except InputError:
        raise
    # raised by third-party code
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        raise InputError(
            f"{sizes.model_type} of transformers cannot compute a packed stream: "
            f"{type(error).__name__}: {error}"
        ) from error
    parts = []
    for i, response in enumerate(drawn[2:]):
        tokens = torch.tensor(drawn[i // 2] + response, device=device)
        log_p = policy.own_logits(tokens)[0][-len(response) - 1 : -1].log_softmax(-1)
        parts.append(log_p.gather(-1, tokens[-len(response) :, None])[:, 0])
    difference = (ours - torch.cat(parts)).abs().nan_to_num(float("inf"))
    most = float(difference.max())
    # Near a tie, a router may choose another expert: 2% may differ. Wrong attention or positions
    # would affect more tokens.
    if float(difference.quantile(0.98)) > LIMIT:
        raise InputError(
            f"{sizes.model_type} of transformers cannot be trained here: with the prompt computed "
            "once for its responses, "
            f"log-probs differ by up to {most:.2g} nats from the model's own forward pass"
        )
    check_head(policy, tokens)
    policy.reshard()
    return (
        f"log-probs equal those of the model's own forward pass to {most:.1g} nats (4 responses, "
        f"with their prompts of up to {longest} tokens)"
    )


def check_engine(policy: PolicyModel, engine: Engine, name: str) -> str:
    """Compare a third-party engine's log-probs with the policy's, for two responses to one prompt;
    as `check_exact`. All ranks must call this."""
    device, sizes = policy.lm_head.weight.device, policy.config
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(sizes.vocab_size, (8,), generator=generator).tolist()
    prompts = Prompts(*pack([prompt]), torch.zeros(1, dtype=torch.int64)).to(device)
    rollouts = engine.generate(RolloutRequest(prompts, 2, Sampling(1.0, 8, ())))
    own = _logprobs(policy, [prompt], unpack(rollouts.tokens, rollouts.lengths), device)
    policy.reshard()
    difference = float((rollouts.logprobs - own).abs().mean().nan_to_num(float("inf")))
    if difference > ENGINE_LIMIT:
        raise InputError(
            f"--rollout {name} samples from another model than this {sizes.model_type}: log-probs "
            f"differ by {difference:.2g} nats per token; --rollout native samples it"
        )
    return (
        f"log-probs of the rollout engine differ from the policy's by {difference:.1g} nats per "
        "token (2 responses)"
    )


@torch.no_grad()
def check_head(policy: HuggingFacePolicy, tokens: Tensor) -> None:
    """Compare the logits of one sequence [L] with the model's own, on hidden states so large that a
    soft cap would show."""
    small, _ = policy.own_logits(tokens, lambda hidden: 1e-3 * hidden)
    factor = 0.1 / max(float(small.abs().max()), 1e-9)  # then the largest logit would be 100
    theirs, hidden = policy.own_logits(tokens, lambda hidden: factor * hidden)
    largest = float(theirs.abs().max())
    difference = float((policy.logits(policy.padded(hidden)) - theirs).abs().max())
    if not difference <= LIMIT * max(1.0, largest):
        raise InputError(
            f"{policy.config.model_type} of transformers cannot be trained here: its logits are "
            "not a soft cap or a multiple of hidden states times the output matrix, from which "
            f"they differ by up to {difference:.2g} of {largest:.2g}"
        )


def _length(policy: HuggingFacePolicy) -> int:
    config = policy.hf.config.get_text_config()
    windows = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    longest = max((int(x) for x in windows if isinstance(x, int)), default=0)
    beyond = longest * 3 // 2 + MIN_TOKENS
    if beyond <= LONGEST:
        return beyond
    return MIN_TOKENS if longest > LONGEST else LONGEST


@torch.no_grad()
def _logprobs(
    policy: PolicyModel, prompts: list[list[int]], responses: list[list[int]], device: torch.device
) -> Tensor:
    packed = Prompts(*pack(prompts), torch.arange(len(prompts))).to(device)
    rollouts = Rollouts.given(responses).to(device)
    packer = Packer(packed, rollouts, torch.ones(len(responses), device=device))
    batch = packer.pack(torch.arange(len(responses)))
    hidden = run_batch(policy, batch, torch.float32)
    matrix = policy.output_matrix.float()  # sharded weights are gathered in the compute dtype
    return linear_token_logprobs(hidden, matrix, batch.targets, **policy.scaling())[0]
