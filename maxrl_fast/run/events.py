"""TensorBoard's event files, written by the calling thread: errors of the disk are raised where a caller can catch them.

torch.utils.tensorboard writes in a thread of its own, which prints a traceback on a full disk.
"""

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


class EventFile:
    """A new event file in a folder, which is created if it does not exist.

    Args:
        purge_step: TensorBoard drops what earlier files have from this step on; None: nothing.

    Raises:
        OSError: here and in all methods, if the disk refuses to write.
    """

    def __init__(self, folder: Path, purge_step: int | None = None):
        folder.mkdir(exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        self._file = open(folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}", "ab")  # noqa: SIM115
        self._records = RecordWriter(self._file)
        try:
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
            if purge_step is not None:
                start = SessionLog(status=SessionLog.START)
                self._write(Event(wall_time=time.time(), step=purge_step, session_log=start))
        except OSError:
            self._file.close()
            raise

    def write(self, numbers: Mapping[str, float], step: int) -> None:
        """Write the numbers of a step by name."""
        values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._file.flush()

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()
