"""Training from Python, with the numbers of the command (docs/python.md)."""

import hashlib
import json
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np

from maxrl_fast.config.read import parse_options
from maxrl_fast.errors import InputError
from maxrl_fast.evaluation import label_of, score_of
from maxrl_fast.job.build_parts import build_run_task
from maxrl_fast.job.checkpoints import random_states, set_random_states
from maxrl_fast.job.launch import train
from maxrl_fast.job.run_files import flat
from maxrl_fast.job.screen import Screen
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.runtime.files import RunFolder, atomic_file
from maxrl_fast.runtime.loading import OBJECT, check_members, naming_user_code
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task


class Log(list[dict[str, Any]]):
    """Rows are dicts; `log["reward_mean"]` is a column, a NumPy array of numbers with NaN where a
    row has none, or a list; `pandas.DataFrame(log)` is a table."""

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return super().__getitem__(key)
        values = [row.get(key) for row in self]
        if not any(key in row for row in self):
            names = dict.fromkeys(name for row in self for name in row)
            raise KeyError(f"the log has no column {key!r}, only {', '.join(names)}")
        if all(value is None or isinstance(value, int | float) for value in values):
            return np.array([np.nan if value is None else value for value in values])
        return values


@dataclass(repr=False)
class Run:
    """The results of a run."""

    out: Path
    exit: int  # 0, or 130 where Ctrl-C or an interrupted kernel of a notebook ended it early
    task: Task  # `run.task.decode(tokens)` returns text
    policy: PolicyModel  # after the last step, in evaluation mode with float32 weights
    _objects: dict[str, Any]  # arguments of `run` that the folder cannot store

    def log(self, name: str) -> Log:
        """Return the rows of NAME.jsonl (docs/metrics.md)."""
        return Log(map(flat, RunFolder(self.out).log(name)))

    @cached_property
    def metrics(self) -> Log:
        """A row per step."""
        return self.log("metrics")

    @cached_property
    def evaluations(self) -> Log:
        """A row per evaluation on held-out prompts, with pass_at_1, pass_at_2, ..."""
        return self.log("eval")

    def resume(self, **options: Any) -> "Run":
        """Resume from the newest checkpoint. Options not given keep their values."""
        return run(resume=self.out, **{**self._objects, **options})

    def __repr__(self) -> str:
        shown = f", ended early with exit {self.exit}" * bool(self.exit)
        if records := RunFolder(self.out).log("eval"):
            score = score_of(records)
            first, last = (records[i][score]["1"] for i in (0, -1))
            shown = f", {label_of(score, 1)} {first:.3f} to {last:.3f}{shown}"
        return f"Run({str(self.out)!r}: {len(self.metrics)} steps{shown})"


@naming_user_code()
def run(
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    *,
    task: str | Task | None = None,
    reward: Any = None,
    environment: str | type | None = None,
    quiet: bool = False,
    **options: Any,
) -> Run:
    """Train as `python -m maxrl_fast.train` does, bitwise identically, and return the results
    (docs/python.md). Signal handlers, random states and the number of CPU threads are restored.

    Args:
        config: options by name, or a TOML file of them; keyword options override them.
        task, reward, environment: as on the command line; or a `maxrl_fast.tasks.Task`, functions
            (prompt, response, **columns) -> float, and a class, which live in this process.
        quiet: print only warnings and errors.
        options: as on the command line, with underscores; None: not given. `data`, `test_data` and
            `sft_data` may be a list of dicts, or what has `to_list()` or `to_dict("records")`.

    Raises:
        InputError, and if the run failed NonFiniteError, RewardError, StorageError, EngineError or
        UserCodeError.
    """
    given: dict[str, Any] = {**config} if isinstance(config, Mapping) else {"config": config}
    options |= {"task": task, "reward": reward, "environment": environment}
    given |= {name: x for name, x in options.items() if x is not None}
    folder = Path(given.get("out") or given.get("resume") or "runs/run").absolute().parent
    for name in ("data", "test_data", "sft_data"):
        given[name] = _stored(name, given.get(name), folder)
    objects, functions = _named_objects(given)
    ranks = Ranks.of_environment()
    with ExitStack() as held:
        held.callback(set_random_states, random_states())  # parsing options changes them too
        parsed = parse_options(given)
        if parsed.run.dry_run is not None:
            command = "python -m maxrl_fast.train --dry-run"
            raise InputError(f"dry_run works only on the command line: {command}")
        ending = train(
            parsed,
            ranks,
            Screen(not ranks.is_first, quiet),
            lambda found: objects.get("task") or build_run_task(found, objects.get("environment")),
            functions,
            ends_process=ranks.size > 1,
        )
    if ending.error is not None:
        raise ending.error
    # SIGTERM or SIGHUP: everything is saved, so let this process handle it
    if ending.code not in (0, 128 + signal.SIGINT):
        signal.raise_signal(ending.code - 128)
    done = ending.run
    assert done is not None  # None only after an error
    return Run(done.config.run.out, ending.code, done.task, done.policy.eval(), objects)


def _named_objects(given: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Callable[..., Any]]]:
    """Put names in the place of objects; return those by option, and rewards by name."""
    objects, functions = dict[str, Any](), dict[str, Callable[..., Any]]()
    for name in ("task", "environment"):
        if not isinstance(given.get(name, ""), str):
            objects[name], given[name] = given[name], _name_of(given[name])
    if (rewards := given.get("reward")) is not None:
        given["reward"] = names = list[str]()
        for one in rewards if isinstance(rewards, list | tuple) else [rewards]:
            if not isinstance(one, str) and not callable(one):
                raise InputError(f"reward must be a name or a function, got {one!r:.80}")
            name = _name_of(one)
            names.append(f"{name}-{len(names)}" if name in functions else name)  # two lambdas
            if not isinstance(one, str):
                functions[names[-1]], objects["reward"] = one, rewards
    if own := objects.get("task"):
        check_members(f"task {type(own).__name__}", own, Task)
    return objects, functions


def _stored(option: str, value: Any, folder: Path) -> Any:
    """Return the file of rows that are given in place of one, named by its content; a resumed run
    reads it again. Names of files stay."""
    if hasattr(value, "to_list"):  # a Dataset, whose images are not decoded
        value = value.to_list()
    elif hasattr(value, "to_dict"):
        value = value.to_dict("records")
    if not (isinstance(value, list) and isinstance([*value, ""][0], Mapping)):
        return value

    def plain(x: Any) -> Any:  # as of files of Parquet
        is_text = isinstance(x, (date, time, timedelta, Decimal, UUID))
        return None if isinstance(x, bytes) else str(x) if is_text else x.tolist()

    try:
        content = "".join(json.dumps(row, default=plain) + "\n" for row in value)
    except (AttributeError, TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{option} must be rows of JSON values: {error}") from error
    path = folder / f"data-{hashlib.sha256(content.encode()).hexdigest()[:12]}.jsonl"
    if Ranks.of_environment().is_first:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(path) as temporary:
            temporary.write_text(content)
    return path


def _name_of(value: Any) -> str:
    own = getattr(value, "__name__", type(value).__name__)
    return value if isinstance(value, str) else f"{OBJECT}{own}"
