"""PyTorch's own checks of every operator (schema, gradient, tracing), with the arguments that the
public functions give it.
"""

import pytest
import torch

from maxrl_fast import ops
from tests.ops.loss_definitions import CU_SEQLENS, V, example, in_float32
from tests.ops.operators import Operators


def of_logits(**options):
    """Compute losses, log-probs and their gradients from logits and from hidden states, in
    float32.
    """
    e = in_float32(example()) | {"aggregation": "seq_mean_token_mean", "kl_coef": 0.1} | options
    logits, targets, tau = e.pop("logits").requires_grad_(), e["targets"], e["temperature"]
    weight = torch.eye(V).requires_grad_()
    for loss in ("ppo", "gspo", "sapo"):
        for in_place in {False, loss != "sapo"}:
            ops.policy_gradient_loss(logits * 1, **e, loss=loss, in_place=in_place)[0].backward()
        for hidden, matrix in (
            (logits, weight),
            (logits.detach(), weight),
            (logits, weight.detach()),
        ):
            ops.linear_policy_gradient_loss(
                hidden, matrix, **e, loss=loss, chunk_tokens=7, softcap=4.0
            )[0].backward()
    ops.policy_gradient_loss(logits.detach(), **e)
    (
        ops.token_logprobs(logits, targets, temperature=tau)[0] * torch.rand(len(targets))
    ).sum().backward()


def of_groups():
    r, valid, flat = torch.rand(3, 5), torch.rand(3, 5) < 0.8, torch.rand(15).bfloat16()
    ops.grpo_advantage(r)
    ops.maxpo_advantage(r, 2, valid=valid)
    ops.maxrl_advantage(flat, offsets=torch.tensor([0, 4, 4, 15]))
    ops.maxrl_advantage(flat, group_ids=torch.arange(15) % 4)
    ops.group_advantage(r > 0.5, "passk_training", k=2)


def of_log_ratios():
    e = example()
    logprobs, mask = e["old_logprobs"].float().requires_grad_(), e["mask"]
    ref_logprobs = e["ref_logprobs"].float()
    ops.log_ratio_reward(logprobs, ref_logprobs, CU_SEQLENS, 0.5, mask=mask).sum().backward()


def of_divergence():
    hidden, weight, coefficients = torch.rand(5, 3), torch.rand(7, 3), torch.tensor([1, 0, 2, 3, 0])
    for i, divergence in enumerate(("reverse", "forward", "jsd")):
        loss, _ = ops.linear_divergence(
            *(x.requires_grad_(i != j) for j, x in enumerate((hidden, weight))),
            hidden.flip(1),
            weight,
            divergence,
            softcap=4.0,
            coefficients=coefficients if i else None,
        )
        loss.backward()


@pytest.mark.parametrize(
    ("run", "names"),
    [
        (of_divergence, "linear_divergences"),
        (of_groups, "group_advantage"),
        (of_log_ratios, "log_ratio_reward log_ratio_reward_backward"),
        (
            of_logits,
            "token_logprobs token_logprobs_backward token_loss linear_loss linear_logprobs "
            "linear_logprobs_backward",
        ),
    ],
)
def test_operators_pass_opcheck(run, names):
    torch.manual_seed(0)
    with Operators() as operators:
        run()
    calls = {}
    for call in operators.calls:
        if call.function.namespace == "maxrl_fast":
            kinds = tuple(
                (x.requires_grad, x.dtype) if isinstance(x, torch.Tensor) else type(x)
                for x in call.arguments
            )
            calls[call.function, kinds] = call
    assert {function._opname for function, _ in calls} >= set(names.split())
    for function, arguments, _ in calls.values():
        if "backward" in function._opname:  # it has no derivative itself
            arguments = tuple(x.detach() if isinstance(x, torch.Tensor) else x for x in arguments)
        torch.library.opcheck(function, arguments)
