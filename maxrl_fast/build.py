"""From a resolved configuration to the objects of a run. They take what they need, and do not know the configuration."""

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from maxrl_fast.config.checks import objective_of
from maxrl_fast.config.options import Config, ResolvedConfig, RewardOptions, TaskOptions
from maxrl_fast.distributed.ranks import Ranks
from maxrl_fast.errors import InputError
from maxrl_fast.evaluation.evaluator import Evaluator
from maxrl_fast.files.untrusted import JSON_BYTES, check_regular
from maxrl_fast.model.checkpoint import kept_files, new_files
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.model.hub import directory_of
from maxrl_fast.model.huggingface import HuggingFacePolicy
from maxrl_fast.model.linear import add_adapters
from maxrl_fast.model.policy import check_positions, load_policy, new_policy
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.plugins import build_plugin, place_of
from maxrl_fast.rewards.classifier import CLASSIFIER, Classifier
from maxrl_fast.rewards.in_process import InProcessReward
from maxrl_fast.rewards.judge import JUDGE, Judge, default_cache
from maxrl_fast.rewards.pool import RewardPool
from maxrl_fast.rewards.scoring import Scorer
from maxrl_fast.rewards.vote import MajorityVote
from maxrl_fast.rewards.weighted import RewardSource, WeightedRewards
from maxrl_fast.rollout import Engine, Sampling
from maxrl_fast.rollout.names import ENGINES
from maxrl_fast.rollout.native import MAX_BATCH, NativeEngine
from maxrl_fast.rollout.plain import PlainEngine
from maxrl_fast.run.fingerprints import fingerprints, source_file
from maxrl_fast.run.resume import Saved
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.chain import ChainTask
from maxrl_fast.tasks.dataset import DatasetTask
from maxrl_fast.tasks.gym import GymTask
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.tasks.names import GYM, OBJECT, dataset_spec, is_plugin, is_reward, lost_object, needs_data, unknown_task
from maxrl_fast.tasks.own import json_object, own_task
from maxrl_fast.training.collect import RolloutCollector
from maxrl_fast.training.exactness import check_engine, check_exact
from maxrl_fast.training.learner import Learner, LossSettings, frozen_copy
from maxrl_fast.training.length_penalty import LengthPenalty
from maxrl_fast.training.objective import Objective
from maxrl_fast.training.objective_registry import is_custom
from maxrl_fast.training.optimizer import LearningRate, make_optimizer
from maxrl_fast.training.prompts_ahead import PromptsAhead
from maxrl_fast.training.sharding import distribute
from maxrl_fast.training.stopwatch import Stopwatch
from maxrl_fast.training.trainer import Trainer
from maxrl_fast.training.warm_start import WarmStart

CPU = torch.device("cpu")


def build_run_task(config: Config) -> Task:
    """Return the task of a run; raises as `build_task` does."""
    return build_task(
        config.task,
        config.run.seed,
        config.model.directory,
        config.reward.reward,
        sft_data=config.warm_start.sft_data,
        max_new_tokens=config.rollout.max_new_tokens,
    )


