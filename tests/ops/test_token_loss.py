import itertools
import math
import random

import pytest
import torch

from maxrl_fast import _C
from maxrl_fast.algorithms.losses import ALIASES
from maxrl_fast.ops import LOSSES, policy_gradient_loss
from maxrl_fast.ops.dispatch import check_fields
from maxrl_fast.ops.loss_kernel import KL_ESTIMATORS, LossSums
from tests.ops.loss_definitions import (
    HOW,
    OF_RESPONSES,
    S,
    T,
    V,
    aggregation_of,
    computed,
    definition,
    drawn_options,
    example,
    in_float32,
)


@pytest.fixture
def all_instructions():
    yield _C.instruction_sets()
    _C.limit_instructions(_C.instruction_sets()[0])


@pytest.mark.parametrize("loss", LOSSES)
def test_value_gradient_and_metrics_are_those_of_the_definition(loss, all_instructions):
    """With every divergence at every distance of the policies, and draws of everything else.

    Four have policy terms alone. The last two have equal rewards: no gradient but for dppo and the
    chosen tokens of kl_cov, nor for these without their terms.
    """
    choice, sizes = random.Random(loss).choice, []
    for seed in range(18):
        place, kl = seed % 4, seed // 4 % 4
        is_alone = place == kl
        per_token = loss not in OF_RESPONSES and (
            kl % 2 == 0 if is_alone else choice([True, False])
        )
        e = example((0.02, 0.3, 1.5, 15)[place], seed, per_token)
        if per_token and seed % 3:
            e["importance_weights"] = torch.linspace(0.1, 2, T).double()
        options = drawn_options(choice, loss) | {
            "kl": KL_ESTIMATORS[kl],
            "kl_coef": 0.3 * (not is_alone),
        }
        options["entropy_coef"] *= not is_alone
        if place == 1:  # on both sides of the limits
            logp = torch.log_softmax(e["logits"] / 0.7, -1).gather(1, e["targets"][:, None])[:, 0]
            # token 4 is a response
            for key, tokens in (("old_logprobs", [3, 10, 4]), ("ref_logprobs", [2, 12, 16])):
                e[key][tokens] = logp[tokens] + torch.tensor([-1, 1, -1]) * (19.99, 20.01)[kl % 2]
            options["dual_clip"] = (None, None, 1.1, 2.5)[kl]
        if seed > 15:
            e |= {"advantages": torch.zeros(S, dtype=torch.float64)}
            learns = {"dppo": {"kl": 0}, "kl_cov": {"coef": 0}}.get(loss)
            options |= {
                "kl_coef": 0.0,
                "entropy_coef": 0.0,
                "loss_options": learns if seed == 17 else None,
            }
        e["mask"] = choice([None, e["mask"]])
        e["temperature"] = choice(
            [0.7, torch.linspace(0.4, 1.2, T).double() if place != 1 else 0.7]
        )
        z = e["logits"].clone().requires_grad_()
        torch.manual_seed(seed)
        expected, metrics = definition(z, e, loss, **options)
        (gradient,) = torch.autograd.grad(expected, z)
        sizes.append(float(gradient.abs().max()))
        narrower = all_instructions[1:] if LOSSES[loss].fused else []
        for how, instructions in (
            *((how, all_instructions[0]) for how in HOW),
            *(("kernel", instructions) for instructions in narrower),
        ):
            _C.limit_instructions(instructions)
            torch.manual_seed(seed)
            value, actual, found = computed(how, **e, loss=loss, **options)
            assert value.item() == pytest.approx(expected.item(), rel=1e-10, abs=1e-12), how
            torch.testing.assert_close(actual, gradient, rtol=1e-9, atol=1e-12)
            assert {key: float(x) for key, x in found.items()} == pytest.approx(
                metrics, rel=1e-9, abs=1e-12
            ), how
        assert seed < 16 or bool(gradient.any()) == (learns is not None and seed == 16)
    assert sum(size > 1e-3 for size in sizes) > 8


