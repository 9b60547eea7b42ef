"""Every option of a run, with its help and default, in the groups that --help shows: as parsed, and as resolved."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from maxrl_fast.errors import InputError
from maxrl_fast.model.hub import directory_of

AnyConfig = TypeVar("AnyConfig", bound="Config")
CorrectionName = Literal["none", "tis", "tis_sequence", "icepop", "mis", "sequence_mask"]
SCORE = r"(?i)(?:score\W*?|^\s*)([-+]?\d*\.?\d+)"  # of a judge, as in "Score: 8/10" or "8"


def unset(metavar: str, default: str) -> Any:
    """For options whose default is worked out when the run starts: how --help shows them."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"(default: {default})")


def _one_or_none(texts: list[str]) -> str:
    if len(texts) > 1:
        raise ValueError(f"takes one value or none, got {' '.join(texts)}")
    return "".join(texts)


# Of an option that is a flag alone, which gives "", or a flag with a value.
OPTIONAL_VALUE = PrimitiveConstructorSpec(
    nargs="*",
    metavar="[STR]",
    instance_from_str=_one_or_none,
    is_instance=lambda value: value is None or isinstance(value, str),
    str_from_instance=lambda value: [value] if value else [],
)


def as_json(value: Any) -> Any:
    """Return an option's value in the types of JSON and TOML: of several values a list, of one the value, of none None."""
    if isinstance(value, tuple):
        return [*value] if len(value) > 1 else value[0] if value else None
    return str(value) if isinstance(value, Path) else value


def several(value: Any) -> list[Any]:
    """Return the values that `as_json` made one value of."""
    return value if isinstance(value, list) else [] if value is None else [value]


def numbers_by_name(option: str, texts: Sequence[str]) -> dict[str, float]:
    """Return the numbers of an option whose values are NAME=VALUE.

    Raises:
        InputError: where one is not NAME=VALUE with a number, or is given twice.
    """
    numbers: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            raise InputError(f"{option} must be NAME=VALUE with a number, got {text!r:.80}") from None
        if name in numbers:
            raise InputError(f"{option} must have each name once, got {name} twice")
        numbers[name] = number
    return numbers


@dataclass(frozen=True)
class ObjectiveOptions:
    """What is maximised. Only the options that the objective takes are shown."""

    objective: str = "maxpo"
    """maxpo, maxrl, grpo, dr_grpo, rloo, reinforce, pkpo, pacs, ppo, ... (`python -m maxrl_fast.objectives` lists them all),
    FILE.py:FUNCTION, your own advantage, or the name of an installed one."""
    k: Annotated[int | None, unset("INT", "4")] = None
    """Size of max@k, in rollouts: 1 to N-1 for maxpo, 2 to N for pkpo."""
    order: Annotated[int | None, unset("INT", "N-1")] = None
    """Order at which maxrl is truncated, 1 to N-1."""
    eps: Annotated[float | None, unset("FLOAT", "the estimator's")] = None
    """Added to the divisor: the standard deviation of the rewards, or their mean."""
    ddof: Annotated[int | None, unset("INT", "the estimator's")] = None
    """1: sample standard deviation; 0: population standard deviation."""
    tau: Annotated[float | None, unset("FLOAT", "the estimator's")] = None
    """Weight of the log-probs in differential_smoothing."""
    alpha: Annotated[float | None, unset("FLOAT", "0.1")] = None
    """Weight of the tokens' entropies in rl_zvp, per nat."""
    bundle_size: Annotated[int | None, unset("INT", "5")] = None
    """Prompts in a bundle of riskpo; it divides --prompts."""
    quantile: Annotated[float | None, unset("FLOAT", "the estimator's")] = None
    """Quantile of the group's rewards that is the baseline of qae."""
    penalty: Annotated[float | None, unset("FLOAT", "the estimator's")] = None
    """Share of the reward that the most probable rollout of a group loses in unlikeliness."""
    score_range: Annotated[float | None, unset("FLOAT", "the estimator's")] = None
    """Half of the range in which hero puts the scores of rollouts that its verifier takes for the same, below .5."""
    correct_weight: Annotated[float | None, unset("FLOAT", "the estimator's")] = None
    """Weight of correct rollouts in w_reinforce."""
    clamp_delta: Annotated[float | None, unset("FLOAT", "0")] = None
    """Clamp probability ratios of responses to at most this distance from 1, in the off-policy objectives; 0: do not."""
    false_positive_rate: Annotated[float | None, unset("FLOAT", "must be given")] = None
    """Probability that the verifier accepts a wrong rollout."""
    false_negative_rate: Annotated[float | None, unset("FLOAT", "must be given")] = None
    """Probability that the verifier rejects a correct rollout."""
    beta: Annotated[float | None, unset("FLOAT", "1")] = None
    """Scale of PACS's reward proxies, in reward per nat of log-ratio."""
    score: Annotated[Literal["rloo", "grpo", "dr_grpo", "naive"] | None, unset("STR", "rloo")] = None
    """Score of a rollout in its group whose cross-entropy PACS minimises: rloo, grpo, dr_grpo or naive."""
    class_weight: Annotated[Literal["balanced", "none"] | None, unset("STR", "balanced")] = None
    """PACS's weights of correct and wrong rollouts: balanced in every group, or none."""
    ref_reset_interval: Annotated[int | None, unset("INT", "50")] = None
    """Steps after which the policy becomes the reference policy of pacs_paper and the optimizer restarts; 0: never."""
    gae_gamma: Annotated[float | None, unset("FLOAT", "1")] = None
    """Discount of the reward per token in the generalized advantage estimates of ppo."""
    gae_lambda: Annotated[float | None, unset("FLOAT", "1")] = None
    """Lambda of these estimates: 1 is the return minus the value; smaller relies more on the critic."""
    value_clip: Annotated[float | None, unset("FLOAT", "0.2")] = None
    """Values of ppo's critic gain nothing by moving further than this from those before the step; 0: no limit."""
    critic_lr: Annotated[float | None, unset("FLOAT", "2e-3; with --model 1e-5, with --lora-rank too 1e-4")] = None
    """Learning rate of ppo's critic, constant from the first step."""


