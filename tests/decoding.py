"""Inputs and checks of the decoding kernels, for an emulated GPU and for a real one."""

import torch

from maxrl_fast.rollout import Sampling
from maxrl_fast.rollout.decode_attention import Groups, Step
from maxrl_fast.rollout.decode_sample import sample_and_append
from maxrl_fast.rollout.random import uniforms
from maxrl_fast.rollout.sampling import sample

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


def attention(shape, dtype, device, in_kernel):
    """Return the attention of one step and its caches afterwards. The inputs are the same on every
    device.

    The first prompt has all its rows, the others have fewer or none, and q, k and v are parts of
    one tensor.
    """
    heads, kv_heads, dim, prompts, most, prompt_width, limit = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def numbers(*size):
        x = 2 * torch.randn(*size, dim, generator=generator)
        return (x.to(torch.bfloat16) if dtype != torch.float32 else x).to(device, dtype)

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
    cache_starts = torch.arange(prompts + 1) * prompt_width
    groups = [starts.int(), prompt_lengths.int(), cache_starts.int()]
    groups = Groups(
        torch.repeat_interleave(counts).to(device), *(x.to(device) for x in groups), size=most
    )
    with torch.no_grad():
        out = Step(groups, lengths.to(device), limit, in_kernel).attend(q, k, v, prompt, own)
    return out, *own


VOCABULARIES = [1, 2, 31, 32, 33, 300, 5000]
TEMPERATURES = [0.0, 0.7, 1.0, 1.3]


def sampling_state(vocab, device):
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
    return [x.to(device) for x in (logits, keys, stops, last, length, done, *written)]


def check_sampling(vocab, temperature, device, around_kernel):
    """Compare everything that the kernel writes with sampling.sample of the same logits in float32
    on the CPU.
    """
    sampling = Sampling(temperature, 9, ())
    logits, keys, stops, last, length, done, tokens, logprobs = sampling_state(
        vocab, torch.device("cpu")
    )
    given = sampling_state(vocab, device)
    with around_kernel():
        sample_and_append(given[0], sampling, *given[1:])

    token, log_p = (x[:, 0] for x in sample(logits, uniforms(keys, length)[:, None], sampling))
    rows = (~done).nonzero()[:, 0]
    # a GPU's sums differ by rounding, so near a step of the CDF the next token may be drawn
    if device.type == "cuda" and temperature:
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
