"""Forward passes that all ranks run together, how a model is spread over them (DDP or FSDP2), and
the comparison of log-probs at the start of a run: of a transformers policy with the model's own
forward pass, of a third-party engine with the policy."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from maxrl_fast.errors import InputError
from maxrl_fast.model.attention import PLAIN_ATTENTION, AttentionVariant, tree_attention
from maxrl_fast.model.huggingface import HuggingFacePolicy
from maxrl_fast.model.layer_kernels import choose_rows
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.model.recurrence import Run, over_forest
from maxrl_fast.ops import linear_token_logprobs
from maxrl_fast.records import Prompts, Rollouts, Samples, pack, unpack
from maxrl_fast.rollout import Engine, RolloutRequest, Sampling
from maxrl_fast.runtime.device import Machine
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.training.packing import MicroBatch, Packer

TokenValues = Callable[[PolicyModel, MicroBatch, Tensor], Tensor]  # hidden [T, H] -> [T, n]
Kept = list[tuple[Tensor, Tensor]]  # of each micro-batch its sequences and numbers [n]


def run_batch(module: nn.Module, batch: MicroBatch, dtype: torch.dtype) -> Tensor:
    """Return the hidden states [T, H] that predict the batch's targets, in `dtype`."""

    def attention(
        layer: int, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant = PLAIN_ATTENTION
    ) -> Tensor:
        return tree_attention(q, k, v, batch.forest, variant)

    def recurrence(layer: tuple[int, int], run: Run, hidden: Tensor) -> Tensor:
        return over_forest(run, hidden, batch.forest.padded)[0]

    hidden = module(batch.tokens, batch.positions, attention, batch.rows, dtype, recurrence)
    return choose_rows(hidden, batch.target_rows, batch.by_row)


class Pass(NamedTuple):
    batch: MicroBatch
    sequences: Tensor  # int64, on the host
    is_padding: bool  # a dummy pass: keeps collectives in step, with zero gradient
    is_last: bool

    def add(self, kept: Kept, loss: Tensor, numbers: Tensor) -> None:
        """Add the gradient of the loss, and keep numbers float64."""
        (0 * loss if self.is_padding else loss).backward()
        if not self.is_padding:
            kept.append((self.sequences, numbers))


@dataclass(frozen=True)
class Passes:
    """Splits samples into micro-batches of at most `token_budget` tokens. All ranks must call each
    method together."""

    ranks: Ranks
    token_budget: int
    dtype: torch.dtype
    temperature: float
    shares_all: bool  # of what samples begin with: see Packer
    shares_weights: bool

    def packer(self, samples: Samples, advantages: Tensor | None = None) -> Packer:
        if advantages is None:
            advantages = torch.zeros(len(samples.rollouts), device=samples.rollouts.tokens.device)
        return Packer(samples.prompts, samples.rollouts, advantages, self.shares_all)

    def micro_batches(self, packer: Packer, sequences: Tensor) -> Iterator[Pass]:
        """Yield this rank's passes. All ranks run the same number, because each exchanges gradients
        or sharded weights: a rank with fewer micro-batches repeats the shortest response."""
        shares = packer.share(sequences, self.ranks.size)
        parts = [packer.split(share, self.token_budget) for share in shares]
        own, num_passes = parts[self.ranks.rank], max(map(len, parts))
        for i in range(num_passes):
            is_padding = i >= len(own)
            chosen = packer.shortest(sequences) if is_padding else own[i]
            yield Pass(packer.pack(chosen), chosen, is_padding, i == num_passes - 1)

    def with_gradients(self, module: Any, packer: Packer, sequences: Tensor) -> Iterator[Pass]:
        """Yield the passes, of which `add` must be called before the next."""
        for part in self.micro_batches(packer, sequences):
            # the last pass exchanges gradients; earlier ones add to this rank's, if they fit
            if isinstance(module, DistributedDataParallel):
                module.require_backward_grad_sync = part.is_last
            elif module.keeps_gradients:
                module.set_requires_gradient_sync(part.is_last)
            yield part

    def total(self, kept: Kept, count: int, device: torch.device) -> Tensor:
        """Add the kept numbers [count] over micro-batches and ranks."""
        none = torch.zeros(count, dtype=torch.float64, device=device)
        return self.ranks.sum(sum((numbers for _, numbers in kept), none))

    def logprobs(self, model: PolicyModel, samples: Samples, *shares: Tensor) -> Tensor:
        return self.compute(self.logprobs_and_entropies, model, samples, *shares)[:, 0]

    def logprobs_and_entropies(
        self, model: PolicyModel, batch: MicroBatch, hidden: Tensor
    ) -> Tensor:
        """Return [T, 2] float32, in nats."""
        scaling = model.scaling(self.temperature)
        values = linear_token_logprobs(hidden, model.output_matrix, batch.targets, **scaling)
        return torch.stack([value.float() for value in values], 1)

    @torch.no_grad()
    def compute(
        self, values: TokenValues, model: PolicyModel, samples: Samples, *shares: Tensor
    ) -> Tensor:
        """Return `values` [T, n] float32 of the samples' tokens, packed; the samples are ascending,
        and micro-batches hold those of one share."""
        packer, rollouts = self.packer(samples), samples.rollouts
        batches = (self.micro_batches(packer, share.cpu()) for share in shares)
        results = None
        for batch, _, is_padding, _ in chain.from_iterable(batches):
            if not is_padding or self.shares_weights or results is None:
                computed = values(model, batch, run_batch(model, batch, self.dtype))
                model.reshard()
                if results is None:
                    results = computed.new_zeros(len(rollouts.tokens), computed.shape[1])
            if not is_padding:
                results[batch.target_index] = computed
        results = self.ranks.sum(rollouts.logprobs.new_zeros(0, 2) if results is None else results)
        sequences = torch.cat(shares).cpu()
        return results if len(sequences) == len(rollouts) else results[packer.positions(sequences)]


