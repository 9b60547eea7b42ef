"""Stops a run on a signal, and ends it when it is stuck."""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

import torch

from maxrl_fast.runtime.background import Stopwatch
from maxrl_fast.runtime.ranks import Ranks

# seconds in which a repeated signal counts as one: the terminal sends it, and torchrun forwards it
ECHO = 1.0
SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}


class Interrupted(Exception):
    """Raised at a safe point after a signal; `signal` is its number."""

    def __init__(self, number: int):
        super().__init__(SIGNALS[signal.Signals(number)])
        self.signal = number


class StoppedNow(KeyboardInterrupt):
    @property
    def signal(self) -> int:
        return int(self.args[0])


class StopSignal:
    """Turns the first signal into a stop at the next safe point, the same one on all ranks; a
    second one stops at once. A SIGHUP that is ignored, as under nohup, stays ignored. Outside the
    main thread, where Python allows no handlers, signals keep theirs."""

    def __init__(self, ranks: Ranks | None = None, device: torch.device | None = None) -> None:
        self._asked, self._since, self._before = 0, 0.0, dict[signal.Signals, Any]()
        self._ranks, self._device = ranks or Ranks(), device or torch.device("cpu")

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._asked:
            self._asked, self._since = number, now
            if self._ranks.is_first:
                said = f"{SIGNALS[signal.Signals(number)]}: saving and stopping after this step"
                write_directly(f"\n{said}; repeat to stop immediately, without saving\n")
        elif now - self._since > ECHO:
            raise StoppedNow(number)

    @property
    def number(self) -> int:
        """The signal that asked any rank to stop, or 0. All ranks must read it together."""
        if self._ranks.any(bool(self._asked), self._device):
            return self._asked or signal.SIGTERM
        return 0


class StallWatchdog(threading.Thread):
    """Writes the stacks of all threads, and if it `ends_process` ends this process, when a stage
    makes no progress for `limit` seconds. Time in which the process was stopped does not count."""

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
        interval, silence, beats = min(1.0, self._limit / 4), 0.0, -1
        while silence <= self._limit:
            silence = silence + interval if beats == self._clock.beats else 0.0
            beats = self._clock.beats
            if self._stopped.wait(interval):
                return
        write_directly(
            f"\nerror: the run is stuck in {self._clock.stage}: no progress for {silence:.0f} s, "
            f"--stall-limit is {self._limit:g} s; the stacks show where, --resume continues it\n"
        )
        faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        if self._ends_process:  # the main thread is blocked: an exception would not reach it
            os._exit(1)


def write_directly(text: str) -> None:
    """Write to standard error without Python's buffers: a signal may interrupt another print."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode())
