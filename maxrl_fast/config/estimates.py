"""What a configuration comes to: the first lines of a run, and the text of --dry-run with its
memory: bytes of each process, by what they are for."""

from pathlib import Path

import torch
from torch import nn

from maxrl_fast.algorithms.known import explain_name
from maxrl_fast.config.options import Config
from maxrl_fast.config.resolve import evaluation_schedule, tensor_parallel
from maxrl_fast.config.rules import objective_of
from maxrl_fast.model.attention import kernel_name
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.ops.dispatch import kernels_for
from maxrl_fast.rollout import ENGINES, MAX_BATCH
from maxrl_fast.rollout.vllm import MAX_SEQUENCES
from maxrl_fast.runtime.device import Machine, versions
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.runtime.tuning import chunk_bytes
from maxrl_fast.tasks import Task, describe_task
from maxrl_fast.training.critic import num_critic_weights


def describe_run(
    config: Config, task: Task, model: PolicyModel, ranks: Ranks, saved: Path | None
) -> list[str]:
    """Return what runs on what, for the start of a run."""
    device, dtype, sizes = torch.device(config.run.device), config.run.dtype, model.config
    chosen, sampling, own = config.chosen, config.sampling, config.parts["objective"]
    method, counts = explain_name(chosen.objective), f"{sampling.rollouts} rollouts a step"
    for name in own.keys() & {"k", "order", "beta"}:
        order = sampling.rollouts * max(sampling.carry, 1)
        method += f" {name}={order if sampling.stop_at or sampling.carry else own[name]}"
    if most := sampling.stop_at:
        counts = f"{sampling.first_rollouts} to {counts}, until {most} succeed"
    if sampling.carry:
        counts += f", prompts carried for up to {sampling.carry} steps until one succeeds"
    where = f"cpu, {config.run.threads} threads, {torch.backends.cpu.get_cpu_capability()},"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    if ranks.size > 1:
        where += f", one of {ranks.size} processes, with --sharding {config.run.sharding},"
    attention = kernel_name(device, getattr(torch, dtype), sizes.head_dim)
    how = f"ops: {kernels_for(device)}; attention: {attention}"
    how += "; checkpointed activations" * config.optimizer.checkpoint_activations
    layers = f"{sizes.num_hidden_layers}-layer {sizes.model_type} decoder ({model.backend})"
    start = saved or config.model.model
    lines = [
        f"maxrl_fast {versions()['maxrl_fast']}: {method}, loss {chosen.loss}, task {task.name}, "
        f"seed {config.run.seed}",
        f"on {where} in {dtype}; {how}",
        f"policy: {layers}, {_parameters(model)}, {f'from {start}' if start else 'new'}",
        *_describe_critic(config, model),
        f"{sampling.prompts} prompts x {counts}; results in {config.run.out}",
        *describe_task(task),
    ]
    if sampling.ahead:
        lag = f"step n is sampled with the weights after step n - {sampling.ahead + 1}"
        lines.append(f"{lag}; correction: {chosen.correction}")
    options, warm = config.optimizer, config.warm_start
    rates = f"learning rate {options.lr:g} after {options.warmup_steps} steps of warm-up, then "
    rates += f"a cosine to {options.lr / 10:g}" if options.lr_schedule == "cosine" else "constant"
    if saved is None and warm.sft_steps:
        rates += f"; warm start: {warm.sft_steps} steps at {warm.sft_lr:g}"
    return [*lines, str(evaluation_schedule(config, task)), rates]


def _parameters(model: PolicyModel) -> str:
    trained = count(model, is_trained=True)
    adapters = "" if trained == count(model) else f", {trained:,} of them trained (LoRA)"
    return f"{count(model):,} parameters{adapters}"


def _describe_critic(config: Config, model: PolicyModel) -> list[str]:
    if not objective_of(config).needs.critic:
        return []
    rate = config.parts["objective"]["critic_lr"]
    trained = f"{num_critic_weights(model):,} parameters trained, learning rate {rate:g}"
    return [f"critic: a copy of the policy with a value head, {trained}"]


def estimate(
    config: Config,
    task: Task,
    model: PolicyModel,
    machine: Machine,
    teacher: PolicyModel | None = None,
) -> str:
    """Return the options that the run uses, and an estimate of its memory on a machine."""
    memory = estimate_memory(config, task, model, machine, teacher)
    # a tenth is left for CUDA, NCCL, CUDA graphs and gaps of the allocator
    usable, needed = 0.9 * machine.memory, sum(memory.values())
    answer = f"It fits: it needs at most {needed / 1e9:.1f} GB, within"
    if needed > usable:
        answer = (
            "A lower --kv-cache-gb, a lower --token-budget, --checkpoint-activations, --lora-rank "
            "or --sharding full on more GPUs needs less.\n"
            f"It does not fit: it needs {needed / 1e9:.1f} GB, more than"
        )
    lines = [
        f"{answer} {usable / 1e9:.1f} GB, nine tenths of the memory.",
        "configuration",
        *(f"  {name} = {x}" for name, x in config.flat().items() if name != "dry_run"),
        f"policy: {_parameters(model)}",
        *_describe_critic(config, model),
        f"memory of {machine.describe()}, estimated in GB (1e9 bytes)",
        *(f"  {name:35}{x / 1e9:9.3f}" for name, x in {**memory, "total": needed}.items()),
    ]
    if (name := config.chosen.rollout) not in ENGINES:
        lines.append(f"  The memory of the engine {name} is not known and not in the table.")
    return "\n".join(lines)


