"""The PyTorch decoder's batch: numbers of rows, graphs and memory."""

import contextlib
import weakref
from types import SimpleNamespace

import pytest
import torch

from maxrl_fast.records import Prompts
from maxrl_fast.rollout import RolloutRequest, Sampling, decode_slots, device_decoder
from maxrl_fast.rollout.decode_slots import DecodeSlots, Shape
from maxrl_fast.rollout.native import NativeEngine
from maxrl_fast.rollout.sampling import LOGIT_BYTES, ROWS
from maxrl_fast.runtime import tuning
from tests.batches import make_prompts
from tests.models import tiny_decoder

PROMPTS = make_prompts([[5, 6, 7, 8], [9], [1, 2, 3, 4, 5, 6, 7], [9, 9], [30, 2, 4]])
LIMIT = 40
SAMPLING = Sampling(1.3, LIMIT, (3, 17, 9, 12))


def sample(
    engine: NativeEngine,
    num_samples: int = 20,
    sampling: Sampling = SAMPLING,
    prompts: Prompts = PROMPTS,
):
    return engine.generate(RolloutRequest(prompts, num_samples, sampling, 4, 2))


@pytest.fixture
def model():
    return tiny_decoder()


@pytest.fixture
def engine(model):
    return NativeEngine(model, torch.float32, in_cpp=False)


@pytest.fixture
def fake_graphs(monkeypatch):
    """Graphs whose capture runs the step, as a replay does. The fixture is the list of what
    happened, in order.
    """
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

    seen, own_step, own_admit = [], DecodeSlots.step, DecodeSlots.admit

    def watched(batch, *arguments):
        seen.append(batch)
        own_step(batch, *arguments)

    def admit(batch, *arguments):
        events.append(("admit", batch.rows))
        own_admit(batch, *arguments)

    monkeypatch.setattr(decode_slots, "uses_graphs", lambda device: True)
    monkeypatch.setattr(decode_slots, "captured", captured)
    monkeypatch.setattr(decode_slots, "ROWS", 7)
    monkeypatch.setattr(DecodeSlots, "step", watched)
    monkeypatch.setattr(DecodeSlots, "admit", admit)
    return events


@pytest.mark.parametrize(
    "sampling", [SAMPLING, Sampling(1.0, LIMIT, (3, 17, 9, 12), top_k=12, top_p=0.9)]
)
@pytest.mark.parametrize("max_batch", [1024, 65])
def test_a_batch_size_is_captured_at_its_first_step(model, fake_graphs, sampling, max_batch):
    engine, has_graph = NativeEngine(model, torch.float32, in_cpp=False, max_batch=max_batch), set()
    for call in (sampling, sampling, sampling.greedy):
        expected = sample(NativeEngine(model, torch.float32), sampling=call)
        assert torch.equal(sample(engine, sampling=call).tokens, expected.tokens)
        stepped = [rows for kind, rows in fake_graphs if kind != "admit"]
        assert stepped == sorted(stepped, reverse=True)
        assert set(stepped) <= set(engine.decoder.batch.shape.batch_sizes)
        assert call.temperature == 0 or max_batch == 65 or len(set(stepped)) > 1
        for kind, rows in fake_graphs:
            assert kind == "admit" or (kind == "replay") == ((call, rows) in has_graph)
            has_graph |= {(call, rows)} if kind == "capture" else set()
        fake_graphs.clear()


def test_a_burst_is_launched_before_the_state_after_the_last_one_is_read(
    model, fake_graphs, monkeypatch
):
    """Except before rows move, where it is read first."""
    own, finish = device_decoder._Job._state, device_decoder._Job._finish
    monkeypatch.setattr(device_decoder._Job, "_state", lambda job: (len(fake_graphs), own(job)))
    behind = []

    def watched(job, state):
        behind.append(len([x for x in fake_graphs[state[0] :] if x[0] != "admit"]))
        return finish(job, state[1])

    monkeypatch.setattr(device_decoder._Job, "_finish", watched)
    engine = NativeEngine(model, torch.float32, in_cpp=False)
    expected = sample(NativeEngine(model, torch.float32))
    assert torch.equal(sample(engine).tokens, expected.tokens)
    assert max(behind) == tuning.BURST
    assert behind.count(tuning.BURST) >= 2


