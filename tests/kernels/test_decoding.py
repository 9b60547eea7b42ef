import threading

import pytest
import torch

from maxrl_fast.ops import token_logprobs
from maxrl_fast.rollout import RolloutRequest, Sampling, device_decoder, uniforms
from maxrl_fast.rollout.decode_slots import Step, sample, sample_and_append
from maxrl_fast.rollout.native import native_engine
from tests.batches import FIVE_PROMPTS as PROMPTS
from tests.batches import one_batch
from tests.kernels.devices import CPU
from tests.models import response_logits, tiny_decoder

GPU = torch.device("cuda")
# Query heads, key/value heads, head size; prompts, samples of one at most; prompt width, limit.
SHAPES = [
    (4, 2, 64, 3, 5, 7, 40),
    (8, 1, 16, 2, 4, 5, 70),
    (14, 2, 64, 2, 3, 9, 33),
    (3, 3, 96, 1, 2, 4, 20),
    (10, 2, 8, 2, 2, 3, 300),
    (12, 4, 128, 1, 3, 2, 17),
    (4, 2, 64, 40, 40, 3, 12),
    (8, 2, 64, 2, 2, 5, 700),  # several blocks share a row's keys
    (7, 1, 96, 1, 1, 3, 1100),
]


def attention(shape, dtype, place, in_kernel):
    """Return the attention of one step and its caches afterwards. The inputs are the same on every
    device.

    The first prompt has all its rows, the others have fewer or none, and q, k and v are parts of
    one tensor.
    """
    heads, kv_heads, dim, prompts, most, prompt_width, limit = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def numbers(*size):
        x = 2 * torch.randn(*size, dim, generator=generator)
        return (x.to(torch.bfloat16) if dtype != torch.float32 else x).to(place, dtype)

    counts = torch.randint(0, most + 1, (prompts,), generator=generator)
    counts[0] = most
    size = int(counts.sum())
    prompt_lengths = torch.randint(1, prompt_width + 1, (prompts,), generator=generator)
    lengths = torch.randint(1, limit + 1, (size,), generator=generator)
    lengths[0], lengths[-1] = 1, limit
    prompt = numbers(prompts, prompt_width, kv_heads), numbers(prompts, prompt_width, kv_heads)
    own = numbers(size, limit, kv_heads), numbers(size, limit, kv_heads)
    q, k, v = numbers(size, heads + 2 * kv_heads).split([heads, kv_heads, kv_heads], dim=1)
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    of_groups = starts, prompt_lengths, torch.arange(prompts + 1) * prompt_width
    groups = (
        torch.repeat_interleave(counts).to(place),
        *(x.int().to(place) for x in of_groups),
        most,
    )
    with torch.no_grad():
        out = Step(*groups, lengths.to(place), limit, in_kernel).attend(q, k, v, prompt, own)
    return out, *own


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_equals_float64(gpu, shape, dtype):
    """FlashAttention attends to the prompts, and the kernel to the other tokens."""
    reference = dtype if dtype == torch.float32 else torch.float64  # of the same inputs
    expected, *caches = attention(shape, reference, CPU, in_kernel=False)
    with gpu.running():
        actual, *written = attention(shape, dtype, gpu.place, in_kernel=True)
    for a, b in zip(written, caches, strict=True):
        # float16 cannot represent all small numbers of bfloat16
        assert torch.equal(a.cpu(), b.to(dtype))
    actual, expected = actual.cpu().double(), expected.double()
    error = (actual - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert error.max() < (1e-5 if dtype == torch.float32 else 1e-2)


def sampling_state(vocab, place):
    """Return logits and the state of 60 rows, some of which are done."""
    generator = torch.Generator().manual_seed(vocab)
    rows, limit = 60, 9
    logits = 3 * torch.randn(rows, vocab, generator=generator)
    logits[5, 1:] = -torch.inf  # only one token can be sampled
    stops = torch.rand(vocab, generator=generator) < 0.3
    length = torch.randint(1, limit, (rows,), generator=generator)
    done = torch.rand(rows, generator=generator) < 0.2
    keys = torch.randint(-(2**62), 2**62, (rows,), generator=generator)
    last = torch.randint(vocab, (rows,), generator=generator)
    written = torch.full((rows, limit), -7), torch.full((rows, limit), -7.0)
    return [x.to(place) for x in (logits, keys, stops, last, length, done, *written)]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.3])
