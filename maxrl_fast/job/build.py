"""Builds what a run consists of, by its parts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch

from maxrl_fast.algorithms.losses import CLIPS
from maxrl_fast.config.options import Config
from maxrl_fast.config.resolve import resolve
from maxrl_fast.config.rules import objective_of, part
from maxrl_fast.evaluation.evaluator import Evaluator
from maxrl_fast.job.build_parts import (
    build_engine,
    build_policy,
    build_reference,
    build_run_task,
    closing_task,
    find_policy,
)
from maxrl_fast.job.run_files import Saved, free_folder
from maxrl_fast.model.attention import choose
from maxrl_fast.model.checkpoint import StoredTensor, carried_tensors, kept_files, new_files
from maxrl_fast.model.policy_model import Change, PolicyModel
from maxrl_fast.rewards import MajorityVote
from maxrl_fast.rewards.pool import RewardOutput
from maxrl_fast.rollout import Engine, Sampling
from maxrl_fast.runtime.background import Stopwatch
from maxrl_fast.runtime.device import Machine
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task, held_out_sets
from maxrl_fast.tasks.scorer import Scorer
from maxrl_fast.training.answers import PolicyReward
from maxrl_fast.training.collect import RolloutCollector
from maxrl_fast.training.correction import make_correction
from maxrl_fast.training.learner import Critic, Learner, LossSettings, critic_model, make_optimizer
from maxrl_fast.training.objectives.group import Objective
from maxrl_fast.training.passes import check_engine, check_exact, distribute, is_sharded, shard
from maxrl_fast.training.schedule import Schedules
from maxrl_fast.training.teacher import TeacherPrompts
from maxrl_fast.training.trainer import Trainer, WarmStart


def prepare(
    config: Config,
    ranks: Ranks,
    warn: Callable[[str], None],
    make_task: Callable[[Config], Task] = build_run_task,
    processes: int | None = None,
) -> tuple[Config, Task]:
    """Return the configuration with every default worked out, and its task; for so many processes,
    or those of `ranks`."""
    config = find_policy(config, ranks, warn)
    task = make_task(config)
    try:
        config = resolve(config, task, processes or ranks.size, warn)
        short = config.chosen.objective.rpartition(":")[2]  # of FILE.py:NAME
        out = config.run.resume or free_folder(config.run.out, "runs", short, ranks.is_first)
        return config.replace(out=out), task
    except BaseException:
        with closing_task(task):
            raise


@dataclass(frozen=True)
class RunContext:
    """What a run consists of. A part is built from the options when it is first asked for."""

    config: Config
    task: Task
    # on their device, the same on all ranks or sharded
    policy: PolicyModel
    teacher: PolicyModel | None = None  # the frozen checkpoint of --reference
    ranks: Ranks = field(default_factory=Ranks)
    clock: Stopwatch = field(default_factory=Stopwatch)
    saved: Saved | None = None  # what the run resumes from
    # rewards of this process by their names in --reward
    functions: Mapping[str, Callable[..., Any]] | None = None
    output: RewardOutput | None = None  # of the functions' workers

    @classmethod
    def begin(
        cls,
        config: Config,
        task: Task,
        ranks: Ranks,
        saved: Saved | None = None,
        machine: Machine | None = None,
        **others: Any,
    ) -> "RunContext":
        """Build the policy and its teacher on the CPU, or without weights for another `machine`;
        the configuration says whether `place` will shard them."""
        is_empty = machine is not None
        policy = build_policy(config, task, saved, is_empty)
        teacher = build_reference(config, task, is_empty)
        (device, _), needs = config.run.where, objective_of(config).needs
        machine = machine or Machine.here(device, ranks.size)
        is_full = is_sharded(config.run.sharding, policy, machine, needs.critic)
        config = config.replace(sharding="full" if ranks.any(is_full, device) else "none")
        clock = Stopwatch(saved.progress.seconds if saved else None)
        return cls(config, task, policy, teacher, ranks, clock, saved, **others)

    def place(self) -> list[str]:
        """Move the models to their device, or shard them, and return what was found out about them
        and the engine."""
        policy, saved, name = self.policy, self.saved, self.config.chosen.rollout
        if self.teacher_prompts is not None and not saved:
            self.teacher_prompts.check()
        device, dtype = self.config.run.where
        if self.config.run.sharding == "full":
            # the copies are in the same memory until sharded
            for model in filter(None, (policy, *self.copies)):
                shard(model, dtype, device)
        else:
            for model in filter(None, (policy, self.teacher)):
                model.to(device)
        # before the comparison, so that it uses the attention that will run
        how = policy.head_sizes, lambda failed: self.ranks.any(failed, device)
        lines = [*choose(device, dtype, *how), check_exact(policy)]
        if self.teacher is not None:
            check_exact(self.teacher)
        is_users, is_native = name not in ("native", "vllm"), policy.backend == "native"
        # weights of our decoder are loaded later on resuming; tests cover the other engines
        if (is_users and not (saved and is_native)) or (name == "vllm" and not is_native):
            if is_users:
                self.engine.load_weights(policy)
            lines.append(check_engine(policy, self.engine, name))
        return [*lines, f"rollout engine: {self.engine.describe()}"]

    @cached_property
    def policy_files(self) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
        """Files by name, JSON contents or bytes, and tensors by name, of a checkpoint. A resumed
        run keeps its model's configuration."""
        model, stops, files = self.policy, self.task.stop_ids, self.task.tokenizer_files()
        start = self.saved.directory if self.saved else self.config.model.directory
        if start is None:
            return files | new_files(model.config, stops), {}
        is_native = model.backend == "native"
        carried = {} if is_native else carried_tensors(start, model)
        return files | kept_files(start, stops, model.config.dtype), carried

    @cached_property
    def objective(self) -> Objective:
        return objective_of(self.config)

    @cached_property
    def sampling(self) -> Sampling:
        return self.config.sampling.rules(self.task)

    @cached_property
    def engine(self) -> Engine:
        config, ranks = self.config, self.ranks
        batch = config.samples_of_engine(ranks.size)
        return build_engine(config, self.policy, self.task, config.run.where[1], batch, ranks)

    @cached_property
    def scorer(self) -> Scorer:
        output = self.output if self.ranks.is_first else None
        how = *self.config.run.where, self.functions, self.ranks.size, output
        return Scorer.of(self.config.reward, self.task, *how)

    @cached_property
    def teacher_prompts(self) -> TeacherPrompts | None:
        config, loss = self.config, self.config.loss
        if (source := loss.teacher_prompt) is None:
            return None
        sizes = (self.teacher or self.policy).config
        limit = sizes.max_position_embeddings - config.sampling.max_new_tokens
        return TeacherPrompts(self.task, source, limit, loss.teacher_template, config.run.seed)

    @cached_property
    def schedules(self) -> Schedules:
        size = getattr(self.task, "num_train_prompts", 0)  # `resolve` has checked it
        return self.config.sampling.build(size, self.config.run.seed)

    @property
    def copies_policy(self) -> bool:
        """Whether the reference policy is the policy at an earlier time."""
        loss, is_needed = self.config.loss, self.objective.needs.reference
        # with another prompt the policy itself, as it is at each step, is the teacher
        has_other = self.teacher or (loss.teacher_prompt and not loss.teacher_ema)
        return bool(loss.kl_coef or is_needed) and not has_other

    @cached_property
    def copies(self) -> tuple[PolicyModel | None, PolicyModel | None]:  # reference, critic
        policy, reference = self.policy, self.teacher
        make: Change = (lambda x: x) if self.config.run.sharding == "full" else None
        if self.copies_policy:
            reference = policy.copied(make).requires_grad_(False)
        return reference, critic_model(policy, make) if self.objective.needs.critic else None

    @cached_property
    def learner(self) -> Learner:
        config, (reference, trained), critic = self.config, self.copies, None
        options, dtype = config.optimizer, config.run.where[1]
        adam = options.beta2, options.weight_decay
        if trained is not None:
            own, module = config.parts["objective"], distribute(trained, self.ranks, dtype)
            optimizer, rate = make_optimizer(trained, *adam), own["critic_lr"]
            critic = Critic(trained, optimizer, rate, own["value_clip"], module)
        state = {**self.objective.state, **self.schedules[2]}
        if config.loss.siren:
            state["siren_anchor"] = torch.full((1,), torch.nan, dtype=torch.float64)
        return Learner(
            self.policy,
            make_optimizer(self.policy, *adam),
            build_loss_settings(config),
            options.clip_grad,
            options.token_budget,
            dtype,
            reference,
            self.ranks,
            distribute(self.policy, self.ranks, dtype),
            state,
            critic,
            copies_policy=self.copies_policy,
        )

    @cached_property
    def warm_start(self) -> WarmStart:
        options, decay = self.config.warm_start, self.config.optimizer.weight_decay
        learner = replace(
            self.learner,
            optimizer=make_optimizer(self.policy, options.sft_beta2, decay),
            settings=LossSettings("reinforce", "token_mean"),
            reference=None,
            critic=None,
            objective_state={},
        )
        return WarmStart(self.task, learner, options)

    @cached_property
    def trainer(self) -> Trainer:
        config = self.config
        return Trainer(
            self._collector(),
            self.objective,
            self.learner,
            self.engine,
            config.optimizer,
            make_correction(config.chosen.correction, config.parts["correction"]),
            self.clock,
            self.teacher_prompts,
            config.sampling.ahead,
        )

    def _collector(self) -> RolloutCollector:
        config, needs, scorer, clock = self.config, self.objective.needs, self.scorer, self.clock
        options, ranks, source = config.sampling, self.ranks, config.reward.reward_source
        of_objective = config.chosen.objective * needs.answers
        own = source, self.task, self.learner, options.max_new_tokens, of_objective
        if (policy_reward := PolicyReward.of(*own)) is not None:
            scorer = Scorer(self.task, None)
        elif source == "vote":
            scorer = Scorer(self.task, MajorityVote(self.task.answer))
        if options.ahead:  # its collective operations and its time are its own
            ranks, clock = ranks.copied(), Stopwatch(parent=clock)
        return RolloutCollector(
            self.task,
            self.engine,
            scorer,
            self.sampling,
            options,
            config.reward,
            config.run.seed,
            config.run.where[0],
            *self.schedules[:2],
            needs,
            policy_reward,
            clock,
            ranks,
        )

    @cached_property
    def evaluators(self) -> dict[str, Evaluator]:
        options, run = self.config.evaluation, self.config.run
        parts = self.engine, self.task, self.scorer, self.sampling
        how: dict[str, Any] = {"ranks": self.ranks, "beat": self.clock.beat}
        sets = held_out_sets(self.task, options.eval_prompts, options.eval_samples)
        return {
            name: Evaluator(*parts, *sizes, run.seed, run.where[0], name, **how)
            for name, sizes in sets.items()  # prompts and samples
        }


def build_loss_settings(config: Config) -> LossSettings:
    options, own = config.loss, config.parts["loss"]
    given = {**vars(config.run), **vars(config.sampling), **vars(options)}
    if options.kl == "full":
        given |= {"kl": "k3", "kl_coef": 0.0, "divergence_coef": options.kl_coef}
    given |= {
        **{name: own[name] for name in CLIPS if name in own},
        "loss": part("loss", config.chosen.loss).function,
        "loss_options": {name: x for name, x in own.items() if name not in CLIPS},
        "sequence_mask": config.parts["correction"].get("delta"),
    }
    return LossSettings(**{x.name: given[x.name] for x in fields(LossSettings) if x.name in given})
