"""Builds the trainer and the evaluator of a run from its context."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from maxrl_fast.config.options import Config
from maxrl_fast.config.parts import loss_of
from maxrl_fast.config.resolve import tensor_parallel
from maxrl_fast.config.rules import correction_of, loss_options, objective_of, own_options
from maxrl_fast.evaluation.evaluator import Evaluator
from maxrl_fast.job.build_policy import (
    build_policy,
    build_reference,
    build_run_engine,
    build_sampling,
    compare_engine,
    dtype_of,
)
from maxrl_fast.job.build_task import build_length_penalty, build_policy_reward, build_scorer
from maxrl_fast.job.resume import Saved
from maxrl_fast.model.flash import choose
from maxrl_fast.model.policy_model import Change, PolicyModel
from maxrl_fast.rewards.combined import MajorityVote
from maxrl_fast.rewards.output import RewardOutput
from maxrl_fast.rollout import Engine
from maxrl_fast.runtime.device import Machine
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task, held_out_sets
from maxrl_fast.tasks.scorer import Scorer
from maxrl_fast.training.collect import RolloutCollector
from maxrl_fast.training.correction import make_correction
from maxrl_fast.training.critic import Critic, critic_model
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.logprob_parity import check_exact
from maxrl_fast.training.loss_settings import LossSettings
from maxrl_fast.training.objectives.objective import Objective
from maxrl_fast.training.optimizer import LearningRate, make_optimizer
from maxrl_fast.training.schedule import DynamicSampling, Schedule, StdFilter, Stopping
from maxrl_fast.training.sharding import distribute, is_sharded, shard
from maxrl_fast.training.stopwatch import Stopwatch
from maxrl_fast.training.teacher_prompts import TeacherPrompts
from maxrl_fast.training.trainer import Trainer
from maxrl_fast.training.warm_start import WarmStart

NOT_OF_LOSS = ("reference", "teacher_prompt", "jsd_beta")


@dataclass(frozen=True)
class RunContext:
    """What a run consists of, made once.

    policy, teacher: on their device, the same on all ranks or sharded. teacher: the frozen
    checkpoint of --reference. copies: `build_copies` of a sharded policy.
    """

    config: Config
    task: Task
    objective: Objective
    policy: PolicyModel
    engine: Engine
    scorer: Scorer
    teacher: PolicyModel | None = None
    ranks: Ranks = field(default_factory=Ranks)
    clock: Stopwatch = field(default_factory=Stopwatch)
    copies: "tuple[PolicyModel | None, PolicyModel | None] | None" = None

    @property
    def device(self) -> torch.device:
        return torch.device(self.config.run.device)


def build_policies(
    config: Config, task: Task, ranks: Ranks, device: torch.device, saved: Saved | None
) -> tuple[Config, PolicyModel, PolicyModel | None]:
    """Return the configuration, which says whether they will be sharded, the policy and its
    teacher, on the CPU."""
    needs = objective_of(config).needs
    policy, teacher = build_policy(config, task, saved), build_reference(config, task)
    machine = Machine.here(device, ranks.size)
    is_full = is_sharded(config.run.sharding, policy, machine, needs.critic)
    is_full = ranks.any(is_full, device)
    return config.replace(sharding="full" if is_full else "none"), policy, teacher


def build_context(
    config: Config,
    task: Task,
    policy: PolicyModel,
    teacher: PolicyModel | None,
    ranks: Ranks,
    device: torch.device,
    saved: Saved | None = None,
    output: RewardOutput | None = None,
    functions: Mapping[str, Callable[..., Any]] | None = None,
) -> tuple[RunContext, list[str]]:
    """Return the context, and what was found out about the policy and the engine. `functions` are
    rewards of this process by their names in --reward."""
    teacher_prompts = build_teacher_prompts(config, task, teacher or policy)
    if teacher_prompts is not None and not saved:
        teacher_prompts.check()
    copies, dtype = None, dtype_of(config)
    if config.run.sharding == "full":
        # in the same memory until sharded
        copies = build_copies(config, policy, teacher, lambda x: x)
        for model in filter(None, (policy, *copies)):
            shard(model, dtype, device)
    else:
        for model in filter(None, (policy, teacher)):
            model.to(device)
    # before the comparison, so that it uses the attention that will run
    lines = choose(device, dtype, policy.head_sizes, lambda failed: ranks.any(failed, device))
    lines.append(check_exact(policy))
    if teacher is not None:
        check_exact(teacher)
    engine = build_run_engine(config, policy, task, ranks)
    if saved is None or saved.decoder is None:  # otherwise its weights are loaded later
        lines.append(compare_engine(policy, engine, config.chosen.rollout))
    own = output if ranks.is_first else None
    scorer = build_scorer(config.reward, task, device, dtype, functions, ranks.size, own)
    clock = Stopwatch(saved.progress.seconds if saved else None)
    objective = objective_of(config)
    whole = (config, task, objective, policy, engine, scorer, teacher, ranks, clock, copies)
    return RunContext(*whole), [*lines, f"rollout engine: {engine.describe()}"]


def build_loss_settings(config: Config) -> LossSettings:
    options, own = config.loss, own_options(config, "loss")
    values = {name: x for name, x in vars(options).items() if name not in NOT_OF_LOSS}
    values |= {name: x for name, x in own.items() if name in ("clip_low", "clip_high")}
    if options.kl == "full":
        values |= {"kl": "k3", "kl_coef": 0.0, "divergence_coef": options.kl_coef}
    return LossSettings(
        **values,
        loss=loss_of(config.chosen.loss).function,
        loss_options=loss_options(config),
        beta=options.jsd_beta,
        sequence_mask=correction_of(config)[1].get("delta"),
        temperature=config.sampling.temperature,
        max_new_tokens=config.sampling.max_new_tokens,
        seed=config.run.seed,
    )


def _learner(
    config: Config, policy: PolicyModel, settings: LossSettings, beta2: float, **others: Any
) -> Learner:
    options = config.optimizer
    optimizer, limits = make_optimizer(policy, beta2, options.weight_decay), options.clip_grad
    how = settings, limits, options.token_budget, dtype_of(config)
    return Learner(policy, optimizer, *how, **others)


def build_warm_start(
    config: Config,
    task: Task,
    policy: PolicyModel,
    ranks: Ranks | None = None,
    module: Any = None,
) -> WarmStart:
    options, loss = config.warm_start, LossSettings(loss="reinforce", aggregation="token_mean")
    own = {"ranks": ranks or Ranks(), "module": module}
    learner = _learner(config, policy, loss, options.sft_beta2, **own)
    rate = LearningRate(options.sft_lr, options.sft_steps, warmup_steps=10)
    device = torch.device(config.run.device)
    takes_prompts = not config.parts["task"].get("sft_data")
    return WarmStart(task, learner, rate, options.sft_batch, device, takes_prompts)


def build_collector(context: RunContext, learner: Learner | None = None) -> RolloutCollector:
    """Without a learner, as in the check of the rewards, the scorer of evaluations replaces
    majority votes and rewards from the policy."""
    config, task, needs = context.config, context.task, context.objective.needs
    policy_reward = build_policy_reward(config, task, context.objective, learner)
    is_vote, scorer = config.reward.reward_source == "vote", context.scorer
    if policy_reward is not None:
        scorer = Scorer(task, None)
    elif is_vote and learner is not None:
        scorer = Scorer(task, MajorityVote(task.answer))
    options, std_filter, state = config.sampling, None, learner.objective_state if learner else {}
    if "reward_std" in state:
        std_filter = StdFilter(options.std_filter, state["reward_std"])
    schedule: Schedule | None = options.stopping()
    if options.dynamic_sampling > 1:
        limits = options.prompts, options.rollouts, options.dynamic_sampling
        schedule = DynamicSampling(*limits, std_filter)
    ranks, clock = context.ranks, context.clock
    if options.ahead and learner:  # its collective operations and its time are its own
        ranks, clock = ranks.copied(), Stopwatch(parent=clock)
        needs = replace(needs, components=True)  # of all ranks, for checkpoints
    return RolloutCollector(
        task,
        context.engine,
        scorer,
        build_sampling(config, task),
        num_prompts=options.prompts,
        num_rollouts=options.rollouts,
        seed=config.run.seed,
        device=context.device,
        schedule=schedule,
        # rewards that serve only the evaluation may be any number
        needs=replace(needs, binary=needs.binary and not (is_vote and learner is None)),
        policy_reward=policy_reward,
        length_penalty=build_length_penalty(config),
        clock=clock,
        ranks=ranks,
        shares_engine=tensor_parallel(config) > 1,
        truncated=config.reward.truncated,
    )


def build_teacher_prompts(
    config: Config, task: Task, teacher: PolicyModel
) -> TeacherPrompts | None:
    source = config.loss.teacher_prompt
    if source is None:
        return None
    limit = teacher.config.max_position_embeddings - config.sampling.max_new_tokens
    return TeacherPrompts(task, source, limit)


def build_copies(
    config: Config, policy: PolicyModel, teacher: PolicyModel | None, make: Change = None
) -> tuple[PolicyModel | None, PolicyModel | None]:
    """Return the reference policy and the critic's model; `make` as for PolicyModel.copied."""
    needs, reference = objective_of(config).needs, teacher
    # with another prompt the policy itself, as it is at each step, is the teacher
    needs_copy = config.loss.kl_coef or needs.reference
    if teacher is None and needs_copy and config.loss.teacher_prompt is None:
        reference = policy.copied(make).requires_grad_(False)
    return reference, critic_model(policy, make) if needs.critic else None