def build_task(
    options: TaskOptions,
    seed: int,
    model: Path | None = None,
    reward: Sequence[str] = (),
    *,
    sft_data: Path | None = None,
    max_new_tokens: int | None = None,
) -> Task:
    """Return the task.

    Args:
        model: the checkpoint directory whose tokenizer reads text.
        reward: --reward, which tasks without a reward of their own need.
        sft_data: a file of demonstrations for the warm start, for tasks that read a data set.
        max_new_tokens: the longest demonstration; default: the task's.

    Raises:
        InputError: where there is none of this name, its options do not fit it, or its files cannot be read.
    """
    name, spec = options.task, dataset_spec(options.task)
    if name.startswith(OBJECT):
        raise InputError(lost_object("task", name))
    if name == "maze":
        return MazeTask(options.maze_size, seed)
    if name == "chain":
        return ChainTask(options.chain_length, seed)
    if is_plugin(name):
        return own_task(name, options.task_args, seed, model)
    if spec is None and not name.startswith(GYM):
        raise InputError(unknown_task(name))
    if spec is not None and options.data is not None and options.hub is not None:
        raise InputError(f"--task {name} takes --data or --hub, got both")
    if is_reward(name) and options.data is None and options.hub is None:
        raise InputError(needs_data(name))
    if spec is not None and options.data is None and options.hub is None and spec.hub is None:
        raise InputError(f"--task {name} needs --data FILE or --hub NAME")
    if spec is not None and not reward and spec.reward is None:
        raise InputError(f"--task {name} needs --reward FILE:FUNCTION")
    if spec is None:
        json_object("--gym-config", options.gym_config)
    if model is None:
        raise InputError(f"--task {name} needs --model DIR, whose tokenizer reads text")
    text: dict[str, Any] = {
        "prompt_suffix": options.prompt_suffix,
        "plain_prompts": options.plain_prompts,
        "max_prompt_tokens": options.max_prompt_tokens,
        "allow_special_tokens": options.allow_special_tokens,
    }
    if spec is None:
        return GymTask(name.removeprefix(GYM), seed, model, config=options.gym_config, **text)
    return DatasetTask(
        spec,
        seed,
        model,
        data=options.data,
        test_data=options.test_data,
        hub=options.hub,
        prompt_key=options.prompt_key,
        answer_key=options.answer_key,
        sft_data=sft_data,
        max_new_tokens=max_new_tokens,
        **text,
    )


def build_scorer(
    options: RewardOptions,
    task: Task,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    functions: Mapping[str, Callable[..., Any]] | None = None,
    num_ranks: int = 1,
) -> Scorer:
    """Return what gives every response its reward: the task, functions in worker processes, a reward model, or a judge.

    Args:
        device, dtype: of a reward model.
        functions: Python functions of this process, by their names among the rewards.
        num_ranks: processes that score a part of the responses each.

    Raises:
        InputError: where one of them cannot be loaded.
    """
    names = reward_names(options, task)
    if not names:
        return Scorer(task, None, threshold=options.reward_threshold)
    with contextlib.ExitStack() as on_error:
        sources: list[RewardSource] = []
        for name in names:
            is_optional = len(names) > 1
            if functions and name in functions:
                sources.append(InProcessReward(functions[name], name, options.reward_seconds, is_optional))
            else:
                sources.append(_build_source(options, name, is_optional, device, dtype))
            on_error.callback(sources[-1].close)
        weights = options.reward_weights or [1.0] * len(names)
        source = WeightedRewards(sources, weights) if [*weights] != [1.0] else sources[0]
        on_error.pop_all()
    limit = None if options.reward else task.answer_limit  # a user's function sees everything
    return Scorer(task, source, options.max_reward_error_rate, options.reward_threshold, limit, num_ranks)


def reward_names(options: RewardOptions, task: Task) -> tuple[str, ...]:
    """Return the rewards that score responses: those of --reward, or the task's function; none where the task scores."""
    return options.reward or ((task.reward,) if task.reward else ())


def _build_source(
    options: RewardOptions, name: str, is_optional: bool, device: torch.device, dtype: torch.dtype
) -> RewardSource:
    environment = [variable.strip() for variable in options.reward_env.split(",") if variable.strip()]
    if name.startswith(OBJECT):
        raise InputError(lost_object("reward", name))
    if name.startswith(CLASSIFIER):
        return Classifier(name, device, dtype)
    if name.startswith(JUDGE):
        return Judge(
            name,
            _template(options),
            pattern=options.judge_score,
            time_limit=options.reward_seconds,
            concurrency=options.reward_concurrency,
            rate=options.judge_rate,
            key=_key(environment),
            cache=default_cache(),
        )
    return RewardPool(
        name,
        workers=options.reward_workers,
        time_limit=options.reward_seconds,
        memory_limit=int(options.reward_memory_gb * 1e9),
        isolation=options.reward_isolation,
        environment=environment,
        concurrency=options.reward_concurrency,
        is_optional=is_optional,
    )


