"""Several processes started by torchrun, one for each GPU: what each computes, and what all of them then have.

Every rank has the records of the whole step, prompts, rollouts, rewards and advantages; only the computing is divided. Prompts
are dealt out for sampling, groups for training, and gradients are summed by DDP, or by FSDP2 where the policy does not fit.
"""

import contextlib
import datetime
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from maxrl_fast.errors import InputError
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.records import Rollouts, cumulative

COLLECTIVE_LIMIT = datetime.timedelta(minutes=30)  # the longest that a rank waits for the others to finish a stage
SILENCE_LIMIT = 40.0  # seconds after which a rank that says nothing counts as dead
START_LIMIT = 300.0  # the same before its first sign of life
PATIENCE = 3.0  # seconds in which torchrun, where the first to fail is its own, ends the others before they repeat the message
LATECOMER = 15.0  # seconds in which the first rank, should it have started later, finds the same mistake and says it
BEAT = 1.0  # seconds between signs of life
STACKS_LIMIT = datetime.timedelta(seconds=20)  # in which the ranks hear that one is stuck, and write their stacks
STUCK, SILENT = "the run is stuck", "has not been heard of for"  # in messages upon which ranks write their stacks


@dataclass(frozen=True)
class Ranks:
    """This process among all, and what they do together. With one process every method is the identity."""

    rank: int = 0
    size: int = 1

    @classmethod
    def of_environment(cls) -> "Ranks":
        """As torchrun says."""
        return cls(int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)))

    @property
    def is_first(self) -> bool:
        """Whether this process writes and speaks for all."""
        return self.rank == 0

    def part(self, count: int) -> tuple[int, int]:
        """This rank's share of `count` things: start and number. Shares differ by one at most."""
        start, stop = (count * r // self.size for r in (self.rank, self.rank + 1))
        return start, stop - start

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks, on every rank; x may be overwritten."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def any(self, flag: bool, device: torch.device) -> bool:
        """Whether it is so on some rank."""
        return bool(self.sum(torch.tensor(int(flag), device=device))) if self.size > 1 else flag

    def from_first(self, x: Tensor) -> Tensor:
        """The first rank's x, on every rank; x may be overwritten."""
        if self.size > 1:
            dist.broadcast(x, 0)
        return x

    def text_from_first(self, text: str) -> str:
        """The first rank's text, on every rank."""
        if self.size == 1:
            return text
        encoded = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        length = self.from_first(torch.tensor(len(encoded)))
        encoded = encoded if self.is_first else torch.empty(int(length), dtype=torch.uint8)
        return bytes(self.from_first(encoded).tolist()).decode().strip()

    def texts(self, text: str) -> list[str]:
        """The lines of all ranks' texts that are not empty."""
        encoded = torch.frombuffer(bytearray(text.encode() + b"\n"), dtype=torch.uint8)
        lines = bytes(self.concatenate(encoded).tolist()).decode().split("\n")
        return [line for line in lines if line]

    def wait_for_all(self) -> None:
        """Until every rank is here."""
        if self.size > 1:
            dist.barrier()

    def concatenate(self, x: Tensor) -> Tensor:
        """The rows [n, ...] of all ranks in the order of the ranks; n may differ."""
        if self.size == 1:
            return x
        counts = torch.zeros(self.size, dtype=torch.int64, device=x.device)
        counts[self.rank] = len(x)
        rows = self.sum(counts).tolist()
        padded = x.new_zeros(max(rows), *x.shape[1:])
        padded[: len(x)] = x
        parts = [torch.empty_like(padded) for _ in rows]
        dist.all_gather(parts, padded)
        return torch.cat([part[:n] for part, n in zip(parts, rows, strict=True)])

    def concatenate_rollouts(self, rollouts: Rollouts) -> Rollouts:
        """The rollouts of all ranks in the order of the ranks."""
        if self.size == 1:
            return rollouts
        return Rollouts(
            tokens=self.concatenate(rollouts.tokens),
            cu_seqlens=cumulative(self.concatenate(rollouts.lengths)),
            logprobs=self.concatenate(rollouts.logprobs),
            truncated=self.concatenate(rollouts.truncated.to(torch.uint8)).bool(),
            raw_logprobs=None if rollouts.raw_logprobs is None else self.concatenate(rollouts.raw_logprobs),
        )

    @contextlib.contextmanager
    def connected(self, device: torch.device) -> Iterator["Watch | None"]:
        """Collectives work inside. A rank that fails ends the others, with its message, within a minute.

        Gives what tells the other ranks of a failure; None with one process.
        """
        if self.size == 1:
            yield None
            return
        store, _, _ = next(rendezvous("env://", timeout=datetime.timedelta(seconds=START_LIMIT)))
        store.set_timeout(COLLECTIVE_LIMIT)  # communicators connect through it at their first use
        watch = Watch(PrefixStore("maxrl_fast/watch", store.clone()), self)
        watch.start()
        try:
            if device.type == "cuda":
                torch.cuda.set_device(own_gpu())
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=PrefixStore("maxrl_fast", store),
                rank=self.rank,
                world_size=self.size,
                timeout=COLLECTIVE_LIMIT,
            )
            yield watch
            dist.barrier()
        except InputError as error:
            watch.say_failed(str(error))
            raise
        except BaseException as error:
            # A collective that fails is most often the consequence of what another rank has said.
            cause = watch.say_failed(f"{type(error).__name__}: {error}")
            if cause is None:
                raise
            print(f"error: {cause}; rank {self.rank} stops", file=sys.stderr, flush=True)
            raise SystemExit(1) from error
        watch.stop()
        dist.destroy_process_group()


