"""What the operators refuse, in one sentence: each argument at the function that checks it.

The fuzz tests replace every argument by wrong objects, and find values that pass.
"""

import math

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.algorithms.estimators import ESTIMATORS
from maxrl_fast.ops import LOSSES
from tests.ops import loss_definitions
from tests.ops.loss_definitions import example
from tests.tables import table

INF, NAN = math.inf, math.nan
GENERATOR = torch.Generator().manual_seed(0)
HIDDEN, WEIGHT = torch.randn(5, 16, generator=GENERATOR), torch.randn(7, 16, generator=GENERATOR)
TEACHER = torch.randn(5, 11, generator=GENERATOR), torch.randn(7, 11, generator=GENERATOR)


def refuses(function, given, change, message, error=ValueError):
    """Call it with some arguments changed, which are Python in a string."""
    known = vars(torch) | vars(loss_definitions) | globals()
    changed = eval(f"dict({change})", known) if isinstance(change, str) else change
    with pytest.raises(error, match=message):
        function(**given | changed)


@pytest.mark.parametrize(
    ("change", "message"),
    table(r"""
    targets=arange(T) | targets must be in \[0, 7\), got 7 at token 7
    targets=zeros(7).long() | targets must be integers \[T\] = \[22\]
    cu_seqlens=tensor([0, 5, 4, 5, T]) | cu_seqlens must rise from 0 to T = 22
    cu_seqlens=tensor([0, 200, 3, T], dtype=uint8) | cu_seqlens must rise
    cu_seqlens=tensor([0, 2**63 - 1, -2, T]) | cu_seqlens must rise
    cu_seqlens=tensor([False, True]) | cu_seqlens must be integers \[S\+1\]
    advantages=zeros(5) | must be \[S\] = \[6\] or \[T\] = \[22\], got the shape \(5,\)
    targets=ones(S).long(), logits=ones(S, V), mask=None, old_logprobs=None, ref_logprobs=None,
      cu_seqlens=tensor([0, 0, 0, 0, 0, 0, S]), temperature=1.0 | since T = S = 6: give
      advantages_per_token=True or advantages_per_token=False
    advantages_per_token=1 | advantages_per_token must be True or False, got 1
    importance_weights_per_token=True | importance_weights must be \[T\] = \[22\], got the
      shape \(6,\)
    importance_weights=-ones(S) | importance_weights must be at least 0, got -1.0 at 0
    mask=ones(T) | mask must be bool
    old_logprobs=ones(3) | old_logprobs must be \[T\] = \[22\], got the shape \(3,\)
    temperature=0.0 | temperature must be a finite number above 0, got 0.0
    temperature=full((T,), INF) | temperature must be a finite number above 0, got inf at 0
    dual_clip=1 | dual_clip must be a number above 1, got 1
    kl='k4' | kl must be one of
    aggregation='mean' | aggregation must be one of
    aggregation='seq_sum_constant' | needs a denominator
    kl_coef=0.1, ref_logprobs=None | ref_logprobs must be given
    logits=ones(T, V, dtype=complex64) | logits must be a dense tensor of real numbers
    loss='sapo', loss_options={'tau_pos': 1} | tau_negative, got 'tau_pos'; did you mean
      'tau_positive'
    loss='dispo', loss_options={'low_negative': 102} | low_negative of dispo must be at most
      .*, 101, got 102
    loss='clip_cov', loss_options={'low': 5, 'high': 1} | low of clip_cov must be below its
      high, 1, got 5
    loss='simko', loss_options={'k': 2.5} | k of loss simko must be an integer from 1 to 8, got 2.5
    loss='luspo' | aggregation must be seq_mean_token_sum for luspo, .* got token_mean
    """),
)
def test_policy_gradient_loss(change, message):
    """Differences of unsigned integers are never negative, and those of large ones overflow."""
    refuses(ops.policy_gradient_loss, example() | {"mask": None}, change, message)


@pytest.mark.parametrize("name", [name for name in example() if name != "logits"])
def test_an_argument_without_memory(name):
    """An operator takes a tensor on "meta" for tracing, and would return memory that nobody has
    written.
    """
    e = example() | {"mask": None}
    on_meta = torch.as_tensor(example()[name]).to("meta")
    refuses(ops.policy_gradient_loss, e, {name: on_meta}, f"{name} must be")


