"""The training rollouts that a run keeps: OUT/rollouts.jsonl, and the parts of it that were closed once they were large enough.

OUT/rollouts-00001.jsonl.zst    closed parts, compressed, in the order of the steps; the rollouts of a step are in one part
OUT/rollouts.jsonl              the rollouts since the last of them

To close a part, it is renamed, compressed to a temporary file that is renamed too, and then removed. So a kill at any moment
loses nothing, and leaves at most one part that is there twice, of which readers take the compressed one.
"""

import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import zstandard

from maxrl_fast.errors import InputError
from maxrl_fast.runtime.files import atomic_file, check_regular

OPEN_PART = "rollouts.jsonl"
PART_BYTES = 1 << 24  # a part of this size is closed
LINE_BYTES = 1 << 22  # longest line that is read
MOST_BYTES = 1 << 32  # of all parts, unpacked
_NAME = re.compile(r"rollouts-(\d{5,9})\.jsonl(\.zst)?")


def read_rollouts(out: Path | str, warn: Callable[[str], object] = lambda message: None) -> Iterator[dict[str, Any]]:
    """Yield the kept rollouts of a run in the order of the steps, whether compressed or not.

    The files may be unfinished, damaged or malicious. What cannot be read is skipped: lines that are no JSON object, incomplete
    or longer than 4 MiB, the rest of a damaged part, and what is behind 4 GiB in all.

    Args:
        out: the run's folder.
        warn: is called with a sentence on what was skipped.

    Raises:
        InputError: if something else than a regular file has the name of a part.
        OSError: if a file cannot be read.
    """
    num_left, last = MOST_BYTES, Path(out, OPEN_PART)
    for part in (*closed_parts(Path(out)).values(), *([last] if last.exists() else [])):
        num_damaged, is_begun = 0, False  # a line longer than the limit comes in pieces
        try:
            for piece in _pieces(part, LINE_BYTES):
                num_left -= len(piece)
                if num_left < 0:
                    warn(f"the kept rollouts have more than {MOST_BYTES:,} bytes; those behind were skipped")
                    return
                is_line, is_begun = not is_begun, not piece.endswith(b"\n")
                record = _parsed(piece) if is_line and not is_begun else None
                if record is not None:
                    yield record
                elif is_line and piece.strip():
                    num_damaged += 1
        except zstandard.ZstdError as error:
            warn(f"{part.name} is damaged ({error}); its other rollouts were skipped")
        if num_damaged:
            lines = "1 line" if num_damaged == 1 else f"{num_damaged:,} lines"
            warn(f"{part.name}: skipped {lines}, damaged, incomplete or too long")


def closed_parts(out: Path) -> dict[int, Path]:
    """Return the closed parts by number, ascending; the compressed one where a part is there twice."""
    found: dict[int, Path] = {}
    for path in sorted(out.glob("rollouts-*")):  # NAME.jsonl comes before NAME.jsonl.zst
        if name := _NAME.fullmatch(path.name):
            found[int(name[1])] = path
    return dict(sorted(found.items()))


def _pieces(part: Path, limit: int = -1) -> Iterator[bytes]:
    """Yield the lines of a part, unpacked, in pieces of at most `limit` bytes if there is one.

    Raises:
        ZstdError: where a compressed part is damaged, cut off, or needs more than 128 MiB to unpack.
    """
    check_regular(part)
    with open(part, "rb") as file:
        if part.suffix != ".zst":
            while piece := file.readline(limit):
                yield piece
            return
        size, num_read = zstandard.frame_content_size(file.read(18)), 0  # the longest header
        file.seek(0)
        with io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file)) as unpacked:
            while piece := unpacked.readline(limit):
                num_read += len(piece)
                yield piece
        if num_read < size:
            raise zstandard.ZstdError(f"it is cut off after {num_read:,} of {size:,} bytes")


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the object in a line; None if it holds none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


class RolloutLog:
    """Writes the rollouts of a run's steps.

    Args:
        last_step: the step from which the run resumes; what later steps have left is removed. 0: there is none.

    Raises:
        InputError: if a part from before is damaged.
        OSError: if a file cannot be written; every method raises it.
    """

    def __init__(self, out: Path, last_step: int):
        self._out, self._path = out, out / OPEN_PART
        self._file: IO[bytes] | None = None  # opened for the first rollouts
        self._cut(last_step)
        for part in closed_parts(out).values():
            if part.suffix == ".zst":
                part.with_suffix("").unlink(missing_ok=True)
            else:
                _compress(part)

    def write(self, records: Iterable[dict[str, Any]]) -> None:
        """Append the rollouts of one step, to a new part if the last is large enough."""
        if self._file is None:
            self._file = open(self._path, "ab")  # noqa: SIM115
        if self._file.tell() >= PART_BYTES:
            self.sync()
            self.close()
            part = self._out / f"rollouts-{max(closed_parts(self._out), default=0) + 1:05d}.jsonl"
            self._path.rename(part)
            _compress(part)
            self._file = open(self._path, "ab")  # noqa: SIM115
        self._file.write(b"".join(json.dumps(record).encode() + b"\n" for record in records))
        self._file.flush()

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _cut(self, last_step: int) -> None:
        """Remove the rollouts of later steps, and a line that a kill has left incomplete.

        The earliest part that holds later steps becomes the open one, before those behind it are removed: a kill in between
        leaves parts that still hold later steps, which the next call removes.
        """
        later, kept = list[Path](), b""
        if self._path.exists():
            kept, is_whole = _until(self._path, last_step)
            later = [] if is_whole else [self._path]
        for part in reversed(closed_parts(self._out).values()):
            own, is_whole = _until(part, last_step)
            if is_whole:
                break
            later.append(part)
            kept = own
            if own:
                break
        if later:
            with atomic_file(self._path) as temporary:
                temporary.write_bytes(kept)
        for part in later:
            if part != self._path:
                part.with_name(part.name.removesuffix(".zst")).unlink(missing_ok=True)
                part.unlink(missing_ok=True)


def _until(part: Path, last_step: int) -> tuple[bytes, bool]:
    """Return the lines of a part up to the first of a later step or without an end, and whether these are all."""
    kept = list[bytes]()
    try:
        for line in _pieces(part):
            step = (_parsed(line) or {}).get("step")
            if not line.endswith(b"\n") or (isinstance(step, int) and step > last_step):
                return b"".join(kept), False
            kept.append(line)
    except zstandard.ZstdError as error:
        raise InputError(f"{part} must be readable, and is damaged ({error}); move it away to resume without it") from error
    return b"".join(kept), True


def _compress(part: Path) -> None:
    """Replace a closed part by a compressed one."""
    with atomic_file(part.with_name(f"{part.name}.zst")) as temporary:
        temporary.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(part.read_bytes()))
    part.unlink()
