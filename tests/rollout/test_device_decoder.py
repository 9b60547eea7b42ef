"""The PyTorch decoder's grid: numbers of rows, graphs and memory. Samples are compared with those of the C++ decoder."""

import contextlib
import weakref
from types import SimpleNamespace

import pytest
import torch

from maxrl_fast.records import Prompts
from maxrl_fast.rollout import Sampling, device_decoder, grid
from maxrl_fast.rollout.grid import Grid, Shape
from maxrl_fast.rollout.native import NativeEngine
from tests.batches import make_prompts
from tests.models import tiny_decoder

PROMPTS = make_prompts([[5, 6, 7, 8], [9], [1, 2, 3, 4, 5, 6, 7], [9, 9], [30, 2, 4]])
LIMIT = 40
SAMPLING = Sampling(1.3, LIMIT, (3, 17, 9, 12))


def sample(engine: NativeEngine, num_samples: int = 20, sampling: Sampling = SAMPLING, prompts: Prompts = PROMPTS):
    return engine.generate(prompts, num_samples, sampling, seed=4, step=2)


@pytest.fixture
def model():
    return tiny_decoder()


@pytest.fixture
def engine(model):
    return NativeEngine(model, torch.float32, in_cpp=False)


@pytest.fixture
def fake_graphs(monkeypatch):
    """Graphs that run their step again when they are replayed. The fixture is the list of what happened, in order."""
    events = []

    class FakeGraph:
        def __init__(self, step, rows):
            self.step, self.rows = step, rows

        def replay(self):
            events.append(("replay", self.rows))
            self.step()

    def captured(step, stream, pool):
        step()
        made = seen[-1]
        events.append(("capture", made.rows))
        return FakeGraph(step, made.rows)

    seen, own_step, own_admit = [], Grid.step, Grid.admit

    def watched(grid, *arguments):
        seen.append(grid)
        own_step(grid, *arguments)

    def admit(grid, *arguments):
        events.append(("admit", grid.rows))
        own_admit(grid, *arguments)

    monkeypatch.setattr(grid, "uses_graphs", lambda device: True)
    monkeypatch.setattr(grid, "captured", captured)
    monkeypatch.setattr(Grid, "step", watched)
    monkeypatch.setattr(Grid, "admit", admit)
    return events


@pytest.mark.parametrize("sampling", [SAMPLING, Sampling(1.0, LIMIT, (3, 17, 9, 12), top_k=12, top_p=0.9)])
@pytest.mark.parametrize("max_batch", [1024, 65])
def test_at_most_six_graphs_are_captured_and_before_the_first_prompt_is_admitted(model, fake_graphs, sampling, max_batch):
    engine = NativeEngine(model, torch.float32, in_cpp=False, max_batch=max_batch)
    for call, captures in ((sampling, 6), (sampling, 0), (sampling.greedy, 6)):  # the second call has all graphs
        expected = sample(NativeEngine(model, torch.float32), sampling=call)
        assert torch.equal(sample(engine, sampling=call).tokens, expected.tokens)
        kinds = [kind for kind, _ in fake_graphs]
        assert kinds[: captures + 1] == ["capture"] * captures + ["admit"]
        assert "capture" not in kinds[captures:]
        replayed = [rows for kind, rows in fake_graphs if kind == "replay"]
        assert replayed == sorted(replayed, reverse=True)
        assert set(replayed) <= set(engine.decoder.grid.shape.ladder)
        assert call.temperature == 0 or len(set(replayed)) > 1
        fake_graphs.clear()


def test_other_threads_may_use_the_gpu_during_a_capture(monkeypatch):
    """In PyTorch's default mode, such a call fails in the other thread and invalidates the capture."""
    modes = []

    def graph(graph, pool, stream, capture_error_mode="global"):
        modes.append(capture_error_mode)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    grid.captured(lambda: None, SimpleNamespace(wait_stream=lambda stream: None), None)
    assert modes == ["thread_local"]


def test_no_step_computes_more_than_twice_the_active_rows(engine, monkeypatch):
    """Down to the last of six sizes, and after the waiting prompts have been admitted."""
    own, shares = Grid.steps, []

    def watched(grid, *arguments):
        shares.append((int((~grid.done[: grid.rows]).sum()), grid.rows))
        own(grid, *arguments)

    monkeypatch.setattr(Grid, "steps", watched)
    sample(engine, 40)
    ladder = engine.decoder.grid.shape.ladder
    assert ladder == [200, 100, 50, 25, 13, 7]
    assert len({rows for _, rows in shares}) > 2
    for active, rows in shares:
        assert active <= rows
        assert rows == ladder[-1] or rows <= 2 * active