@pytest.mark.parametrize("name", LOSSES)
def test_options_of_a_loss(name):
    e, row = example() | {"loss": name}, LOSSES[name]
    assert all((row.formula, row.weight, row.source))
    message = f"loss {name} takes (no options|the options .*), got 'slope'"
    refuses(ops.policy_gradient_loss, e, {"loss_options": {"slope": 1.0}}, message)
    message = "loss_options must be a mapping of names to numbers, got list"
    refuses(ops.policy_gradient_loss, e, {"loss_options": [1.0]}, message, TypeError)
    for key, option in row.options.items():
        wanted = option.limits[0].wanted
        for value in (NAN, "1", *([-0.1, 0] if "above 0" in wanted else [-INF])):
            message = f"{key} of loss {name} must be {wanted}, got"
            refuses(ops.policy_gradient_loss, e, {"loss_options": {key: value}}, message)


@pytest.mark.parametrize(
    ("change", "message"),
    table(r"""
    weight=ones(7, 17) | hidden \[T, H\] and weight \[V, H\] must have one H and device
    weight=ones(7, 16).half() | weight must be torch.float32 as hidden is, or float32, got
      torch.float16
    chunk_tokens=0 | chunk_tokens must be at least 1, got 0
    targets=full((5,), 7) | targets must be in \[0, 7\), got 7 at token 0
    softcap='30' | softcap must be finite and at least 0, got
    """),
)
def test_losses_and_logprobs_from_hidden_states(change, message):
    given = {"hidden": HIDDEN, "weight": WEIGHT, "targets": torch.arange(5)}
    refuses(ops.linear_token_logprobs, given, change, message)
    given |= {"advantages": torch.ones(1), "cu_seqlens": torch.tensor([0, 5])}
    refuses(ops.linear_policy_gradient_loss, given, change, message)
    unknown = r"loss does not take cliphigh, in_place"
    change = {"cliphigh": 0.3, "in_place": True}
    refuses(ops.linear_policy_gradient_loss, given, change, unknown, TypeError)


@pytest.mark.parametrize(
    ("change", "message"),
    table(r"""
    divergence='kl' | divergence must be one of reverse, forward, jsd, got 'kl'
    beta=1 - 9e-8 | beta must be from 1e-7 to 1 - 1e-7, got 0.9
    temperature=0.0 | temperature must be a finite number above 0, got 0.0
    teacher_softcap=INF | teacher_softcap must be finite and at least 0, got inf
    teacher_hidden=ones(5, 16) | ^teacher_hidden \[T, H\] and teacher_weight \[V, H\] must have
      one H and device
    teacher_weight=ones(8, 11) | must have T = 5 and V = 7 rows on cpu, got 5 and 8 on cpu
    teacher_weight=ones(7, 11).half() | teacher_weight must be torch.float32 as te
    coefficients=ones(4) | coefficients must be \[T\] = \[5\], got the shape
    coefficients=full((5,), NAN) | coefficients must be finite, got nan at
    denominator=0 | denominator must be a finite number above 0, got 0
    """),
)
def test_linear_divergence(change, message):
    names = ("hidden", "weight", "teacher_hidden", "teacher_weight")
    given = dict(zip(names, (HIDDEN, WEIGHT, *TEACHER), strict=True))
    refuses(ops.linear_divergence, given, change, message)


@pytest.mark.parametrize(
    ("change", "message"),
    table(r"""
    score='best' | score must be one of rloo, grpo, dr_grpo, naive, got 'best'
    weight='half' | weight must be one of balanced, none, got 'half'
    groups=5 | groups must be a number of rollouts that divides S = 24, or offsets, got 5
    groups=tensor([0, 9]) | cu_seqlens must rise from 0 to T = 24
    labels=zeros(23) | labels must be \[S\] = \[24\]
    labels=full((24,), 0.5) | labels must be 0 or 1, got 0.5 for rollout 0
    reward_proxy=zeros(24).half() | reward_proxy must be float32 or float64 \[S\]
    """),
)
def test_pacs_loss(change, message):
    given = {"reward_proxy": torch.arange(24.0), "labels": torch.arange(24) % 2, "groups": 6}
    refuses(ops.pacs_loss, given, change, message)


