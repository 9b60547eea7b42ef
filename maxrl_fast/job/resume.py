"""The progress that a checkpoint stores, a run's newest intact checkpoint, and whether options and
files are the same as then."""

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from maxrl_fast.algorithms.options import as_list
from maxrl_fast.config.changes import ROUNDING, changes, differing
from maxrl_fast.config.options import SHAPE, Config
from maxrl_fast.config.resolve import NAMES_CODE
from maxrl_fast.errors import InputError
from maxrl_fast.model.hub import HUB
from maxrl_fast.rewards.models import CLASSIFIER
from maxrl_fast.runtime.device import versions
from maxrl_fast.runtime.files import DamagedError, check_regular, verify_checksums
from maxrl_fast.runtime.loading import is_code, is_file
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.runtime.run_folder import RunFolder
from maxrl_fast.tasks import Task

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

    def begin_training(self, next_prompt: int) -> None:
        self.phase, self.step, self.next_prompt = "training", 0, next_prompt

    def is_best(self, step: int) -> bool:
        """Whether the evaluation at `step` has a higher mean reward, for rewards of 0 and 1 pass@1,
        than every earlier one. One on a part of the prompts is never the best."""
        size, rate = self._size_and_rate(step)
        earlier = [self._size_and_rate(at) for at in self.evaluations if at < step]
        return all(size > other[0] or (size == other[0] and rate > other[1]) for other in earlier)

    def _size_and_rate(self, step: int) -> tuple[int, float]:
        record = self.evaluations[step]
        return record["num_prompts"], record.get("max_at_k", record["pass_at_k"])["1"]

    @classmethod
    def of_json(cls, fields: dict[str, Any]) -> "Progress":
        """Read the JSON of dataclasses.asdict."""
        evaluations = {int(step): record for step, record in fields["evaluations"].items()}
        return cls(**{**fields, "evaluations": evaluations})


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
        return cls(directory, **{**fields, "progress": Progress.of_json(fields["progress"])})


def rename_damaged_after(directory: Path) -> None:
    """Rename checkpoints newer than `directory`, from which the run resumes, to damaged-step-..."""
    found = RunFolder(directory.parent.parent).checkpoints
    for newer in found[found.index(directory) + 1 :] if directory in found else ():
        damaged = newer.with_name(f"damaged-{newer.name}")
        shutil.rmtree(damaged, ignore_errors=True)
        newer.rename(damaged)


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
    for option in (*NAMES_CODE, "model", "reference"):
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
