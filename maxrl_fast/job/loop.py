"""The loop around the steps of a run: its warm start, its evaluations and what it keeps, and
warnings about training that goes wrong although all numbers are finite."""

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.algorithms.estimators.of_training import has_teacher
from maxrl_fast.config.resolve import evaluation_schedule
from maxrl_fast.evaluation import PASS, label_of, score_of
from maxrl_fast.evaluation.evaluator import Evaluation, Evaluator, over_sets
from maxrl_fast.evaluation.kept_samples import (
    KeptSamples,
    finite,
    prompt_records,
    sample_lines,
    sample_records,
)
from maxrl_fast.evaluation.tables import add_scores, new_table
from maxrl_fast.job.build import RunContext
from maxrl_fast.job.checkpoints import Checkpoints
from maxrl_fast.job.run_files import RunFiles
from maxrl_fast.job.screen import Screen
from maxrl_fast.records import Prompts, Samples
from maxrl_fast.runtime.files import RunFolder
from maxrl_fast.tasks import Task, response_texts
from maxrl_fast.training.collect import CPU, RolloutBatch
from maxrl_fast.training.trainer import StepRecord, summary

STEPS = 10  # a condition must hold over this many steps
Record = dict[str, float]


@dataclass
class Health:
    """Checks the last ten steps of metrics.jsonl, in some rules against the first ten."""

    # whether rollouts with equal rewards are learned from, as from a teacher
    needs_no_rewards: bool = False
    clip_grad: float = float("inf")
    _records: list[Record] = field(default_factory=list)  # the first ten and the last ten
    _held: dict[str, int] = field(default_factory=dict)  # the last step of each condition
    _step: int = 0

    def observe(self, record: Record) -> list[dict[str, Any]]:
        """Return the warnings that start at this step, after ten steps without them, as in
        warnings.jsonl."""
        self._step += 1
        self._records.append(record)
        del self._records[STEPS:-STEPS]
        begun, first = list[dict[str, Any]](), self._records[:STEPS]
        found = conditions(first, self._records[-STEPS:], self.clip_grad)
        for kind, holds, value, message in found:
            if holds and not (self.needs_no_rewards and kind == "zero_variance_groups"):
                if self._step - self._held.get(kind, -STEPS) > STEPS:
                    begun.append({"kind": kind, "value": value, "message": message})
                self._held[kind] = self._step
        return begun


def conditions(
    first: list[Record], last: list[Record], clip_grad: float
) -> Iterator[tuple[str, bool, float, str]]:
    """Yield the kind of each warning, whether it holds over the last steps, its value and its
    sentence."""

    def mean(name: str, records: list[Record] = last) -> float:
        return fmean(record[name] for record in records)

    count, equal = len(last), mean("frac_groups_zero_variance")
    said = f"{equal:.0%} of the groups of {count} steps had equal rewards, of mean "
    said += f"{mean('reward_mean'):.3g}, and zero advantage: look at some responses; raise "
    said += "--rollouts, or use prompts that are neither too easy nor too hard"
    is_start = equal == 1 and count == 3
    yield "zero_variance_groups", is_start or (equal > 0.9 and count == STEPS), equal, said
    if count < STEPS:
        return
    cut = mean("truncated")
    said = f"{cut:.0%} of the responses of 10 steps were truncated: raise --max-new-tokens"
    yield "truncated", cut > 0.5, cut, said
    now, then = mean("entropy"), mean("entropy", first)
    said = f"the entropy fell to {now:.3g} nats per token from {then:.3g}: lower --lr, or set "
    yield "entropy", now < 0.1 * then, now, said + "--entropy-coef or --kl-coef"
    now, then = mean("logprob_diff"), mean("logprob_diff", first)
    said = f"log-probs of rollout and training differ by {now:.3g} nats per token, {then:.3g} at "
    said += "first: set --correction tis, or --dtype float32"
    yield "logprob_diff", now > max(0.02, 3 * then), now, said
    clipped = min(record["grad_norm"] for record in last) / clip_grad
    said = f"in 10 steps the gradient norm was at least {clipped:.0f} times --clip-grad "
    said += f"{clip_grad:g}: lower --lr, or raise --clip-grad"
    yield "grad_clipped", clipped > 50, clipped, said


