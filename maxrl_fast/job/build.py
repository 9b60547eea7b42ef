"""Builds the trainer, the evaluator and the fingerprints of a resolved configuration."""

from pathlib import Path
from typing import Any

import torch

from maxrl_fast.algorithms.losses import LOSSES
from maxrl_fast.config.checks import correction_of, objective_of
from maxrl_fast.config.conditions import loss_of
from maxrl_fast.config.options import ResolvedConfig
from maxrl_fast.evaluation.evaluator import Evaluator
from maxrl_fast.job.build_engine import build_sampling
from maxrl_fast.job.build_policy import dtype_of
from maxrl_fast.job.build_rewards import (
    build_length_penalty,
    build_policy_reward,
    build_training_scorer,
    reward_names,
)
from maxrl_fast.job.fingerprints import fingerprints, source_file
from maxrl_fast.model.hub import directory_of
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.rewards.models import CLASSIFIER
from maxrl_fast.rewards.scoring import Scorer
from maxrl_fast.rollout import Engine
from maxrl_fast.rollout.names import ENGINES
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.gym import GymTask
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.tasks.names import OBJECT, is_plugin
from maxrl_fast.training.collect import RolloutCollector
from maxrl_fast.training.correction import CORRECTIONS
from maxrl_fast.training.critic import Critic, critic_model
from maxrl_fast.training.learner import Learner, frozen_copy
from maxrl_fast.training.loss_settings import LossSettings
from maxrl_fast.training.objectives.objective import Objective
from maxrl_fast.training.objectives.registry import is_custom
from maxrl_fast.training.optimizer import LearningRate, make_optimizer
from maxrl_fast.training.prompt_prefetcher import PromptPrefetcher
from maxrl_fast.training.sharding import distribute
from maxrl_fast.training.stopwatch import Stopwatch
from maxrl_fast.training.teacher_prompts import ANSWER, TeacherPrompts
from maxrl_fast.training.trainer import Trainer
from maxrl_fast.training.warm_start import WarmStart

NOT_OF_LOSS = ("reference", "teacher_prompt")  # of LossOptions


def build_loss_settings(config: ResolvedConfig) -> LossSettings:
    options = config.rollout
    values: dict[str, Any] = {
        **{name: value for name, value in vars(config.loss).items() if name not in NOT_OF_LOSS},
        "loss": loss_of(config.loss.loss).function,
        "loss_options": config.loss.own_numbers(),
        "beta": config.loss.beta(),
        "sequence_mask": correction_of(config)[1].get("delta"),
    }
    return LossSettings(
        **values,
        temperature=options.temperature,
        max_new_tokens=options.max_new_tokens,
        seed=config.run.seed,
    )


def build_learner(
    config: ResolvedConfig,
    model: PolicyModel,
    ranks: Ranks | None = None,
    module: Any = None,
    reference: PolicyModel | None = None,
) -> Learner:
    options = config.optimizer
    return Learner(
        model,
        make_optimizer(model, options.beta2, options.weight_decay),
        build_loss_settings(config),
        options.clip_grad,
        options.token_budget,
        dtype_of(config),
        reference,
        ranks or Ranks(),
        module,
    )


def build_critic(config: ResolvedConfig, model: PolicyModel, ranks: Ranks) -> Critic:
    """Build the critic; the policy's weights must not be sharded yet."""
    options, trained = config.objective.options, critic_model(model)
    module = distribute(trained, None, ranks, dtype_of(config), config.run.sharding == "full")
    optimizer = make_optimizer(trained, config.optimizer.beta2, config.optimizer.weight_decay)
    return Critic(trained, optimizer, options["critic_lr"], options["value_clip"], module)


def build_warm_start(
    config: ResolvedConfig,
    task: Task,
    model: PolicyModel,
    ranks: Ranks | None = None,
    module: Any = None,
) -> WarmStart:
    options, optimizer = config.warm_start, config.optimizer
    learner = Learner(
        model,
        make_optimizer(model, options.sft_beta2, optimizer.weight_decay),
        LossSettings(loss="reinforce", aggregation="token_mean"),
        optimizer.clip_grad,
        optimizer.token_budget,
        dtype_of(config),
        ranks=ranks or Ranks(),
        module=module,
    )
    rate = LearningRate(options.sft_lr, options.sft_steps, warmup_steps=10)
    device, takes_prompts = torch.device(config.run.device), options.sft_data is None
    return WarmStart(task, learner, rate, options.sft_batch, device, takes_prompts)


