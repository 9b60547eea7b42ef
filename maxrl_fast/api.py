"""Training from Python: `maxrl_fast.run(objective="maxpo", k=4)` does what the command does, and
returns its results.
"""

import contextlib
import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

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
from maxrl_fast.tasks.jsonl import json_value
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
    # arguments of `run` that cannot be stored in the folder
    _objects: dict[str, Any] = field(default_factory=dict)

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
        ended = "" if self.exit == 0 else f", ended early with exit {self.exit}"
        scores, shown = self.evaluations, ""
        if len(scores):
            passes, rewards = scores["pass_at_1"], scores["max_at_1"]
            is_binary = bool((passes == rewards).all())
            name, x = ("pass@1", passes) if is_binary else ("mean reward", rewards)
            shown = f", {name} {x[0]:.3f} to {x[-1]:.3f}"
        return f"Run({str(self.out)!r}: {len(self.metrics)} steps{shown}{ended})"


@contextlib.contextmanager
def _process_kept() -> Iterator[None]:
    """Restore the random states that the block changes; parsing options changes them too."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)


@_process_kept()
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
            `test_data` and `sft_data` may be rows: dicts, a datasets.Dataset or a DataFrame; a
            file beside the run's folder keeps them.

    Raises:
        InputError: if an option is unknown or wrong, with the command line's message.
        NonFiniteError, RewardError, StorageError, EngineError, UserCodeError: if the run failed.
            The message names the last checkpoint.
    """
    if not isinstance(config, Mapping):
        config = {"config": config and os.fspath(config)}
    given = dict(config)
    options |= {"task": task, "reward": reward, "environment": environment}
    given |= {name: value for name, value in options.items() if value is not None}
    task, reward, environment = (given.pop(x, None) for x in ("task", "reward", "environment"))
    for name in ("data", "test_data", "sft_data"):
        value = given.get(name)
        files = value if isinstance(value, list | tuple) else [value]
        if not all(isinstance(file, str | os.PathLike | None) for file in files):
            out = given.get("out") or given.get("resume") or "runs/run"
            given[name] = _stored(name, value, Path(out).absolute().parent)
    functions = _functions_of(reward, given)
    named = {"task": task, "environment": environment}
    given |= {name: _name_of(x) for name, x in named.items() if x is not None}
    own_task = None if isinstance(task, str) else task
    own_class = None if isinstance(environment, str) else environment
    if own_task is not None:
        check_members(f"task {type(own_task).__name__}", own_task, Task)
    objects = {"environment": own_class, "task": own_task, "reward": reward if functions else None}
    objects = {name: x for name, x in objects.items() if x is not None}
    parsed = parse_options(given)
    if parsed.run.dry_run is not None:
        command = "python -m maxrl_fast.train --dry-run"
        raise InputError(f"dry_run works only on the command line: {command}")
    ranks = Ranks.of_environment()
    device, screen = resolve_device(parsed.run.device), _screen(not ranks.is_first, quiet)
    with ranks.connected(device):
        parsed = find_policy(parsed, ranks, screen.warning)
        found = build_run_task(parsed, own_class) if own_task is None else own_task
        with closing_task(found):  # also where the configuration is refused
            resolved = resolve(parsed, found, ranks, warn=screen.warning)
            ends_process = ranks.size > 1
            job = Job(resolved, found, ranks, screen, device, functions, ends_process)
            ending, context = job.run()
    if ending.error is not None:
        raise ending.error
    # SIGTERM or SIGHUP: everything is saved, so let this process handle it
    if ending.code not in (0, 128 + signal.SIGINT):
        signal.raise_signal(ending.code - 128)
    assert context is not None  # None only after an error
    context.policy.eval()
    return Run(context.config.run.out, ending.code, found, context, objects)


def _functions_of(
    reward: Reward | Sequence[Reward] | None, options: dict[str, Any]
) -> dict[str, Callable[..., Any]]:
    """Return the functions among rewards by name; the names of all go to the options."""
    functions: dict[str, Callable[..., Any]] = {}
    rewards = reward if isinstance(reward, list | tuple) else [] if reward is None else [reward]
    for given in rewards:
        if not isinstance(given, str) and not callable(given):
            raise InputError(f"reward must be a name or a function, got {given!r:.80}")
        name = _name_of(given)
        if functions.get(name, given) is not given:  # all lambdas have one name
            name += f"-{len(functions) + 1}"
        options["reward"] = [*options.get("reward", []), name]
        if not isinstance(given, str):
            functions[name] = given
    return functions


def _stored(option: str, rows: Any, folder: Path) -> Path:
    """Write rows to a file that is named by its content, for a resumed run to read again."""
    if hasattr(rows, "iloc"):
        rows = rows.astype(object).where(rows.notna(), None).to_dict("records")
    elif hasattr(rows, "to_list"):  # a Dataset, whose images are not decoded
        rows = rows.to_list()
    content, place, value = "", option, rows
    try:
        for number, row in enumerate(rows, start=1):
            place, value = f"{option}, row {number}", row
            for name, value in dict(row).items():
                place = f"{option}, row {number}: {name}"
                json.dumps(value, default=_plain)
            content += json.dumps(dict(row), default=_plain) + "\n"
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise InputError(
            f"{place} must be {'JSON' if ':' in place else 'a file, or rows of JSON values'}, got "
            f"{value!r:.80}"
        ) from error
    path = folder / f"data-{hashlib.sha256(content.encode()).hexdigest()[:12]}.jsonl"
    if Ranks.of_environment().is_first:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary:
            temporary.write_text(content)
    return path


def _plain(value: Any) -> Any:
    """Return a value of a row that JSON has no type for, as files of Parquet have it."""
    return None if isinstance(value, bytes) else json_value(value) or value.tolist()


def _name_of(value: Any) -> str:
    own = getattr(value, "__name__", type(value).__name__)
    return value if isinstance(value, str) else f"{OBJECT}{own}"


def _screen(is_quiet: bool, quiet: bool) -> Screen:
    """A notebook gets plain lines: rich would need widgets for a moving bar."""
    forced = False if Console().is_jupyter else None
    console = Console(quiet=quiet or is_quiet, force_jupyter=forced, force_terminal=forced)
    return Screen(console, is_quiet, None if forced is None else NOTEBOOK_LINES)