def test_log_ratio_reward():
    x, bounds = torch.zeros(10), torch.tensor([0, 200, 3, 10], dtype=torch.uint8)
    given = {"logprobs": x, "ref_logprobs": x, "cu_seqlens": torch.tensor([0, 3, 10])}
    message = r"ref_logprobs must be float32 or float64 \[T\] = \[10\]"
    refuses(ops.log_ratio_reward, given, {"ref_logprobs": x[:9]}, message)
    message = "cu_seqlens must rise from 0 to T = 10"
    refuses(ops.log_ratio_reward, given, {"cu_seqlens": bounds}, message)


# --- group advantages: the arguments are of group_advantage, and rewards are R by default

R, RR = torch.tensor([0.0, 1, 0, 1]), torch.tensor([[0.0, 1, 0, 1], [0, 1, 0, 1]])
N = torch.tensor([0, 0, torch.nan, 0])
PAIRS, ALL = torch.tensor([0, 2, 4]), torch.tensor([0, 4])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    table(r"""
    maxpo | k=4 | maxpo needs 1 <= k <= N-1 = 3 for N = 4 rollouts, got 4
    maxpo | k=2.0 | maxpo needs an integer as k, got 2.0
    maxpo | k=2, offsets=PAIRS | maxpo needs 1 <= k <= N-1 = 1 for N = 2 rollouts, got 2
    maxpo |  | maxpo needs k, 1 <= k <= N-1
    expected_improvement | k=2, rewards=R[:1] | needs 2 <= k <= N = 1 for N = 1 rollouts, got 2
    bon_mean | k=3, offsets=PAIRS | bon_mean needs 1 <= k <= N = 2 for N = 2 rollouts
    grpo | k=2 | grpo does not use k, got k=2
    rloo | eps=1.0 | rloo takes no options, got .eps.
    grpo | epsilon=1.0 | takes the options eps, ddof, .* did you mean .eps.
    grpo | eps=10**400 | eps of grpo must be a finite number of at least 0
    grpo | eps=None | grpo needs eps, a finite number
    hero | reward_parts=RR, score_range=0.5 | above 0 and below .5, got 0.5
    noisy_verifier_backward | false_positive_rate=0.5, false_negative_rate=0.5 | add up to less
      than 1
    opo |  | opo needs lengths
    opo | lengths=R | lengths must be integers, got torch.float32
    opo | lengths=tensor([1, 2, -4, 3]) | lengths must be at least 0, got -4
    best |  | estimator must be one of maxpo, .*, got 'best'
    rloo | rewards=tensor(1.0) | rewards must be \[..., N\], got the shape \(\)
    rloo | rewards=R[None], offsets=ALL | rewards must be flat \[S\]
    rloo | rewards=R.cfloat() | of real numbers, got torch.complex64
    rloo | valid=R | valid must be bool, got torch.float32
    rloo | valid=ones(4, device='meta') > 0 | valid must be on cpu as
    rloo | offsets=tensor([0, 3]) | must rise from 0 to 4, got from 0 to 3
    qae | offsets=tensor([0, 3, 2, 4]) | got 3 followed by 2 at group 1
    rloo | offsets=tensor([0.0, 4.0]) | offsets must be int64 \[G\+1\]
    rloo | group_ids=R | group_ids must be integers, got torch.float32
    rloo | group_ids=zeros(3).long() | group_ids must have the shape of rewards
    rloo | group_ids=R.long(), offsets=ALL | give offsets or group_ids, not both
    passk_training | k=2, rewards=R / 2 | must be 0 or 1 .*, got 0.5 in group 0
    self | greedy_correct=R[:3] > 0 | must have one value per group, .* shape \(3,\)
    remax | greedy_rewards=N[2:3] | must be finite, got nan in group 0
    gdpo | reward_parts=R | reward_parts must have the shape \(R, 4\), got \(4,\)
    gdpo | reward_parts=RR, reward_weights=[1, NAN] | must be a finite number
    gdpo | reward_parts=RR - INF | got -inf in group 0, rollout 0
    hero | reward_parts=RR[:1] | takes a verifier of weight 1 and one or more scores
    hero | reward_parts=RR + 0.5 | the verifier of hero must give 0 or 1, got 0.5
    unlikeliness | logprobs=R - INF | must be finite, got -inf in group 0
    maxpo_off_policy | k=2, log_ratios=N | got nan in group 0, rollout 2
    qae | rewards=R.double() * 1e160 | at most 1e\+150 in magnitude .*, got 1e\+160
    grpo | rewards=R.double() * 1e160 | at most 1e\+150 in magnitude .*, got 1e\+160
    w_reinforce | correct_weight=1e300 | advantages .* must be finite in torch.float32
    rloo | rewards=(2 * R - 1).half() * 65504 | finite in torch.float16, got -inf at
    """),
)
def test_bad_input_is_refused_by_name(name, change, message):
    refuses(ops.group_advantage, {"rewards": R, "estimator": name}, change, message)


