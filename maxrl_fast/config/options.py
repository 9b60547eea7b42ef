"""The options of all runs, in the groups of --help. Parts that are chosen by name (parts.py) have
their own, beside their code."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch

from maxrl_fast.algorithms.options import (
    BelowOne,
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
    Share,
    UnitInterval,
    options_of,
)
from maxrl_fast.model.checkpoint import directory_of
from maxrl_fast.ops.divergence import BETA
from maxrl_fast.ops.loss_kernel import Aggregation
from maxrl_fast.rewards.options import Reward
from maxrl_fast.training.schedule import ScheduleOptions

AnyConfig = TypeVar("AnyConfig", bound="Options")
DERIVED: Any = None  # a default that resolving replaces


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


@dataclass(frozen=True)
class Shaping(Reward):
    """How responses are scored."""

    reward_source: Literal["given", "vote", "logprob", "mean_logprob", "rlpr"] = "given"
    """given: by the task or --reward; vote: 1 for the prompt's most frequent answer, else 0;
    logprob: the policy's, of the reference answer after the reasoning; mean_logprob: its mean over
    tokens; rlpr: RLPR's."""
    overlong_buffer: CountOrZero = 0
    """DAPO's overlong punishment, in the last tokens before --max-new-tokens; 0: none."""
    overlong_penalty: Positive = 1.0
    """Reward that a response of --max-new-tokens tokens loses."""
    truncated: Literal["keep", "zero", "mask"] = "keep"
    """Responses cut by the length limit: as others, with reward 0, or out of the loss."""


@dataclass(frozen=True)
class Decoding:
    """How responses are sampled."""

    max_new_tokens: Count = DERIVED
    """Response limit in tokens. By default the task's; 32 for 9x9 mazes."""
    temperature: Positive = 1.0
    """Temperature of the sampling and of the loss."""
    top_p: Share = 1.0
    """Sample from the likeliest tokens with this sum of probabilities; 1: from all."""
    kv_cache_gb: Positive | None = None
    """KV cache of the engine, in 1e9 bytes. By default an eighth of the memory, of a GPU's a
    quarter."""


