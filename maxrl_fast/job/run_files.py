"""The files of a run: config.json, logs, curves.png and timings.json; trackers get its numbers. And
what a resumed run finds: its newest intact checkpoint, and whether options and files are the same.
"""

import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from maxrl_fast.algorithms.options import as_list
from maxrl_fast.config.changes import PASS_RATES, ROUNDING, changes, differing
from maxrl_fast.config.options import SHAPE, Config
from maxrl_fast.config.rules import options_of_part
from maxrl_fast.errors import InputError
from maxrl_fast.evaluation import PASS, score_of
from maxrl_fast.model.checkpoint import HUB
from maxrl_fast.runtime.device import versions
from maxrl_fast.runtime.files import (
    TASK_OPTIONS,
    DamagedError,
    RunFolder,
    atomic_file,
    check_regular,
    fsync,
    is_locked,
    remove,
    storing,
    verify_checksums,
    write_json,
)
from maxrl_fast.runtime.loading import CLASSIFIER, absolute_name, is_code, is_file
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Task
from maxrl_fast.training.objectives.registry import weight_of

Phase = Literal["warm start", "training", "session"]  # session: of Session.save


@dataclass
class Progress:
    phase: Phase = "warm start"
    step: int = 0  # number of steps done in this phase
    next_prompt: int = 0  # index of the first unused training prompt
    tokens: dict[str, int] = field(default_factory=lambda: {"rollout": 0})  # sampled so far
    seconds: dict[str, float] = field(default_factory=dict)  # so far, by stage
    # by step, each as Evaluation.record
    evaluations: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{'warm-start' if self.phase == 'warm start' else 'step'}-{self.step:06d}"

    def __str__(self) -> str:
        return f"{'warm start step' if self.phase == 'warm start' else 'step'} {self.step}"

    def is_best(self, step: int) -> bool:
        """Whether the evaluation at `step` has a higher mean reward, for rewards of 0 and 1 pass@1,
        than every earlier one. One on a part of the prompts is never the best."""
        found = {
            at: (record["num_prompts"], record.get("max_at_k", record["pass_at_k"])["1"])
            for at, record in self.evaluations.items()
        }
        return all(found[step] > other for at, other in found.items() if at < step)


@dataclass(frozen=True)
class Saved:
    """A checkpoint's folder and the content of its progress.json."""

    directory: Path
    progress: Progress
    logs: dict[str, int]  # bytes of each log when the checkpoint was written
    random: dict[str, Any]
    options: dict[str, Any]
    fingerprints: dict[str, str]
    machine: dict[str, Any]  # from machine_of

    @classmethod
    def of_json(cls, directory: Path, fields: dict[str, Any]) -> "Saved":
        progress = Progress(**fields["progress"])
        # JSON has no integers as names
        progress.evaluations = {int(step): x for step, x in progress.evaluations.items()}
        return cls(directory, **{**fields, "progress": progress})