def _template(options: RewardOptions) -> str:
    if options.judge_template is None:
        raise InputError(f"--reward {JUDGE}URL/MODEL needs --judge-template FILE, the question to the judge")
    try:
        check_regular(options.judge_template, JSON_BYTES)
        return options.judge_template.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InputError(f"--judge-template must be a readable text file, got {options.judge_template}: {error}") from error


def _key(environment: Sequence[str]) -> str | None:
    """Return the value of the first variable that is a key by its name; None if there is none."""
    names = [name for name in environment if name.endswith(("KEY", "TOKEN"))]
    if names and names[0] not in os.environ:
        raise InputError(f"the judge needs the environment variable {names[0]}, which is not set")
    return os.environ[names[0]] if names else None


def build_policy(config: ResolvedConfig, task: Task, saved: Saved | None = None, is_empty: bool = False) -> PolicyModel:
    """Return the policy on the CPU, in float32, with adapters where asked.

    Args:
        saved: the checkpoint of a resumed run, whose float32 weights are loaded later.
        is_empty: only its sizes are wanted: its weights are on the meta device.

    Raises:
        InputError: where a checkpoint cannot be read or does not fit the task.
    """
    options, limit = config.model, config.rollout.max_new_tokens
    start = saved.directory if saved is not None else options.directory
    if options.model is not None and saved is None and not is_empty:
        start = directory_of(options.model, with_weights=True)
    model: PolicyModel
    if saved is not None and saved.decoder is not None:
        model = Decoder.empty(saved.decoder, "meta" if is_empty else CPU)
        check_positions(model, saved.directory, task.prompt_length, limit)
    elif start is not None:
        model = load_policy(
            start,
            backend=options.model_backend,
            task=config.task.task,
            vocab_size=task.vocab_size,
            prompt_length=task.prompt_length,
            max_new_tokens=limit,
            is_empty=is_empty,
        )
    else:
        model = new_policy(
            vocab_size=task.vocab_size,
            positions=max(512, task.prompt_length + limit),
            hidden_size=options.hidden_size,
            intermediate_size=options.intermediate_size,
            layers=options.layers,
            heads=options.heads,
            kv_heads=options.kv_heads,
            rope_theta=options.rope_theta,
            seed=config.run.seed,
            is_empty=is_empty,
        )
    if options.lora_rank:
        add_adapters(model, options.lora_rank, options.lora_alpha, options.lora_targets, config.run.seed)
    model.checkpoint_activations = config.optimizer.checkpoint_activations
    if config.run.compile and not is_empty:
        model.compile_layers()
    return model


def compare_policy(model: PolicyModel) -> str:
    """Return a sentence on how close a policy of transformers is to the model's own forward pass; "" for the native decoder.

    Raises:
        InputError: where it is not close enough to train.
    """
    return check_exact(model) if isinstance(model, HuggingFacePolicy) else ""


def compare_engine(model: PolicyModel, engine: Engine, name: str) -> str:
    """Return a sentence on how close an engine that is not ours samples to the policy; "" for engines that tests compare.

    Args:
        name: of the engine. vLLM is compared for policies of transformers, an engine of the user's for all.

    Raises:
        InputError: where it samples from another model.
    """
    if name not in ENGINES:
        engine.load_weights(model)
    elif not isinstance(model, HuggingFacePolicy) or isinstance(engine, PlainEngine):
        return ""
    return check_engine(model, engine, name)


def build_policy_files(task: Task, model: PolicyModel, start: Path | None) -> dict[str, Any]:
    """Return the files of the policy's checkpoints beside its weights, by name: JSON contents or bytes.

    Args:
        start: the checkpoint that the policy starts from, whose configuration is kept; None: it is a new one.

    Raises:
        InputError: where a file cannot be read.
    """
    own = new_files(model.config, task.stop_ids) if start is None else kept_files(start, task.stop_ids)
    return {**task.tokenizer_files(), **own}