def build_collector(
    config: ResolvedConfig,
    task: Task,
    engine: Engine,
    scorer: Scorer,
    objective: Objective,
    clock: Stopwatch | None = None,
    ranks: Ranks | None = None,
    learner: Learner | None = None,
) -> RolloutCollector:
    """Build the collector of training rollouts.

    Without a learner, as in the check of the rewards, `scorer` replaces rewards from the policy.
    Raises InputError if these are requested and the task has no reference answers.
    """
    options, needs = config.rollout, objective.needs
    policy_reward = build_policy_reward(config, task, objective, learner)
    # other tasks make prompts at once
    is_ahead = config.run.device == "cuda" and isinstance(task, (MazeTask, GymTask))
    return RolloutCollector(
        task,
        engine,
        scorer if policy_reward is None else Scorer(task, None),
        build_sampling(config, task),
        num_prompts=options.prompts,
        num_rollouts=options.rollouts,
        seed=config.run.seed,
        device=torch.device(config.run.device),
        max_batches=max(options.dynamic_sampling, 1),
        needs_greedy=needs.greedy,
        needs_binary=needs.binary,
        needs_parts=needs.parts,
        needs_texts=needs.texts,
        needs_components=needs.components,
        policy_reward=policy_reward,
        length_penalty=build_length_penalty(config),
        make_prompts=PromptPrefetcher(task).take if is_ahead else None,
        clock=clock or Stopwatch(),
        ranks=ranks or Ranks(),
    )


def build_teacher_prompts(
    config: ResolvedConfig, task: Task, teacher: PolicyModel
) -> TeacherPrompts | None:
    source = config.loss.teacher_prompt
    if source is None:
        return None
    limit = teacher.config.max_position_embeddings - config.rollout.max_new_tokens
    return TeacherPrompts(task, source, limit)


def build_trainer(
    config: ResolvedConfig,
    task: Task,
    engine: Engine,
    scorer: Scorer,
    model: PolicyModel,
    clock: Stopwatch | None = None,
    ranks: Ranks | None = None,
    teacher: PolicyModel | None = None,
) -> tuple[Trainer, WarmStart]:
    """Build the trainer and its warm start, which train one model.

    Args:
        model, teacher: on their device; with --sharding full the weights are sharded in place.
    """
    objective, ranks, clock = objective_of(config), ranks or Ranks(), clock or Stopwatch()
    correction, numbers = correction_of(config)
    reference, needs_reference = teacher, config.loss.kl_coef or objective.needs.reference
    # with another prompt the policy itself, as it is at each step, is the teacher
    if teacher is None and needs_reference and config.loss.teacher_prompt is None:
        reference = frozen_copy(model)
    critic = build_critic(config, model, ranks) if objective.needs.critic else None
    module = distribute(model, reference, ranks, dtype_of(config), config.run.sharding == "full")
    options = config.optimizer
    learner = build_learner(config, model, ranks, module, reference)
    learner.objective_state = dict(objective.state)
    if config.loss.siren:
        learner.objective_state["siren_anchor"] = torch.full((1,), torch.nan, dtype=torch.float64)
    learner.critic, learner.copies_policy = critic, teacher is None
    scorer = build_training_scorer(config, task, scorer)
    trainer = Trainer(
        build_collector(config, task, engine, scorer, objective, clock, ranks, learner),
        objective,
        learner,
        engine,
        LearningRate(options.lr, options.steps, options.warmup_steps, options.lr_schedule),
        options.updates_per_step,
        CORRECTIONS[correction].function(**numbers),
        clock,
        build_teacher_prompts(config, task, teacher or model),
    )
    return trainer, build_warm_start(config, task, model, ranks, module)


def build_evaluator(
    config: ResolvedConfig, task: Task, engine: Engine, scorer: Scorer, ranks: Ranks | None = None
) -> Evaluator:
    return Evaluator(
        engine,
        task,
        scorer,
        build_sampling(config, task),
        num_prompts=config.evaluation.eval_prompts,
        num_samples=config.evaluation.eval_samples,
        seed=config.run.seed,
        device=torch.device(config.run.device),
        ranks=ranks or Ranks(),
        shares_engine=config.rollout.vllm_tensor_parallel > 1,
    )


def build_fingerprints(config: ResolvedConfig, task: Task) -> dict[str, str]:
    task_name = config.task.task
    objective = config.objective.objective
    engine = config.rollout.rollout
    loss = config.loss.loss
    files = {
        "objective": source_file(objective) if is_custom(objective) else None,
        "loss": None if loss in LOSSES else source_file(loss),
        "judge-template": config.reward.judge_template,
        "task": source_file(task_name) if is_plugin(task_name) else None,
        "environment": source_file(config.task.environment or ""),
        "rollout": None if engine in ENGINES else source_file(engine),
    }
    if config.loss.reference is not None:
        files["reference"] = directory_of(config.loss.reference) / "config.json"
    if (source := config.loss.teacher_prompt) not in (None, ANSWER):
        files["teacher-prompt"] = source_file(source)
    for i, name in enumerate(reward_names(config.reward, task)):
        is_model = name.startswith(CLASSIFIER)
        path = Path(name.removeprefix(CLASSIFIER), "config.json") if is_model else source_file(name)
        if name.startswith(OBJECT):  # a Python object has no file
            path = None
        files[f"reward {i + 1}" if i else "reward"] = path
    return fingerprints(task, files)
