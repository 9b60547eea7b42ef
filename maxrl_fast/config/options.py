"""Every option of a run, with its help and default, in the groups that --help shows: as parsed, and
as resolved.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from maxrl_fast.algorithms.options import (
    DERIVED,
    BelowOne,
    Count,
    CountOrZero,
    Default,
    Finite,
    Help,
    Limit,
    NotNegative,
    Option,
    Positive,
    Refusal,
    Seed,
    Share,
    UnitInterval,
    multiple_of,
)
from maxrl_fast.config import conditions as when
from maxrl_fast.config.metadata import Groups, LessMemory, Note, Resume, as_list, options_of
from maxrl_fast.errors import InputError
from maxrl_fast.model.hub import directory_of
from maxrl_fast.ops.loss_terms import Aggregation
from maxrl_fast.runtime.loading import load_code
from maxrl_fast.training.objectives.registry import OBJECTIVES, objective_options
from maxrl_fast.training.schedule import Stopping

AnyConfig = TypeVar("AnyConfig", bound="Config")
CorrectionName = Literal["none", "tis", "tis_sequence", "icepop", "mis", "sequence_mask"]
# options of runs and of evaluations
Device = Annotated[Literal["auto", "cpu", "cuda"], Help("Device to compute on."), Resume.ROUNDING]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"],
    Help("Dtype of the computation; auto: bfloat16 on a GPU that has it, float32 elsewhere."),
]
Threads = Annotated[
    Count,
    Limit("at most 1024", lambda x: x <= 1024),
    Help("Number of CPU threads."),
    Default("those this process may use"),
    Resume.ROUNDING,
]
EngineName = Annotated[
    str,
    Help(
        "Rollout engine: native; vllm where that is installed; FILE.py:CLASS or "
        "package.module:CLASS, your own."
    ),
    Note.MAY_NAME_CODE,
]
CacheLimit = Annotated[
    Positive | None,
    Help(
        "KV-cache limit of the rollout engine, in 1e9 bytes, on a GPU with the tensors of a "
        "decoding step; samples that do not fit wait for others to end."
    ),
    Default("an eighth of the memory, a quarter of a GPU's"),
]
TopP = Annotated[
    Share,
    Help(
        "Nucleus (top-p) sampling: sample from the most probable tokens that have this much of "
        "the probability; 1: from all."
    ),
]

HUB_SETS = "NAME[:CONFIG][@SPLIT][=INT] ..."


def is_day(text: str) -> bool:
    try:
        return bool(date.fromisoformat(text))
    except ValueError:
        return False


def numbers_by_name(option: str, texts: Iterable[str]) -> dict[str, float]:
    """Return the numbers of an option whose values are NAME=VALUE."""
    numbers: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            raise InputError(
                f"{option} must be NAME=VALUE with a number, got {text!r:.80}"
            ) from None
        if name in numbers:
            raise InputError(f"{option} must have each name once, got {name} twice")
        numbers[name] = number
    return numbers


@dataclass(frozen=True)
class ObjectiveOptions:
    """What is maximised. Only the options that the objective uses are shown."""

    objective: Annotated[str, Note.MAY_NAME_CODE] = "maxpo"
    """maxpo, maxrl, grpo, dr_grpo, rloo, reinforce, pkpo, pacs, ppo, ... (`python -m
    maxrl_fast.objectives` lists them all); FILE.py:FUNCTION or package.module:FUNCTION, your own
    advantage."""
    options: Mapping[str, Any] = field(default_factory=dict)  # of its function, by name

    @property
    def short_name(self) -> str:
        """The name without a file."""
        return self.objective.rpartition(":")[2]


@dataclass(frozen=True)
class TaskOptions:
    """Where prompts come from. Only the options that the task uses are shown."""

    task: Annotated[str, Note.MAY_NAME_CODE] = "maze"
    """maze; chain; guess; gsm8k or math, from the Hugging Face hub or --data; code, Python programs
    that are run against tests; gym:NAME, a data set of reasoning-gym; dataset, prompts of --data
    scored by --reward; FILE.py:FUNCTION, which is dataset with this reward; FILE.py:CLASS or
    package.module:CLASS, your own task."""
    maze_size: Annotated[
        int,
        when.MAZE,
        Limit(
            "an odd number from 7 to 31 (there are four 5x5 mazes, three to train on and one held "
            "out)",
            lambda x: 7 <= x <= 31 and x % 2 == 1,
        ),
    ] = 9
    """Cells along one side of a maze, odd, 7 to 31. There are 192 mazes of 7x7, of which 38 are
    held out, and 100,352 of 9x9."""
    chain_length: Annotated[int, when.CHAIN] = 64
    """States of the chain; the MaxPO paper has 1000."""
    gym_config: Annotated[str, when.GYM_TASK, Note.JSON] = ""
    """Options of a data set of reasoning-gym as a JSON object, such as {"min_terms": 2,
    "max_terms": 2}.
    """
    task_args: Annotated[str, when.CUSTOM_TASK, Note.JSON] = ""
    """Arguments of your own task's class as a JSON object, such as {"length": 6}.
    """
    data: Annotated[tuple[Path, ...], Default("none", "FILE ..."), when.DATASET] = ()
    """JSON Lines or Parquet files of prompts: text, or chat messages; the other keys are arguments
    of the reward function.
    """
    hub: Annotated[tuple[str, ...], Default("the task's", HUB_SETS), when.DATASET] = ()
    """Data sets of the hub, by their split train. NAME=3 repeats every line three times per epoch;
    works after a file too."""
    test_data: Annotated[tuple[Path, ...], Default("none", "FILE ..."), when.DATASET] = ()
    """Held-out prompts; each file is a separate set. Without them and --test-hub: the
    test splits of --hub, or else a tenth of the training prompts."""
    test_hub: Annotated[tuple[str, ...], Default("the task's", HUB_SETS), when.DATASET] = ()
    """Held-out sets of the hub, by their split test, or by a name: aime24, aime25, beyond_aime,
    amc23, minerva, olympiad, math500, gsm8k, gsm8k_platinum, gpqa_diamond. =INT, also of a
    file: its samples per prompt."""
    allow_overlap: Annotated[bool, when.DATASET] = False
    """Train on prompts that are held out too, by their tokens; otherwise training leaves them out.
    """
    where: Annotated[
        tuple[str, ...],
        Default("all lines", "NAME=VALUE ..."),
        when.DATASET,
        Refusal(
            "where must be NAME=VALUE, such as level=1, got {where}",
            lambda c: not all(x.partition("=")[0] and "=" in x for x in as_list(c["where"])),
        ),
    ] = ()
    """Train only on the lines with this value in column NAME, or one of these. A training set
    without the column keeps all its lines; held-out sets do too."""
    prompt_key: Annotated[
        str | None, Default("prompt; question for gsm8k and code, problem for math"), when.DATASET
    ] = None
    """Key of the prompt in a line."""
    answer_key: Annotated[
        str | None, Default("answer; input_output for code"), when.WITH_ANSWERS
    ] = None
    """Key of the right answer in a line, or a path of keys such as reward_model.ground_truth."""
    prompt_suffix: Annotated[
        str | None, Default("the papers' for gsm8k and math"), when.READS_TEXT
    ] = None
    """Text added to prompts that are text."""
    system_prompt: Annotated[
        str | None, Default("the chat template's own, if any", "TEXT"), when.READS_TEXT
    ] = None
    """System message of chats that have none; "" is an empty one."""
    plain_prompts: Annotated[bool, when.READS_TEXT] = False
    """Questions of gsm8k, math and gym are prompts as they are, even where the tokenizer has a chat
    template.
    """
    max_prompt_tokens: Annotated[Count, when.READS_TEXT] = 1024
    """Longer prompts are left out."""
    allow_special_tokens: Annotated[bool, when.READS_TEXT] = False
    """Prompts may have the tokenizer's control tokens in their text, such as <|im_end|>; otherwise
    they are refused.
    """
    chat_template: Annotated[
        Path | None, Default("the tokenizer's own", "FILE"), when.READS_TEXT
    ] = None
    """File of a chat template in Jinja, which checkpoints have too."""
    chat_template_kwargs: Annotated[str, when.READS_TEXT, Note.JSON] = ""
    """Arguments of the chat template as a JSON object, such as {"enable_thinking": false}."""
    template_date: Annotated[
        str | None,
        Default("the day on which the run starts", "YYYY-MM-DD"),
        when.READS_TEXT,
        Refusal(
            "template_date must be a day such as 2026-11-26, got {template_date}",
            lambda c: c["template_date"] and not is_day(c["template_date"]),
        ),
    ] = None
    """What the clock of a chat template shows, if it has one."""
    stop: Annotated[
        tuple[str, ...],
        Default("none", "TEXT ..."),
        when.READS_TEXT,
        Refusal("stop must not be an empty text", lambda c: "" in as_list(c["stop"])),
    ] = ()
    """Texts that end a response, besides the stop tokens; the text is part of it. One that is no
    single token is found after sampling, and what follows it is dropped."""
    environment: Annotated[
        str | None, Default("none", "FILE:CLASS"), when.DATASET, Note.MAY_NAME_CODE
    ] = None
    """Class of environments with tools, as TRL's environment_factory takes it, for episodes of
    several turns: reset(**columns), public methods as tools, get_reward(); in --reward-workers
    processes (docs/episodes.md)."""
    max_turns: Annotated[Count, when.WITH_ENVIRONMENT] = 8
    """Most turns of an episode; --max-new-tokens limits all of its tokens, those of the environment
    included.
    """


@dataclass(frozen=True)
class RewardOptions:
    """How responses are scored."""

    reward: Annotated[
        tuple[str, ...],
        Default("the task's own", "FILE:FUNCTION ..."),
        when.TASK_IS_NO_REWARD,
        Note.NAMES_CODE,
    ] = ()
    """Python functions(prompt, response, **columns) -> float that score responses, as
    rewards.py:length or package.module:f, in separate processes; or hf:DIR, a reward model (a
    Hugging Face sequence classifier)."""
    reward_weights: Annotated[
        tuple[float, ...],
        Default("1 for each", "FLOAT ..."),
        when.WITH_REWARDS,
        Refusal(
            "reward_weights must be a number for each reward, got {reward_weights} for {reward}",
            lambda c: len(as_list(c["reward_weights"])) not in (0, len(as_list(c["reward"]))),
        ),
        Refusal(
            "reward_weights must be finite, got {reward_weights}",
            lambda c: not all(map(math.isfinite, as_list(c["reward_weights"]))),
        ),
    ] = ()
    """Weights of the functions in the reward, which is their weighted sum."""
    reward_threshold: Annotated[Finite | None, Default("none"), when.NOT_0_OR_1] = None
    """Rewards above this become 1, all others 0."""
    reward_workers: Annotated[Count, when.IN_PROCESSES, Resume.FREE] = 2
    """Number of processes that run each function."""
    reward_concurrency: Annotated[Count, when.IN_PROCESSES, Resume.FREE] = 16
    """Calls of an async function that one process makes at a time."""
    reward_seconds: Annotated[Positive, when.IN_PROCESSES, Resume.FREE] = 5.0
    """Longest time of one call in seconds; a call that takes longer is killed and counts
    as failed.
    """
    reward_memory_gb: Annotated[Positive, when.IN_PROCESSES, Resume.FREE] = 2.0
    """Memory that one process may allocate after loading the function, in 1e9 bytes."""
    reward_env: Annotated[str, Default("none", "NAME,NAME"), when.IN_PROCESSES, Resume.FREE] = ""
    """Environment variables that the function needs besides a short list without keys and tokens,
    such as OPENAI_API_KEY."""
    max_reward_error_rate: Annotated[UnitInterval, when.BY_FUNCTIONS, Resume.FREE] = 0.1
    """Stop when more than this fraction of a step's rewards fails; failed ones are left out of
    their groups.
    """


@dataclass(frozen=True)
class ShapingOptions:
    """Reward shaping, in training only."""

    reward_source: Literal["given", "vote", "logprob", "mean_logprob", "rlpr"] = "given"
    """given: responses have the reward of the task or of --reward; vote: 1 for the answer that most
    responses to the prompt give, 0 for others, without any label (SRT, TTRL); logprob: the policy's
    log-prob of the reference answer, given the response's reasoning; mean_logprob: its mean over
    the answer's tokens; rlpr: the reward of RLPR."""
    overlong_buffer: CountOrZero = 0
    """DAPO's overlong punishment: responses lose reward in the last tokens before --max-new-tokens,
    this many, the more the longer they are; 0: none."""
    overlong_penalty: Annotated[Positive, when.WITH_BUFFER] = 1.0
    """Reward that a response of --max-new-tokens tokens loses."""
    truncated: Literal["keep", "zero", "mask"] = "keep"
    """Responses that the length limit ended. keep: as all others; zero: their reward, with its
    components, is 0; mask: their tokens are left out of the loss, their rewards count in their
    groups."""


