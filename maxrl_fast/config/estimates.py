"""What a configuration comes to: the first lines of a run, and the text of --dry-run."""

from pathlib import Path

import torch

import maxrl_fast
from maxrl_fast.algorithms.known import explain_name
from maxrl_fast.algorithms.losses import ALIASES
from maxrl_fast.config.memory import count, estimate_memory, memory_table
from maxrl_fast.config.options import Config
from maxrl_fast.config.resolve import default_rates, evaluation_schedule
from maxrl_fast.config.rules import objective_of
from maxrl_fast.model.attention import kernel_name
from maxrl_fast.model.flash import kernel_for
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.ops.dispatch import kernels_for
from maxrl_fast.rollout.names import ENGINES
from maxrl_fast.runtime.device import Machine
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task, describe_task
from maxrl_fast.training.critic import num_critic_weights
from maxrl_fast.training.optimizer import LearningRate


def describe_run(
    config: Config, task: Task, model: PolicyModel, ranks: Ranks, saved: Path | None
) -> list[str]:
    """Return what runs on what, for the start of a run."""
    device, dtype = torch.device(config.run.device), getattr(torch, config.run.dtype)
    options = config.parts["objective"]
    sizes = [f"{name}={options[name]}" for name in ("k", "order", "beta") if name in options]
    counts = f"{config.sampling.rollouts} rollouts a step"
    if m := config.sampling.stop_at:
        sizes = [f"order={config.sampling.rollouts}"]
        counts = f"{config.sampling.first_rollouts} to {counts}, until {m} succeed"
    method = " ".join([explain_name(config.chosen.objective), *sizes])
    if config.chosen.loss in ALIASES:
        method += f", loss {explain_name(config.chosen.loss)}"
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
        f"{config.sampling.prompts} prompts x {counts}; results in {config.run.out}",
        *describe_task(task),
        *_describe_ahead(config),
        str(evaluation_schedule(config, task)),
        _describe_rates(config, has_warm_start=saved is None and config.warm_start.sft_steps > 0),
    ]


def _describe_ahead(config: Config) -> list[str]:
    if not (a := config.sampling.ahead):
        return []
    told = f"step n is sampled with the weights after step n - {a + 1}; correction: "
    shared = "; sampling shares the processor with training, so that only waits are saved"
    has_server = config.parts["rollout"].get("vllm_url")
    return [told + config.chosen.correction + shared * (not has_server)]


def _parameters(model: PolicyModel) -> str:
    trained = count(model, is_trained=True)
    adapters = "" if trained == count(model) else f", {trained:,} of them trained (LoRA)"
    return f"{count(model):,} parameters{adapters}"


def _describe_critic(config: Config, model: PolicyModel) -> list[str]:
    if not objective_of(config).needs.critic:
        return []
    what = "its adapters" if config.model.lora_rank else "all its weights"
    number, rate = num_critic_weights(model), config.parts["objective"]["critic_lr"]
    return [
        f"critic: a copy of the policy with a value head, {number:,} parameters trained ({what}), "
        f"learning rate {rate:g}"
    ]


def _describe_rates(config: Config, *, has_warm_start: bool) -> str:
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
    config: Config,
    task: Task,
    model: PolicyModel,
    machine: Machine,
    teacher: PolicyModel | None = None,
) -> str:
    """Return the options that the run uses, and an estimate of its memory on a machine."""
    chosen = config.chosen
    answer, *table = memory_table(
        estimate_memory(config, task, model, machine, teacher), machine, config
    )
    lines = [answer, "configuration"]
    lines += [f"  {name} = {x}" for name, x in config.flat().items() if name != "dry_run"]
    lines += [f"policy: {_parameters(model)}", *_describe_critic(config, model), *table]
    if chosen.rollout not in ENGINES:
        lines.append(
            f"  The memory of the engine {chosen.rollout} is not known and not in the table."
        )
    return "\n".join(lines)