@pytest.mark.parametrize("loss", LOSSES)
def test_wrong_logprobs_leave_losses_finite_and_nan_does_not_hide(loss):
    row, e = LOSSES[loss], in_float32(example())
    e |= {"mask": None, "loss": loss, "aggregation": aggregation_of(loss), "denominator": 8.0}
    for how, wrong, is_one in itertools.product(
        HOW, (-1e4, 1e4, -math.inf, math.inf), (False, True)
    ):
        old, ref = e["old_logprobs"].clone(), e["ref_logprobs"].clone()
        place = [15] if is_one else slice(None)
        old[place] = ref[place] = wrong
        given = e | {"old_logprobs": old, "ref_logprobs": ref, "kl_coef": 0.1}
        value, gradient, metrics = computed(how, **given)
        assert value.isfinite()
        assert gradient.isfinite().all()
        assert all(metrics[name].isfinite() for name in ("ratio", "kl"))
        # in a response the others may make up for one token
        if not (is_one and row.by_sequence):
            assert metrics["ratio_clamped"] * T == pytest.approx(1 if is_one else T)
    for how in HOW:
        # a clamp that hid it would train on nothing
        old = e["old_logprobs"].index_fill(0, torch.tensor([15]), math.nan)
        assert computed(how, **e | {"old_logprobs": old})[0].isnan() == (row.name != "reinforce")


@pytest.mark.parametrize("loss", LOSSES)
def test_masked_values_may_be_anything_and_no_tokens_give_zero(loss):
    """Nor are rows read whose response has no advantage, where a kernel computes the loss."""
    clean = example() | {"loss": loss, "aggregation": aggregation_of(loss)}
    clean["temperature"] = torch.full((T,), 0.7, dtype=torch.float64)
    masked, e = ~clean["mask"], dict(clean)
    for key in ("old_logprobs", "ref_logprobs", "targets", "temperature"):
        e[key] = e[key].clone()
        e[key][masked] = (
            -100 if key == "targets" else math.inf if key == "old_logprobs" else math.nan
        )
    for how in HOW:
        is_unread = torch.zeros(T, dtype=torch.bool)
        is_unread[clean["cu_seqlens"][-2] :] = LOSSES[loss].fused and how != "reference"
        torch.manual_seed(0)
        _, expected, _ = computed(how, **clean)
        torch.manual_seed(0)
        e["logits"] = clean["logits"].masked_fill((masked | is_unread)[:, None], math.nan)
        value, gradient, metrics = computed(how, **e)
        assert value.isfinite()
        assert torch.equal(gradient, expected)
        assert not gradient[masked].any()
        assert all(metric.isfinite() for metric in metrics.values())
        value, gradient, metrics = computed(how, **e | {"mask": torch.zeros(T, dtype=torch.bool)})
        assert value == 0
        assert not gradient.any()
        assert not any(metrics.values())
        none = {key: x[:0] for key, x in e.items() if torch.is_tensor(x) and key != "cu_seqlens"}
        value, gradient, _ = computed(how, **e | none | {"cu_seqlens": torch.tensor([0])})
        assert (value.item(), tuple(gradient.shape)) == (0, (0, V))


def test_luspo_is_gspo_with_a_sum_over_each_response():
    assert ALIASES["luspo"].name == "gspo"
    e = example() | {"aggregation": "seq_mean_token_sum"}
    assert len({policy_gradient_loss(**e, loss=loss)[0].item() for loss in ("luspo", "gspo")}) == 1


def test_a_compiled_module_with_other_sums_is_refused(monkeypatch):
    check_fields("LossSums", LossSums._fields)
    monkeypatch.setitem(_C.FIELDS, "LossSums", dict.fromkeys(LossSums._fields[::-1], ""))
    with pytest.raises(
        ImportError,
        match=r"maxrl_fast._C does not fit .* its LossSums has the fields \('logprob_diff',",
    ):
        check_fields("LossSums", LossSums._fields)
