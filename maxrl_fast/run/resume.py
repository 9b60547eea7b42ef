"""What a run goes on from: its newest whole checkpoint, and whether its options are still the same."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maxrl_fast.config.changes import changes
from maxrl_fast.distributed.ranks import Ranks
from maxrl_fast.errors import InputError
from maxrl_fast.files.durable import DamagedError, verify_checksums
from maxrl_fast.hardware import versions
from maxrl_fast.model.decoder import DecoderConfig, RopeScaling
from maxrl_fast.run.progress import Progress


@dataclass(frozen=True)
class Saved:
    """A whole checkpoint to go on from."""

    directory: Path
    progress: Progress
    decoder: DecoderConfig
    logs: dict[str, tuple[int, str]]  # bytes and SHA-256 of each log when it was written
    random: dict[str, Any]
    options: dict[str, Any]
    data: str  # what identifies the task's prompts
    machine: dict[str, Any]  # versions, and number of processes

    @classmethod
    def of_json(cls, directory: Path, fields: dict[str, Any]) -> "Saved":
        """From progress.json."""
        sizes = dict(fields["decoder"])
        if sizes["rope_scaling"] is not None:
            sizes["rope_scaling"] = RopeScaling(**sizes["rope_scaling"])
        rest = {name: fields[name] for name in ("logs", "random", "options", "data", "machine")}
        return cls(directory, Progress.of_json(fields["progress"]), DecoderConfig(**sizes), **rest)


def _order(directory: Path) -> tuple[bool, int]:
    kind, _, number = directory.name.rpartition("-")
    return kind == "step", int(number)


def checkpoints_of(out: Path) -> list[Path]:
    """The checkpoints in a run's folder, oldest first, whole or damaged."""
    folder = out / "checkpoints"
    names = [path for pattern in ("warm-start-*", "step-*") for path in folder.glob(pattern)]
    return sorted((path for path in names if path.name.rpartition("-")[2].isdecimal()), key=_order)


def set_aside_after(directory: Path) -> None:
    """Checkpoints newer than the one that a run goes on from, which are damaged, take another name: damaged-step-..."""
    for newer in checkpoints_of(directory.parent.parent):
        if _order(newer) > _order(directory):
            aside = newer.with_name(f"damaged-{newer.name}")
            shutil.rmtree(aside, ignore_errors=True)
            newer.rename(aside)


def find_saved(out: Path, ranks: Ranks, warn: Callable[[str], None]) -> Saved | None:
    """The newest whole checkpoint of a run, the same on all ranks; None where none was written yet.

    Args:
        warn: is told of damaged ones, by file.

    Raises:
        InputError: where there are some, but all are damaged.
    """
    found = checkpoints_of(out) if ranks.is_first else []
    whole: list[Any] | None = None
    for directory in reversed(found):
        try:
            verify_checksums(directory)
            fields = json.loads((directory / "progress.json").read_text())
            Saved.of_json(directory, fields)
            whole = [str(directory), fields]
            break
        except DamagedError as error:
            warn(f"the checkpoint {directory} is damaged: {error}; the one before it is taken")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            warn(f"{directory} is no checkpoint of this version: {type(error).__name__}: {error}; the one before it is taken")
    if found and whole is None:
        raise InputError(f"none of the {len(found)} checkpoints in {out / 'checkpoints'} is whole; see the warnings above")
    whole = json.loads(ranks.text_from_first(json.dumps(whole)))
    if whole is None:
        log = out / "metrics.jsonl"
        if ranks.is_first and log.exists() and log.stat().st_size:
            raise InputError(f"{out} has metrics but no checkpoints: put {out / 'checkpoints'} back, or begin in another --out")
        warn(f"{out} has no checkpoint yet: the run starts anew")
        return None
    return Saved.of_json(Path(whole[0]), whole[1])


def check_same(
    saved: Saved, options: dict[str, Any], data: str, ranks: Ranks, warn: Callable[[str], None], allow_changes: bool = False
) -> None:
    """Compare the options of a resumed run, and the task's prompts, with those of the run before.

    Args:
        options: resolved, by name.
        data: the task's fingerprint.
        warn: is told what keeps the numbers from being bitwise identical.

    Raises:
        InputError: naming the options that change the mathematics, unless they are allowed to.
    """
    changed = changes(saved.options, options)
    mathematics, rounding = [*changed.mathematics], [*changed.rounding]
    if changed.policy:
        shape = "; ".join(changed.policy)
        raise InputError(f"the policy in {saved.directory} is of another shape ({shape}), which a resume cannot change")
    if saved.data != data:
        mathematics.append("the prompts of the files are others")
    if mathematics and not allow_changes:
        differing = "; ".join(mathematics)
        raise InputError(f"{saved.directory} was trained with other options ({differing}); --allow-changes goes on with these")
    rounding += [
        f"{name}: {saved.machine.get(name)} before, {value} now"
        for name, value in machine_of(ranks).items()
        if saved.machine.get(name) != value
    ]
    if mathematics:
        warn(f"the run goes on with other options ({'; '.join(mathematics)})")
    if rounding:
        warn(f"the run goes on, but not to the last bit as it would have ({'; '.join(rounding)})")
    if options["steps"] < saved.progress.step and saved.progress.phase == "training":
        raise InputError(f"--steps must be at least those done, {saved.progress.step}, got {options['steps']}")


def machine_of(ranks: Ranks) -> dict[str, Any]:
    """What the last bits of the numbers depend on, beside the options."""
    return {**versions(), "processes": ranks.size}