def verdict(evaluations: Mapping[int, Mapping[str, Any]]) -> str:
    """Return what to do where the score of one sample fell from the first evaluation to the last by
    more than two standard errors of a rate on so many prompts, or a mean reward by a tenth."""
    score = score_of(evaluations.values())
    rates = {step: record.get(score, record[PASS])["1"] for step, record in evaluations.items()}
    (first, *_, last), [one, *_] = rates.values(), evaluations.values()
    if first - last <= (one["num_prompts"] ** -0.5 if score == PASS else 0.1 * abs(first)):
        return ""
    best = max(rates, key=rates.__getitem__)
    return f"{label_of(score, 1)} fell by {first - last:.3f}: the best step is {best}; lower --lr"


def rollout_records(
    task: Task, batch: RolloutBatch, advantages: Tensor, count: int
) -> list[dict[str, Any]]:
    """Return `count` >= 1 rollouts of a step as lines of rollouts.jsonl, group by group.
    `advantages` [S] are the update's."""
    samples = Samples(batch.prompts, batch.raw_rollouts).to(CPU)
    num, lengths = batch.num_rollouts, samples.rollouts.lengths.tolist()
    sequences = [g * num + i for g in first_groups(samples.prompts) for i in range(num)]
    if batch.frac_drawn < 1:
        sequences = [s for s in sequences if lengths[s]]
    del sequences[count:]
    rewards = batch.task_rewards.masked_fill(~batch.has_reward, torch.nan).flatten()
    records = [*sample_records(task, samples, rewards.cpu(), batch.components, sequences)]
    for record, x in zip(records, advantages.detach()[sequences].tolist(), strict=True):
        record["advantage"] = None if record["reward"] is None else finite(x)
    return [{"step": batch.step, **record} for record in records]


def first_groups(prompts: Prompts) -> list[int]:
    """Return the indices of prompts on the host, by checksums of their tokens, which are the same
    in every epoch."""
    parts = prompts.tokens.split(prompts.lengths.tolist())
    checksums = [zlib.crc32(tokens.numpy().tobytes()) for tokens in parts]
    return sorted(range(len(checksums)), key=checksums.__getitem__)


