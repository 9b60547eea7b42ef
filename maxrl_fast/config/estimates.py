"""What a configuration comes to: the first lines of a run, and for --dry-run its memory and work."""

from pathlib import Path

import torch

import maxrl_fast
from maxrl_fast.config.checks import objective_of
from maxrl_fast.config.options import ResolvedConfig
from maxrl_fast.config.relevance import Choices, not_taken
from maxrl_fast.distributed.ranks import Ranks
from maxrl_fast.model.flash import kernel_for
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.ops._gate import kernels_for
from maxrl_fast.rollout.native import MAX_BATCH, default_cache_bytes
from maxrl_fast.tasks import Task


def describe_run(config: ResolvedConfig, task: Task, model: PolicyModel, ranks: Ranks, saved: Path | None = None) -> list[str]:
    """Return what runs on what, for the start of a run."""
    device, dtype = torch.device(config.run.device), getattr(torch, config.run.dtype)
    threads = f"{config.run.threads} thread{'' if config.run.threads == 1 else 's'}"
    where = f"cpu ({threads}, {torch.backends.cpu.get_cpu_capability()})"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    sizes = [f"{name}={value}" for name in ("k", "order", "beta") if (value := config.flat()[name]) is not None]
    start = f"from {saved or config.model.model}" if saved or config.model.model else "new"
    if ranks.size > 1:
        sharded = config.run.sharding == "full"
        where += f", one of {ranks.size} processes, each with {'a part of the' if sharded else 'all'} weights "
        where += "(FSDP2)" if sharded else "(DDP)"
    trained = _trained(model)
    adapters = "" if trained == _parameters(model) else f", {trained:,} of them trained (LoRA)"
    compiled = "torch.compile, which chooses kernels by timing them" if device.type == "cuda" else "torch.compile"
    switches = ["checkpointed activations"] * config.optimizer.checkpoint_activations + [compiled] * config.run.compile
    attention = kernel_for(device, dtype, model.config.head_dim).name
    how = "; ".join([f"ops: {kernels_for(device)}", f"attention: {attention}", *switches])
    policy = f"{model.config.num_hidden_layers}-layer {model.config.model_type} decoder ({model.backend}), "
    policy += f"{_parameters(model):,} parameters"
    return [
        f"maxrl_fast {maxrl_fast.__version__}: {' '.join([config.objective.objective, *sizes])}, task {task.name}, "
        f"seed {config.run.seed}",
        f"on {where} in {config.run.dtype}; {how}",
        f"policy: {policy}{adapters}, {start}; {config.rollout.prompts} prompts x {config.rollout.rollouts} rollouts a step; "
        f"results in {config.run.out}",
    ]


def estimate(config: ResolvedConfig, task: Task, model: PolicyModel) -> str:
    """Return the options that the run takes, and estimates of its memory and of the work of a step."""
    flat, parameters = config.flat(), _parameters(model)
    hidden = not_taken(Choices.of(flat))
    lines = ["configuration"]
    lines += [f"  {name} = {value}" for name, value in flat.items() if value is not None and name not in hidden]
    memory = _memory(config, task, model)
    lines += [f"policy: {parameters:,} parameters", "memory, estimated"]
    lines += [f"  {name}: {_bytes(value)}" for name, value in memory.items()]
    lines += [f"  total: {_bytes(sum(memory.values()))}"]
    prompt_tokens = config.rollout.prompts * task.prompt_length
    response_tokens = config.rollout.prompts * config.rollout.rollouts * config.rollout.max_new_tokens
    passes = 6 + 2 * bool(config.loss.kl_coef) + 2 * objective_of(config).needs.logprob_passes
    lines += ["work per step, estimated (multiplications with weights; all responses at their limit)"]
    lines += [f"  prompt tokens: {prompt_tokens:,}, response tokens: up to {response_tokens:,}"]
    for name, factor in (("rollout", 2), ("update", passes)):
        lines += [f"  {name}: {factor * parameters * (prompt_tokens + response_tokens) / 1e9:,.1f} GFLOP"]
    return "\n".join(lines)


def _memory(config: ResolvedConfig, task: Task, model: PolicyModel) -> dict[str, float]:
    """Return bytes by what they are for, with all responses at their limit."""
    sizes, options, device = model.config, config.rollout, torch.device(config.run.device)
    parameters, trained = _parameters(model), _trained(model)
    element = torch.empty((), dtype=getattr(torch, config.run.dtype)).element_size()
    rows = min(max(options.prompts * options.rollouts, 32 * config.evaluation.eval_samples), MAX_BATCH[device.type])
    budget = default_cache_bytes(device) if options.kv_cache_gb is None else options.kv_cache_gb * 1e9
    kv_token = 2 * sizes.num_hidden_layers * sizes.num_key_value_heads * sizes.head_dim * element
    cached_tokens = rows * options.max_new_tokens + rows // min(options.rollouts, rows) * task.prompt_length
    # Kept for the backward pass, in floats per token and layer: six of H, four of the feed-forward layer, and q, k, v and
    # what attention makes of them.
    heads = sizes.num_attention_heads * sizes.head_dim
    activations = 6 * sizes.hidden_size + 4 * sizes.intermediate_size + 8 * heads
    if config.optimizer.checkpoint_activations:
        activations += sizes.num_hidden_layers * sizes.hidden_size
    else:
        activations *= sizes.num_hidden_layers
    logits, tokens = 6 * sizes.vocab_size, config.optimizer.token_budget
    memory = {
        "weights, gradients, Adam moments (float32)": 4 * parameters + 12 * trained,
        f"rollout weights ({config.run.dtype})": element * parameters,
        f"key/value cache of at most {rows} rows": min(kv_token * cached_tokens, budget),
        f"activations of {tokens} tokens": tokens * (activations * element + logits * 4),
    }
    if config.loss.kl_coef or objective_of(config).needs.reference:
        memory["reference policy (float32)"] = 4 * trained  # frozen weights are shared
    if device.type == "cpu":  # on a GPU the copy is in the host's memory
        references = memory.get("reference policy (float32)", 0)
        memory["copy of the state while a checkpoint is written"] = 4 * parameters + 8 * trained + references
    return memory


def _parameters(model: PolicyModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _trained(model: PolicyModel) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def _bytes(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"
