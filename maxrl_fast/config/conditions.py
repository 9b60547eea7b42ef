"""The conditions under which a run takes an option: --help shows these options alone, and all others are refused."""

import contextlib
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from maxrl_fast.algorithms.losses import LOSSES
from maxrl_fast.algorithms.losses.registry import TokenLoss
from maxrl_fast.config.metadata import When
from maxrl_fast.rewards.models import JUDGE
from maxrl_fast.tasks.dataset_specs import DatasetSpec
from maxrl_fast.tasks.names import GYM, OBJECT, dataset_spec, is_plugin, is_reward
from maxrl_fast.training.correction import CORRECTIONS, CorrectionSpec
from maxrl_fast.training.objective_registry import OBJECTIVES, default_loss, is_custom, objective_options


@dataclass(frozen=True)
class Choices:
    """The options on which it depends whether others are taken, and what follows from them."""

    objective: str = "maxpo"
    task: str = "maze"
    reward: Any = None
    resume: Any = None
    model: Any = None
    lora_rank: float = 0
    kl_coef: float = 0.0
    loss: str | None = None
    overlong_buffer: int = 0
    rollout: str = "native"
    vllm_url: str | None = None
    correction: str | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Choices":
        """Return the choices among options by name. Values that flags give are text."""
        chosen = {field.name: options[field.name] for field in dataclasses.fields(cls) if field.name in options}
        for name in ("lora_rank", "kl_coef"):
            with contextlib.suppress(ValueError, TypeError):  # non-numbers are rejected later
                chosen[name] = float(chosen.get(name, 0))
        for name in ("objective", "task", "rollout", "loss"):  # and so are numbers in a file
            if chosen.get(name) is not None:
                chosen[name] = str(chosen[name])
        return cls(**chosen)

    @cached_property
    def rewards(self) -> list[str]:
        return [str(x) for x in (self.reward if isinstance(self.reward, list) else [self.reward]) if x is not None]

    @cached_property
    def of_objective(self) -> Mapping[str, Any] | None:
        """The options that the objective takes; None where there is no such objective, which is refused later."""
        is_known = self.objective in OBJECTIVES or is_custom(self.objective)
        return objective_options(self.objective, num_rollouts=2) if is_known else None

    @cached_property
    def token_loss(self) -> TokenLoss | None:
        """The loss; None for a custom one, which is checked when it is loaded."""
        return LOSSES.get(self.loss or default_loss(self.objective))

    @property
    def loss_chooser(self) -> str:
        if self.loss is not None:
            return f"loss {self.loss}"
        return "a run without --loss" if default_loss(self.objective) == "ppo" else f"objective {self.objective}"

    @property
    def correction_spec(self) -> CorrectionSpec | None:
        return CORRECTIONS.get(self.correction or "tis")  # the one that --importance-cap alone asks for

    @property
    def correction_chooser(self) -> str:
        return "a run without --correction" if self.correction is None else f"correction {self.correction}"

    @cached_property
    def dataset(self) -> DatasetSpec | None:
        return dataset_spec(self.task)

    @property
    def reads_text(self) -> bool:
        return self.dataset is not None or self.task.startswith(GYM)

    @cached_property
    def has_reward_processes(self) -> bool:
        if self.rewards:  # Python objects run in this process
            return any(not x.startswith(OBJECT) for x in self.rewards)
        return self.reads_text or is_plugin(self.task) or self.task.startswith(OBJECT)  # which may score by a function


OBJECTIVE = When("objective {0.objective}", lambda c, name: c.of_objective is None or name in c.of_objective)
TAKES_CLIPS = When("{0.loss_chooser}", lambda c, _: c.token_loss is None or c.token_loss.clips)
TAKES_LOSS_OPTIONS = When("{0.loss_chooser}", lambda c, _: c.token_loss is None or c.token_loss.options)
WITH_KL = When("a run without --kl-coef", lambda c, _: c.kl_coef)

MAZE = When("task {0.task}", lambda c, _: c.task == "maze")
CHAIN = When("task {0.task}", lambda c, _: c.task == "chain")
GYM_TASK = When("task {0.task}", lambda c, _: c.task.startswith(GYM))
CUSTOM_TASK = When("task {0.task}", lambda c, _: is_plugin(c.task))
DATASET = When("task {0.task}", lambda c, _: c.dataset is not None)
WITH_ANSWERS = When("task {0.task}", lambda c, _: c.dataset is not None and c.dataset.gold is not None)
READS_TEXT = When("task {0.task}", lambda c, _: c.reads_text)

TASK_IS_NO_REWARD = When("task {0.task}", lambda c, _: not is_reward(c.task))
WITH_REWARDS = When("task {0.task}", lambda c, _: c.rewards)
WITH_JUDGE = When("task {0.task}", lambda c, _: any(x.startswith(JUDGE) for x in c.rewards))
NOT_0_OR_1 = When("task {0.task}", lambda c, _: c.task != "maze" or c.rewards)
IN_PROCESSES = When("task {0.task}", lambda c, _: c.has_reward_processes)
BY_FUNCTIONS = When("task {0.task}", lambda c, _: c.has_reward_processes or c.rewards)

WITH_BUFFER = When("a run without --overlong-buffer", lambda c, _: c.overlong_buffer)
VLLM = When("a run without --rollout vllm", lambda c, _: c.rollout == "vllm")
NO_VLLM_SERVER = When("a run with --vllm-url", lambda c, _: c.rollout != "vllm" or c.vllm_url is None)  # the server's own
TAKES_CAP = When("{0.correction_chooser}", lambda c, _: c.correction_spec is None or c.correction_spec.has_cap)
TAKES_NUMBERS = When("{0.correction_chooser}", lambda c, _: c.correction_spec is None or c.correction_spec.options)

WITH_MODEL = When("a run without --model", lambda c, _: c.model is not None)
WITH_LORA = When("a run without --lora-rank", lambda c, _: c.lora_rank)
RESUMES = When("a run without --resume", lambda c, _: c.resume is not None)
