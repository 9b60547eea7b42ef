"""Stops a run on a signal, and ends it when it is stuck."""

import faulthandler
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import torch

from maxrl_fast.runtime.output import write_directly
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.training.stopwatch import Stopwatch

# seconds in which a repeated signal counts as one: the terminal sends it, and torchrun forwards it
ECHO = 1.0
SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


class Interrupted(Exception):
    """Raised at a safe point after a signal; `signal` is its number."""

    def __init__(self, number: int):
        super().__init__(SIGNALS.get(signal.Signals(number), signal.Signals(number).name))
        self.signal = number


class StoppedNow(KeyboardInterrupt):
    def __init__(self, number: int):
        super().__init__(number)
        self.signal = number


class StopSignal:
    """Turns the first Ctrl-C, SIGTERM or SIGHUP into a stop at the next safe point, the same one on
    all ranks. A second signal stops immediately. A SIGHUP that is ignored, as under nohup, stays
    ignored. Outside the main thread, where Python allows no handlers, signals keep theirs."""

    def __init__(self, ranks: Ranks | None = None, device: torch.device | None = None) -> None:
        self._asked, self._since = 0, 0.0
        self._ranks, self._device = ranks or Ranks(), device or torch.device("cpu")

    def __enter__(self) -> "StopSignal":
        handled = [*SIGNALS]
        if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            handled.remove(signal.SIGHUP)
        if threading.current_thread() is not threading.main_thread():
            handled = []
        self._before: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._handle) for number in handled
        }
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._asked:
            self._asked, self._since = number, now
            # Not print: the signal may interrupt another print, and a buffered stream is not
            # reentrant.
            if self._ranks.is_first:
                advice = "repeat to stop immediately, without saving"
                name = SIGNALS[signal.Signals(number)]
                write_directly(f"\n{name}: saving and stopping after this step; {advice}\n")
        elif now - self._since > ECHO:
            raise StoppedNow(number)

    @property
    def number(self) -> int:
        """The signal that asked any rank to stop, or 0. All ranks must read it together."""
        if self._ranks.any(bool(self._asked), self._device):
            return self._asked or signal.SIGTERM
        return 0


class StallWatchdog(threading.Thread):
    """Ends this process when a stage makes no progress for `limit` seconds, after the stacks of all
    threads have been written to standard error. Time in which the process itself was stopped does
    not count. `ends_process` is False in a notebook, which outlives the run."""

    def __init__(self, clock: Stopwatch, limit: float, ends_process: bool = True):
        super().__init__(name="watchdog", daemon=True)
        self._clock, self._limit, self._ends_process = clock, limit, ends_process
        self._stopped = threading.Event()

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, *error: object) -> None:
        self._stopped.set()
        self.join()

    def run(self) -> None:
        interval, silence, before = min(1.0, self._limit / 4), 0.0, time.monotonic()
        while silence <= self._limit:
            if self._stopped.wait(interval):
                return
            passed, before = time.monotonic() - before, time.monotonic()
            stage, since = self._clock.silence()
            silence = min(since, silence + min(passed, 2 * interval))
        write_directly(
            f"\nerror: the run is stuck in {stage}: no progress for {silence:.0f} s, --stall-limit "
            f"is {self._limit:g} s. --resume continues from the last checkpoint; the stacks show "
            "where it waits.\n"
        )
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        if self._ends_process:  # the main thread is blocked: an exception would not reach it
            os._exit(1)