@dataclass(frozen=True)
class TaskOptions:
    """Where prompts come from. Only the options that the task takes are shown."""

    task: str = "maze"
    """maze; chain; gsm8k or math, from the Hugging Face hub or --data; gym:NAME, a data set of reasoning-gym; dataset, prompts
    of --data scored by --reward; FILE.py:FUNCTION, which is dataset with this reward; FILE.py:CLASS, your own task; or the name
    of an installed one."""
    maze_size: int = 9
    """Cells along one side of a maze, odd, 5 to 31."""
    chain_length: int = 64
    """States of the chain; the MaxPO paper has 1000."""
    gym_config: str = ""
    """Options of a data set of reasoning-gym as a JSON object, such as {"min_terms": 2, "max_terms": 2}."""
    task_args: str = ""
    """Arguments of the class of your own task or an installed one as a JSON object, such as {"length": 6}."""
    data: Annotated[Path | None, unset("FILE", "none")] = None
    """JSON Lines or Parquet file of prompts: text, or chat messages; the other keys are arguments of the reward function."""
    test_data: Annotated[Path | None, unset("FILE", "none, a tenth of --data")] = None
    """JSON Lines or Parquet file of held-out prompts."""
    hub: Annotated[str | None, unset("NAME[:CONFIG]", "the task's")] = None
    """Data set of the Hugging Face hub in place of --data; its train split is used."""
    prompt_key: Annotated[str | None, unset("STR", "prompt; question for gsm8k, problem for math")] = None
    """Key of the prompt in a line."""
    answer_key: Annotated[str | None, unset("STR", "answer")] = None
    """Key of the right answer in a line, or a path of keys such as reward_model.ground_truth."""
    prompt_suffix: Annotated[str | None, unset("STR", "the papers' for gsm8k and math")] = None
    """Text added to prompts that are text."""
    plain_prompts: bool = False
    """Questions of gsm8k, math and gym are prompts as they are, even where the tokenizer has a chat template."""
    max_prompt_tokens: int = 1024
    """Longer prompts are left out."""
    allow_special_tokens: bool = False
    """Prompts may have the tokenizer's control tokens in their text, such as <|im_end|>; otherwise they are refused."""


