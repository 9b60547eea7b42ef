import math
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from examples.naive_engine import NaiveEngine
from maxrl_fast.errors import NonFiniteError
from maxrl_fast.model.decoder import RopeScaling
from maxrl_fast.ops import token_logprobs
from maxrl_fast.rollout import (
    RolloutRequest,
    Sampling,
    check_finite,
    find_wrong,
    sample_keys,
    uniforms,
)
from maxrl_fast.rollout.native import native_engine
from maxrl_fast.training.passes import check_engine
from tests.batches import FIVE_PROMPTS as PROMPTS
from tests.batches import Chosen, make_prompts, one_batch
from tests.models import adapted, on_threads, response_logits, tiny_decoder
from tests.tables import refused

STOPS = (3, 17)
# The expected keys and bits, computed with Python's integers.
KEYS, BITS = [-3072355124115617029, 4574412018458654984], [2083381, 13143039]
IN_CPP = [pytest.param(True, id="C++"), pytest.param(False, id="PyTorch")]


def make_engine(model, dtype=torch.float32, in_cpp=True, **options):
    return native_engine(model, dtype, in_cpp=in_cpp and dtype == torch.float32, **options)


def generate(
    model, num_samples=6, temperature=1.3, limit=24, seed=4, step=2, prompts=PROMPTS, **options
):
    limits = {name: options.pop(name) for name in ("top_k", "top_p", "min_p") if name in options}
    request = Sampling(temperature, limit, STOPS, **limits), seed, step
    return make_engine(model, **options).generate(RolloutRequest(prompts, num_samples, *request))


def forward_logprobs(model, rollouts, temperature, prompts=PROMPTS, dtype=torch.float32):
    logits = response_logits(model, one_batch(prompts, rollouts), dtype)
    return token_logprobs(logits, rollouts.tokens, temperature=temperature)[0]


# The logits reach 5.7, where bfloat16 numbers are .03 apart. Each side can be off by one or two of
# these steps.
@pytest.mark.parametrize(
    ("in_cpp", "dtype", "tolerance"),
    [
        (True, torch.float32, 2e-5),
        (False, torch.float32, 1e-4),
        (False, torch.float64, 1e-6),
        (False, torch.bfloat16, 0.1),
    ],
)
def test_logprobs_equal_the_full_forward_pass(in_cpp, dtype, tolerance):
    model = tiny_decoder()
    for temperature in (1.3, 1.0):
        rollouts = generate(model, temperature=temperature, in_cpp=in_cpp, dtype=dtype)
        sampling = Sampling(temperature, 24, STOPS)
        assert find_wrong(rollouts, RolloutRequest(PROMPTS, 6, sampling), 32) == ""
        assert 0 < rollouts.truncated.float().mean() < 1
        expected = forward_logprobs(model, rollouts, temperature, dtype=dtype)
        assert rollouts.logprobs.dtype == torch.float32
        assert rollouts.logprobs.std() > 0.5
        assert (rollouts.logprobs - expected).abs().max() < tolerance
        assert rollouts.lengths.unique().numel() > 3  # responses finished at different times


WAITING = "_local_scalar_dense nonzero is_nonzero equal masked_select unique_dim _unique2".split()