def own_gpu() -> int:
    """The number of this process's GPU: that of the process on its machine, or the only one that it sees."""
    number, visible = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if number >= visible > 1:
        raise InputError(f"process {number} of this machine needs a GPU of its own, but there are {visible}")
    return number if visible > 1 else 0


@contextlib.contextmanager
def said_by_first(ranks: Ranks) -> Iterator[None]:
    """What is printed inside, and makes the process end, is said by the first rank alone."""
    if ranks.is_first:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        try:
            yield
        except SystemExit as error:
            time.sleep(LATECOMER if error.code else 0)  # else torchrun would end the first on this one's account
            raise


def dump_stacks(who: str) -> None:
    """Where every thread of this process is, on standard error, whatever the threads are in."""
    os.write(2, f"\nstacks of {who} (process {os.getpid()}):\n".encode())
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)


class Watch(threading.Thread):
    """Says to the other ranks that this one lives, and ends this process once another has failed or fallen silent.

    Without it a rank would wait for a dead one in the next collective for as long as that may take.
    """

    def __init__(self, store: Store, ranks: Ranks):
        super().__init__(name="watch", daemon=True)
        self._store, self._ranks = store, ranks
        self._stopped = threading.Event()
        self._heard = {rank: (b"", time.monotonic()) for rank in range(ranks.size) if rank != ranks.rank}
        self._turned = time.monotonic()  # when this thread last had an answer of the store
        self.dump_workers: Callable[[], None] = lambda: None  # makes worker processes write their stacks

    def start(self) -> None:
        """Begin; another thread watches this one, which waits without a limit for a store whose process is frozen."""
        super().start()
        threading.Thread(target=self._watch_store, name="watch of the store", daemon=True).start()

    def _watch_store(self) -> None:
        while not self._stopped.wait(BEAT):
            silence = time.monotonic() - self._turned
            if silence > SILENCE_LIMIT:
                self._write_stacks()
                self._end(f"the store that connects the ranks, of rank 0 or torchrun, has not answered for {silence:.0f} s")

    def _write_stacks(self) -> None:
        dump_stacks(f"rank {self._ranks.rank}")
        self.dump_workers()

    def _end(self, message: str) -> None:
        """End this process: the main thread may wait inside a collective, where no exception reaches it."""
        print(f"error: {message}; rank {self._ranks.rank} stops", file=sys.stderr, flush=True)
        os._exit(1)

    def run(self) -> None:
        beat = 0
        while beat == 0 or not self._stopped.wait(BEAT):
            beat += 1
            try:
                self._store.set(f"alive/{self._ranks.rank}", str(beat))
                message = self._failure()
                self._turned = time.monotonic()
            except (RuntimeError, dist.DistError) as error:  # the store lives in torchrun, or on the first machine
                message = f"the store that connects the ranks does not answer: {error}"
            if message and (STUCK in message or SILENT in message):
                self._write_stacks()  # at once: the rank that is stuck waits for them before it ends
                with contextlib.suppress(RuntimeError, dist.DistError):
                    self._store.set(f"stacks/{self._ranks.rank}", "written")
            if message and not self._stopped.wait(PATIENCE):
                self._end(message)

    def _failure(self) -> str | None:
        """What happened to another rank."""
        if self._store.check(["failed"]):
            message: str = self._store.get("failed").decode()
            return message
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
        """Let the other ranks end with this rank's message; or return that of the rank that failed before."""
        self._stopped.set()
        own = f"rank {self._ranks.rank} failed: {message}"
        try:
            said: str = self._store.compare_set("failed", "", own).decode()  # the first message stays
        except (RuntimeError, dist.DistError):  # the store may be what failed
            return None
        return None if said == own else said

    def say_stuck(self, message: str) -> None:
        """Let the other ranks write their stacks and end, with this rank's message; return once they have written them.

        This rank has written its own. Its end breaks the collective that the others wait in, and with it their stacks.
        """
        self.say_failed(message)
        with contextlib.suppress(RuntimeError, dist.DistError):
            self._store.set(f"stacks/{self._ranks.rank}", "written")
            self._store.wait([f"stacks/{rank}" for rank in range(self._ranks.size)], STACKS_LIMIT)

    def stop(self) -> None:
        """This rank is done."""
        self._stopped.set()
        self.join()
        with contextlib.suppress(RuntimeError, dist.DistError):  # the others, and the store with them, may be gone by now
            self._store.set(f"alive/{self._ranks.rank}", "done")


