"""The configuration of a run: flags, the TOML file, their defaults and their checks."""

import argparse
import dataclasses
import difflib
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from maxrl_fast.errors import InputError
from maxrl_fast.hardware import resolve_device, resolve_dtype
from maxrl_fast.objectives import OBJECTIVES
from maxrl_fast.ops.token_loss import AGGREGATIONS
from maxrl_fast.tasks import Task

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # the same code, before it came with Python


def _unset(metavar: str, default: str) -> Any:
    """For options whose default is worked out when the run starts: how --help shows them."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


@dataclass(frozen=True)
class ObjectiveOptions:
    """What is maximised."""

    objective: str = "maxpo"
    """maxpo, maxrl, grpo, dr_grpo, rloo, reinforce or pkpo."""
    k: Annotated[int | None, _unset("INT", "4 for maxpo and pkpo")] = None
    """Size of max@k, in rollouts: 1 to N-1 for maxpo, 2 to N for pkpo; the other objectives take none."""
    order: Annotated[int | None, _unset("INT", "N-1 for maxrl")] = None
    """Order at which maxrl is truncated, 1 to N-1; the other objectives take none."""


@dataclass(frozen=True)
class TaskOptions:
    """Where prompts come from."""

    task: Literal["maze"] = "maze"
    """Task."""
    maze_size: int = 9
    """Cells along one side of a maze, odd, 5 to 31."""
    maze_strict: bool = False
    """A rollout must end on the goal; otherwise what comes after the goal is ignored."""


@dataclass(frozen=True)
class RolloutOptions:
    """How responses are sampled."""

    rollout: Literal["native"] = "native"
    """Rollout engine."""
    prompts: int = 32
    """Prompts per step (G)."""
    rollouts: int = 16
    """Rollouts per prompt (N)."""
    max_new_tokens: Annotated[int | None, _unset("INT", "the task's; 32 for 9x9 mazes")] = None
    """Longest response, in tokens."""
    temperature: float = 1.0
    """Sampling temperature, also that of the loss."""


@dataclass(frozen=True)
class WarmStartOptions:
    """Supervised learning on solutions, before reinforcement learning."""

    sft_steps: Annotated[int | None, _unset("INT", "100; 0 with --model")] = None
    """Steps."""
    sft_batch: int = 32
    """Solutions per step."""
    sft_lr: float = 2e-3
    """Peak learning rate; 10 steps of linear warm-up, then a cosine to a tenth."""


@dataclass(frozen=True)
class OptimizerOptions:
    """Reinforcement learning updates (AdamW, float32 weights and moments)."""

    steps: int = 100
    """Steps."""
    lr: float = 2e-4
    """Peak learning rate."""
    lr_schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up: constant, or a cosine to a tenth."""
    warmup_steps: int = 5
    """Steps of linear warm-up."""
    updates_per_step: int = 1
    """Optimizer updates from each batch of rollouts, each on an equal share of its prompts."""
    weight_decay: float = 0.01
    """Decoupled weight decay, of matrices only."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.99
    """Decay of the second moment."""
    clip_grad: float = 1.0
    """Largest gradient norm; larger gradients are scaled down to it."""
    token_budget: int = 4096
    """Most tokens, prompts included, in one forward and backward pass; gradients of several passes add up."""


@dataclass(frozen=True)
class LossOptions:
    """The token loss."""

    loss: Literal["ppo", "reinforce", "cispo", "gspo"] = "ppo"
    """Policy-gradient loss; with one update per step the ratio is 1 and all have the same gradient."""
    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float | None, _unset("FLOAT", "off")] = None
    """For negative advantages the loss is at most this times |A|."""
    aggregation: Annotated[str | None, _unset("STR", "the objective's")] = None
    """How token losses are averaged: token_mean over the whole batch, seq_mean_token_mean (grpo), seq_mean_token_sum,
    or seq_sum_constant (dr_grpo)."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus, per nat."""
    kl_coef: float = 0.0
    """Coefficient of the divergence from the policy at the start, per nat."""
    kl: Literal["k1", "k2", "k3", "k3+"] = "k3"
    """Estimator of that divergence."""


