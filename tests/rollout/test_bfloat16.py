import itertools
import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from maxrl_fast import _C
from maxrl_fast.ops.dispatch import KernelLaunch
from maxrl_fast.rollout import RolloutRequest, Sampling
from maxrl_fast.rollout.native import CPU, CpuEngine
from tests.batches import make_prompts
from tests.models import tiny_decoder
from tests.rollout.test_native import (
    NUCLEUS,
    check_independence,
    check_merged_rows,
    forward_logprobs,
)

PATHS = _C.bfloat16_arithmetics()  # plain C++ always, and the instructions that this machine has
PROMPTS = make_prompts(
    [[5, 6, 7, 8], [9], [*range(1, 31), *range(1, 31), *range(1, 20)], [9, 9], [30, 2, 4]]
)
STOPS = (3, 17)
# 8 query heads share keys, of whole steps
LARGE_GROUP = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 64}
ODD = {"hidden_size": 42, "intermediate_size": 21, "num_attention_heads": 7}
ODD |= {"num_key_value_heads": 1, "head_dim": 6}


def product(arithmetic, a, b):
    c, call = torch.full((len(a), len(b)), math.nan), KernelLaunch(CPU)
    m, n, k = len(a), len(b), a.shape[1]
    call.launch("packed_product", arithmetic=arithmetic, m=m, n=n, k=k, a=a, b=b, c=c)
    return c


def shapes():
    generator = torch.Generator().manual_seed(0)
    some = torch.randint(1, 71, (60, 3), generator=generator).tolist()
    edges = itertools.product((1, 16, 17, 33), (1, 16, 17, 33), (1, 2, 31, 32, 33, 64))
    return [*some, *edges, (96, 515, 1030)]


@pytest.mark.parametrize("arithmetic", ["float32", *PATHS])
@pytest.mark.usefixtures("instructions")
def test_products_are_those_of_the_rounded_operands(arithmetic):
    generator = torch.Generator().manual_seed(1)
    for m, n, k in shapes():
        a, b = (torch.randn(rows, k, generator=generator) for rows in (m, n))
        got = product(arithmetic, a, b)
        x, y = ((z if arithmetic == "float32" else z.bfloat16()).double() for z in (a, b))
        # A sum of k products in float32: each of at most k + 1 operations has a relative error of
        # 2^-24.
        allowed = (k + 1) * 2**-24 * (x.abs() @ y.abs().T)
        assert ((got.double() - x @ y.T).abs() <= allowed).all(), (m, n, k)


@pytest.mark.parametrize("arithmetic", PATHS)
def test_nonfinite_numbers_stay_nonfinite(arithmetic):
    a, b = torch.ones(3, 5), torch.ones(2, 5)
    a[0, 0], a[1, 4] = math.nan, math.inf
    # rounding up would make it -0
    b[1, 2] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    got = product(arithmetic, a, b)
    assert got[0].isnan().all()
    assert got[1, 0] == math.inf
    assert got[:, 1].isnan().all()
    assert got[2, 0] == 5


def generate(model, arithmetic, limit=40, prompts=PROMPTS, **options):
    request = RolloutRequest(prompts, 6, Sampling(1.3, limit, STOPS), 4, 2)
    return CpuEngine(model, torch.float32, arithmetic, **options).generate(request)


@pytest.mark.parametrize("arithmetic", PATHS)
@pytest.mark.parametrize(
    "changes",
    [{}, {"model_type": "qwen3", "tie_word_embeddings": False}, LARGE_GROUP, ODD],
    ids=["qwen2", "qwen3", "large-group", "odd"],
)
@pytest.mark.usefixtures("instructions")
def test_logprobs_are_those_of_the_model_to_bfloat16(arithmetic, changes):
    """Logits are below 16, where numbers in bfloat16 are 2^-4 apart; the decoder rounds several
    times in each layer."""
    model = tiny_decoder(**changes)
    rollouts = generate(model, arithmetic)
    dtypes = torch.float32, torch.bfloat16
    expected, in_training = (forward_logprobs(model, rollouts, 1.3, PROMPTS, x) for x in dtypes)
    difference = (rollouts.logprobs - expected).abs()
    assert difference.max() < 0.15
    # training rounds the residual stream too
    assert difference.mean() < (in_training - expected).abs().mean()
    assert rollouts.lengths.unique().numel() > 3  # responses finished at different times


@pytest.mark.parametrize("changes", [{}, LARGE_GROUP, ODD], ids=["even", "large-group", "odd"])
@pytest.mark.parametrize("arithmetic", PATHS)
def test_samples_are_bitwise_independent_of_the_batch(arithmetic, changes):
    model = tiny_decoder(**changes)
    one_sequence = sum(CpuEngine(model, torch.float32, arithmetic).sequence_bytes(79, 40))
    check_independence(partial(generate, model, arithmetic), PROMPTS, one_sequence)


@pytest.mark.parametrize("arithmetic", PATHS)
def test_merged_samples_are_bitwise_those_of_jobs_of_one(arithmetic):
    for changes, num_samples, temperature in (({}, 128, 0.6), (ODD, 64, 0.2)):
        decoder = CpuEngine(tiny_decoder(**changes), torch.float32, arithmetic)
        parts = check_merged_rows(decoder, num_samples, replace(NUCLEUS, temperature=temperature))
        assert max(parts) > 32  # numbers of a value are padded to whole steps of 32


@pytest.mark.parametrize("arithmetic", PATHS)
def test_a_slot_keeps_nothing_of_the_response_before(arithmetic):
    """Where one slot serves a response that is not finite, and then others, its padding must not
    reach them."""
    model = tiny_decoder(**ODD, tie_word_embeddings=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[9] = math.inf
    prompts = make_prompts([[9], [5, 6, 7, 8]])
    both, alone = (
        generate(model, arithmetic, max_batch=1, prompts=x, limit=5)
        for x in (prompts, prompts.take(1, 1))
    )
    start = both.cu_seqlens[6]
    assert both.logprobs[:start].isnan().all()
    assert alone.logprobs[: alone.cu_seqlens[1]].isfinite().all()
    assert torch.equal(both.tokens[start:], alone.tokens)
    assert torch.equal(both.logprobs[start:].nan_to_num(1), alone.logprobs.nan_to_num(1))
