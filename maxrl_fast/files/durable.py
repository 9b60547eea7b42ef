"""Files that survive a kill: written aside, flushed to the disk, renamed; and a folder that one process has at a time."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxrl_fast.errors import InputError

CHECKSUMS = "checksums.json"


class DamagedError(Exception):
    """A file is not what was written. The message names it."""


def fsync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def aside_of(path: Path) -> Path:
    """Where a file or folder is written before it is renamed."""
    return path.with_name(f".{path.name}.partial")


@contextlib.contextmanager
def written_aside(directory: Path) -> Iterator[Path]:
    """A new folder to fill, which becomes `directory`, not there yet, at the end: a kill leaves all of it or nothing.

    On an exception it is removed; one that a kill has left is replaced.
    """
    aside = aside_of(directory)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    try:
        yield aside
        for folder, _, names in os.walk(aside):
            for name in names:
                fsync(Path(folder, name))
            fsync(Path(folder))
        aside.rename(directory)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    fsync(directory.parent)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A file to write aside, which becomes `path` at the end; on an exception it is removed."""
    aside = aside_of(path)
    try:
        yield aside
        fsync(aside)
        aside.rename(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def write_json(path: Path, content: Any) -> None:
    """Write or replace a JSON file."""
    with replaced(path) as aside:
        aside.write_text(json.dumps(content, indent=2) + "\n")


def point(link: Path, target: Path) -> None:
    """Make a symbolic link to a path of the same folder tree, or turn it to another one."""
    aside = aside_of(link)
    aside.unlink(missing_ok=True)
    aside.symlink_to(os.path.relpath(target, link.parent))
    aside.rename(link)
    fsync(link.parent)


def write_checksums(directory: Path) -> None:
    """checksums.json: size and SHA-256 of every file in a folder."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    sums = {str(path.relative_to(directory)): {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in files}
    (directory / CHECKSUMS).write_text(json.dumps(sums, indent=2) + "\n")


def verify_checksums(directory: Path) -> None:
    """Whether every file is as it was written.

    Raises:
        DamagedError: naming the file that is missing, truncated or changed.
    """
    path = directory / CHECKSUMS
    if not path.is_file():
        raise DamagedError(f"{path} is missing")
    try:
        listed = {
            str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in json.loads(path.read_bytes()).items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path} cannot be read: {error}") from error
    for name, (size, sha256) in listed.items():
        file = directory / name
        if file.is_symlink() or not file.resolve().is_relative_to(directory.resolve()):
            raise DamagedError(f"{path} lists {name!r}, which is not a file of this folder")
        if not file.is_file():
            raise DamagedError(f"{file} is missing")
        try:
            actual = file.stat().st_size
            if actual != size:
                raise DamagedError(f"{file} has {actual:,} bytes, {size:,} were written")
            if _sha256(file) != sha256:
                raise DamagedError(f"{file} has changed since it was written (its SHA-256 differs)")
        except OSError as error:
            raise DamagedError(f"{file} cannot be read: {error}") from error


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 22):
            digest.update(block)
        return digest.hexdigest()


@contextlib.contextmanager
def locked(folder: Path, is_owner: bool = True) -> Iterator[None]:
    """No other process writes in a folder meanwhile; it is made where it is not there.

    The lock is the kernel's, so that one whose owner was killed holds nobody back; the file `lock` names the owner.

    Args:
        is_owner: whether it is this process that locks; of several that work together one does.

    Raises:
        InputError: naming the process that has it.
    """
    if not is_owner:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise InputError(f"cannot write to --out {folder}: {error}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip() or "another process"
            raise InputError(f"{folder} is in use by {owner}: wait for it to end, or stop it") from None
        except OSError as error:
            raise InputError(f"the file system of {folder} keeps no locks ({error}): --out must be on one that does") from error
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