@dataclass(frozen=True)
class RewardOptions:
    """How responses are scored."""

    reward: Annotated[tuple[str, ...], unset("FILE:FUNCTION ...", "the task's own")] = ()
    """Python functions(prompt, response, **columns) -> float that score responses, as rewards.py:length or package.module:f, in
    processes of their own; hf:DIR, a reward model (a Hugging Face sequence classifier); or openai:URL/MODEL, a judge behind an
    HTTP server with OpenAI's interface."""
    reward_weights: Annotated[tuple[float, ...], unset("FLOAT ...", "1 for each")] = ()
    """Weights of the functions in the reward, which is their weighted sum."""
    reward_threshold: Annotated[float | None, unset("FLOAT", "none")] = None
    """Rewards above this become 1, all others 0."""
    reward_workers: int = 2
    """Number of processes that run each function."""
    reward_concurrency: int = 16
    """Calls of an async function that one process makes at a time; requests to a judge at a time."""
    judge_template: Annotated[Path | None, unset("FILE", "none")] = None
    """Text file of the question to the judge, with {prompt}, {response} and other columns in braces."""
    judge_score: Annotated[str, unset("REGEX", "the last number behind the word score, or at the start")] = SCORE
    """The first group of the last match in the judge's reply is the score."""
    judge_rate: Annotated[float, unset("FLOAT", "0, no limit")] = 0.0
    """Largest number of requests to the judge in a second; 0: no limit."""
    reward_seconds: float = 5.0
    """Longest time of one call or request in seconds; a call that takes longer is killed and counts as failed."""
    reward_memory_gb: float = 2.0
    """Memory that one process may allocate after loading the function, in 1e9 bytes."""
    reward_isolation: Literal["process", "call"] = "process"
    """process: a process makes calls until one fails; call: each call has a fresh process, which no other call can change."""
    reward_env: Annotated[str, unset("NAME,NAME", "none")] = ""
    """Environment variables that the function needs besides a short list without keys and tokens, such as OPENAI_API_KEY. The
    first whose name ends with KEY or TOKEN is sent to a judge."""
    max_reward_error_rate: float = 0.1
    """Stop when more than this fraction of a step's rewards fails; failed ones are left out of their groups."""


@dataclass(frozen=True)
class ShapingOptions:
    """What training makes of the rewards; evaluation leaves them as they are."""

    labels: Literal["given", "vote", "logprob", "mean_logprob", "rlpr"] = "given"
    """given: responses have the reward of the task or of --reward; vote: 1 for the answer that most responses to the prompt
    give, 0 for others, without any label (SRT, TTRL); logprob: the policy's log-prob of the reference answer behind the
    response's reasoning; mean_logprob: its mean over the answer's tokens; rlpr: the reward of RLPR."""
    overlong_buffer: int = 0
    """DAPO's overlong punishment: responses lose reward in the last tokens before --max-new-tokens, this many, the more the
    longer they are; 0: none."""
    overlong_penalty: float = 1.0
    """Reward that a response of --max-new-tokens tokens loses."""


@dataclass(frozen=True)
class RolloutOptions:
    """How responses are sampled."""

    rollout: str = "native"
    """Rollout engine: native; vllm where that is installed; FILE.py:CLASS, your own; or the name of an installed one."""
    vllm_tensor_parallel: int = 1
    """Number of neighbouring processes of torchrun that share one vLLM engine; it divides their number."""
    vllm_url: Annotated[str | None, unset("URL", "vLLM runs in the trainer's processes")] = None
    """Address of a vLLM server that samples, such as http://127.0.0.1:8000; it must see this machine's TMPDIR."""
    prompts: int = 32
    """Prompts per step (G)."""
    rollouts: int = 16
    """Rollouts per prompt (N)."""
    dynamic_sampling: int = 0
    """Sample up to this many batches of prompts a step, to replace groups whose rewards are all equal (DAPO); 0: one batch."""
    max_new_tokens: Annotated[int | None, unset("INT", "the task's; 32 for 9x9 mazes")] = None
    """Response limit, in tokens."""
    temperature: float = 1.0
    """Temperature of the sampling and of the loss."""
    top_p: float = 1.0
    """Nucleus (top-p) sampling: sample from the most probable tokens that have this much of the probability; 1: from all."""
    kv_cache_gb: Annotated[float | None, unset("FLOAT", "an eighth of the memory, a quarter of a GPU's")] = None
    """KV-cache limit of the rollout engine, in 1e9 bytes, on a GPU with the tensors of a decoding step; samples that do not fit
    wait for others to end."""
    correction: Annotated[CorrectionName | None, unset("STR", "none with native or the objective's own loss, else tis")] = None
    """What corrects for a rollout engine whose probabilities are not the trainer's: none, tis, tis_sequence, icepop, mis or
    sequence_mask (`python -m maxrl_fast.objectives` has their formulas)."""
    importance_cap: Annotated[float | None, unset("FLOAT", "2 for tis and tis_sequence")] = None
    """Largest importance weight, of a token for tis and of a response for tis_sequence; without --correction it asks for tis,
    and 0 for none."""
    correction_options: Annotated[tuple[str, ...], unset("NAME=VALUE ...", "the correction's own")] = ()
    """Numbers of the correction: low and high of icepop and mis, delta of sequence_mask."""

    def correction_numbers(self) -> dict[str, float]:
        """Return the numbers of the correction by name; raises as `numbers_by_name`."""
        return numbers_by_name("correction_options", self.correction_options)


