"""The CUDA kernels of a decoding step on an emulated GPU: attention against float64, sampling
against PyTorch.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from maxrl_fast.model.decoder import DecoderConfig
from maxrl_fast.rollout import RolloutRequest, Sampling
from maxrl_fast.rollout.decode_attention import Step, has_kernel, num_splits
from maxrl_fast.rollout.decode_sample import sample_and_append
from maxrl_fast.rollout.decode_slots import DecodeSlots, Shape
from maxrl_fast.rollout.native import NativeEngine
from maxrl_fast.rollout.random import uniforms
from tests.decoding import (
    SHAPES,
    TEMPERATURES,
    VOCABULARIES,
    attention,
    check_sampling,
    sampling_state,
)
from tests.emulation.test_kernels import CPU, emulated_gpu
from tests.gpu.test_rollout import PROMPTS
from tests.models import tiny_decoder

pytestmark = [pytest.mark.emulated, pytest.mark.usefixtures("is_reverse")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_equals_float64(shape, dtype):
    expected, *caches = attention(shape, dtype, CPU, in_kernel=False)
    if dtype == torch.bfloat16:  # the reference gets the same inputs
        expected, *_ = attention(shape, torch.float64, CPU, in_kernel=False)
    with emulated_gpu():
        actual, *written = attention(shape, dtype, CPU, in_kernel=True)
    for a, b in zip(written, caches, strict=True):
        assert torch.equal(a, b)
    error = (actual.double() - expected.double()).norm(dim=-1) / expected.double().norm(dim=-1)
    assert error.max() < (1e-2 if dtype == torch.bfloat16 else 1e-5)


def test_supported_sizes():
    def fits(heads, kv_heads, head_dim, dtype):
        config = DecoderConfig(50, heads * head_dim, 64, 2, heads, kv_heads, head_dim, 64)
        with emulated_gpu():
            return has_kernel(config, dtype, CPU)

    assert fits(8, 1, 256, torch.bfloat16)
    assert not fits(9, 1, 64, torch.bfloat16)
    assert not fits(4, 2, 20, torch.bfloat16)
    assert fits(4, 2, 20, torch.float32)
    assert not fits(4, 2, 256, torch.float32)
    assert not fits(4, 2, 64, torch.float64)
    assert not has_kernel(DecoderConfig(50, 64, 64, 2, 4, 2, 16, 64), torch.float32, CPU)


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_sampling(vocab, temperature):
    check_sampling(vocab, temperature, CPU, emulated_gpu)


def test_several_rows_are_sampled_from_the_same_logits():
    """As the first tokens of a prompt's samples are: rows of the state in any order, the others
    unchanged.
    """
    logits, *state = sampling_state(300, CPU)
    expected, before = [x.clone() for x in state], [x.clone() for x in state]
    rows = torch.randperm(60, generator=torch.Generator().manual_seed(0))[:42]
    copies = torch.zeros_like(logits)
    copies[rows] = logits[:14].repeat_interleave(3, dim=0)
    sampling = Sampling(1.3, 9, ())
    with emulated_gpu():
        sample_and_append(copies, sampling, *expected)
        sample_and_append(logits[:14], sampling, *state, rows=rows)
    others = torch.ones(60, dtype=torch.bool).index_fill(0, rows, False)
    for actual, wanted, old in zip(state[2:], expected[2:], before[2:], strict=True):
        assert torch.equal(actual[rows], wanted[rows])
        assert torch.equal(actual[others], old[others])
    with (
        emulated_gpu(),
        pytest.raises(ValueError, match=r"the number of rows must be a multiple .* got 42 and 60"),
    ):
        sample_and_append(logits, sampling, *state, rows=rows)


def test_a_nonfinite_logit_reaches_the_logprobs():
    logits, *state = sampling_state(300, CPU)
    logits[7, 40], logits[8, 0], logits[9, 3] = torch.nan, torch.inf, -torch.inf
    state[4][:] = False
    with emulated_gpu():
        sample_and_append(logits, Sampling(1.0, 9, ()), *state)
    bad = (~state[-1].isfinite()).any(1).nonzero()[:, 0]
    assert bad.tolist() == [7, 8]


def test_rounding_never_draws_a_token_of_probability_0():
    """In float32 the sum over the vocabulary in order can stay below u total, where u is nearly
    1.
    """
    keys = torch.arange(1 << 22)
    u = uniforms(keys, torch.zeros_like(keys))
    assert u.max() > 1 - 1e-6
    logits, _, stops, last, length, done, *written = sampling_state(5000, CPU)
    logits[:, 4000:] = -torch.inf
    length[:], done[:] = 0, False
    with emulated_gpu():
        sample_and_append(
            logits,
            Sampling(1.0, 9, ()),
            keys[u.argmax()].expand(60).clone(),
            stops,
            last,
            length,
            done,
            *written,
        )
    assert (last < 4000).all()
    assert last.float().mean() > 3900


def test_few_rows_with_long_responses_share_no_block_less_than_256_keys():
    assert num_splits(1, 1, 180) == 1
    assert num_splits(4096, 2, 10_000) == 1
    assert num_splits(16, 2, 2048) == 8
    assert num_splits(1, 2, 1100) == 4


class Operators(TorchDispatchMode):
    """Keep the names of PyTorch's operators that launch a kernel: not views, nor allocations
    without values.
    """

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not function.is_view and function.name() not in (
            "aten::empty.memory_format",
            "aten::detach",
        ):
            self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def test_a_step_launches_two_kernels_outside_the_model():
    """One adds up the positions, and one samples."""

    class Model:
        config = tiny_decoder().config
        lm_head = torch.nn.Identity()

        def __call__(self, tokens, *_):
            with _disable_current_modes():
                return torch.zeros(len(tokens), 32)

        logits = lm_head.forward

    Model.lm_head.weight = torch.zeros(32)
    Model.device = torch.device("cpu")
    with emulated_gpu():
        batch = DecodeSlots(Model(), Shape(2, 6, 3, 4, 8), torch.bfloat16, in_kernel=True)
        batch.begin(2, 3, Sampling(1.0, 8, (3,)))
        with Operators() as operators:
            batch.step(Sampling(1.0, 8, (3,)), 8)
    assert operators.names == ["aten::add.Tensor"]


@pytest.mark.parametrize("limit", [40, 1100])
def test_attention_to_own_tokens_needs_no_copies(limit, monkeypatch):
    # v is a part of the output of a matrix multiplication
    q, k, v = torch.randn(3, 8, 64).split([4, 2, 2], dim=1)
    prompt = torch.randn(3, 4, 64), torch.randn(4, 3).t()
    monkeypatch.setattr(Step, "_to_prompts", lambda *_: prompt)
    own = torch.randn(3, limit, 2, 64), torch.randn(3, limit, 2, 64)
    with emulated_gpu(), Operators() as operators:
        Step(None, torch.tensor([1, 7, limit]), limit, in_kernel=True).attend(
            q, k, v, (None, None), own
        )
    assert operators.names == []


@pytest.mark.parametrize("options", [{}, {"max_batch": 7}])
def test_a_rollout_draws_the_same_tokens_as_the_cpu(options):
    model, sampling = tiny_decoder(), Sampling(1.3, 12, (3, 17))
    expected = NativeEngine(model, torch.float32).generate(
        RolloutRequest(PROMPTS, 6, sampling, 4, 2)
    )
    with emulated_gpu():
        engine = NativeEngine(model, torch.float32, in_cpp=False, **options)
        assert engine.decoder.in_kernel
        rollouts = engine.generate(RolloutRequest(PROMPTS, 6, sampling, 4, 2))
    assert torch.equal(rollouts.tokens, expected.tokens)
    torch.testing.assert_close(rollouts.logprobs, expected.logprobs, rtol=0, atol=1e-4)
