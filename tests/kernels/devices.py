"""Where the tests of the kernels run: a CPU, an emulated GPU (tests/emulation), and a GPU."""

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from maxrl_fast import _C
from maxrl_fast.ops import dispatch

CPU = torch.device("cpu")
# Compute capabilities of the emulated GPU: with clusters of blocks, and without. With 9 the kernel
# of softmax_pipeline.cuh has rows with a gradient.
CLUSTERS, PIPELINE, NO_CLUSTERS = "10", "9", "8"


def run(call: dispatch.KernelLaunch, kernel: str, dtype: Any, record: Any) -> object:
    if isinstance(record, dict):
        record = dispatch.pack(kernel, record)
    name = "" if dtype is None else dispatch.dtype_name(dtype)
    return getattr(_C, f"{kernel}_cuda")(name, record, 0)


@contextlib.contextmanager
def emulated_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "is_gpu", lambda device: True)
        # without the CPU's short path
        patch.setattr(sys.modules["maxrl_fast.ops.group_advantage"], "_plan", lambda *key: None)
        patch.setattr(dispatch.KernelLaunch, "run", run)
        patch.setattr(dispatch, "run_plan", lambda plan, device, given: plan.run(given, 0))
        yield


@dataclass(frozen=True)
class Device:
    """A place where a test runs kernels: within `running`, on what `put` has given to it."""

    name: str  # "cpu", "emulated" or "cuda"
    is_reverse: bool = False  # the order of an emulated GPU's threads

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"

    @property
    def place(self) -> torch.device:
        return torch.device("cuda") if self.name == "cuda" else CPU

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Those that `running` may pretend, for rows that a cluster of blocks would share."""
        return (CLUSTERS, PIPELINE, NO_CLUSTERS) if self.name == "emulated" else (CLUSTERS,)

    def put(self, x: Any) -> Any:
        if isinstance(x, dict):
            return {name: self.put(value) for name, value in x.items()}
        return x.to(self.place) if isinstance(x, torch.Tensor) else x

    @contextlib.contextmanager
    def running(self, capability: str = CLUSTERS) -> Iterator[None]:
        if self.name != "emulated":
            yield
            return
        with pytest.MonkeyPatch.context() as patch, emulated_gpu():
            patch.setenv("MAXRL_EMULATED_CAPABILITY", capability)
            yield

    @contextlib.contextmanager
    def watched(self, names: list[str]) -> Iterator[None]:
        """Add the name of every kernel that is launched to a list."""
        with self.running(), pytest.MonkeyPatch.context() as patch:
            run = dispatch.KernelLaunch.run
            patch.setattr(
                dispatch.KernelLaunch,
                "run",
                lambda call, name, *given: (names.append(name), run(call, name, *given))[1],
            )
            yield
