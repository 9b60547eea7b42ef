"""Heartbeats between ranks: a rank ends when another has failed, stopped responding or is stuck."""

import contextlib
import datetime
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from maxrl_fast.runtime.output import write_directly

SILENCE_LIMIT = 40.0  # seconds without a heartbeat after which a rank counts as dead
START_LIMIT = 300.0  # the same, before a rank's first heartbeat
# seconds before this rank repeats another's error; on the same machine torchrun ends it first
PATIENCE = 3.0
BEAT = 1.0  # seconds between heartbeats
# for all ranks to notice that one is stuck, and to write their stacks
STACKS_LIMIT = datetime.timedelta(seconds=20)
# messages with one of these make ranks write their stacks
STUCK, SILENT = "the run is stuck", "has not been heard of for"


def dump_stacks(who: str) -> None:
    """Write the stacks of all threads to standard error, even if they are blocked in C code."""
    write_directly(f"\nstacks of {who} (process {os.getpid()}):\n")
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)


class RankMonitor(threading.Thread):
    """Sends heartbeats to the other ranks, and ends this process when another rank has failed or
    stopped sending them.

    Without it a rank would wait for a dead rank in the next collective until COLLECTIVE_LIMIT.
    """

    def __init__(self, store: Store, rank: int, size: int):
        super().__init__(name="watch", daemon=True)
        self._store, self._rank, self._size = store, rank, size
        self._stopped = threading.Event()
        self._heard = {other: (b"", time.monotonic()) for other in range(size) if other != rank}
        self._turned = time.monotonic()  # when the store last answered this thread
        # makes worker processes write their stacks
        self.dump_workers: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Start the thread, and a second one that watches it: the first waits forever if the
        store's process is frozen.
        """
        super().start()
        threading.Thread(target=self._watch_store, name="watch of the store", daemon=True).start()

    def _watch_store(self) -> None:
        while not self._stopped.wait(BEAT):
            silence = time.monotonic() - self._turned
            if silence > SILENCE_LIMIT:
                self._write_stacks()
                self._end(
                    "the store that connects the ranks, in rank 0 or torchrun, has not answered "
                    f"for {silence:.0f} s"
                )

    def _write_stacks(self) -> None:
        dump_stacks(f"rank {self._rank}")
        self.dump_workers()

    def _end(self, message: str) -> None:
        """The main thread may wait inside a collective."""
        print(f"error: {message}; rank {self._rank} stops", file=sys.stderr, flush=True)
        os._exit(1)

    def run(self) -> None:
        beat = 0
        while beat == 0 or not self._stopped.wait(BEAT):
            beat += 1
            try:
                self._store.set(f"alive/{self._rank}", str(beat))
                message = self._failure()
                self._turned = time.monotonic()
            # the store runs in torchrun, or on the first machine
            except (RuntimeError, dist.DistError) as error:
                message = f"the store that connects the ranks does not answer: {error}"
            if message and (STUCK in message or SILENT in message):
                self._write_stacks()  # immediately: the stuck rank waits for them before it ends
                with contextlib.suppress(RuntimeError, dist.DistError):
                    self._store.set(f"stacks/{self._rank}", "written")
            if message and not self._stopped.wait(PATIENCE):
                self._end(message)

    def _failure(self) -> str | None:
        if self._store.check(["failed"]):
            return self._store.get("failed").decode()
        now = time.monotonic()
        for rank, (last, since) in self._heard.items():
            key = f"alive/{rank}"
            beat = self._store.get(key) if self._store.check([key]) else b""
            if beat != last:
                self._heard[rank] = (beat, now)
            elif now - since > (SILENCE_LIMIT if beat else START_LIMIT) and beat != b"done":
                return f"rank {rank} {SILENT} {now - since:.0f} s"
        return None

    def say_failed(self, message: str) -> str | None:
        """Make the others end with this message. If another failed first, return its message."""
        self._stopped.set()
        own = f"rank {self._rank} failed: {message}"
        try:
            # the first message stays
            said: str = self._store.compare_set("failed", "", own).decode()
        except (RuntimeError, dist.DistError):  # the store may be what failed
            return None
        return None if said == own else said

    def say_stuck(self, message: str) -> None:
        """Make the other ranks write their stacks and end with this rank's message; return once the
        stacks are written.

        This rank must have written its stacks before. When it ends, the collective in which the
        others wait fails, and their stacks are lost.
        """
        self.say_failed(message)
        with contextlib.suppress(RuntimeError, dist.DistError):
            self._store.set(f"stacks/{self._rank}", "written")
            self._store.wait([f"stacks/{rank}" for rank in range(self._size)], STACKS_LIMIT)

    def stop(self) -> None:
        self._stopped.set()
        self.join()
        # the others may have ended, and the store with them
        with contextlib.suppress(RuntimeError, dist.DistError):
            self._store.set(f"alive/{self._rank}", "done")
