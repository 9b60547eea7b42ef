"""Finds a run's newest intact checkpoint, and checks that its options are the same."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxrl_fast.config.changes import ROUNDING, changes, differing
from maxrl_fast.config.options import SHAPE, Config
from maxrl_fast.errors import InputError
from maxrl_fast.job.progress import Progress
from maxrl_fast.runtime.device import versions
from maxrl_fast.runtime.files import DamagedError, RunFolder, verify_checksums
from maxrl_fast.runtime.ranks import Ranks


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