@dataclass(frozen=True)
class RolloutOptions:
    """How responses are sampled."""

    rollout: EngineName = "native"
    vllm_tensor_parallel: Annotated[
        Count, when.VLLM, when.NO_VLLM_SERVER, Resume.ROUNDING, LessMemory("a higher {}", "start")
    ] = 1
    """vLLM tensor-parallel size; must divide the world size."""
    vllm_url: Annotated[
        str | None, Default("vLLM runs in the trainer's processes", "URL"), when.VLLM, Resume.FREE
    ] = None
    """Address of a vLLM server that samples, such as http://127.0.0.1:8000; it must see this
    machine's TMPDIR.
    """
    prompts: Annotated[
        Count,
        Refusal(
            "prompts x rollouts must be below 2^31, got {prompts} x {rollouts}",
            lambda c: c["prompts"] * c["rollouts"] >= 2**31,
        ),
        multiple_of("updates_per_step", "prompts"),
    ] = 32
    """Prompts per step (G)."""
    rollouts: Annotated[
        Count,
        Refusal(
            "rollouts must be a multiple of first_rollouts with --stop-at, got {rollouts} and "
            "{first_rollouts}",
            lambda c: c["stop_at"] and c["rollouts"] % c["first_rollouts"],
        ),
    ] = 16
    """Rollouts per prompt (N)."""
    stop_at: Annotated[
        CountOrZero,
        when.CAN_STOP,
        Refusal(
            "--stop-at draws again for prompts without successes: it cannot be used with "
            "--dynamic-sampling {dynamic_sampling}",
            lambda c: c["stop_at"] and c["dynamic_sampling"],
        ),
        Refusal(
            "--stop-at needs rewards of 0 or 1 of each response by itself, got --reward-source "
            "{reward_source}",
            lambda c: c["stop_at"] and c["reward_source"] != "given",
        ),
    ] = 0
    """Draw rollouts of a prompt only until this many succeed: --first-rollouts, then each time as
    many as before, at most --rollouts. The gradient is still that of MaxRL of order N; 0: all."""
    first_rollouts: Annotated[Count, when.STOPS] = 8
    """Rollouts of every prompt, with --stop-at."""
    schedule: Annotated[str | None, Default("none", "FILE:CLASS"), when.STOPS, Note.NAMES_CODE] = (
        None
    )
    """Class that says when to stop instead, of maxrl_fast.training.schedule.Stopping."""
    dynamic_sampling: CountOrZero = 0
    """Sample up to this many batches of prompts a step, to replace groups whose rewards are all
    equal (DAPO); 0: one batch.
    """
    std_filter: Annotated[NotNegative, when.RESAMPLES] = 0.0
    """Replace groups too whose standard deviation of rewards is below this share of its average
    over steps (RLPR: 0.5)."""
    ahead: Annotated[
        int,
        Note.ADVANCED,
        Limit("0 to 4", lambda x: 0 <= x <= 4),
        Refusal(
            "--ahead {ahead} needs an engine that samples while the policy trains: native, or vllm "
            "with --vllm-url",
            lambda c: c["ahead"] and c["rollout"] == "vllm" and c["vllm_url"] is None,
        ),
        Refusal(
            "--ahead {ahead} cannot be used with --reward-source {reward_source}, which reads the "
            "policy while it changes",
            lambda c: c["ahead"] and c["reward_source"] not in ("given", "vote"),
        ),
    ] = 0
    """Sample this many steps ahead, while the policy trains: each step trains on responses from
    weights that many updates old. It saves time where sampling waits; 0: none."""
    max_new_tokens: Annotated[Count, Default("the task's; 32 for 9x9 mazes")] = DERIVED
    """Response limit, in tokens."""
    temperature: Positive = 1.0
    """Temperature of the sampling and of the loss."""
    top_p: Annotated[
        TopP,
        # vLLM has no log-probs before top-p at another temperature
        Refusal(
            "--rollout vllm with --top-p {top_p} needs --temperature 1, got {temperature:g}",
            lambda c: c["rollout"] == "vllm" and c["top_p"] < 1 and c["temperature"] != 1,
        ),
    ] = 1.0
    kv_cache_gb: Annotated[
        CacheLimit,
        when.NO_VLLM_SERVER,
        Resume.ROUNDING,
        LessMemory("a lower {}", "start", "rollout"),
    ] = None
    correction: Annotated[
        CorrectionName,
        Default("none with native or the objective's own loss, else tis"),
        Note.FOLLOWS_OBJECTIVE,
    ] = DERIVED
    """What corrects for a rollout engine whose probabilities are not the trainer's: none, tis,
    tis_sequence, icepop, mis or sequence_mask (`python -m maxrl_fast.objectives` has their
    formulas)."""
    importance_cap: Annotated[
        NotNegative | None,
        Default("2 for tis and tis_sequence"),
        when.TAKES_CAP,
        Note.FOLLOWS_OBJECTIVE,
    ] = None
    """Largest importance weight, of a token for tis and of a response for tis_sequence. Given
    alone it switches on --correction tis; 0 switches correction off."""
    correction_options: Annotated[
        tuple[str, ...],
        Default("the correction's own", "NAME=VALUE ...", when.numbers_of_correction),
        when.TAKES_NUMBERS,
        Note.FOLLOWS_OBJECTIVE,
    ] = ()
    """Numbers of the correction: low and high of icepop and mis, delta of sequence_mask."""

    def samples_of_engine(self, processes: int) -> int:
        """Return the most samples of a step that one rollout engine is given, with this many
        processes.
        """
        return -(-self.prompts // processes) * self.vllm_tensor_parallel * self.rollouts

    def stopping(self) -> Stopping | None:
        """Return the rule of --stop-at; raises InputError for a class that is none."""
        if not self.stop_at:
            return None
        rule = Stopping if self.schedule is None else load_code("schedule", self.schedule, "CLASS")
        if not (isinstance(rule, type) and issubclass(rule, Stopping)):
            raise InputError(
                f"--schedule {self.schedule} must be a class of "
                "maxrl_fast.training.schedule.Stopping",
                "schedule",
            )
        return rule(self.prompts, self.first_rollouts, self.rollouts, self.stop_at)

    def correction_numbers(self) -> dict[str, float]:
        """Return the numbers of the correction by name; raises as `numbers_by_name`."""
        return numbers_by_name("correction_options", self.correction_options)


@dataclass(frozen=True)
class WarmStartOptions:
    """Supervised learning on solutions, before reinforcement learning."""

    sft_data: Annotated[
        Path | None, Default("none, the task's solutions", "FILE"), when.DATASET
    ] = None
    """JSON Lines or Parquet file of demonstrations: each line has a prompt, as in --data, and a
    response; or messages, of which the last is the assistant's."""
    sft_steps: Annotated[
        CountOrZero, Default("100; with --sft-data an epoch; with --model alone 0")
    ] = DERIVED
    """Number of steps of supervised learning; 0: none."""
    sft_batch: Count = 32
    """Solutions per step."""
    sft_lr: Annotated[Positive, Default("2e-3; with --model 1e-5, with --lora-rank too 1e-4")] = (
        DERIVED
    )
    """Peak learning rate; 10 steps of linear warm-up, then a cosine to a tenth."""
    sft_beta2: Annotated[BelowOne, Default("--beta2"), Note.ADVANCED] = DERIVED
    """AdamW's decay of the second moment in the warm start."""


@dataclass(frozen=True)
class OptimizerOptions:
    """Reinforcement learning updates (AdamW, float32 weights and moments)."""

    steps: CountOrZero = 200
    """Number of reinforcement learning steps."""
    lr: Annotated[Positive, Default("3e-4; with --model 1e-6, with --lora-rank too 1e-5")] = DERIVED
    """Peak learning rate."""
    lr_schedule: Literal["constant", "cosine"] = "cosine"
    """Learning rate after the warm-up: constant, or a cosine to a tenth of the peak."""
    warmup_steps: CountOrZero = 25
    """Steps of linear warm-up, while the second moments settle: with few, an early large gradient
    undoes the warm start.
    """
    updates_per_step: Count = 1
    """Optimizer updates from each batch of rollouts, each on an equal share of its prompts."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay, on matrices only."""
    beta2: BelowOne = 0.99
    """AdamW's decay of the second moment."""
    clip_grad: Positive = 0.1
    """Largest gradient norm; larger gradients are scaled down to it."""
    token_budget: Annotated[Count, Resume.ROUNDING, LessMemory("a lower {}", "update")] = 4096
    """Token limit, prompts counted once, of one forward and backward pass; gradients of several
    passes add up.
    """
    checkpoint_activations: Annotated[bool, Resume.ROUNDING, LessMemory("{}", "update")] = False
    """Keep only each layer's input for the backward pass and recompute the layer there: less
    memory, a third more work.
    """


@dataclass(frozen=True)
class LossOptions:
    """The token loss."""

    loss: Annotated[
        str,
        Default("ppo; reinforce for pacs, verifree and the off-policy objectives"),
        Note.FOLLOWS_OBJECTIVE,
        Note.MAY_NAME_CODE,
    ] = DERIVED
    """Policy-gradient loss: ppo, reinforce, cispo, gspo, sapo, dppo, ... (`python -m
    maxrl_fast.objectives` lists them all); FILE.py:FUNCTION or package.module:FUNCTION, your
    own. With one update per step the ratio is 1, and the built-in losses have the same gradient,
    except for the tokens that clip_cov, lp_reg and simko treat differently."""
    loss_options: Annotated[
        tuple[str, ...],
        Default("the loss's own", "NAME=VALUE ...", when.numbers_of_loss),
        when.TAKES_LOSS_OPTIONS,
        Note.FOLLOWS_LOSS,
    ] = ()
    """Numbers of the loss, such as tau_negative=1.1 of sapo (`python -m maxrl_fast.objectives`
    lists them), and beta, the teacher's weight in --divergence jsd."""
    clip_low: Annotated[BelowOne, when.TAKES_CLIPS] = 0.2
    """The ratio is clipped below 1 - clip_low, in ppo, cispo, gspo, luspo, clip_cov and simko."""
    clip_high: Annotated[NotNegative, when.TAKES_CLIPS] = 0.2
    """The ratio is clipped above 1 + clip_high, in ppo, cispo, gspo, luspo, clip_cov and simko."""
    aggregation: Annotated[
        Aggregation, Default("the objective's"), Note.FOLLOWS_OBJECTIVE, Note.FOLLOWS_LOSS
    ] = DERIVED
    """How token losses are averaged: token_mean over the whole batch, seq_mean_token_mean (grpo),
    seq_mean_token_sum (pacs, verifree, the off-policy objectives, luspo), or seq_sum_constant
    (dr_grpo)."""
    top_entropy: Share = 1.0
    """Share of an update's tokens, those with the highest entropies, that have a policy gradient
    (0.2 in the 80/20 paper); costs one more forward pass. The others still count in the average. 1:
    all."""
    entropy_coef: NotNegative = 0.0
    """Coefficient of the entropy bonus, per nat."""
    siren: Annotated[NotNegative, Note.ADVANCED] = 0.0
    """Penalty on entropy drift: keeps the entropy of uncertain tokens near its starting value.
    0: off; paper 0.005."""
    kl_coef: NotNegative = 0.0
    """Coefficient of the divergence from the reference policy, per nat."""
    kl: Annotated[Literal["k1", "k2", "k3", "k3+", "full"], when.WITH_KL] = "k3"
    """Estimator of the divergence from the reference policy; full: the exact divergence, of all
    tokens of the vocabulary.
    """
    divergence: Annotated[Literal["reverse", "forward", "jsd"], when.WITH_FULL_KL] = "reverse"
    """Divergence of --kl full: reverse is KL(policy || teacher), forward KL(teacher || policy), jsd
    the Jensen-Shannon divergence, generalized by --loss-options beta."""
    reference: Annotated[
        str | None, Default("none, the policy itself", "MODEL"), when.WITH_REFERENCE
    ] = None
    """Reference policy: another checkpoint with the policy's vocabulary and tokenizer, a directory
    or hf://ORG/NAME, such as a teacher; it is not trained. Default: the policy when reinforcement
    learning begins."""
    teacher_prompt: Annotated[
        str | None,
        Default("none, the policy's prompt", "FILE.py:FUNCTION"),
        Note.MAY_NAME_CODE,
        when.WITH_KL,
    ] = None
    """What the reference policy reads in place of the prompt, which the policy reads: answer, the
    question with the task's reference answer; or FILE.py:FUNCTION(prompt, **columns), which returns
    text or chat messages. Without --reference the reference policy is then the policy itself, as it
    is at each step."""

    def own_numbers(self) -> dict[str, float]:
        """Return the options of the loss by name; raises as `numbers_by_name`."""
        numbers = numbers_by_name("loss_options", self.loss_options)
        if self.divergence == "jsd":
            numbers.pop("beta", None)
        return numbers

    def beta(self) -> float:
        """Return the teacher's weight in --divergence jsd; raises as `numbers_by_name`."""
        is_jsd = self.divergence == "jsd"
        given = numbers_by_name("loss_options", self.loss_options) if is_jsd else {}
        return given.get("beta", 0.5)


@dataclass(frozen=True)
class ModelOptions:
    """The policy: a new decoder of the Qwen2 architecture, or a checkpoint of a decoder that
    transformers has.
    """

    model: Annotated[str | None, Default("none, a new model", "MODEL")] = None
    """Hugging Face checkpoint to start from: a directory, or hf://ORG/NAME or
    hf://ORG/NAME@REVISION of the hub. The sizes below are then its own."""
    model_backend: Annotated[
        Literal["auto", "native", "transformers"], when.WITH_MODEL, Resume.POLICY
    ] = "auto"
    """What runs the layers of --model: native (Qwen2, Qwen3, Llama 3, SmolLM2), transformers
    (docs/models.md lists which), or
    auto: native where it has the model."""
    hidden_size: Annotated[
        Count,
        Resume.POLICY,
        multiple_of("heads", "hidden_size"),
        Refusal(
            "hidden_size / heads must be even, got {hidden_size} / {heads}",
            lambda c: c["hidden_size"] // c["heads"] % 2,
        ),
    ] = 128
    """Size of the hidden states."""
    intermediate_size: Annotated[Count, Resume.POLICY] = 256
    """Size of the feed-forward layers."""
    layers: Annotated[Count, Resume.POLICY] = 4
    """Number of layers."""
    heads: Annotated[Count, Resume.POLICY, multiple_of("kv_heads", "heads")] = 8
    """Number of query heads; the size of a head is hidden_size / heads."""
    kv_heads: Annotated[Count, Resume.POLICY] = 4
    """Number of key/value heads."""
    rope_theta: Annotated[Positive, Resume.POLICY, Note.ADVANCED] = 100.0
    """Base of the rotary embedding. Short prompts are learned faster with a small base; the MaxRL
    paper has 1e6.
    """
    lora_rank: Annotated[CountOrZero, Resume.POLICY, LessMemory("{}", "update")] = 0
    """Train low-rank adapters of this rank instead of the weights (LoRA), merged into the
    checkpoints; 0: off.
    """
    lora_alpha: Annotated[Positive, when.WITH_LORA] = 32.0
    """Adapters are scaled by lora_alpha / lora_rank."""
    lora_targets: Annotated[str, when.WITH_LORA, Resume.POLICY] = (
        "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    )
    """Linear layers that get adapters."""

    @property
    def directory(self) -> Path | None:
        """The directory of --model, with a configuration and a tokenizer; weights of the hub are
        downloaded when needed.
        """
        return None if self.model is None else directory_of(self.model)


@dataclass(frozen=True)
class EvaluationOptions:
    """Evaluation on held-out prompts, and what is reported."""

    eval_every: Annotated[
        CountOrZero | None, Default("a quarter of the steps, on a part of the prompts"), Resume.FREE
    ] = None
    """Steps between evaluations; 0: only before the first step and after the last. By default there
    are three between them, on a fixed subset, sized to cost at most 5% of the training samples;
    none if it is fewer than 32 prompts."""
    eval_prompts: Annotated[Count, Default("256, or all that are held out")] = DERIVED
    """Number of held-out prompts of each set."""
    eval_samples: Count = 16
    """Samples per prompt; pass@k is reported for k = 1, 2, 4, ... up to this."""
    diagnose_every: Annotated[CountOrZero, Resume.FREE] = 0
    """Steps between lines of diagnostics.jsonl, each prompt's pass rate and the norm of its
    gradient, which cost a second backward pass; 0: none."""
    keep_rollouts: Annotated[CountOrZero, Resume.FREE, Note.ADVANCED] = 8
    """Rollouts of each training step that rollouts.jsonl keeps, with their rewards and advantages:
    whole groups as far as this number goes, and many of the same prompts in each epoch of a data
    set; 0: none."""
    log_to: Annotated[
        Literal["tensorboard", "wandb", "trackio"] | None,
        Default("none"),
        Resume.FREE,
        Note.NAMES_CODE,
    ] = None
    """Send metrics to TensorBoard, wandb or trackio too, each of which is an extra of the same
    name."""


@dataclass(frozen=True)
class RunOptions:
    """The run itself."""

    out: Annotated[Path, Default("runs/<objective>-<time>", "DIR"), Resume.NOT_COMPARED] = DERIVED
    """Folder of results: new, empty, or of a run that ended before its first step."""
    resume: Annotated[
        Path | None,
        Default("none", "DIR"),
        Resume.NOT_COMPARED,
        Note.NOT_IN_A_FILE,
        Refusal(
            "--resume writes into the run's own folder, {resume}, got --out {out}",
            lambda c: (
                c["resume"]
                and c["out"]
                and Path(c["out"]).absolute() != Path(c["resume"]).absolute()
            ),
        ),
    ] = None
    """Resume the run in this folder from its newest undamaged checkpoint, with its own options
    unless others are given; auto: the run in --out, or a new one if there is none yet, so that the
    same command starts a run and restarts it."""
    allow_changes: Annotated[bool, when.RESUMES, Resume.NOT_COMPARED] = False
    """Resume even if other options or files than the run's change what is computed."""
    config: Annotated[
        Path | None, Default("none", "FILE"), Resume.NOT_COMPARED, Note.NOT_IN_A_FILE
    ] = None
    """TOML file of options; the keys are the names of the flags (maze_size = 11). A flag overrides
    the file.
    """
    seed: Seed = 0
    """Seed of new weights, of the task's prompts and of the sampling."""
    device: Device = "auto"
    dtype: Dtype = "auto"
    compile: Annotated[
        bool,
        Resume.ROUNDING,
        Refusal(
            "--compile is for the native decoder, got --model-backend {model_backend}",
            lambda c: c["compile"] and c["model_backend"] == "transformers",
        ),
    ] = False
    """Fuse each layer's operations before and after attention by torch.compile, in training and in
    PyTorch's decoding. The first steps take longer."""
    sharding: Annotated[
        Literal["auto", "none", "full"],
        Resume.ROUNDING,
        LessMemory("{} full on more GPUs", "rollout", "update"),
    ] = "auto"
    """How torchrun's processes divide the weights: none (DDP, all weights on each), full (FSDP2, a
    part on each), or auto: full where the training state would take more than half of a GPU's
    memory."""
    threads: Threads = DERIVED
    save_every: Annotated[CountOrZero, Resume.FREE] = 50
    """Steps between checkpoints; 0: only after the warm start, at the end, and when stopped."""
    keep_checkpoints: Annotated[CountOrZero, Resume.FREE, Note.ADVANCED] = 3
    """Newest checkpoints to keep, besides the best one and the one after the warm start; 0: all."""
    stall_limit: Annotated[Positive, Resume.FREE, Note.ADVANCED] = 1800.0
    """Seconds that a stage of a step may take without progress; then the run prints its stacks and
    ends.
    """
    dry_run: Annotated[
        str | None, Note.OPTIONAL_VALUE, Default("off", "[GPUSxGB]"), Resume.NOT_COMPARED
    ] = None
    """Print the resolved configuration with estimates of memory and work, and stop. Without a value
    they are for this machine and torchrun's processes; with 8x80 for 8 GPUs of 80 GB (1e9 bytes)
    each, also where the GPUs are not in this machine."""


@dataclass(frozen=True)
class Config(Groups):
    """Reinforcement learning with verifiable rewards.

    Examples:
        python -m maxrl_fast.train --objective maxpo --k 4
        torchrun --nproc-per-node 8 -m maxrl_fast.train --task gsm8k --model DIR

    --version prints the versions instead.
    """

    objective: ObjectiveOptions = ObjectiveOptions()
    task: TaskOptions = TaskOptions()
    reward: RewardOptions = RewardOptions()
    shaping: ShapingOptions = ShapingOptions()
    rollout: RolloutOptions = RolloutOptions()
    warm_start: WarmStartOptions = WarmStartOptions()
    optimizer: OptimizerOptions = OptimizerOptions()
    loss: LossOptions = LossOptions()
    model: ModelOptions = ModelOptions()
    evaluation: EvaluationOptions = EvaluationOptions()
    run: RunOptions = RunOptions()

    def flat(self) -> dict[str, Any]:
        """All options by flag name, in the types of JSON and TOML; None for those that other
        objectives have.
        """
        flat = super().flat()
        return {
            "objective": flat.pop("objective"),
            **dict.fromkeys(objective_table()),
            **flat.pop("options"),
            **flat,
        }

    def replace(self: AnyConfig, **options: Any) -> AnyConfig:
        """A copy with other values for some options, by flag name."""
        own = {name: value for name, value in options.items() if name not in options_of(Config)}
        if own:
            given = {**self.objective.options, **own}
            options["options"] = {name: value for name, value in given.items() if value is not None}
        return super().replace(**options)


class ResolvedConfig(Config):
    """A checked configuration whose defaults are all worked out."""


@lru_cache
def objective_table() -> dict[str, dict[str, Option]]:
    """Return the options of all built-in objectives by name, each by the objectives that have
    it.
    """
    table: dict[str, dict[str, Option]] = {}
    for objective in OBJECTIVES:
        for name, option in objective_options(objective).items():
            table.setdefault(name, {})[objective] = option
    return table


def known_options() -> dict[str, Option]:
    """Return all options by name, those of each built-in objective included."""
    own = {name: next(iter(rows.values())) for name, rows in objective_table().items()}
    others = options_of(Config)
    return {"objective": others["objective"], **own, **others}


def options_with(objective: str) -> dict[str, Option]:
    """Return all options of a run of an objective by name, in the order of --help.

    An option of its function that has the name of another option keeps its default.
    """
    own, others = objective_options(objective), options_of(Config)
    ordered = [name for name in objective_table() if name in own] + [
        name for name in own if name not in objective_table()
    ]
    return {"objective": others["objective"], **{name: own[name] for name in ordered}, **others}
