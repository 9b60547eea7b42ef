"""Each prompt's contribution to the gradient of a step: a line of diagnostics.jsonl."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from maxrl_fast.model.linear import full_tensor
from maxrl_fast.records import Samples
from maxrl_fast.training.collect import RolloutBatch
from maxrl_fast.training.learner import Learner
from maxrl_fast.training.objectives.objective import Objective
from maxrl_fast.training.optimizer import zero_gradients


def prompt_gradient_norms(
    learner: Learner,
    samples: Samples,
    advantages: Tensor,
    sequences: Tensor,
    beat: Callable[[], None] = lambda: None,
    draw: tuple[int, int] = (0, 0),
) -> list[float]:
    """Return the norm of each prompt's gradient (figures 6 and 8 of the MaxRL paper), its part of
    the gradient of the loss over all samples; 0 if none of its samples has a gradient.

    Each rank runs the backward passes of all prompts. All gradients are zero afterwards. Arguments
    are as in Learner.update; `beat` is called after each prompt."""
    packer = learner.packer(samples, advantages)
    plan = learner.plan(packer, samples, sequences, draw)
    group, norms = plan.sequences // samples.num_rollouts, [0.0] * len(samples.prompts)
    for g in group.unique().tolist():
        zero_gradients(learner.model)
        for part in packer.split(plan.sequences[group == g], learner.token_budget):
            learner.loss(packer.pack(part), plan)[0].backward()
        gradients = [p.grad for p in learner.model.parameters() if p.grad is not None]
        # Learner.loss multiplies by the number of ranks; here every rank has run all passes.
        norms[g] = float(full_tensor(nn.utils.get_total_norm(gradients))) / learner.ranks.size
        beat()
    zero_gradients(learner.model)
    return norms


def diagnostics_record(
    batch: RolloutBatch, objective: Objective, learner: Learner, beat: Callable[[], None]
) -> dict[str, Any]:
    """Return a line of diagnostics.jsonl. The pass rate is the mean over the known rewards of a
    prompt's first round, 0 if none is known: whether there are more rounds depends on these."""
    step, sequences = objective.begin(batch, learner), batch.scored_indices
    advantages, draw = step.advantages(sequences), (batch.step, 0)
    given = step.batch, advantages, batch.in_loss(sequences)
    norms = prompt_gradient_norms(learner, *given, beat, draw)
    known = batch.has_reward
    if (ends := batch.drawn_by) is not None:
        known = known & (ends == ends[:, :1])
    known = known.double()  # a sum of large rewards overflows float32
    rates = (batch.task_rewards * known).sum(1) / known.sum(1).clamp_min(1)  # [G]
    return {
        "step": batch.step,
        "ids": batch.prompts.ids.tolist(),
        "pass_rate": [round(rate, 6) for rate in rates.tolist()],
        "grad_norm": norms,
    }