def find_saved(out: Path, ranks: Ranks, warn: Callable[[str], None]) -> Saved | None:
    """Return a run's newest intact checkpoint, or what a session has saved in `out`, the same on
    all ranks; None if there is none yet. Warns of each damaged one. All ranks must call this."""
    whole, found, log = None, list[Path](), out / "metrics.jsonl"
    if ranks.is_first:
        found = RunFolder(out).checkpoints or [out] * (out / "progress.json").exists()
    for directory in reversed(found):
        try:
            verify_checksums(directory)
            fields = json.loads((directory / "progress.json").read_text())
            Saved.of_json(directory, fields)
            whole = str(directory), fields
            break
        except (DamagedError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            damaged = f"the checkpoint {directory} is damaged or of another version"
            warn(f"{damaged}: {type(error).__name__}: {error}; using the one before it")
    if found and whole is None:
        raise InputError(f"none of the {len(found)} checkpoints in {out / 'checkpoints'} is whole")
    if whole := ranks.values(whole)[0]:
        return Saved.of_json(Path(whole[0]), whole[1])
    if ranks.is_first and log.exists() and log.stat().st_size:
        raise InputError(f"{out} has metrics but no checkpoints: choose another --out")
    warn(f"{out} has no checkpoint yet: the run restarts from the beginning")
    return None


def check_same(
    saved: Saved,
    config: Config,
    fingerprints: dict[str, str],
    ranks: Ranks,
    warn: Callable[[str], None],
) -> None:
    """Compare the options and files of a resumed run with the checkpoint's. Warns of differences
    that make the numbers not bitwise identical."""
    options, before, machine = config.flat(), saved.fingerprints, saved.machine
    said, learned = differing(saved.options, options), changes(saved.options, options)
    if shape := "; ".join(text for name, text in said.items() if name in SHAPE):
        wrong = f"has another shape ({shape}), which cannot change on resuming"
        raise InputError(f"{saved.directory} {wrong}")
    learned += [
        f"{x}: {'new' if x not in before else 'changed' if x in fingerprints else 'missing'}"
        for x in sorted({*before, *fingerprints})
        if before.get(x) != fingerprints.get(x)
    ]
    rounding = [text for name, text in said.items() if name in ROUNDING]
    rounding += [
        f"{name}: {machine.get(name)} before, {value} now"
        for name, value in machine_of(ranks).items()
        if machine.get(name) != value
    ]
    others = f"with other options or files ({'; '.join(learned)})"
    if learned and not config.run.allow_changes:
        advice = "--allow-changes resumes with the new ones"
        raise InputError(f"{saved.directory} was trained {others}; {advice}")
    if learned:
        warn(f"the run resumes {others}")
    if rounding:
        warn(f"the run resumes, but will not be bitwise identical ({'; '.join(rounding)})")
    done, wanted = saved.progress.step, config.optimizer.steps
    if wanted < done and saved.progress.phase == "training":
        raise InputError(f"--steps must be at least {done}, the number of steps done, got {wanted}")


def machine_of(ranks: Ranks) -> dict[str, Any]:
    """What rounding depends on besides the options."""
    return {**versions(), "processes": ranks.size}


def fingerprints(config: Config, task: Task, saved: Saved | None) -> dict[str, str]:
    """Return SHA-256 hashes by name. Of a function only its own file is read. A resumed run has the
    weights of its checkpoint `saved`, and does not need --model."""
    contents = {
        "the prompts": task.fingerprint.encode(),
        "the stop tokens": json.dumps(task.stop_ids).encode(),
    }
    for name, content in task.tokenizer_files().items():
        if isinstance(content, bytes):  # a file that was read; the task's code makes the others
            contents[f"{name} of the tokenizer"] = content
    options, kept = config.flat(), dict[str, str]()
    if saved is not None and saved.options.get("model") == config.model.model:
        options.pop("model", None)
        kept = {name: x for name, x in saved.fingerprints.items() if name == "the file of --model"}
    known = Config.options() | options_of_part("task", config.chosen.task)
    code = [name for name, x in known.items() if x.kind is absolute_name]
    for option in (*code, "model", "reference"):
        for i, value in enumerate(map(str, as_list(options.get(option)))):
            what = f"the file of --{option.replace('_', '-')}{f' {i + 1}' if i else ''}"
            is_folder = option in ("model", "reference") or value.startswith(CLASSIFIER)
            try:
                if is_folder and not value.startswith(HUB):  # one of the hub has its commit
                    contents[what] = model_content(Path(value.removeprefix(CLASSIFIER)))
                elif (file := source_file(value)).is_file():
                    contents[what] = file.read_bytes()
            except OSError as error:
                raise InputError(f"cannot read {what}, {value}: {error}") from error
    return {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()} | kept


def model_content(directory: Path) -> bytes:
    """Return a model's configuration, and size and header of each file of weights, which has the
    names, types and shapes of tensors."""
    config = directory / "config.json"
    content = config.read_bytes() if config.exists() else b""
    for path in sorted(directory.glob("*.safetensors")):
        check_regular(path)
        with path.open("rb") as file:
            header = file.read(min(int.from_bytes(file.read(8), "little"), path.stat().st_size))
        content += f"{path.name} {path.stat().st_size}".encode() + header
    return content


def source_file(name: str) -> Path:
    """Return the file of FILE.py:NAME or package.module:NAME, which is missed when it is loaded."""
    place = name.rpartition(":")[0]
    root, *rest = place.split(".")
    if is_file(name) or not is_code(name):
        return Path(place)
    spec = importlib.util.find_spec(root)  # that of a module would run its package
    if spec is None or not rest:
        return Path(spec.origin or "") if spec else Path()
    module = Path(next(iter(spec.submodule_search_locations or [""])), *rest)
    return module / "__init__.py" if module.is_dir() else module.with_suffix(".py")


class Tracker:
    """A tracker's run, which continues after `step`. After a failure, a warning, nothing is
    sent."""

    def __init__(
        self, name: str, out: Path, options: dict[str, Any], step: int, warn: Callable[[str], None]
    ):
        self._warn = warn
        try:
            if name == "tensorboard":
                self._target: Any = _TensorBoard(out / name, step)
                return
            own = {"project": "maxrl_fast", "name": out.name, "resume": "allow"}
            if name == "wandb":  # folders of the same name in different places are different runs
                identity = f"{out.name}-{zlib.crc32(str(out).encode()):08x}"
                own |= {"id": identity, "dir": str(out)}
            self._target = importlib.import_module(name)
            self._target.init(config=options, **own)
        except Exception as error:  # no API key, no network, bad settings
            why = f"{type(error).__name__}: {error}"
            raise InputError(f"--log-to {name} could not be started: {why}") from error

    def call(self, name: str, *arguments: Any, **options: Any) -> None:
        try:
            if self._target is not None:
                getattr(self._target, name)(*arguments, **options)
        except Exception as error:  # of the network, a full disk, or a process that has ended
            self._target = None
            lost = "the tracker, which gets no more numbers (the logs have all)"
            self._warn(f"{type(error).__name__} of {lost}: {error}")


class _TensorBoard:
    """A new event file; TensorBoard drops what earlier files have of later steps."""

    def __init__(self, folder: Path, step: int):
        from torch.utils.tensorboard import SummaryWriter  # an extra

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)
        self._writer.flush()

    def finish(self) -> None:
        self._writer.close()