def build_fingerprints(config: ResolvedConfig, task: Task) -> dict[str, str]:
    """Return the fingerprints of the files that decide the run's result."""
    task_name, objective, engine = config.task.task, config.objective.objective, config.rollout.rollout
    files = {
        "objective": source_file(place_of("objective", objective)) if is_custom(objective) else None,
        "judge-template": config.reward.judge_template,
        "task": source_file(place_of("task", task_name)) if is_plugin(task_name) else None,
        "rollout": source_file(place_of("rollout", engine)) if engine not in ENGINES else None,
    }
    for i, name in enumerate(reward_names(config.reward, task)):
        is_model = name.startswith(CLASSIFIER)
        path = Path(name.removeprefix(CLASSIFIER), "config.json") if is_model else source_file(name)
        if name.startswith(OBJECT):  # has no file
            path = None
        files[f"reward {i + 1}" if i else "reward"] = path
    return fingerprints(task, files)


def build_engine(
    name: str,
    model: PolicyModel,
    task: Task,
    dtype: torch.dtype,
    *,
    max_new_tokens: int,
    max_batch: int,
    kv_cache_gb: float | None = None,
    compiled: bool = False,
    ranks: Ranks | None = None,
    vllm_tensor_parallel: int = 1,
    vllm_url: str | None = None,
) -> Engine:
    """Return the rollout engine of this name with the model's weights: "native", "vllm", or a class of the user's.

    Args:
        max_batch: responses that vLLM samples side by side.
        kv_cache_gb: KV-cache limit in 1e9 bytes; None: the engine's default.
        vllm_tensor_parallel: number of neighbouring ranks that share a vLLM engine.
        vllm_url: address of the vLLM server that samples; None: vLLM runs in this process.

    Raises:
        InputError: where it is not installed, its class is no engine, or it cannot run this model within the KV-cache limit.
    """
    device = model.lm_head.weight.device
    cache_bytes = None if kv_cache_gb is None else int(kv_cache_gb * 1e9)
    if vllm_url is not None:
        from maxrl_fast.rollout.vllm_server import VllmServerEngine

        return VllmServerEngine(model, dtype, vllm_url, ranks=ranks)
    if name == "vllm":
        from maxrl_fast.rollout.vllm import VllmEngine  # which not every environment has

        return VllmEngine(
            model,
            dtype,
            cache_bytes=cache_bytes,
            max_batch=min(max(max_batch, 256), MAX_BATCH[device.type]),
            ranks=ranks,
            tensor_parallel=vllm_tensor_parallel,
        )
    if name not in ENGINES:
        offered = {"model": model, "dtype": dtype, "max_batch": max_batch, "ranks": ranks or Ranks()}
        limit = {} if cache_bytes is None else {"cache_bytes": cache_bytes}  # refused by an engine that has none
        hint = "; it may have model, dtype, max_batch, ranks and cache_bytes"
        own: Engine = build_plugin("rollout", name, Engine, offered, limit, hint)
        return own
    engine: NativeEngine | PlainEngine
    if isinstance(model, HuggingFacePolicy):
        engine = PlainEngine(model, dtype, cache_bytes=cache_bytes)
    else:
        assert isinstance(model, Decoder)
        engine = NativeEngine(model, dtype, cache_bytes=cache_bytes, compiled=compiled)
    engine.sequence_bytes(task.prompt_length, max_new_tokens)  # refuses a cache that is too small
    return engine


def build_run_engine(config: ResolvedConfig, model: PolicyModel, task: Task, ranks: Ranks | None = None) -> Engine:
    """Return the rollout engine of a run; raises as `build_engine` does."""
    options = config.rollout
    return build_engine(
        options.rollout,
        model,
        task,
        dtype_of(config),
        max_new_tokens=options.max_new_tokens,
        max_batch=options.samples_of_engine(1 if ranks is None else ranks.size),
        kv_cache_gb=options.kv_cache_gb,
        compiled=config.run.compile,
        ranks=ranks,
        vllm_tensor_parallel=options.vllm_tensor_parallel,
        vllm_url=options.vllm_url,
    )


def build_sampling(config: ResolvedConfig, task: Task) -> Sampling:
    """Return how a run samples responses."""
    options = config.rollout
    return Sampling(options.temperature, options.max_new_tokens, task.stop_ids, top_p=options.top_p)


