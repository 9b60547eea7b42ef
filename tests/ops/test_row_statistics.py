"""ops.row_statistics against its definition, written token by token in float64."""

import importlib
import math

import pytest
import torch

from maxrl_fast.ops import linear_row_statistics, row_statistics, token_logprobs

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-6, torch.float16: 2e-6, torch.float64: 1e-12}
MODULE = importlib.import_module("maxrl_fast.ops.row_statistics")  # the package has a function of this name
FLOATING = ("logprobs", "entropy", "top_logprobs", "log_mass")


def definition(row, target, top_k, min_p, temperature):
    """Return logprob, entropy, top tokens, their log-probs, the log of the mass, and the log-prob under the proxy."""
    x = [z / temperature for z in row.double().tolist()]
    high = max(x)
    weights = [math.exp(v - high) for v in x]
    total = math.fsum(weights)
    log_p = [v - high - math.log(total) for v in x]
    entropy = -math.fsum(w / total * v for w, v in zip(weights, log_p, strict=True) if w)
    top = sorted(range(len(x)), key=lambda i: (-x[i], i))[:top_k]
    kept = [i for i, w in enumerate(weights) if w >= min_p]  # the greatest has the weight 1
    mass = math.fsum(weights[i] for i in kept) / total
    proxy = log_p[target] - math.log(mass) if target in set(kept) else -math.inf
    return log_p[target], entropy, top, [log_p[i] for i in top], math.log(mass), proxy


def assert_defined(actual, logits, targets, *, top_k, min_p, temperature=1.0, tolerance):
    taus = temperature.tolist() if isinstance(temperature, torch.Tensor) else [temperature] * len(logits)
    for t, tau in enumerate(taus):
        logprob, entropy, top, top_logprobs, log_mass, proxy = definition(logits[t], int(targets[t]), top_k, min_p, tau)
        assert actual.top_tokens[t].tolist() == top
        values = [logprob, entropy, log_mass, *top_logprobs]
        computed = [actual.logprobs[t], actual.entropy[t], actual.log_mass[t], *actual.top_logprobs[t]]
        for value, expected in zip(computed, values, strict=True):
            assert value.item() == pytest.approx(expected, rel=tolerance, abs=3 * tolerance)
        assert actual.log_proxy(min_p)[t].item() == pytest.approx(proxy, rel=tolerance, abs=3 * tolerance)


def make(vocab, dtype, rows=5, seed=0, scale=3.0):
    generator = torch.Generator().manual_seed(vocab + seed)
    logits = (scale * torch.randn(rows, vocab, generator=generator)).to(dtype)
    targets = torch.randint(vocab, (rows,), generator=generator)
    targets[0], targets[1], targets[2] = 0, vocab - 1, logits[2].argmax()
    return logits, targets, 0.5 + torch.rand(rows, generator=generator, dtype=torch.promote_types(dtype, torch.float32))


@pytest.fixture(params=["kernel", "reference"])
def how(request, monkeypatch):
    monkeypatch.setattr(MODULE, "has_kernels", lambda device: request.param == "kernel")
    return request.param


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("vocab", [1, 2, 9, 127, 5003])
@pytest.mark.usefixtures("instructions", "how")
def test_rows_are_as_defined(vocab, dtype):
    logits, targets, temperatures = make(vocab, dtype)
    for top_k, min_p, temperature in ((1, 0.02, 1.0), (min(vocab, 3), 0.3, 0.7), (min(vocab, 8), 0.001, temperatures)):
        options = {"top_k": top_k, "min_p": min_p, "temperature": temperature}
        actual = row_statistics(logits, targets, **options)
        assert {getattr(actual, name).dtype for name in FLOATING} == {torch.promote_types(dtype, torch.float32)}
        assert_defined(actual, logits, targets, **options, tolerance=TOLERANCE[dtype])


