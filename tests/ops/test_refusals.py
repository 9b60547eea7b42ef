import math

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.algorithms.estimators import find_estimator
from maxrl_fast.algorithms.options import FINITE
from maxrl_fast.ops import LOSSES
from maxrl_fast.ops.group_advantage import try_out
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
    logits=zeros(T + 1, V), targets=zeros(T + 8).long()[:T] | targets must be
      integers \[T\] = \[23\]
    cu_seqlens=tensor([0, 5, 4, 5, 6, 7, T]) | cu_seqlens must rise from 0 to T = 22
    cu_seqlens=tensor([0, 2**63 - 1, -2, 4, 5, 6, T]) | cu_seqlens must rise
    advantages=zeros(5) | must be \[S\] = \[6\] or \[T\] = \[22\], got the shape \(5,\)
    targets=ones(S).long(), logits=ones(S, V), mask=None, old_logprobs=None, ref_logprobs=None,
      cu_seqlens=tensor([0, 0, 0, 0, 0, 0, S]), temperature=1.0 | since T = S = 6: give
      advantages_per_token=True or advantages_per_token=False
    old_logprobs=zeros(T).to_sparse() | old_logprobs must be a dense tensor of real numbers
    importance_weights=-ones(S) | importance_weights must be at least 0, got -1.0 at 0
    temperature=0.0 | temperature must be a finite number above 0, got 0.0
    temperature=full((T,), INF) | temperature must be a finite number above 0, got inf at 0
    aggregation='seq_sum_constant' | needs a denominator
    kl_coef=0.1, ref_logprobs=None | ref_logprobs must be given
    """),
)
def test_policy_gradient_loss(change, message):
    """Differences of large integers overflow."""
    refuses(ops.policy_gradient_loss, example() | {"mask": None}, change, message)


@pytest.mark.parametrize("name", LOSSES)
def test_options_of_a_loss(name):
    e, row = example() | {"loss": name}, LOSSES[name]
    assert all((row.formula, row.weight, row.source))
    message = f"loss {name} takes (no options|the options .*), got 'slope'"
    refuses(ops.policy_gradient_loss, e, {"loss_options": {"slope": 1.0}}, message)
    message = "loss_options must be a mapping of names to numbers, got list"
    refuses(ops.policy_gradient_loss, e, {"loss_options": [1.0]}, message, TypeError)
    for key, option in row.options.items():
        wanted = (option.limit or FINITE).wanted
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
    """),
)
def test_losses_and_logprobs_from_hidden_states(change, message):
    given = {"hidden": HIDDEN, "weight": WEIGHT, "targets": torch.arange(5)}
    refuses(ops.linear_token_logprobs, given, change, message)
    given |= {"advantages": torch.ones(1), "cu_seqlens": torch.tensor([0, 5])}
    refuses(ops.linear_policy_gradient_loss, given, change, message)
    change, message = "cliphigh=0.3", "unexpected keyword argument .cliphigh"
    refuses(ops.linear_policy_gradient_loss, given, change, message, TypeError)


@pytest.mark.parametrize(
    ("change", "message"),
    table(r"""
    beta=1 - 9e-8 | beta must be from 1e-7 to 1 - 1e-7, got 0.9
    teacher_softcap=INF | teacher_softcap must be finite and at least 0, got inf
    teacher_hidden=ones(5, 16) | ^teacher_hidden \[T, H\] and teacher_weight \[V, H\] must have
      one H and device
    teacher_weight=ones(8, 11) | must have T = 5 and V = 7 rows on cpu, got 5 and 8 on cpu
    coefficients=full((5,), NAN) | coefficients must be finite, got nan at
    """),
)
def test_linear_divergence(change, message):
    names = ("hidden", "weight", "teacher_hidden", "teacher_weight")
    given = dict(zip(names, (HIDDEN, WEIGHT, *TEACHER), strict=True))
    refuses(ops.linear_divergence, given, change, message)


@pytest.mark.parametrize(
    ("change", "message"),
    table(r"""
    groups=5 | groups must be a number of rollouts that divides S = 24, or offsets, got 5
    labels=full((24,), 0.5) | labels must be 0 or 1, got 0.5 for rollout 0
    """),
)
def test_pacs_loss(change, message):
    given = {"reward_proxy": torch.arange(24.0), "labels": torch.arange(24) % 2, "groups": 6}
    refuses(ops.pacs_loss, given, change, message)


