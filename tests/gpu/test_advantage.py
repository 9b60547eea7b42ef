"""The CUDA group advantages against the CPU kernels, on side streams, in CUDA graphs, and without
synchronization.
"""

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.ops.group_advantage_kernel import forget_tables

pytestmark = pytest.mark.gpu
OP = torch.ops.maxrl_fast.group_advantage.default
SHAPES = [(1, 1), (3, 8), (5, 31), (4, 33), (2, 257), (300, 16), (3, 1024), (2, 3000), (1, 4096)]
KERNELS = {name: row for name, row in ops.ESTIMATORS.items() if row.kernel is not None}
# Those with the same formula differ only in numbers, so one of them runs in float64 too.
FORMULAS = {
    (row.kernel.table is None, row.kernel.centred, row.kernel.scale): name
    for name, row in KERNELS.items()
}
CASES = [
    *((name, torch.float32) for name in KERNELS),
    *((name, torch.float64) for name in FORMULAS.values()),
]
LARGE = ("maxpo", "grpo")  # they run at all sizes


def arguments(name):
    row = KERNELS[name]
    options = [option.default for option in row.options.values()]
    return name, 2 if row.size is not None else 0, options


def examples(name, dtype):
    """Yield rewards with ties and an offset, and a mask or None, at odd sizes."""
    generator = torch.Generator().manual_seed(0)
    for shape in SHAPES if dtype == torch.float32 and name in LARGE else SHAPES[:5]:
        rewards = ((torch.randn(shape, generator=generator) * 4).round() / 4 + 100).to(dtype)
        yield rewards, None
        yield rewards, torch.rand(shape, generator=generator) < 0.7


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_equals_the_cpu_kernel(name, dtype):
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    for rewards, valid in examples(name, dtype):
        expected = OP(rewards, valid, *arguments(name))
        on_gpu = rewards.cuda(), None if valid is None else valid.cuda(), *arguments(name)
        actual = OP(*on_gpu)
        assert actual.dtype == expected.dtype
        largest = expected.abs().max()
        assert (actual.cpu() - expected).abs().max() <= tolerance * largest, rewards.shape
        assert torch.equal(actual, OP(*on_gpu))  # deterministic


@pytest.mark.parametrize(
    "name", [name for name, row in ops.ESTIMATORS.items() if row.kernel is None]
)
def test_functions_equal_those_of_the_cpu(name):
    generator, row = torch.Generator().manual_seed(1), ops.ESTIMATORS[name]
    rewards = torch.randint(0, 2, (30,), generator=generator).float()
    known = {
        "lengths": torch.randint(0, 9, (30,), generator=generator),
        "logprobs": -torch.rand(30, generator=generator),
    }
    known |= {
        "greedy_correct": rewards > 0,
        "greedy_rewards": rewards / 2,
        "log_ratios": torch.randn(30, generator=generator),
    }
    known |= {"reward_parts": torch.stack([rewards, torch.randn(30, generator=generator)])}
    given = {
        "offsets": torch.tensor([0, 12, 12, 20, 30]),
        "valid": torch.rand(30, generator=generator) < 0.8,
    }
    given |= {key: known[key] for key in row.inputs}
    options = {key: 0.1 for key, option in row.options.items() if option.default is None}
    options |= {"k": 2} if row.size is not None and row.size.required else {}
    expected = ops.group_advantage(rewards, name, **given, **options)
    on_gpu = {key: tensor.cuda() for key, tensor in given.items()}
    actual = ops.group_advantage(rewards.cuda(), name, **on_gpu, **options)
    torch.testing.assert_close(actual.cpu(), expected, rtol=1e-5, atol=1e-6)


def test_side_stream_graph_and_no_synchronization():
    generator = torch.Generator().manual_seed(2)
    rewards = torch.randn(64, 16, generator=generator)
    valid = torch.rand(64, 16, generator=generator) < 0.7
    r, v = rewards.cuda(), valid.cuda()

    def step(rewards=r, valid=v):
        return (
            ops.maxpo_advantage(rewards, 4),
            ops.grpo_advantage(rewards),
            ops.maxrl_advantage(rewards, valid=valid),
            ops.group_advantage(rewards, "qae", valid=valid),
            ops.group_advantage(rewards, "unlikeliness", logprobs=rewards),
            ops.group_advantage(rewards, "reinforce_pp"),
        )

    expected = step(rewards, valid)
    step()  # builds the tables
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            on_side = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    for result in (on_side, captured):
        for a, b in zip(result, expected, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=1e-6, atol=1e-6)
    r.neg_()  # a replay of the graph reads the current values
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(
        captured[0].cpu(), ops.maxpo_advantage(-rewards, 4), rtol=1e-6, atol=1e-6
    )


def test_a_table_outlives_its_cache_where_a_stream_or_a_graph_reads_it():
    rewards = torch.randn(64, 16, generator=torch.Generator().manual_seed(3))
    expected, r = ops.maxpo_advantage(rewards, 4), rewards.cuda()

    def drop_the_table():
        forget_tables()
        # in its memory
        return [
            torch.full((2, 16), torch.nan, dtype=torch.float64, device="cuda") for _ in range(256)
        ]

    ops.maxpo_advantage(r, 4)  # builds the table, in the memory of this stream
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(500_000_000)  # cycles
        on_side = ops.maxpo_advantage(r, 4)
    kept = drop_the_table()
    torch.cuda.synchronize()
    torch.testing.assert_close(on_side.cpu(), expected, rtol=1e-6, atol=1e-6)

    ops.maxpo_advantage(r, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.maxpo_advantage(r, 4)
    kept += drop_the_table()
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(captured.cpu(), expected, rtol=1e-6, atol=1e-6)


def test_bad_values_become_nan_or_are_refused():
    rewards = torch.zeros(3, 40, device="cuda")
    rewards[1, 7] = torch.inf
    for name, size in (
        ("rloo", {}),
        ("maxpo", {"k": 2}),
        ("reinforce_raw", {}),
        ("passk_training", {"k": 2}),
        ("qae", {}),
    ):
        a = ops.group_advantage(rewards, name, **size)
        assert a[1].isnan().all()
        assert a[[0, 2]].isfinite().all()
    valid = torch.ones(3, 40, dtype=torch.bool, device="cuda")
    valid[1, 20:] = False
    a = ops.maxpo_advantage(rewards, 2, valid=valid)
    assert a[1, :20].isnan().all()
    assert (a[1, 20:] == 0).all()
    valid[1, 7] = False  # the infinite reward is left out
    assert ops.maxpo_advantage(rewards, 2, valid=valid).isfinite().all()
    with pytest.raises(ValueError, match="offsets must rise from 0 to 120, got 900 followed by -5"):
        ops.rloo_advantage(
            torch.rand(120, device="cuda"), offsets=torch.tensor([0, 900, -5], device="cuda")
        )
    with pytest.raises(ValueError, match="groups of at most 4096 rollouts, got 5000"):
        ops.maxrl_advantage(torch.zeros(1, 5000, device="cuda"))
