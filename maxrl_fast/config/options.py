"""Every option of a run, with its help and default, in the groups that --help shows."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro


def unset(metavar: str, default: str) -> Any:
    """For options whose default is worked out when the run starts: how --help shows them."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


@dataclass(frozen=True)
class ObjectiveOptions:
    """What is maximised."""

    objective: str = "maxpo"
    """maxpo, maxrl, grpo, dr_grpo, rloo, reinforce, pkpo, ...: `python -m maxrl_fast.objectives` lists them all."""
    k: Annotated[int | None, unset("INT", "4 where the objective has one")] = None
    """Size of max@k, in rollouts: 1 to N-1 for maxpo, 2 to N for pkpo; objectives without one take none."""
    order: Annotated[int | None, unset("INT", "N-1 for maxrl")] = None
    """Order at which maxrl is truncated, 1 to N-1; the other objectives take none."""
    scale_by_k: bool = False
    """Multiply advantages by k, so that the gradient is that of max@k itself (maxpo, expected_improvement)."""
    beta: Annotated[float | None, unset("FLOAT", "1 for pacs and pacs_paper")] = None
    """Scale of PACS's reward proxies, in reward per nat of log-ratio; the other objectives take none."""
    score: Annotated[Literal["rloo", "grpo", "dr_grpo", "naive"] | None, unset("STR", "rloo for pacs and pacs_paper")] = None
    """Score of a rollout in its group whose cross-entropy PACS minimises: rloo, grpo, dr_grpo or naive."""
    class_weight: Annotated[Literal["balanced", "none"] | None, unset("STR", "balanced for pacs and pacs_paper")] = None
    """PACS's weights of correct and wrong rollouts: balanced in every group, or none."""
    ref_reset_interval: Annotated[int | None, unset("INT", "50 for pacs_paper")] = None
    """Steps after which the policy becomes the reference of pacs_paper and the optimizer starts anew; 0: never."""
    estimator_options: str = ""
    """What else the advantage takes, as eps=1e-4,ddof=0 for grpo or quantile=0.3 for qae."""


@dataclass(frozen=True)
class TaskOptions:
    """Where prompts come from."""

    task: str = "maze"
    """maze; chain; gsm8k, math: from the Hugging Face hub, or --data; gym:NAME: a data set of reasoning-gym; dataset: prompts
    of --data, scored by --reward; or FILE.py:FUNCTION, which is dataset with this reward."""
    maze_size: int = 9
    """Cells along one side of a maze, odd, 5 to 31."""
    maze_strict: bool = False
    """A rollout must end on the goal; otherwise what comes after the goal is ignored."""
    chain_length: int = 64
    """States of the chain; the MaxPO paper has 1000."""
    gym_config: str = ""
    """Options of a data set of reasoning-gym as a JSON object, such as {"min_terms": 2, "max_terms": 2}."""
    data: Annotated[Path | None, unset("FILE", "none")] = None
    """JSON Lines or Parquet file of prompts: text, or chat messages; the other keys are arguments of the reward function."""
    test_data: Annotated[Path | None, unset("FILE", "none, a tenth of --data")] = None
    """The same, of held-out prompts."""
    hub: Annotated[str | None, unset("NAME[:CONFIG]", "that of gsm8k or math")] = None
    """Data set of the Hugging Face hub in place of --data; its train split is used."""
    prompt_key: Annotated[str | None, unset("STR", "prompt; question for gsm8k, problem for math")] = None
    """Key of the prompt in a line."""
    answer_key: Annotated[str | None, unset("STR", "answer")] = None
    """Key of the right answer in a line for gsm8k and math, perhaps a path as reward_model.ground_truth."""
    prompt_suffix: Annotated[str | None, unset("STR", "the papers' for gsm8k and math")] = None
    """What is added to prompts that are text."""
    plain_prompts: bool = False
    """Questions of gsm8k, math and gym are prompts as they are, even where the tokenizer has a chat template."""
    max_prompt_tokens: int = 1024
    """Longer prompts are left out."""
    reward: Annotated[str | None, unset("FILE:FUNCTION", "the task's own")] = None
    """Python function(prompt, response, **columns) -> float that scores responses, as rewards.py:length or package.module:f;
    it runs in processes of its own."""
    reward_threshold: Annotated[float | None, unset("FLOAT", "none")] = None
    """Rewards above this become 1, all others 0."""
    reward_workers: int = 2
    """Processes that run it."""
    reward_seconds: float = 5.0
    """Longest time of one call; then it is killed and counts as failed."""
    reward_memory_gb: float = 2.0
    """Most memory of one process, in 1e9 bytes."""
    max_reward_error_rate: float = 0.1
    """Stop when more than this fraction of a step's rewards fails; failed ones are left out of their groups."""


