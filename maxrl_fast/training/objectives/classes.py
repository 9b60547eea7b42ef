"""The objectives that are more than an estimator: PPO with a critic, which is trained after each
step's policy updates, and VeriFree, whose reward is itself trained."""

from dataclasses import dataclass, field
from typing import Annotated, NoReturn

import torch
from torch import Tensor

from maxrl_fast.algorithms.options import Help, NotNegative, Positive, UnitInterval
from maxrl_fast.errors import NonFiniteError
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.ops import group_advantage
from maxrl_fast.records import Samples
from maxrl_fast.runtime.device import host_numbers
from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import Learner, take_step
from maxrl_fast.training.objectives.group import Needs, Objective, ObjectiveStep, objective
from maxrl_fast.training.packing import MicroBatch
from maxrl_fast.training.passes import Kept, run_batch

CLIP_GRAD = 1.0  # largest norm of the critic's gradient, as in verl
_EPS = 1e-8  # added to the variance of advantages, as in verl
_ROUNDING = 1e-12  # relative, of sums of squares in float64


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

    docs/objectives/ppo.md has the rest.
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
        values, rewards = state_values(learner, batch), batch.rewards.flatten()
        if len(broken := (~values.isfinite()).nonzero()):
            bounds, token = batch.rollouts.cu_seqlens, int(broken[0])
            sequence = int(torch.searchsorted(bounds, token, right=True)) - 1
            raise CriticError(
                f"step {batch.step}: the critic's value of a token is {float(values[token])} for "
                f"prompt {int(batch.prompts.ids[sequence // batch.num_rollouts])}"
            )
        counts = batch.rollouts.by_token(batch.has_reward.flatten())
        given = values, rewards, batch.rollouts.cu_seqlens, self.gae_gamma, self.gae_lambda
        advantages = gae_advantages(*given)
        weighted = batch.weighted(whitened(advantages, counts).float())
        returns = (advantages + values).float()
        return _Step(weighted, torch.ones_like(rewards), learner, values, returns, counts)


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
        given, when = (self.learner, self.batch, self.state_values), f"step {self.batch.step}"
        done = [update_critic(*given, self.returns, own, when=when) for own in self.minibatches]
        values, returns = self.state_values[self.counts], self.returns[self.counts]
        means = {"explained_variance": explained_variance(values, returns)}
        means["value_mean"] = values.sum() / max(len(values), 1)
        loss, norm = (sum(column) / len(done) for column in zip(*done, strict=True))
        return {"value_loss": loss, "critic_grad_norm": norm, **host_numbers(means)}


def values_of(model: PolicyModel, batch: MicroBatch, hidden: Tensor) -> Tensor:
    return (hidden.float() @ model.output_matrix.float())[:, None]


def state_values(learner: Learner, samples: Samples) -> Tensor:
    """Return the critic's value before each token, float32 [T]."""
    assert learner.critic is not None
    given = learner.critic.model, samples, samples.sequences
    return learner.passes.compute(values_of, *given)[:, 0]


def update_critic(
    learner: Learner,
    samples: Samples,
    old_values: Tensor,
    returns: Tensor,
    sequences: Tensor,
    *,
    when: str,
) -> tuple[float, float]:
    """Take one optimizer step of the critic on some of the samples, int64 on the host and
    ascending; old values and returns are [T] of all. Return the mean loss and the gradient norm
    before clipping, 0 without tokens. CriticError leaves the weights unchanged."""
    critic = learner.critic
    assert critic is not None
    packer, size = learner.passes.packer(samples), learner.ranks.size
    sequences = sequences[packer.lengths[sequences] > 0]
    num_tokens = int(packer.lengths[sequences].sum())
    if not num_tokens:
        return 0.0, 0.0

    def refuse(loss: float, norm: float) -> NoReturn:
        raise CriticError(
            f"{when}: the critic's loss is {loss:g} and the norm of its gradient {norm:g}"
        )

    critic.optimizer.zero_grad(set_to_none=critic.module is critic.model)
    done: Kept = []
    for part in learner.passes.with_gradients(critic.module, packer, sequences):
        hidden, at = run_batch(critic.module, part.batch, learner.dtype), part.batch.target_index
        values = values_of(critic.model, part.batch, hidden)[:, 0]
        of_tokens = value_loss(values, old_values[at], returns[at], critic.value_clip)
        loss = of_tokens.sum() * (size / num_tokens)  # gradients become means over the ranks
        part.add(done, loss, loss.detach().double().view(1) / size)
    total = learner.passes.total(done, 1, returns.device)
    how = critic.model, critic.optimizer, critic.lr, CLIP_GRAD, refuse
    norm, (mean,) = take_step(*how, total)
    return float(mean), norm


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float) -> Tensor:
    """Return half of max((V - R)^2, (V' - R)^2) of each value [T], V' clamped to old value +- clip,
    as in OpenAI's baselines/ppo2 and verl; with clip 0 (V - R)^2 / 2."""
    errors = (values - returns).square()
    if clip:
        clamped = torch.clamp(values, old_values - clip, old_values + clip)
        errors = torch.maximum(errors, (clamped - returns).square())
    return 0.5 * errors


