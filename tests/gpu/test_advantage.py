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
# All run in float32. Those with the same formula differ only in numbers, so one of them runs in the
# other dtypes.
FORMULAS = {
    (row.kernel.table is None, row.binary, row.kernel.centred, row.kernel.scale): name
    for name, row in KERNELS.items()
}
DTYPES = [torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool]
CASES = [
    *((name, torch.float32) for name in KERNELS),
    *((name, dtype) for name in FORMULAS.values() for dtype in DTYPES),
]
LARGE = ("maxpo", "grpo")  # they run at all sizes


def arguments(name, layout):
    row = KERNELS[name]
    given = [layout.get(key) for key in ("offsets", "order", "valid")]
    return [
        *given,
        name,
        2 if row.size is not None else 0,
        [option.default for option in row.options.values()],
    ]


def layouts(shape, generator):
    """Yield layouts of the same rollouts: even groups, groups with invalid rollouts, uneven groups,
    and shuffled rollouts.
    """
    total = shape[0] * shape[1]
    cuts = torch.randint(0, total + 1, (7,), generator=generator).sort().values
    offsets = torch.cat([torch.tensor([0]), cuts, torch.tensor([total])])
    order = torch.randperm(total, generator=generator)
    valid = torch.rand(total, generator=generator) < 0.7
    yield shape, {}
    yield shape, {"valid": valid.view(shape)}
    yield (total,), {"offsets": offsets}
    yield (total,), {"offsets": offsets, "order": order, "valid": valid}


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_equals_the_cpu_kernel(name, dtype):
    generator = torch.Generator().manual_seed(0)
    tolerance = {torch.float64: 1e-12, torch.bfloat16: 8e-3}.get(dtype, 1e-6)
    for shape in SHAPES if dtype == torch.float32 and name in LARGE else SHAPES[:5]:
        # ties and an offset
        rewards = (torch.randn(shape, generator=generator) * 4).round() / 4 + 100
        rewards = (rewards > 100 if KERNELS[name].binary or dtype == torch.bool else rewards).to(
            dtype
        )
        for viewed, layout in layouts(shape, generator):
            r = rewards.view(viewed)
            expected = OP(r, *arguments(name, layout), 0)
            on_gpu = {key: tensor.cuda() for key, tensor in layout.items()}
            # a smaller bound makes smaller tables
            longest = int(layout["offsets"].diff().max()) if "offsets" in layout else 0
            actual = OP(r.cuda(), *arguments(name, on_gpu), longest)
            assert actual.dtype == expected.dtype
            largest = expected.double().abs().max()
            error = (actual.cpu().double() - expected.double()).abs().max()
            assert error <= tolerance * largest, (shape, list(layout))
            # deterministic
            assert torch.equal(actual, OP(r.cuda(), *arguments(name, on_gpu), longest))


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
    for width in (None, 16):
        on_gpu = {key: tensor.cuda() for key, tensor in given.items()}
        actual = ops.group_advantage(
            rewards.cuda(), name, max_group_size=width, **on_gpu, **options
        )
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-6, atol=1e-6)


def test_a_group_does_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(1)
    for n in (1, 2, 5, 16, 64, 100, 1000):
        rewards = torch.randn(3, n, generator=generator, dtype=torch.float64).cuda()
        padding = torch.randn(5000, generator=generator, dtype=torch.float64).cuda()
        offsets = torch.tensor([0, n, 2 * n, 3 * n, 3 * n + 900, 3 * n + 5000]).cuda()
        order = torch.randperm(n, generator=generator).cuda()
        for name in ("maxpo", "maxrl", "grpo", "rloo", "maxrl_ratio"):
            size = (
                {"k": min(3, n - 1)}
                if name == "maxpo" and n > 1
                else {"k": 1}
                if name == "maxpo"
                else {}
            )
            rows = ops.group_advantage(rewards, name, **size)
            flat = torch.cat([rewards.flatten(), padding])
            assert torch.equal(
                ops.group_advantage(flat, name, offsets=offsets, **size)[: 3 * n], rows.flatten()
            )
            assert torch.equal(ops.group_advantage(rewards[:, order], name, **size), rows[:, order])


def test_side_stream_graph_and_no_synchronization():
    generator = torch.Generator().manual_seed(2)
    rewards = torch.randn(64, 16, generator=generator)
    ids = torch.randint(0, 40, (1024,), generator=generator)
    r, i = rewards.cuda(), ids.cuda()

    def step():
        return (
            ops.maxpo_advantage(r, 4),
            ops.grpo_advantage(r),
            ops.maxrl_advantage(r.flatten(), group_ids=i, max_group_size=100),
            ops.group_advantage(r.flatten(), "qae", group_ids=i, max_group_size=100),
            ops.group_advantage(r, "unlikeliness", logprobs=r),
            ops.group_advantage(r, "reinforce_pp"),
        )

    expected = (
        ops.maxpo_advantage(rewards, 4),
        ops.grpo_advantage(rewards),
        ops.maxrl_advantage(rewards.flatten(), group_ids=ids),
        ops.group_advantage(rewards.flatten(), "qae", group_ids=ids),
        ops.group_advantage(rewards, "unlikeliness", logprobs=rewards),
        ops.group_advantage(rewards, "reinforce_pp"),
    )
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
    offsets = torch.tensor([0, 30, 120], device="cuda")
    for name, size in (("maxpo", {"k": 2}), ("qae", {})):
        a = ops.group_advantage(
            torch.rand(120, device="cuda"), name, **size, offsets=offsets, max_group_size=50
        )
        assert a[:30].isfinite().all()
        assert a[30:].isnan().all()
    a = ops.rloo_advantage(
        torch.rand(120, device="cuda"), offsets=torch.tensor([0, -5, 900], device="cuda")
    )
    assert a.shape == (120,)  # the values are meaningless, but no access is out of bounds
    with pytest.raises(ValueError, match="groups of at most 4096 rollouts, got 5000"):
        ops.maxrl_advantage(torch.zeros(1, 5000, device="cuda"))