@pytest.mark.parametrize(
    "vocab", [1, 2, 31, 32, 33, 300, 5000, pytest.param(151936, marks=pytest.mark.gpu)]
)
def test_sampling_equals_pytorchs(gpu, vocab, temperature):
    """Everything that the kernel writes, with sampling.sample of the same logits on the CPU."""
    sampling = Sampling(temperature, 9, ())
    logits, keys, stops, last, length, done, tokens, logprobs = sampling_state(vocab, CPU)
    given = sampling_state(vocab, gpu.place)
    with gpu.running():
        sample_and_append(given[0], sampling, *given[1:])

    token, log_p = (x[:, 0] for x in sample(logits, uniforms(keys, length)[:, None], sampling))
    rows = (~done).nonzero()[:, 0]
    # a GPU's sums differ by rounding, so near a step of the CDF the next token may be drawn
    if gpu.name == "cuda" and temperature:
        drawn = given[6].cpu()[torch.arange(len(length)), length].where(~done, token)[:, None]
        p = (logits.double() / temperature).softmax(-1)
        upper, u = p.cumsum(-1).gather(1, drawn), uniforms(keys, length)[:, None]
        assert ((upper - p.gather(1, drawn) - 1e-5 <= u) & (u <= upper + 1e-5))[rows].all()
        token = drawn[:, 0]
        log_p = p.gather(1, drawn)[:, 0].log().float()
    for to, values in ((tokens, token), (logprobs, log_p)):
        to[rows, length[rows]] = values[rows]
    last[rows], length[rows] = token[rows], length[rows] + 1
    done |= stops[last] & ~done | (length == tokens.shape[1])

    _, _, _, *state, logprobs_written = (x.cpu() for x in given)
    for actual, expected in zip(state, (last, length, done, tokens), strict=True):
        assert torch.equal(actual, expected)
    torch.testing.assert_close(logprobs_written, logprobs, rtol=1e-5, atol=1e-5)


def test_several_rows_are_sampled_from_the_same_logits(gpu):
    """As the first tokens of a prompt's samples are: rows of the state in any order, the others
    unchanged.
    """
    logits, *state = sampling_state(300, gpu.place)
    expected, before = [x.clone() for x in state], [x.clone() for x in state]
    rows = torch.randperm(60, generator=torch.Generator().manual_seed(0))[:42].to(gpu.place)
    copies, sampling = torch.zeros_like(logits), Sampling(1.3, 9, ())
    copies[rows] = logits[:14].repeat_interleave(3, dim=0)
    with gpu.running():
        sample_and_append(copies, sampling, *expected)
        sample_and_append(logits[:14], sampling, *state, rows=rows)
        with pytest.raises(ValueError, match=r"of rows must be a multiple .* got 42 and 60"):
            sample_and_append(logits, sampling, *state, rows=rows)
    is_chosen = torch.zeros(60, dtype=torch.bool, device=gpu.place).index_fill(0, rows, True)
    for actual, wanted, old in zip(state[2:], expected[2:], before[2:], strict=True):
        assert torch.equal(actual[is_chosen], wanted[is_chosen])
        assert torch.equal(actual[~is_chosen], old[~is_chosen])


def test_a_nonfinite_logit_reaches_the_logprobs(gpu):
    logits, *state = sampling_state(300, gpu.place)
    logits[7, 40], logits[8, 0], logits[9, 3] = torch.nan, torch.inf, -torch.inf
    state[4][:] = False
    with gpu.running():
        sample_and_append(logits, Sampling(1.0, 9, ()), *state)
    assert (~state[-1].isfinite()).any(1).nonzero()[:, 0].tolist() == [7, 8]


def test_rounding_never_draws_a_token_of_probability_0(gpu):
    """In float32 the sum over the vocabulary in order can stay below u total, where u is nearly
    1.
    """
    keys = torch.arange(1 << 22)
    u = uniforms(keys, torch.zeros_like(keys))
    assert u.max() > 1 - 1e-6
    logits, _, stops, last, length, done, *written = sampling_state(5000, gpu.place)
    logits[:, 4000:] = -torch.inf
    length[:], done[:] = 0, False
    key = keys[u.argmax()].expand(60).clone().to(gpu.place)
    with gpu.running():
        sample_and_append(logits, Sampling(1.0, 9, ()), key, stops, last, length, done, *written)
    assert (last < 4000).all()
    assert last.float().mean() > 3900


