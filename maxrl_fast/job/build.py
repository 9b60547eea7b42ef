"""Builds what a run consists of, by its parts; describes it for its first lines, and estimates its
memory for --dry-run."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from maxrl_fast.algorithms.losses import CLIPS
from maxrl_fast.config.options import Config
from maxrl_fast.config.resolve import resolve
from maxrl_fast.config.rules import objective_of, part
from maxrl_fast.errors import InputError
from maxrl_fast.evaluation.evaluator import Evaluator
from maxrl_fast.job.build_parts import (
    PolicyFiles,
    build_engine,
    build_policy,
    build_policy_files,
    build_reference,
    build_run_task,
    build_scorer,
    closing_task,
    find_policy,
)
from maxrl_fast.job.run_files import Saved, free_folder
from maxrl_fast.model.attention import choose, kernel_name
from maxrl_fast.model.policy_model import Change, PolicyModel
from maxrl_fast.ops.dispatch import kernels_for
from maxrl_fast.rewards import MajorityVote
from maxrl_fast.rewards.pool import RewardOutput
from maxrl_fast.rollout import ENGINES, MAX_BATCH, Engine, Sampling
from maxrl_fast.rollout.vllm import MAX_SEQUENCES
from maxrl_fast.runtime.background import Stopwatch
from maxrl_fast.runtime.device import Machine, versions
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.runtime.tuning import chunk_bytes
from maxrl_fast.tasks import AnsweredTask, EpisodeTask, Task, describe_task, held_out_sets
from maxrl_fast.tasks.scorer import Scorer
from maxrl_fast.tasks.text_codec import end_of
from maxrl_fast.training.answers import (
    LIKELIHOODS,
    PROBABILITY,
    PolicyReward,
    check_answers,
)
from maxrl_fast.training.collect import LengthPenalty, RolloutCollector
from maxrl_fast.training.correction import make_correction
from maxrl_fast.training.learner import (
    Critic,
    Learner,
    LearningRate,
    LossSettings,
    critic_model,
    make_optimizer,
)
from maxrl_fast.training.objectives.group import Objective
from maxrl_fast.training.objectives.registry import explain_name
from maxrl_fast.training.passes import (
    check_engine,
    check_exact,
    distribute,
    is_sharded,
    num_critic_weights,
    shard,
)
from maxrl_fast.training.schedule import Carried, Drawn, Schedule
from maxrl_fast.training.teacher import TeacherPrompts, names_asked
from maxrl_fast.training.trainer import Trainer, WarmStart

# of the default evaluations between the first step and the last: their share of the training
# samples, and the prompts below which pass@k is too noisy to be worth them
EVALUATION_SHARE, FEWEST_EVALUATED = 0.05, 32


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
    def policy_files(self) -> PolicyFiles:
        # a resumed run keeps the configuration of its checkpoint
        start = self.saved.directory if self.saved else self.config.model.directory
        return build_policy_files(self.task, self.policy, start)

    @cached_property
    def objective(self) -> Objective:
        return objective_of(self.config)

    @cached_property
    def sampling(self) -> Sampling:
        options, task = self.config.sampling, self.task
        limits = options.temperature, options.max_new_tokens, task.stop_ids
        return Sampling(*limits, top_p=options.top_p, end_of=end_of(task))

    @cached_property
    def engine(self) -> Engine:
        config, ranks, own = self.config, self.ranks, self.config.parts["rollout"]
        batch = config.sampling.samples_of_engine(ranks.size, tensor_parallel(config))
        given = config.sampling, self.policy, self.task, config.run.where[1], batch, ranks
        return build_engine(config.chosen.rollout, own, *given)

    @cached_property
    def scorer(self) -> Scorer:
        output = self.output if self.ranks.is_first else None
        how = *self.config.run.where, self.functions, self.ranks.size, output
        return build_scorer(self.config.reward, self.task, *how)

    @cached_property
    def teacher_prompts(self) -> TeacherPrompts | None:
        config, loss = self.config, self.config.loss
        if (source := loss.teacher_prompt) is None:
            return None
        sizes = (self.teacher or self.policy).config
        limit = sizes.max_position_embeddings - config.sampling.max_new_tokens
        return TeacherPrompts(self.task, source, limit, loss.teacher_template, config.run.seed)

    @cached_property
    def schedules(self) -> tuple[Schedule | None, Carried | Drawn | None, dict[str, Tensor]]:
        size = getattr(self.task, "num_train_prompts", 0)  # `resolve` has checked it
        return self.config.sampling.build(size, self.config.run.seed)

    @cached_property
    def copies(self) -> tuple[PolicyModel | None, PolicyModel | None]:  # reference, critic
        needs, loss, policy = self.objective.needs, self.config.loss, self.policy
        make: Change = (lambda x: x) if self.config.run.sharding == "full" else None
        reference = self.teacher
        # with another prompt the policy itself, as it is at each step, is the teacher
        is_self = loss.teacher_prompt is not None and not loss.teacher_ema
        is_copy = (loss.kl_coef or needs.reference) and not is_self
        if reference is None and is_copy:
            reference = policy.copied(make).requires_grad_(False)
        return reference, critic_model(policy, make) if needs.critic else None

    @cached_property
    def learner(self) -> Learner:
        config, (reference, trained), critic = self.config, self.copies, None
        beta2, dtype = config.optimizer.beta2, config.run.where[1]
        if trained is not None:
            optimizer = make_optimizer(trained, beta2, config.optimizer.weight_decay)
            own, module = config.parts["objective"], distribute(trained, self.ranks, dtype)
            critic = Critic(trained, optimizer, own["critic_lr"], own["value_clip"], module)
        state = {**self.objective.state, **self.schedules[2]}
        if config.loss.siren:
            state["siren_anchor"] = torch.full((1,), torch.nan, dtype=torch.float64)
        return self._learner(
            build_loss_settings(config),
            beta2,
            module=distribute(self.policy, self.ranks, dtype),
            reference=reference,
            copies_policy=self.teacher is None,
            teacher_ema=config.loss.teacher_ema,
            objective_state=state,
            critic=critic,
        )

    def _learner(self, settings: LossSettings, beta2: float, **others: Any) -> Learner:
        options = self.config.optimizer
        optimizer = make_optimizer(self.policy, beta2, options.weight_decay)
        how = settings, options.clip_grad, options.token_budget, self.config.run.where[1]
        return Learner(self.policy, optimizer, *how, ranks=self.ranks, **others)

    @cached_property
    def warm_start(self) -> WarmStart:
        options, loss = self.config.warm_start, LossSettings("reinforce", aggregation="token_mean")
        learner = self._learner(loss, options.sft_beta2, module=self.learner.module)
        rate = LearningRate(options.sft_lr, options.sft_steps, warmup_steps=10)
        takes_prompts = not self.config.parts["task"].get("sft_data")
        return WarmStart(self.task, learner, rate, options.sft_batch, takes_prompts)

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
            make_correction(self.config.chosen.correction, self.config.parts["correction"]),
            self.clock,
            self.teacher_prompts,
            self.config.sampling.ahead,
        )

    def _collector(self) -> RolloutCollector:
        config, needs, scorer, clock = self.config, self.objective.needs, self.scorer, self.clock
        options, reward, ranks = config.sampling, config.reward, self.ranks
        limit, policy_reward, penalty = options.max_new_tokens, None, None
        if answered := answered_task(config, self.task, self.objective):
            kind = PROBABILITY if needs.answers else reward.reward_source
            policy_reward = PolicyReward(kind, answered, self.learner, limit)
            scorer = Scorer(self.task, None)
        elif reward.reward_source == "vote":
            scorer = Scorer(self.task, MajorityVote(self.task.answer))
        if buffer := reward.overlong_buffer:
            penalty = LengthPenalty(limit, buffer, reward.overlong_penalty)
        # of all ranks, for checkpoints and the teacher
        if options.ahead or names_asked(config.loss.teacher_prompt):
            needs = replace(needs, components=True)
        if options.ahead:  # its collective operations and its time are its own
            ranks, clock = ranks.copied(), Stopwatch(parent=clock)
        return RolloutCollector(
            self.task,
            self.engine,
            scorer,
            self.sampling,
            options.prompts,
            options.rollouts,
            config.run.seed,
            config.run.where[0],
            *self.schedules[:2],
            needs,
            policy_reward,
            penalty,
            clock,
            ranks,
            reward.truncated,
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


class EvaluationSchedule(NamedTuple):
    every: int  # steps; 0: never
    num_prompts: int  # of each held-out set


def evaluation_schedule(config: Config, task: Task) -> EvaluationSchedule:
    """Between the first step and the last. A sample of training costs three of an evaluation,
    because it is learned from."""
    options, steps = config.evaluation, config.optimizer.steps
    if options.eval_every is not None:
        return EvaluationSchedule(options.eval_every, options.eval_prompts)
    trained = steps * config.sampling.prompts * config.sampling.rollouts
    samples = sum(n for _, n in held_out_sets(task, 1, options.eval_samples).values())
    affordable = int(EVALUATION_SHARE * trained / (3 * samples))
    if affordable < min(FEWEST_EVALUATED, options.eval_prompts):
        return EvaluationSchedule(0, 0)
    return EvaluationSchedule(math.ceil(steps / 4), min(affordable, options.eval_prompts))


def tensor_parallel(config: Config) -> int:
    return int(config.parts["rollout"].get("vllm_tensor_parallel", 1))


def build_loss_settings(config: Config) -> LossSettings:
    options, own = config.loss, config.parts["loss"]
    given = {**vars(config.run), **vars(config.sampling), **vars(options)}
    given |= {name: own[name] for name in CLIPS if name in own}
    values = {x.name: given[x.name] for x in fields(LossSettings) if x.name in given}
    if options.kl == "full":
        values |= {"kl": "k3", "kl_coef": 0.0, "divergence_coef": options.kl_coef}
    return LossSettings(
        **values,
        loss=part("loss", config.chosen.loss).function,
        loss_options={name: x for name, x in own.items() if name not in CLIPS},
        beta=options.jsd_beta,
        sequence_mask=config.parts["correction"].get("delta"),
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
    start = run.saved.directory if run.saved else config.model.model
    lines = [
        f"maxrl_fast {versions()['maxrl_fast']}: {what}",
        f"on {where} in {config.run.dtype}; {how}",
        _policy(run, f", from {start}" if start else ", new"),
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


def _policy(run: RunContext, start: str = "") -> str:
    model, sizes = run.policy, run.policy.config
    number, trained = count(model), count(model, is_trained=True)
    layers = f"{sizes.num_hidden_layers}-layer {sizes.model_type} decoder ({model.backend})"
    adapters = f", {trained:,} of them trained (LoRA)" * (trained < number)
    return f"policy: {layers}, {number:,} parameters{adapters}{start}"


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
    is_self = loss.teacher_prompt and not loss.teacher_ema
    is_copied = not (loss.reference or is_self) and (loss.kl_coef or needs.reference)
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
        "reference policy (float32)": 4 * trained * bool(is_copied),
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
    engine, number = config.chosen.rollout, tensor_parallel(config)
    # a vLLM server or a custom engine has its own memory
    if engine in ENGINES and not config.parts["rollout"].get("vllm_url"):
        most = MAX_SEQUENCES if engine == "vllm" else MAX_BATCH[machine.device]
        rows = min(sampling.samples_of_engine(machine.processes, number), most)
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
