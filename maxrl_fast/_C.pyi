"""The compiled kernels: csrc/bindings.cpp. Addresses are integers; only maxrl_fast.ops calls these."""

cuda: bool

class Formula:
    def __init__(self, *, value: str, baseline: str, scale: str, eps: float, ddof: int, gain: float, bias: float) -> None: ...

class Groups:
    def __init__(self, *, num_groups: int, group_size: int, num_rewards: int, offsets: int, order: int, valid: int) -> None: ...
    def distinct_sizes(self) -> list[int]: ...

def group_advantage_cpu(
    *,
    dtype: str,
    rewards: int,
    groups: Groups,
    lengths: int,
    tables: int,
    table_starts: int,
    largest_table: int,
    formula: Formula,
    advantages: int,
    num_threads: int,
) -> int: ...
def group_advantage_cuda(
    *,
    dtype: str,
    rewards: int,
    groups: Groups,
    lengths: int,
    tables: int,
    table_starts: int,
    largest_table: int,
    formula: Formula,
    advantages: int,
    stream: int,
) -> None: ...