def test_rewards_that_are_not_finite_are_named_by_group_and_rollout():
    rewards, flat = torch.zeros(5, 7, 40), torch.zeros(10)
    rewards[3, 2, 5], rewards[4, 0, 1] = -torch.inf, torch.nan
    flat[7] = torch.nan
    ids = torch.tensor([2, 1, 1, 1, 2, 1, 2, 1, 2, 2])
    for name in ("rloo", "qae"):
        for given, message in (
            ({"rewards": rewards}, "finite, got -inf in group 23, rollout 5"),
            (
                {"rewards": flat, "offsets": torch.tensor([0, 3, 3, 6, 10])},
                r"got nan in group 3, rollout 1 \(index 7\)",
            ),
            ({"rewards": flat, "group_ids": ids}, r"got nan in group 0, rollout 4 \(index 7\)"),
        ):
            refuses(ops.group_advantage, given | {"estimator": name}, {}, message)


def test_the_operator_refuses_what_its_callers_convert():
    op, rewards = torch.ops.maxrl_fast.group_advantage.default, torch.rand(3, 5)
    for given, message in (
        ((rewards.T, None), r"rewards must be a contiguous torch.float32 tensor"),
        ((rewards.half(), None), r"rewards must be float32 or float64 \[G, N\], got torch.float16"),
        ((rewards, torch.ones(3).bool()), r"valid must be a contiguous torch.bool tensor of shape"),
    ):
        with pytest.raises(ValueError, match=message):
            op(*given, "rloo", 0, [])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    table(r"""
    unlikeliness |  | the weight of unlikeliness depends on the log-probs
    maxpo | k=4 | maxpo needs 1 <= k <= N-1 = 3
    rloo | n=10_001 | n must be an integer from 1 to 10000, got 10001
    rloo | pass_rate=tensor([0.5, NAN]) | pass_rate must be between 0 and 1
    """),
)
def test_effective_weight(name, change, message):
    given = {"estimator": name, "n": 4, "pass_rate": torch.tensor(0.5)}
    refuses(ops.effective_weight, given, change, message)


@pytest.mark.parametrize(
    ("function", "message"),
    table(r"""
    lambda rewards: rewards.tolist() | must return a tensor, got list
    lambda rewards: rewards.mean(-1) | must return a floating tensor of shape \(4, 4\) on cpu,
      got torch.float32 of
    lambda rewards: rewards > 0 | must return a floating tensor
    lambda rewards: rewards / rewards.mean(-1, keepdim=True) | must be finite in torch.float32,
      got nan at index 8, on a
    lambda rewards, temperature: rewards | may ask for k, valid, lengths, .* got the parameter
      temperature
    lambda: 0 | must take rewards
    lambda rewards: rewards.median("x") | fails on a small example:
    lambda rewards, reward_parts: rewards | asks for reward_parts, so it must ask for
      reward_weights too
    7 | must be one of maxpo, .* or a function of rewards \[G, N\], got 7
    """),
)
def test_register_estimator(function, message):
    with pytest.raises(ValueError, match=message):
        ops.register_estimator("bad", eval(function))
    assert "bad" not in ESTIMATORS


def test_names_of_estimators():
    for name in ("two words", "", 3):
        with pytest.raises(ValueError, match="must be a Python identifier"):
            ops.register_estimator(name, lambda rewards: rewards)
    message = "there is an estimator grpo already; replace=True takes its place"
    with pytest.raises(ValueError, match=message):
        ops.register_estimator("grpo", lambda rewards: rewards)