def build_learner(context: RunContext) -> Learner:
    config, policy, ranks, teacher = context.config, context.policy, context.ranks, context.teacher
    options, dtype, critic = config.optimizer, dtype_of(config), None
    reference, trained = context.copies or build_copies(config, policy, teacher)
    if trained is not None:
        of_critic, module = config.parts["objective"], distribute(trained, ranks, dtype)
        optimizer = make_optimizer(trained, options.beta2, options.weight_decay)
        critic = Critic(trained, optimizer, of_critic["critic_lr"], of_critic["value_clip"], module)
    own = {"reference": reference, "ranks": ranks, "module": distribute(policy, ranks, dtype)}
    learner = _learner(config, policy, build_loss_settings(config), options.beta2, **own)
    learner.objective_state = dict(context.objective.state)
    kept = {"siren_anchor": config.loss.siren, "reward_std": config.sampling.std_filter}
    for name in filter(kept.get, kept):
        learner.objective_state[name] = torch.full((1,), torch.nan, dtype=torch.float64)
    learner.critic, learner.copies_policy = critic, teacher is None
    return learner


def build_trainer(context: RunContext) -> tuple[Trainer, WarmStart]:
    config, task, policy = context.config, context.task, context.policy
    options = config.optimizer
    learner, (correction, numbers) = build_learner(context), correction_of(config)
    collector = build_collector(context, learner)
    if isinstance(collector.schedule, Stopping):
        learner.objective_state |= collector.schedule.state
    trainer = Trainer(
        collector,
        context.objective,
        learner,
        context.engine,
        LearningRate(options.lr, options.steps, options.warmup_steps, options.lr_schedule),
        options.updates_per_step,
        make_correction(correction, numbers),
        context.clock,
        build_teacher_prompts(config, task, context.teacher or policy),
        config.sampling.ahead,
    )
    return trainer, build_warm_start(config, task, policy, context.ranks, learner.module)


def build_evaluators(context: RunContext) -> dict[str, Evaluator]:
    config, task, options = context.config, context.task, context.config.evaluation
    sets = held_out_sets(task, options.eval_prompts, options.eval_samples)
    return {
        name: Evaluator(
            context.engine,
            task,
            context.scorer,
            build_sampling(config, task),
            *sizes,  # prompts and samples
            seed=config.run.seed,
            device=context.device,
            split=name,
            ranks=context.ranks,
            shares_engine=tensor_parallel(config) > 1,
            beat=context.clock.beat,
        )
        for name, sizes in sets.items()
    }
