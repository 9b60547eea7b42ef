"""Decoding on a GPU: attention against float64, CUDA graphs against the CPU, and log-probs against
the full forward pass.
"""

import contextlib
import threading

import pytest
import torch

from maxrl_fast.ops import token_logprobs
from maxrl_fast.rollout import RolloutRequest, Sampling, device_decoder
from maxrl_fast.rollout.native import NativeEngine
from tests.batches import make_prompts, one_batch
from tests.decoding import SHAPES, TEMPERATURES, VOCABULARIES, attention, check_sampling
from tests.models import response_logits, tiny_decoder

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
PROMPTS = make_prompts([[5, 6, 7, 8], [9], [1, 2, 3, 4, 5, 6, 7], [9, 9], [30, 2, 4]])
SAMPLINGS = [
    Sampling(1.3, 40, (3, 17)),
    Sampling(1.0, 40, (3,), top_k=12, top_p=0.9, min_p=0.05),
    Sampling(0.0, 40, (3,)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_equals_float64(shape, dtype):
    """FlashAttention attends to the prompts, and the kernel to the other tokens."""
    expected, *caches = attention(shape, torch.float64, torch.device("cpu"), in_kernel=False)
    if dtype == torch.float32:
        expected, *caches = attention(shape, dtype, torch.device("cpu"), in_kernel=False)
    actual, *written = attention(shape, dtype, GPU, in_kernel=True)
    for a, b in zip(written, caches, strict=True):
        # float16 cannot represent all small numbers of bfloat16
        assert torch.equal(a.cpu(), b.to(dtype))
    error = (actual.cpu().double() - expected.double()).norm(dim=-1) / expected.double().norm(
        dim=-1
    )
    assert error.max() < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("vocab", [*VOCABULARIES, 151936])
def test_sampling_equals_pytorchs(vocab, temperature):
    check_sampling(vocab, temperature, GPU, contextlib.nullcontext)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_logprobs_equal_the_full_forward_pass(dtype, tolerance):
    model = tiny_decoder(head_dim=16).to(GPU)
    engine = NativeEngine(model, dtype)
    prompts = PROMPTS.to(GPU)
    for step in range(3):  # the first call captures the CUDA graphs, and later calls replay them
        rollouts = engine.generate(RolloutRequest(prompts, 16, SAMPLINGS[0], 4, step))
        logits = response_logits(model, one_batch(prompts, rollouts), dtype)
        expected, _ = token_logprobs(logits, rollouts.tokens, temperature=1.3)
        assert (rollouts.logprobs - expected).abs().max() < tolerance


def test_a_policy_on_another_gpu_than_the_current_one():
    """With one GPU the two are the same."""
    expected = NativeEngine(tiny_decoder(), torch.float32).generate(
        RolloutRequest(PROMPTS, 6, SAMPLINGS[0], 4, 2)
    )
    for number in range(torch.cuda.device_count()):
        device = torch.device("cuda", number)
        engine = NativeEngine(tiny_decoder().to(device), torch.float32)
        for _ in range(2):  # captures, then replays
            rollouts = engine.generate(RolloutRequest(PROMPTS.to(device), 6, SAMPLINGS[0], 4, 2))
            assert torch.equal(rollouts.tokens.cpu(), expected.tokens)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("options", [{}, {"max_batch": 12}, {"max_batch": 7}])
def test_graphs_draw_the_same_tokens_as_the_cpu(sampling, options):
    model = tiny_decoder()
    expected = NativeEngine(model, torch.float32).generate(
        RolloutRequest(PROMPTS, 6, sampling, 4, 2)
    )
    engine = NativeEngine(tiny_decoder().to(GPU), torch.float32, **options)
    for _ in range(3):
        rollouts = engine.generate(RolloutRequest(PROMPTS.to(GPU), 6, sampling, 4, 2)).to(
            torch.device("cpu")
        )
        assert torch.equal(rollouts.tokens, expected.tokens)
        torch.testing.assert_close(rollouts.logprobs, expected.logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("memory", [9, 11])  # times the cache: a cache above a tenth of it is freed
def test_the_same_graphs_serve_every_call(memory, monkeypatch):
    engine = NativeEngine(tiny_decoder().to(GPU), torch.float32)
    expected = NativeEngine(tiny_decoder(), torch.float32).generate(
        RolloutRequest(PROMPTS, 40, SAMPLINGS[0], 4, 2)
    )
    batch, first = None, set()
    for step in range(3):
        rollouts = engine.generate(RolloutRequest(PROMPTS.to(GPU), 40, SAMPLINGS[0], 4, 2))
        assert torch.equal(rollouts.tokens.cpu(), expected.tokens)
        graphs = set(engine.decoder.batch.graphs)
        assert graphs <= {(SAMPLINGS[0], rows) for rows in (200, 100, 50, 25, 13, 7)}
        assert step == 0 or graphs == first
        first = graphs
        assert memory == 9 or step == 0 or engine.decoder.batch is batch
        batch = engine.decoder.batch
        monkeypatch.setattr(
            device_decoder, "memory_bytes", lambda device, total=memory * batch.bytes: total
        )
        engine.sleep()
        assert (engine.decoder.batch is None) == (memory == 9)


def test_graphs_are_captured_while_another_thread_uses_the_gpu():
    is_over, errors = threading.Event(), []

    def copy():
        try:
            for size in range(1, 10**6):
                torch.ones(size).pin_memory().to(GPU, non_blocking=True)
                if is_over.is_set():
                    break
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=copy)
    thread.start()
    expected = NativeEngine(tiny_decoder(), torch.float32).generate(
        RolloutRequest(PROMPTS, 6, SAMPLINGS[0], 4, 2)
    )
    try:
        for _ in range(3):
            rollouts = NativeEngine(tiny_decoder().to(GPU), torch.float32).generate(
                RolloutRequest(PROMPTS.to(GPU), 6, SAMPLINGS[0], 4, 2)
            )
            assert torch.equal(rollouts.tokens.cpu(), expected.tokens)
    finally:
        is_over.set()
        thread.join()
    assert not errors


def test_new_weights_reach_the_captured_graphs():
    engine = NativeEngine(tiny_decoder(0).to(GPU), torch.float32)
    for _ in range(2):
        engine.generate(RolloutRequest(PROMPTS.to(GPU), 6, SAMPLINGS[0], 0, 0))
    other = tiny_decoder(1).to(GPU)
    engine.load_weights(other)
    after = engine.generate(RolloutRequest(PROMPTS.to(GPU), 6, SAMPLINGS[0], 0, 0))
    assert torch.equal(
        after.tokens,
        NativeEngine(other, torch.float32)
        .generate(RolloutRequest(PROMPTS.to(GPU), 6, SAMPLINGS[0], 0, 0))
        .tokens,
    )
