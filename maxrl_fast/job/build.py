"""Builds what a run consists of, by its parts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from maxrl_fast.config.options import Config
from maxrl_fast.config.parts import loss_of
from maxrl_fast.config.resolve import resolve, tensor_parallel
from maxrl_fast.config.rules import correction_of, loss_options, objective_of, own_options
from maxrl_fast.errors import InputError
from maxrl_fast.evaluation.evaluator import Evaluator
from maxrl_fast.job.build_policy import (
    PolicyFiles,
    build_engine,
    build_policy,
    build_policy_files,
    build_reference,
    dtype_of,
    find_policy,
)
from maxrl_fast.job.build_task import build_run_task, build_scorer, closing_task
from maxrl_fast.job.resume import Saved
from maxrl_fast.model.flash import choose
from maxrl_fast.model.policy_model import Change, PolicyModel
from maxrl_fast.rewards.combined import MajorityVote
from maxrl_fast.rewards.output import RewardOutput
from maxrl_fast.rollout import Engine, Sampling
from maxrl_fast.runtime.device import Machine
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import AnsweredTask, Task, held_out_sets
from maxrl_fast.tasks.episode import EpisodeTask
from maxrl_fast.tasks.scorer import Scorer
from maxrl_fast.tasks.text_codec import end_of
from maxrl_fast.training.collect import LengthPenalty, RolloutCollector
from maxrl_fast.training.correction import make_correction
from maxrl_fast.training.critic import Critic, critic_model
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.logprob_parity import check_engine, check_exact
from maxrl_fast.training.loss_settings import LossSettings
from maxrl_fast.training.objectives.objective import Objective
from maxrl_fast.training.optimizer import LearningRate, make_optimizer
from maxrl_fast.training.policy_reward import LIKELIHOODS, PROBABILITY, PolicyReward, check_answers
from maxrl_fast.training.schedule import Carried, Drawn, DynamicSampling, Schedule, StdFilter
from maxrl_fast.training.sharding import distribute, is_sharded, shard
from maxrl_fast.training.stopwatch import Stopwatch
from maxrl_fast.training.teacher_prompts import TeacherPrompts
from maxrl_fast.training.trainer import Trainer
from maxrl_fast.training.warm_start import WarmStart


def prepare(
    config: Config,
    ranks: Ranks,
    warn: Callable[[str], None],
    make_task: Callable[[Config], Task] = build_run_task,
) -> tuple[Config, Task]:
    """Return the configuration with every default worked out, and its task."""
    config = find_policy(config, ranks, warn)
    task = make_task(config)
    try:
        return resolve(config, task, ranks, warn=warn), task
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
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
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
        device, needs = torch.device(config.run.device), objective_of(config).needs
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
        if self.config.run.sharding == "full":
            # the copies are in the same memory until sharded
            for model in filter(None, (policy, *self.copies)):
                shard(model, self.dtype, self.device)
        else:
            for model in filter(None, (policy, self.teacher)):
                model.to(self.device)
        # before the comparison, so that it uses the attention that will run
        how = policy.head_sizes, lambda failed: self.ranks.any(failed, self.device)
        lines = [*choose(self.device, self.dtype, *how), check_exact(policy)]
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
    def policy_files(self) -> PolicyFiles:
        # a resumed run keeps the configuration of its checkpoint
        start = self.saved.directory if self.saved else self.config.model.directory
        return build_policy_files(self.task, self.policy, start)

    @property
    def device(self) -> torch.device:
        return torch.device(self.config.run.device)

    @property
    def dtype(self) -> torch.dtype:
        return dtype_of(self.config)

    @cached_property
    def objective(self) -> Objective:
        return objective_of(self.config)

    @cached_property
    def sampling(self) -> Sampling:
        options, task = self.config.sampling, self.task
        limits = options.temperature, options.max_new_tokens, task.stop_ids
        return Sampling(*limits, top_p=options.top_p, end_of=end_of(task))

    @property
    def shares_engine(self) -> bool:
        return tensor_parallel(self.config) > 1

    @cached_property
    def engine(self) -> Engine:
        config, ranks, number = self.config, self.ranks, tensor_parallel(self.config)
        own = own_options(config, "rollout"), config.sampling, self.policy, self.task, self.dtype
        batch = config.sampling.samples_of_engine(ranks.size, number)
        return build_engine(config.chosen.rollout, *own, batch, ranks)

    @cached_property
    def scorer(self) -> Scorer:
        output = self.output if self.ranks.is_first else None
        how = self.device, self.dtype, self.functions, self.ranks.size, output
        return build_scorer(self.config.reward, self.task, *how)

    @cached_property
    def teacher_prompts(self) -> TeacherPrompts | None:
        config, source = self.config, self.config.loss.teacher_prompt
        sizes = (self.teacher or self.policy).config
        limit = sizes.max_position_embeddings - config.sampling.max_new_tokens
        return None if source is None else TeacherPrompts(self.task, source, limit)

    @cached_property
    def copies(self) -> tuple[PolicyModel | None, PolicyModel | None]:  # reference, critic
        needs, loss, policy = self.objective.needs, self.config.loss, self.policy
        make: Change = (lambda x: x) if self.config.run.sharding == "full" else None
        reference = self.teacher
        # with another prompt the policy itself, as it is at each step, is the teacher
        is_copy = (loss.kl_coef or needs.reference) and loss.teacher_prompt is None
        if reference is None and is_copy:
            reference = policy.copied(make).requires_grad_(False)
        return reference, critic_model(policy, make) if needs.critic else None

    @cached_property
    def learner(self) -> Learner:
        config, (reference, trained), critic = self.config, self.copies, None
        beta2 = config.optimizer.beta2
        if trained is not None:
            optimizer = make_optimizer(trained, beta2, config.optimizer.weight_decay)
            own, module = config.parts["objective"], distribute(trained, self.ranks, self.dtype)
            critic = Critic(trained, optimizer, own["critic_lr"], own["value_clip"], module)
        state = dict(self.objective.state)
        kept = {"siren_anchor": config.loss.siren, "reward_std": config.sampling.std_filter}
        for name in filter(kept.get, kept):
            state[name] = torch.full((1,), torch.nan, dtype=torch.float64)
        if config.sampling.carry:
            state["carried"] = torch.zeros(config.sampling.prompts, 2, dtype=torch.int64)
        if config.sampling.draw_rule():
            state["drawn"] = torch.zeros(self._num_drawn_from(), 2, dtype=torch.float64)
        return self._learner(
            build_loss_settings(config),
            beta2,
            module=distribute(self.policy, self.ranks, self.dtype),
            reference=reference,
            copies_policy=self.teacher is None,
            objective_state=state,
            critic=critic,
        )

    def _num_drawn_from(self) -> int:
        size, most = getattr(self.task, "num_train_prompts", None), self.config.sampling.prompts
        if size is None or size < most:
            wanted = f"a task with at least the --prompts {most} as num_train_prompts"
            raise InputError(f"--draw-prompts needs {wanted}, got {size} of task {self.task.name}")
        return int(size)

    def _learner(self, settings: LossSettings, beta2: float, **others: Any) -> Learner:
        options = self.config.optimizer
        optimizer = make_optimizer(self.policy, beta2, options.weight_decay)
        how = settings, options.clip_grad, options.token_budget, self.dtype
        return Learner(self.policy, optimizer, *how, ranks=self.ranks, **others)

    @cached_property
    def warm_start(self) -> WarmStart:
        options, loss = self.config.warm_start, LossSettings("reinforce", aggregation="token_mean")
        learner = self._learner(loss, options.sft_beta2, module=self.learner.module)
        rate = LearningRate(options.sft_lr, options.sft_steps, warmup_steps=10)
        takes_prompts = not self.config.parts["task"].get("sft_data")
        return WarmStart(self.task, learner, rate, options.sft_batch, self.device, takes_prompts)

    @cached_property
    def trainer(self) -> Trainer:
        options = self.config.optimizer
        return Trainer(
            self._collector(),
            self.objective,
            self.learner,
            self.engine,
            LearningRate(options.lr, options.steps, options.warmup_steps, options.lr_schedule),
            options.updates_per_step,
            make_correction(*correction_of(self.config)),
            self.clock,
            self.teacher_prompts,
            self.config.sampling.ahead,
        )

    def _collector(self) -> RolloutCollector:
        config, needs, scorer = self.config, self.objective.needs, self.scorer
        options, reward, ranks, clock = config.sampling, config.reward, self.ranks, self.clock
        limit, policy_reward = options.max_new_tokens, None
        chosen: Carried | Drawn | None = None
        if options.carry:
            chosen = Carried(self.learner.objective_state["carried"], options.carry)
        elif rule := options.draw_rule():
            table = self.learner.objective_state["drawn"]
            chosen = Drawn(table, rule, options.prompts, config.run.seed)
        if answered := answered_task(config, self.task, self.objective):
            kind = PROBABILITY if needs.answers else reward.reward_source
            policy_reward = PolicyReward(kind, answered, self.learner, limit)
            scorer = Scorer(self.task, None)
        elif reward.reward_source == "vote":
            scorer = Scorer(self.task, MajorityVote(self.task.answer))
        buffer = reward.overlong_buffer
        if options.ahead:  # its collective operations and its time are its own
            ranks, clock = ranks.copied(), Stopwatch(parent=clock)
            needs = replace(needs, components=True)  # of all ranks, for checkpoints
        return RolloutCollector(
            self.task,
            self.engine,
            scorer,
            self.sampling,
            num_prompts=options.prompts,
            num_rollouts=options.rollouts,
            seed=config.run.seed,
            device=self.device,
            schedule=self._schedule(),
            chosen=chosen,
            needs=needs,
            policy_reward=policy_reward,
            length_penalty=(
                LengthPenalty(limit, buffer, reward.overlong_penalty) if buffer else None
            ),
            clock=clock,
            ranks=ranks,
            shares_engine=self.shares_engine,
            truncated=reward.truncated,
        )

    def _schedule(self) -> Schedule | None:
        options, state = self.config.sampling, self.learner.objective_state
        if options.dynamic_sampling > 1:
            average = state.get("reward_std")
            own = None if average is None else StdFilter(options.std_filter, average)
            limits = options.prompts, options.rollouts, options.dynamic_sampling
            return DynamicSampling(*limits, own)
        if stopping := options.stopping():
            state |= stopping.state
        return stopping

    @cached_property
    def evaluators(self) -> dict[str, Evaluator]:
        options, parts = self.config.evaluation, (self.engine, self.task, self.scorer)
        sets = held_out_sets(self.task, options.eval_prompts, options.eval_samples)
        return {
            name: Evaluator(
                *parts,
                self.sampling,
                *sizes,  # prompts and samples
                self.config.run.seed,
                self.device,
                name,
                ranks=self.ranks,
                shares_engine=self.shares_engine,
                beat=self.clock.beat,
            )
            for name, sizes in sets.items()
        }


def build_loss_settings(config: Config) -> LossSettings:
    options, own = config.loss, own_options(config, "loss")
    others = "reference", "teacher_prompt", "jsd_beta"
    values = {name: x for name, x in vars(options).items() if name not in others}
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


def answered_task(config: Config, task: Task, objective: Objective) -> AnsweredTask | None:
    """Return the task if the policy itself rewards training rollouts, by the reference answers."""
    source, is_of_objective = config.reward.reward_source, objective.needs.answers
    who = f"--reward-source {source}"
    if is_of_objective:
        who = f"--objective {config.chosen.objective}"
    is_own = is_of_objective or source in LIKELIHOODS
    if (is_own or source == "vote") and isinstance(task, EpisodeTask):
        raise InputError(f"{who} needs responses of one turn, got episodes of {task.name}")
    return check_answers(task, who) if is_own else None