@dataclass(frozen=True)
class WarmStartOptions:
    """Supervised learning on solutions, before reinforcement learning."""

    sft_data: Annotated[Path | None, unset("FILE", "none, the task's solutions")] = None
    """JSON Lines or Parquet file of demonstrations: each line has a prompt, as in --data, and a response; or messages, of which
    the last is the assistant's."""
    sft_steps: Annotated[int | None, unset("INT", "100; with --sft-data an epoch; with --model alone 0")] = None
    """Number of steps of supervised learning; 0: none."""
    sft_batch: int = 32
    """Solutions per step."""
    sft_lr: Annotated[float | None, unset("FLOAT", "2e-3; with --model 1e-5, with --lora-rank too 1e-4")] = None
    """Peak learning rate; 10 steps of linear warm-up, then a cosine to a tenth."""
    sft_beta2: Annotated[float | None, unset("FLOAT", "--beta2")] = None
    """AdamW's decay of the second moment in the warm start."""


@dataclass(frozen=True)
class OptimizerOptions:
    """Reinforcement learning updates (AdamW, float32 weights and moments)."""

    steps: int = 90
    """Number of reinforcement learning steps."""
    lr: Annotated[float | None, unset("FLOAT", "3e-4; with --model 1e-6, with --lora-rank too 1e-5")] = None
    """Peak learning rate."""
    lr_schedule: Literal["constant", "cosine"] = "cosine"
    """Learning rate after the warm-up: constant, or a cosine to a tenth of the peak."""
    warmup_steps: int = 25
    """Steps of linear warm-up, while the second moments settle: with few, an early large gradient undoes the warm start."""
    updates_per_step: int = 1
    """Optimizer updates from each batch of rollouts, each on an equal share of its prompts."""
    weight_decay: float = 0.01
    """Decoupled weight decay, on matrices only."""
    beta2: float = 0.99
    """AdamW's decay of the second moment."""
    clip_grad: float = 0.1
    """Largest gradient norm; larger gradients are scaled down to it."""
    token_budget: int = 4096
    """Token limit, prompts counted once, of one forward and backward pass; gradients of several passes add up."""
    checkpoint_activations: bool = False
    """Keep only each layer's input for the backward pass and recompute the layer there: less memory, a third more work."""


