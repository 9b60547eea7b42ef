"""PACS in the trainer: advantages with which the learner's REINFORCE loss has the gradient of the
PACS loss.

The PACS loss L is a function of the reward proxies r_i = beta sum_t (logp_t - ref_t) of each group.
It has the gradient of -(1/B) sum_i A_i sum_t logp_t with A_i = -beta B dL/dr_i. These advantages
depend on the policy, so each update computes them from whole groups. `pacs_paper` adds the actor
term of the paper's eq. 5, the log-likelihood of the outcome.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import Tensor

from maxrl_fast.algorithms.options import CountOrZero, Help, Positive
from maxrl_fast.ops import log_ratio_reward, pacs_loss
from maxrl_fast.records import cumulative, gather_sequences
from maxrl_fast.runtime.device import host_numbers, to_device
from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.objectives.objective import (
    Needs,
    Objective,
    ObjectiveStep,
    has_teacher,
    objective,
)

NEEDS = "rewards 0 or 1, N >= 2 (N >= 1 with --score naive)"


@objective("PACS, eq. 8, code", name="pacs", needs=NEEDS)
@dataclass(kw_only=True)
class PacsObjective(Objective):
    """-B beta dL/dr_i, where L is the cross-entropy of R under sigmoid(score) and r = beta
    (log-ratio to the reference); the reference is the sampling policy.

    With one update per step, the policy is its own reference and no forward pass is needed.
    """

    beta: Annotated[
        Positive, Help("Scale of PACS's reward proxies, in reward per nat of log-ratio.")
    ] = 1.0
    score: Annotated[
        Literal["rloo", "grpo", "dr_grpo", "naive"],
        Help(
            "Score of a rollout in its group whose cross-entropy PACS minimises: rloo, grpo, "
            "dr_grpo or naive."
        ),
    ] = "rloo"
    class_weight: Annotated[
        Literal["balanced", "none"],
        Help("PACS's weights of correct and wrong rollouts: balanced in every group, or none."),
    ] = "balanced"
    loss = "reinforce"
    aggregation = "seq_mean_token_sum"
    owns_loss = True
    has_actor = False

    @property
    def min_rollouts(self) -> int:
        return 1 if self.score == "naive" else 2

    @property
    def needs(self) -> Needs:
        has_passes = self.has_actor or self.updates_per_step > 1
        return Needs(reference=self.has_actor, binary=True, logprob_passes=2 * has_passes)

    def learns_from_equal_rewards(self, num_rollouts: int) -> bool:
        return False

    def begin(self, batch: RolloutBatch, learner: Learner) -> ObjectiveStep:
        ref_logprobs, cu_seqlens = None, torch.zeros(0)
        if self.has_actor:
            ref_logprobs = batch.rollouts.ref_logprobs
        elif self.updates_per_step > 1:
            # Computed by the learner, not taken from the rollout engine: rounding differences
            # would add up over a response.
            ref_logprobs = learner.passes.logprobs(learner.model, batch, batch.sequences)
        if ref_logprobs is not None:
            cu_seqlens = batch.rollouts.cu_seqlens.cpu()
        values = torch.zeros_like(batch.rewards.flatten())
        return _Step(batch, values, self, learner, ref_logprobs, cu_seqlens)


@objective(
    "PACS, eqs. 5, 8",
    name="pacs_paper",
    needs=NEEDS,
    refuses={
        "pacs_paper with --reference or --teacher-prompt needs --ref-reset-interval 0, got "
        "{ref_reset_interval}": lambda c: c.ref_reset_interval and has_teacher(c),
    },
)
@dataclass(kw_only=True)
class PacsPaperObjective(PacsObjective):
    """-B beta dL/dr_i, where L is the cross-entropy of R under sigmoid(score) and r = beta
    (log-ratio to the reference); plus the log-likelihood of R; the reference is reset every
    --ref-reset-interval steps.

    The reference is a frozen policy in place of the sampling policy.
    """

    ref_reset_interval: Annotated[
        CountOrZero,
        Help(
            "Steps after which the policy becomes the reference policy of pacs_paper and the "
            "optimizer restarts; 0: never."
        ),
    ] = 50
    has_actor = True


@dataclass
class _Step(ObjectiveStep):
    objective: PacsObjective
    learner: Learner
    ref_logprobs: Tensor | None  # [T]; None if the policy is its own reference
    cu_seqlens: Tensor  # [S+1] of the responses, on the host; [0] if not needed
    metrics: list[dict[str, Tensor]] = field(default_factory=list)  # one dict per update

    def advantages(self, sequences: Tensor) -> Tensor:
        objective, device, sequences = self.objective, self.values.device, sequences.cpu()
        groups = sequences // self.batch.num_rollouts
        _, group_sizes = groups.unique_consecutive(return_counts=True)
        offsets, chosen = to_device(device, cumulative(group_sizes), sequences)
        if self.ref_logprobs is None:
            proxies = torch.zeros(len(sequences), device=device)
        else:
            index, cu_seqlens = to_device(device, *gather_sequences(self.cu_seqlens, sequences))
            logprobs = self.learner.passes.logprobs(self.learner.model, self.batch, sequences)
            references = self.ref_logprobs[index]
            proxies = log_ratio_reward(logprobs, references, cu_seqlens, objective.beta)
        proxies.requires_grad_()
        loss, metrics = pacs_loss(
            proxies,
            self.batch.rewards.flatten()[chosen],
            offsets,
            score=objective.score,
            weight=objective.class_weight,
            denominator=1.0,  # the learner divides by B
        )
        (grad_proxies,) = torch.autograd.grad(loss, proxies)
        cross_entropy = metrics.pop("cross_entropy")
        metrics["loss"] = loss.detach() / max(len(sequences), 1)
        # The actor term takes the log-likelihood without class weights: with them it would push
        # rare correct rollouts down by more than the critic's term pushes them up.
        actor = -cross_entropy if objective.has_actor else 0.0
        self.values[chosen] = actor - objective.beta * grad_proxies
        self.metrics.append(metrics)
        return self.values

    def finish(self) -> dict[str, float]:
        if isinstance(self.objective, PacsPaperObjective):
            interval = self.objective.ref_reset_interval
            if interval and self.batch.step % interval == 0:
                self.learner.set_reference()
                self.learner.optimizer.state.clear()  # Adam's moments
        metrics = self.metrics
        return host_numbers(
            {
                f"pacs_{name}": sum((m[name] for m in metrics[1:]), metrics[0][name]) / len(metrics)
                for name in metrics[0]
            }
        )
