"""Calls of the native engine on a GPU that does not exist (pretend.py): devices, and waits."""

import contextlib
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from maxrl_fast.records import Prompts
from maxrl_fast.rollout import RolloutRequest, Sampling, decode_slots, sample_keys
from maxrl_fast.rollout.native import native_engine
from maxrl_fast.runtime import tuning
from tests.gpu_path.pretend import GPU
from tests.gpu_path.test_budgets import ONE_LAYER, policy

LIMIT = 40  # tokens of a response
SAMPLING = Sampling(1.0, LIMIT, (7, 2))
NUM_PROMPTS = 4
# Before and after the steps: checks of the request, the prompts' lengths, the prefill's indices,
# the packing of the responses.
WAITS_OF_CALL = 25
# Which samples have ended; and the indices of the rows to keep, six times in a call at most.
WAITS_OF_BURST = 1


def length_of(keys):
    return 1 + keys % LIMIT


def append(length, done, keys, rows):
    length, done, keys = (x.known for x in (length, done, keys))
    rows = torch.arange(len(length)) if rows is None else rows.known
    length[rows] += (~done[rows]).long()
    done[rows] |= length[rows] == length_of(keys[rows])


@pytest.fixture
def engine(gpu, monkeypatch):
    """With graphs that replay a step with the tensors and the number of rows of their capture."""
    sample_and_append, steps = decode_slots.sample_and_append, []

    def sampled(logits, sampling, keys, stops, last, length, done, tokens, logprobs, rows=None):
        sample_and_append(logits, sampling, keys, stops, last, length, done, tokens, logprobs, rows)
        steps.append((length, done, keys, rows))
        append(*steps[-1])

    def captured(step, stream, pool):
        assert stream is engine.stream is not None
        waits = len(gpu.waits)
        step()
        assert len(gpu.waits) == waits, f"a captured step must not wait: {gpu.waits[waits:]}"
        return SimpleNamespace(replay=partial(append, *steps[-1]))

    monkeypatch.setattr(decode_slots, "sample_and_append", sampled)
    monkeypatch.setattr(decode_slots, "captured", captured)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: object())
    with gpu:
        engine = native_engine(policy(gpu, ONE_LAYER), torch.bfloat16, cache_bytes=10**9)
    return engine


def sample(gpu, engine, num_samples):
    """Sample, check the responses' lengths, and return how often the host waited."""
    lengths, ids = torch.tensor([30, 7, 41, 12]), torch.arange(NUM_PROMPTS)
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    prompts = gpu.put(Prompts(torch.arange(90) % 32, bounds, ids))
    with gpu:
        gpu.waits.clear()
        rollouts = engine.generate(RolloutRequest(prompts, num_samples, SAMPLING, 3, 1))
        num_waits, lengths = len(gpu.waits), rollouts.lengths.cpu()
    samples = torch.arange(NUM_PROMPTS * num_samples)
    keys = sample_keys(3, 1, samples // num_samples, samples % num_samples)
    assert rollouts.tokens.device == GPU
    assert torch.equal(lengths, length_of(keys))
    return num_waits


def test_prompts_that_wait_for_a_slot_are_admitted_later(gpu, engine):
    engine.max_batch = 7
    for num_samples in (3, 10):
        sample(gpu, engine, num_samples)


def test_a_call_waits_a_few_times_for_each_burst(gpu, engine):
    for _ in range(2):  # the first call captures
        num_waits = sample(gpu, engine, 16)
        bursts = -(-engine.statistics.decode_steps // tuning.BURST)
        assert num_waits <= WAITS_OF_CALL + WAITS_OF_BURST * bursts, str(gpu)
