"""Files that survive a kill (written to a temporary file, flushed to the disk and renamed), folder
locks, and checks of untrusted files: regular files of a bounded size.

Symbolic links of untrusted files are followed, because the Hugging Face cache stores its files as
links to ../../blobs. Their targets are read only as JSON, tensors or a tokenizer."""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from maxrl_fast.errors import InputError, RemovedError, StorageError, printable

CHECKSUMS = "checksums.json"
JSON_BYTES = 1 << 24  # the index of a model with 500 shards has 5 MB


class DamagedError(Exception):
    """A file is missing or differs from what was written. The message names the file."""


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _discard(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path, and rename what is written there to `path`: a kill leaves the whole
    file or folder, or what was there before. The temporary one is removed on an exception; a killed
    process's is replaced."""
    temporary = temporary_path(path)
    _discard(temporary)
    try:
        yield temporary
        for written in (temporary, *temporary.rglob("*")):
            fsync(written)
        temporary.rename(path)
    except BaseException:
        _discard(temporary)
        raise
    fsync(path.parent)


@contextlib.contextmanager
def atomic_directory(directory: Path) -> Iterator[Path]:
    """The same for a folder, which must not exist yet and is empty at first."""
    with atomic_file(directory) as temporary:
        temporary.mkdir(parents=True)
        yield temporary


def write_json(path: Path, content: Any) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n")


def replace_symlink(link: Path, target: Path) -> None:
    temporary = temporary_path(link)
    _discard(temporary)
    temporary.symlink_to(os.path.relpath(target, link.parent))
    temporary.rename(link)
    fsync(link.parent)


def write_checksums(directory: Path) -> None:
    sums = {
        str(path.relative_to(directory)): {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    (directory / CHECKSUMS).write_text(json.dumps(sums, indent=2) + "\n")


def verify_checksums(directory: Path) -> None:
    """DamagedError names the file that is missing, truncated or changed."""
    try:
        for name, written in read_json(directory / CHECKSUMS).items():
            file = directory / name
            size, wanted = file.stat().st_size, written["bytes"]
            if size != wanted:
                raise DamagedError(f"{file} has {size:,} bytes, {wanted:,} were written")
            if _sha256(file) != written["sha256"]:
                raise DamagedError(f"{file} has changed since it was written (its SHA-256 differs)")
    except FileNotFoundError as error:
        raise DamagedError(f"{error.filename} is missing") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"{directory} cannot be read: {error}") from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _flock(descriptor: int, folder: Path, limit: float, tell: Callable[[str], object]) -> None:
    end, is_told = time.monotonic() + limit, False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            lock = folder / "lock"
            owner = lock.read_text().strip() if lock.exists() else ""
            used = f"{folder} is in use by {owner or 'another process'}"
            if time.monotonic() >= end:
                raise InputError(f"{used}: wait for it to end, or stop it") from None
            if not is_told:
                tell(f"{used}: waiting up to {limit:.0f} s for it to end")
            is_told = True
            time.sleep(0.2)


def write_error(folder: Path, error: OSError) -> InputError | StorageError:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return (StorageError if is_full else InputError)(f"cannot write to --out {folder}: {error}")


@contextlib.contextmanager
def storing(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot write {what}: {error}") from error


def check_in_place(path: Path, opened: os.stat_result) -> None:
    """RemovedError where `path` no longer leads to what was opened there."""
    if not (path.exists() and os.path.samestat(path.stat(), opened)):
        raise RemovedError(f"{path} was removed or replaced during the run, with what it wrote")


@contextlib.contextmanager
def locked(
    folder: Path,
    is_owner: bool = True,
    limit: float = 0.0,
    tell: Callable[[str], object] = lambda message: None,
) -> Iterator[None]:
    """Hold an exclusive lock on a folder, which is created if needed; do nothing unless `is_owner`.
    The folder itself is locked, because its files may be removed, and the file `lock`, which names
    the owner, because network disks lock only files between machines. The kernel releases both when
    the owner dies. Another owner may be exiting, so this waits up to `limit` seconds, after a
    message to `tell`."""
    if not is_owner:
        yield
        return
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for path, flags in (folder, os.O_RDONLY), (folder / "lock", os.O_RDWR | os.O_CREAT):
                descriptor = os.open(path, flags, 0o644)
                held.callback(os.close, descriptor)
                _flock(descriptor, folder, limit, tell)
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        except OSError as error:
            raise write_error(folder, error) from error
        yield


def is_locked(folder: Path) -> bool:
    """Whether another process holds the lock of a folder, or it cannot be taken."""
    try:
        with locked(folder):
            return False
    except InputError:
        return True


def check_regular(path: Path, most_bytes: int | None = None) -> None:
    """Refuse folders, pipes and devices, which could not be read or would block, and a file that is
    too large."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        got = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe, a socket or a device"
        raise InputError(f"{printable(path)} must be a regular file, got {got}")
    if most_bytes is not None and status.st_size > most_bytes:
        raise InputError(
            f"{printable(path)} must have at most {most_bytes} bytes, got {status.st_size}"
        )


def read_json(path: Path, most_bytes: int = JSON_BYTES) -> dict[str, Any]:
    """Return an object; InputError names the file."""
    try:
        check_regular(path, most_bytes)
        content = json.loads(path.read_bytes())
    except InputError:
        raise
    # ValueError: invalid JSON, invalid UTF-8, or a number with too many digits
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{printable(path)} cannot be read: {error}; restore it") from error
    if not isinstance(content, dict):
        raise InputError(f"{printable(path)} must hold a JSON object, got {content!r:.80}")
    return content