@dataclass(frozen=True)
class Sampling(ScheduleOptions, Decoding):
    """How responses are sampled."""

    ahead: Annotated[int, Limit("an integer from 0 to 4", lambda x: 0 <= x <= 4)] = 0
    """Sample while the policy trains, from weights this many updates old; 0: do not."""

    def samples_of_engine(self, processes: int, tensor_parallel: int) -> int:
        """The most samples of a step in one of the engines of these processes."""
        return -(-self.prompts // processes) * tensor_parallel * self.rollouts


@dataclass(frozen=True)
class WarmStart:
    """Supervised learning on solutions, at first."""

    sft_steps: CountOrZero = DERIVED
    """Steps. By default 100; with --sft-data an epoch; with --model alone 0."""
    sft_batch: Count = 32
    """Solutions per step."""
    sft_lr: Positive = DERIVED
    """Peak learning rate. By default 2e-3; with --model 1e-5, with --lora-rank too 1e-4."""
    sft_beta2: BelowOne = DERIVED
    """As --beta2, which is the default."""


@dataclass(frozen=True)
class Optimizer:
    """Reinforcement learning updates (AdamW, float32 weights and moments)."""

    steps: CountOrZero = 200
    """Steps of reinforcement learning."""
    lr: Positive = DERIVED
    """Peak learning rate. By default 3e-4; with --model 1e-6, with --lora-rank too 1e-5."""
    lr_schedule: Literal["constant", "cosine"] = "cosine"
    """After the warm-up constant, or to a tenth of the peak."""
    warmup_steps: CountOrZero = 25
    """Steps of linear warm-up."""
    updates_per_step: Count = 1
    """Optimizer updates a step, each on an equal share of the prompts."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay, on matrices only."""
    beta2: BelowOne = 0.99
    """AdamW's decay of the second moment."""
    clip_grad: Positive = 0.1
    """Largest gradient norm; larger ones are scaled down."""
    token_budget: Count = 4096
    """Most tokens, prompts counted once, of a pass; gradients add up."""
    checkpoint_activations: bool = False
    """Recompute each layer in the backward pass: less memory, a third more work."""


@dataclass(frozen=True)
class Loss:
    """Terms of the loss."""

    aggregation: Aggregation = DERIVED
    """How token losses are averaged: token_mean over the batch, seq_mean_token_mean (grpo),
    seq_mean_token_sum (pacs, luspo) or seq_sum_constant (dr_grpo). By default the objective's."""
    top_entropy: Share = 1.0
    """Share of tokens, those of highest entropy, with a policy gradient (80/20 paper: 0.2)."""
    entropy_coef: NotNegative = 0.0
    """Coefficient of the entropy bonus, per nat."""
    siren: NotNegative = 0.0
    """Penalty that keeps the entropy of uncertain tokens near its start (paper: 0.005)."""
    kl_coef: NotNegative = 0.0
    """Coefficient of the divergence from the reference policy, per nat."""
    kl: Literal["k1", "k2", "k3", "k3+", "full"] = "k3"
    """Its estimator; full: the exact one, of the whole vocabulary."""
    divergence: Literal["reverse", "forward", "jsd"] = "reverse"
    """Of --kl full: KL(policy || teacher), KL(teacher || policy) or Jensen-Shannon's."""
    jsd_beta: Annotated[float, BETA] = 0.5
    """The teacher's weight in --divergence jsd."""
    reference: str | None = None
    """Reference policy or teacher: a checkpoint with the policy's tokenizer. By default the policy
    when reinforcement learning begins."""
    teacher_prompt: Code | None = None
    """What the reference policy, by default that of each step, reads in place of the prompt: the
    question and its answer, a correct response of the group (sibling) or what the check of the
    response said (feedback); or FILE.py:f(prompt, **columns) -> text or messages."""
    teacher_template: str | None = None
    """Text of answer, sibling or feedback, with {prompt} and {text}, in place of the default."""
    teacher_ema: BelowOne = 0.0
    """With --teacher-prompt the teacher is a copy that moves this share towards the policy in each
    update (SDPO: 0.05); 0: the policy itself."""


@dataclass(frozen=True)
class Model:
    """The policy: a new decoder of Qwen2's architecture, or a checkpoint of transformers."""

    model: str | None = None
    """Hugging Face directory, hf://ORG/NAME or hf://ORG/NAME@REVISION. By default a new model."""
    model_backend: Literal["auto", "native", "transformers"] = "auto"
    """What runs the layers of --model; auto: native for Qwen2, Qwen3, Llama 3 and SmolLM2."""
    hidden_size: Count = 128
    """Size of the hidden states."""
    intermediate_size: Count = 256
    """Size of the feed-forward layers."""
    layers: Count = 4
    """Layers."""
    heads: Count = 8
    """Query heads, each of size hidden_size / heads."""
    kv_heads: Count = 4
    """Key/value heads."""
    rope_theta: Positive = 100.0
    """Base of the rotary embedding; the MaxRL paper has 1e6."""
    lora_rank: CountOrZero = 0
    """Train adapters of this rank (LoRA), merged in checkpoints; 0: the weights."""
    lora_alpha: Positive = 32.0
    """Adapters are scaled by lora_alpha / lora_rank."""
    lora_targets: str = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    """Linear layers that get adapters."""

    @property
    def directory(self) -> Path | None:
        """Of --model; the hub's weights are downloaded when needed."""
        return None if self.model is None else directory_of(self.model)


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
    def of(
        cls: type[AnyConfig],
        values: Mapping[str, Any],
        flags: Mapping[str, Mapping[str, str]],
        **others: Any,
    ) -> AnyConfig:
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
        return self.of(values, flags=self.flags, unused=self.unused, places=self.places)


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
    sampling: Sampling
    warm_start: WarmStart
    optimizer: Optimizer
    loss: Loss
    model: Model
    evaluation: Evaluation
    run: Run


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