@pytest.mark.usefixtures("instructions")
def test_a_large_vocabulary():
    for dtype in (torch.float32, torch.bfloat16):
        logits, targets, _ = make(151936, dtype, rows=3)
        actual = row_statistics(logits, targets, top_k=8, min_p=0.02)
        assert_defined(actual, logits, targets, top_k=8, min_p=0.02, tolerance=TOLERANCE[dtype])


SPOILS = [lambda x: 0 * x, lambda x: -x, lambda x: x.roll(1, 0), lambda x: 1.01 * x]


@pytest.mark.parametrize(
    ("name", "spoil"), [*((name, spoil) for name in FLOATING for spoil in SPOILS), *(("top_tokens", x) for x in SPOILS[:3])]
)
def test_the_comparison_detects_wrong_results(name, spoil):
    logits, targets, _ = make(127, torch.float32)
    actual = row_statistics(logits, targets, top_k=2, min_p=0.3)
    wrong = actual._replace(**{name: spoil(getattr(actual, name))})
    with pytest.raises(AssertionError):
        assert_defined(wrong, logits, targets, top_k=2, min_p=0.3, tolerance=TOLERANCE[torch.float32])


@pytest.mark.parametrize("vocab", [8, 50, 6000])
@pytest.mark.usefixtures("instructions", "how")
def test_of_equal_logits_the_lower_token_comes_first(vocab):
    """Logits of few values, also where the target is one of the equal tokens, in any block of a row."""
    logits = torch.randint(3, (9, vocab), generator=torch.Generator().manual_seed(1)).float()
    logits[0] = 1.5
    targets = torch.linspace(0, vocab - 1, 9).long()
    for min_p in (1.0, 0.2):
        actual = row_statistics(logits, targets, top_k=8, min_p=min_p)
        assert_defined(actual, logits, targets, top_k=8, min_p=min_p, tolerance=TOLERANCE[torch.float32])
    assert actual.top_tokens[0].tolist() == list(range(8))