def estimate_memory(
    config: Config,
    task: Task,
    model: PolicyModel,
    machine: Machine,
    teacher: PolicyModel | None = None,
) -> dict[str, float]:
    """Return the bytes of one process, by what they are for; responses and passes are at their
    limits. --sharding is resolved, and the models may be on the meta device.
    """
    loss, sampling, sizes, dtype = config.loss, config.sampling, model.config, config.run.dtype
    needs, width = objective_of(config).needs, getattr(torch, dtype).itemsize
    part = 1 / machine.processes if config.run.sharding == "full" else 1.0
    trained = count(model, is_trained=True) * part
    is_copied = not (loss.reference or loss.teacher_prompt) and (loss.kl_coef or needs.reference)
    responses = sampling.prompts * sampling.rollouts * max(sampling.dynamic_sampling, 1)
    tokens, num_layers = config.optimizer.token_budget, sizes.num_hidden_layers
    # of each token a layer keeps: 5 numbers of H, 4 of the feed-forward size, 4 of the heads
    heads = (sizes.num_attention_heads + sizes.num_key_value_heads) * sizes.head_dim
    layer = 5 * sizes.hidden_size + 4 * sizes.intermediate_size + 4 * heads
    kept = num_layers * layer
    if config.optimizer.checkpoint_activations:
        kept = num_layers * sizes.hidden_size + layer
    # the output matrix and its gradient are float32; the exact divergence needs both twice
    logits = min(chunk_bytes(machine.device, machine.memory), tokens * sizes.vocab_size * 4)
    logits += 4 * sizes.vocab_size * sizes.hidden_size * model.lm_head.weight.requires_grad
    memory = {
        "weights (float32)": 4 * count(model) * part,
        "gradients (float32)": 4 * trained,
        "Adam moments (float32)": 8 * trained,
        "reference policy (float32)": 4 * trained * bool(is_copied),
        "teacher": width * count(teacher) * part if teacher else 0,
        "critic with gradients and moments (float32)": (
            16 * num_critic_weights(model) * part if needs.critic else 0
        ),
        # every process has all of them: of a token its id in int64 and its log-prob in float32
        "rollouts of a step": 12 * responses * sampling.max_new_tokens * (1 + sampling.ahead),
        **_of_engine(config, task, model, machine, width),
        f"copies of weights ({dtype})": width * sum(map(count, model.blocks)) * (width < 4),
        f"activations of {tokens} tokens": tokens * width * (kept + layer / 2),
        "logits of a chunk, output matrix": (
            logits * (2 if loss.kl_coef and loss.kl == "full" else 1)
        ),
    }
    return {name: size for name, size in memory.items() if size}


def _of_engine(
    config: Config, task: Task, model: PolicyModel, machine: Machine, width: int
) -> dict[str, float]:
    """The engine's copy of the weights and its KV cache; nothing of a vLLM server and of a custom
    engine."""
    name, sampling, sizes = config.chosen.rollout, config.sampling, model.config
    if config.parts["rollout"].get("vllm_url") or name not in ENGINES:
        return {}
    number = tensor_parallel(config)
    most = MAX_SEQUENCES if name == "vllm" else MAX_BATCH[machine.device]
    rows = min(sampling.samples_of_engine(machine.processes, number), most)
    prompts = -(-rows // min(sampling.rollouts, rows))
    tokens = rows * sampling.max_new_tokens + prompts * task.prompt_length
    keys = sizes.num_hidden_layers * sizes.num_key_value_heads * sizes.head_dim
    limit = (sampling.kv_cache_gb or 0) * 1e9
    limit = limit or machine.memory / (4 if machine.device == "cuda" else 8)
    # vLLM allocates all of it at once
    cache = limit if name == "vllm" else min(limit, 2 * keys * width * tokens)
    copy = width * count(model) / number
    return {f"rollout weights ({config.run.dtype})": copy, f"KV cache of {rows} samples": cache}


def count(module: nn.Module, is_trained: bool = False) -> int:
    return sum(x.numel() for x in module.parameters() if x.requires_grad or not is_trained)
