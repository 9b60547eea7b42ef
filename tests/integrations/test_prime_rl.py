"""The loss for prime-rl, on what its trainer hands over (v0.8.1.dev67, commit 559b4477), which is
not installed.

`LossInputs` and `LossOutputs` have the fields of src/prime_rl/trainer/rl/loss.py.
"""

import asyncio
import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import pytest
import torch

from maxrl_fast import ops
from maxrl_fast.integrations.prime_rl import policy_loss


@dataclass
class LossInputs:
    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor | None = None


@dataclass
class LossOutputs:
    loss: torch.Tensor
    metrics: dict


@pytest.fixture(autouse=True)
def prime_rl(monkeypatch):
    """Put modules in the place of prime-rl's, with the names that are imported from them."""
    modules = {"trainer.rl.loss": {"LossInputs": LossInputs, "LossOutputs": LossOutputs}}
    for name in ("", ".trainer", ".trainer.rl", ".trainer.rl.loss"):
        module = types.ModuleType(f"prime_rl{name}")
        vars(module).update(modules.get(name[1:], {}))
        monkeypatch.setitem(sys.modules, f"prime_rl{name}", module)


T, V = 9, 7


def sequence(seed=0):
    """Return logits of a sequence [T, V] that need a gradient, its targets, and what prime-rl hands
    over of it.
    """
    torch.manual_seed(seed)
    logits = (2 * torch.randn(T, V)).requires_grad_()
    targets = torch.randint(V, (T,))
    logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    mask = torch.tensor([False, False, True, True, False, True, True, True, False])
    old, ref = (logprobs.detach() + 0.4 * torch.randn(T) for _ in range(2))
    return logits, targets, LossInputs(logprobs, old, ref, torch.randn(T), mask)


@pytest.mark.parametrize("kl_coef", [0.0, 0.2])
@pytest.mark.parametrize("loss", [name for name, row in ops.LOSSES.items() if not row.over_batch])
def test_loss_and_gradient_are_those_of_the_op_from_logits(loss, kl_coef):
    logits, targets, inputs = sequence()
    options = {
        "loss": loss,
        "clip_low": 0.1,
        "clip_high": 0.3,
        "dual_clip": 1.5,
        "kl_coef": kl_coef,
    }
    out = policy_loss(inputs, **options)
    (gradient,) = torch.autograd.grad(out.loss, logits)
    expected, _ = ops.policy_gradient_loss(
        logits, targets, inputs.advantages, torch.tensor([0, T]), advantages_per_token=True,
        mask=inputs.loss_mask,
        old_logprobs=inputs.inference_logprobs, ref_logprobs=inputs.ref_logprobs,
        aggregation="seq_mean_token_sum",
        denominator=1.0, **options,
    )  # fmt: skip
    (expected_gradient,) = torch.autograd.grad(expected, logits)
    torch.testing.assert_close(out.loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)
    assert expected_gradient.abs().max() > 0.1


@pytest.mark.parametrize("loss", [name for name, row in ops.LOSSES.items() if row.over_batch])
def test_losses_that_choose_tokens_over_a_batch_are_refused(loss):
    with pytest.raises(ValueError, match=f"loss {loss} compares the tokens of a whole batch"):
        policy_loss(sequence()[2], loss=loss)


def test_ppo_is_the_formula_with_the_weights_of_tokens():
    _, _, inputs = sequence(1)
    inputs.loss_weights = torch.rand(T)
    out = policy_loss(inputs)
    total, outside = 0.0, 0
    for t in inputs.loss_mask.nonzero()[:, 0].tolist():
        ratio = (inputs.trainer_logprobs[t] - inputs.inference_logprobs[t]).exp().item()
        advantage = inputs.advantages[t].item()
        total -= inputs.loss_weights[t].item() * min(
            ratio * advantage, min(max(ratio, 0.8), 1.2) * advantage
        )
        outside += not 0.8 <= ratio <= 1.2
    assert out.loss.item() == pytest.approx(total, rel=1e-5)
    assert out.metrics["outside_clip"].item() == pytest.approx(
        outside / int(inputs.loss_mask.sum())
    )
    assert all(value.dim() == 0 and not value.requires_grad for value in out.metrics.values())


def test_a_sequence_without_tokens_has_loss_0_and_a_gradient():
    logits, _, inputs = sequence()
    inputs.loss_mask = torch.zeros(T, dtype=torch.bool)
    for loss in ("ppo", "gspo"):
        out = policy_loss(inputs, loss=loss)
        assert out.loss.item() == 0
        assert not torch.autograd.grad(out.loss, logits, retain_graph=True)[0].any()


def test_wrong_options_are_refused_with_a_sentence():
    _, _, inputs = sequence()
    with pytest.raises(
        ValueError, match=r"loss must be one of reinforce, ppo, cispo, gspo, .*, got 'best'"
    ):
        policy_loss(inputs, loss="best")
    inputs.ref_logprobs = None
    with pytest.raises(ValueError, match="prime-rl must have ref_logprobs"):
        policy_loss(inputs, kl_coef=0.1)


def test_the_algorithm_of_the_page_assigns_our_advantages(monkeypatch):
    """Run the page's code on episodes with traces, of which one failed and one has no sampled
    token.
    """
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    config, code = re.findall(
        r"```python\n(# (?:in packages/prime-rl|src/prime_rl).*?)```", page, re.DOTALL
    )

    class Algorithm:
        def __init__(self, config, policy_pool):
            self.policy_pool = policy_pool

    def iter_trainable_traces(episodes):
        return (
            (e, t)
            for e in episodes
            for t in e.traces
            if not t.has_error and t.agent.trainable and any(t.nodes)
        )

    given = {}
    names = {
        "prime_rl.orchestrator.algo.base": {
            "Algorithm": Algorithm,
            "iter_trainable_traces": iter_trainable_traces,
        },
        "prime_rl.orchestrator.algo.routing": {
            "assign_advantages": lambda trace, value: given.update({trace.id: value})
        },
    }
    for name in (
        "configs",
        "orchestrator",
        "orchestrator.algo",
        *(key.partition(".")[2] for key in names),
    ):
        module = types.ModuleType(f"prime_rl.{name}")
        vars(module).update(names.get(f"prime_rl.{name}", {}))
        monkeypatch.setitem(sys.modules, f"prime_rl.{name}", module)
    scope = {
        "BaseAlgoConfig": object,
        "Literal": Literal,
        "ClassVar": ClassVar,
        "ActionLossType": str,
    }
    exec(config, scope)
    exec(code, scope)
    monkeypatch.setattr(scope["MaxPOAlgoConfig"], "k", 2)
    rewards, agent = [0.0, 1.0, 0.0, 0.5, 0.25], types.SimpleNamespace(trainable=True)
    traces = [
        types.SimpleNamespace(id=i, reward=r, has_error=i == 3, agent=agent, nodes=[1])
        for i, r in enumerate(rewards)
    ]
    episodes = [types.SimpleNamespace(traces=traces[:2]), types.SimpleNamespace(traces=traces[2:])]
    algorithm = scope["MaxPOAlgorithm"](scope["MaxPOAlgoConfig"](), policy_pool=None)
    asyncio.run(algorithm.score_group(episodes))
    expected = ops.maxpo_advantage(torch.tensor([0.0, 1.0, 0.0, 0.25]), k=2).tolist()
    assert given == dict(zip([0, 1, 2, 4], expected, strict=True))
