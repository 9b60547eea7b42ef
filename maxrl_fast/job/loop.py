"""The loop around the training step: warm start, steps, evaluations, checkpoints, logs."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from maxrl_fast.config.resolve import evaluation_schedule
from maxrl_fast.evaluation import label_of, score_of
from maxrl_fast.evaluation.evaluator import Evaluation, Evaluator, over_sets
from maxrl_fast.evaluation.kept_samples import KeptSamples, prompt_records, sample_lines
from maxrl_fast.job.build import RunContext
from maxrl_fast.job.checkpoints import Checkpoints
from maxrl_fast.job.health import Health
from maxrl_fast.job.rollout_records import rollout_records
from maxrl_fast.job.run_files import RunFiles
from maxrl_fast.job.screen import Screen
from maxrl_fast.runtime.files import RunFolder
from maxrl_fast.training.metrics import summary
from maxrl_fast.training.objectives.objective import has_teacher
from maxrl_fast.training.trainer import StepRecord


@dataclass
class RunLoop:
    """Does what `progress` says is left. It evaluates before the first step, after the last, and as
    `schedule` says between them."""

    context: RunContext
    checkpoints: Checkpoints
    files: RunFiles
    screen: Screen

    def __post_init__(self) -> None:
        run, loss = self.context, self.context.config.loss
        self.clock, self.ranks, self.trainer = run.clock, run.ranks, run.trainer
        self.progress = self.checkpoints.progress
        self.schedule, self.evaluators = evaluation_schedule(run.config, run.task), run.evaluators
        needs_no_rewards = bool(loss.kl_coef) and has_teacher(loss)
        self.health = Health(needs_no_rewards, run.config.optimizer.clip_grad)
        self.expects_binary = run.objective.needs.expects_binary
        self.num_steps = run.config.optimizer.steps

    def run(self) -> None:
        for metrics in RunFolder(self.files.out).log("metrics") if self.ranks.is_first else ():
            self.health.observe(metrics)
        progress, checkpoints, trainer = self.progress, self.checkpoints, self.trainer
        if progress.phase == "warm start":
            with self.clock("warm start"):
                self._warm_start()
            progress.begin_training(self.context.warm_start.num_prompts)
        learner = trainer.learner
        if 0 < self.num_steps <= progress.step:
            done = f"it had done all its {self.num_steps} steps"
            self.screen.info(f"the run is finished: {done}; the last evaluation is repeated")
        learner.copy_policy()
        checkpoints.begin(learner)
        trainer.engine.load_weights(learner.model)
        if progress.step == 0:
            checkpoints.save()
        with checkpoints.kept():
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
        if not (total := warm_start.num_steps):
            return
        self.checkpoints.begin(warm_start.learner)
        with self.screen.stage("warm start", total, lines=10, done=progress.step) as stage:
            for step, loss in warm_start.steps(done=progress.step):
                progress.step = step
                stage.advance(step, f"loss {loss:.3f}")
                self.checkpoints.safe_point()

    def _keep(self, n: int, record: StepRecord) -> None:
        batch, progress, run = record.batch, self.progress, self.context
        if count := run.config.evaluation.keep_rollouts:
            for rollout in rollout_records(run.task, batch, record.advantages, count, self.ranks):
                self.files.write("rollouts", rollout)
        self.files.write("metrics", record.metrics)
        if batch.warning:
            self.screen.warning(batch.warning)
        for warning in self.health.observe(record.metrics):
            self._warn(n, warning)
        if self.expects_binary:
            self._check_binary(n, batch.all_rewards)
        progress.step = n
        progress.next_prompt += batch.num_sampled
        progress.tokens["rollout"] += batch.num_tokens

    def _check_binary(self, n: int, rewards: Tensor) -> None:
        others = rewards[(rewards != 0) & (rewards != 1) & ~rewards.isnan()]
        if len(others):
            self.expects_binary, value = False, float(others[0])
            name = self.context.config.chosen.objective
            said = (
                f"a reward is {value:g}, but {name} is made for rewards of 0 or 1 and estimates "
                "something else with others: use maxrl or maxpo, or set --reward-threshold"
            )
            self._warn(n, {"kind": "not_binary", "value": value, "message": said})

    def _warn(self, n: int, warning: dict[str, Any]) -> None:
        self.files.write("warnings", {"step": n, **warning})
        self.screen.warning(f"step {n}: {warning['message']}")

    def _evaluate_if_due(self) -> None:
        step, every, most = self.progress.step, self.schedule.every, self.schedule.num_prompts
        is_end = step in (0, self.num_steps)
        if step in self.progress.evaluations or not (is_end or (every and step % every == 0)):
            return
        if self.trainer.ahead:
            self.trainer.load_engine()
        done, rates, samples = dict[str, Evaluation](), dict[str, Any](), list[dict[str, Any]]()
        for name, evaluator in self.evaluators.items():
            if not is_end and most < evaluator.num_prompts:
                evaluator = replace(evaluator, num_prompts=most)
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
        self.files.write_samples(samples, step)
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
        most, between = max(len(x.rewards) for x in done.values()), self.schedule
        is_part = between.every and between.num_prompts < most
        total = sum(x.num_prompts for x in self.evaluators.values())
        for limit in (most, between.num_prompts) if is_part else (most,):
            records = {name: x.first(limit).record() for name, x in done.items()}
            size = sum(record["num_prompts"] for record in records.values())
            which = f"  ({size} of {total} prompts)" if size < total else ""
            sets = [(f"{name}  ", record) for name, record in records.items() if len(records) > 1]
            for name, record in [*sets, ("mean of sets  " * bool(sets), over_sets(records))]:
                shown = (f"{label_of(score, k)} {x:.3f}" for k, x in record[score].items())
                screen.info(f"step {step}: {name}{'  '.join(shown)}{which}")
        for line in sample_lines(samples[0], screen.console.width) if samples else ():
            screen.info(line)
