"""The options of all runs, in the groups of --help. Those of training, and of parts that are chosen
by name, stand beside their code."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch

from maxrl_fast.algorithms.options import (
    DERIVED,
    BetweenZeroAndOne,
    Code,
    Count,
    CountOrZero,
    Folder,
    Limit,
    NotNegative,
    Option,
    Positive,
    Seed,
    UnitInterval,
    options_of,
)
from maxrl_fast.model.policy import Model
from maxrl_fast.rewards.options import Reward
from maxrl_fast.rollout import Decoding
from maxrl_fast.training.collect import SamplingOptions, Shaping
from maxrl_fast.training.learner import LossOptions
from maxrl_fast.training.trainer import OptimizerOptions, WarmStartOptions

AnyConfig = TypeVar("AnyConfig", bound="Options")


@dataclass(frozen=True)
class TaskAndEngine:
    """The parts, by name; each adds its options."""

    task: Code = "maze"
    """maze; gsm8k or math, of the hub or --data; code, Python programs run against tests; gym:NAME
    of reasoning-gym; dataset, prompts of --data scored by --reward; FILE.py:FUNCTION, dataset with
    this reward; or your own: FILE.py:CLASS or package.module:CLASS."""
    rollout: Code = "native"
    """Rollout engine: native, vllm, FILE.py:CLASS or package.module:CLASS."""


@dataclass(frozen=True)
class Chosen(TaskAndEngine):
    """The parts, by name; each adds its options."""

    objective: Code = "maxpo"
    """maxpo, maxrl, grpo, ... (`python -m maxrl_fast.objectives` lists all), or your own advantage:
    FILE.py:FUNCTION or package.module:FUNCTION."""
    loss: Code = DERIVED
    """Token loss: ppo, reinforce, cispo, gspo, ..., or your own FILE.py:FUNCTION. By default the
    objective's, mostly ppo."""
    correction: Literal["none", "tis", "tis_sequence", "icepop", "mis", "sequence_mask"] = DERIVED
    """For an engine whose probabilities are not the trainer's. By default tis, or none with native
    or the objective's own loss."""


# options that fix the shape of the policy and cannot change on resuming
SHAPE = {x.name for x in fields(Model)} - {"model", "lora_alpha"}


@dataclass(frozen=True)
class Evaluation:
    """Evaluation on held-out prompts, and what is reported."""

    eval_every: CountOrZero | None = None
    """Steps between evaluations; 0: only at the ends. By default three between, on a subset that
    costs at most 5% of the samples."""
    eval_prompts: Count = DERIVED
    """Held-out prompts of each set. By default 256, or all."""
    eval_samples: Count = 16
    """Samples per prompt; pass@k is reported for k = 1, 2, 4, ... up to this."""
    keep_rollouts: CountOrZero = 8
    """A step's rollouts that rollouts.jsonl keeps, in whole groups; 0: none."""
    log_to: Literal["tensorboard", "wandb", "trackio"] | None = None
    """Send metrics there too."""


@dataclass(frozen=True)
class Place:
    """Where it is computed."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the computation; auto: bfloat16 on a GPU that has it, else float32."""
    threads: Annotated[int, Limit("an integer from 1 to 1024", lambda x: 1 <= x <= 1024)] = DERIVED
    """CPU threads. By default those this process may use."""

    @property
    def where(self) -> tuple[torch.device, torch.dtype]:
        return torch.device(self.device), getattr(torch, self.dtype)


@dataclass(frozen=True)
class Run(Place):
    """The run itself."""

    out: Folder = DERIVED
    """Folder of results, new or empty. By default runs/<objective>-<time>."""
    resume: Folder | None = None
    """Folder of a run to resume, with its own options unless others are given; auto: that of --out,
    or a new one."""
    allow_changes: bool = False
    """Resume even if options or files change what is computed."""
    config: Folder | None = None
    """TOML file of options, as maze_size = 11; flags override it."""
    seed: Seed = 0
    """Of new weights, prompts and the sampling."""
    sharding: Literal["auto", "none", "full"] = "auto"
    """How processes divide the weights: none (DDP), full (FSDP2), or auto: full where training
    takes over half of a GPU's memory."""
    save_every: CountOrZero = 50
    """Steps between checkpoints; 0: at the ends and when stopped."""
    keep_checkpoints: CountOrZero = 3
    """Newest checkpoints kept beside the first and the best; 0: all."""
    stall_limit: Positive = 1800.0
    """Seconds without progress after which the run ends."""
    dry_run: str | None = None
    """Print the resolved options and an estimate of memory, and stop: for this machine, or 8x80: 8
    GPUs of 80 GB (1e9 bytes)."""


@dataclass(frozen=True)
class Measure:
    """What is measured."""

    eval_prompts: Count = DERIVED
    """Prompts of the split or of each held-out set. By default 256, or all that are held out."""
    samples: Count = 256
    """Responses to each prompt (n)."""
    k: tuple[int, ...] = ()
    """Sizes of pass@k, max@k and maj@k. By default 1 2 4 ... up to --samples."""
    split: Literal["test", "train"] = "test"
    """Held-out or training prompts, which repeat where a file has fewer."""
    against: Annotated[tuple[Path, ...], Path] = ()
    """Finished evaluations to compare with, by prompt where all settings are the same."""
    bootstrap: Count = 1000
    """Bootstrap resamples of the prompts, for intervals."""
    confidence: BetweenZeroAndOne = 0.95
    """Confidence of the intervals."""