def build_loss_settings(config: ResolvedConfig) -> LossSettings:
    """Return the settings of the token loss in reinforcement learning."""
    options = config.rollout
    own: dict[str, Any] = {"loss_options": config.loss.own_numbers()}
    return LossSettings(**{**vars(config.loss), **own}, temperature=options.temperature, max_new_tokens=options.max_new_tokens)


def build_learner(
    config: ResolvedConfig,
    model: PolicyModel,
    ranks: Ranks | None = None,
    module: Any = None,
    reference: PolicyModel | None = None,
) -> Learner:
    """Return the learner of reinforcement learning, with a new optimizer."""
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


def build_warm_start(
    config: ResolvedConfig, task: Task, model: PolicyModel, ranks: Ranks | None = None, module: Any = None
) -> WarmStart:
    """Return the warm start, with a learner and an optimizer of its own."""
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
) -> RolloutCollector:
    """Return what samples and scores a step's rollouts."""
    options, needs = config.rollout, objective.needs
    is_ahead = config.run.device == "cuda" and isinstance(task, (MazeTask, GymTask))  # others take no time
    return RolloutCollector(
        task,
        engine,
        scorer,
        build_sampling(config, task),
        num_prompts=options.prompts,
        num_rollouts=options.rollouts,
        seed=config.run.seed,
        device=torch.device(config.run.device),
        max_batches=max(options.dynamic_sampling, 1),
        needs_greedy=needs.greedy,
        needs_binary=needs.binary,
        needs_parts=needs.parts,
        make_prompts=PromptsAhead(task).take if is_ahead else None,
        clock=clock or Stopwatch(),
        ranks=ranks or Ranks(),
    )


def build_trainer(
    config: ResolvedConfig,
    task: Task,
    engine: Engine,
    scorer: Scorer,
    model: PolicyModel,
    clock: Stopwatch | None = None,
    ranks: Ranks | None = None,
) -> tuple[Trainer, WarmStart]:
    """Return the trainer and the warm start before it, which train one model.

    Args:
        model: on its device; with --sharding full its weights are sharded in place.
    """
    objective, ranks, clock = objective_of(config), ranks or Ranks(), clock or Stopwatch()
    reference = frozen_copy(model) if config.loss.kl_coef or objective.needs.reference else None
    module = distribute(model, reference, ranks, dtype_of(config), config.run.sharding == "full")
    options = config.optimizer
    learner = build_learner(config, model, ranks, module, reference)
    learner.objective_state = objective.state
    trainer = Trainer(
        build_collector(config, task, engine, build_training_scorer(config, task, scorer), objective, clock, ranks),
        objective,
        learner,
        engine,
        LearningRate(options.lr, options.steps, options.warmup_steps, options.lr_schedule),
        options.updates_per_step,
        config.rollout.importance_cap,
        clock,
        config.evaluation.keep_rollouts,
        build_length_penalty(config),
    )
    return trainer, build_warm_start(config, task, model, ranks, module)


def build_training_scorer(config: ResolvedConfig, task: Task, scorer: Scorer) -> Scorer:
    """Return what scores the rollouts of training, which is not what scores the evaluation where labels are voted for."""
    return Scorer(task, MajorityVote(task.answer)) if config.shaping.labels == "vote" else scorer


def build_length_penalty(config: ResolvedConfig) -> LengthPenalty | None:
    """Return the length penalty of a run, or None where it has none."""
    options = config.shaping
    if not options.overlong_buffer:
        return None
    return LengthPenalty(config.rollout.max_new_tokens, options.overlong_buffer, options.overlong_penalty)


def build_evaluator(
    config: ResolvedConfig, task: Task, engine: Engine, scorer: Scorer, ranks: Ranks | None = None
) -> Evaluator:
    """Return the evaluation on held-out prompts during training."""
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


def dtype_of(config: ResolvedConfig) -> torch.dtype:
    """Return the dtype of the computation."""
    dtype: torch.dtype = getattr(torch, config.run.dtype)
    return dtype
