"""One training step, from prompts to new weights in the rollout engine. The data flow:

    task --prompts--> rollout engine --token ids, logprobs--> reward --[G, N]--> advantage --[S]-->
         packed batch --> model (each prompt once) --> loss --> optimizer --> weights back to the
         rollout engine

G prompts, N rollouts per prompt, S = G N sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from maxrl_fast.records import Prompts
from maxrl_fast.rollout import Engine
from maxrl_fast.training.collect import RolloutBatch, RolloutCollector
from maxrl_fast.training.correction import ImportanceWeights
from maxrl_fast.training.learner import Learner, UpdateMetrics
from maxrl_fast.training.metrics import step_metrics
from maxrl_fast.training.objectives.objective import Objective
from maxrl_fast.training.optimizer import LearningRate
from maxrl_fast.training.stopwatch import Stopwatch


@dataclass(frozen=True)
class StepRecord:
    batch: RolloutBatch
    advantages: Tensor  # [S] of the last update
    updates: list[UpdateMetrics]
    metrics: dict[str, float]  # a line of metrics.jsonl


@dataclass
class Trainer:
    """Trains a policy. Each of `updates_per_step` optimizer updates uses an equal share of a step's
    prompts."""

    collector: RolloutCollector
    objective: Objective
    learner: Learner
    engine: Engine
    learning_rate: LearningRate
    updates_per_step: int = 1
    correction: ImportanceWeights | None = None
    clock: Stopwatch = field(default_factory=Stopwatch)
    teacher_prompts: Callable[[Prompts], Prompts] | None = None

    def step(
        self, n: int, first_prompt: int, diagnose: Callable[[RolloutBatch], None] | None = None
    ) -> StepRecord:
        """Take step n, counted from 1, on the prompts from index `first_prompt` on. `diagnose` gets
        the batch before the first update."""
        clock = self.clock
        learner, objective = self.learner, self.objective
        lr = self.learning_rate.at(n)
        batch = self.collector.collect(n, first_prompt)  # G prompts, S rollouts, rewards [G, N]
        self.engine.sleep()
        if self.correction is not None:
            with clock("log-probs"):
                batch = self.correction.apply(batch, learner)
        train_seconds, updates = -clock.total("advantage", "update"), list[UpdateMetrics]()
        with clock("update"):
            if self.teacher_prompts is not None:
                batch = replace(batch, teacher_prompts=self.teacher_prompts(batch.prompts))
            if objective.needs.reference or not learner.settings.divergence_coef:
                # an objective compares whole batches, the loss those of an update
                num_shares = 1 if objective.needs.reference else self.updates_per_step
                rollouts = learner.with_reference(batch, num_shares)
                batch = replace(batch, rollouts=rollouts)
        if diagnose is not None:
            diagnose(batch)
        with clock("advantage"):
            objective_step = objective.begin(batch, learner)
        batch = objective_step.batch
        for update, sequences in enumerate(batch.minibatches(self.updates_per_step)):
            # The algorithm: each A_i multiplies the log-probs of response i, so that one optimizer
            # step on
            #     loss = -(1/denominator) sum_i A_i sum_t log pi(y_it | x_i, y_i<t)
            # (for ppo, the clipped ratio pi/pi_old in place of log pi) makes responses with A_i > 0
            # more likely.
            with clock("advantage"):
                advantages = objective_step.advantages(sequences)  # [S]
            with clock("update"):
                updates.append(
                    learner.update(
                        batch, advantages, sequences, when=f"step {n}", lr=lr, draw=(n, update)
                    )
                )
        with clock("update"):
            own_metrics = objective_step.finish()
        train_seconds += clock.total("advantage", "update")
        with clock("weights to rollout"):
            self.engine.load_weights(learner.model)
        metrics = step_metrics(batch, advantages, updates, lr, train_seconds)
        return StepRecord(batch, advantages, updates, metrics | own_metrics | batch.metrics)