def is_sharded(
    sharding: str, model: PolicyModel, machine: Machine, has_critic: bool = False
) -> bool:
    """Return whether to shard the weights; "auto" does on GPUs where more than half of the memory
    would be float32 weights, gradients and moments, and the rollout engine's copy."""
    if machine.processes == 1 or sharding != "auto" or machine.device != "cuda":
        return machine.processes > 1 and sharding == "full"
    critic = 16 * num_critic_weights(model) if has_critic else 0
    return _bytes(model, 20, 8) + critic > machine.memory / 2


def num_critic_weights(policy: PolicyModel) -> int:
    """Return how many weights a policy's critic would train."""
    output = set() if policy.config.tie_word_embeddings else {*policy.lm_head.parameters()}
    trained = sum(p.numel() for p in policy.parameters() if p.requires_grad and p not in output)
    return trained + int(policy.config.hidden_size)


def _bytes(model: PolicyModel, trained: float, frozen: float) -> float:
    return sum(p.numel() * (trained if p.requires_grad else frozen) for p in model.parameters())


def gradients_fit(model: PolicyModel, machine: Machine) -> bool:
    """Return whether half of the memory holds all gradients and the engine's copy, beside the
    shards."""
    part = 4 / machine.processes
    return _bytes(model, 8 + 4 * part, 4 + part) <= machine.memory / 2


def distribute(model: PolicyModel, ranks: Ranks, dtype: torch.dtype) -> nn.Module:
    """Return the module that all ranks run together, whose gradients are means over the ranks, of a
    model that is equal on all ranks or sharded."""
    if ranks.size == 1:
        return model
    device = model.lm_head.weight.device
    if not model.bare:
        # DDP rearranges its buckets after its first backward pass: here one whose gradients are
        # discarded. Otherwise, with more than two ranks, the first update of a resumed run would
        # add in another order.
        module = DistributedDataParallel(model, gradient_as_bucket_view=True)
        hidden = run_batch(module, _batch_of([[0, 0]], [[0, 0]], device), dtype)
        (hidden @ model.output_matrix.to(dtype).t()).sum().backward()
        module.zero_grad(set_to_none=False)
        return module
    fit = gradients_fit(model, Machine.here(device, ranks.size))
    model.keeps_gradients = not ranks.any(not fit, device)
    return model


def shard(model: PolicyModel, dtype: torch.dtype, device: torch.device) -> None:
    """Shard every weight in place (FSDP2), from the host one layer at a time; a layer's are
    gathered in `dtype` while it computes."""
    # imported here: they take most of a second
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    # FSDP2's modules cannot be copied
    model.bare = (model.copied(lambda x: x.to("meta")),)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for layer in model.blocks:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # The loss reads the output matrix after the forward pass.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


LIMIT = 1e-3  # nats; float32 rounds a log-prob by 1e-5 or so
ENGINE_LIMIT = 0.3  # nats per token on average; bfloat16 and routers account for a tenth of this
LONGEST = 600  # tokens of a sequence, if the model's window is shorter
MIN_TOKENS = 24


@torch.no_grad()
def check_exact(policy: PolicyModel) -> str:
    """Compare log-probs of four random responses to two prompts, longer than the model's sliding
    window, with the model's own eager forward pass in float32. Return a sentence for the user; ""
    for the native decoder, which has no other."""
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
        ours = _logprobs(policy, drawn[:2], drawn[2:])
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
    """Compare a third-party engine's log-probs with the policy's, as `check_exact`. All ranks must
    call this."""
    sizes, generator = policy.config, torch.Generator().manual_seed(0)
    prompt = torch.randint(sizes.vocab_size, (8,), generator=generator).tolist()
    prompts = Prompts(*pack([prompt]), torch.arange(1)).to(policy.lm_head.weight.device)
    rollouts = engine.generate(RolloutRequest(prompts, 2, Sampling(1.0, 8, ())))
    own = _logprobs(policy, [prompt], unpack(rollouts.tokens, rollouts.lengths))
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


def _batch_of(
    prompts: list[list[int]], responses: list[list[int]], device: torch.device
) -> MicroBatch:
    packed = Prompts(*pack(prompts), torch.arange(len(prompts))).to(device)
    rollouts = Rollouts.given(responses).to(device)
    packer = Packer(packed, rollouts, torch.ones(len(responses), device=device))
    return packer.pack(torch.arange(len(responses)))


@torch.no_grad()
def _logprobs(policy: PolicyModel, prompts: list[list[int]], responses: list[list[int]]) -> Tensor:
    batch = _batch_of(prompts, responses, policy.lm_head.weight.device)
    hidden = run_batch(policy, batch, torch.float32)
    matrix = policy.output_matrix.float()  # sharded weights are gathered in the compute dtype
    return linear_token_logprobs(hidden, matrix, batch.targets, **policy.scaling())[0]
