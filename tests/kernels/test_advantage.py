import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.ops.group_advantage import by_kernel, forget_tables
from tests.ops.test_group_advantage import call, inputs_of

SHAPES = [(1, 1), (3, 8), (5, 31), (4, 33), (2, 257), (300, 16), (3, 1024), (2, 3000), (1, 4096)]
KERNELS = {name: row for name, row in ops.ESTIMATORS.items() if row.kernel is not None}
# Those with the same formula differ only in numbers, so one of them runs in float64 too.
FORMULAS = {
    (row.kernel.table is None, row.kernel.centred, row.kernel.scale): name
    for name, row in KERNELS.items()
}
LARGE = ("maxpo", "grpo")  # they run at all sizes
FUNCTIONS = [name for name, row in ops.ESTIMATORS.items() if not (row.kernel or row.of_run)]


def computed(rewards, valid, name):
    row = KERNELS[name]
    options = {key: option.default for key, option in row.options.items()}
    return by_kernel(rewards, valid, row, 2 if row.size else 0, options)


def close(actual, expected, **tolerance):
    torch.testing.assert_close(
        actual.cpu(), expected, **(tolerance or {"rtol": 1e-6, "atol": 1e-6})
    )


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_equals_the_function(device, name):
    """Of rewards with ties and an offset, all valid or not, at odd sizes; the result is the same
    again.
    """
    generator, row = torch.Generator().manual_seed(0), KERNELS[name]
    size, not_zero = {row.size.name: 2} if row.size and name != "maxrl" else {}, 0
    for shape in SHAPES if name in LARGE else SHAPES[:5]:
        for dtype in (torch.float32, torch.float64)[: 1 + (name in FORMULAS.values())]:
            rewards = ((torch.randn(shape, generator=generator) * 4).round() / 4 + 100).to(dtype)
            for valid in (None, torch.rand(shape, generator=generator) < 0.7):
                if size and (shape[1] if valid is None else int(valid.sum(1).max())) < 4:
                    continue  # too few for the size
                given = {"rewards": rewards, "valid": valid} | size
                expected = ops.group_advantage(estimator=row, **given)
                with device.running():
                    on, *again = (
                        ops.group_advantage(estimator=name, **device.put(given)) for _ in range(2)
                    )
                assert on.dtype == dtype
                assert torch.equal(on, *again)
                largest = expected.abs().max()
                tolerance = 1e-11 if dtype == torch.float64 else 3e-6
                assert (on.cpu() - expected).abs().max() <= tolerance * largest, shape
                not_zero += int(largest > 0)
    assert not_zero > 6


@pytest.mark.parametrize("name", FORMULAS.values())
def test_a_group_does_not_depend_on_its_width_nor_ranks_on_the_order(device, name):
    generator = torch.Generator().manual_seed(5)
    rewards = (4 * torch.randn(3, 70, generator=generator)).round().double()  # with ties
    order = torch.randperm(70, generator=generator)
    wide, valid = torch.zeros(3, 300).double(), torch.arange(300).expand(3, 300) < 70
    wide[:, :70] = rewards
    with device.running():

        def of(rewards, valid=None):
            valid = None if valid is None else device.put(valid.contiguous())
            return computed(device.put(rewards), valid, name).cpu()

        narrow, padded = of(rewards), of(wide, valid)
        permuted = of(rewards[:, order].contiguous())
    assert torch.equal(padded[:, :70], narrow)
    assert (padded[:, 70:] == 0).all()
    if KERNELS[name].kernel.table is not None:
        assert torch.equal(permuted, narrow[:, order])


def test_bad_values_become_nan(device):
    """As the operator gives them, which does not look: a host would wait for a GPU."""
    rewards, valid = torch.zeros(4, 40).double(), torch.ones(4, 40, dtype=torch.bool)
    rewards[1, 7], rewards[2, 0] = torch.inf, -2e150
    valid[1, 20:] = False
    for name in ("rloo", "maxpo", "reinforce_raw"):
        with device.running():
            a = computed(device.put(rewards), device.put(valid), name).cpu()
        assert a[1, :20].isnan().all()
        assert a[2].isnan().all()
        assert (a[1, 20:] == 0).all()
        assert a[[0, 3]].isfinite().all()
    valid[1, 7] = valid[2, 0] = False  # what is not finite is left out
    with device.running():
        assert computed(device.put(rewards), device.put(valid), "maxpo").isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_equal_those_of_the_cpu(name):
    generator = torch.Generator().manual_seed(1)
    rewards = torch.randint(0, 2, (30,), generator=generator).float()
    given = inputs_of(name, (30,)) | {"group_ids": torch.arange(30) // 12}
    given["valid"] = torch.rand(30, generator=generator) < 0.8
    actual = call(name, rewards.cuda(), **{key: tensor.cuda() for key, tensor in given.items()})
    close(actual, call(name, rewards, **given), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
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
            close(a, b)
    r.neg_()  # a replay of the graph reads the current values
    graph.replay()
    torch.cuda.synchronize()
    close(captured[0], ops.maxpo_advantage(-rewards, 4))


@pytest.mark.gpu
def test_a_table_outlives_its_cache_where_a_stream_or_a_graph_reads_it():
    rewards = torch.randn(64, 16, generator=torch.Generator().manual_seed(3))
    expected, r = ops.maxpo_advantage(rewards, 4), rewards.cuda()

    def drop_the_table():
        forget_tables()
        # in its memory
        nan = {"dtype": torch.float64, "device": "cuda"}
        return [torch.full((2, 16), torch.nan, **nan) for _ in range(256)]

    ops.maxpo_advantage(r, 4)  # builds the table, in the memory of this stream
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(500_000_000)  # cycles
        on_side = ops.maxpo_advantage(r, 4)
    kept = drop_the_table()
    torch.cuda.synchronize()
    close(on_side, expected)
    ops.maxpo_advantage(r, 4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.maxpo_advantage(r, 4)
    kept += drop_the_table()
    graph.replay()
    torch.cuda.synchronize()
    close(captured, expected)


@pytest.mark.gpu
def test_what_a_gpu_cannot_take_is_refused_or_nan():
    rewards = torch.zeros(3, 40, device="cuda")
    rewards[1, 7] = torch.inf
    for name, size in (("qae", {}), ("passk_training", {"k": 2})):
        a = ops.group_advantage(rewards, name, **size)
        assert a.isnan().all(1).tolist() == [False, True, False]
    with pytest.raises(ValueError, match="groups of at most 4096 rollouts, got 5000"):
        ops.maxrl_advantage(torch.zeros(1, 5000, device="cuda"))
