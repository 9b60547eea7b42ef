"""Estimates of the memory of a run: bytes of each process, by what they are for, in the phases of a
step.

The phases do not add up. "start" is before the first step: weights go to the device, and the
rollout engine samples a few responses. In "rollout" the engine samples. In "update" the policy
trains, and the engine has freed what it can (`Engine.sleep`).
"""

from collections.abc import Sequence

import torch
from torch import nn

from maxrl_fast.config.checks import objective_of
from maxrl_fast.config.metadata import LessMemory, inapplicable_options, options_of
from maxrl_fast.config.options import ResolvedConfig
from maxrl_fast.config.resolve import KEPT_BYTES
from maxrl_fast.model.decoder import DecoderConfig, Layer
from maxrl_fast.model.linear import LoraLinear, can_join
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.rollout.cpu_decoder import CpuDecoder, arithmetic_of
from maxrl_fast.rollout.decode_slots import Shape
from maxrl_fast.rollout.device_decoder import KEPT_SHARE
from maxrl_fast.rollout.names import ENGINES
from maxrl_fast.rollout.native import MAX_BATCH
from maxrl_fast.rollout.sampling import LOGIT_BYTES, ROWS
from maxrl_fast.rollout.vllm_shared import MAX_SEQUENCES
from maxrl_fast.runtime.device import Machine
from maxrl_fast.runtime.tuning import chunk_bytes
from maxrl_fast.tasks import Task, held_out_sets
from maxrl_fast.training.critic import num_critic_weights
from maxrl_fast.training.sharding import gradients_fit

PHASES = {"start": "at the start", "rollout": "during the rollout", "update": "during the update"}
# of the memory, left for CUDA, NCCL, CUDA graphs, vLLM's pass over prompts and gaps of the
# allocator
FREE_SHARE = 0.1
Phases = tuple[float, float, float]


def estimate_memory(
    config: ResolvedConfig,
    task: Task,
    model: PolicyModel,
    machine: Machine,
    teacher: PolicyModel | None = None,
) -> dict[str, Phases]:
    """Return the bytes of one process in each of PHASES, by what they are for; responses and passes
    are at their limits. --sharding is resolved, and the models may be on the meta device.
    """
    weights, trained = count(model), count(model, is_trained=True)
    needs, loss, options = objective_of(config).needs, config.loss, config.rollout
    copies_policy = loss.reference is None and loss.teacher_prompt is None
    is_sharded = config.run.sharding == "full" and machine.processes > 1
    # the reference and the critic share the policy's frozen weights, unless sharded
    own = weights - trained if is_sharded else 0
    reference = trained + own if copies_policy and (loss.kl_coef or needs.reference) else 0
    critic = num_critic_weights(model) if needs.critic else 0
    frozen = sum(p.nbytes for p in teacher.parameters()) if teacher else 0
    state = {  # at the start, and from the first update on
        "weights (float32)": (4 * weights, 4 * weights),
        "gradients (float32)": (0, 4 * trained),
        "Adam moments (float32)": (0, 8 * trained),
        "reference policy (float32)": (4 * reference, 4 * reference),
        f"teacher ({config.run.dtype})": (frozen, frozen),
        "critic (float32)": (4 * (critic + own * needs.critic),) * 2,
        "critic's gradients and Adam moments (float32)": (0, 12 * critic),
    }
    part, sharded = 1.0, ""
    if is_sharded:
        part, sharded = 1 / machine.processes, f", 1/{machine.processes} of them (FSDP2)"
    memory: dict[str, Phases] = {
        f"{name}{sharded}": (start * part, later * part, later * part)
        for name, (start, later) in state.items()
    }
    layers = [count(block) for block in model.blocks]
    largest = 4 * max(*layers, weights - sum(layers)) * is_sharded
    memory["weights sharded at a time (float32)"] = (largest, 0, 0)
    memory |= _of_engine(config, task, model, machine)
    # every process has all of them
    responses = options.prompts * options.rollouts * max(options.dynamic_sampling, 1)
    kept = KEPT_BYTES * responses * options.max_new_tokens * (1 + options.ahead)
    memory["rollouts of a step, at their limit"] = (0, kept, kept)
    memory |= {name: (0, 0, value) for name, value in _of_update(config, model, machine).items()}
    if machine.device == "cpu":  # on a GPU the copy is in the host's memory
        copied = (4 * weights + 8 * trained + 4 * reference + 12 * critic) * part
        memory["copy of the state while a checkpoint is written"] = (0, 0, copied)
    return {name: phases for name, phases in memory.items() if any(phases)}