@dataclass(frozen=True)
class LossOptions:
    """The token loss."""

    loss: Annotated[str | None, unset("STR", "ppo; reinforce for pacs, verifree and the off-policy objectives")] = None
    """Policy-gradient loss: ppo, reinforce, cispo, gspo, sapo, dppo, ... (`python -m maxrl_fast.objectives` lists them all),
    an installed loss, or FILE.py:FUNCTION. With one update per step the ratio is 1, and the built-in losses have the same
    gradient, except for the tokens that clip_cov, lp_reg and simko treat differently."""
    loss_options: Annotated[tuple[str, ...], unset("NAME=VALUE ...", "the loss's own")] = ()
    """Numbers of the loss, such as tau_negative=1.1 of sapo; `python -m maxrl_fast.objectives` lists them."""
    clip_low: float = 0.2
    """The ratio is clipped below 1 - clip_low, in ppo, cispo, gspo, luspo, clip_cov and simko."""
    clip_high: float = 0.2
    """The ratio is clipped above 1 + clip_high, in ppo, cispo, gspo, luspo, clip_cov and simko."""
    aggregation: Annotated[str | None, unset("STR", "the objective's")] = None
    """How token losses are averaged: token_mean over the whole batch, seq_mean_token_mean (grpo), seq_mean_token_sum
    (pacs, verifree, the off-policy objectives, luspo), or seq_sum_constant (dr_grpo)."""
    top_entropy: float = 1.0
    """Share of an update's tokens, those with the highest entropies, that have a policy gradient (0.2 in the 80/20 paper);
    costs one more forward pass. The others still count in the average. 1: all."""
    entropy_coef: float = 0.0
    """Coefficient of the entropy bonus, per nat."""
    siren: float = 0.0
    """Coefficient of SIREN's term, per nat squared: the squared distance of the entropy from its value at the start, over the
    tokens with high entropy and their likely continuations alone (0.005 in the paper); 0: none."""
    kl_coef: float = 0.0
    """Coefficient of the divergence from the reference policy, the policy when reinforcement learning begins, per nat."""
    kl: Literal["k1", "k2", "k3", "k3+"] = "k3"
    """Estimator of the divergence from the reference policy."""

    def own_numbers(self) -> dict[str, float]:
        """Return the options of the loss by name; raises as `numbers_by_name`."""
        return numbers_by_name("loss_options", self.loss_options)


@dataclass(frozen=True)
class ModelOptions:
    """The policy: a new decoder of the Qwen2 architecture, or a checkpoint of a decoder that transformers has."""

    model: Annotated[str | None, unset("MODEL", "none, a new model")] = None
    """Hugging Face checkpoint to start from: a directory, or hf://ORG/NAME or hf://ORG/NAME@REVISION of the hub. The sizes
    below are then its own."""
    model_backend: Literal["auto", "native", "transformers"] = "auto"
    """What runs the layers of --model: native (Qwen2, Qwen3, Llama 3, SmolLM2), transformers (docs/models.md lists which), or
    auto: native where it has the model."""
    hidden_size: int = 128
    """Size of the hidden states."""
    intermediate_size: int = 256
    """Size of the feed-forward layers."""
    layers: int = 4
    """Number of layers."""
    heads: int = 8
    """Number of query heads; the size of a head is hidden_size / heads."""
    kv_heads: int = 4
    """Number of key/value heads."""
    rope_theta: float = 100.0
    """Base of the rotary embedding. Short prompts are learned faster with a small base; the MaxRL paper has 1e6."""
    lora_rank: int = 0
    """Train low-rank adapters of this rank instead of the weights (LoRA), merged into the checkpoints; 0: off."""
    lora_alpha: float = 32.0
    """Adapters are scaled by lora_alpha / lora_rank."""
    lora_targets: str = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    """Linear layers that get adapters."""

    @property
    def directory(self) -> Path | None:
        """The directory of --model, with a configuration and a tokenizer; weights of the hub are downloaded when needed."""
        return None if self.model is None else directory_of(self.model)


@dataclass(frozen=True)
class EvaluationOptions:
    """Evaluation on held-out prompts, and what is reported."""

    eval_every: int = 0
    """Steps between evaluations; 0: only before the first step and after the last."""
    eval_prompts: Annotated[int | None, unset("INT", "256, or all that are held out")] = None
    """Number of held-out prompts."""
    eval_samples: int = 16
    """Samples per prompt; pass@k is reported for k = 1, 2, 4, ... up to this."""
    diagnose_every: int = 0
    """Steps between lines of diagnostics.jsonl, each prompt's pass rate and the norm of its own gradient, which cost a second
    backward pass; 0: none."""
    keep_rollouts: int = 8
    """Rollouts of each training step that rollouts.jsonl keeps, with their rewards and advantages: whole groups as far as this
    number goes, and many of the same prompts in each epoch of a data set; 0: none."""
    log_to: Annotated[Literal["wandb", "trackio"] | None, unset("STR", "none")] = None
    """Send metrics to wandb or trackio too, beside TensorBoard's files."""