@dataclass(frozen=True)
class RolloutOptions:
    """How responses are sampled."""

    rollout: Literal["native", "vllm"] = "native"
    """Rollout engine: native, or vllm where that is installed."""
    prompts: int = 32
    """Prompts per step (G)."""
    rollouts: int = 16
    """Rollouts per prompt (N)."""
    dynamic_sampling: int = 0
    """Sample up to this many batches of prompts a step, to replace groups whose rewards are all equal (DAPO); 0: one batch."""
    max_new_tokens: Annotated[int | None, unset("INT", "the task's; 32 for 9x9 mazes")] = None
    """Longest response, in tokens."""
    temperature: float = 1.0
    """Sampling temperature, also that of the loss."""
    top_k: int = 0
    """Sample from this many of the likeliest tokens; 0: from all."""
    top_p: float = 1.0
    """Sample from the fewest likeliest tokens that have this much of the probability."""
    min_p: float = 0.0
    """Sample from tokens with at least this fraction of the likeliest one's probability."""
    decoder: Literal["auto", "cpp", "torch"] = "auto"
    """How the native engine decodes on a CPU: cpp (C++, in float32), torch (PyTorch, in the run's dtype), or auto: cpp."""
    kv_cache_gb: Annotated[float | None, unset("FLOAT", "an eighth of the memory, a quarter of a GPU's")] = None
    """Most memory for keys and values while sampling, in 1e9 bytes; samples that do not fit wait for others to end."""
    importance_cap: Annotated[float | None, unset("FLOAT", "2 with vllm, top_k, top_p or min_p, else off")] = None
    """Weigh each token by the training policy's probability over the one it was sampled with, at most this; 0: off."""


@dataclass(frozen=True)
class WarmStartOptions:
    """Supervised learning on solutions, before reinforcement learning."""

    sft_steps: Annotated[int | None, unset("INT", "100; 0 with --model")] = None
    """Steps."""
    sft_batch: int = 32
    """Solutions per step."""
    sft_lr: float = 2e-3
    """Peak learning rate; 10 steps of linear warm-up, then a cosine to a tenth."""
    sft_beta2: Annotated[float | None, unset("FLOAT", "that of --beta2")] = None
    """Decay of the second moment."""


@dataclass(frozen=True)
class OptimizerOptions:
    """Reinforcement learning updates (AdamW, float32 weights and moments)."""

    steps: int = 90
    """Steps."""
    lr: float = 3e-4
    """Peak learning rate."""
    lr_schedule: Literal["constant", "cosine"] = "cosine"
    """After the warm-up: constant, or a cosine to a tenth."""
    warmup_steps: int = 25
    """Steps of linear warm-up, while the second moments settle: with few, an early large gradient undoes the warm start."""
    updates_per_step: int = 1
    """Optimizer updates from each batch of rollouts, each on an equal share of its prompts."""
    weight_decay: float = 0.01
    """Decoupled weight decay, of matrices only."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.99
    """Decay of the second moment."""
    clip_grad: float = 0.1
    """Largest gradient norm; larger gradients are scaled down to it."""
    token_budget: int = 4096
    """Most tokens, prompts counted once, in one forward and backward pass; gradients of several passes add up."""
    checkpoint_activations: bool = False
    """Keep only each layer's input for the backward pass and compute the layer again there: less memory, a third more work."""


