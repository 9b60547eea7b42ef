"""What a configuration comes to: the first lines of a run, and for --dry-run its memory and
work.
"""

from pathlib import Path

import torch

import maxrl_fast
from maxrl_fast.config.checks import objective_of
from maxrl_fast.config.conditions import loss_of
from maxrl_fast.config.memory import count, estimate_memory, memory_table
from maxrl_fast.config.metadata import inapplicable_options
from maxrl_fast.config.options import Config, ResolvedConfig
from maxrl_fast.config.resolve import default_rates, evaluation_schedule
from maxrl_fast.model.attention import kernel_name
from maxrl_fast.model.flash import kernel_for
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.ops.dispatch import kernels_for
from maxrl_fast.rollout.names import ENGINES
from maxrl_fast.runtime.device import Machine
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task
from maxrl_fast.training.critic import num_critic_weights
from maxrl_fast.training.policy_reward import LIKELIHOODS


def describe_run(
    config: ResolvedConfig, task: Task, model: PolicyModel, ranks: Ranks, saved: Path | None = None
) -> list[str]:
    """Return what runs on what, for the start of a run."""
    device, dtype = torch.device(config.run.device), getattr(torch, config.run.dtype)
    threads = f"{config.run.threads} thread{'' if config.run.threads == 1 else 's'}"
    where = f"cpu ({threads}, {torch.backends.cpu.get_cpu_capability()})"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    sizes = [
        f"{name}={value}"
        for name in ("k", "order", "beta")
        if (value := config.flat()[name]) is not None
    ]
    start = f"from {saved or config.model.model}" if saved or config.model.model else "new"
    if ranks.size > 1:
        sharded = config.run.sharding == "full"
        where += (
            f", one of {ranks.size} processes, each with {'a part of the' if sharded else 'all'} "
            "weights "
        )
        where += "(FSDP2)" if sharded else "(DDP)"
    trained = count(model, is_trained=True)
    adapters = "" if trained == count(model) else f", {trained:,} of them trained (LoRA)"
    compiled = (
        "torch.compile, which chooses kernels by timing them"
        if device.type == "cuda"
        else "torch.compile"
    )
    switches = ["checkpointed activations"] * config.optimizer.checkpoint_activations + [
        compiled
    ] * config.run.compile
    attention, called = (
        kernel_name(device, dtype, model.config.head_dim),
        kernel_for(device, dtype, model.config.head_dim).name,
    )
    # our own decoder's layers have none of these
    if model.backend != "native" and called != attention:
        attention += f" ({called} where a layer has a sliding window, a soft cap or sinks)"
    how = "; ".join([f"ops: {kernels_for(device)}", f"attention: {attention}", *switches])
    policy = (
        f"{model.config.num_hidden_layers}-layer {model.config.model_type} decoder "
        f"({model.backend}), "
    )
    policy += f"{count(model):,} parameters"
    return [
        f"maxrl_fast {maxrl_fast.__version__}: {' '.join([config.objective.objective, *sizes])}, "
        f"task {task.name}, "
        f"seed {config.run.seed}",
        f"on {where} in {config.run.dtype}; {how}",
        f"policy: {policy}{adapters}, {start}",
        *_describe_critic(config, model),
        f"{config.rollout.prompts} prompts x {config.rollout.rollouts} rollouts a step; results in "
        f"{config.run.out}",
        str(evaluation_schedule(config)),
        _describe_rates(config, has_warm_start=saved is None and config.warm_start.sft_steps > 0),
    ]


def _describe_critic(config: ResolvedConfig, model: PolicyModel) -> list[str]:
    """Return a line on the critic that a run trains; none where it trains none."""
    if not objective_of(config).needs.critic:
        return []
    what = "its adapters" if config.model.lora_rank else "all its weights"
    number, rate = num_critic_weights(model), config.objective.options["critic_lr"]
    return [
        f"critic: a copy of the policy with a value head, {number:,} parameters trained ({what}), "
        f"learning rate {rate:g}"
    ]


def _describe_rates(config: ResolvedConfig, *, has_warm_start: bool) -> str:
    """Return the learning rates, and whose default they are where a checkpoint changes the
    default.
    """
    kind = "LoRA on a checkpoint" if config.model.lora_rank else "full fine-tuning of a checkpoint"
    defaults = default_rates(config.model) if config.model.model is not None else (None, None)
    sft_lr, lr, steps = config.warm_start.sft_lr, config.optimizer.lr, config.warm_start.sft_steps
    said = [f"learning rate {lr:g}" + (f" (the default for {kind})" if lr == defaults[1] else "")]
    if has_warm_start:
        default = f" (the default for {kind})" if sft_lr == defaults[0] else ""
        said += [f"in the warm start of {steps} step{'s' * (steps > 1)} {sft_lr:g}{default}"]
    return "; ".join(said)


def estimate(
    config: ResolvedConfig,
    task: Task,
    model: PolicyModel,
    machine: Machine,
    teacher: PolicyModel | None = None,
) -> str:
    """Return the options that the run uses, and estimates of its memory on a machine and of the
    work of a step.

    Args:
        model, teacher: for their sizes; they may be on the meta device.
    """
    flat, parameters, trained = config.flat(), count(model), count(model, is_trained=True)
    hidden = {*inapplicable_options(Config, flat), "dry_run"}
    memory = estimate_memory(config, task, model, machine, teacher)
    *table, answer = memory_table(memory, machine, config)
    lines = [answer, "configuration"]
    lines += [
        f"  {name} = {value}"
        for name, value in flat.items()
        if value is not None and name not in hidden
    ]
    adapters = "" if trained == parameters else f", {trained:,} of them trained (LoRA)"
    lines += [f"policy: {parameters:,} parameters{adapters}", *_describe_critic(config, model)]
    lines += table
    if config.rollout.rollout not in ENGINES:
        lines += [
            f"  The memory of the engine {config.rollout.rollout} is not known and not in the "
            "table."
        ]
    prompt_tokens = config.rollout.prompts * task.prompt_length
    response_tokens = (
        config.rollout.prompts * config.rollout.rollouts * config.rollout.max_new_tokens
    )
    needs, loss = objective_of(config).needs, config.loss
    more_passes = (
        needs.logprob_passes
        + (config.shaping.reward_source in LIKELIHOODS)
        + (config.rollout.correction != "none")
    )
    more_passes += (
        loss_of(loss.loss).over_batch or loss.top_entropy < 1 or bool(loss.siren)
    ) + bool(loss.kl_coef)
    # The greedy responses are sampled by another call, which reads the prompts again.
    greedy_tokens = (
        needs.greedy * config.rollout.prompts * (task.prompt_length + config.rollout.max_new_tokens)
    )
    work = {"rollout": 2 * (prompt_tokens + response_tokens + greedy_tokens)}
    # A critic computes its values before the step, and is updated separately.
    work["update"] = (6 + 2 * more_passes + 8 * needs.critic) * (prompt_tokens + response_tokens)
    lines += [
        "work per step, estimated (multiplications with weights; all responses at their limit)"
    ]
    lines += [f"  prompt tokens: {prompt_tokens:,}, response tokens: up to {response_tokens:,}"]
    lines += [
        f"  {name}: {parameters * multiplications / 1e9:,.1f} GFLOP"
        for name, multiplications in work.items()
    ]
    return "\n".join(lines)
