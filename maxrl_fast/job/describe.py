"""What the first lines of a run say, and what --dry-run estimates of its memory."""

import torch
from torch import nn

from maxrl_fast.config.resolve import evaluation_schedule
from maxrl_fast.job.build import RunContext
from maxrl_fast.model.attention import kernel_name
from maxrl_fast.ops.dispatch import kernels_for
from maxrl_fast.rollout import ENGINES, MAX_BATCH
from maxrl_fast.rollout.vllm import MAX_SEQUENCES
from maxrl_fast.runtime.device import Machine, versions
from maxrl_fast.runtime.tuning import chunk_bytes
from maxrl_fast.tasks import describe_task
from maxrl_fast.training.objectives.registry import explain_name
from maxrl_fast.training.passes import num_critic_weights


def describe_run(run: RunContext) -> list[str]:
    """Return what runs on what, for the start of a run."""
    config, seed, (device, dtype) = run.config, run.config.run.seed, run.config.run.where
    chosen, sampling = config.chosen, config.sampling
    method, counts = explain_name(chosen.objective), f"{sampling.rollouts} rollouts a step"
    own = {} if sampling.stop_at or sampling.carry else config.parts["objective"]
    method += "".join(f" {x}={own[x]}" for x in ("k", "order", "beta") if x in own)
    if most := sampling.stop_at:
        counts = f"{sampling.first_rollouts} to {counts}, until {most} succeed"
    if sampling.carry:
        counts += f", carried for up to {sampling.carry} steps until one succeeds"
    where = f"cpu, {config.run.threads} threads, {torch.backends.cpu.get_cpu_capability()},"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    if run.ranks.size > 1:
        where += f", one of {run.ranks.size} processes, with --sharding {config.run.sharding},"
    attention = kernel_name(device, dtype, run.policy.config.head_dim)
    how = f"ops: {kernels_for(device)}; attention: {attention}"
    how += "; checkpointed activations" * config.optimizer.checkpoint_activations
    what = f"{method}, loss {chosen.loss}, task {run.task.name}, seed {seed}"
    lines = [
        f"maxrl_fast {versions()['maxrl_fast']}: {what}",
        f"on {where} in {config.run.dtype}; {how}",
        _policy(run),
        f"{sampling.prompts} prompts x {counts}; results in {config.run.out}",
        *describe_task(run.task),
    ]
    if sampling.ahead:
        lag = f"step n is sampled with the weights after step n - {sampling.ahead + 1}"
        lines.append(f"{lag}; correction: {chosen.correction}")
    every, number = evaluation_schedule(config, run.task)
    between = f", and every {every} steps on {number} prompts" if every else ""
    lines.append(f"evaluations before the first step and after the last{between}")
    return [*lines, _files(run)]


def _policy(run: RunContext) -> str:
    model, sizes = run.policy, run.policy.config
    number, trained = count(model), count(model, is_trained=True)
    layers = f"{sizes.num_hidden_layers}-layer {sizes.model_type} decoder ({model.backend})"
    adapters = f", {trained:,} of them trained (LoRA)" * (trained < number)
    start = run.saved.directory if run.saved else run.config.model.model
    origin = f"from {start}" if start else "new"
    return f"policy: {layers}, {number:,} parameters{adapters}, {origin}"


