"""The functions for slime, on what its trainer hands over (v0.3.1, commit 624b824a), which is not
installed.

`Sample` has the fields of slime/utils/types.py; `batch` those of get_batch in
slime/backends/megatron_utils/data.py; the loss is compared with the formulas of
policy_loss_function in slime/backends/megatron_utils/loss.py, in plain PyTorch.
"""

import importlib
from argparse import Namespace
from dataclasses import dataclass

import pytest
import torch

from maxrl_fast.integrations import slime, slime_loss
from tests.integrations import uneven


@dataclass
class Sample:
    group_index: int | None
    reward: float | dict | None
    loss_mask: list | None = None
    response_length: int = 0
    rollout_id: int | None = None

    def get_reward_value(self, args):
        return self.reward if not args.reward_key else self.reward[args.reward_key]

    @property
    def effective_response_length(self):
        return sum(self.loss_mask) if self.loss_mask is not None else self.response_length


def function(path):
    """Return what slime's load_function returns."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def samples_of(batch):
    ids = [batch.prompts.index(key) for key in batch.prompts]
    rows = zip(ids, batch.rewards.tolist(), batch.mask.tolist(), strict=True)
    return [
        Sample(group, reward, mask, len(mask), rollout_id=i)
        for i, (group, reward, mask) in enumerate(rows)
    ]


@pytest.mark.parametrize(
    ("name", "options"),
    [("maxpo", {"k": 4}), ("maxrl", {}), ("opo", {}), ("pacs_first_update", {})],
)
def test_the_advantages_of_shuffled_uneven_groups(name, options):
    batch = uneven.rollouts()
    args = Namespace(reward_key=None, maxrl_fast=options)
    raw, advantages = function(f"maxrl_fast.integrations.slime.{name}")(args, samples_of(batch))
    assert raw == batch.rewards.tolist()
    expected = batch.expected(name, **options)
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(torch.tensor(advantages), expected)


def test_rewards_by_key_and_samples_without_a_reward():
    samples = [
        Sample(0, {"acc": 1.0}),
        Sample(0, {"acc": None}),
        Sample(1, {"acc": 0.0}),
        Sample(0, {"acc": 0.0}),
    ]
    with pytest.warns(RuntimeWarning, match="1 of 4 rewards are NaN"):
        raw, advantages = slime.rloo(Namespace(reward_key="acc"), samples)
    # slime sums them for its log
    assert raw == pytest.approx([1.0, float("nan"), 0.0, 0.0], nan_ok=True)
    assert advantages == [1.0, 0.0, 0.0, -1.0]


def test_the_parts_of_a_rollout_count_once_with_the_reward_of_the_last():
    samples = [
        Sample(0, 0.0, rollout_id=7),
        Sample(0, 1.0, rollout_id=7),
        Sample(0, 0.0, rollout_id=8),
        Sample(1, 1.0, rollout_id=9),
    ]
    samples += [Sample(0, 0.0), Sample(0, 0.0)]  # without an id each is a rollout
    _, advantages = slime.rloo(Namespace(reward_key=None), samples)
    assert advantages == pytest.approx([1, 1, -1 / 3, 0, -1 / 3, -1 / 3])


def test_samples_without_a_prompt_are_refused():
    with pytest.raises(
        ValueError,
        match="rloo needs the prompt of each sample as its group_index, got a sample with None",
    ):
        slime.rloo(Namespace(reward_key=None), [Sample(0, 1.0), Sample(None, 0.0)])


def test_other_names_are_refused_with_those_that_exist():
    with pytest.raises(AttributeError, match=r"has the estimators maxpo, .*, not self"):
        function("maxrl_fast.integrations.slime.self")
    with pytest.raises(ValueError, match="maxpo needs k"):
        slime.maxpo(Namespace(reward_key=None), [Sample(0, 1.0), Sample(0, 0.0)])


ARGS = Namespace(
    tensor_model_parallel_size=1, context_parallel_size=1, entropy_coef=0.0, rollout_top_p=1.0,
    use_kl_loss=False,
    kl_loss_coef=0.0, use_tis=False, use_opsm=False, get_mismatch_metrics=False,
    custom_pg_loss_reducer_function_path=None,
    use_rollout_logprobs=False, rollout_temperature=0.8, eps_clip=0.15, eps_clip_high=0.3,
    eps_clip_c=None,
    calculate_per_token_loss=False, advantage_estimator="grpo",
)  # fmt: skip
PROMPTS, RESPONSES, PAD, V = [3, 1, 4], [4, 5, 1], 6, 11


def micro_batch():
    """Return (batch, logits [1, T, V]) of three samples, of which the first two are parts of a
    rollout, and padding.
    """
    torch.manual_seed(0)
    totals = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    logits = (2 * torch.randn(1, sum(totals) + PAD, V)).requires_grad_()
    masks = [torch.tensor([1, 0, 1, 1]), torch.tensor([1, 1, 1, 0, 1]), torch.tensor([1])]
    own = [mask.sum().float() for mask in masks]
    batch = {
        "unconcat_tokens": [torch.randint(V, (n,)) for n in totals],
        "total_lengths": totals,
        "response_lengths": RESPONSES,
        "loss_masks": masks,
        "rollout_mask_sums": [own[0] + own[1], own[0] + own[1], own[2]],
        "advantages": [
            torch.full((n,), a) for n, a in zip(RESPONSES, (1.2, -0.7, 0.4), strict=True)
        ],
        "log_probs": [],
    }
    batch["log_probs"] = [
        (x + 0.4 * torch.randn(len(x))).detach() for x in logprobs_of(batch, logits, 0.8)
    ]
    return batch, logits


def logprobs_of(batch, logits, temperature):
    """Return the log-probs of each response, from the row before each token."""
    found, end = [], 0
    for tokens, total, n in zip(
        batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"], strict=True
    ):
        end += total
        rows = (logits[0, end - n - 1 : end - 1] / temperature).log_softmax(-1)
        found.append(rows.gather(1, tokens[total - n :, None])[:, 0])
    return found


def loss_of_slime(args, batch, logits):
    """Return the sum over samples of the masked sum of token losses over the tokens of the
    rollout.
    """
    logprobs, total = logprobs_of(batch, logits, args.rollout_temperature), 0.0
    olds = (
        batch["rollout_log_probs"]
        if args.use_rollout_logprobs
        else batch["log_probs"] or [x.detach() for x in logprobs]
    )
    per_sample = zip(
        logprobs,
        olds,
        batch["advantages"],
        batch["loss_masks"],
        batch["rollout_mask_sums"],
        strict=True,
    )
    for logp, old, advantage, mask, count in per_sample:
        log_ratio = logp - old
        if args.advantage_estimator == "gspo":
            log_ratio = ((log_ratio * mask).sum() / mask.sum()).expand_as(logp)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip_high)
        values = torch.maximum(-ratio * advantage, -clipped * advantage)
        if args.eps_clip_c is not None:
            values = torch.where(
                advantage < 0, torch.minimum(values, -args.eps_clip_c * advantage), values
            )
        if args.advantage_estimator == "cispo":
            values = -clipped.detach() * advantage * logp
        total = total + (values * mask).sum() / (1 if args.calculate_per_token_loss else count)
    return total


@pytest.mark.parametrize(
    "changed",
    [
        {}, {"advantage_estimator": "cispo"}, {"advantage_estimator": "gspo"},
        {"calculate_per_token_loss": True},
        {"eps_clip_c": 1.2}, {"use_rollout_logprobs": True}, {"log_probs": []},
    ],
)  # fmt: skip
def test_loss_and_gradient_are_those_of_slime(changed):
    batch, logits = micro_batch()
    batch["rollout_log_probs"] = [x - 0.2 for x in batch["log_probs"]]
    batch["log_probs"] = changed.get("log_probs", batch["log_probs"])
    args = Namespace(**(vars(ARGS) | changed))
    loss, metrics = function("maxrl_fast.integrations.slime_loss.policy_loss")(
        args, batch, logits, None
    )
    (gradient,) = torch.autograd.grad(loss, logits)
    expected = loss_of_slime(args, batch, logits)
    (expected_gradient,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-6)
    assert expected_gradient.abs().max() > 0.05
    assert metrics["loss"] == loss
    assert not any(value.requires_grad for value in metrics.values())


def test_a_micro_batch_without_trained_tokens_has_a_gradient_of_0():
    batch, logits = micro_batch()
    batch["loss_masks"] = [torch.zeros_like(mask) for mask in batch["loss_masks"]]
    batch["rollout_mask_sums"] = [torch.tensor(0.0)] * 3
    loss, _ = slime_loss.policy_loss(ARGS, batch, logits, None)
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, logits)[0].any()


@pytest.mark.parametrize(
    "changed", [{"tensor_model_parallel_size": 2}, {"entropy_coef": 0.01}, {"use_tis": True}]
)
def test_terms_that_the_loss_does_not_have_are_refused(changed):
    ((name, value),) = changed.items()
    with pytest.raises(ValueError, match=f"maxrl_fast's loss has no {name}={value}"):
        slime_loss.policy_loss(Namespace(**(vars(ARGS) | changed)), *micro_batch(), None)
    with pytest.raises(ValueError, match=r"kl_loss_coef=0\.1"):
        slime_loss.policy_loss(
            Namespace(**(vars(ARGS) | {"use_kl_loss": True, "kl_loss_coef": 0.1})),
            *micro_batch(),
            None,
        )