def gae_advantages(
    values: Tensor, rewards: Tensor, cu_seqlens: Tensor, gamma: float, gae_lambda: float
) -> Tensor:
    """Return advantages, float64 [T], of values [T] of the states before the tokens and rewards [S]
    at each response's last token; the value after it is 0, also if the response was truncated
    (Schulman et al. 2016, eqs. 11 and 16)."""
    lengths, size = cu_seqlens.diff(), len(values)
    last = (cu_seqlens[1:] - 1).repeat_interleave(lengths, output_size=size)
    tokens_left = last - torch.arange(size, device=values.device)  # in the same response
    values = values.double()
    given = rewards.double().repeat_interleave(lengths, output_size=size)
    sums = torch.where(tokens_left == 0, given, gamma * values.roll(-1)) - values  # [T], delta_t
    # each round doubles the terms of a token's sum: it adds that of the token `shift` places later
    longest = int(lengths.max()) if size else 0
    shift, factor = 1, gamma * gae_lambda
    while shift < longest:
        sums = sums + torch.where(tokens_left >= shift, factor * sums.roll(-shift), 0.0)
        shift, factor = 2 * shift, factor * factor
    return sums


def whitened(advantages: Tensor, counts: Tensor) -> Tensor:
    """Scale advantages [T] to mean 0 and sample variance 1 over the tokens in `counts`, bool [T];
    others get 0, and so does a single one."""
    number = counts.sum()
    mean = torch.where(counts, advantages, 0.0).sum() / number.clamp_min(1)
    centred = torch.where(counts, advantages - mean, 0.0)
    return centred * (centred.square().sum() / (number - 1).clamp_min(1) + _EPS).rsqrt()


def explained_variance(values: Tensor, returns: Tensor) -> Tensor:
    """Return 1 - Var(returns - values) / Var(returns), float64; 0 if the returns are equal up to
    rounding."""
    values, returns = values.double(), returns.double()
    left, total = ((x - x.mean()).square().mean() for x in (returns - values, returns))
    return torch.where(total > _ROUNDING * returns.square().mean(), 1 - left / total, 0.0)


@objective(
    "VeriFree, Zhou et al. 2025, arXiv:2505.21493, as the authors' code",
    name="verifree",
    needs="N >= 2; a task with reference answers; one more forward pass",
)
@dataclass(kw_only=True)
class VerifreeObjective(Objective):
    """rloo of R = pi(y* | x, z) for the tokens of the reasoning z, R for those of the reference
    answer y* put after it.

    So the gradient is that of E_z pi(y* | x, z): docs/objectives/verifree.md.
    """

    loss = "reinforce"
    aggregation = "seq_mean_token_sum"
    min_rollouts = 2
    needs = Needs(answers=True, token_weights=True)

    def begin(self, batch: RolloutBatch, learner: Learner) -> ObjectiveStep:
        rollouts, answer_lengths = batch.rollouts, batch.answer_lengths
        assert answer_lengths is not None, "the collector scores by the policy"
        rewards = batch.rewards.flatten()  # [S]
        advantages = group_advantage(batch.rewards, "rloo").flatten()
        # [2S]: z and y* of each response, alternating
        factors = torch.stack([advantages, rewards], 1).flatten()
        parts = torch.stack([rollouts.lengths - answer_lengths, answer_lengths], 1).flatten()
        has_gradient = ((parts > 0) & (factors != 0)).view(-1, 2).any(1)
        of_tokens = factors.repeat_interleave(parts, output_size=len(rollouts.tokens))
        return ObjectiveStep(batch.weighted(of_tokens), has_gradient.float())
