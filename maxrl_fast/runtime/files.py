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

from maxrl_fast.errors import InputError, RemovedError, StorageError

CHECKSUMS = "checksums.json"
WRITTEN = ("checkpoints", "tensorboard", "wandb")  # folders in that of a run


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


@contextlib.contextmanager
def atomic_directory(directory: Path) -> Iterator[Path]:
    """Yield a temporary folder, and rename it to `directory`, which must not exist yet: a kill
    leaves the complete folder or none. The temporary one is removed on an exception; a killed
    process's is replaced."""
    temporary = temporary_path(directory)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for folder, _, names in os.walk(temporary):
            for name in names:
                fsync(Path(folder, name))
            fsync(Path(folder))
        temporary.rename(directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    fsync(directory.parent)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    temporary = temporary_path(path)
    temporary.unlink(missing_ok=True)  # a killed process's, or a link that somebody put there
    try:
        yield temporary
        fsync(temporary)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def write_json(path: Path, content: Any) -> None:
    with atomic_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2) + "\n")


def replace_symlink(link: Path, target: Path) -> None:
    temporary = temporary_path(link)
    temporary.unlink(missing_ok=True)
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
    path = directory / CHECKSUMS
    if not path.is_file():
        raise DamagedError(f"{path} is missing")
    try:
        listed = {
            str(name): (int(entry["bytes"]), str(entry["sha256"]))
            for name, entry in json.loads(path.read_bytes()).items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path} cannot be read: {error}") from error
    for name, (size, sha256) in listed.items():
        file = directory / name
        if file.is_symlink() or not file.resolve().is_relative_to(directory.resolve()):
            raise DamagedError(f"{path} lists {name!r}, which is not a file of this folder")
        try:
            actual, digest = file.stat().st_size, _sha256(file)
        except FileNotFoundError as error:
            raise DamagedError(f"{file} is missing") from error
        except OSError as error:
            raise DamagedError(f"{file} cannot be read: {error}") from error
        if actual != size:
            raise DamagedError(f"{file} has {actual:,} bytes, {size:,} were written")
        if digest != sha256:
            raise DamagedError(f"{file} has changed since it was written (its SHA-256 differs)")


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
            owner = ""
            with contextlib.suppress(OSError, InputError):  # somebody removed it, or made a link
                named = open_regular(folder / "lock", os.O_RDONLY)
                owner = os.read(named, 200).decode(errors="replace").strip()
                os.close(named)
            used = f"{folder} is in use by {owner or 'another process'}"
            if time.monotonic() >= end:
                raise InputError(f"{used}: wait for it to end, or stop it") from None
            if not is_told:
                tell(f"{used}: waiting up to {limit:.0f} s for it to end")
            is_told = True
            time.sleep(0.2)
        except OSError as error:
            raise InputError(
                f"the file system of {folder} does not support locks ({error}); use another --out"
            ) from error


def write_error(folder: Path, error: OSError) -> InputError | StorageError:
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return (StorageError if is_full else InputError)(f"cannot write to --out {folder}: {error}")


@contextlib.contextmanager
def storing(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot write {what}: {error}") from error


def is_locked(folder: Path) -> bool:
    for path in filter(os.path.lexists, (folder, folder / "lock")):
        is_folder = path == folder
        descriptor = os.open(path, os.O_RDONLY) if is_folder else open_regular(path, os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False


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
            for name in WRITTEN:  # what a link leads to belongs to somebody else
                check_entry(folder / name, stat.S_IFDIR)
            of_folder = os.open(folder, os.O_RDONLY)
            held.callback(os.close, of_folder)
            _flock(of_folder, folder, limit, tell)
            descriptor = open_regular(folder / "lock", os.O_RDWR | os.O_CREAT)
            held.callback(os.close, descriptor)
            _flock(descriptor, folder, limit, tell)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
            _try_writing(folder)
        except OSError as error:
            raise write_error(folder, error) from error
        yield


def _try_writing(folder: Path) -> None:
    """Create a file in a folder and in its checkpoints/."""
    for place in filter(os.path.lexists, (folder, folder / "checkpoints")):
        probe = temporary_path(place / "probe")
        probe.unlink(missing_ok=True)
        os.close(open_regular(probe, os.O_WRONLY | os.O_CREAT))
        probe.unlink()


def open_regular(path: Path, flags: int) -> int:
    """Open a file of a run, which has no other name, without following a link or waiting at a
    pipe."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        # a link; a pipe that nobody reads, or a socket; a folder
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            check_kind(path, os.lstat(path))
        raise
    try:
        status = os.fstat(descriptor)
        check_kind(path, status)
        if status.st_nlink > 1:
            raise InputError(
                f"{printable(path)} must be a file of its own, got a hard link: another file would "
                "change with it"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


KINDS = {
    stat.S_IFREG: "a regular file",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFSOCK: "a socket",
}
JSON_BYTES = 1 << 24  # the index of a model with 500 shards has 5 MB


def check_regular(path: Path, most_bytes: int | None = None) -> None:
    """Refuse other kinds of files: reading a pipe would block."""
    status = os.stat(path)
    check_kind(path, status)
    if most_bytes is not None and status.st_size > most_bytes:
        raise InputError(
            f"{printable(path)} must have at most {most_bytes} bytes, got {status.st_size}"
        )


def check_kind(path: Path, status: os.stat_result, wanted: int = stat.S_IFREG) -> None:
    if (found := stat.S_IFMT(status.st_mode)) != wanted:
        got = KINDS.get(found, "something else")
        raise InputError(f"{printable(path)} must be {KINDS[wanted]}, got {got}")


def check_entry(path: Path, wanted: int) -> None:
    """Refuse an entry of a run's folder that is of another kind, if it exists."""
    if os.path.lexists(path):
        check_kind(path, os.lstat(path), wanted)


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


def printable(name: object) -> str:
    """Return a name on one line, and shortened if long."""
    text = str(name)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= 300 else f"{text[:150]}...{text[-150:]}"