@dataclass(frozen=True)
class ModelOptions:
    """The policy: a new decoder of the Qwen2 architecture, or a checkpoint."""

    model: Annotated[Path | None, _unset("DIR", "none, a new model")] = None
    """Hugging Face checkpoint directory to start from; the sizes below are then its own."""
    hidden_size: int = 128
    """Width."""
    intermediate_size: int = 256
    """Width of the feed-forward layers."""
    layers: int = 4
    """Layers."""
    heads: int = 8
    """Query heads; their size is hidden_size / heads."""
    kv_heads: int = 4
    """Key/value heads."""
    rope_theta: float = 100.0
    """Base of the rotary embedding. Short prompts learn faster with a small one; the MaxRL paper has 1e6."""


@dataclass(frozen=True)
class EvaluationOptions:
    """Evaluation on held-out prompts."""

    eval_every: int = 0
    """Steps between evaluations; 0: only before and after."""
    eval_prompts: int = 256
    """Held-out prompts."""
    eval_samples: int = 16
    """Samples per prompt; pass@k is reported for k = 1, 2, 4, ... up to this."""


@dataclass(frozen=True)
class RunOptions:
    """The run itself."""

    out: Annotated[Path | None, _unset("DIR", "runs/<objective>-<time>")] = None
    """Folder of results, new or empty."""
    config: Annotated[Path | None, _unset("FILE", "none")] = None
    """TOML file of options, its keys these flags' names (maze_size = 11); a flag overrides the file."""
    seed: int = 0
    """Seed of the weights, the mazes and the sampling."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Computation; auto: bfloat16 where the machine multiplies it fast. Weights and moments are float32 always."""
    threads: Annotated[int | None, _unset("INT", "all cores")] = None
    """CPU threads."""
    save_every: int = 0
    """Steps between checkpoints; 0: only after the warm start and at the end."""
    dry_run: bool = False
    """Print the resolved configuration with estimates of memory and work, and stop."""