@pytest.mark.parametrize("vocab", [40, 5000])
@pytest.mark.usefixtures("instructions", "how")
def test_extreme_logits(vocab):
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(6))
    targets = torch.tensor([3, 3, vocab - 1, 0, 5, 5])
    logits[0, vocab // 2 :] = -torch.inf
    logits[1, :3] = logits[1, 4:] = -torch.inf  # all but the target
    logits[2] *= 1e6
    logits[3, 0] = 80  # a probability of 1
    logits[4, 6:] = 1e6
    logits[5, 5] = -torch.inf  # the target
    actual = row_statistics(logits, targets, top_k=4, min_p=0.3)
    assert actual.top_tokens[1].tolist() == [3, 0, 1, 2]  # the others have probability 0
    assert actual.top_logprobs[1].tolist() == [0, -math.inf, -math.inf, -math.inf]
    rows = torch.tensor([0, 2, 3, 4, 5])
    chosen = type(actual)(*(x[rows] for x in actual))
    assert_defined(chosen, logits[rows], targets[rows], top_k=4, min_p=0.3, tolerance=5e-6)
    assert actual.log_proxy(0.3)[5].item() == -math.inf


@pytest.mark.parametrize(("dtype", "top"), [(torch.float32, -1000.0), (torch.float64, -60000.0)])
@pytest.mark.usefixtures("instructions", "how")
def test_impossible_tokens_before_very_negative_logits(dtype, top):
    logits = torch.full((2, 5000), -torch.inf, dtype=dtype)
    logits[:, -2:] = torch.tensor([top - 0.5, top])
    targets = torch.tensor([4999, 4998])
    for min_p in (0.3, 0.9, 1.0):
        actual = row_statistics(logits, targets, top_k=2, min_p=min_p)
        assert_defined(actual, logits, targets, top_k=2, min_p=min_p, tolerance=2e-6)


@pytest.mark.usefixtures("instructions", "how")
def test_nan_does_not_hide():
    logits, targets, _ = make(3000, torch.float32)
    logits[1, 7] = torch.nan
    logits[2, 2500] = torch.inf
    actual = row_statistics(logits, targets)
    for name in FLOATING:
        rows = getattr(actual, name).view(5, -1)
        assert rows[1:3].isnan().any(1).all(), name
        assert rows[[0, 3, 4]].isfinite().all(), name
    assert ((actual.top_tokens >= 0) & (actual.top_tokens < 3000)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_at_any_address(dtype):
    logits, targets, _ = make(1000, dtype)
    expected = row_statistics(logits, targets, top_k=8)
    wide = torch.full((5, 1007), float("nan"), dtype=dtype)
    for offset in (1, 3):
        wide[:, offset : offset + 1000] = logits
        for view in (wide[:, offset : offset + 1000], logits.T.contiguous().T):
            for a, b in zip(row_statistics(view, targets, top_k=8), expected, strict=True):
                assert torch.equal(a, b)


def test_log_probs_and_entropies_are_bitwise_those_of_token_logprobs():
    for dtype in TOLERANCE:
        logits, targets, temperatures = make(4099, dtype)
        statistics = row_statistics(logits, targets, temperature=temperatures)
        for a, b in zip(token_logprobs(logits, targets, temperature=temperatures), statistics[:2], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("softcap", [0.0, 4.0])
@pytest.mark.parametrize("chunk_tokens", [None, 1, 3])
@pytest.mark.usefixtures("how")
def test_from_hidden_states(chunk_tokens, softcap):
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(n, 16, generator=generator, dtype=torch.float64) for n in (7, 61))
    targets, tau = torch.randint(61, (7,), generator=generator), 0.5 + torch.rand(7, generator=generator, dtype=torch.float64)
    logits = hidden @ weight.T
    logits = softcap * torch.tanh(logits / softcap) if softcap else logits
    options = {"top_k": 5, "min_p": 0.1, "temperature": tau}
    actual = linear_row_statistics(
        hidden.requires_grad_(), weight.requires_grad_(), targets, **options, softcap=softcap, chunk_tokens=chunk_tokens
    )
    assert not any(x.requires_grad for x in actual)
    assert_defined(actual, logits, targets, **options, tolerance=1e-11)


def test_no_rows():
    none = torch.zeros(0, dtype=torch.int64)
    for actual in (
        row_statistics(torch.zeros(0, 9), none, top_k=4),
        linear_row_statistics(torch.zeros(0, 3), torch.zeros(9, 3), none, top_k=4),
    ):
        assert [tuple(x.shape) for x in actual] == [(0,), (0,), (0, 4), (0, 4), (0,)]
        assert actual.top_tokens.dtype == torch.int64


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 0}, r"top_k must be an integer from 1 to 8 and at most V = 5, got 0"),
        ({"top_k": 6}, r"top_k must be an integer from 1 to 8 and at most V = 5, got 6"),
        ({"top_k": 2.0}, "top_k must be an integer"),
        ({"min_p": 0.0}, "min_p must be above 0 and at most 1, got 0.0"),
        ({"min_p": 1.1}, "min_p must be above 0 and at most 1, got 1.1"),
        ({"min_p": math.nan}, "min_p must be above 0 and at most 1, got nan"),
        ({"temperature": 0.0}, "temperature must be a finite number above 0"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    targets = torch.tensor([0, 1])
    with pytest.raises(ValueError, match=message):
        row_statistics(torch.zeros(2, 5), targets, **options)
    with pytest.raises(ValueError, match=message):
        linear_row_statistics(torch.zeros(2, 3), torch.zeros(5, 3), targets, **options)


def test_a_target_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match=r"targets must be in \[0, 5\), got 5 at token 1"):
        row_statistics(torch.zeros(2, 5), torch.tensor([0, 5]))


def test_operators_pass_opcheck():
    logits, targets, temperatures = make(11, torch.float32)
    operators = torch.ops.maxrl_fast
    torch.library.opcheck(operators.row_statistics.default, (logits, targets, temperatures, 1.0, 3, 0.1))
    hidden, weight = torch.randn(5, 4), torch.randn(11, 4)
    torch.library.opcheck(operators.linear_statistics.default, (hidden, weight, targets, None, 0.7, 3, 0.1, 2, 4.0))
