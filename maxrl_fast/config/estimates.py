"""What a configuration comes to: the first lines of a run, and for --dry-run its memory and
work.
"""

from pathlib import Path

import torch

import maxrl_fast
from maxrl_fast.algorithms.known import explain_name
from maxrl_fast.algorithms.losses import ALIASES
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
from maxrl_fast.tasks.text_codec import TextTask
from maxrl_fast.training.critic import num_critic_weights
from maxrl_fast.training.optimizer import LearningRate
from maxrl_fast.training.policy_reward import LIKELIHOODS


def describe_run(
    config: ResolvedConfig, task: Task, model: PolicyModel, ranks: Ranks, saved: Path | None
) -> list[str]:
    """Return what runs on what, for the start of a run."""
    device, dtype = torch.device(config.run.device), getattr(torch, config.run.dtype)
    options = config.objective.options
    sizes = [f"{name}={options[name]}" for name in ("k", "order", "beta") if name in options]
    counts = f"{config.rollout.rollouts} rollouts a step"
    if m := config.rollout.stop_at:
        sizes = [f"order={config.rollout.rollouts}"]
        counts = f"{config.rollout.first_rollouts} to {counts}, until {m} succeed"
    method = " ".join([explain_name(config.objective.objective), *sizes])
    if config.loss.loss in ALIASES:
        method += f", loss {explain_name(config.loss.loss)}"
    threads = f"{config.run.threads} thread{'s' * (config.run.threads != 1)}"
    where = f"cpu ({threads}, {torch.backends.cpu.get_cpu_capability()})"
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    if ranks.size > 1:
        is_full = config.run.sharding == "full"
        weights = "a part of the weights (FSDP2)" if is_full else "all weights (DDP)"
        where += f", one of {ranks.size} processes, each with {weights}"
    attention = kernel_name(device, dtype, model.config.head_dim)
    called = kernel_for(device, dtype, model.config.head_dim).name
    # our own decoder's layers have none of these
    if model.backend != "native" and called != attention:
        attention += f" ({called} where a layer has a sliding window, a soft cap or sinks)"
    how = [f"ops: {kernels_for(device)}", f"attention: {attention}"]
    how += ["checkpointed activations"] * config.optimizer.checkpoint_activations
    if config.run.compile:
        timing = ", which chooses kernels by timing them" * (device.type == "cuda")
        how.append(f"torch.compile{timing}")
    start = f"from {saved or config.model.model}" if saved or config.model.model else "new"
    return [
        f"maxrl_fast {maxrl_fast.__version__}: {method}, task {task.name}, seed {config.run.seed}",
        f"on {where} in {config.run.dtype}; {'; '.join(how)}",
        f"policy: {model.config.num_hidden_layers}-layer {model.config.model_type} decoder "
        f"({model.backend}), {_parameters(model)}, {start}",
        *_describe_critic(config, model),
        f"{config.rollout.prompts} prompts x {counts}; results in {config.run.out}",
        *([f"responses end with {task.stops}"] if isinstance(task, TextTask) else []),
        *_describe_ahead(config),
        str(evaluation_schedule(config, task)),
        _describe_rates(config, has_warm_start=saved is None and config.warm_start.sft_steps > 0),
    ]


def _describe_ahead(config: ResolvedConfig) -> list[str]:
    options, a = config.rollout, config.rollout.ahead
    if not a:
        return []
    told = f"step n is sampled with the weights after step n - {a + 1}; correction: "
    shared = "; sampling shares the processor with training, so that only waits are saved"
    return [told + options.correction + shared * (options.vllm_url is None)]


def _parameters(model: PolicyModel) -> str:
    trained = count(model, is_trained=True)
    adapters = "" if trained == count(model) else f", {trained:,} of them trained (LoRA)"
    return f"{count(model):,} parameters{adapters}"


