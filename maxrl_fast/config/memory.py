"""The memory of a run, for --dry-run: bytes of each process, by what they are for."""

import torch
from torch import nn

from maxrl_fast.config.options import Config
from maxrl_fast.config.resolve import KEPT_BYTES, tensor_parallel
from maxrl_fast.config.rules import objective_of
from maxrl_fast.model.linear import LoraLinear
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.rollout.names import ENGINES
from maxrl_fast.rollout.native import MAX_BATCH
from maxrl_fast.rollout.vllm_shared import MAX_SEQUENCES
from maxrl_fast.runtime.device import Machine
from maxrl_fast.runtime.tuning import chunk_bytes
from maxrl_fast.tasks import Task
from maxrl_fast.training.critic import num_critic_weights

# of the memory, left for CUDA, NCCL, CUDA graphs and gaps of the allocator
FREE_SHARE = 0.1


def estimate_memory(
    config: Config,
    task: Task,
    model: PolicyModel,
    machine: Machine,
    teacher: PolicyModel | None = None,
) -> dict[str, float]:
    """Return the bytes of one process; responses and passes are at their limits. --sharding is
    resolved, and the models may be on the meta device.
    """
    weights, trained = count(model), count(model, is_trained=True)
    needs, loss, sampling = objective_of(config).needs, config.loss, config.sampling
    dtype: torch.dtype = getattr(torch, config.run.dtype)
    part = 1 / machine.processes if config.run.sharding == "full" else 1.0
    copies_policy = loss.reference is None and loss.teacher_prompt is None
    reference = trained if copies_policy and (loss.kl_coef or needs.reference) else 0
    critic = num_critic_weights(model) if needs.critic else 0
    responses = sampling.prompts * sampling.rollouts * max(sampling.dynamic_sampling, 1)
    memory = {
        "weights (float32)": 4 * weights * part,
        "gradients (float32)": 4 * trained * part,
        "Adam moments (float32)": 8 * trained * part,
        "reference policy (float32)": 4 * reference * part,
        f"teacher ({config.run.dtype})": sum(p.nbytes for p in teacher.parameters()) * part
        if teacher
        else 0,
        "critic with gradients and moments (float32)": 16 * critic * part,
        # every process has all of them
        "rollouts of a step": KEPT_BYTES
        * responses
        * sampling.max_new_tokens
        * (1 + sampling.ahead),
        **_of_engine(config, task, model, machine, dtype),
        **_of_update(config, model, machine, dtype),
    }
    return {name: size for name, size in memory.items() if size}


def _of_engine(
    config: Config, task: Task, model: PolicyModel, machine: Machine, dtype: torch.dtype
) -> dict[str, float]:
    """The engine's copy of the weights and its KV cache; nothing of a vLLM server and of a custom
    engine."""
    name, sampling, sizes = config.chosen.rollout, config.sampling, model.config
    if config.parts["rollout"].get("vllm_url") or name not in ENGINES:
        return {}
    number, is_gpu = tensor_parallel(config), machine.device == "cuda"
    most = MAX_SEQUENCES if name == "vllm" else MAX_BATCH[machine.device]
    rows = min(sampling.samples_of_engine(machine.processes, number), most)
    prompts = -(-rows // min(sampling.rollouts, rows))
    tokens = rows * sampling.max_new_tokens + prompts * task.prompt_length
    keys = sizes.num_hidden_layers * sizes.num_key_value_heads * sizes.head_dim
    limit = (sampling.kv_cache_gb or 0) * 1e9 or machine.memory / (4 if is_gpu else 8)
    return {
        f"rollout weights ({config.run.dtype})": dtype.itemsize * count(model) / number,
        # vLLM allocates all of it at once
        f"KV cache of {rows} samples": limit
        if name == "vllm"
        else min(limit, 2 * keys * dtype.itemsize * tokens),
    }


def _of_update(
    config: Config, model: PolicyModel, machine: Machine, dtype: torch.dtype
) -> dict[str, float]:
    """What a pass over --token-budget tokens needs besides the training state."""
    sizes, tokens = model.config, config.optimizer.token_budget
    # of each token a layer keeps: 5 numbers of H, 4 of the feed-forward size, 4 of the heads
    heads = (sizes.num_attention_heads + sizes.num_key_value_heads) * sizes.head_dim
    adapters = [x.rank for x in model.blocks[0].modules() if isinstance(x, LoraLinear)]
    layer = 5 * sizes.hidden_size + 4 * sizes.intermediate_size + 4 * heads + sum(adapters)
    keeps_inputs, num_layers = config.optimizer.checkpoint_activations, sizes.num_hidden_layers
    kept = num_layers * sizes.hidden_size + layer if keeps_inputs else num_layers * layer
    logits = min(chunk_bytes(machine.device, machine.memory), tokens * sizes.vocab_size * 4)
    # the output matrix and its gradient in float32; with the exact divergence twice
    times = 2 if config.loss.kl_coef and config.loss.kl == "full" else 1
    matrix = 4 * sizes.vocab_size * sizes.hidden_size * model.lm_head.weight.requires_grad
    is_half, in_layers = dtype != torch.float32, sum(count(block) for block in model.blocks)
    return {
        f"activations of {tokens} tokens": tokens * dtype.itemsize * (kept + layer / 2),
        "logits of a chunk, output matrix": times * (logits + matrix),
        f"copies of weights ({config.run.dtype})": dtype.itemsize * in_layers * is_half,
    }


def memory_table(memory: dict[str, float], machine: Machine, config: Config) -> list[str]:
    """Return whether it fits, and a table."""
    # the engine frees its memory while the policy trains
    names = ("rollout weights", "KV cache"), ("activations", "logits", "copies")
    freed = (sum(size for x, size in memory.items() if x.startswith(own)) for own in names)
    total, usable = sum(memory.values()) - min(freed), (1 - FREE_SHARE) * machine.memory
    unit, scale = ("GB (1e9 bytes)", 1e9) if total >= 1e9 else ("MB (1e6 bytes)", 1e6)
    fits = f"{total / 1e9:.1f} GB, within {usable / 1e9:.1f} GB, nine tenths of the memory"
    answer = f"It fits: it needs at most {fits}."
    if total > usable:
        answer = (
            f"It does not fit: it needs {total / 1e9:.1f} GB, more than {usable / 1e9:.1f} GB, "
            "nine tenths of the memory; a lower --kv-cache-gb, a lower --token-budget, "
            "--checkpoint-activations, --lora-rank or --sharding full on more GPUs needs less."
        )
    width = max(map(len, (*memory, "most at a time"))) + 2
    rows = {**memory, "most at a time": total}
    return [
        answer,
        f"memory of {machine.describe()}, estimated in {unit}",
        *(f"  {name:{width}}{size / scale:9.1f}" for name, size in rows.items()),
    ]


def count(module: nn.Module, is_trained: bool = False) -> int:
    return sum(x.numel() for x in module.parameters() if x.requires_grad or not is_trained)