class NoWaiting(TorchDispatchMode):
    """Refuse operators that would make the host wait for a value or a shape on a GPU."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name().removeprefix("aten::")
        if name in WAITING:
            raise AssertionError(f"{name} within a burst")
        return function(*args, **(kwargs or {}))


SIZES = "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim".split()


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen3"},
        {
            "model_type": "llama",
            "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 64),
            "tie_word_embeddings": False,
        },
        # No size is a multiple of a SIMD vector. One key/value head serves more query heads than a
        # tile has rows.
        dict(zip(SIZES, (42, 21, 7, 1, 6), strict=True)),
        {"vocab_size": 37, "num_hidden_layers": 1, "num_key_value_heads": 4, "head_dim": 20},
    ],
    ids=["qwen3", "llama3", "odd", "wide-heads"],
)
@pytest.mark.usefixtures("instructions")
def test_every_family_and_odd_sizes(changes):
    model = tiny_decoder(**changes)
    # 210 tokens: several calls of forward
    prompts = make_prompts([list(range(1, 31)) * 7, [4], list(range(20))])
    rollouts = generate(model, 9, prompts=prompts)
    expected = forward_logprobs(model, rollouts, 1.3, prompts)
    assert (rollouts.logprobs - expected).abs().max() < 1e-4


def check_alike(actual, expected):
    for name in ("tokens", "cu_seqlens", "truncated"):
        assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    torch.testing.assert_close(actual.logprobs, expected.logprobs, rtol=0, atol=1e-4)


@pytest.mark.usefixtures("instructions")
def test_both_decoders_draw_the_same_samples():
    model = tiny_decoder()
    for options in ({}, {"min_p": 0.1}, {"top_k": 12, "top_p": 0.9, "min_p": 0.05}):
        check_alike(*(generate(model, in_cpp=in_cpp, **options) for in_cpp in (True, False)))


@pytest.mark.parametrize("in_cpp", IN_CPP)
def test_temperature_0_is_greedy_decoding(in_cpp):
    model = tiny_decoder()
    rollouts = generate(model, num_samples=2, temperature=0.0, in_cpp=in_cpp)
    logits = response_logits(model, one_batch(PROMPTS, rollouts), torch.float32)
    assert torch.equal(logits.argmax(-1), rollouts.tokens)
    assert (rollouts.logprobs == 0).all()
    assert Sampling(1.3, 24, STOPS, 5).greedy == Sampling(0.0, 24, STOPS, 5)


def check_independence(draw, prompts, one_sequence):
    """Check that samples are bitwise the same whatever is beside them, with any number of threads.
    `draw` has prompts of its own, of which the third is drawn alone; return all its samples."""
    whole = draw()
    changes = [{}, {"max_batch": 7}, {"max_batch": 1}, {"cache_bytes": one_sequence}]
    others = [draw(**options) for options in changes]
    for other in (*others, *(draw() for _ in on_threads(1, 2, 3, 5))):
        assert torch.equal(other.tokens, whole.tokens)
        assert torch.equal(other.logprobs, whole.logprobs)
    alone = draw(prompts=prompts.take(2, 1))
    part = slice(whole.cu_seqlens[12], whole.cu_seqlens[18])
    assert torch.equal(alone.tokens, whole.tokens[part])
    assert torch.equal(alone.logprobs, whole.logprobs[part])
    return whole


@pytest.mark.usefixtures("instructions")
def test_samples_are_bitwise_independent_of_the_batch():
    model = tiny_decoder()
    one_sequence = sum(make_engine(model).sequence_bytes(7, 24))
    whole = check_independence(partial(generate, model), PROMPTS, one_sequence)
    fewer = generate(model, num_samples=2)
    assert torch.equal(fewer.tokens[: fewer.cu_seqlens[2]], whole.tokens[: whole.cu_seqlens[2]])
    for changed in (generate(model, seed=5), generate(model, step=3)):
        assert changed.tokens.tolist() != whole.tokens.tolist()


def check_merged_rows(engine, num_samples, sampling):
    """Compare samples, which the decoder computes together while they are alike, with each in a job
    of its own, and the decoded rows with the distinct beginnings. Return the tokens in common."""
    prompts = make_prompts([[5, 6, 7, 8], [9], [5, 6, 7, 8]])
    size = len(prompts) * num_samples
    samples = torch.arange(size)
    keys = sample_keys(1, 1, samples // num_samples, samples % num_samples)

    def draw(prompts, num_samples, keys, max_batch):
        request = Chosen(prompts, num_samples, sampling, chosen=keys)
        engine.max_batch = max_batch
        return engine.generate(request)

    alone = [draw(prompts.take(s // num_samples, 1), 1, keys[s, None], 1) for s in range(size)]
    expected = {
        name: torch.cat([getattr(one, name) for one in alone])
        for name in ("tokens", "logprobs", "lengths", "truncated")
    }
    following = {}  # the next tokens after each prompt and beginning of a response
    for s, one in enumerate(alone):
        tokens = one.tokens.tolist()
        for t in range(1, len(tokens)):
            following.setdefault((s // num_samples, *tokens[:t]), set()).add(tokens[t])
    apart = int(expected["lengths"].sum()) - size
    for max_batch, fewest, most in (
        (size, len(following), len(following)),
        (7, len(following), apart),
        (1, apart, apart),
    ):
        rollouts = draw(prompts, num_samples, keys, max_batch)
        for name, numbers in expected.items():
            assert torch.equal(getattr(rollouts, name), numbers)
        assert fewest <= engine.statistics.decoded_rows <= most
    return [len(beginning) - 1 for beginning, tokens in following.items() if len(tokens) > 1]


NUCLEUS = Sampling(0.6, 40, STOPS, top_p=0.8)


@pytest.mark.usefixtures("instructions")
def test_merged_samples_are_bitwise_those_of_jobs_of_one():
    decoder = make_engine(tiny_decoder())
    assert not check_merged_rows(decoder, 1, NUCLEUS)
    assert not check_merged_rows(decoder, 9, NUCLEUS.greedy)
    parts = check_merged_rows(decoder, 128, NUCLEUS)
    assert {length // 16 for length in parts} == {0, 1, 2}
    assert check_merged_rows(decoder, 20, Sampling(1.3, 24, STOPS, top_k=9, min_p=0.02))


@pytest.mark.parametrize("in_cpp", IN_CPP)
def test_memory_stays_within_the_budget(in_cpp):
    model, request = tiny_decoder(), RolloutRequest(PROMPTS, 6, Sampling(1.0, 24, STOPS), 0, 0)
    free = make_engine(model, in_cpp=in_cpp)
    whole = free.generate(request)
    budget = free.statistics.cache_bytes // 3
    bounded = make_engine(model, in_cpp=in_cpp, cache_bytes=budget)
    assert torch.equal(bounded.generate(request).tokens, whole.tokens)
    assert 0 < bounded.statistics.cache_bytes <= budget
    assert bounded.statistics.decode_steps > free.statistics.decode_steps
    with refused(r"kv_cache_gb must hold the longest prompt and a response, .* got 1e-06"):
        make_engine(model, in_cpp=in_cpp, cache_bytes=1000).generate(request)


@pytest.mark.parametrize(
    ("prompts", "changes", "message"),
    [
        ([[5, 6], []], {}, r"at least one token, got prompt 1 with none"),
        ([[5, 32]], {}, r"vocabulary, 0 to 31, got 32"),
        ([[1], [5] * 500], {}, r"512 tokens, got prompt 1 of 500 tokens and max_new_tokens 24"),
        ([[5]], {"stop_ids": (3, 32)}, r"stop ids must be in the vocabulary, 0 to 31, got 32"),
        ([[5]], {"top_p": 0.0}, r"0 < top_p <= 1"),
        ([[5]], {"temperature": math.nan}, r"finite temperature >= 0"),
        ([[5]], {"max_turns": 0}, r"max_turns must be at least 1, got 0"),
    ],
)
def test_bad_requests_are_refused(prompts, changes, message):
    sampling = Sampling(**{"temperature": 1.0, "max_new_tokens": 24, "stop_ids": STOPS} | changes)
    with refused(message):
        make_engine(tiny_decoder()).generate(RolloutRequest(make_prompts(prompts), 2, sampling))


@pytest.mark.parametrize("in_cpp", IN_CPP)
def test_nonfinite_weights_are_reported(in_cpp):
    model = tiny_decoder()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 4] = math.nan
    rollouts = generate(model, in_cpp=in_cpp)
    with pytest.raises(
        NonFiniteError, match="step 7: the log-probs sampled for prompt 0 are not finite"
    ):
        check_finite(rollouts, PROMPTS, 7)


def reference_distribution(logits, sampling):
    """Return the distribution by the definition of the sampling options, token by token."""
    weights = [math.exp((z - max(logits)) / sampling.temperature) for z in logits]
    kept = sorted(range(len(weights)), key=lambda t: (-weights[t], t))
    if sampling.top_k:
        kept = kept[: sampling.top_k]
    total, nucleus = sum(weights[t] for t in kept), []
    for token in kept:
        if sampling.top_p < 1 and sum(weights[t] for t in nucleus) >= sampling.top_p * total:
            break
        nucleus.append(token)
    kept = [t for t in nucleus if weights[t] >= sampling.min_p * weights[nucleus[0]]]
    total = sum(weights[t] for t in kept)
    return [weights[t] / total if t in kept else 0.0 for t in range(len(weights))]


SAMPLINGS = [
    {"temperature": 0.7},
    {"temperature": 2.0, "top_k": 6},
    {"temperature": 2.0, "top_p": 0.8},
    {"temperature": 2.0, "min_p": 0.2},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.9, "min_p": 0.05},
]


@pytest.mark.parametrize("options", SAMPLINGS, ids=str)
def test_tokens_follow_the_exact_distribution(options):
    model, n = tiny_decoder(seed=1), 20_000
    sampling = Sampling(max_new_tokens=2, stop_ids=(), **options)
    prompts = PROMPTS.take(0, 1)
    rollouts = make_engine(model, max_batch=n).generate(RolloutRequest(prompts, n, sampling, 4, 2))
    tokens, logprobs = rollouts.tokens.view(n, 2), rollouts.logprobs.view(n, 2)
    common = int(tokens[:, 0].mode().values)
    longer = make_prompts([[*prompts.tokens.tolist(), common]])
    everywhere = tokens[:, 0] >= 0
    for prompt, column, rows in ((prompts, 0, everywhere), (longer, 1, tokens[:, 0] == common)):
        one = generate(model, 1, limit=1, prompts=prompt)  # one_batch needs a rollout
        logits = response_logits(model, one_batch(prompt, one), torch.float32)[0].double()
        expected = torch.tensor(reference_distribution(logits.tolist(), sampling)).double()
        observed = tokens[rows, column]
        # before the filters
        whole = (logits / sampling.temperature).log_softmax(-1)[observed]
        torch.testing.assert_close(logprobs[rows, column].double(), whole, rtol=0, atol=1e-4)
        assert chi_square(observed, expected) < 1


def chi_square(observed, expected):
    """Return the chi-square statistic divided by its 1 - 1e-4 quantile. Tokens expected less than 5
    times are one class."""
    counts = torch.bincount(observed, minlength=len(expected)).double()
    expected = expected * len(observed)
    common = expected > 5
    statistic = ((counts - expected) ** 2 / expected)[common].sum()
    seldom = expected[~common].sum()
    statistic += (counts[~common].sum() - seldom) ** 2 / seldom.clamp_min(1)
    freedom = int(common.sum())
    assert freedom > 2
    # Wilson and Hilferty's approximation of the quantile of the chi-square distribution.
    a = 2 / (9 * freedom)
    return float(statistic / (freedom * (1 - a + 3.72 * math.sqrt(a)) ** 3))


def test_random_numbers_are_uniform_and_independent_across_coordinates():
    prompts, samples = torch.meshgrid(torch.arange(64), torch.arange(64), indexing="ij")
    keys = sample_keys(7, 3, prompts, samples)
    assert keys.unique().numel() == 64 * 64
    u = torch.stack([uniforms(keys.flatten(), t) for t in range(16)])  # [16, 4096]
    assert u.min() >= 0
    assert u.max() < 1
    counts = torch.histc(u, 64, 0, 1)
    assert ((counts - 1024) ** 2 / 1024).sum() < 120  # 63 degrees of freedom, one in 100,000
    # five standard deviations of 1/64
    assert (torch.corrcoef(u) - torch.eye(16)).abs().max() < 0.08
    first = u[0].view(64, 64)
    shifted = torch.corrcoef(torch.stack([first[:-1].flatten(), first[1:].flatten()]))
    assert shifted[0, 1].abs() < 0.08


def test_random_numbers_are_the_same_on_every_machine():
    keys = sample_keys(1, 2, torch.tensor([3, 2**40]), torch.tensor([4, 5]))
    assert keys.tolist() == KEYS
    for positions in (6, torch.tensor([6, 6])):
        assert [round(x * 2**24) for x in uniforms(keys, positions).tolist()] == BITS


@pytest.mark.parametrize(
    "sampling",
    [Sampling(1.3, 12, (3, 17)), Sampling(0.0, 5, (3,)), Sampling(0.8, 9, (3,), top_p=0.9)],
)
def test_the_engine_of_the_documentation_draws_the_tokens_of_the_native_engine(sampling):
    model = adapted(tiny_decoder(), "q_proj,down_proj")
    naive, request = NaiveEngine(tiny_decoder(1), torch.float32), (PROMPTS, 5, sampling, 4, 2)
    naive.load_weights(model)
    expected = native_engine(model, torch.float32).generate(RolloutRequest(*request))
    check_alike(naive.generate(RolloutRequest(*request)), expected)


def test_an_engine_of_other_weights_is_refused_at_the_start_of_a_run():
    model = tiny_decoder()
    engine = NaiveEngine(model, torch.float32)
    engine.load_weights(model)
    told = check_engine(model, engine, "naive.py:NaiveEngine")
    assert "log-probs of the rollout engine differ from the policy's by" in told
    other = NaiveEngine(model, torch.float32)
    other.load_weights(tiny_decoder(seed=1))
    with refused(r"--rollout naive\.py:NaiveEngine samples from another model than this .*differ"):
        check_engine(model, other, "naive.py:NaiveEngine")
