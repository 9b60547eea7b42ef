"""What the fuzz tests draw from: tensors in any layout, and arguments of a wrong kind.

`MAXRL_FAST_FUZZ=20 python -m pytest tests/ops/test_fuzz*.py tests/config/test_config_fuzz.py` draws
20 times as many examples, other ones each time; without it they are the same in every run.
"""

import math
import os
import re
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import torch

FACTOR = float(os.environ.get("MAXRL_FAST_FUZZ", "1"))
REFUSALS = (ValueError, TypeError)

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [*FLOATS, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.bool]
DTYPES += [torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
TEXTS = ["", "2", "0.5", "k1", "ppo", "nan", "no such thing", b"2"]
SCALARS: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, -1, 2**31, 2**53 + 1, 2**63, -(2**63), 10**400, -(10**400)),
    *(0.0, -0.0, 0.5, 1.0, 1.5, 2.0, -0.5, 1e-320, 1e-40, 1e300, math.nan, math.inf, -math.inf),
    *(*TEXTS, 1j, [1], (), {}, {1}, object(), range(3), max),
    *(np.float32(0.5), np.int64(2), np.array([1.0, 2.0]), torch.tensor(2), torch.tensor(0.5)),
    *(torch.tensor([0.5]), torch.tensor([1, 2]), torch.tensor(1j)),
]
REAL = [dtype for dtype in DTYPES if not dtype.is_complex]
# The relative tolerance of a result in each dtype. The mantissa of float8 has 2 or 3 bits.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
TOLERANCE |= {torch.float8_e4m3fn: 0.07, torch.float8_e5m2: 0.13}
NUMBERS = [0.0, -0.0, 1.0, -1.0, 1e-45, 1e-300, 1e30, -1e30, 1e300, math.nan, math.inf, -math.inf]
NUMBERS += [254.0, 2.0**31, 2.0**62]


def settings(max_examples: int) -> hypothesis.settings:
    return hypothesis.settings(
        max_examples=max(1, int(max_examples * FACTOR)),
        deadline=None,
        derandomize=FACTOR <= 1,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )


def assert_explains(error: BaseException) -> None:
    """Check that the message says what was wanted. Python's own conversion and comparison errors do
    not say that.
    """
    wanted = r"\b(must|needs|does not use|takes|more than|give offsets or)\b"
    assert re.search(wanted, str(error)), f"{type(error).__name__}: {error}"
    assert len(str(error)) < 1000


def assert_close(actual, expected, tolerance, scale=None):
    """Check that numbers agree within `tolerance` times the largest one, and are finite in the same
    places.
    """
    actual, expected = actual.detach().double(), expected.detach().double()
    assert actual.shape == expected.shape
    assert torch.equal(actual.isfinite(), expected.isfinite()), (actual, expected)
    finite = expected.isfinite()
    if finite.any():
        scale = expected[finite].abs().max() if scale is None else scale
        worst = (actual - expected)[finite].abs().max()
        assert worst <= tolerance * (1e-3 + scale), (actual, expected)


def drawn_tensor(draw, shape, values, dtype):
    size = math.prod(shape)
    drawn = draw(st.lists(st.sampled_from(values), min_size=size, max_size=size))
    return torch.tensor(drawn, dtype=torch.float64).to(dtype).view(shape)


def relaid(draw, tensor):
    fits = {"step": tensor.dim() > 0, "transposed": tensor.dim() == 2, "column": tensor.dim() == 1}
    fits |= dict.fromkeys(("negated", "requires_grad"), tensor.dtype in FLOATS)
    kinds = ["plain", "offset", *(kind for kind, is_fit in fits.items() if is_fit)]
    kind = draw(st.sampled_from(kinds))
    if kind == "step":
        wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1] + 1, dtype=tensor.dtype)
        wide[..., 1::2] = tensor
        return wide[..., 1::2]
    if kind == "offset":
        start = draw(st.integers(1, 3))
        flat = torch.zeros(tensor.numel() + 5, dtype=tensor.dtype)
        flat[start : start + tensor.numel()] = tensor.flatten()
        return flat[start : start + tensor.numel()].view(tensor.shape)
    if kind == "transposed":
        return tensor.T.contiguous().T
    if kind == "column":
        return torch.stack([tensor, tensor], 1)[:, 1]
    if kind == "negated":  # data_ptr() shows the other sign
        return torch._neg_view(-tensor)
    return tensor.clone().requires_grad_() if kind == "requires_grad" else tensor