@dataclass(frozen=True)
class Config:
    """Reinforcement learning with verifiable rewards.

    Example: python -m maxrl_fast.train --objective maxpo --k 4
    """

    objective: ObjectiveOptions = field(default_factory=ObjectiveOptions)
    task: TaskOptions = field(default_factory=TaskOptions)
    rollout: RolloutOptions = field(default_factory=RolloutOptions)
    warm_start: WarmStartOptions = field(default_factory=WarmStartOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    loss: LossOptions = field(default_factory=LossOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    evaluation: EvaluationOptions = field(default_factory=EvaluationOptions)
    run: RunOptions = field(default_factory=RunOptions)

    def flat(self) -> dict[str, Any]:
        """All options by flag name, in the types of JSON and TOML."""
        return {
            option.name: str(value) if isinstance(value, Path) else value
            for group in dataclasses.fields(self)
            for option in dataclasses.fields(getattr(self, group.name))
            for value in [getattr(getattr(self, group.name), option.name)]
        }

    def replace(self, **options: Any) -> "Config":
        """A copy with other values for some options, by flag name."""
        changed = {}
        for group in dataclasses.fields(self):
            options_of_group = {option.name for option in dataclasses.fields(getattr(self, group.name))}
            if own := {name: options[name] for name in options_of_group & options.keys()}:
                changed[group.name] = dataclasses.replace(getattr(self, group.name), **own)
        return dataclasses.replace(self, **changed)


def parse(arguments: Sequence[str]) -> Config:
    """The configuration that flags and the TOML file of --config give; what is wrong with a flag exits with 2.

    Raises:
        InputError: on a TOML file that cannot be read or has an unknown key.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", type=Path)
    file = finder.parse_known_args(arguments)[0].config
    from_file = [] if file is None else _toml_as_flags(file)
    # The last of two equal flags wins, so a flag overrides the file, and both go through the same checks.
    return tyro.cli(
        Config,
        args=[*from_file, *arguments],
        prog="python -m maxrl_fast.train",
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )


def _toml_as_flags(file: Path) -> list[str]:
    try:
        options = tomllib.loads(file.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"--config must be a readable TOML file, got {file}: {error}") from error
    known = Config().flat()
    flags = []
    for key, value in options.items():
        if key not in known or key == "config":
            raise InputError(f"{file} has the unknown key {key!r}{_nearest(key, known)}")
        flag = "--" + key.replace("_", "-")
        if isinstance(known[key], bool):
            if not isinstance(value, bool):
                raise InputError(f"{file}: {key} must be true or false, got {value!r}")
            flags += [flag] if value else []
        elif isinstance(value, (int, float, str)) and not isinstance(value, bool):
            flags += [f"{flag}={value}"]
        else:
            raise InputError(f"{file}: {key} must be a number or a string, got {value!r}")
    return flags


def _nearest(word: str, words: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(words), n=1, cutoff=0.4)
    return f"; did you mean {close[0]!r}?" if close else ""


def check(config: Config) -> None:
    """Everything that can be known to be wrong before any work.

    Raises:
        InputError: with a sentence that says what was wanted and what came.
    """
    options = config.flat()
    if options["objective"] not in OBJECTIVES:
        raise InputError(
            f"objective must be one of {', '.join(OBJECTIVES)}, got {options['objective']!r}"
            f"{_nearest(options['objective'], OBJECTIVES)}"
        )
    if options["aggregation"] not in (None, *AGGREGATIONS):
        raise InputError(
            f"aggregation must be one of {', '.join(AGGREGATIONS)}, got {options['aggregation']!r}"
            f"{_nearest(options['aggregation'], AGGREGATIONS)}"
        )
    at_least_one = (
        "prompts rollouts max_new_tokens sft_batch updates_per_step token_budget hidden_size intermediate_size layers heads "
        "kv_heads eval_prompts eval_samples threads"
    )
    _require(options, at_least_one, "at least 1", lambda x: x >= 1)
    _require(options, "sft_steps steps warmup_steps eval_every save_every seed", "at least 0", lambda x: x >= 0)
    _require(options, "temperature sft_lr lr clip_grad rope_theta", "a finite number above 0", lambda x: 0 < x < math.inf)
    _require(options, "clip_high weight_decay entropy_coef kl_coef", "finite and at least 0", lambda x: 0 <= x < math.inf)
    _require(options, "clip_low beta1 beta2", "in [0, 1)", lambda x: 0 <= x < 1)
    _require(options, "dual_clip", "above 1", lambda x: 1 < x < math.inf)
    n = options["rollouts"]
    row = OBJECTIVES[options["objective"]].row
    if n < row.min_rollouts:
        raise InputError(f"{options['objective']} needs at least {row.min_rollouts} rollouts per prompt, got {n}")
    try:
        row.resolve_size(options["objective"], n, default_k(config), options["order"])
    except ValueError as error:
        raise InputError(str(error)) from error
    if options["prompts"] % options["updates_per_step"]:
        raise InputError(
            f"prompts must be a multiple of updates_per_step, got {options['prompts']} and {options['updates_per_step']}"
        )
    for whole, part in (("hidden_size", "heads"), ("heads", "kv_heads")):
        if options[whole] % options[part]:
            raise InputError(f"{whole} must be a multiple of {part}, got {options[whole]} and {options[part]}")
    if options["hidden_size"] // options["heads"] % 2:
        raise InputError(f"hidden_size / heads must be even, got {options['hidden_size']} / {options['heads']}")


def _require(options: dict[str, Any], names: str, wanted: str, holds: Callable[[Any], bool]) -> None:
    for name in names.split():
        if options[name] is not None and not holds(options[name]):
            raise InputError(f"{name} must be {wanted}, got {options[name]}")


def default_k(config: Config) -> int | None:
    """--k, or 4 where the objective has one and none was given."""
    takes_k = OBJECTIVES[config.objective.objective].row.size_name == "k"
    return 4 if takes_k and config.objective.k is None else config.objective.k


def resolve(config: Config, task: Task) -> Config:
    """The checked configuration with every default worked out.

    Raises:
        InputError: where the device is absent or OUT holds something.
    """
    objective = OBJECTIVES[config.objective.objective]
    device = resolve_device(config.run.device)
    out = config.run.out or Path("runs") / f"{config.objective.objective}-{time.strftime('%Y%m%d-%H%M%S')}"
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        what = "another run" if (out / "config.json").exists() else "something else"
        raise InputError(f"--out must be a new or empty folder, got {out}, which holds {what}")
    order = config.objective.order
    return config.replace(
        k=default_k(config),
        order=config.rollout.rollouts - 1 if objective.row.size_name == "order" and order is None else order,
        max_new_tokens=config.rollout.max_new_tokens or task.max_new_tokens,
        sft_steps=(0 if config.model.model else 100) if config.warm_start.sft_steps is None else config.warm_start.sft_steps,
        aggregation=config.loss.aggregation or objective.aggregation,
        out=out,
        device=device.type,
        dtype=str(resolve_dtype(config.run.dtype, device)).removeprefix("torch."),
        threads=config.run.threads or os.cpu_count() or 1,
    )