@dataclass
class RunLoop:
    """Does what `progress` says is left. It evaluates before the first step, after the last, and
    every `every` steps between them, on at most `most` prompts of a set."""

    context: RunContext
    checkpoints: Checkpoints
    files: RunFiles
    screen: Screen

    def __post_init__(self) -> None:
        run, options, loss = self.context, self.context.config.optimizer, self.context.config.loss
        self.clock, self.ranks, self.trainer = run.clock, run.ranks, run.trainer
        self.progress, self.num_steps = self.checkpoints.progress, options.steps
        self.every, self.most = evaluation_schedule(run.config, run.task)
        self.evaluators = run.evaluators
        self.health = Health(bool(loss.kl_coef) and has_teacher(loss), options.clip_grad)
        self.expects_binary = run.objective.needs.expects_binary
        # a prompt's rollouts since a success; prompts that fail by form
        self.failed, self.by_form = Counter[int](), set[int]()

    def run(self) -> None:
        for metrics in RunFolder(self.files.out).log("metrics") if self.ranks.is_first else ():
            self.health.observe(metrics)
        progress, checkpoints, trainer = self.progress, self.checkpoints, self.trainer
        config = self.context.config
        if progress.phase == "warm start":
            with self.clock("warm start"):
                self._warm_start()
            progress.phase, progress.step = "training", 0
            if not config.parts["task"].get("sft_data"):  # then it has used up training prompts
                progress.next_prompt = config.warm_start.sft_steps * config.warm_start.sft_batch
        learner = trainer.learner
        if 0 < self.num_steps <= progress.step:
            done = f"it had done all its {self.num_steps} steps"
            self.screen.info(f"the run is finished: {done}; the last evaluation is repeated")
        learner.copy_policy()
        checkpoints.begin(learner)
        trainer.engine.load_weights(learner.model)
        if progress.step == 0:
            checkpoints.save()
        self._evaluate_if_due()
        with self.screen.stage("train", self.num_steps, done=progress.step) as stage:
            for n in range(progress.step + 1, self.num_steps + 1):
                record = trainer.step(n, progress.next_prompt)
                stage.advance(n, summary(record.metrics))
                self._keep(n, record)
                checkpoints.safe_point(is_last=n == self.num_steps)
                self._evaluate_if_due()
            checkpoints.wait()

    def _warm_start(self) -> None:
        warm_start, progress = self.context.warm_start, self.progress
        if not (total := warm_start.options.sft_steps):
            return
        self.checkpoints.begin(warm_start.learner)
        with self.screen.stage("warm start", total, lines=10, done=progress.step) as stage:
            for step, loss in warm_start.steps(done=progress.step):
                progress.step = step
                stage.advance(step, f"loss {loss:.3f}")
                self.checkpoints.safe_point()

    def _keep(self, n: int, record: StepRecord) -> None:
        batch, progress, run = record.batch, self.progress, self.context
        if (count := run.config.evaluation.keep_rollouts) and self.ranks.is_first:
            for rollout in rollout_records(run.task, batch, record.advantages, count):
                self.files.write("rollouts", rollout)
        self.files.write("metrics", record.metrics)
        if batch.warning:
            self.screen.warning(batch.warning)
        warnings = self.health.observe(record.metrics)
        if self.expects_binary:
            warnings += self._not_binary(batch.all_rewards)
        if self.trainer.collector.chosen and len(self.by_form) < 3:
            warnings += self._by_form(batch)
        for warning in warnings:
            self.files.write("warnings", {"step": n, **warning})
            self.screen.warning(f"step {n}: {warning['message']}")
        progress.step = n
        progress.next_prompt += batch.num_sampled
        progress.tokens["rollout"] += batch.num_tokens

    def _not_binary(self, rewards: Tensor) -> list[dict[str, Any]]:
        others = rewards[(rewards != 0) & (rewards != 1) & ~rewards.isnan()]
        if not len(others):
            return []
        self.expects_binary, value = False, float(others[0])
        said = f"a reward is {value:g}, but {self.context.config.chosen.objective} is made for "
        said += "rewards of 0 or 1 and estimates something else with others: use maxrl or maxpo, "
        said += "or set --reward-threshold"
        return [{"kind": "not_binary", "value": value, "message": said}]

    def _by_form(self, batch: RolloutBatch) -> Iterator[dict[str, Any]]:
        """Yield a warning as soon as three prompts fail by form (docs/reliability.md)."""
        task, rewards = self.context.task, batch.all_rewards.cpu()
        for g, index in enumerate(batch.prompts.ids.tolist()):
            self.failed[index] += int(rewards[g].isfinite().sum())
            if (rewards[g] > 0.5).any():
                del self.failed[index]
            elif self.failed[index] >= 200:
                own = batch.raw_rollouts.to(CPU).select(batch.sequences.view_as(rewards)[g])
                texts = zip(own.truncated.tolist(), response_texts(task, own), strict=True)
                if 2 * sum(not cut and bool(task.answer(x)) for cut, x in texts) < len(own):
                    self.by_form.add(index)
        if len(self.by_form) > 2:
            said = f"prompts {sorted(self.by_form)[:3]} fail by form: no success in 200 rollouts, "
            said += "and most of the last ones were truncated or had no answer"
            yield {"kind": "fails_by_form", "value": 3, "message": said}

    def _evaluate_if_due(self) -> None:
        step, every = self.progress.step, self.every
        is_end = step in (0, self.num_steps)
        if step in self.progress.evaluations or not (is_end or (every and step % every == 0)):
            return
        if self.trainer.ahead:
            self.trainer.load_engine()
        done, rates, samples = dict[str, Evaluation](), dict[str, Any](), list[dict[str, Any]]()
        for name, evaluator in self.evaluators.items():
            if not is_end and self.most < evaluator.num_prompts:
                evaluator = replace(evaluator, num_prompts=self.most)
            kept = KeptSamples(evaluator.task, step)
            done[name], rates[name] = self._evaluate(evaluator, kept)
            samples += kept.records
        if not self.progress.evaluations and self.ranks.is_first:
            for name, x in done.items():
                for prompt in prompt_records(self.context.task, name, len(x.rewards)):
                    self.files.write("eval_prompts", prompt)
        record = over_sets({name: evaluation.record() for name, evaluation in done.items()})
        self.progress.evaluations[step] = record
        self.files.write("eval", {"step": step, **record, **over_sets(rates)})
        if all(len(x.rewards) == self.evaluators[name].num_prompts for name, x in done.items()):
            # those of a part are not compared by prompt
            joined = Evaluation.joined(done.values())
            self.files.write("pass_rates", {"step": step, **joined.pass_counts()})
        for sample in samples:
            self.files.write("samples", sample)
        self._show(step, done, samples)
        self.checkpoints.mark_best()

    def _evaluate(
        self, evaluator: Evaluator, kept: KeptSamples
    ) -> tuple[Evaluation, dict[str, float]]:
        """Return also the metrics of the rewards."""
        scorer, when = evaluator.scorer, f"evaluation at step {self.progress.step}"
        with (
            self.clock("evaluation"),
            self.screen.stage("evaluate", evaluator.num_prompts, lines=1) as stage,
        ):
            scorer.pop_metrics()

            def after_chunk(done: int) -> None:
                stage.advance(done)
                if warning := scorer.failures(self.ranks, when)[1]:
                    self.screen.warning(warning)
                self.checkpoints.stop_point()

            found = evaluator.evaluate(after_chunk, kept.take)
        return found, scorer.pop_metrics().over(self.ranks)

    def _show(self, step: int, done: dict[str, Evaluation], samples: list[dict[str, Any]]) -> None:
        """Print an evaluation, one at an end also on the prompts of those between, and a sample."""
        score, screen = score_of(self.progress.evaluations.values()), self.screen
        most = max(len(x.rewards) for x in done.values())
        is_part = self.every and self.most < most
        total = sum(x.num_prompts for x in self.evaluators.values())
        for limit in (most, self.most) if is_part else (most,):
            records = {name: x.first(limit).record() for name, x in done.items()}
            size = sum(record["num_prompts"] for record in records.values())
            which = f"  ({size} of {total} prompts)" if size < total else ""
            sets = [(f"{name}  ", record) for name, record in records.items() if len(records) > 1]
            for name, record in [*sets, ("mean of sets  " * bool(sets), over_sets(records))]:
                shown = (f"{label_of(score, k)} {x:.3f}" for k, x in record[score].items())
                screen.info(f"step {step}: {name}{'  '.join(shown)}{which}")
        for line in sample_lines(samples[0], screen.console.width) if samples else ():
            screen.info(line)

    def show_change(self) -> None:
        """Print the first evaluation on all prompts beside the last one."""
        evaluations = sorted(self.progress.evaluations.items())
        most = max((x["num_prompts"] for _, x in evaluations), default=0)
        whole = {n: x for n, x in evaluations if x["num_prompts"] == most}
        if len(whole) > 1:
            (before, *_, after), score = whole.values(), score_of(whole.values())
            table = new_table("held-out prompts", "before", "after", "change")
            gains = {k: {"mean": x - before[score].get(k, x)} for k, x in after[score].items()}
            add_scores(table, score, (before[score], after[score]), [gains])
            self.screen.console.print(table)
            if said := verdict(whole):
                self.screen.warning(said)
