import contextlib
import weakref

import pytest
import torch

from maxrl_fast.model import attention
from maxrl_fast.rollout import RolloutRequest, Sampling, decode_slots
from maxrl_fast.rollout.decode_slots import DecodeSlots, Shape
from maxrl_fast.rollout.device_decoder import DeviceEngine
from maxrl_fast.rollout.native import native_engine
from maxrl_fast.runtime import tuning
from tests.batches import FIVE_PROMPTS as PROMPTS
from tests.batches import make_prompts
from tests.models import POSITIONS, TOKENS, adapted, tiny_decoder

LIMIT = 40
SAMPLING = Sampling(1.3, LIMIT, (3, 17, 9, 12))


def sample(engine, num_samples=20, sampling=SAMPLING, prompts=PROMPTS):
    return engine.generate(RolloutRequest(prompts, num_samples, sampling, 4, 2))


@pytest.fixture
def model():
    return tiny_decoder()


@pytest.fixture
def engine(model):
    return native_engine(model, torch.float32, in_cpp=False)


@pytest.fixture
def fake_graphs(monkeypatch):
    """Graphs whose capture runs the step, as a replay does. The fixture is the list of what
    happened, in order."""
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
    ("sampling", "max_batch"),
    [(SAMPLING, 1024), (Sampling(1.0, LIMIT, (3, 17, 9, 12), top_k=12, top_p=0.9), 65)],
)
def test_a_batch_size_is_captured_at_its_first_step(model, fake_graphs, sampling, max_batch):
    engine, has_graph = native_engine(model, torch.float32, False, max_batch=max_batch), set()
    for call in (sampling, sampling, sampling.greedy):
        expected = sample(native_engine(model, torch.float32), sampling=call)
        assert torch.equal(sample(engine, sampling=call).tokens, expected.tokens)
        stepped = [rows for kind, rows in fake_graphs if kind != "admit"]
        assert stepped == sorted(stepped, reverse=True)
        assert set(stepped) <= set(engine.batch.shape.batch_sizes)
        assert call.temperature == 0 or max_batch == 65 or len(set(stepped)) > 1
        for kind, rows in fake_graphs:
            assert kind == "admit" or (kind == "replay") == ((call, rows) in has_graph)
            has_graph |= {(call, rows)} if kind == "capture" else set()
        fake_graphs.clear()


def test_calls_share_one_cache_that_grows(model, engine):
    expected = native_engine(model, torch.float32)
    sample(engine, 6)
    first = engine.batch

    def draws_the_same(num_samples, prompts=PROMPTS):
        ours, theirs = (sample(x, num_samples, prompts=prompts) for x in (engine, expected))
        return torch.equal(ours.tokens, theirs.tokens)

    for num_samples, prompts in ((6, PROMPTS.take(1, 3)), (3, PROMPTS), (1, PROMPTS)):
        assert draws_the_same(num_samples, prompts)
        assert engine.batch is first
    freed = weakref.ref(first)
    del first
    assert draws_the_same(9, make_prompts([list(range(20))]))
    assert freed() is None
    assert engine.batch.shape == Shape(5, 30, 9, 24, LIMIT)
    grown = engine.batch
    assert draws_the_same(6)
    assert engine.batch is grown
    assert engine.statistics.cache_bytes == grown.bytes


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


FAMILIES = [
    {},
    {"tie_word_embeddings": False},
    {"model_type": "qwen3"},
    {"model_type": "llama", "tie_word_embeddings": False, "num_key_value_heads": 1},
]


def causal(layer, q, k, v):
    seen = torch.ones(1, len(q), len(q), dtype=torch.bool).tril()
    return attention.attend(q[None], k[None] * (1 + layer), v[None], seen)[0][0]


def check_hidden_states(model, tolerance, around_decoding=contextlib.nullcontext):
    for rows in (torch.arange(6), torch.tensor([5, 2])):
        with torch.no_grad():
            expected = model(TOKENS, POSITIONS, causal, rows)
        with around_decoding(), torch.no_grad():
            decoder = DeviceEngine(model, torch.float32)
            decoder.load_weights(model)
            hidden = decoder.model(TOKENS, POSITIONS, causal, None if len(rows) == 6 else rows)
        assert expected.std() > 0.3
        torch.testing.assert_close(hidden, expected, rtol=tolerance, atol=tolerance)
        ours, theirs = decoder.model.logits(hidden).float(), model.logits(expected)
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_hidden_states_equal_the_decoders(family):
    check_hidden_states(tiny_decoder(**family), 1e-5)


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_every_weight_is_loaded_in_place_under_its_name(family):
    model, old = adapted(tiny_decoder(**family)), tiny_decoder(seed=1, **family)
    decoder = DeviceEngine(model, torch.bfloat16)
    decoder.load_weights(old)
    addresses = {name: weight.data_ptr() for name, weight in decoder.model.named_parameters()}
    decoder.load_weights(model)
    expected, actual = dict(model.weights()), dict(decoder.model.named_parameters())
    assert actual.keys() == expected.keys() == addresses.keys()
    for name, weight in actual.items():
        assert torch.equal(weight, expected[name].to(torch.bfloat16)), name
        assert weight.data_ptr() == addresses[name], name
    assert len(set(addresses.values())) == len(addresses)
    assert sum(w.numel() for w in actual.values()) == sum(w.numel() for w in old.parameters())