@dataclass(frozen=True)
class RunOptions:
    """The run itself."""

    out: Annotated[Path | None, unset("DIR", "runs/<objective>-<time>")] = None
    """Folder of results: new, empty, or of a run that ended before its first step."""
    resume: Annotated[Path | None, unset("DIR", "none")] = None
    """Resume the run in this folder from its newest undamaged checkpoint, with its own options unless others are given; auto:
    the run in --out, or a new one if there is none yet, so that the same command starts a run and restarts it."""
    allow_changes: bool = False
    """Resume even if other options or files than the run's change what is computed."""
    config: Annotated[Path | None, unset("FILE", "none")] = None
    """TOML file of options; the keys are the names of the flags (maze_size = 11). A flag overrides the file."""
    seed: int = 0
    """Seed of new weights, of the task's prompts and of the sampling."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to compute on."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the computation; auto: bfloat16 on a GPU that has it, float32 elsewhere. Weights and moments are always
    float32."""
    compile: bool = False
    """Fuse each layer's operations before and after attention by torch.compile, in training and in PyTorch's decoding. The
    first steps take longer."""
    sharding: Literal["auto", "none", "full"] = "auto"
    """How torchrun's processes divide the weights: none (DDP, all weights on each), full (FSDP2, a part on each), or auto: full
    where the training state would take more than half of a GPU's memory."""
    threads: Annotated[int | None, unset("INT", "those this process may use")] = None
    """Number of CPU threads."""
    save_every: int = 50
    """Steps between checkpoints; 0: only after the warm start, at the end, and when stopped."""
    keep_checkpoints: int = 3
    """Newest checkpoints to keep, beside the best one and the one after the warm start; 0: all."""
    stall_limit: float = 1800.0
    """Seconds that a stage of a step may take without progress; then the run prints the stacks of its processes and ends."""
    dry_run: Annotated[str | None, OPTIONAL_VALUE, unset("[GPUSxGB]", "off")] = None
    """Print the resolved configuration with estimates of memory and work, and stop. Without a value they are for this machine
    and torchrun's processes; with 8x80 for 8 GPUs of 80 GB (1e9 bytes) each, which this machine need not have."""


@dataclass(frozen=True)
class Config:
    """Reinforcement learning with verifiable rewards.

    Examples: python -m maxrl_fast.train --objective maxpo --k 4

    torchrun --nproc-per-node 8 -m maxrl_fast.train --objective maxrl --task gsm8k --model DIR

    --version prints the versions instead.
    """

    objective: ObjectiveOptions = field(default_factory=ObjectiveOptions)
    task: TaskOptions = field(default_factory=TaskOptions)
    reward: RewardOptions = field(default_factory=RewardOptions)
    shaping: ShapingOptions = field(default_factory=ShapingOptions)
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
            option.name: as_json(value)
            for group in dataclasses.fields(self)
            for option in dataclasses.fields(getattr(self, group.name))
            for value in [getattr(getattr(self, group.name), option.name)]
        }

    def replace(self: AnyConfig, **options: Any) -> AnyConfig:
        """A copy with other values for some options, by flag name."""
        changed = {}
        for group in dataclasses.fields(self):
            options_of_group = {option.name for option in dataclasses.fields(getattr(self, group.name))}
            if own := {name: options[name] for name in options_of_group & options.keys()}:
                changed[group.name] = dataclasses.replace(getattr(self, group.name), **own)
        return dataclasses.replace(self, **changed)


@dataclass(frozen=True, kw_only=True)
class ResolvedRollout(RolloutOptions):
    max_new_tokens: int
    correction: CorrectionName

    def samples_of_engine(self, processes: int) -> int:
        """Return the most samples of a step that one rollout engine is given, with this many processes."""
        return -(-self.prompts // processes) * self.vllm_tensor_parallel * self.rollouts


@dataclass(frozen=True, kw_only=True)
class ResolvedWarmStart(WarmStartOptions):
    sft_steps: int
    sft_lr: float
    sft_beta2: float


@dataclass(frozen=True, kw_only=True)
class ResolvedOptimizer(OptimizerOptions):
    lr: float


@dataclass(frozen=True, kw_only=True)
class ResolvedLoss(LossOptions):
    loss: str
    aggregation: str


@dataclass(frozen=True, kw_only=True)
class ResolvedEvaluation(EvaluationOptions):
    eval_prompts: int


@dataclass(frozen=True, kw_only=True)
class ResolvedRun(RunOptions):
    out: Path
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    threads: int


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(Config):
    """A checked configuration whose defaults are all worked out."""

    rollout: ResolvedRollout
    warm_start: ResolvedWarmStart
    optimizer: ResolvedOptimizer
    loss: ResolvedLoss
    evaluation: ResolvedEvaluation
    run: ResolvedRun
