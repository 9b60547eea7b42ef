"""Warnings about training that goes wrong although all numbers are finite."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from maxrl_fast.evaluation import PASS, label_of, score_of

STEPS = 10  # a condition must hold over this many steps
OF_REWARDS = ("no_reward", "all_solved", "zero_variance_groups", "equal_rewards")
SENTENCES = {  # by kind, of the value and the number that it is compared with
    "equal_rewards": "all rewards in each group of 3 steps were equal: look at some responses",
    "no_reward": "every reward of 10 steps was 0: raise --rollouts, or use easier prompts",
    "all_solved": "every rollout of 10 steps was correct: use harder prompts",
    "truncated": "{:.0%} of the responses of 10 steps were truncated: raise --max-new-tokens",
    "zero_variance_groups": "{:.0%} of the groups of 10 steps had equal rewards and zero "
    "advantage: raise --rollouts, or use prompts that are neither too easy nor too hard",
    "entropy": "the entropy fell to {:.3g} nats per token from {:.3g}: lower --lr, or set "
    "--entropy-coef or --kl-coef",
    "logprob_diff": "log-probs of rollout and training differ by {:.3g} nats per token, {:.3g} at "
    "first: set --correction tis, or --dtype float32",
    "grad_norm": "the gradient norm is {:.3g}, the median of the steps before is {:.3g}: if this "
    "happens often, lower --lr",
    "grad_clipped": "in 10 steps the gradient norm was at least {:.0f} times --clip-grad {:g}: "
    "lower --lr, or raise --clip-grad",
}
Record = dict[str, float]


@dataclass
class Health:
    """Checks the last ten steps of metrics.jsonl, in some rules against the first ten."""

    # whether rollouts with equal rewards are learned from, as from a teacher
    needs_no_rewards: bool = False
    clip_grad: float = float("inf")
    _records: list[Record] = field(default_factory=list)  # the first ten and the last twenty
    _held: dict[str, int] = field(default_factory=dict)  # the last step of each condition
    _step: int = 0

    def observe(self, record: Record) -> list[dict[str, Any]]:
        """Return the warnings that start at this step, after ten steps without them, as in
        warnings.jsonl."""
        self._step += 1
        self._records.append(record)
        del self._records[STEPS : -2 * STEPS]
        present = broken_rules(self._records[:STEPS], self._records[-2 * STEPS :], self.clip_grad)
        if self.needs_no_rewards:
            present = [x for x in present if x["kind"] not in OF_REWARDS]
        begun = [x for x in present if self._step - self._held.get(x["kind"], -STEPS) > STEPS]
        self._held |= {x["kind"]: self._step for x in present}
        return begun


def broken_rules(
    first: list[Record], recent: list[Record], clip_grad: float = float("inf")
) -> list[dict[str, Any]]:
    """Return the warnings whose conditions hold at the last of the recent steps."""
    last, norms = recent[-STEPS:], [record["grad_norm"] for record in recent]

    def mean(name: str, records: list[Record] = last) -> float:
        return fmean(record[name] for record in records)

    equal = mean("frac_groups_zero_variance")
    if len(last) < STEPS:
        rules = [("equal_rewards", equal == 1 and len(last) == 3, mean("reward_mean"), 0.0)]
    else:
        failed = equal == 1 and not any(record["reward_mean"] for record in last)
        solved = equal == 1 and mean("pass_at_1") == 1
        truncated, usual, clipped = mean("truncated"), median(norms[:-1]), min(norms[-STEPS:])
        entropy, at_first = mean("entropy"), mean("entropy", first)
        difference, before = mean("logprob_diff"), mean("logprob_diff", first)
        rules = [  # the kind, the condition, the value, the number that it is compared with
            ("no_reward", failed, 0.0, 0.0),
            ("all_solved", solved, 1.0, 0.0),
            ("truncated", truncated > 0.5, truncated, 0.5),
            ("zero_variance_groups", equal > 0.9 and not (failed or solved), equal, 0.9),
            ("entropy", entropy < 0.1 * at_first, entropy, at_first),
            ("logprob_diff", difference > max(0.02, 3 * before), difference, before),
            ("grad_norm", norms[-1] > 10 * usual > 0, norms[-1], usual),
            ("grad_clipped", clipped > 50 * clip_grad, clipped / clip_grad, clip_grad),
        ]
    return [
        {"kind": kind, "value": value, "message": SENTENCES[kind].format(value, other)}
        for kind, holds, value, other in rules
        if holds
    ]


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