def _describe_critic(config: ResolvedConfig, model: PolicyModel) -> list[str]:
    if not objective_of(config).needs.critic:
        return []
    what = "its adapters" if config.model.lora_rank else "all its weights"
    number, rate = num_critic_weights(model), config.objective.options["critic_lr"]
    return [
        f"critic: a copy of the policy with a value head, {number:,} parameters trained ({what}), "
        f"learning rate {rate:g}"
    ]


def _describe_rates(config: ResolvedConfig, *, has_warm_start: bool) -> str:
    """Return the learning rates with their course, and whose default they are where a checkpoint
    changes the default."""
    kind = "LoRA on a checkpoint" if config.model.lora_rank else "full fine-tuning of a checkpoint"
    sft_default, default = default_rates(config.model) if config.model.model else (None, None)

    def said(rate: float, default: float | None) -> str:
        return f"{rate:g}" + f" (the default for {kind})" * (rate == default)

    options, warm = config.optimizer, config.warm_start
    rates, num_warm = f"learning rate {said(options.lr, default)}", options.warmup_steps
    if 0 < options.steps <= num_warm:
        last = LearningRate(options.lr, options.steps, num_warm).at(options.steps)
        rates += f": the warm-up of {num_warm} steps outlasts the run, which ends at {last:.3g}"
    elif options.steps:
        rates += f", after {num_warm} steps of warm-up" * (num_warm > 0)
        is_cosine = options.lr_schedule == "cosine"
        rates += f", then a cosine to {options.lr / 10:g}" if is_cosine else ", then constant"
    if not has_warm_start:
        return rates
    steps = f"{warm.sft_steps} step{'s' * (warm.sft_steps > 1)}"
    return f"{rates}; in the warm start of {steps} {said(warm.sft_lr, sft_default)}"


def estimate(
    config: ResolvedConfig,
    task: Task,
    model: PolicyModel,
    machine: Machine,
    teacher: PolicyModel | None = None,
) -> str:
    """Return the options that the run uses, and estimates of its memory (`estimate_memory`) on a
    machine and of the work of a step."""
    flat, rollout, loss = config.flat(), config.rollout, config.loss
    hidden = {*inapplicable_options(Config, flat), "dry_run"}
    memory = estimate_memory(config, task, model, machine, teacher)
    *table, answer = memory_table(memory, machine, config)
    lines = [answer, "configuration"]
    lines += [
        f"  {name} = {value}"
        for name, value in flat.items()
        if value is not None and name not in hidden
    ]
    lines += [f"policy: {_parameters(model)}", *_describe_critic(config, model), *table]
    if rollout.rollout not in ENGINES:
        lines.append(
            f"  The memory of the engine {rollout.rollout} is not known and not in the table."
        )
    needs, prompt_tokens = objective_of(config).needs, rollout.prompts * task.prompt_length
    response_tokens = rollout.prompts * rollout.rollouts * rollout.max_new_tokens
    more_passes = (
        needs.logprob_passes
        + (config.shaping.reward_source in LIKELIHOODS)
        + (rollout.correction != "none")
        + (loss_of(loss.loss).over_batch or loss.top_entropy < 1 or bool(loss.siren))
        + bool(loss.kl_coef)
    )
    tokens = prompt_tokens + response_tokens
    # The greedy responses are sampled by another call, which reads the prompts again.
    greedy = needs.greedy * rollout.prompts * (task.prompt_length + rollout.max_new_tokens)
    # A critic computes its values before the step, and is updated separately.
    work = {
        "rollout": 2 * (tokens + greedy),
        "update": (6 + 2 * more_passes + 8 * needs.critic) * tokens,
    }
    lines += [
        "work per step, estimated (multiplications with weights; all responses at their limit)",
        f"  prompt tokens: {prompt_tokens:,}, response tokens: up to {response_tokens:,}",
    ]
    lines += [
        f"  {name}: {count(model) * multiplications / 1e9:,.1f} GFLOP"
        for name, multiplications in work.items()
    ]
    return "\n".join(lines)