def strange(draw, value):
    """Return a replacement for an argument: mostly another tensor if the argument is a tensor,
    otherwise any object.
    """
    if not isinstance(value, torch.Tensor) or draw(st.integers(0, 5)) == 0:
        return draw(st.sampled_from(SCALARS))
    changes = "dtype shape numbers numbers device layout relaid expanded".split()
    change = draw(st.sampled_from(changes))
    if change == "dtype":
        return value.to(draw(st.sampled_from(DTYPES)))
    if change == "shape":
        return reshaped(draw, value)
    if change == "numbers":
        return with_numbers(draw, value)
    if change == "device":
        return value.to("meta")
    if change == "layout":
        return value.float().to_sparse()
    if change == "expanded":
        return value[:1].expand(value.shape) if value.dim() and len(value) else value
    return relaid(draw, value)


def reshaped(draw, value):
    changes = "scalar|empty|more dims|fewer|longer|flat|turned|one".split("|")
    change = draw(st.sampled_from(changes))
    if change == "scalar":
        return value.new_ones(())
    if change == "empty":
        return value.new_ones(draw(st.sampled_from([(0,), (0, 3), (3, 0), (0, 0), (2, 0, 3)])))
    if change == "more dims":
        return value[None] if draw(st.booleans()) else value[..., None]
    if change == "fewer":
        return value[:-1] if value.dim() else value
    if change == "longer":
        return torch.cat([value, value[-1:]]) if value.dim() else value
    if change == "turned" and value.dim() == 2:
        return value.T.contiguous()
    if change == "turned":
        return value.double().flip(0).to(value.dtype) if value.dim() else value
    return value.flatten() if change == "flat" else value.flatten()[:1]


def with_numbers(draw, value):
    value = value.detach().clone()
    if not value.numel():
        return value
    flat = value.view(-1)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, value.numel() - 1))
        if value.is_floating_point():
            number = torch.tensor(draw(st.sampled_from(NUMBERS)), dtype=torch.float64)
            flat[place] = number.to(value.dtype)
        elif value.dtype == torch.bool:
            flat[place] = not flat[place]
        else:
            limits = torch.iinfo(value.dtype)
            lowest, highest = limits.min, limits.max
            edges = [lowest, lowest + 1, -2, -1, 0, 1, 2, 3, 7, 200, 2**31, highest - 1, highest]
            number = draw(st.sampled_from([x for x in edges if lowest <= x <= highest]))
            # as a Python integer, the largest uint64 would overflow
            flat[place] = torch.tensor(number, dtype=value.dtype)
    return value


def attempt(function, arguments):
    """Return the function's result and None, or None and its refusal. Any other exception is
    raised.
    """
    try:
        return function(**arguments), None
    except REFUSALS as error:
        return None, error


def call_with_strangers(draw, function, arguments, check, may_refuse=False):
    """Call `function` with up to two arguments replaced by strange ones, and the others in any
    memory layout.

    It must refuse with a message that explains, or return a result that `check(result,
    **arguments)` accepts. Without strange arguments it must return a result, unless `may_refuse`.
    """
    names, chosen = sorted(arguments), []
    if draw(st.integers(0, 3)):
        chosen = draw(st.lists(st.sampled_from(names), max_size=2, unique=True))
    given = {}
    for name in names:
        value = arguments[name]
        if name in chosen:
            value = strange(draw, value)
        elif isinstance(value, torch.Tensor) and draw(st.booleans()):
            value = relaid(draw, value)
        given[name] = value
    hypothesis.note(f"{chosen} of {given}")
    result, error = attempt(function, given)
    if error is not None:
        assert chosen or may_refuse, f"nothing was strange, and yet: {error}"
        assert_explains(error)
        return
    devices = {x.device.type for x in given.values() if isinstance(x, torch.Tensor)}
    if "meta" in devices:  # only shapes are known, and either all tensors are on meta or none is
        assert devices == {"meta"}
    else:
        check(result, **given)


def exact(tensor, dtype=torch.float64):
    """Return a copy in `dtype` by PyTorch's conversions. Fail if the tensor is not a dense real
    tensor on the CPU.
    """
    assert isinstance(tensor, torch.Tensor)
    assert tensor.device.type == "cpu"
    assert tensor.layout is torch.strided
    assert not tensor.is_complex()
    return tensor.detach().to(torch.float64).clone().to(dtype)


def replace_every_argument(function, arguments):
    """Replace each argument of a valid call by every wrong object. Each call must succeed, or
    refuse with a message that explains."""
    function(**arguments)
    for name in arguments:
        for value in SCALARS:
            _, error = attempt(function, arguments | {name: value})
            if error is not None:
                assert_explains(error)


def whole(tensor):
    assert tensor.device.type == "cpu"
    assert not tensor.is_floating_point()
    assert not tensor.is_complex()
    return [int(x) for x in tensor.tolist()]
