"""One training step, from prompts to new weights in the rollout engine. The data flow:

    task --prompts--> rollout engine --token ids, logprobs--> reward --[G, N]--> advantage --[S]-->
         packed batch --> model (each prompt once) --> loss --> optimizer --> weights back to the
         rollout engine

G prompts, N rollouts per prompt, S = G N sequences."""

import atexit
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from maxrl_fast.algorithms.options import (
    DERIVED,
    BelowOne,
    Count,
    CountOrZero,
    NotNegative,
    Positive,
)
from maxrl_fast.records import Samples
from maxrl_fast.rollout import Engine
from maxrl_fast.runtime.background import Stopwatch, in_thread
from maxrl_fast.runtime.device import beside, host_numbers
from maxrl_fast.tasks import Task
from maxrl_fast.training.collect import RolloutBatch, RolloutCollector
from maxrl_fast.training.learner import TOKEN_METRICS, Learner, LearningRate, UpdateMetrics
from maxrl_fast.training.objectives.group import Objective

EXIT_SECONDS = 10.0  # how long the exit of the process waits for a batch that is being sampled


@dataclass(frozen=True)
class WarmStartOptions:
    """Supervised learning on solutions, at first."""

    sft_steps: CountOrZero = DERIVED
    """Steps. By default 100; with --sft-data an epoch; with --model alone 0."""
    sft_batch: Count = 32
    """Solutions per step."""
    sft_lr: Positive = DERIVED
    """Peak learning rate. By default 2e-3; with --model 1e-5, with --lora-rank too 1e-4."""
    sft_beta2: BelowOne = DERIVED
    """As --beta2, which is the default."""


@dataclass(frozen=True)
class OptimizerOptions:
    """Reinforcement learning updates (AdamW, float32 weights and moments)."""

    steps: CountOrZero = 200
    """Steps of reinforcement learning."""
    lr: Positive = DERIVED
    """Peak learning rate. By default 3e-4; with --model 1e-6, with --lora-rank too 1e-5."""
    lr_schedule: Literal["constant", "cosine"] = "cosine"
    """After the warm-up constant, or to a tenth of the peak."""
    warmup_steps: CountOrZero = 25
    """Steps of linear warm-up."""
    updates_per_step: Count = 1
    """Optimizer updates a step, each on an equal share of the prompts."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay, on matrices only."""
    beta2: BelowOne = 0.99
    """AdamW's decay of the second moment."""
    clip_grad: Positive = 0.1
    """Largest gradient norm; larger ones are scaled down."""
    token_budget: Count = 4096
    """Most tokens, prompts counted once, of a pass; gradients add up."""
    checkpoint_activations: bool = False
    """Recompute each layer in the backward pass: less memory, a third more work."""

    @property
    def learning_rate(self) -> LearningRate:
        return LearningRate(self.lr, self.steps, self.warmup_steps, self.lr_schedule)


@dataclass(frozen=True)
class StepRecord:
    batch: RolloutBatch
    advantages: Tensor  # [S] of the last update
    metrics: dict[str, float]  # a line of metrics.jsonl


@dataclass
class Trainer:
    """Each optimizer update uses an equal share of a step's prompts.

    With `ahead` A, step n + A is sampled in a thread while step n trains, with the weights that
    step n begins with (docs/asynchronous.md). Its engine must not compute where the policy is
    changed."""

    collector: RolloutCollector
    objective: Objective
    learner: Learner
    engine: Engine
    options: OptimizerOptions
    correction: Callable[[RolloutBatch, Learner], RolloutBatch] | None = None
    clock: Stopwatch = field(default_factory=Stopwatch)
    teacher_prompts: Callable[[RolloutBatch], RolloutBatch] | None = None
    ahead: int = 0
    waiting: list[RolloutBatch] = field(default_factory=list)  # sampled and not learned from
    _coming: Future[RolloutBatch] | None = None
    _sampled: float = 0.0  # when the last batch of the thread was there

    def __post_init__(self) -> None:
        self.learning_rate = self.options.learning_rate
        # Python would kill the thread at exit, which aborts the process if it is inside PyTorch.
        # Trainers without a thread are freed.
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
        clock, num_updates = self.clock, self.options.updates_per_step
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
                batch = self.teacher_prompts(batch)
            if objective.needs.reference or not learner.settings.divergence_coef:
                # an objective compares whole batches, the loss those of an update
                num_shares = 1 if objective.needs.reference else num_updates
                rollouts = learner.with_reference(batch, num_shares)
                batch = replace(batch, rollouts=rollouts)
        with clock("advantage"):
            objective_step = objective.begin(batch, learner)
        batch = objective_step.batch
        for update, sequences in enumerate(batch.minibatches(num_updates)):
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
                metrics["lag"] = (n - 1 - batch.sampled_after) * num_updates
            metrics["wait_seconds"] = clock.total("wait for samples") - before
            metrics["sampler_wait_seconds"] = idle
            metrics["tokens_per_second"] = batch.num_tokens / (time.perf_counter() - start)
        return StepRecord(batch, advantages, metrics | batch.metrics)


