"""One training step, from prompts to new weights in the rollout engine, in the order in which the data flows.

    task --prompts--> rollout engine --token ids, logprobs--> reward --[G, N]--> advantage --[S]--> packed batch
         --> model (each prompt once) --> loss --> optimizer --> weights back to the rollout engine

G prompts, N rollouts per prompt, S = G N sequences.
"""

from dataclasses import dataclass, field
from typing import Any

from maxrl_fast.rollout import Engine
from maxrl_fast.training.collect import Collected, RolloutCollector
from maxrl_fast.training.correction import NO_CORRECTION, Correction
from maxrl_fast.training.diagnostics import diagnostics_record, prompt_gradient_norms
from maxrl_fast.training.learner import Learner, UpdateMetrics
from maxrl_fast.training.length_penalty import LengthPenalty
from maxrl_fast.training.metrics import step_metrics
from maxrl_fast.training.objective import Objective
from maxrl_fast.training.optimizer import LearningRate
from maxrl_fast.training.rollout_records import rollout_records
from maxrl_fast.training.stopwatch import Stopwatch


@dataclass(frozen=True)
class StepRecord:
    """What a step did."""

    metrics: dict[str, float]  # a line of metrics.jsonl
    diagnostics: dict[str, Any] | None  # a line of diagnostics.jsonl
    num_prompts: int  # sampled, those that dynamic sampling replaced included
    tokens: dict[str, int]  # sampled ("rollout"), and computed by the learner ("update")
    complaint: str  # about failed rewards; empty where none failed
    rollouts: list[dict[str, Any]]  # lines of rollouts.jsonl, on the first rank


@dataclass
class Trainer:
    """Trains a policy, a step at a time.

    Args:
        updates_per_step: optimizer updates on each batch of rollouts, each on an equal share of its prompts.
        correction: for a rollout engine whose log-probs are not the policy's.
        keep_rollouts: rollouts of each step that its record keeps.
        length_penalty: is added to the rewards that the objective sees; None: nothing is.
    """

    collector: RolloutCollector
    objective: Objective
    learner: Learner
    engine: Engine
    learning_rate: LearningRate
    updates_per_step: int = 1
    correction: Correction = NO_CORRECTION
    clock: Stopwatch = field(default_factory=Stopwatch)
    keep_rollouts: int = 0
    length_penalty: LengthPenalty | None = None

    def step(self, n: int, first_prompt: int, diagnose: bool = False) -> StepRecord:
        """Take step n, from 1, on the prompts from index `first_prompt` on.

        Args:
            diagnose: whether to compute each prompt's own gradient norm too, which costs a second backward pass.

        Raises:
            NonFiniteError, RewardError: naming the step and the prompt.
            InputError: where rewards are not what the objective needs.
        """
        sampled = self.collector.collect(n, first_prompt)  # G prompts, S rollouts, rewards [G, N]
        collected = sampled.with_answers() if self.objective.needs.answers else sampled
        penalties = dict[str, float]()
        if self.length_penalty is not None:
            collected, penalties = self.length_penalty.add(collected)
        of_weights = dict[str, float]()
        if self.correction is not NO_CORRECTION:
            with self.clock("log-probs"):
                collected, of_weights = self.correction.weigh(collected, self.learner)
        with self.clock("advantage") as lap:
            self.objective.begin(collected, self.learner)
            learned = collected.weighted(self.objective.token_weights)
        train_seconds = lap.seconds
        self.engine.sleep()
        diagnostics = diagnostics_record(sampled, self._prompt_gradient_norms(collected, learned)) if diagnose else None

        lr, updates = self.learning_rate.at(n), list[UpdateMetrics]()
        for update, sequences in enumerate(collected.minibatches(self.updates_per_step)):
            # The algorithm: each A_i multiplies the log-probs of response i, so that one optimizer step on
            #     loss = -(1/denominator) sum_i A_i sum_t log pi(y_it | x_i, y_i<t)
            # (for ppo, the clipped ratio pi/pi_old in place of log pi) makes responses with A_i > 0 more likely.
            with self.clock("advantage") as lap:
                advantages = self.objective.advantages(sequences)  # [S]
                kept = self.correction.mask(advantages, learned, sequences, self.learner)
            train_seconds += lap.seconds
            with self.clock("update") as lap:
                done = self.learner.update(learned, kept, sequences, when=f"step {n}", lr=lr, draw=(n, update))
                updates.append(done)
            train_seconds += lap.seconds
        with self.clock("update") as lap:
            own_metrics = self.objective.end() | self.correction.end()
        train_seconds += lap.seconds
        with self.clock("weights to rollout"):
            self.engine.load_weights(self.learner.model)

        rollouts = list[dict[str, Any]]()
        if self.keep_rollouts:
            task, ranks = self.collector.task, self.collector.ranks
            rollouts = rollout_records(task, sampled, advantages, self.keep_rollouts, ranks)
        metrics = step_metrics(sampled, advantages.view(sampled.rewards.shape), updates, lr, train_seconds)
        return StepRecord(
            metrics=metrics | penalties | of_weights | own_metrics | collected.numbers,
            diagnostics=diagnostics,
            num_prompts=collected.num_sampled,
            tokens={"rollout": collected.num_tokens, "update": sum(update.num_tokens for update in updates)},
            complaint=collected.complaint,
            rollouts=rollouts,
        )

    def _prompt_gradient_norms(self, collected: Collected, learned: Collected) -> list[float]:
        """Return the norm of each prompt's own gradient before the first update."""
        with self.clock("diagnosis"):
            known = collected.with_reward
            advantages = self.objective.advantages(known)
            kept = self.correction.mask(advantages, learned, known, self.learner)
            norms = prompt_gradient_norms(self.learner, learned, kept, known, self.clock.beat, draw=(learned.step, 0))
            self.correction.end()
            self.objective.begin(collected, self.learner)  # anew, as if nothing had been asked of it
        return norms