# --- whole rollouts

SAMPLINGS = [
    Sampling(1.3, 40, (3, 17)),
    Sampling(1.0, 40, (3,), top_k=12, top_p=0.9, min_p=0.05),
    Sampling(0.0, 40, (3,)),
]


def generate(engine, device=CPU, sampling=SAMPLINGS[0], num_samples=6):
    return engine.generate(RolloutRequest(PROMPTS.to(device), num_samples, sampling, 4, 2)).to(CPU)


def of_cpu(**options):
    return generate(native_engine(tiny_decoder(), torch.float32), **options)


def engine_on(device, **options):
    return native_engine(tiny_decoder().to(device), torch.float32, **options)


@pytest.mark.parametrize(
    "sampling",
    [SAMPLINGS[0], *(pytest.param(x, marks=pytest.mark.gpu) for x in SAMPLINGS[1:])],
)
@pytest.mark.parametrize(
    "options", [{}, pytest.param({"max_batch": 12}, marks=pytest.mark.gpu), {"max_batch": 7}]
)
def test_a_rollout_draws_the_same_tokens_as_the_cpu(gpu, sampling, options):
    own = {}
    if gpu.name == "emulated":
        own, sampling = {"in_cpp": False}, Sampling(1.3, 12, (3, 17))
    expected = of_cpu(sampling=sampling)
    with gpu.running():
        engine = engine_on(gpu.place, **own, **options)
        assert engine.in_kernel
        for _ in range(3 if gpu.name == "cuda" else 1):  # captures CUDA graphs, then replays
            rollouts = generate(engine, gpu.place, sampling)
            assert torch.equal(rollouts.tokens, expected.tokens)
            torch.testing.assert_close(rollouts.logprobs, expected.logprobs, rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_logprobs_equal_the_full_forward_pass(dtype, tolerance):
    model = tiny_decoder(head_dim=16).to(GPU)
    engine, prompts = native_engine(model, dtype), PROMPTS.to(GPU)
    for step in range(3):  # the first call captures the CUDA graphs, and later calls replay them
        rollouts = engine.generate(RolloutRequest(prompts, 16, SAMPLINGS[0], 4, step))
        logits = response_logits(model, one_batch(prompts, rollouts), dtype)
        expected, _ = token_logprobs(logits, rollouts.tokens, temperature=1.3)
        assert (rollouts.logprobs - expected).abs().max() < tolerance


@pytest.mark.gpu
@pytest.mark.parametrize("memory", [9, 11])  # times the cache: a cache above a tenth of it is freed
def test_the_same_graphs_serve_every_call(memory, monkeypatch):
    engine, expected = engine_on(GPU), of_cpu(num_samples=40)
    batch, first = None, set()
    for step in range(3):
        assert torch.equal(generate(engine, GPU, num_samples=40).tokens, expected.tokens)
        graphs = set(engine.batch.graphs)
        assert graphs <= {(SAMPLINGS[0], rows) for rows in (200, 100, 50, 25, 13, 7)}
        assert step == 0 or graphs == first
        first = graphs
        assert memory == 9 or step == 0 or engine.batch is batch
        batch = engine.batch
        monkeypatch.setattr(
            device_decoder, "memory_bytes", lambda device, total=memory * batch.bytes: total
        )
        engine.sleep()
        assert (engine.batch is None) == (memory == 9)


@pytest.mark.gpu
def test_graphs_are_captured_while_another_thread_uses_the_gpu():
    is_over, errors, expected = threading.Event(), [], of_cpu()

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
    try:
        for _ in range(3):
            assert torch.equal(generate(engine_on(GPU), GPU).tokens, expected.tokens)
    finally:
        is_over.set()
        thread.join()
    assert not errors


@pytest.mark.gpu
def test_new_weights_reach_the_captured_graphs():
    engine, other = engine_on(GPU), tiny_decoder(1).to(GPU)
    for _ in range(2):
        generate(engine, GPU)
    engine.load_weights(other)
    expected = generate(native_engine(other, torch.float32), GPU)
    assert torch.equal(generate(engine, GPU).tokens, expected.tokens)