def _of_engine(
    config: ResolvedConfig, task: Task, model: PolicyModel, machine: Machine
) -> dict[str, Phases]:
    """Return the rollout engine's copy of the weights, KV cache, and tensors of a decoding step;
    nothing for a vLLM server and for a custom engine.

    vLLM allocates --kv-cache-gb at once, and on a GPU frees weights and cache while the policy
    trains. The native engine keeps its weights and a cache of at most KEPT_SHARE of a GPU.
    """
    options, sizes, is_gpu = config.rollout, model.config, machine.device == "cuda"
    if options.vllm_url is not None or options.rollout not in ENGINES:
        return {}
    is_vllm, is_native = options.rollout == "vllm", model.backend == "native"
    in_cpp = not is_vllm and not is_gpu and is_native
    samples = max(n for _, n in held_out_sets(task, 1, config.evaluation.eval_samples).values())
    least = 256 if is_vllm else 32 * samples
    most = MAX_SEQUENCES if is_vllm else MAX_BATCH[machine.device]
    rows = min(max(options.samples_of_engine(machine.processes), least), most)
    dtype: torch.dtype = getattr(torch, config.run.dtype)
    arithmetic = arithmetic_of(dtype)
    if in_cpp and arithmetic == "float32":
        dtype = torch.float32
    adapters = count(model, is_trained=True) if config.model.lora_rank else 0  # merged
    weights = dtype.itemsize * (count(model) - adapters) / options.vllm_tensor_parallel
    limit = (options.kv_cache_gb or 0) * 1e9 or machine.memory / (4 if is_gpu else 8)
    prompts, length = -(-rows // min(options.rollouts, rows)), task.prompt_length
    if in_cpp:
        assert isinstance(sizes, DecoderConfig)
        # its embedding is in float32, and apart from the output matrix also where they are tied
        element = 4 if sizes.tie_word_embeddings else 4 - dtype.itemsize
        weights += sizes.vocab_size * sizes.hidden_size * element
        of = CpuDecoder(sizes, arithmetic).cache_bytes
        wanted = prompts * of(length) + rows * of(options.max_new_tokens)
    elif is_gpu and is_native:
        shape = Shape(prompts, rows, 1, length, options.max_new_tokens)
        wanted = shape.cache_bytes(sizes, dtype)
        if options.top_p < 1:
            wanted += LOGIT_BYTES * min(rows, ROWS) * sizes.vocab_size
    else:
        tokens = rows * options.max_new_tokens + prompts * length
        keys = sizes.num_hidden_layers * sizes.num_key_value_heads * sizes.head_dim
        wanted = 2 * keys * dtype.itemsize * tokens
    cache, name = min(limit, wanted), f"rollout weights ({dtype})".replace("torch.", "")
    if not is_vllm:
        is_kept = is_native and (not is_gpu or cache <= KEPT_SHARE * machine.memory)
        return {
            name: (weights, weights, weights),
            f"key/value cache of at most {rows} samples": (cache, cache, cache * is_kept),
        }
    awake = 0 if is_gpu else 1  # while the policy trains
    # logits in the compute dtype; in float32 themselves, their log-probs and their probabilities
    logits = rows * sizes.vocab_size * (dtype.itemsize + 12)
    return {
        name: (weights, weights, weights * awake),
        "key/value cache of vLLM": (limit, limit, limit * awake),
        f"logits of vLLM, {rows} samples": (logits, logits, 0),
    }


def _of_update(config: ResolvedConfig, model: PolicyModel, machine: Machine) -> dict[str, float]:
    """Return what a forward and backward pass over --token-budget tokens needs besides the training
    state.
    """
    sizes, tokens = model.config, config.optimizer.token_budget
    is_sharded = config.run.sharding == "full"
    keeps_inputs, num_layers = config.optimizer.checkpoint_activations, sizes.num_hidden_layers
    dtype: torch.dtype = getattr(torch, config.run.dtype)
    is_half, element = dtype != torch.float32, dtype.itemsize
    # layer_kernels.py
    runs_packed = machine.device == "cpu" and model.backend == "native" and not config.run.compile
    layer = layer_numbers(model, dtype, runs_packed)
    # every layer's numbers or input [tokens, H], one layer that is computed again, and half of one
    # layer's for its gradients
    kept = num_layers * (sizes.hidden_size if keeps_inputs else layer) + layer * keeps_inputs
    needed = {f"activations of {tokens} tokens": tokens * element * (kept + layer / 2)}
    in_layers = sum(count(block) for block in model.blocks)
    if is_sharded:
        trained = sum(count(block, is_trained=True) for block in model.blocks)
        two = 2 / num_layers
        # in the compute dtype: the weights outside the layers, and of two layers
        needed["gathered weights"] = element * (count(model) - in_layers + two * in_layers)
        of_all = count(model, is_trained=True)
        largest = max(of_all - trained, two * trained)
        in_float32 = of_all if gradients_fit(model, machine) else largest
        needed["gradients before they are reduced"] = element * largest + 4 * in_float32
    # A linear layer casts its weights to the compute dtype. Autograd keeps the copies of all
    # layers, or of one with --checkpoint-activations.
    joined = joined_weights(model) if runs_packed else 0
    if copied := in_layers if is_half and not is_sharded else joined:
        copied_at_a_time = copied / num_layers if keeps_inputs else copied
        needed[f"copies of weights ({config.run.dtype})"] = element * copied_at_a_time
    is_gpu = machine.device == "cuda"
    of_logit = max(element, 4) if is_gpu else element
    chunk = min(chunk_bytes(machine.device, machine.memory), tokens * sizes.vocab_size * of_logit)
    chunk *= 1 if is_gpu or not is_half else 3  # with a copy in float32
    matrix = sizes.vocab_size * sizes.hidden_size
    output = 0 if is_sharded or not is_half else element * matrix
    # in float32, which a tied matrix keeps until the embedding's gradient is added
    of_matrix = 4 * matrix if model.lm_head.weight.requires_grad else 0
    # the exact divergence has a chunk of each policy, and its gradient of the output matrix waits
    # with the token loss's for the backward pass
    num_losses = 2 if config.loss.kl_coef and config.loss.kl == "full" else 1
    needed["logits of a chunk, output matrix"] = output + num_losses * (of_matrix + chunk)
    return needed


def joined_weights(model: PolicyModel) -> int:
    """Return how many weights the native decoder's layers copy on a CPU, to multiply several
    matrices at once."""
    groups: list[Sequence[nn.Module]] = []
    for layer in model.blocks:
        assert isinstance(layer, Layer)
        attention, mlp = layer.self_attn, layer.mlp
        groups += [(attention.q_proj, attention.k_proj, attention.v_proj)]
        groups += [(mlp.gate_proj, mlp.up_proj)]
    return sum(count(module) for group in groups if can_join(group) for module in group)


def layer_numbers(model: PolicyModel, dtype: torch.dtype, runs_packed: bool) -> int:
    """Return how many numbers of the compute dtype a layer keeps for each token for its backward
    pass."""
    sizes = model.config
    heads = (sizes.num_attention_heads + sizes.num_key_value_heads) * sizes.head_dim
    # of H: input and output of both norms, and one more; of the feed-forward size: gate, up, silu
    # and their product; of the heads: q and k before and after norms and rotation, v, and attention
    hidden, feed_forward, of_heads = 5, 4, 4
    if runs_packed:  # no silu, and q and k before rotation only where they have norms
        assert isinstance(sizes, DecoderConfig)
        hidden, feed_forward, of_heads = 4, 3, 3 if sizes.has_qk_norm else 2
    elif model.backend != "native":  # norms keep float32 inputs of several operations
        hidden, feed_forward, of_heads = (8, 4, 5) if dtype == torch.float32 else (16, 5, 8)
    adapters = [x.rank for x in model.blocks[0].modules() if isinstance(x, LoraLinear)]
    numbers = hidden * sizes.hidden_size + feed_forward * sizes.intermediate_size
    return numbers + of_heads * heads + sum(adapters)


def memory_table(memory: dict[str, Phases], machine: Machine, config: ResolvedConfig) -> list[str]:
    """Return the lines of --dry-run on the memory: a table, and last whether it fits."""
    totals = tuple(map(sum, zip(*memory.values(), strict=True)))
    most, usable = max(totals), (1 - FREE_SHARE) * machine.memory
    unit, scale = ("GB (1e9 bytes)", 1e9) if most >= 1e9 else ("MB (1e6 bytes)", 1e6)
    width = max(map(len, memory)) + 2
    lines = [f"memory of {machine.describe()}, estimated in {unit}"]
    lines += ["  " + " " * width + "".join(f"{phase:>9}" for phase in PHASES)]
    for name, phases in (*memory.items(), ("total", totals)):
        cells = (f"{value / scale:9.1f}" if value else f"{'-':>9}" for value in phases)
        lines += [f"  {name:{width}}{''.join(cells)}"]
    phase = list(PHASES)[totals.index(most)]
    needed = f"{most / 1e9:.1f} GB {PHASES[phase]}"
    limit = f"{usable / 1e9:.1f} GB, nine tenths of the memory"
    if most <= usable:
        return [*lines, f"It fits: it needs at most {needed}, within {limit}."]
    hidden = inapplicable_options(ResolvedConfig, config.flat())
    advice = [
        note.advice.format(option.flag)
        for name, option in options_of(ResolvedConfig).items()
        for note in option.of(LessMemory)
        if name not in hidden and phase in note.phases
    ]
    said = " or ".join(filter(None, [", ".join(advice[:-1]), *advice[-1:]]))
    less = f"; {said} needs less" if said else ""
    return [*lines, f"It does not fit: it needs {needed}, more than {limit}{less}."]


def count(module: nn.Module, is_trained: bool = False) -> int:
    return sum(x.numel() for x in module.parameters() if x.requires_grad or not is_trained)
