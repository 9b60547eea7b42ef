"""What reward functions print in their worker processes: a file in the run's folder."""

import os
from pathlib import Path
from threading import Lock, Thread

from maxrl_fast.runtime.files import write_error

FILE_NAME, MOST_BYTES = "reward_output.log", 10_000_000
FULL = b"\n[more was printed: this file is full]\n"


class RewardOutput:
    """The standard output and error of worker processes, a pipe that a thread reads.

    It is read all the time, and dropped where the file is full or cannot be written: excessive
    output cannot stop the run. What comes before `open` is kept in memory.
    """

    def __init__(self) -> None:
        self._lock, self._file = Lock(), -1
        self._kept, self._left = b"", MOST_BYTES
        self._pipe, self._thread = -1, Thread(target=self._read, name="reward-output", daemon=True)

    def fileno(self) -> int:
        """Return the descriptor to write to, which is there from the first call on."""
        if self._pipe < 0:
            self._reader, self._pipe = os.pipe()
            self._thread.start()
        return self._pipe

    def open(self, folder: Path, is_resumed: bool) -> None:
        """Write to a file in a run's folder, if there are worker processes; append if resumed."""
        if self._pipe < 0:
            return
        try:
            file = os.open(folder / FILE_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.ftruncate(file, os.fstat(file).st_size if is_resumed else 0)
        except OSError as error:
            raise write_error(folder, error) from error
        with self._lock:
            self._file, self._path, kept = file, folder / FILE_NAME, self._kept
            self._left, self._kept = MOST_BYTES - os.fstat(file).st_size, b""
            self._keep(kept)

    def _read(self) -> None:
        while data := os.read(self._reader, 1 << 16):
            with self._lock:
                self._keep(data)
        os.close(self._reader)

    def _keep(self, data: bytes) -> None:
        if self._left <= 0:
            return
        part, self._left = data[: self._left], self._left - len(data)
        if self._file < 0:
            self._kept += part
            return
        try:
            os.write(self._file, part + FULL * (self._left <= 0))
        except OSError:  # a full disk, of which the run's other files tell
            self._left = 0

    def close(self) -> None:
        """End the thread once the worker processes have ended, and close the file."""
        if self._pipe < 0:
            return
        os.close(self._pipe)
        self._thread.join(1.0)  # a program that left its process group may keep the pipe open
        with self._lock:
            self._left = 0
            if self._file >= 0:
                if not os.fstat(self._file).st_size:
                    self._path.unlink(missing_ok=True)  # an empty log tells nothing
                os.close(self._file)
