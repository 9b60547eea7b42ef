"""Every token loss against its definition, from logits and hidden states, by kernels and by
functions; limits and refusals.
"""

import itertools
import math
import random

import pytest
import torch

from maxrl_fast import _C
from maxrl_fast.algorithms.known import explain_name
from maxrl_fast.algorithms.losses import ALIASES
from maxrl_fast.ops import LOSSES, policy_gradient_loss
from maxrl_fast.ops.dispatch import check_fields
from maxrl_fast.ops.loss_terms import AGGREGATIONS, KL_ESTIMATORS
from maxrl_fast.ops.token_loss_kernel import LossSums
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
        for how, instructions in itertools.product(
            HOW, all_instructions if LOSSES[loss].fused else all_instructions[:1]
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
def test_the_first_update_has_the_gradient_of_reinforce(loss):
    e = example(0.0)
    # these two treat some differently
    options = {"simko": {"alpha": 0, "penalty": 1}, "lp_reg": {"share": 1e-9}}.get(loss)
    options = {"loss_options": options, "aggregation": aggregation_of(loss, "seq_mean_token_mean")}
    _, expected, _ = computed("kernel", **e, loss="reinforce", aggregation=options["aggregation"])
    for how in HOW:
        for old in (e["old_logprobs"], None):
            _, gradient, metrics = computed(how, **e | {"old_logprobs": old}, loss=loss, **options)
            rows = torch.ones(T, dtype=torch.bool)
            if loss == "clip_cov":  # its chosen tokens have none
                rows = gradient.abs().sum(1) > 0
                assert T - int(rows.sum()) <= (expected.abs().sum(1) == 0).sum() + 1
            torch.testing.assert_close(gradient[rows], expected[rows], rtol=1e-11, atol=1e-14)
            assert metrics["ratio"].item() == pytest.approx(1, rel=1e-13)
            assert old is not None or metrics["logprob_diff"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("loss", LOSSES)
def test_wrong_logprobs_leave_losses_finite_and_nan_does_not_hide(loss, dtype):
    row, e = LOSSES[loss], in_float32(example())
    e |= {
        "logits": e["logits"].to(dtype),
        "mask": None,
        "loss": loss,
        "aggregation": aggregation_of(loss),
        "denominator": 8.0,
    }
    for how in HOW:
        for wrong in (-1e4, 1e4, -math.inf, math.inf):
            for place in (slice(None), [15]):
                given = {
                    "old_logprobs": e["old_logprobs"].clone(),
                    "ref_logprobs": e["ref_logprobs"].clone(),
                }
                given["old_logprobs"][place] = given["ref_logprobs"][place] = wrong
                value, gradient, metrics = computed(how, **e | given, kl_coef=0.1)
                assert value.isfinite()
                assert gradient.isfinite().all()
                assert all(metrics[name].isfinite() for name in ("ratio", "kl"))
                # in a response the others may make up for one token
                if place == slice(None) or not row.by_sequence:
                    assert metrics["ratio_clamped"] * T == pytest.approx(
                        T if place == slice(None) else 1
                    )
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


@pytest.mark.parametrize(
    ("loss", "aggregation"),
    [
        (loss, row.aggregation or AGGREGATIONS[i % len(AGGREGATIONS)])
        for i, (loss, row) in enumerate(LOSSES.items())
        if not row.over_batch
    ],
)
def test_losses_of_any_split_add_up(loss, aggregation):
    e = example() | {"kl_coef": 0.1, "entropy_coef": 0.05, "loss": loss, "aggregation": aggregation}
    known = {"token_mean": float(e["mask"].sum()), "seq_sum_constant": 50.0}
    e["denominator"] = known.get(aggregation, 7.0)
    whole, gradient, metrics = computed("kernel", **e)
    bounds = e["cu_seqlens"].tolist()
    for cuts in ([0, 1, 2, S], list(range(S + 1))):
        parts = []
        for first, last in itertools.pairwise(cuts):
            part = {
                name: x[bounds[first] : bounds[last]] if torch.is_tensor(x) and len(x) == T else x
                for name, x in e.items()
            }
            part |= {name: e[name][first:last] for name in ("advantages", "importance_weights")}
            part["cu_seqlens"] = e["cu_seqlens"][first : last + 1] - bounds[first]
            parts.append(computed("kernel", **part))
        losses, gradients, of_parts = zip(*parts, strict=True)
        exact = {"rtol": 0, "atol": 0} if LOSSES[loss].fused else {"rtol": 1e-9, "atol": 1e-12}
        torch.testing.assert_close(torch.cat(gradients), gradient, **exact)
        assert float(sum(losses)) == pytest.approx(whole.item(), rel=1e-6)
        assert sum(x["tokens"] for x in of_parts) == metrics["tokens"] == e["mask"].sum()


@pytest.mark.parametrize("name", ["advantages", "importance_weights"])
def test_equal_numbers_of_tokens_and_responses_need_the_keyword(name):
    """One response is empty, so two numbers could belong to the two responses or to the two
    tokens.
    """
    arguments = {
        "logits": torch.zeros(2, 4),
        "targets": torch.tensor([0, 1]),
        "cu_seqlens": torch.tensor([0, 0, 2]),
    }
    arguments |= {
        "advantages": torch.ones(1).expand(2),
        "advantages_per_token": True,
        name: torch.tensor([3.0, 5.0]),
    }
    keyword = f"{name}_per_token"
    for per_token, factor in ((False, 5), (True, 4)):
        loss, _ = policy_gradient_loss(**arguments | {keyword: per_token}, loss="reinforce")
        assert loss.item() == pytest.approx(factor * math.log(4))
    with pytest.raises(
        ValueError, match=f"since T = S = 2: give {keyword}=True or {keyword}=False"
    ):
        policy_gradient_loss(**arguments | {keyword: None}, loss="reinforce")
    one_each = arguments | {"cu_seqlens": torch.tensor([0, 1, 2]), "advantages_per_token": None}
    assert (
        policy_gradient_loss(**one_each)[0].item()
        == policy_gradient_loss(**one_each | {keyword: True})[0].item()
    )


META = {
    name: torch.as_tensor(x).to("meta")
    for name, x in (example() | {"denominator": 3.0}).items()
    if name != "logits"
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": torch.arange(T)}, r"targets must be in \[0, 7\), got 7 at token 7"),
        (
            {"targets": torch.zeros(7, dtype=torch.int64)},
            r"targets must be integers \[T\] = \[22\]",
        ),
        ({"cu_seqlens": torch.tensor([0, 3, 4, 4, 9])}, "cu_seqlens must rise from 0 to T = 22"),
        ({"cu_seqlens": torch.tensor([0, 5, 4, 5, T])}, "cu_seqlens must rise from 0 to T = 22"),
        # Differences of unsigned integers are never negative, and those of large ones overflow to
        # positive numbers.
        ({"cu_seqlens": torch.tensor([0, 200, 3, T], dtype=torch.uint8)}, "cu_seqlens must rise"),
        ({"cu_seqlens": torch.tensor([0, 5, 3, T], dtype=torch.uint64)}, "cu_seqlens must rise"),
        ({"cu_seqlens": torch.tensor([0, 2**63 - 1, -2, T])}, "cu_seqlens must rise"),
        ({"cu_seqlens": torch.tensor([False, True])}, r"cu_seqlens must be integers \[S\+1\]"),
        (
            {"advantages": torch.zeros(5)},
            r"advantages must be \[S\] = \[6\] or \[T\] = \[22\], got the shape \(5,\)",
        ),
        (
            {"advantages_per_token": True},
            r"advantages must be \[T\] = \[22\], got the shape \(6,\)",
        ),
        (
            {"importance_weights_per_token": True},
            r"importance_weights must be \[T\] = \[22\], got the shape \(6,\)",
        ),
        (
            {"importance_weights": -torch.ones(S)},
            "importance_weights must be at least 0, got -1.0 at 0",
        ),
        ({"advantages_per_token": 1}, "advantages_per_token must be True or False, got 1"),
        ({"mask": torch.ones(T)}, "mask must be bool"),
        (
            {"old_logprobs": torch.ones(3)},
            r"old_logprobs must be \[T\] = \[22\], got the shape \(3,\)",
        ),
        ({"temperature": 0.0}, "temperature must be a finite number above 0, got 0.0"),
        *(
            ({"temperature": torch.full((T,), x)}, "temperature must be .* above 0, got .* at 0")
            for x in (0.0, -1.0, math.nan)
        ),
        (
            {"temperature": torch.full((T,), math.inf)},
            "temperature must be a finite number above 0, got inf at 0",
        ),
        ({"dual_clip": 1}, "dual_clip must be a number above 1, got 1"),
        ({"kl": "k4"}, "kl must be one of"),
        ({"aggregation": "mean"}, "aggregation must be one of"),
        ({"kl_coef": 0.1, "ref_logprobs": None}, "ref_logprobs must be given"),
        ({"aggregation": "seq_sum_constant"}, "needs a denominator"),
        (
            {"logits": torch.ones(T, V, dtype=torch.complex64)},
            "logits must be a dense tensor of real numbers",
        ),
        (
            {"loss": "sapo", "loss_options": {"tau_pos": 1}},
            "tau_negative, got 'tau_pos'; did you mean 'tau_positive'",
        ),
        (
            {"loss": "dispo", "loss_options": {"low_negative": 102}},
            "low_negative of dispo must be at most .*, 101, got 102",
        ),
        (
            {"loss": "clip_cov", "loss_options": {"low": 5, "high": 1}},
            "low of clip_cov must be below its high, 1, got 5",
        ),
        (
            {"loss": "simko", "loss_options": {"k": 2.5}},
            "k of loss simko must be an integer from 1 to 8, got 2.5",
        ),
        ({"loss": "luspo"}, "aggregation must be seq_mean_token_sum for luspo, .* got token_mean"),
        # An operator takes a tensor on "meta" for tracing, and would return memory that nobody has
        # written.
        *(
            ({name: x, **({"mask": None} if name == "temperature" else {})}, f"{name} must be")
            for name, x in META.items()
        ),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        policy_gradient_loss(**example() | {"mask": None} | options)


def test_luspo_is_gspo_with_a_sum_over_each_response():
    results = []
    for loss in ("luspo", "gspo"):
        e = example() | {"aggregation": "seq_mean_token_sum"}
        value, metrics = policy_gradient_loss(**e, loss=loss)
        results.append((value, metrics["ratio"]))
    assert results[0] == results[1]
    assert ALIASES["luspo"].name == "gspo"
    assert explain_name("luspo") == (
        "luspo is gspo, by default with aggregation seq_mean_token_sum"
    )


@pytest.mark.parametrize("name", LOSSES)
def test_unknown_and_impossible_options_are_refused(name):
    e, row = example(), LOSSES[name]
    assert row.formula
    assert row.weight
    assert row.source
    with pytest.raises(
        ValueError, match=f"loss {name} takes (no options|the options .*), got 'slope'"
    ):
        policy_gradient_loss(**e, loss=name, loss_options={"slope": 1.0})
    with pytest.raises(
        TypeError, match="loss_options must be a mapping of names to numbers, got list"
    ):
        policy_gradient_loss(**e, loss=name, loss_options=[1.0])
    for key, option in row.options.items():
        for value in (
            math.nan,
            "1",
            *([-0.1, 0] if "above 0" in option.limits[0].wanted else [-math.inf]),
        ):
            with pytest.raises(
                ValueError, match=f"{key} of loss {name} must be {option.limits[0].wanted}, got"
            ):
                policy_gradient_loss(**e, loss=name, loss_options={key: value})


def test_a_compiled_module_with_other_sums_is_refused(monkeypatch):
    check_fields("LossSums", LossSums._fields)
    monkeypatch.setitem(_C.FIELDS, "LossSums", LossSums._fields[::-1])
    with pytest.raises(
        ImportError,
        match=r"maxrl_fast._C does not fit .* its LossSums has the fields \('logprob_diff',",
    ):
        check_fields("LossSums", LossSums._fields)
