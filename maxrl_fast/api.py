"""Training from Python: `maxrl_fast.run(objective="maxpo", k=4)` does what the command does, and
returns its results.
"""

import contextlib
import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, time, timedelta
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import UUID

from rich.console import Console

from maxrl_fast.config.read import parse_options
from maxrl_fast.config.resolve import resolve
from maxrl_fast.errors import InputError
from maxrl_fast.evaluation.kept_samples import sample_records
from maxrl_fast.job.build import RunContext
from maxrl_fast.job.build_policy import build_sampling, find_policy
from maxrl_fast.job.build_task import build_run_task, closing_task
from maxrl_fast.job.launch import Job
from maxrl_fast.job.learner_state import random_states, set_random_states
from maxrl_fast.job.log import Log, flat
from maxrl_fast.job.screen import Screen
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.rollout import RolloutRequest
from maxrl_fast.rollout.sampling_and_scoring import sample_and_score
from maxrl_fast.runtime.device import resolve_device
from maxrl_fast.runtime.files import atomic_file
from maxrl_fast.runtime.loading import check_members, naming_user_code
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.runtime.run_folder import RunFolder
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.names import OBJECT

Reward = str | Callable[..., Any]
NOTEBOOK_LINES = 20  # progress lines per stage; a terminal shows one moving line


@dataclass(repr=False)
class Run:
    """The results of a run: its folder, and the trained policy.

    Attributes:
        out: the folder, with config.json, the logs, curves.png and the checkpoints.
        exit: 0; or, if a signal ended the run early, 128 + its number: 130 for Ctrl-C or an
            interrupted notebook kernel.
        task: the task; `run.task.decode(tokens)` returns text.
    """

    out: Path
    exit: int
    task: Task
    _context: RunContext
    _objects: dict[str, Any]  # arguments of `run` that the folder cannot store

    @property
    def policy(self) -> PolicyModel:
        """The model after the last step, a torch.nn.Module in evaluation mode with float32 weights.

        `out / "latest"` is its Hugging Face checkpoint.
        """
        return self._context.policy

    @cached_property
    def metrics(self) -> Log:
        """A row per step: metrics.jsonl."""
        return Log(map(flat, RunFolder(self.out).log("metrics")))

    @cached_property
    def evaluations(self) -> Log:
        """A row per evaluation on held-out prompts, with pass_at_1, pass_at_2, ...: eval.jsonl."""
        return Log(map(flat, RunFolder(self.out).log("eval")))

    @cached_property
    def samples(self) -> Log:
        """Responses from the evaluations with their rewards: samples.jsonl."""
        return Log(RunFolder(self.out).log("samples"))

    @cached_property
    def rollouts(self) -> Log:
        """The training rollouts of --keep-rollouts, with rewards and advantages: rollouts.jsonl."""
        return Log(RunFolder(self.out).log("rollouts"))

    def sample(
        self,
        prompts: int = 4,
        samples: int = 4,
        *,
        start: int = 0,
        temperature: float | None = None,
        seed: int = 0,
    ) -> Log:
        """Sample new responses to held-out prompts, without scoring them.

        Args:
            prompts, samples: number of prompts, from index `start` on, and of responses to each.
            temperature: 0 is greedy decoding; None: the run's temperature.

        A row has the id of the prompt, prompt, response, truncated, tokens.
        """
        config, engine = self._context.config, self._context.engine
        sampling = build_sampling(config, self.task)
        if temperature is not None:
            sampling = replace(sampling, temperature=temperature)
        batch = self.task.prompts("test", start, prompts).to(self.policy.lm_head.weight.device)
        engine.load_weights(self.policy)
        request = RolloutRequest(batch, samples, sampling, seed)
        sampled = sample_and_score(engine, self.task, None, request)
        rows = sample_records(self.task, sampled, sampled.rewards, sampled.components)
        return Log({name: x for name, x in row.items() if name != "reward"} for row in rows)

    def resume(self, **options: Any) -> "Run":
        """Resume the run from its newest checkpoint, as `--resume` does. Options not given keep
        their values.
        """
        return run(resume=self.out, **{**self._objects, **options})

    def __repr__(self) -> str:
        scores, shown = self.evaluations, ""
        if len(scores):
            passes, rewards = scores["pass_at_1"], scores["max_at_1"]
            name = "pass@1" if (passes == rewards).all() else "mean reward"
            shown = f", {name} {rewards[0]:.3f} to {rewards[-1]:.3f}"
        if self.exit:
            shown += f", ended early with exit {self.exit}"
        return f"Run({str(self.out)!r}: {len(self.metrics)} steps{shown})"


@contextlib.contextmanager
def _random_states_kept() -> Iterator[None]:
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)


