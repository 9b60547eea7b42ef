"""What Python names of the compiled module, csrc/bindings/.

Kernels, whose names end in _cpu and _cuda, are called through `KernelLaunch.launch` of
maxrl_fast/ops/dispatch.py, and check the names and types of their arguments themselves.
"""

from typing import Any

cuda: bool
# of the records that Python names too: Loss, LossSums
FIELDS: dict[str, tuple[str, ...]]
MAX_LOG_RATIO: float
LOSS_WORKSPACE: int  # only with CUDA kernels

# The instruction sets that the CPU's kernels can use here, the widest first, and a limit to one of
# them for this process. For tests: no kernel may run meanwhile; bfloat16 decoding names its own.
def instruction_sets() -> list[str]: ...
def limit_instructions(name: str) -> None: ...
def bfloat16_arithmetics() -> list[str]: ...
def fastest_for_bfloat16() -> str: ...
def full_groups_float32(*given: float) -> bool: ...  # csrc/bindings/group_advantage.cpp
def full_groups_float64(*given: float) -> bool: ...

class CpuDecoder:
    def __init__(
        self, **sizes: Any
    ) -> None: ...  # DecoderSizes of csrc/generation.h, positions, cos, sin
    def load(
        self,
        *,
        embedding: int,
        norm: int,
        head: int,
        layers: list[dict[str, int]],
        num_threads: int,
    ) -> None: ...
    def cache_bytes(self, length: int) -> int: ...
    def forget(self) -> None: ...
    kept_bytes: int

class CpuGeneration:
    def __init__(
        self, decoder: CpuDecoder, **job: Any
    ) -> None: ...  # GenerationJob of csrc/generation.h, num_threads
    def run(self, seconds: float) -> bool: ...
    def take_turns(self) -> list[int]: ...
    @property
    def all_wait(self) -> bool: ...
    def feed(self, sample: int, tokens: list[int]) -> None: ...
    @property
    def statistics(self) -> dict[str, Any]: ...  # GenerationStatistics of csrc/generation.h
