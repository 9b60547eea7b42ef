"""The conditions under which a run uses an option, by its other options `c`: --help shows these
options alone, and all others are refused."""

from collections.abc import Mapping
from typing import Any

from maxrl_fast.algorithms.known import method_hint
from maxrl_fast.algorithms.losses import ALIASES, LOSSES
from maxrl_fast.algorithms.losses.registry import TokenLoss, find_loss
from maxrl_fast.config.metadata import When, as_list
from maxrl_fast.errors import InputError
from maxrl_fast.rewards.models import CLASSIFIER
from maxrl_fast.runtime.loading import is_code
from maxrl_fast.tasks.names import GYM, OBJECT, check_known, dataset_spec, is_plugin, is_reward
from maxrl_fast.training.correction import CORRECTIONS
from maxrl_fast.training.objectives.registry import find_code, objective_class

Values = Mapping[str, Any]
_LOSSES = LOSSES | ALIASES


def _loss_name(c: Values) -> str:
    return c["loss"] or objective_class(c["objective"]).loss


def loss_of(name: str) -> TokenLoss:
    """Return the token loss of --loss: a name in LOSSES, or one of your own."""
    if name in _LOSSES:
        return _LOSSES[name]
    if not is_code(name):
        raise InputError(
            f"loss must be one of {', '.join(_LOSSES)}, or FILE.py:FUNCTION, got "
            f"{name!r:.80}{method_hint(name, _LOSSES)}"
        )
    found: TokenLoss = find_code("loss", name, find_loss)
    return found


def numbers_of_loss(c: Values) -> str:
    """Return the options of the loss with their defaults."""
    shown = [f"{name}={x.default}" for name, x in loss_of(_loss_name(c)).options.items()]
    return " ".join(shown + ["beta=0.5"] * (c["divergence"] == "jsd"))


def numbers_of_correction(c: Values) -> str:
    """Return the numbers of the correction with their defaults."""
    return CORRECTIONS[c["correction"]].shown_options


def _takes_loss_options(c: Values) -> bool:
    loss = _LOSSES.get(_loss_name(c))  # None: a custom one, which is checked when it is loaded
    return loss is None or bool(loss.options) or c["divergence"] == "jsd"


def _reads_text(c: Values) -> bool:
    return dataset_spec(c["task"]) is not None or c["task"].startswith(GYM)


def _has_reward_processes(c: Values) -> bool:
    if c["environment"] is not None and not c["environment"].startswith(OBJECT):
        return True
    if rewards := as_list(c["reward"]):  # Python objects and reward models run in this process
        return any(not x.startswith((OBJECT, CLASSIFIER)) for x in rewards)
    # which may score by a function
    return _reads_text(c) or is_plugin(c["task"]) or c["task"].startswith(OBJECT)


def _not_by_loss(c: Values) -> str:
    return f"is not used by loss {_loss_name(c)}"


TAKES_CLIPS = When(
    _not_by_loss, lambda c: (loss := _LOSSES.get(_loss_name(c))) is None or loss.clips
)
TAKES_LOSS_OPTIONS = When(_not_by_loss, _takes_loss_options)
WITH_KL = When("needs --kl-coef", lambda c: c["kl_coef"])
WITH_FULL_KL = When("needs --kl full", lambda c: c["kl_coef"] and c["kl"] == "full")
WITH_REFERENCE = When(
    "needs --kl-coef, --objective distill or pacs_paper",
    lambda c: c["kl_coef"] or c["objective"] == "pacs_paper",
)


def _not_by_task(c: Values) -> str:
    check_known(name := c["task"])
    return f"is not used by task {name}{', a class with its own prompts' * is_plugin(name)}"


MAZE = When(_not_by_task, lambda c: c["task"] == "maze")
CHAIN = When(_not_by_task, lambda c: c["task"] == "chain")
GYM_TASK = When(_not_by_task, lambda c: c["task"].startswith(GYM))
CUSTOM_TASK = When(_not_by_task, lambda c: is_plugin(c["task"]))
DATASET = When(_not_by_task, lambda c: dataset_spec(c["task"]) is not None)
WITH_ANSWERS = When(
    _not_by_task, lambda c: (data := dataset_spec(c["task"])) is not None and data.gold is not None
)
READS_TEXT = When(_not_by_task, _reads_text)

TASK_IS_NO_REWARD = When(_not_by_task, lambda c: not is_reward(c["task"]))
WITH_REWARDS = When(
    lambda c: (
        f"needs --reward: write --task dataset --reward {c['task']} and others"
        if is_reward(c["task"])
        else "needs --reward"
    ),
    lambda c: c["reward"],
)
NOT_0_OR_1 = When(
    "needs --reward with task {task}", lambda c: c["task"] not in ("maze", "guess") or c["reward"]
)
IN_PROCESSES = When("needs a --reward that runs in processes", _has_reward_processes)
BY_FUNCTIONS = When(
    "needs --reward",
    lambda c: _has_reward_processes(c) or c["reward"] or c["environment"] is not None,
)
WITH_ENVIRONMENT = When("needs --environment", lambda c: c["environment"] is not None)

WITH_BUFFER = When("needs --overlong-buffer", lambda c: c["overlong_buffer"])
VLLM = When("needs --rollout vllm", lambda c: c["rollout"] == "vllm")
NO_VLLM_SERVER = When(
    "cannot be used with --vllm-url", lambda c: c["rollout"] != "vllm" or c["vllm_url"] is None
)
CAN_STOP = When(
    "needs --objective maxrl: to stop when some rollouts succeed biases {objective}",
    lambda c: c["objective"] == "maxrl",
)
STOPS = When("needs --stop-at", lambda c: c["stop_at"])
RESAMPLES = When("needs --dynamic-sampling of 2 or more", lambda c: c["dynamic_sampling"] > 1)
# Without --correction, --importance-cap implies tis.
TAKES_CAP = When(
    "is not used by correction {correction}",
    lambda c: CORRECTIONS[c["correction"] or "tis"].has_cap,
)
TAKES_NUMBERS = When(
    "needs --correction icepop, mis or sequence_mask",
    lambda c: CORRECTIONS[c["correction"] or "tis"].options.keys() - {"importance_cap"},
)

WITH_MODEL = When("needs --model", lambda c: c["model"] is not None)
WITH_LORA = When("needs --lora-rank", lambda c: c["lora_rank"])
RESUMES = When("needs --resume", lambda c: c["resume"] is not None)
