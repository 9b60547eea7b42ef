"""Several processes of torchrun, one per GPU. Every rank has a step's records; only the work is
divided: prompts for sampling, groups for training."""

import atexit
import contextlib
import datetime
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from maxrl_fast.errors import InputError

COLLECTIVE_LIMIT = datetime.timedelta(minutes=30)  # longest wait for other ranks to finish a stage
# seconds for a first rank that started later to find and print the same error
FIRST_RANK_GRACE_SECONDS = 15.0
R = TypeVar("R")


@dataclass(frozen=True)
class Ranks:
    """This process and its collective operations; of one process they are the identity."""

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None  # None: all processes of the run
    on_host: bool = False  # a group of gloo, to which tensors go by the host

    @classmethod
    def of_environment(cls) -> "Ranks":
        return cls(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def part(self, count: int) -> tuple[int, int]:
        """Return start and length of this rank's share; lengths differ by at most one."""
        start, stop = (count * r // self.size for r in (self.rank, self.rank + 1))
        return start, stop - start

    def neighbours(self, count: int) -> "Ranks":
        """Return this process among `count` neighbouring ranks. All ranks must call this."""
        if count == 1:
            return Ranks()
        parts = ([*range(a, a + count)] for a in range(0, self.size, count))
        groups = [dist.new_group(part, timeout=COLLECTIVE_LIMIT) for part in parts]
        return Ranks(self.rank % count, count, groups[self.rank // count])

    def copied(self) -> "Ranks":
        """Return the same for another thread. All ranks must call this."""
        if self.size == 1:
            return self
        # NCCL's collectives of two threads may start in another order on another rank, and hang
        group = dist.new_group(timeout=COLLECTIVE_LIMIT, backend="gloo")
        return replace(self, group=group, on_host=True)

    def sum(self, x: Tensor) -> Tensor:
        """x may be overwritten."""
        if self.on_host and x.device.type != "cpu":
            return self.sum(x.cpu()).to(x.device)
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def any(self, flag: bool, device: torch.device) -> bool:
        return bool(self.sum(torch.tensor(int(flag), device=device))) if self.size > 1 else flag

    def from_first(self, x: Tensor) -> Tensor:
        """x may be overwritten."""
        if self.size > 1:
            dist.broadcast(x, group=self.group, group_src=0)
        return x

    def values(self, value: Any) -> list[Any]:
        line = torch.frombuffer(bytearray(json.dumps(value).encode() + b"\n"), dtype=torch.uint8)
        return [json.loads(x) for x in self.concatenate(line).numpy().tobytes().splitlines()]

    def wait_for_all(self) -> None:
        if self.size > 1:
            dist.barrier(self.group)

    def concatenate(self, x: Tensor) -> Tensor:
        """Concatenate x [n, ...] of all ranks in rank order; n may differ."""
        if self.size == 1:
            return x
        if x.dtype == torch.bool:
            return self.concatenate(x.to(torch.uint8)).bool()
        if self.on_host and x.device.type != "cpu":
            return self.concatenate(x.cpu()).to(x.device)
        counts = torch.zeros(self.size, dtype=torch.int64, device=x.device)
        counts[self.rank] = len(x)
        rows = self.sum(counts).tolist()
        padded = x.new_zeros(max(rows), *x.shape[1:])
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in rows]
        dist.all_gather(parts, padded, group=self.group)
        return torch.cat([part[:n] for part, n in zip(parts, rows, strict=True)])

    def gather(self, record: R) -> R:
        """Concatenate the records (Ragged) of all ranks, which must have no tuples."""
        kind: Any = type(record)
        whole: R = record if self.size == 1 else kind.concatenate([record], self.concatenate)
        return whole

    @contextlib.contextmanager
    def connected(self, device: torch.device) -> Iterator[None]:
        """Torchrun ends the others of a rank that fails; before, one may end with a sentence."""
        if self.size == 1:
            yield
            return
        try:
            if device.type == "cuda":
                torch.cuda.set_device(own_gpu())
            store, _, _ = next(rendezvous("env://", timeout=COLLECTIVE_LIMIT))
            # torchrun may start the ranks again with the same store, in which old keys stay
            start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=PrefixStore(f"maxrl_fast/{start}", store),
                rank=self.rank,
                world_size=self.size,
                timeout=COLLECTIVE_LIMIT,
            )
            yield
            dist.barrier()
        except RuntimeError as error:
            if not is_lost_connection(error):
                raise
            cause = str(error).splitlines()[0][:200]
            said = f"rank {self.rank} stops: another process of the run has ended ({cause})"
            print(f"error: {said}", file=sys.stderr)
            exit_process(1)
        dist.destroy_process_group()


def exit_process(code: int) -> NoReturn:
    """Exit after the atexit functions, without tearing down the interpreter, which a gloo thread
    that still releases a tensor would abort (pytorch issue 190489)."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def is_lost_connection(error: BaseException) -> bool:
    texts = r"connection (closed|reset|refused)|broken pipe|remote process exited"
    return isinstance(error, RuntimeError) and bool(re.search(texts, str(error), re.IGNORECASE))


def own_gpu() -> int:
    """The local rank, or 0 if the process sees only one GPU."""
    number, visible = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if number >= visible > 1:
        raise InputError(
            f"process {number} of this machine needs its own GPU, but there are {visible}"
        )
    return number if visible > 1 else 0


@contextlib.contextmanager
def rank0_reports(ranks: Ranks) -> Iterator[None]:
    """Let only the first rank print, including the message of an error that ends the process."""
    if ranks.is_first:
        yield
        return
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        try:
            yield
        except SystemExit as error:
            if error.code:  # torchrun ends the first rank as soon as this one has ended
                time.sleep(FIRST_RANK_GRACE_SECONDS)
            raise
