"""Files that survive a kill (written to a temporary file, flushed to the disk and renamed), folder
locks, JSON files of others, and the folder of a run, read without PyTorch."""

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from safetensors import SafetensorError

from maxrl_fast.errors import InputError, StorageError, printable

CHECKSUMS = "checksums.json"
JSON_BYTES = 1 << 24  # the index of a model with 500 shards has 5 MB


class DamagedError(Exception):
    """A file is missing or differs from what was written. The message names the file."""


def temporary_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path, and rename what is written there to `path`: a kill leaves the whole
    file or folder, or what was there before."""
    temporary = temporary_path(path)
    remove(temporary)  # of a killed process
    try:
        yield temporary
        for written in (temporary, *temporary.rglob("*")):
            fsync(written)
        _rename(temporary, path)
    except BaseException:
        remove(temporary)
        raise
    fsync(path.parent)


def _rename(new: Path, path: Path) -> None:
    """Rename a file or folder to `path`. A folder there is exchanged and removed: a kill leaves one
    of the two. Without the kernel's exchange (NFS), a kill may leave it as .NAME.old."""
    old, here, exchange = new, -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if new.is_symlink() or not (new.is_dir() and path.is_dir()):
        new.rename(path)
        return
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    if not call or call(here, os.fsencode(new), here, os.fsencode(path), exchange):
        old = path.with_name(f".{path.name}.old")
        remove(old)
        path.rename(old)
        try:
            new.rename(path)
        except BaseException:
            old.rename(path)
            raise
    remove(old)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Any) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n")


def write_checksums(directory: Path) -> None:
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    sums = {str(path.relative_to(directory)): {"sha256": _sha256(path)} for path in files}
    (directory / CHECKSUMS).write_text(json.dumps(sums, indent=2) + "\n")


def verify_checksums(directory: Path) -> None:
    try:
        for name, written in read_json(directory / CHECKSUMS).items():
            if _sha256(directory / name) != written["sha256"]:
                raise DamagedError(f"{directory / name} has changed since it was written")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{directory} cannot be read: {error}") from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


@contextlib.contextmanager
def storing(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot write {what}: {error}") from error


@contextlib.contextmanager
def locked(
    folder: Path, limit: float = 0.0, tell: Callable[[str], object] = lambda message: None
) -> Iterator[None]:
    """Hold the lock of a folder, which is created if needed. The kernel releases it when the owner,
    whom the file names, dies. Another owner may be exiting, so this waits up to `limit` seconds,
    after a message to `tell`."""
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = held.enter_context((folder / "lock").open("a+"))
            _lock(file, folder, limit, tell)
            file.truncate(0)
            print(f"process {os.getpid()} on {socket.gethostname()}", file=file, flush=True)
        except OSError as error:
            raise InputError(f"cannot write to --out {folder}: {error}") from error
        yield


def _lock(file: IO[str], folder: Path, limit: float, tell: Callable[[str], object]) -> None:
    end, told = time.monotonic() + limit, ""
    while True:
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.seek(0)
        used = f"{folder} is in use by {file.read().strip() or 'another process'}"
        if time.monotonic() >= end:
            raise InputError(f"{used}: wait for it to end, or stop it")
        if not told:
            told = f"{used}: waiting up to {limit:.0f} s for it to end"
            tell(told)
        time.sleep(0.2)


def is_locked(folder: Path) -> bool:
    """Whether the lock of a folder cannot be taken."""
    try:
        with locked(folder):
            return False
    except InputError:
        return True


def check_regular(path: Path, most_bytes: int | None = None) -> None:
    """Refuse what is no file, which would block, and one that is too large."""
    limit = "" if most_bytes is None else f" of at most {most_bytes} bytes"
    if path.exists() and not (path.is_file() and path.stat().st_size <= (most_bytes or 1 << 62)):
        raise InputError(f"{printable(path)} must be a regular file{limit}")


def read_json(path: Path, most_bytes: int = JSON_BYTES) -> dict[str, Any]:
    """Return an object; InputError names the file."""
    check_regular(path, most_bytes)
    try:
        content = json.loads(path.read_bytes())
    # ValueError: invalid JSON, invalid UTF-8, or a number with too many digits
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{printable(path)} cannot be read: {error}; restore it") from error
    if not isinstance(content, dict):
        raise InputError(f"{printable(path)} must hold a JSON object, got {content!r:.80}")
    return content


# Entries of config.json beside the options. TASK_OPTIONS: the names of the options of its task.
TASK_OPTIONS = "task_options"
NOT_OPTIONS = ("versions", "command", TASK_OPTIONS)


@dataclass(frozen=True)
class RunFolder:
    """A run's folder, or a session's; it may be incomplete, and written to."""

    path: Path

    @property
    def is_run(self) -> bool:
        """Whether config.json is not a model's, but has options of a run."""
        try:
            content = read_json(self.path / "config.json")
        except InputError:
            return False
        return "objective" in content and "model_type" not in content

    @cached_property
    def options(self) -> dict[str, Any]:
        file = self.path / "progress.json"  # of a session, whose config.json is the policy's
        is_session = file.exists()
        content = read_json(file if is_session else self.path / "config.json")
        options = content.get("options") if is_session else content
        if not isinstance(options, dict):
            raise InputError(
                f"{file} must hold the options of a run, got {options!r:.80}; restore it"
            )
        return {k: x for k, x in options.items() if k not in NOT_OPTIONS and x is not None}

    def log(self, name: str) -> list[dict[str, Any]]:
        """Return the records of NAME.jsonl, if it is there, but for a line without an end."""
        file, records = self.path / f"{name}.jsonl", []
        content = file.read_bytes() if file.exists() else b""
        for number, line in enumerate(content.rpartition(b"\n")[0].splitlines(), start=1):
            try:
                records.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                place = f"line {number} of {printable(file)}"
                raise InputError(f"{place} must be JSON: {error}; remove it") from error
        return records

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints, whole or damaged, oldest first."""
        found = [
            (kind == "step", int(number), path)
            for path in self.path.glob("checkpoints/*")
            for kind, _, number in [path.name.rpartition("-")]
            if kind in ("warm-start", "step") and number.isdecimal()
        ]
        return [path for *_, path in sorted(found)]

    @property
    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        link = self.path / "latest"
        return link.resolve() if link.is_dir() else None

    @property
    def is_finished(self) -> bool:
        """Whether the last step has its checkpoint and its evaluation."""
        if self.newest is None:
            return False
        steps, evaluated = self.options.get("steps", 0), [x.get("step") for x in self.log("eval")]
        return self.newest.name == f"step-{steps:06d}" and evaluated[-1:] == [steps]
