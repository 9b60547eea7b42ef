"""Warnings about training that goes wrong although all numbers are finite."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from maxrl_fast.evaluation.scores import PASS, label_of, score_of

STEPS = 10  # a condition must hold over this many steps
OF_REWARDS = ("no_reward", "all_solved", "zero_variance_groups", "equal_rewards")
SENTENCES = {  # by kind, of the value and the number that it is compared with
    "equal_rewards": "in each group of the first 3 steps all rewards were equal, so nothing is "
    "learned yet: look at some responses and their rewards",
    "no_reward": "every reward of the last 10 steps was 0, so nothing is learned: look at some "
    "responses, raise --rollouts, use easier prompts or a longer warm start",
    "all_solved": "every rollout of the last 10 steps was correct, so nothing is learned: use "
    "harder prompts",
    "truncated": "{:.0%} of the responses of the last 10 steps were truncated at "
    "--max-new-tokens: raise it, or use prompts with shorter solutions",
    "zero_variance_groups": "{:.0%} of the groups of the last 10 steps had equal rewards and zero "
    "advantage: raise --rollouts, or use prompts that are neither too easy nor too hard for the "
    "policy",
    "entropy": "the entropy fell to {:.3g} nats per token from {:.3g} in the first steps, so "
    "rollouts hardly differ: lower --lr, or set --entropy-coef or --kl-coef",
    "logprob_diff": "log-probs of rollout and training differ by {:.3g} nats per token, {:.3g} in "
    "the first steps: set --correction tis, or --dtype float32",
    "grad_norm": "the gradient norm is {:.3g}, the median of the steps before is {:.3g}; it is "
    "clipped, but if this happens often, lower --lr",
    "grad_clipped": "in each of the last 10 steps the gradient norm was at least {:.0f} times "
    "--clip-grad {:g}, so its size no longer counts: lower --lr, or raise --clip-grad",
}
Record = dict[str, float]


@dataclass(frozen=True)
class HealthWarning:
    """One line of warnings.jsonl."""

    kind: str  # the rule's name
    value: float
    message: str


@dataclass
class Health:
    """Checks the last ten steps of metrics.jsonl, in some rules against the first ten."""

    # whether rollouts with equal rewards are learned from, as from a teacher
    needs_no_rewards: bool = False
    clip_grad: float = float("inf")
    _first: list[Record] = field(default_factory=list)
    _recent: list[Record] = field(default_factory=list)
    # steps since the rule's condition last held
    _absent: dict[str, int] = field(default_factory=dict)

    def observe(self, record: Record) -> list[HealthWarning]:
        """Return the warnings that start at this step, after ten steps without them."""
        self._first = [*self._first, record][:STEPS]
        self._recent = [*self._recent, record][-2 * STEPS :]
        present = {x.kind: x for x in broken_rules(self._first, self._recent, self.clip_grad)}
        if self.needs_no_rewards:
            present = {kind: x for kind, x in present.items() if kind not in OF_REWARDS}
        begun = [x for kind, x in present.items() if self._absent.get(kind, STEPS) >= STEPS]
        self._absent = {kind: steps + 1 for kind, steps in self._absent.items()}
        self._absent |= dict.fromkeys(present, 0)
        return begun


def broken_rules(
    first: list[Record], recent: list[Record], clip_grad: float = float("inf")
) -> list[HealthWarning]:
    """Return the warnings whose conditions hold at the last of the recent steps, up to 20."""
    last, before, norm = recent[-STEPS:], recent[:-1], recent[-1]["grad_norm"]

    def mean(name: str, records: list[Record] = last) -> float:
        return fmean(record[name] for record in records)

    def every(name: str, value: float) -> bool:
        return all(record[name] == value for record in last)

    equal = every("frac_groups_zero_variance", 1)
    failed, solved = equal and every("reward_mean", 0), equal and every("pass_at_1", 1)
    if len(recent) < STEPS:
        rules = [("equal_rewards", mean("reward_mean"), 0.0, equal and len(recent) == 3)]
    else:
        equals, usual = mean("frac_groups_zero_variance"), median(r["grad_norm"] for r in before)
        truncated, entropy, start = mean("truncated"), mean("entropy"), mean("entropy", first)
        difference, at_first = mean("logprob_diff"), mean("logprob_diff", first)
        clipped = min(record["grad_norm"] for record in last) / clip_grad
        rules = [  # the kind, the value, the number that it is compared with, the condition
            ("no_reward", 0.0, 0.0, failed),
            ("all_solved", 1.0, 0.0, solved),
            ("truncated", truncated, 0.5, truncated > 0.5),
            ("zero_variance_groups", equals, 0.9, equals > 0.9 and not (failed or solved)),
            ("entropy", entropy, start, entropy < 0.1 * start),
            ("logprob_diff", difference, at_first, difference > max(0.02, 3 * at_first)),
            ("grad_norm", norm, usual, norm > 10 * usual > 0),
            ("grad_clipped", clipped, clip_grad, clipped > 50),
        ]
    return [
        HealthWarning(kind, value, SENTENCES[kind].format(value, other))
        for kind, value, other, is_broken in rules
        if is_broken
    ]


def verdict(evaluations: Mapping[int, Mapping[str, Any]]) -> str:
    """Return what to do where the score of one sample fell from the first evaluation to the last,
    by more than two standard errors of a rate on so many prompts, a mean reward by a tenth; "" if
    it did not. `evaluations` are by step, in order."""
    score = score_of(evaluations.values())
    rates = {step: record.get(score, record[PASS])["1"] for step, record in evaluations.items()}
    first, *_, last = rates.values()
    num_prompts = next(iter(evaluations.values()))["num_prompts"]
    if first - last <= (num_prompts**-0.5 if score == PASS else 0.1 * abs(first)):
        return ""
    best = max(rates, key=rates.__getitem__)
    return f"{label_of(score, 1)} fell by {first - last:.3f}: the best step is {best}; lower --lr"
