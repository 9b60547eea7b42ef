"""What reward functions print in their worker processes: a file in the run's folder."""

import io
import os
from pathlib import Path
from threading import Lock, Thread

FILE_NAME, MOST_BYTES = "reward_output.log", 10_000_000
FULL = b"\n[more was printed: this file is full]\n"


class RewardOutput:
    """The standard output and error of workers, a pipe that a thread reads all the time. What comes
    before `open` is kept in memory; what the file has no room for is dropped."""

    def __init__(self) -> None:
        self._lock, self._pipe, self._left = Lock(), -1, MOST_BYTES
        self._file: io.BytesIO | io.FileIO = io.BytesIO()

    def fileno(self) -> int:
        """Return the descriptor to write to, which is there from the first call on."""
        if self._pipe < 0:
            reader, self._pipe = os.pipe()
            self._thread = Thread(target=self._read, args=(reader,), daemon=True)
            self._thread.start()
        return self._pipe

    def open(self, folder: Path, is_resumed: bool) -> None:
        """Write to a file in a run's folder, if there are workers; append if resumed."""
        with self._lock:
            if self._pipe >= 0 and isinstance(self._file, io.BytesIO):
                kept = self._file.getvalue()
                self._file = io.FileIO(folder / FILE_NAME, "ab" if is_resumed else "wb")
                self._left = MOST_BYTES - self._file.tell()
                self._keep(kept)

    def _read(self, reader: int) -> None:
        while data := os.read(reader, 1 << 16):
            with self._lock:
                self._keep(data)
        os.close(reader)

    def _keep(self, data: bytes) -> None:
        part, self._left = data[: max(self._left, 0)], self._left - len(data)
        try:
            if part:
                self._file.write(part + FULL * (self._left <= 0))
        except OSError:  # a full disk, of which the run's other files tell
            self._left = 0

    def close(self) -> None:
        """End the thread once the worker processes have ended."""
        if self._pipe >= 0:
            os.close(self._pipe)
            self._thread.join(1.0)  # a program that left its process group may keep the pipe open
            with self._lock:
                self._left = 0
                self._file.close()