@dataclass(frozen=True)
class LossOptions:
    """The token loss."""

    loss: Annotated[Literal["ppo", "reinforce", "cispo", "gspo"] | None, unset("STR", "ppo; reinforce for pacs")] = None
    """Policy-gradient loss: ppo, reinforce, cispo or gspo; with one update per step the ratio is 1 and all have the same
    gradient."""
    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float | None, unset("FLOAT", "off")] = None
    """For negative advantages the loss is at most this times |A|."""
    aggregation: Annotated[str | None, unset("STR", "the objective's")] = None
    """How token losses are averaged: token_mean over the whole batch, seq_mean_token_mean (grpo), seq_mean_token_sum
    (pacs), or seq_sum_constant (dr_grpo)."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus, per nat."""
    kl_coef: float = 0.0
    """Coefficient of the divergence from the policy at the start, per nat."""
    kl: Literal["k1", "k2", "k3", "k3+"] = "k3"
    """Estimator of that divergence."""


@dataclass(frozen=True)
class ModelOptions:
    """The policy: a new decoder of the Qwen2 architecture, or a checkpoint of Qwen2, Qwen3, Llama 3 or SmolLM2."""

    model: Annotated[Path | None, unset("DIR", "none, a new model")] = None
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
    lora_rank: int = 0
    """Train low-rank adapters of this rank instead of the weights (LoRA), merged into the checkpoints; 0: off."""
    lora_alpha: float = 32.0
    """Adapters are scaled by lora_alpha / lora_rank."""
    lora_targets: str = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    """Linear layers that get adapters."""


@dataclass(frozen=True)
class EvaluationOptions:
    """Evaluation on held-out prompts, and what is reported."""

    eval_every: int = 0
    """Steps between evaluations; 0: only before and after."""
    eval_prompts: Annotated[int | None, unset("INT", "256, or all that are held out")] = None
    """Held-out prompts."""
    eval_samples: int = 16
    """Samples per prompt; pass@k is reported for k = 1, 2, 4, ... up to this."""
    keep_samples: int = 32
    """Responses of each evaluation, at most 4 to a prompt, that are kept in samples.jsonl to be looked at."""
    diagnose_every: int = 0
    """Steps between diagnoses, the norm of each prompt's own gradient beside its pass rate, in diagnostics.jsonl; each costs a
    second backward pass; 0: none."""
    log_to: Annotated[Literal["wandb", "trackio"] | None, unset("STR", "none")] = None
    """Send metrics to wandb or trackio too, beside TensorBoard's files."""
    log_project: str = "maxrl_fast"
    """Project there; a run has the name of its folder."""


@dataclass(frozen=True)
class RunOptions:
    """The run itself."""

    out: Annotated[Path | None, unset("DIR", "runs/<objective>-<time>")] = None
    """Folder of results, new or empty."""
    resume: Annotated[Path | None, unset("DIR", "none")] = None
    """Go on with the run in this folder from its newest whole checkpoint, with its own options unless others are given."""
    allow_changes: bool = False
    """Resume even with options that change what is computed."""
    config: Annotated[Path | None, unset("FILE", "none")] = None
    """TOML file of options, its keys these flags' names (maze_size = 11); a flag overrides the file."""
    seed: int = 0
    """Seed of the weights, the mazes and the sampling."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the computation; auto: bfloat16 on a GPU that has it, float32 elsewhere. Weights and
    moments are always float32."""
    compile: bool = False
    """Fuse each layer's operations before and after attention by torch.compile, in training and, where PyTorch decodes, in
    rollout; it takes a while at the first steps."""
    sharding: Literal["auto", "none", "full"] = "auto"
    """Between processes of torchrun: none (DDP, all weights on each), full (FSDP2, a part on each), or auto: full where the
    training state would take more than half of a GPU's memory."""
    threads: Annotated[int | None, unset("INT", "those this process may use")] = None
    """CPU threads."""
    save_every: int = 50
    """Steps between checkpoints, from which --resume goes on; 0: only after the warm start, at the end, and when stopped."""
    keep_checkpoints: int = 3
    """Newest checkpoints to keep, beside the best one and the one after the warm start; 0: all."""
    stall_limit: float = 1800.0
    """Seconds that a stage of a step may take without progress before the run writes the stacks of its processes and ends."""
    dry_run: bool = False
    """Print the resolved configuration with estimates of memory and work, and stop."""


@dataclass(frozen=True)
class Config:
    """Reinforcement learning with verifiable rewards.

    Examples: python -m maxrl_fast.train --objective maxpo --k 4

    torchrun --nproc-per-node 8 -m maxrl_fast.train --objective maxrl --model DIR
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
