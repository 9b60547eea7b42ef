"""Heartbeats between ranks: a rank ends when another has failed, stopped responding or is stuck."""

import contextlib
import faulthandler
import os
import sys
import threading
import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

SILENCE_LIMIT = 40.0  # seconds without a heartbeat after which a rank counts as dead
START_LIMIT = 300.0  # the same, before a rank's first heartbeat
# seconds before this rank repeats another's error; on the same machine torchrun ends it first
PATIENCE = 3.0
BEAT = 1.0  # seconds between heartbeats


class RankMonitor(threading.Thread):
    """Sends heartbeats to the other ranks, and ends this process when another rank has failed or
    stopped sending them.

    Without it a rank would wait for a dead rank in the next collective until COLLECTIVE_LIMIT. The
    store that connects the ranks, in rank 0 or torchrun, may be frozen, and then this thread waits
    for it: faulthandler's timer, which each heartbeat renews, ends the process with its stacks.
    """

    def __init__(self, store: Store, rank: int, size: int):
        super().__init__(name="watch", daemon=True)
        self._store, self._rank = store, rank
        self._stopped = threading.Event()
        self._heard = {other: (b"", time.monotonic()) for other in range(size) if other != rank}

    def run(self) -> None:
        beat = 0
        while beat == 0 or not self._stopped.wait(BEAT):
            beat += 1
            faulthandler.dump_traceback_later(SILENCE_LIMIT, file=sys.__stderr__ or 2, exit=True)
            try:
                self._store.set(f"alive/{self._rank}", str(beat))
                message = self._failure()
            # the store runs in torchrun, or on the first machine
            except (RuntimeError, dist.DistError) as error:
                message = f"the store that connects the ranks does not answer: {error}"
            if message and not self._stopped.wait(PATIENCE):
                print(f"error: {message}; rank {self._rank} stops", file=sys.stderr, flush=True)
                os._exit(1)  # the main thread may wait inside a collective
        faulthandler.cancel_dump_traceback_later()

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
                return f"rank {rank} has not been heard of for {now - since:.0f} s"
        return None

    def report_failure(self, message: str) -> str | None:
        """Make the others end with this message. If another failed first, return its message."""
        self._stopped.set()
        own = f"rank {self._rank} failed: {message}"
        try:
            # the first message stays
            said: str = self._store.compare_set("failed", "", own).decode()
        except (RuntimeError, dist.DistError):  # the store may be what failed
            return None
        return None if said == own else said

    def stop(self) -> None:
        self._stopped.set()
        self.join()
        # the others may have ended, and the store with them
        with contextlib.suppress(RuntimeError, dist.DistError):
            self._store.set(f"alive/{self._rank}", "done")