@dataclass(frozen=True)
class EvaluatedDecoding(Decoding):
    """How responses are sampled; by papers on language models --temperature .6 --top-p .95."""

    temperature: NotNegative = 1.0
    """Sampling temperature; 0: greedy decoding, with one sample."""
    top_k: CountOrZero = 0
    """Sample from so many of the likeliest tokens; 0: from all."""
    min_p: UnitInterval = 0.0
    """Sample from tokens with at least this share of the greatest probability."""
    seed: Seed = DERIVED
    """Of the sampling and the bootstrap. By default the run's, else 0."""


@dataclass(frozen=True)
class EvaluationPlace(Place):
    """Where it is computed and written."""

    out: Folder = DERIVED
    """Folder of results, new or empty. By default evaluations/<name>-<time>."""
    task_seed: Seed = DERIVED
    """Of mazes and the order of training prompts. By default the run's, else 0."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Groups of options, which are views of `values`, and the parts that are chosen by name."""

    chosen: Any
    values: Mapping[str, Any]  # of every group and part, by flag
    # of each section's part, by the names in its signature: the flags, and the values
    flags: Mapping[str, Mapping[str, str]]
    parts: Mapping[str, Mapping[str, Any]]
    unused: frozenset[str]  # which nothing reads, such as --kl without --kl-coef
    places: Mapping[str, str] = field(default_factory=dict)  # "FILE, line N" of a file's options

    @classmethod
    def groups(cls) -> dict[str, Any]:
        return {x.name: x.type for x in fields(cls) if is_dataclass(x.type)}

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Those of all groups by name."""
        return {key: x for own in cls.groups().values() for key, x in options_of(own).items()}

    @classmethod
    def of(cls: type[AnyConfig], values: Mapping[str, Any], flags: Any, **others: Any) -> AnyConfig:
        groups = cls.groups().items()
        made = {key: own(**{x.name: values[x.name] for x in fields(own)}) for key, own in groups}
        parts = {key: {x: values[flag] for x, flag in own.items()} for key, own in flags.items()}
        return cls(values=values, flags=flags, parts=parts, **made, **others)

    def flat(self) -> dict[str, Any]:
        """Those that are used and have a value, in the types of JSON."""
        values = {name: as_json(x) for name, x in self.values.items() if name not in self.unused}
        return {name: x for name, x in values.items() if x is not None}

    def replace(self: AnyConfig, **options: Any) -> AnyConfig:
        """A copy with other values for those of these options that it has; the parts stay."""
        values = {name: options.get(name, x) for name, x in self.values.items()}
        return self.of(values, self.flags, unused=self.unused, places=self.places)


@dataclass(frozen=True, kw_only=True)
class Config(Options):
    """Reinforcement learning with verifiable rewards.

    Examples:
        python -m maxrl_fast.train --objective maxpo --k 4
        torchrun --nproc-per-node 8 -m maxrl_fast.train --task gsm8k --model DIR

    --version prints the versions instead. Your own data: --task dataset --help. Options of another
    objective: --objective NAME --help.
    """

    chosen: Chosen
    reward: Shaping
    sampling: SamplingOptions
    warm_start: WarmStartOptions
    optimizer: OptimizerOptions
    loss: LossOptions
    model: Model
    evaluation: Evaluation
    run: Run

    @property
    def tensor_parallel(self) -> int:
        return int(self.parts["rollout"].get("vllm_tensor_parallel", 1))

    def samples_of_engine(self, processes: int) -> int:
        """The most samples of a step in one of the engines of these processes."""
        prompts = -(-self.sampling.prompts // processes)
        return prompts * self.tensor_parallel * self.sampling.rollouts


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Options):
    """Sample many responses to each held-out prompt, and report pass@k, max@k and maj@k.

    CHECKPOINT is a Hugging Face directory, hf://ORG/NAME or hf://ORG/NAME@REVISION, or the folder
    of a run: its latest checkpoint; RUN/best has the highest mean reward. The task's options and
    the response limit are the run's, unless others are given. The folder of a finished evaluation
    is only compared with those of --against.

    Examples:
        python -m maxrl_fast.evaluate runs/maxpo-... --samples 256
        python -m maxrl_fast.evaluate DIR --task gsm8k --temperature .6 --top-p .95
        python -m maxrl_fast.evaluate evaluations/one --against evaluations/other
    """

    chosen: TaskAndEngine
    measure: Measure
    sampling: EvaluatedDecoding
    reward: Reward
    place: EvaluationPlace


def as_json(value: Any) -> Any:
    """Return a value in the types of JSON and TOML: several a list, one itself, none None."""
    if isinstance(value, tuple):
        return [*map(as_json, value)] if len(value) > 1 else as_json(value[0]) if value else None
    return str(value) if isinstance(value, Path) else value