def test_log_ratio_reward():
    """Differences of unsigned integers are never negative."""
    x, bounds = torch.zeros(10), torch.tensor([0, 200, 3, 10], dtype=torch.uint8)
    given = {"logprobs": x, "ref_logprobs": x, "cu_seqlens": bounds}
    refuses(ops.log_ratio_reward, given, {}, "cu_seqlens must rise from 0 to T = 10")


# --- group advantages: the arguments are of group_advantage, and rewards are R by default

R = torch.tensor([[0.0, 1, 0, 1]])
RR = torch.stack([R, R])
N = torch.tensor([0, 0, torch.nan, 0])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    table(r"""
    maxpo | k=4 | maxpo needs 1 <= k <= N-1 = 3 for N = 4 rollouts, got 4
    maxpo | k=2.0 | maxpo needs an integer as k, got 2.0
    maxpo |  | maxpo needs k, 1 <= k <= N-1
    grpo | k=2 | grpo does not use k, got k=2
    rloo | eps=1.0 | rloo takes no options, got .eps.
    grpo | eps=10**400 | eps of grpo must be a finite number of at least 0
    noisy_verifier_backward | false_positive_rate=0.5, false_negative_rate=0.5 | add up to less
      than 1
    opo |  | opo needs lengths
    opo | lengths=tensor([[1, 2, -4, 3]]) | lengths must be at least 0, got -4
    best |  | estimator must be one of maxpo, .*, got 'best'
    rloo | rewards=tensor(1.0) | rewards must be \[..., N\], .* got the shape \(\)
    rloo | rewards=R[0] | or flat \[S\] with group_ids, got the shape \(4,\)
    rloo | rewards=R[0], group_ids=zeros(3).long() | group_ids must have the shape of rewards
    passk_training | k=2, rewards=R / 2 | must be 0 or 1 .*, got 0.5 in group 0
    gdpo | reward_parts=RR, reward_weights=[1, NAN] | must be a finite number
    hero | reward_parts=RR[:1] | takes a verifier of weight 1 and one or more scores
    hero | reward_parts=RR + 0.5 | the verifier of hero must give 0 or 1, got 0.5
    unlikeliness | logprobs=R - INF | must be finite, got -inf in group 0
    grpo | rewards=R.double() * 1e160 | at most 1e\+150 in magnitude .*, got 1e\+160
    w_reinforce | correct_weight=1e300 | advantages .* must be finite in torch.float32
    """),
)
def test_bad_input_is_refused_by_name(name, change, message):
    refuses(ops.group_advantage, {"rewards": R, "estimator": name}, change, message)


def test_rewards_that_are_not_finite_are_named_by_group_and_rollout():
    rewards, flat = torch.zeros(5, 7, 40), torch.zeros(10)
    rewards[3, 2, 5], rewards[4, 0, 1], flat[7] = -torch.inf, torch.nan, torch.nan
    ids = torch.tensor([2, 1, 1, 1, 2, 1, 2, 1, 2, 2])
    for name in ("rloo", "qae"):
        for given, message in (
            ({"rewards": rewards}, "finite, got -inf in group 23, rollout 5"),
            ({"rewards": flat, "group_ids": ids}, r"in group 0, rollout 4 \(index 7\)"),
        ):
            refuses(ops.group_advantage, given | {"estimator": name}, {}, message)


@pytest.mark.parametrize(
    ("function", "message"),
    table(r"""
    lambda rewards: rewards.tolist() | must return a tensor, got list
    lambda rewards: rewards.mean(-1) | must return a floating tensor of shape \(4, 4\) on cpu,
      got torch.float32 of
    lambda rewards: rewards / rewards.mean(-1, keepdim=True) | must be finite in torch.float32,
      got nan at index 8, on a
    lambda rewards, temperature: rewards | may ask for k, valid, lengths, .* got the parameter
      temperature
    lambda rewards, state: rewards | got the parameter state
    lambda rewards, reward_parts: rewards | asks for reward_parts, so it must ask for
      reward_weights too
    7 | must be one of maxpo, .* or a function of rewards \[G, N\], got 7
    """),
)
def test_a_function_that_is_no_estimator(function, message):
    def try_function(function):
        row = find_estimator(function)
        try_out(row, row)

    with pytest.raises(ValueError, match=message):
        try_function(eval(function))
