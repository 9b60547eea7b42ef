"""`--log-to tensorboard`: numbers, hyperparameters and samples as TensorBoard's events."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import summary_v2
from tensorboard.plugins.text import metadata as texts
from tensorboard.util.tensor_util import make_tensor_proto
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from maxrl_fast.config.names import OF_ONE_START

# charts in TensorBoard's "Custom scalars", with a line for each k
CHARTS = {name: ["Multiline", [rf"^eval/{name[:-2]}_at_\d+$"]] for name in ("pass@k", "max@k")}
MOST_CHARACTERS = 2000  # shown of a prompt or a response


class TensorBoard:
    """A new event file in the run's folder. A disk that refuses to write raises OSError.

    Args:
        options: the run's hyperparameters: numbers, strings and booleans.
        purge_step: TensorBoard drops earlier files' events from this step on.
    """

    def __init__(self, folder: Path, options: Mapping[str, Any], name: str, purge_step: int = 0):
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)
        self._add(summary_v2.hparams_pb(dict(options), trial_id=name), 0)
        self._writer.add_custom_scalars({"evaluation": CHARTS})

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        for name, number in numbers.items():
            self._writer.add_scalar(name, number, step)

    def log_samples(self, records: Iterable[Mapping[str, Any]], step: int) -> None:
        # Not add_text, which would make it a table of one cell.
        content = make_tensor_proto(markdown(records).encode(errors="backslashreplace"))
        metadata = texts.create_summary_metadata(display_name="samples", description="")
        value = Summary.Value(tag="samples", metadata=metadata, tensor=content)
        self._add(Summary(value=[value]), step)

    def _add(self, summary: Summary, step: int) -> None:
        writer: Any = self._writer.file_writer
        writer.add_summary(summary, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, is_done: bool) -> None:
        """The hyperparameters of a run that `is_done` get its last metrics."""
        if is_done:
            *_, session_end = hparams({}, {})
            self._add(session_end, 0)
        self._writer.close()


def markdown(records: Iterable[Mapping[str, Any]]) -> str:
    """Format samples as Markdown that TensorBoard shows literally, markup included."""
    blocks = []
    for record in records:
        reward = "not known" if record["reward"] is None else f"{record['reward']:g}"
        ended = ", truncated" if record["truncated"] else ""
        title = f"prompt {record['id']}, reward {reward}, {record['tokens']} tokens{ended}"
        blocks += [f"##### {title}", _code(record["prompt"])]
        blocks += ["response:", _code(record["response"])]
    return "\n\n".join(blocks)


def _code(text: str) -> str:
    """Return text as an indented code block, which no text can end early."""
    if not text.strip():  # Markdown has no empty block
        return "(empty)"
    omitted = len(text) - MOST_CHARACTERS
    shown = text if omitted <= 0 else f"{text[:MOST_CHARACTERS]}\n... {omitted:,} more characters"
    return "\n".join(f"    {line}" for line in shown.splitlines())


def hyperparameters(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options without those of a single start."""
    return {
        name: json.dumps(value) if isinstance(value, list | dict) else value
        for name, value in options.items()
        if name not in OF_ONE_START
    }
