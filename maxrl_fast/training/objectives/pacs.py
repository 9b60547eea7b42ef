"""PACS in the trainer: advantages with which the learner's REINFORCE loss has the gradient of the
PACS loss.

The PACS loss L is a function of the reward proxies r_i = beta sum_t (logp_t - ref_t) of each group.
It has the gradient of -(1/B) sum_i A_i sum_t logp_t with A_i = -beta B dL/dr_i. These advantages
depend on the policy, so each update computes them from whole groups. `pacs_paper` adds the actor
term of the paper's eq. 5, the log-likelihood of the outcome.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from maxrl_fast.ops import log_ratio_reward, pacs_loss
from maxrl_fast.records import cumulative, gather_sequences
from maxrl_fast.runtime.device import host_numbers, to_device
from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.objectives.objective import Needs, Objective


@dataclass
class _Step:
    batch: RolloutBatch
    learner: Learner
    ref_logprobs: Tensor | None  # [T]; None if the policy is its own reference
    cu_seqlens: Tensor  # [S+1] of the responses, on the host; [0] if not needed
    values: Tensor  # [S] advantages, filled in by each update
    metrics: list[dict[str, Tensor]] = field(default_factory=list)  # one dict per update


@dataclass
class PacsObjective(Objective):
    """The objectives pacs and pacs_paper.

    `beta` is in reward per nat of log-ratio. With one update per step, the policy is its own
    reference and no forward pass is needed. `has_actor` is for pacs_paper: the actor term, and a
    frozen reference policy in place of the sampling policy. Every `ref_reset_interval` steps (0:
    never) the policy becomes the reference and the optimizer restarts.
    """

    beta: float = 1.0
    score: str = "rloo"
    class_weight: str = "balanced"
    updates_per_step: int = 1
    has_actor: bool = False
    ref_reset_interval: int = 0
    loss: str = "reinforce"
    aggregation: str = "seq_mean_token_sum"
    owns_loss: bool = True
    _step: _Step | None = field(default=None, repr=False, compare=False)

    @property
    def needs(self) -> Needs:
        has_passes = self.has_actor or self.updates_per_step > 1
        return Needs(reference=self.has_actor, binary=True, logprob_passes=2 * has_passes)

    def begin(self, batch: RolloutBatch, learner: Learner) -> RolloutBatch:
        ref_logprobs, cu_seqlens = None, torch.zeros(0)
        if self.has_actor:
            ref_logprobs = batch.rollouts.ref_logprobs
        elif self.updates_per_step > 1:
            # Computed by the learner, not taken from the rollout engine: rounding differences
            # would add up over a response.
            ref_logprobs = learner.passes.logprobs(learner.model, batch, batch.sequences)
        if ref_logprobs is not None:
            cu_seqlens = batch.rollouts.cu_seqlens.cpu()
        self._step = _Step(
            batch, learner, ref_logprobs, cu_seqlens, torch.zeros_like(batch.rewards.flatten())
        )
        return batch

    def advantages(self, sequences: Tensor) -> Tensor:
        step = self._step
        assert step is not None, "begin comes first"
        device, sequences = step.values.device, sequences.cpu()
        groups = sequences // step.batch.num_rollouts
        _, group_sizes = groups.unique_consecutive(return_counts=True)
        offsets, chosen = to_device(device, cumulative(group_sizes), sequences)
        if step.ref_logprobs is None:
            proxies = torch.zeros(len(sequences), device=device)
        else:
            index, cu_seqlens = to_device(device, *gather_sequences(step.cu_seqlens, sequences))
            logprobs = step.learner.passes.logprobs(step.learner.model, step.batch, sequences)
            proxies = log_ratio_reward(logprobs, step.ref_logprobs[index], cu_seqlens, self.beta)
        proxies.requires_grad_()
        loss, metrics = pacs_loss(
            proxies,
            step.batch.rewards.flatten()[chosen],
            offsets,
            score=self.score,
            weight=self.class_weight,
            denominator=1.0,  # the learner divides by B
        )
        (grad_proxies,) = torch.autograd.grad(loss, proxies)
        cross_entropy = metrics.pop("cross_entropy")
        metrics["loss"] = loss.detach() / max(len(sequences), 1)
        # The actor term takes the log-likelihood without class weights: with them it would push
        # rare correct rollouts down by more than the critic's term pushes them up.
        actor = -cross_entropy if self.has_actor else 0.0
        step.values[chosen] = actor - self.beta * grad_proxies
        step.metrics.append(metrics)
        return step.values

    def end(self) -> dict[str, float]:
        step, self._step = self._step, None
        assert step is not None, "begin comes first"
        interval = self.ref_reset_interval
        if self.has_actor and interval and step.batch.step % interval == 0:
            step.learner.restart_from_reference()
        metrics = step.metrics
        return host_numbers(
            {
                f"pacs_{name}": sum((m[name] for m in metrics[1:]), metrics[0][name]) / len(metrics)
                for name in metrics[0]
            }
        )
