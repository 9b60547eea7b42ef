"""Examples of decoding attention, for the emulated and the real GPU."""

import torch

from maxrl_fast.rollout.decode_attention import Step

# Query heads, key/value heads, head size; groups, rows; prompt width, limit.
SHAPES = [
    (4, 2, 64, 3, 5, 7, 40),
    (8, 1, 16, 2, 4, 5, 70),
    (14, 2, 64, 2, 3, 9, 33),
    (3, 3, 96, 1, 2, 4, 20),
    (10, 2, 8, 2, 2, 3, 300),
    (12, 4, 128, 1, 3, 2, 17),
    (4, 2, 64, 40, 40, 3, 12),
]


def attention(shape, dtype, device, in_kernel):
    """What a step attends to, and its caches afterwards; the same numbers on every device. float64 on the CPU is the truth."""
    heads, kv_heads, dim, groups, rows, prompt_width, limit = shape
    generator = torch.Generator().manual_seed(sum(shape))

    def numbers(*size):
        x = 2 * torch.randn(*size, kv_heads, dim, generator=generator)
        return (x.to(torch.bfloat16) if dtype != torch.float32 else x).to(device, dtype)

    size = groups * rows
    prompt_lengths = torch.randint(1, prompt_width + 1, (groups,), generator=generator)
    lengths = torch.randint(1, limit + 1, (size,), generator=generator)
    lengths[0], lengths[-1] = 1, limit
    prompt = numbers(groups, prompt_width), numbers(groups, prompt_width)
    own = numbers(size, limit), numbers(size, limit)
    k, v = numbers(size), numbers(size)
    q = numbers(size, heads // kv_heads).flatten(1, 2)
    with torch.no_grad():
        step = Step(prompt_lengths.to(device), lengths.to(device), prompt_width, limit, in_kernel)
        out = step.attend(q, k, v, prompt, own)
    return out, *own
