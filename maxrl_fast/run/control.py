"""Stopping and watching a run."""

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import torch

from maxrl_fast.distributed.ranks import Ranks
from maxrl_fast.distributed.watch import STUCK, dump_stacks
from maxrl_fast.training.stopwatch import Stopwatch

ECHO = 1.0  # seconds in which a signal that comes again is the same one: from the terminal, and passed on by torchrun
TELL_LIMIT = 30.0  # seconds in which the other ranks hear that this one is stuck, and write their stacks
SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


class Interrupted(Exception):
    """A signal asked the run to stop, and it is at a point where it can. `signal` is its number."""

    def __init__(self, number: int):
        super().__init__(SIGNALS.get(signal.Signals(number), signal.Signals(number).name))
        self.signal = number


class StopSignal:
    """Turns the first Ctrl-C or SIGTERM into a stop at the next safe point, of all ranks at the same; a second one stops at
    once."""

    def __init__(self, ranks: Ranks | None = None, device: torch.device | None = None) -> None:
        self._asked, self._since = 0, 0.0
        self._ranks, self._device = ranks or Ranks(), device or torch.device("cpu")

    def __enter__(self) -> "StopSignal":
        self._before: dict[signal.Signals, Any] = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._asked:
            self._asked, self._since = number, now
            # Not print: the signal may have come in the middle of one, and a buffered stream must not be entered twice.
            if self._ranks.is_first:
                name = SIGNALS[signal.Signals(number)]
                os.write(2, f"\n{name}: saving and stopping after this step; again, to stop at once without saving\n".encode())
        elif now - self._since > ECHO:
            raise SystemExit(128 + number)

    @property
    def number(self) -> int:
        """The signal that asked for a stop, of this rank or another, at a point that all ranks reach; 0: none did."""
        return (self._asked or signal.SIGTERM) if self._ranks.any(bool(self._asked), self._device) else 0


class Watchdog(threading.Thread):
    """Ends a process whose stages stand still, with the stacks of all processes.

    Args:
        clock: of the run.
        limit: seconds that a stage may take without progress.
        tell: hands the message to the other ranks, and waits until they have written their stacks too.
        dump_workers: makes worker processes write their stacks.
    """

    def __init__(
        self, clock: Stopwatch, limit: float, ranks: Ranks, tell: Callable[[str], object], dump_workers: Callable[[], None]
    ):
        super().__init__(name="watchdog", daemon=True)
        self._clock, self._limit, self._ranks = clock, limit, ranks
        self._tell, self._dump_workers = tell, dump_workers
        self._stopped = threading.Event()

    def __enter__(self) -> "Watchdog":
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopped.set()
        self.join()

    def run(self) -> None:
        while not self._stopped.wait(min(1.0, self._limit / 4)):
            stage, silence = self._clock.silence()
            if silence > self._limit:
                message = f"{STUCK} in {stage}: no progress for {silence:.0f} s, --stall-limit is {self._limit:g} s"
                os.write(
                    2,
                    f"\nerror: {message}. --resume goes on from the last checkpoint; the stacks say where it waits.\n".encode(),
                )
                dump_stacks(f"rank {self._ranks.rank}")
                self._dump_workers()
                telling = threading.Thread(target=self._tell, args=(message,), daemon=True)  # which may be what is stuck
                telling.start()
                telling.join(TELL_LIMIT)
                os._exit(1)  # the main thread may be where no exception reaches it