def draw_curves(
    metrics: list[dict[str, Any]], evaluations: list[dict[str, Any]], path: Path, title: str = ""
) -> None:
    """Plot metrics, as means of a twentieth of the steps too, and the first and last evaluation."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 6.5), layout="constrained")
    figure.suptitle(title, parse_math=False)
    steps, width = [record["step"] for record in metrics], max(1, len(metrics) // 20)
    reward, passes, entropy, length = figure.subplots(2, 2).flat
    for axes, key, title, unit in (
        (reward, "reward_mean", "reward in training", "mean over rollouts"),
        (entropy, "entropy", "entropy of the sampling policy", "nats per token"),
        (length, "response_length_mean", "response length", "tokens"),
    ):
        values = [record[key] for record in metrics]
        means = [fmean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]
        axes.plot(steps, values, color="tab:blue", alpha=0.25)
        axes.plot(steps, means, color="tab:blue")
        axes.set(title=title, xlabel="step", ylabel=unit)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    # those on a part of the prompts are not comparable
    whole = [x for x in evaluations if x["num_prompts"] == evaluations[0]["num_prompts"]]
    score = score_of(whole)
    for record, shade in zip([*whole[:1], *whole[1:][-1:]], ("0.65", "tab:blue"), strict=False):
        ks = [*map(int, record[score])]
        label = f"step {record['step']}"
        passes.plot(ks, [*record[score].values()], marker="o", color=shade, label=label)
        passes.set_xscale("log", base=2)
        passes.set_xticks(ks, [str(k) for k in ks])
    name = "pass@k" if score == PASS else "max@k"
    passes.set(title=f"{name} on held-out prompts", xlabel="k", ylabel=name)
    if evaluations:
        passes.legend(loc="lower right")
    for axes in (reward, passes, entropy, length):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, format="png")


LOGS = "metrics", "eval", "eval_prompts", "pass_rates", "warnings", "samples", "rollouts"


def cut_log(path: Path, size: int) -> bool:
    """Cut a log off after the last line within `size` bytes; return whether it has fewer."""
    content = path.read_bytes() if path.exists() else b""
    if content:
        os.truncate(path, content[:size].rfind(b"\n") + 1)
    return len(content) < size


def free_folder(out: Path | None, parent: str, name: str, is_first: bool = True) -> Path:
    """Return --out, or a folder named after the time, in which nothing is overwritten: neither
    another's files nor a run that has begun."""
    name = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    # with a number where another of the same second has the folder
    names = (Path(parent, f"{name}-{i}" if i else name) for i in itertools.count())
    out = out or next(path for path in names if not path.exists())
    if not is_first:  # other ranks may come after the first has begun to write
        return out
    try:
        is_free = not out.exists() or (
            parent == "runs" and ended_before_first_step(out) and not is_locked(out)
        )
        # what a kill leaves
        if is_free or all(x.name == "lock" or x.suffix == ".partial" for x in out.iterdir()):
            return out
    except OSError as error:  # of what is no folder, or cannot be read
        raise InputError(f"--out must be a folder that can be read: {error}") from error
    raise _taken(out)


def _taken(out: Path) -> InputError:
    is_run = (out / "config.json").exists()
    what = f"another run; --resume {out} resumes it" if is_run else "something else"
    return InputError(f"--out must be a new or empty folder, got {out}, which holds {what}")