def test_compaction_moves_active_rows_and_only_their_tokens(engine):
    grid = Grid(engine.decoder.model, Shape(3, 12, 4, 8, 24), torch.float32, in_kernel=False)
    grid.begin(3, 4, SAMPLING)
    for i, caches in enumerate(grid.own):
        for cache in caches:
            cache.copy_((i + torch.arange(12.0))[:, None, None, None].expand_as(cache))
    before = [[cache.clone() for cache in caches] for caches in grid.own]
    grid.sample.copy_(torch.arange(12))
    grid.length.copy_(torch.arange(12) + 1)
    active = torch.zeros(12, dtype=torch.bool)
    active[[2, 5, 6, 11]] = True
    grid.compact(active, longest=10)
    rows = [0, 1, 2, 5, 6, 11]  # two others fill the six rows
    assert grid.rows == 6
    assert grid.sample[:6].tolist() == rows
    assert grid.prompt[:6].tolist() == [0, 0, 0, 1, 1, 2]
    assert grid.starts.tolist() == [0, 3, 5, 6]
    for caches, old in zip(grid.own, before, strict=True):
        for cache, was in zip(caches, old, strict=True):
            assert torch.equal(cache[:6, :10], was[rows, :10])
            assert torch.equal(cache[:6, 10:], was[:6, 10:])
            assert torch.equal(cache[6:], was[6:])


def test_calls_share_one_cache_that_grows(model, engine):
    expected = NativeEngine(model, torch.float32)
    sample(engine, 6)
    first = engine.decoder.grid
    for num_samples, prompts in ((6, PROMPTS.take(1, 3)), (3, PROMPTS), (1, PROMPTS)):
        assert torch.equal(
            sample(engine, num_samples, prompts=prompts).tokens, sample(expected, num_samples, prompts=prompts).tokens
        )
        assert engine.decoder.grid is first
    longer = make_prompts([list(range(20))])
    freed = weakref.ref(first)
    del first
    assert torch.equal(sample(engine, 9, prompts=longer).tokens, sample(expected, 9, prompts=longer).tokens)
    assert freed() is None
    assert engine.decoder.grid.shape == Shape(5, 30, 9, 24, LIMIT)
    grown = engine.decoder.grid
    assert torch.equal(sample(engine, 6).tokens, sample(expected, 6).tokens)
    assert engine.decoder.grid is grown
    assert engine.statistics.cache_bytes == grown.bytes


def test_the_whole_budget_serves_and_is_not_exceeded(model):
    short = Sampling(1.0, 4, ())

    def engine_of(slots, rows):
        needed = NativeEngine(model, torch.float32, in_cpp=False).decoder.bytes_of(slots, rows, 8, 4)
        return NativeEngine(model, torch.float32, in_cpp=False, cache_bytes=needed)

    for slots, rows in ((5, 30), (3, 18), (1, 6), (1, 4)):
        engine = engine_of(slots, rows)
        sample(engine, 6, short)
        assert engine.decoder.grid.shape[:2] == (slots, rows)
        assert engine.decoder.grid.bytes == engine.cache_bytes
    # Both calls fit, but not a grid for both.
    engine, long = engine_of(5, 30), make_prompts([list(range(32))])
    for _ in range(2):
        for num_samples, prompts in ((6, PROMPTS), (28, long)):
            sample(engine, num_samples, short, prompts)
            assert engine.decoder.grid.bytes <= engine.cache_bytes


def test_the_budget_counts_the_caches_and_the_logits(engine):
    sample(engine)
    grid = engine.decoder.grid
    caches = sum(x.numel() * x.element_size() for pair in (*grid.prompts, *grid.own) for x in pair)
    assert grid.bytes >= caches + 4 * 32 * grid.shape.rows
    assert grid.bytes < 1.5 * caches


@pytest.mark.parametrize(("memory", "kept"), [(9, False), (11, True)])
def test_a_cache_above_a_tenth_of_the_memory_is_freed_while_the_engine_sleeps(engine, fake_graphs, monkeypatch, memory, kept):
    expected = sample(engine)
    monkeypatch.setattr(device_decoder, "memory_bytes", lambda device: memory * engine.decoder.grid.bytes)
    engine.sleep()
    assert (engine.decoder.grid is not None) == kept
    fake_graphs.clear()
    rollouts = sample(engine)
    assert torch.equal(rollouts.tokens, expected.tokens)
    assert torch.equal(rollouts.logprobs, expected.logprobs)
    assert ("capture" in [kind for kind, _ in fake_graphs]) != kept
    engine.sleep()
    engine.sleep()


def test_long_prompts_are_computed_a_part_at_a_time(engine, monkeypatch):
    whole, computed, admit = sample(engine), [], Grid.admit

    def watched(grid, slots, prompts, *others):
        computed.append(len(prompts.tokens))
        admit(grid, slots, prompts, *others)

    monkeypatch.setattr(Grid, "admit", watched)
    monkeypatch.setattr(device_decoder, "PREFILL_TOKENS", 16)
    rollouts = sample(engine)
    assert max(computed) <= 16
    assert sum(computed) == len(PROMPTS.tokens)
    assert torch.equal(rollouts.tokens, whole.tokens)
