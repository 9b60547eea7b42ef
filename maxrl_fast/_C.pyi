"""The compiled kernels: csrc/bindings.cpp. Addresses are integers; only maxrl_fast.ops calls these."""

cuda: bool

def rank_transform_cpu_float32(
    *, rewards: int, weights: int, advantages: int, num_groups: int, group_size: int, centred: bool
) -> None: ...
def rank_transform_cpu_float64(
    *, rewards: int, weights: int, advantages: int, num_groups: int, group_size: int, centred: bool
) -> None: ...
def rank_transform_cuda_float32(
    *, rewards: int, weights: int, advantages: int, num_groups: int, group_size: int, centred: bool, stream: int
) -> None: ...
def rank_transform_cuda_float64(
    *, rewards: int, weights: int, advantages: int, num_groups: int, group_size: int, centred: bool, stream: int
) -> None: ...