def ended_before_first_step(out: Path, now: dict[str, Any] | None = None) -> bool:
    """Return whether the same command may begin the run in this folder again: not after its first
    step, in its warm start, which is resumed, or with a checkpoint if the options `now` compute
    something else."""
    folder, log = RunFolder(out), out / "metrics.jsonl"
    has_begun = log.exists() and log.stat().st_size > 0
    if has_begun or not folder.is_run or not folder.options.get("steps"):
        return False
    names = [path.name for path in folder.checkpoints]
    # config.json has no option without a value
    before = dict.fromkeys(now or ()) | folder.options
    return not names or (names == ["step-000000"] and not (now and changes(before, now)))


class RunFiles:
    """Writes the files of one run into its folder, if `is_writer`. The logs are cut to their
    lengths at the checkpoint `saved`. StorageError if writing fails."""

    def __init__(
        self,
        out: Path,
        options: dict[str, Any],
        is_writer: bool = True,
        is_resumed: bool = False,
        saved: Saved | None = None,
        warn: Callable[[str], None] = warnings.warn,
    ):
        self.out, self.options, self._is_writer = out, options, is_writer
        self._tracker: Tracker | None = None
        if not is_writer:
            return
        if (checkpoints := out / "checkpoints").is_symlink():  # it is removed from, by and by
            raise InputError(f"{checkpoints} must be a folder of this run, got a symbolic link")
        try:
            if not is_resumed and (out / "config.json").exists():
                # another command, or one started at the same time
                if not ended_before_first_step(out, options):
                    raise _taken(out)
                for old in ("checkpoints", "tensorboard", "latest", "best", "timings.json"):
                    remove(out / old)
            if saved is None:
                self.write_config()
            for path in (*out.glob(".*.partial"), *out.glob("checkpoints/.*.partial")):
                remove(path)  # of a killed process
            for path in map(self._path, LOGS):
                if cut_log(path, saved.logs.get(path.stem, 0) if saved else 0):
                    warn(f"{path} is shorter than at the checkpoint: the lines before it are lost")
            if name := options.get("log_to"):
                is_training = saved and saved.progress.phase == "training"
                step = saved.progress.step if saved and is_training else -1
                self._tracker = Tracker(name, out.absolute(), options, step, warn)
        except OSError as error:
            raise InputError(f"cannot write to --out {out}: {error}") from error

    def _path(self, log: str) -> Path:
        return self.out / f"{log}.jsonl"

    def write_config(self) -> None:
        used = {name: value for name, value in self.options.items() if value is not None}
        own = [*options_of_part("task", self.options["task"])]
        content = {**used, TASK_OPTIONS: own, "versions": versions(), "command": sys.argv}
        write_json(self.out / "config.json", content)
        write_json(self.out / "weight.json", weight_of(self.options, PASS_RATES))

    def write(self, log: str, record: dict[str, Any]) -> None:
        """Append a record to a log, and send its numbers to the tracker."""
        if not self._is_writer:
            return
        # JSON has neither NaN nor infinite numbers: they become null
        text = json.dumps(json.loads(json.dumps(record), parse_constant=lambda _: None))
        with storing(str(self._path(log))), self._path(log).open("a") as file:
            file.write(text + "\n")
        if self._tracker is not None and log in ("metrics", "eval"):
            numbers = {f"{log}/{k}": x for k, x in flat(record).items() if x is not None}
            self._tracker.call("log", numbers, step=record["step"])

    def sync(self) -> dict[str, int]:
        """Wait until the logs are on the disk; return the size of each in bytes."""
        paths = [path for path in map(self._path, LOGS) if path.exists()]
        for path in paths:
            fsync(path)
        return {path.stem: path.stat().st_size for path in paths}

    def close(self, seconds: dict[str, float]) -> None:
        if not self._is_writer:
            return
        if self._tracker is not None:
            self._tracker.call("finish")
        with storing(f"timings.json or curves.png in {self.out}"):
            self.sync()
            write_json(self.out / "timings.json", seconds)
            with atomic_file(self.out / "curves.png") as path:
                objective, seed = self.options["objective"], self.options["seed"]
                title, logs = f"{self.out.name}: {objective}, seed {seed}", RunFolder(self.out)
                draw_curves(logs.log("metrics"), logs.log("eval"), path, title)


def flat(record: dict[str, Any]) -> dict[str, Any]:
    """Spread dicts: pass_at_k becomes pass_at_1, pass_at_2, ..."""
    spread: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            spread |= {f"{name.removesuffix('_k')}_{key}": x for key, x in value.items()}
        else:
            spread[name] = value
    return spread
