"""Stopping and timing a run."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch

from maxrl_fast.parallel import Ranks


class Interrupted(Exception):
    """Ctrl-C was pressed and the run is at a point where it can stop."""


class StopSignal:
    """Turns the first Ctrl-C into a stop at the next safe point, of all ranks at the same; a second one stops at once."""

    def __init__(self, ranks: Ranks | None = None, device: torch.device | None = None) -> None:
        self._asked = False
        self._ranks, self._device = ranks or Ranks(), device or torch.device("cpu")

    def __enter__(self) -> "StopSignal":
        self._before: Any = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def release(self) -> None:
        """Give Ctrl-C back: there is no safe point to come."""
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Not print: the signal may have come in the middle of one, and a buffered stream must not be entered twice.
        if self._ranks.is_first:
            os.write(2, b"\nCtrl-C: stopping after this step; press it again to stop at once, without saving\n")

    def check(self) -> None:
        """Raise Interrupted if Ctrl-C was pressed: called where the weights are whole."""
        if self._ranks.any(self._asked, self._device):
            raise Interrupted


@dataclass
class Lap:
    seconds: float = 0.0


class Stopwatch:
    """Wall time by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[Lap]:
        lap, start = Lap(), time.perf_counter()
        try:
            yield lap
        finally:
            lap.seconds = time.perf_counter() - start
            self.seconds[stage] = self.seconds.get(stage, 0.0) + lap.seconds
