"""Scores responses: by the task itself, its environments, or a source of rewards."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from math import nan
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.errors import InputError, RewardError
from maxrl_fast.records import Prompts, Rollouts, unpack
from maxrl_fast.rewards import LEFT, Outcome, Progress, RewardSource, WeightedRewards, no_progress
from maxrl_fast.rewards.models import Classifier
from maxrl_fast.rewards.options import Reward
from maxrl_fast.rewards.pool import RewardOutput, start_code
from maxrl_fast.runtime.loading import CLASSIFIER
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.tasks import Environments, EpisodeTask, Task, response_texts

CPU = torch.device("cpu")
FAILURE_KINDS = ("exception", "timeout", "crash", "memory", "invalid")
CURES = {
    "timeout": "Raise --reward-seconds and continue with --resume.",
    "memory": "Raise --reward-memory-gb and continue with --resume.",
}


class MetricAccumulator(dict[str, tuple[float, float]]):
    """Sums and counts of numbers, by the names of their means in metrics.jsonl."""

    def add(self, name: str, total: float, count: float = 1) -> None:
        known, number = self.get(name, (0.0, 0))
        self[name] = known + total, number + count

    def merge(self, others: Mapping[str, Sequence[float]]) -> None:
        for name, (total, count) in others.items():
            self.add(name, total, count)

    def over(self, ranks: Ranks) -> dict[str, float]:
        whole = MetricAccumulator()
        for sums in ranks.values(self):
            whole.merge(sums)
        return {name: total / count for name, (total, count) in whole.items()}


@dataclass
class Scorer:
    task: Task
    source: RewardSource | None  # None: the task scores, or the environments of an EpisodeTask
    max_error_rate: float = 1.0  # of one `score`, and between two calls of `failures`
    threshold: float | None = None  # rewards above it become 1, others 0; None: unchanged
    # in characters; with a longer answer or none, the reward is 0 without a call
    answer_limit: int | None = None
    # that score a part each; one gives up where its failures alone are more than all may have
    num_ranks: int = 1

    @classmethod
    def of(
        cls,
        options: Reward,
        task: Task,
        device: torch.device = CPU,
        dtype: torch.dtype = torch.float32,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        num_ranks: int = 1,
        output: RewardOutput | None = None,
    ) -> "Scorer":
        """Return that of the task, of functions in worker processes, whose output `output` gets, or
        of this process (`functions`, by name), or of reward models."""
        names = options.reward or ((task.reward,) if task.reward else ())
        sources, weights = list[RewardSource](), options.reward_weights or (1.0,) * len(names)
        with ExitStack() as on_error:
            for name in names:
                if name.startswith(CLASSIFIER):
                    sources.append(Classifier(name, device, dtype))
                else:
                    given = (functions or {}).get(name)
                    sources.append(start_code(name, given, options, output))
                on_error.callback(sources[-1].close)
            is_sum = weights not in ((), (1.0,))
            whole = WeightedRewards(sources, weights) if is_sum else next(iter(sources), None)
            on_error.pop_all()
        # a custom function sees the whole response
        limit = None if options.reward else task.answer_limit
        rate, threshold = options.max_reward_error_rate, options.reward_threshold
        return cls(task, whole, rate, threshold, limit, num_ranks)

    def __post_init__(self) -> None:
        self.weights = self.source.weights if self.source else {}
        self.components: list[dict[str, float]] = []  # [S] of the last `score`, by name
        self.messages = list[str]()  # [S] of the same: feedback, errors of tools and failures
        self._num_scored, self._failures = 0, list[Outcome]()  # since the last call of `failures`
        self._metrics = MetricAccumulator()  # since the last call of `pop_metrics`

    @property
    def can_fail(self) -> bool:
        """Whether single responses can: the task itself does not score them."""
        return self.source is not None or isinstance(self.task, EpisodeTask)

    def score(
        self,
        prompts: Prompts,
        rollouts: Rollouts,
        episodes: Environments | None = None,
        beat: Progress = no_progress,
        zero_truncated: bool = False,
    ) -> Tensor:
        """Return rewards [S] float32 of N responses to each prompt, NaN where one failed. The
        environments `episodes` end; a source gives the rewards of those that did not fail. With
        `zero_truncated`, truncated responses and their components have 0, also if they failed."""
        self.components, self.messages = [{}] * len(rollouts), [""] * len(rollouts)
        if episodes is None and self.source is None:
            rewards = self.task.score(prompts, rollouts)
            got = tuple(rewards.shape) if isinstance(rewards, Tensor) else type(rewards)
            if got != (len(rollouts),):
                raise InputError(
                    f"the task must score {len(rollouts)} responses with a tensor [S], got {got}"
                )
        else:
            outcomes = [Outcome(0.0)] * len(rollouts) if episodes is None else episodes.finish()
            if self.source is not None:
                self._ask(self.source, prompts, rollouts, outcomes, beat)
            self._num_scored += len(outcomes)
            self._failures += [outcome for outcome in outcomes if outcome.has_failed]
            self.components = [{**outcome.components} for outcome in outcomes]
            self.messages = [outcome.text or outcome.message for outcome in outcomes]
            is_left = LEFT in outcomes  # then all have failed
            found = [nan if x.reward is None or is_left else x.reward for x in outcomes]
            rewards = torch.tensor(found, dtype=torch.float32).to(rollouts.tokens.device)
        if self.threshold is not None:
            rewards = rewards.where(rewards.isnan(), (rewards > self.threshold).float())
        if zero_truncated:
            cut = rollouts.truncated
            self._metrics.add("rewards_zeroed", float((cut & (rewards != 0)).sum()), len(rewards))
            rewards = rewards.masked_fill(cut, 0.0)
            for s in cut.nonzero().flatten().tolist():
                self.components[s] = dict.fromkeys(self.components[s] or self.weights, 0.0)
        for s, reward in enumerate(rewards.tolist() if self.can_fail else ()):
            for name, value in self.components[s].items() if reward == reward else ():
                self._metrics.add(f"reward/{name}", value)
        return rewards

    def _ask(
        self,
        source: RewardSource,
        prompts: Prompts,
        rollouts: Rollouts,
        outcomes: list[Outcome],
        beat: Progress,
    ) -> None:
        """Put the source's outcomes into `outcomes` [S], of reward 0 or an episode's."""
        num_rollouts, rows = len(rollouts) // len(prompts), dict[int, dict[str, Any]]()
        columns = prompts.columns or [
            {"prompt": self.task.decode(x)} for x in unpack(prompts.tokens, prompts.lengths)
        ]
        responses, truncated = response_texts(self.task, rollouts), rollouts.truncated.tolist()
        raw = response_texts(self.task, rollouts, with_special=True) if source.wants_raw else None
        for s, response in enumerate(responses):
            row = {"truncated": truncated[s], **columns[s // num_rollouts], "response": response}
            if raw is not None:
                row["response_raw"] = raw[s]
            if self.answer_limit is not None:
                given = row["given"] = self.task.answer(response)
                self._metrics.add("answers_missing", not given)
                self._metrics.add("answers_too_long", len(given) > self.answer_limit)
                if not 0 < len(given) <= self.answer_limit:
                    continue
            rows[s] = row
        max_failures = int(self.max_error_rate * len(responses) * self.num_ranks)
        found = source.score([*rows.values()], num_rollouts, max_failures, beat)
        for s, outcome in zip(rows, found, strict=True):
            if not outcomes[s].has_failed:
                components = {**outcomes[s].components, **outcome.components}
                said = outcome.text or outcomes[s].text
                outcomes[s] = outcome._replace(components=components, text=said)
        if source.wrong_kinds:
            num_late = sum(bool(outcome.kind) and not outcome.has_failed for outcome in found)
            self._metrics.add("answers_timed_out", num_late, len(responses))

    def pop_metrics(self) -> MetricAccumulator:
        """Return this rank's components of rewards since the last call, and with an answer limit
        the fractions of answers that were not compared."""
        metrics, self._metrics = self._metrics, MetricAccumulator()
        return metrics

    def failures(self, ranks: Ranks, when: str) -> tuple[dict[str, int], str]:
        """Return the number of failed rewards on all ranks since the last call, by kind, and a
        warning with an example, "" if none failed. RewardError if too many failed."""
        if not self.can_fail:
            return {}, ""
        own = [(failure.kind, failure.message) for failure in self._failures]
        scored, of_ranks = zip(*ranks.values([self._num_scored, own]), strict=True)
        self._num_scored, self._failures = 0, []
        failed = [x for x in chain(*of_ranks) if x[0] != LEFT.kind]
        num_left = sum(map(len, of_ranks)) - len(failed)
        num_scored = sum(scored) - num_left
        by_kind = {kind: sum(x[0] == kind for x in failed) for kind in FAILURE_KINDS}
        if not failed:
            return by_kind, ""
        kinds = ", ".join(f"{kind} {count}" for kind, count in by_kind.items() if count)
        counts = f"{len(failed)} of {num_scored} rewards failed ({kinds})"
        warning = f"{when}: {counts}, for example: {failed[0][1]}"
        if num_left or len(failed) > min(self.max_error_rate * num_scored, num_scored - 1):
            limit = f"; that is more than --max-reward-error-rate {self.max_error_rate:g} allows"
            most = max(FAILURE_KINDS, key=by_kind.__getitem__)
            raise RewardError(warning + limit * (self.max_error_rate < 1), CURES.get(most, ""))
        return by_kind, warning

    def lines(self) -> list[str]:
        return self.source.lines() if self.source else []

    def close(self) -> None:
        if self.source is not None:
            self.source.close()
