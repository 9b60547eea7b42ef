"""PACS in the trainer: advantages that make the learner's REINFORCE loss the loss of PACS.

The loss is a function of the groups' reward proxies r_i = beta sum_t (logp_t - ref_t), so its gradient is that of
-(1/B) sum_i A_i sum_t logp_t with A_i = -beta B dL/dr_i: advantages that depend on the policy, and are made anew for every
update, from whole groups. `pacs_paper` adds the actor term of the paper's eq. 5, the log-likelihood of the outcome.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from maxrl_fast.config.options import Config
from maxrl_fast.ops import log_ratio_reward, pacs_loss
from maxrl_fast.records import Prompts, Rollouts, cumulative, gather_sequences
from maxrl_fast.training.learner import Learner


@dataclass
class _Step:
    """What the updates of a step have in common."""

    learner: Learner
    prompts: Prompts
    rollouts: Rollouts
    labels: Tensor  # [S]
    valid: Tensor  # [S] bool, which of them are known
    ref_logprobs: Tensor | None  # [T]; None where the policy is its own reference all along
    metrics: list[dict[str, Tensor]] = field(default_factory=list)  # of each update


@dataclass
class Pacs:
    """Its advantages, by the calls of advantages.GroupAdvantages.

    Args:
        is_paper: with the actor term and a reference policy that stays; else the reference is the policy that sampled.
        ref_reset_interval: steps between resets of that reference; 0: never.
    """

    beta: float
    score: str
    class_weight: str
    is_paper: bool
    ref_reset_interval: int
    updates_per_step: int
    values: Tensor = field(default_factory=lambda: torch.empty(0))  # [G, N], of the updates so far
    needs_greedy: bool = False
    needs_binary: bool = True
    _step: _Step | None = None

    @classmethod
    def of(cls, config: Config) -> "Pacs":
        """That of a resolved configuration."""
        options = config.objective
        assert options.beta is not None
        assert options.score is not None
        assert options.class_weight is not None
        return cls(
            beta=options.beta,
            score=options.score,
            class_weight=options.class_weight,
            is_paper=options.objective == "pacs_paper",
            ref_reset_interval=options.ref_reset_interval or 0,
            updates_per_step=config.optimizer.updates_per_step,
        )

    @property
    def needs_reference(self) -> bool:
        return self.is_paper

    def begin(
        self,
        learner: Learner,
        prompts: Prompts,
        rollouts: Rollouts,
        rewards: Tensor,
        valid: Tensor | None,
        greedy_rewards: Tensor | None,
    ) -> None:
        """Take a step's rollouts and their rewards [G, N], 0 or 1, and which of them have one, before its first update."""
        everything = torch.arange(rewards.numel(), device=rewards.device)
        reference = learner.reference if self.is_paper else learner.model if self.updates_per_step > 1 else None
        # The learner's own numbers, not the rollout engine's: their rounding would add up over a response.
        ref_logprobs = None if reference is None else learner.logprobs(reference, prompts, rollouts, everything)
        valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else valid
        self._step = _Step(learner, prompts, rollouts, rewards.flatten(), valid.flatten(), ref_logprobs)
        self.values = torch.zeros_like(rewards)

    def at_start(self, sequences: Tensor) -> Tensor:
        """What `for_update` would give now, without a trace."""
        assert self._step is not None
        kept, num_metrics = self.values.clone(), len(self._step.metrics)
        values = self.for_update(sequences).clone()
        self.values = kept
        del self._step.metrics[num_metrics:]
        return values

    def for_update(self, sequences: Tensor) -> Tensor:
        """Advantages [S] for an update on these rollouts, whole groups, ascending; 0 for those not met yet."""
        step = self._step
        assert step is not None
        known = step.valid[sequences]
        group_sizes = known.view(-1, self.values.shape[1]).sum(1)
        sequences = sequences[known]
        if step.ref_logprobs is None:
            proxies = torch.zeros(len(sequences), device=sequences.device)
        else:
            index, cu_seqlens = gather_sequences(step.rollouts.cu_seqlens, sequences)
            logprobs = step.learner.logprobs(step.learner.model, step.prompts, step.rollouts, sequences)
            proxies = log_ratio_reward(logprobs, step.ref_logprobs[index], cu_seqlens, self.beta)
        proxies.requires_grad_()
        loss, metrics = pacs_loss(
            proxies,
            step.labels[sequences],
            cumulative(group_sizes),
            score=self.score,
            weight=self.class_weight,
            denominator=1.0,  # the learner divides by B
        )
        (slope,) = torch.autograd.grad(loss, proxies)
        cross_entropy = metrics.pop("cross_entropy")
        metrics["loss"] = loss.detach() / max(len(sequences), 1)
        # The actor's is the log-likelihood without class weights: with them it would push rare correct rollouts down by more
        # than the critic's term pushes them up.
        actor = -cross_entropy if self.is_paper else 0.0
        self.values.view(-1)[sequences] = actor - self.beta * slope
        step.metrics.append(metrics)
        return self.values.flatten()

    def end(self, step: int) -> dict[str, float]:
        """After the step's last update: what is to be reported beside the usual, means over the updates."""
        assert self._step is not None
        if self.is_paper and self.ref_reset_interval and step % self.ref_reset_interval == 0:
            self._step.learner.reset_reference()
        metrics, self._step = self._step.metrics, None
        return {f"pacs_{name}": float(sum(m[name] for m in metrics) / len(metrics)) for name in metrics[0]}
