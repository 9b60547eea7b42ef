"""kl_cov and clip_cov: the choice of tokens and the losses, against definitions written token by token in float64."""

import math

import pytest
import torch

from maxrl_fast.ops import clip_cov_tokens, kl_cov_tokens, linear_policy_gradient_loss, lp_reg_proxies, policy_gradient_loss
from maxrl_fast.ops.losses import loss_numbers
from tests.ops.test_losses import CU_SEQLENS, MASKS, S, T, computed, example

CHOSEN = torch.arange(T) % 3 == 1


def batch(seed=0, n=200, spread=3.0):
    generator = torch.Generator().manual_seed(seed)
    logprobs, advantages = (spread * torch.randn(n, generator=generator, dtype=torch.float64) for _ in range(2))
    return logprobs, advantages, torch.rand(n, generator=generator) < 0.7


def covariances(logprobs, advantages, mask):
    """Return the covariance of each token that counts, by its index."""
    kept = [t for t in range(len(mask)) if mask[t]]
    mean_a, mean_logp = (math.fsum(float(x[t]) for t in kept) / len(kept) for x in (advantages, logprobs))
    return {t: (float(advantages[t]) - mean_a) * (float(logprobs[t]) - mean_logp) for t in kept}


@pytest.mark.parametrize("share", [2e-4, 0.013, 0.2, 0.999, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_kl_cov_tokens_have_the_greatest_covariances(share, dtype):
    for seed in range(3):
        logprobs, advantages, mask = (x if x.dtype == torch.bool else x.to(dtype) for x in batch(seed))
        for keep in (None, mask):
            counted = torch.ones(200, dtype=torch.bool) if keep is None else keep
            by_size = sorted(covariances(logprobs, advantages, counted).items(), key=lambda item: -item[1])
            expected = {t for t, _ in by_size[: max(1, int(share * len(by_size)))]}
            assert set(kl_cov_tokens(logprobs, advantages, keep, share=share).nonzero()[:, 0].tolist()) == expected


def test_of_equal_covariances_the_first_are_chosen():
    logprobs, advantages = torch.tensor([-1.0, -3, -1, -3, -1]), torch.tensor([2.0, 0, 2, 0, 2])
    assert kl_cov_tokens(logprobs, advantages, share=0.4).tolist() == [False, True, False, True, False]
    assert kl_cov_tokens(logprobs, advantages, share=0.6).tolist() == [True, True, False, True, False]
    assert kl_cov_tokens(torch.full((5,), -1.0), advantages).tolist() == [True, False, False, False, False]


def test_clip_cov_tokens_are_drawn_from_those_between_the_bounds():
    logprobs, advantages, mask = batch(n=400)
    for keep in (None, mask):
        counted = torch.ones(400, dtype=torch.bool) if keep is None else keep
        for low, high in ((1.0, 5.0), (0.1, 0.4)):
            between = {t for t, x in covariances(logprobs, advantages, counted).items() if low < x < high}
            assert len(between) > 10
            seen = set()
            for seed in range(150):
                generator = torch.Generator().manual_seed(seed)
                chosen = clip_cov_tokens(logprobs, advantages, keep, share=0.02, low=low, high=high, generator=generator)
                drawn = set(chosen.nonzero()[:, 0].tolist())
                assert len(drawn) == int(0.02 * int(counted.sum()))
                assert drawn <= between
                seen |= drawn
            assert seen == between  # each of at most 130 tokens is drawn with probability 1/25 at the least, 150 times
            options = {"share": 0.02, "low": low, "high": high}
            again = clip_cov_tokens(logprobs, advantages, keep, **options, generator=torch.Generator().manual_seed(149))
            assert torch.equal(again, chosen)
            everything = clip_cov_tokens(logprobs, advantages, keep, share=1.0, low=low, high=high)
            assert set(everything.nonzero()[:, 0].tolist()) == between


def test_bounds_are_exclusive_and_one_token_is_the_least():
    logprobs, advantages = torch.tensor([-1.0, 1.0, -1.0, 1.0]), torch.tensor([-1.0, 1.0, 1.0, -1.0])  # 1, 1, -1, -1
    assert not clip_cov_tokens(logprobs, advantages, low=1.0, high=5.0).any()
    assert not clip_cov_tokens(logprobs, advantages, low=0.5, high=1.0).any()
    assert clip_cov_tokens(logprobs, advantages, low=0.5, high=5.0).sum() == 1
    assert clip_cov_tokens(logprobs, advantages, low=0.5, high=5.0, share=1.0).tolist() == [True, True, False, False]


@pytest.mark.parametrize("choose", [kl_cov_tokens, clip_cov_tokens])
def test_masked_tokens_may_hold_anything_and_no_tokens_are_no_choice(choose):
    logprobs, advantages, mask = batch()

    def run(*tokens):
        options = {"generator": torch.Generator().manual_seed(3)} if choose is clip_cov_tokens else {}
        return choose(*tokens, share=0.05, **options)

    clean = run(logprobs, advantages, mask)
    assert clean.any()
    assert not (clean & ~mask).any()
    logprobs[~mask], advantages[~mask] = math.nan, math.inf
    assert torch.equal(run(logprobs, advantages, mask), clean)
    assert not run(logprobs, advantages, torch.zeros_like(mask)).any()
    none = torch.zeros(0)
    assert run(none, none).shape == run(none, none, none.bool()).shape == (0,)


@pytest.mark.parametrize("choose", [kl_cov_tokens, clip_cov_tokens])
def test_wrong_arguments_of_the_choice_are_refused(choose):
    x = torch.zeros(4)
    for given, message in (
        ({"advantages": torch.zeros(3)}, r"logprobs and advantages must be \[T\], got the shapes \(4,\) and \(3,\)"),
        ({"mask": torch.zeros(3, dtype=torch.bool)}, r"mask must be bool \(4,\), got torch.bool \(3,\)"),
        ({"mask": torch.zeros(4)}, r"mask must be bool \(4,\), got torch.float32 \(4,\)"),
        ({"share": 0}, "share must be a number above 0 and at most 1, got 0"),
        ({"share": 1.5}, "share must be a number above 0 and at most 1, got 1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            choose(**({"logprobs": x, "advantages": x} | given))
    with pytest.raises(TypeError, match="advantages must be a tensor, got list"):
        choose(x, [0.0] * 4)


def test_bounds_must_be_finite_and_in_order():
    with pytest.raises(ValueError, match="low must be a finite number, got nan"):
        clip_cov_tokens(torch.zeros(4), torch.zeros(4), low=math.nan)
    with pytest.raises(ValueError, match="low must be below high, got 5 and 1"):
        clip_cov_tokens(torch.zeros(4), torch.zeros(4), low=5, high=1)
    with pytest.raises(ValueError, match="low of clip_cov must be below its high, 1, got 5"):
        loss_numbers("clip_cov", {"low": 5, "high": 1})


@pytest.mark.parametrize(("share", "count"), [(0.29, 29), (0.57, 57), (0.285, 28)])
def test_a_share_of_a_hundred_tokens(share, count):
    """.29 x 100 is 28.999999999999996."""
    logprobs, advantages = -torch.rand(100, generator=torch.Generator().manual_seed(0)), torch.linspace(-2, -1, 100)
    assert int(kl_cov_tokens(logprobs, advantages, share=share).sum()) == count
    assert int((lp_reg_proxies(logprobs, logprobs, advantages, share=share) > -math.inf).sum()) == count


def _kl_cov(a, logp, old, chosen, option):
    """The unclipped objective, and on the chosen tokens |log rho|."""
    return -a * (logp - old).exp() + (option["coef"] * (logp - old).abs() if chosen else 0.0)


def _clip_cov(a, logp, old, chosen, option):
    """PPO with the ratio clipped to [.9, 1.3], and no gradient from the chosen tokens."""
    ratio = (logp - old).exp()
    return torch.zeros_like(logp) if chosen else -torch.minimum(a * ratio, a * ratio.clamp(0.9, 1.3))


DEFINITIONS = {"kl_cov": (_kl_cov, [{"coef": 1.0}, {"coef": 0.3}]), "clip_cov": (_clip_cov, [{}])}


def definition(name, logits, e, mask, chosen, option):
    logp = torch.log_softmax(logits, -1).gather(1, e["targets"][:, None])[:, 0]
    a = e["advantages"] if len(e["advantages"]) == T else e["advantages"].repeat_interleave(CU_SEQLENS.diff())
    of = DEFINITIONS[name][0]
    tokens = [of(a[t], logp[t], e["old_logprobs"][t], bool(chosen[t]), option) for t in range(T) if mask[t]]
    return sum(tokens) / len(tokens)


def check_definition(name, how, spread, monkeypatch, per_token=False):
    for seed, mask in ((3, MASKS[0]), (4, MASKS[1])):
        for given in DEFINITIONS[name][1]:
            e = example(spread, seed, per_token)
            e["advantages"][2] = 0.0
            logits = e["logits"].clone().requires_grad_()
            expected = definition(name, logits, e, mask, CHOSEN, given)
            (gradient,) = torch.autograd.grad(expected, logits)
            assert gradient.abs().max() > 1e-3
            options = {"loss": name, "loss_options": given, "mask": mask, "clip_low": 0.1, "clip_high": 0.3}
            loss, actual, _ = computed(how, monkeypatch, **e, **options, token_statistics=CHOSEN)
            assert loss.item() == pytest.approx(expected.item(), rel=1e-10, abs=1e-12)
            torch.testing.assert_close(actual, gradient, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("how", ["kernel", "reference", "linear"])
@pytest.mark.parametrize("spread", [0.02, 0.3, 1.5])
@pytest.mark.parametrize("name", DEFINITIONS)
@pytest.mark.parametrize("per_token", [False, True])
def test_losses_are_those_of_the_definition(name, spread, how, per_token, monkeypatch):
    check_definition(name, how, spread, monkeypatch, per_token)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("name", DEFINITIONS)
def test_losses_with_each_instruction_set(name, monkeypatch):
    check_definition(name, "kernel", 0.3, monkeypatch)


@pytest.mark.parametrize("how", ["kernel", "reference", "linear"])
def test_of_tokens_with_advantage_0_only_the_chosen_ones_of_kl_cov_are_read(how, monkeypatch):
    """Groups of one and groups with equal rewards have advantage 0; their chosen tokens are still drawn to a ratio of 1."""
    e = example(0.3) | {"advantages": torch.zeros(S, dtype=torch.float64)}
    e["logits"][~CHOSEN] = math.nan
    loss, gradient, metrics = computed(how, monkeypatch, **e, loss="kl_cov", token_statistics=CHOSEN)
    assert metrics["dropped_tokens"] == T - int(CHOSEN.sum())
    clean = example(0.3)["logits"].requires_grad_()
    logp = torch.log_softmax(clean, -1).gather(1, e["targets"][:, None])[:, 0]
    expected = (logp - e["old_logprobs"])[CHOSEN].abs().sum() / T
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, clean)[0], rtol=1e-10, atol=1e-14)
    for name, options in (("kl_cov", {"coef": 0}), ("clip_cov", None)):
        given = {"loss": name, "loss_options": options, "token_statistics": CHOSEN}
        loss, gradient, metrics = computed(how, monkeypatch, **e, **given)
        assert loss.item() == 0
        assert not gradient.any()
        assert metrics["dropped_tokens"] == T


@pytest.mark.parametrize("how", ["kernel", "reference"])
@pytest.mark.parametrize("name", DEFINITIONS)
def test_wrong_logprobs_leave_the_loss_finite_and_nan_does_not_hide(name, how, monkeypatch):
    for t in (7, 6):  # chosen or not
        assert bool(CHOSEN[t]) == (t == 7)
        for wrong in (-1e4, 1e4, -math.inf, math.inf):
            e = example(0.1)
            e["old_logprobs"][t] = wrong
            loss, gradient, metrics = computed(how, monkeypatch, **e, loss=name, token_statistics=CHOSEN)
            assert loss.isfinite()
            assert gradient.isfinite().all()
            assert not gradient[t].any()
            assert metrics["ratio_clamped"].item() == pytest.approx(1 / T)
        e["old_logprobs"][t] = math.nan
        assert computed(how, monkeypatch, **e, loss=name, token_statistics=CHOSEN)[0].isnan()


@pytest.mark.parametrize("how", ["kernel", "reference"])
def test_clipped_tokens_are_counted_on_the_side_of_their_advantage(how, monkeypatch):
    e = example(0.0)
    del e["old_logprobs"]
    a = e["advantages"].repeat_interleave(CU_SEQLENS.diff())
    _, _, metrics = computed(how, monkeypatch, **e, loss="clip_cov", token_statistics=CHOSEN)
    assert metrics["clipped_low"].item() == pytest.approx(int((CHOSEN & (a < 0)).sum()) / T)
    assert metrics["clipped_high"].item() == pytest.approx(int((CHOSEN & (a > 0)).sum()) / T)
    _, _, metrics = computed(how, monkeypatch, **e, loss="kl_cov", token_statistics=CHOSEN)
    assert metrics["clipped_low"].item() == metrics["clipped_high"].item() == 0


def test_statistics_are_needed_and_only_taken_by_losses_that_need_them():
    e = example()
    with pytest.raises(ValueError, match=r"loss kl_cov needs token_statistics \[T\], 1 for the tokens that ops.kl_cov_tokens"):
        policy_gradient_loss(**e, loss="kl_cov")
    with pytest.raises(ValueError, match="loss ppo takes no token_statistics"):
        policy_gradient_loss(**e, loss="ppo", token_statistics=CHOSEN)
    with pytest.raises(ValueError, match=rf"token_statistics must be \[T\] = \[{T}\], got the shape \(3,\)"):
        policy_gradient_loss(**e, loss="clip_cov", token_statistics=torch.zeros(3))
    hidden = e.pop("logits")
    with pytest.raises(ValueError, match=r"loss clip_cov needs token_statistics \[T\]"):
        linear_policy_gradient_loss(hidden, torch.eye(hidden.shape[1]).double(), **e, loss="clip_cov")
