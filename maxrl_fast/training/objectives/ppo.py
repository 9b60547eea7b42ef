"""PPO with a critic, which is trained after each step's policy updates."""

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, NoReturn

import torch
from torch import Tensor

from maxrl_fast.algorithms.options import (
    Help,
    NotNegative,
    Positive,
    UnitInterval,
)
from maxrl_fast.errors import NonFiniteError
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.records import Samples
from maxrl_fast.runtime.device import to_host
from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.critic import value_loss, values_of
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.objectives.gae import explained_variance, gae_advantages, whitened
from maxrl_fast.training.objectives.objective import Needs, Objective, ObjectiveStep, objective
from maxrl_fast.training.optimizer import take_step, zero_gradients
from maxrl_fast.training.packing import MicroBatch
from maxrl_fast.training.passes import run_batch

CLIP_GRAD = 1.0  # largest norm of the critic's gradient, as in verl


class CriticError(NonFiniteError):
    advice = "A lower --critic-lr often helps; --dtype float32 rules out rounding."


@objective(
    "PPO, Schulman et al. 2017, arXiv:1707.06347; GAE, arXiv:1506.02438",
    name="ppo",
    needs="N >= 1; memory and work of a second model that is trained",
)
@dataclass(kw_only=True)
class PpoObjective(Objective):
    """A_t = sum_l (gamma lambda)^l d_(t+l), whitened over the batch's tokens; d_t = r_t + gamma
    V_(t+1) - V_t, r at the last token; the critic V: a copy of the policy with a value head,
    trained on A + V.

    Advantages are whitened over the step's tokens whose reward is known. The critic learns the
    returns A + V, with A before whitening, after the policy updates and on the same minibatches.
    """

    gae_gamma: Annotated[
        UnitInterval,
        Help("Discount of the reward per token in the generalized advantage estimates of ppo."),
    ] = 1.0
    gae_lambda: Annotated[
        UnitInterval,
        Help(
            "Lambda of these estimates: 1 is the return minus the value; smaller relies more on "
            "the critic."
        ),
    ] = 1.0
    # the next are the critic's
    value_clip: Annotated[
        NotNegative,
        Help(
            "Values of ppo's critic gain nothing by moving further than this from those before the "
            "step; 0: no limit."
        ),
    ] = 0.2
    critic_lr: Annotated[
        Positive | None,
        Help(
            "Learning rate of ppo's critic, constant from the first step. By default 2e-3; with "
            "--model 1e-5, with --lora-rank too 1e-4."
        ),
    ] = None
    needs = Needs(token_weights=True, critic=True)

    def begin(self, batch: RolloutBatch, learner: Learner) -> ObjectiveStep:
        rollouts = batch.rollouts
        values = state_values(learner, batch)
        _check_finite(values, batch)
        has_reward, lengths = batch.has_reward.flatten(), rollouts.lengths
        counts = has_reward.repeat_interleave(lengths, output_size=len(values))
        advantages = gae_advantages(
            values, batch.rewards.flatten(), rollouts.cu_seqlens, self.gae_gamma, self.gae_lambda
        )
        return _Step(
            batch.weighted(whitened(advantages, counts).float()),
            torch.ones_like(batch.rewards.flatten()),
            learner,
            values,
            (advantages + values).float(),
            counts,
        )


@dataclass
class _Step(ObjectiveStep):
    learner: Learner
    state_values: Tensor  # [T] of the critic before the step
    returns: Tensor  # [T]
    counts: Tensor  # bool [T], tokens of responses whose reward is known
    minibatches: list[Tensor] = field(default_factory=list)  # the samples of each policy update

    def advantages(self, sequences: Tensor) -> Tensor:
        self.minibatches.append(self.batch.in_loss(sequences.cpu()))
        return self.values

    def finish(self) -> dict[str, float]:
        values, counts, when = self.state_values, self.counts, f"step {self.batch.step}"
        update = partial(update_critic, self.learner, self.batch, values, self.returns, when=when)
        done = [update(sequences) for sequences in self.minibatches]
        mean = torch.where(counts, values, 0.0).sum() / counts.sum().clamp_min(1)
        value_mean, explained = to_host(mean, explained_variance(values, self.returns, counts))
        return {
            "value_loss": sum(loss for loss, _ in done) / len(done),
            "explained_variance": float(explained),
            "value_mean": float(value_mean),
            "critic_grad_norm": sum(norm for _, norm in done) / len(done),
        }


def state_values(learner: Learner, samples: Samples) -> Tensor:
    """Return the critic's value before each token, float32 [T]; all ranks must call this."""
    assert learner.critic is not None

    def compute(model: PolicyModel, batch: MicroBatch, hidden: Tensor) -> Tensor:
        return values_of(hidden, model.output_matrix)[:, None]

    return learner.passes.compute(compute, learner.critic.model, samples, samples.sequences)[:, 0]


def update_critic(
    learner: Learner,
    samples: Samples,
    old_values: Tensor,
    returns: Tensor,
    sequences: Tensor,
    *,
    when: str,
) -> tuple[float, float]:
    """Take one optimizer step of the critic on some of the samples, the same step on all ranks,
    which must all call this. Return the loss, and the gradient norm before clipping.

    `old_values` and `returns` are [T] of all samples; `sequences`, int64 on the host and ascending,
    are the samples of this update. The loss is the mean over their tokens; without tokens there is
    no step.

    Raises:
        NonFiniteError: if one of them is not finite; the critic's weights are unchanged.
    """
    critic = learner.critic
    assert critic is not None
    packer, size = learner.passes.packer(samples), learner.ranks.size
    sequences = sequences[packer.lengths[sequences] > 0]
    num_tokens = int(packer.lengths[sequences].sum())
    if not num_tokens:
        return 0.0, 0.0

    def loss_of(batch: MicroBatch) -> tuple[Tensor, Tensor]:
        hidden = run_batch(critic.module, batch, learner.dtype)
        values, at = values_of(hidden, critic.model.output_matrix), batch.target_index
        of_tokens = value_loss(values, old_values[at], returns[at], critic.value_clip)
        part = of_tokens.sum() * (size / num_tokens)  # gradients become means over the ranks
        return part, part.detach().double() / size

    def refuse(loss: float, norm: float) -> NoReturn:
        raise CriticError(
            f"{when}: the critic's loss is {loss:g} and the norm of its gradient {norm:g}"
        )

    zero_gradients(critic.model)
    done = learner.passes.accumulate(critic.module, packer, sequences, loss_of)
    total = learner.passes.total(done, returns.new_zeros((), dtype=torch.float64))
    how = critic.model, critic.optimizer, critic.lr, CLIP_GRAD, refuse
    norm, (loss,) = take_step(*how, total)
    return float(loss), norm


def _check_finite(values: Tensor, batch: RolloutBatch) -> None:
    broken = (~values.isfinite()).nonzero()
    if len(broken):
        token = int(broken[0])
        sequence = int(torch.searchsorted(batch.rollouts.cu_seqlens, token, right=True)) - 1
        prompt = int(batch.prompts.ids[sequence // batch.num_rollouts])
        raise CriticError(
            f"step {batch.step}: the critic's value of a token is {float(values[token])} for "
            f"prompt {prompt}"
        )
