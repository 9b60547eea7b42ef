"""A name for one start of the ranks: torchrun keeps its store, with the old keys, when it restarts them (--max-restarts)."""

import time
import uuid

from torch.distributed.distributed_c10d import Store

PAUSE = 0.05  # seconds between two looks at the store


def name_of_attempt(store: Store, rank: int, size: int, limit: float) -> str:
    """Return a prefix of keys that only the ranks of this start use, the same on all of them, once all have come.

    Every rank makes up a name. The first rank lists the names that it finds, its own first, until every rank has found its name
    in the list. So the ranks need not know how often they were started: torchrun on several machines does not count alike.

    Args:
        limit: seconds to wait for the other ranks.

    Raises:
        RuntimeError: where a rank has not come within the limit.
    """
    own, end = uuid.uuid4().hex, time.monotonic() + limit
    others = range(1, size)
    if rank:
        store.set(f"name/{rank}", own)
    while time.monotonic() < end:
        if rank == 0:
            if store.check([f"{own}/came/{other}" for other in others]):
                return own
            names = [store.get(f"name/{other}").decode() for other in others if store.check([f"name/{other}"])]
            store.set("names", " ".join([own, *names]))
        elif store.check(["names"]) and own in (names := store.get("names").decode().split()):
            store.set(f"{names[0]}/came/{rank}", "")
            return names[0]
        time.sleep(PAUSE)
    raise RuntimeError(f"rank {rank} has waited {limit:.0f} s for the other processes to start")