def is_sharded(sharding: str, model: Decoder, ranks: Ranks, device: torch.device) -> bool:
    """What an option --sharding comes to, the same on all ranks: "auto" is "full" where float32 weights, gradients and
    moments of what is trained, and the rollout engine's copy, would take more than half of some rank's GPU."""
    if ranks.size == 1 or sharding == "none":
        return False
    if sharding == "full" or device.type != "cuda":
        return sharding == "full"
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    wanted = sum(size * (20 if is_trained else 8) for size, is_trained in sizes)
    return ranks.any(wanted > torch.cuda.get_device_properties(device).total_memory / 2, device)


def distribute(model: Decoder, reference: Decoder | None, ranks: Ranks, dtype: torch.dtype, sharded: bool) -> nn.Module:
    """The module whose forward and backward passes all ranks run together; its gradients are means over the ranks.

    Args:
        model, reference: on their device, equal on all ranks. Sharded, they are so in place.
        dtype: of the computation, in which sharded weights are gathered.
    """
    if ranks.size == 1:
        return model
    if not sharded:
        return DistributedDataParallel(model, gradient_as_bucket_view=True)
    for policy in (model, reference):
        if policy is not None:
            shard(policy, dtype)
    return model


def shard(model: Decoder, dtype: torch.dtype) -> None:
    """Divide every weight among the ranks, in place; a layer's are gathered while it computes (FSDP2)."""
    from torch.distributed.device_mesh import init_device_mesh  # here: they take most of a second to import
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    device = model.lm_head.weight.device
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # By default what no layer holds would stay whole after a forward pass without a backward one, and hide its sharded self.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def gradients_stay(module: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Passes inside add to this rank's gradients, without those of the others."""
    if isinstance(module, DistributedDataParallel):
        return module.no_sync()
    return contextlib.nullcontext()
