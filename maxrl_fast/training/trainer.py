"""One training step, from prompts to new weights in the rollout engine. The data flow:

    task --prompts--> rollout engine --token ids, logprobs--> reward --[G, N]--> advantage --[S]-->
         packed batch --> model (each prompt once) --> loss --> optimizer --> weights back to the
         rollout engine

G prompts, N rollouts per prompt, S = G N sequences."""

import atexit
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from maxrl_fast.records import Prompts
from maxrl_fast.rollout import Engine
from maxrl_fast.runtime.background import in_thread
from maxrl_fast.runtime.device import beside
from maxrl_fast.training.collect import RolloutBatch, RolloutCollector
from maxrl_fast.training.learner import Learner, UpdateMetrics
from maxrl_fast.training.metrics import step_metrics
from maxrl_fast.training.objectives.objective import Objective
from maxrl_fast.training.optimizer import LearningRate
from maxrl_fast.training.stopwatch import Stopwatch

EXIT_SECONDS = 10.0  # how long the exit of the process waits for a batch that is being sampled


@dataclass(frozen=True)
class StepRecord:
    batch: RolloutBatch
    advantages: Tensor  # [S] of the last update
    updates: list[UpdateMetrics]
    metrics: dict[str, float]  # a line of metrics.jsonl


@dataclass
class Trainer:
    """Each of `updates_per_step` optimizer updates uses an equal share of a step's prompts.

    With `ahead` A, step n + A is sampled in a thread while step n trains, with the weights that
    step n begins with (docs/asynchronous.md). Its engine must not compute where the policy is
    changed."""

    collector: RolloutCollector
    objective: Objective
    learner: Learner
    engine: Engine
    learning_rate: LearningRate
    updates_per_step: int = 1
    correction: Callable[[RolloutBatch, Learner], RolloutBatch] | None = None
    clock: Stopwatch = field(default_factory=Stopwatch)
    teacher_prompts: Callable[[Prompts], Prompts] | None = None
    ahead: int = 0
    waiting: list[RolloutBatch] = field(default_factory=list)  # sampled and not learned from
    _coming: Future[RolloutBatch] | None = None
    _sampled: float = 0.0  # when the last batch of the thread was there

    def __post_init__(self) -> None:
        # Python would kill the thread at exit, which aborts the process if it is inside PyTorch.
        # The thread keeps its trainer; others are freed.
        own = weakref.ref(self)
        atexit.register(lambda: (x := own()) and x._coming and wait([x._coming], EXIT_SECONDS))

    def settle(self) -> list[RolloutBatch]:
        """Wait for the batch that is being sampled, if any, and raise its error; return
        `waiting`."""
        if self._coming is not None:
            with self.clock("wait for samples"):
                wait([self._coming])  # an interrupt leaves it
            coming, self._coming = self._coming, None
            self.waiting.append(batch := coming.result())
            for x in batch.tensors():
                if x.is_cuda:  # which this thread's stream reads, and frees
                    x.record_stream(torch.cuda.current_stream(x.device))
        return self.waiting

    def _collect(self, n: int, first_prompt: int, weights: int) -> RolloutBatch:
        batch = self.collector.collect(n, first_prompt)
        self._sampled = time.perf_counter()
        return replace(batch, sampled_after=weights)

    def load_engine(self) -> None:
        self.settle()
        with self.clock("weights to rollout"):
            self.engine.load_weights(self.learner.model)

    def _next_batch(self, n: int, first_prompt: int) -> RolloutBatch:
        """Return the batch of step n, and begin that of step n + ahead."""
        waiting, last = self.settle(), self.learning_rate.steps

        def following() -> tuple[int, int, int]:  # of `_collect`, for the next step to sample
            return n + len(waiting), first_prompt + sum(x.num_sampled for x in waiting), n - 1

        while not waiting or (len(waiting) < self.ahead and n + len(waiting) <= last):
            waiting.append(self._collect(*following()))
        if len(waiting) <= self.ahead and n + len(waiting) <= last:
            self.load_engine()
            work = partial(self._collect, *following())
            self._coming = in_thread(beside(self.learner.device, work))
        return waiting.pop(0)

    def step(self, n: int, first_prompt: int) -> StepRecord:
        clock = self.clock
        learner, objective = self.learner, self.objective
        lr = self.learning_rate.at(n)
        start, before = time.perf_counter(), clock.total("wait for samples")
        idle = start - self._sampled if self._coming is not None and self._coming.done() else 0.0
        batch = self._next_batch(n, first_prompt)  # G prompts, S rollouts, rewards [G, N]
        if not self.ahead:
            self.engine.sleep()
        if self.correction is not None:
            with clock("log-probs"):
                batch = self.correction(batch, learner)
        train_seconds, updates = -clock.total("advantage", "update"), list[UpdateMetrics]()
        with clock("update"):
            if self.teacher_prompts is not None:
                batch = replace(batch, teacher_prompts=self.teacher_prompts(batch.prompts))
            if objective.needs.reference or not learner.settings.divergence_coef:
                # an objective compares whole batches, the loss those of an update
                num_shares = 1 if objective.needs.reference else self.updates_per_step
                rollouts = learner.with_reference(batch, num_shares)
                batch = replace(batch, rollouts=rollouts)
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
                in_loss = batch.in_loss(sequences)
                learner.forward_backward(batch, advantages, in_loss, draw=(n, update))
                updates.append(learner.optim_step(when=f"step {n}", lr=lr))
        with clock("update"):
            own_metrics = objective_step.finish()
        train_seconds += clock.total("advantage", "update")
        metrics = step_metrics(batch, advantages, updates, lr, train_seconds) | own_metrics
        if not self.ahead:
            self.load_engine()
        else:
            if batch.sampled_after is not None:  # a checkpoint of an earlier version
                metrics["lag"] = (n - 1 - batch.sampled_after) * self.updates_per_step
            metrics["wait_seconds"] = clock.total("wait for samples") - before
            metrics["sampler_wait_seconds"] = idle
            metrics["tokens_per_second"] = batch.num_tokens / (time.perf_counter() - start)
        return StepRecord(batch, advantages, updates, metrics | batch.metrics)
