"""TensorBoard's event files, written by the calling thread: errors of the disk are raised where a caller can catch them.

torch.utils.tensorboard writes in a thread of its own, which prints a traceback on a full disk.
"""

import os
import socket
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalars
from tensorboard.plugins.hparams import api_pb2, plugin_data_pb2, summary_v2
from tensorboard.plugins.hparams import metadata as hparams
from tensorboard.plugins.text import metadata as texts
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto

# The dashboard "Custom scalars" shows these in one chart, a line for each k.
PASS_AT_K = r"^eval/pass_at_\d+$"
MOST_CHARACTERS = 2000  # of a prompt or response in a text


class EventFile:
    """A new event file in a folder, which is created if it does not exist.

    Args:
        purge_step: TensorBoard drops what earlier files have from this step on.

    Raises:
        OSError: here and in all methods, if the disk refuses to write.
    """

    def __init__(self, folder: Path, purge_step: int = 0):
        folder.mkdir(exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        self._file = open(folder / f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}", "ab")  # noqa: SIM115
        self._records = RecordWriter(self._file)
        try:
            self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
            # Also in the first file: TensorBoard does not take the first start that it reads for a restart, and drops nothing.
            self._write(Event(wall_time=time.time(), step=purge_step, session_log=SessionLog(status=SessionLog.START)))
        except OSError:
            self._file.close()
            raise

    def write(self, numbers: Mapping[str, float], step: int) -> None:
        """Write the numbers of a step by name."""
        values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._write_summary(Summary(value=values), step)

    def write_start(self, options: Mapping[str, Any], name: str) -> None:
        """Write what the dashboards need of a run: its hyperparameters, and that pass@k of all k is one chart.

        Args:
            options: the hyperparameters: numbers, strings and booleans.
            name: of the run among others.
        """
        self._write_summary(summary_v2.hparams_pb(dict(options), trial_id=name), step=0)
        chart = layout_pb2.Chart(title="pass@k", multiline=layout_pb2.MultilineChartContent(tag=[PASS_AT_K]))
        layout = layout_pb2.Layout(category=[layout_pb2.Category(title="evaluation", chart=[chart])])
        metadata = custom_scalars.create_summary_metadata()
        self._write_tensor(custom_scalars.CONFIG_SUMMARY_TAG, layout.SerializeToString(), metadata, step=0)

    def write_success(self) -> None:
        """Write that the run has done all its steps. TensorBoard shows the last values of its metrics beside its options."""
        end = plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_SUCCESS, end_time_secs=time.time())
        metadata = hparams.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_end_info=end))
        value = Summary.Value(tag=hparams.SESSION_END_INFO_TAG, metadata=metadata, tensor=hparams.NULL_TENSOR)
        self._write_summary(Summary(value=[value]), step=0)

    def write_samples(self, records: Iterable[Mapping[str, Any]], step: int) -> None:
        """Write the samples of an evaluation, records of samples.jsonl, as one text."""
        metadata = texts.create_summary_metadata(display_name="samples", description="")
        self._write_tensor("samples", markdown(records).encode(errors="backslashreplace"), metadata, step)

    def _write_tensor(self, tag: str, content: bytes, metadata: SummaryMetadata, step: int) -> None:
        value = Summary.Value(tag=tag, metadata=metadata, tensor=make_tensor_proto(content))
        self._write_summary(Summary(value=[value]), step)

    def _write_summary(self, summary: Summary, step: int) -> None:
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def _write(self, event: Event) -> None:
        self._records.write(event.SerializeToString())
        self._file.flush()

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def markdown(records: Iterable[Mapping[str, Any]]) -> str:
    """Return samples as Markdown that TensorBoard shows character by character, whatever markup a response contains."""
    blocks = []
    for record in records:
        reward = "not known" if record["reward"] is None else f"{record['reward']:g}"
        ended = ", truncated" if record["truncated"] else ""
        blocks += [f"##### prompt {record['id']}, reward {reward}, {record['tokens']} tokens{ended}"]
        blocks += [_code(record["prompt"]), "response:", _code(record["response"])]
    return "\n\n".join(blocks)


def _code(text: str) -> str:
    """Return text as a code block of Markdown: one in which every line is indented has no mark that could end it."""
    if not text.strip():  # of which Markdown makes no block
        return "(empty)"
    omitted = len(text) - MOST_CHARACTERS
    shown = text if omitted <= 0 else f"{text[:MOST_CHARACTERS]}\n... {omitted:,} more characters"
    return "\n".join(f"    {line}" for line in shown.splitlines())