def test_other_threads_may_use_the_gpu_during_a_capture(monkeypatch):
    """In PyTorch's default mode, such a call fails in the other thread and invalidates the
    capture.
    """
    modes = []

    def graph(graph, pool, stream, capture_error_mode="global"):
        modes.append(capture_error_mode)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    stream = SimpleNamespace(wait_stream=lambda stream: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    decode_slots.captured(lambda: None, stream, None)
    assert modes == ["thread_local"]


def test_no_step_computes_more_than_twice_the_active_rows(engine, monkeypatch):
    """Down to the last of six sizes, and after the waiting prompts have been admitted."""
    own, shares = DecodeSlots.steps, []

    def watched(batch, *arguments):
        shares.append((int((~batch.done[: batch.rows]).sum()), batch.rows))
        own(batch, *arguments)

    monkeypatch.setattr(DecodeSlots, "steps", watched)
    sample(engine, 40)
    batch_sizes = engine.decoder.batch.shape.batch_sizes
    assert batch_sizes == [200, 100, 50, 25, 13, 7]
    assert len({rows for _, rows in shares}) > 2
    for active, rows in shares:
        assert active <= rows
        assert rows == batch_sizes[-1] or rows <= 2 * active


def test_compaction_moves_active_rows_and_only_their_tokens(engine):
    batch = DecodeSlots(
        engine.decoder.model, Shape(3, 12, 4, 8, 24), torch.float32, in_kernel=False
    )
    batch.begin(3, 4, SAMPLING)
    for i, caches in enumerate(batch.own):
        for cache in caches:
            cache.copy_((i + torch.arange(12.0))[:, None, None, None].expand_as(cache))
    before = [[cache.clone() for cache in caches] for caches in batch.own]
    batch.sample.copy_(torch.arange(12))
    batch.length.copy_(torch.arange(12) + 1)
    active = torch.zeros(12, dtype=torch.bool)
    active[[2, 5, 6, 11]] = True
    batch.compact(active, longest=10)
    rows = [0, 1, 2, 5, 6, 11]  # two others fill the six rows
    assert batch.rows == 6
    assert batch.sample[:6].tolist() == rows
    assert batch.prompt[:6].tolist() == [0, 0, 0, 1, 1, 2]
    assert batch.starts.tolist() == [0, 3, 5, 6]
    for caches, old in zip(batch.own, before, strict=True):
        for cache, was in zip(caches, old, strict=True):
            assert torch.equal(cache[:6, :10], was[rows, :10])
            assert torch.equal(cache[:6, 10:], was[:6, 10:])
            assert torch.equal(cache[6:], was[6:])


def test_calls_share_one_cache_that_grows(model, engine):
    expected = NativeEngine(model, torch.float32)
    sample(engine, 6)
    first = engine.decoder.batch
    for num_samples, prompts in ((6, PROMPTS.take(1, 3)), (3, PROMPTS), (1, PROMPTS)):
        assert torch.equal(
            sample(engine, num_samples, prompts=prompts).tokens,
            sample(expected, num_samples, prompts=prompts).tokens,
        )
        assert engine.decoder.batch is first
    longer = make_prompts([list(range(20))])
    freed = weakref.ref(first)
    del first
    assert torch.equal(
        sample(engine, 9, prompts=longer).tokens, sample(expected, 9, prompts=longer).tokens
    )
    assert freed() is None
    assert engine.decoder.batch.shape == Shape(5, 30, 9, 24, LIMIT)
    grown = engine.decoder.batch
    assert torch.equal(sample(engine, 6).tokens, sample(expected, 6).tokens)
    assert engine.decoder.batch is grown
    assert engine.statistics.cache_bytes == grown.bytes


def test_the_memory_of_filters_in_graphs_is_part_of_the_budget(model, fake_graphs):
    filters = LOGIT_BYTES * ROWS * model.config.vocab_size
    for more, shape in ((filters, (5, 30)), (0, (1, 1))):
        engine = NativeEngine(model, torch.float32, in_cpp=False)
        engine.cache_bytes = engine.decoder.bytes_of(5, 30, 8, 4) + more
        sample(engine, 6, Sampling(1.0, 4, (), top_p=0.9))
        assert engine.decoder.batch.shape[:2] == shape


def test_the_whole_budget_serves_and_is_not_exceeded(model):
    short = Sampling(1.0, 4, ())

    def engine_of(slots, rows):
        needed = NativeEngine(model, torch.float32, in_cpp=False).decoder.bytes_of(
            slots, rows, 8, 4
        )
        return NativeEngine(model, torch.float32, in_cpp=False, cache_bytes=needed)

    for slots, rows in ((5, 30), (3, 18), (1, 6), (1, 4)):
        engine = engine_of(slots, rows)
        sample(engine, 6, short)
        assert engine.decoder.batch.shape[:2] == (slots, rows)
        assert engine.decoder.batch.bytes == engine.cache_bytes
    # Both calls fit, but not a grid for both.
    engine, long = engine_of(5, 30), make_prompts([list(range(32))])
    for _ in range(2):
        for num_samples, prompts in ((6, PROMPTS), (28, long)):
            sample(engine, num_samples, short, prompts)
            assert engine.decoder.batch.bytes <= engine.cache_bytes


def test_the_budget_counts_the_caches_and_the_logits(engine):
    sample(engine)
    batch = engine.decoder.batch
    caches = sum(
        x.numel() * x.element_size() for pair in (*batch.prompts, *batch.own) for x in pair
    )
    assert batch.bytes >= caches + 4 * 32 * batch.shape.rows
    assert batch.bytes < 1.5 * caches


@pytest.mark.parametrize(("memory", "kept"), [(9, False), (11, True)])
def test_a_cache_above_a_tenth_of_the_memory_is_freed_while_the_engine_sleeps(
    engine, fake_graphs, monkeypatch, memory, kept
):
    expected = sample(engine)
    monkeypatch.setattr(
        device_decoder, "memory_bytes", lambda device: memory * engine.decoder.batch.bytes
    )
    engine.sleep()
    assert (engine.decoder.batch is not None) == kept
    fake_graphs.clear()
    rollouts = sample(engine)
    assert torch.equal(rollouts.tokens, expected.tokens)
    assert torch.equal(rollouts.logprobs, expected.logprobs)
    assert ("capture" in [kind for kind, _ in fake_graphs]) != kept
    engine.sleep()
    engine.sleep()


def test_long_prompts_are_computed_a_part_at_a_time(engine, monkeypatch):
    whole, computed, admit = sample(engine), [], DecodeSlots.admit

    def watched(batch, slots, prompts, *others):
        computed.append(len(prompts.tokens))
        admit(batch, slots, prompts, *others)

    monkeypatch.setattr(DecodeSlots, "admit", watched)
    monkeypatch.setattr(tuning, "PREFILL_TOKENS", 16)
    rollouts = sample(engine)
    assert max(computed) <= 16
    assert sum(computed) == len(PROMPTS.tokens)
    assert torch.equal(rollouts.tokens, whole.tokens)