def step_metrics(
    batch: RolloutBatch,
    advantages: Tensor,  # [S]
    updates: Sequence[UpdateMetrics],
    lr: float,
    train_seconds: float,
) -> dict[str, float]:
    """Return the metrics of a step (docs/metrics.md). A loss's own are summed over the updates if
    they are integers, else averaged."""
    rewards, rollouts = batch.all_rewards, batch.raw_rollouts
    known = rewards if batch.valid is None else rewards[~rewards.isnan()]
    is_zero = advantages.view(batch.rewards.shape) == 0
    means = {
        "reward_mean": known.double().mean(),  # a sum of large rewards overflows float32
        "pass_at_1": (known > 0.5).float().mean(),
        "frac_prompts_solved": (rewards > 0.5).any(1).float().mean(),  # NaN is not
        "frac_groups_zero_variance": is_zero.all(1).float().mean(),
        # The mean of -log-prob of the samples is an unbiased estimate of the entropy; with top-p it
        # is too low.
        "entropy": -rollouts.logprobs.mean(),
        "response_length_mean": rollouts.lengths.float().mean(),
        "truncated": rollouts.truncated.float().mean(),
    }
    if batch.masks_truncated:
        masked = (rollouts.lengths * rollouts.truncated).sum()
        means["tokens_masked"] = masked / max(len(rollouts.tokens), 1)
    numbers = host_numbers(means)
    if (drawn := batch.frac_drawn) < 1:
        numbers |= {name: numbers[name] / drawn for name in ("response_length_mean", "truncated")}

    def total(name: str, of: Sequence[UpdateMetrics] = updates) -> float:
        return sum(getattr(update, name) for update in of)

    for name in ("loss", "grad_norm"):
        numbers[name] = total(name) / len(updates)
    for name in TOKEN_METRICS:
        # in later updates the policy's change would look like an error of the rollout engine
        read = updates[:1] if name == "logprob_diff" else updates
        num_targets = total("num_targets", read)
        numbers[name] = total(name, read) / num_targets if num_targets else float(name == "ratio")
    own = dict[str, float]()
    for name in dict.fromkeys(name for update in updates for name in update.own):
        values = [update.own[name] for update in updates if name in update.own]
        own[name] = sum(values) if isinstance(values[0], int) else sum(values) / len(values)
    alone = total("num_tokens_alone")
    return {
        "step": batch.step,
        **numbers,
        "lr": lr,
        "num_sequences_trained": total("num_sequences"),
        "tokens_shared": 1 - total("num_tokens") / alone if alone else 0.0,
        "num_tokens": batch.num_tokens,
        "tokens_per_second": batch.num_tokens / (batch.rollout_seconds + train_seconds),
        "rollout_seconds": batch.rollout_seconds,
        "train_seconds": train_seconds,
        **own,
    }


def summary(record: dict[str, float]) -> str:
    more = f"kl {record['kl']:.3g}  " if record["kl"] else ""
    if "lag" in record:
        waits = {"training": record["wait_seconds"], "sampling": record["sampler_wait_seconds"]}
        longer = max(waits, key=waits.__getitem__)
        more += f"{longer} waits {waits[longer]:.1f} s  "
    more += f"draws {record['draws_mean']:.1f}  " if "draws_mean" in record else ""
    return (
        f"reward {record['reward_mean']:.3f}  solved {record['frac_prompts_solved']:.3f}  "
        f"{more}entropy {record['entropy']:.3f}  length {record['response_length_mean']:.1f}  "
        f"grad {record['grad_norm']:.2f}  {record['tokens_per_second']:,.0f} sampled tokens/s"
    )


@dataclass
class WarmStart:
    """Trains the policy on one solution per prompt."""

    task: Task
    learner: Learner  # with the loss "reinforce", of advantages 1
    options: WarmStartOptions

    def steps(self, done: int = 0) -> Iterator[tuple[int, float]]:
        options, size = self.options, self.options.sft_batch
        rate = LearningRate(options.sft_lr, options.sft_steps, warmup_steps=10)
        for step in range(done + 1, rate.steps + 1):
            prompts, solutions = self.task.demonstrations((step - 1) * size, size)
            samples = Samples(prompts, solutions).to(self.learner.device)
            ones = torch.ones_like(samples.prompts.ids, dtype=torch.float32)
            self.learner.forward_backward(samples, ones, samples.sequences)
            when = f"warm start step {step}"
            yield step, self.learner.optim_step(when=when, lr=rate.at(step)).loss