def _files(run: RunContext) -> str:
    keep, every = run.config.run.keep_checkpoints, run.config.run.save_every
    number = 2 + (run.config.optimizer.steps // every if every else 0)
    number = min(number, keep + 2 if keep else number)
    weight = getattr(torch, run.policy.config.dtype).itemsize
    # weights in float32 and two moments; of the critic too
    state = 12 * (1 + run.objective.needs.critic)
    weights = run.policy.parameters()
    size = sum(x.numel() * (weight + state * x.requires_grad) for x in weights) / 1e9
    return f"writes up to {number} checkpoints of {size:.2g} GB, {number * size:.2g} GB in all"


def estimate(run: RunContext, machine: Machine) -> str:
    """Return what --dry-run prints of a run on a machine."""
    sizes = {name: x / 1e9 for name, x in estimate_memory(run, machine).items()}
    # a tenth is left for CUDA, NCCL, CUDA graphs and gaps of the allocator
    usable, needed = 0.9 * machine.memory / 1e9, sum(sizes.values())
    answer = f"It fits: it needs at most {needed:.1f} GB, within"
    if needed > usable:
        answer = (
            "A lower --kv-cache-gb, a lower --token-budget, --checkpoint-activations, --lora-rank "
            "or --sharding full on more GPUs needs less.\n"
            f"It does not fit: it needs {needed:.1f} GB, more than"
        )
    lines = [
        *describe_task(run.task),
        _files(run),
        f"{answer} {usable:.1f} GB, nine tenths of the memory.",
        "configuration",
        *(f"  {name} = {x}" for name, x in run.config.flat().items() if name != "dry_run"),
        _policy(run),
        f"memory of {machine.describe()}, estimated in GB (1e9 bytes)",
        *(f"  {name:35}{x:9.3f}" for name, x in [*sizes.items(), ("total", needed)]),
    ]
    if (name := run.config.chosen.rollout) not in ENGINES:
        lines.append(f"  The memory of the engine {name} is not known and not in the table.")
    return "\n".join(lines)


def estimate_memory(run: RunContext, machine: Machine) -> dict[str, float]:
    """Return the bytes of one process, by what they are for, at the limits of responses and passes.
    The models may be on the meta device."""
    config, model, sizes, needs = run.config, run.policy, run.policy.config, run.objective.needs
    loss, sampling, tokens = config.loss, config.sampling, config.optimizer.token_budget
    part = 1 / machine.processes if config.run.sharding == "full" else 1.0
    trained, width = count(model, is_trained=True) * part, config.run.where[1].itemsize
    responses = sampling.prompts * sampling.rollouts * max(sampling.dynamic_sampling, 1)
    # of each token a layer keeps: 5 numbers of H, 4 of the feed-forward size, 4 of the heads
    keys = sizes.num_key_value_heads * sizes.head_dim
    layer = 5 * sizes.hidden_size + 4 * sizes.intermediate_size
    layer += 4 * (sizes.num_attention_heads * sizes.head_dim + keys)
    kept = sizes.num_hidden_layers * layer
    if config.optimizer.checkpoint_activations:
        kept = sizes.num_hidden_layers * sizes.hidden_size + layer
    # the output matrix and its gradient are float32; the exact divergence needs both twice
    logits = min(chunk_bytes(machine.device, machine.memory), tokens * sizes.vocab_size * 4)
    logits += 4 * sizes.vocab_size * sizes.hidden_size * model.lm_head.weight.requires_grad
    copies = sum(map(count, model.blocks)) * (width < 4)
    memory = {
        "weights (float32)": 4 * count(model) * part,
        "gradients (float32)": 4 * trained,
        "Adam moments (float32)": 8 * trained,
        "reference policy (float32)": 4 * trained * run.copies_policy,
        "teacher": width * count(run.teacher) * part if run.teacher else 0,
        "critic with gradients and moments (float32)": (
            16 * num_critic_weights(model) * part * needs.critic
        ),
        # every process has all of them: of a token its id in int64 and its log-prob in float32
        "rollouts of a step": 12 * responses * sampling.max_new_tokens * (1 + sampling.ahead),
        f"copies of weights ({config.run.dtype})": width * copies,
        f"activations of {tokens} tokens": tokens * width * (kept + layer / 2),
        "logits of a chunk, output matrix": logits * (1 + bool(loss.kl_coef and loss.kl == "full")),
    }
    engine, number = config.chosen.rollout, config.tensor_parallel
    # a vLLM server or a custom engine has its own memory
    if engine in ENGINES and not config.parts["rollout"].get("vllm_url"):
        most = MAX_SEQUENCES if engine == "vllm" else MAX_BATCH[machine.device]
        rows = min(config.samples_of_engine(machine.processes), most)
        prompts = -(-rows // min(sampling.rollouts, rows))
        read = rows * sampling.max_new_tokens + prompts * run.task.prompt_length
        cache = (sampling.kv_cache_gb or 0) * 1e9
        cache = cache or machine.memory / (4 if machine.device == "cuda" else 8)
        if engine != "vllm":  # which allocates all of it at once
            cache = min(cache, 2 * sizes.num_hidden_layers * keys * width * read)
        memory[f"rollout weights ({config.run.dtype})"] = width * count(model) / number
        memory[f"KV cache of {rows} samples"] = cache
    return {name: size for name, size in memory.items() if size}


def count(module: nn.Module, is_trained: bool = False) -> int:
    return sum(x.numel() for x in module.parameters() if x.requires_grad or not is_trained)