@_random_states_kept()  # parsing options changes them too
@naming_user_code()
def run(
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    task: str | Task | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    environment: str | type | None = None,
    quiet: bool = False,
    **options: Any,
) -> Run:
    """Train as `python -m maxrl_fast.train` does, bitwise identically, and return the results.

    Ctrl-C, or interrupting a notebook's kernel, stops the run after its step with a checkpoint; a
    second one raises KeyboardInterrupt at once. Signal handlers, random states and the number of
    CPU threads are restored.

    Args:
        config: options by name, or the path of a TOML file of them; keyword options override them.
        task: a task's name, or an object with the members of `maxrl_fast.tasks.Task`.
        reward: what --reward takes, or a Python function (prompt, response, **columns) -> float,
            such as a lambda. It is called in this process, without a sandbox or a time limit.
        environment: what --environment takes, or a class, whose objects live in this process.
        quiet: print only warnings and errors.
        options: as on the command line, with underscores: `maze_size=11`. None: not given. `data`,
            `test_data` and `sft_data` may be a list of dicts, or what has `to_list()` (a Dataset)
            or `to_dict("records")` (a DataFrame); a file beside the run's folder keeps them.

    Raises:
        InputError: if an option is unknown or wrong, with the command line's message.
        NonFiniteError, RewardError, StorageError, EngineError, UserCodeError: if the run failed.
            The message names the last checkpoint.
    """
    given = dict(config) if isinstance(config, Mapping) else {"config": config}
    options |= {"task": task, "reward": reward, "environment": environment}
    given |= {name: value for name, value in options.items() if value is not None}
    folder = Path(given.get("out") or given.get("resume") or "runs/run").absolute().parent
    for name in ("data", "test_data", "sft_data"):
        if (rows := _rows_of(given.get(name))) is not None:
            given[name] = _stored(name, rows, folder)
    names, functions = _named_rewards(given.get("reward"))
    given |= {"reward": names} if names else {}
    objects: dict[str, Any] = {"reward": reward} if functions else {}
    for name in ("task", "environment"):
        if not isinstance(given.get(name, ""), str):
            objects[name], given[name] = given[name], _name_of(given[name])
    if (own_task := objects.get("task")) is not None:
        check_members(f"task {type(own_task).__name__}", own_task, Task)
    parsed = parse_options(given)
    if parsed.run.dry_run is not None:
        command = "python -m maxrl_fast.train --dry-run"
        raise InputError(f"dry_run works only on the command line: {command}")
    ranks = Ranks.of_environment()
    device, screen = resolve_device(parsed.run.device), _screen(not ranks.is_first, quiet)
    with ranks.connected(device):
        parsed = find_policy(parsed, ranks, screen.warning)
        found = own_task or build_run_task(parsed, objects.get("environment"))
        with closing_task(found):  # also where the configuration is refused
            resolved = resolve(parsed, found, ranks, warn=screen.warning)
            job = Job(resolved, found, ranks, screen, device, functions, ranks.size > 1)
            ending, context = job.run()
    if ending.error is not None:
        raise ending.error
    # SIGTERM or SIGHUP: everything is saved, so let this process handle it
    if ending.code not in (0, 128 + signal.SIGINT):
        signal.raise_signal(ending.code - 128)
    assert context is not None  # None only after an error
    context.policy.eval()
    return Run(context.config.run.out, ending.code, found, context, objects)


def _named_rewards(reward: Any) -> tuple[list[str], dict[str, Callable[..., Any]]]:
    """Return the names of all rewards, and the functions of this process by theirs."""
    names, functions = list[str](), dict[str, Callable[..., Any]]()
    rewards = reward if isinstance(reward, list | tuple) else [] if reward is None else [reward]
    for one in rewards:
        if not isinstance(one, str) and not callable(one):
            raise InputError(f"reward must be a name or a function, got {one!r:.80}")
        name = _name_of(one)
        names.append(f"{name}-{len(names)}" if name in functions else name)  # as two lambdas
        if not isinstance(one, str):
            functions[names[-1]] = one
    return names, functions


def _rows_of(value: Any) -> list[Any] | None:
    """Return the rows that are given in place of a file; None for the names of files."""
    if hasattr(value, "to_list"):  # a Dataset, whose images are not decoded
        return value.to_list()
    if hasattr(value, "to_dict"):
        return value.to_dict("records")
    return value if isinstance(value, list) and isinstance([*value, ""][0], Mapping) else None


def _stored(option: str, rows: list[Any], folder: Path) -> Path:
    """Write rows to a file that is named by its content, for a resumed run to read again."""
    try:
        content = "".join(json.dumps(row, default=_plain) + "\n" for row in rows)
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{option} must be rows of JSON values: {error}") from error
    path = folder / f"data-{hashlib.sha256(content.encode()).hexdigest()[:12]}.jsonl"
    if Ranks.of_environment().is_first:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary:
            temporary.write_text(content)
    return path


def _plain(value: Any) -> Any:
    """Return a value of a row that JSON has no type for, as files of Parquet have it."""
    if isinstance(value, bytes):
        return None
    is_text = isinstance(value, (date, time, timedelta, Decimal, UUID))
    return str(value) if is_text else value.tolist()


def _name_of(value: Any) -> str:
    own = getattr(value, "__name__", type(value).__name__)
    return value if isinstance(value, str) else f"{OBJECT}{own}"


def _screen(is_quiet: bool, quiet: bool) -> Screen:
    """A notebook gets plain lines: rich would need widgets for a moving bar."""
    forced = False if Console().is_jupyter else None
    console = Console(quiet=quiet or is_quiet, force_jupyter=forced, force_terminal=forced)
    return Screen(console, is_quiet, None if forced is None else NOTEBOOK_LINES)
