"""Warnings about training that goes wrong although all numbers are finite."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from maxrl_fast.evaluation.scores import PASS, label_of, score_of

STEPS = 10  # a condition must hold over this many steps
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
        begun, records = (
            list[dict[str, Any]](),
            (self._records[:STEPS], self._records[-2 * STEPS :]),
        )
        for kind, holds, value, message in conditions(*records, self.clip_grad):
            if holds and not (self.needs_no_rewards and kind == "zero_variance_groups"):
                if self._step - self._held.get(kind, -STEPS) > STEPS:
                    begun.append({"kind": kind, "value": value, "message": message})
                self._held[kind] = self._step
        return begun


def conditions(
    first: list[Record], recent: list[Record], clip_grad: float
) -> Iterator[tuple[str, bool, float, str]]:
    """Yield the kind of each warning, whether it holds at the last of the recent steps, its value
    and its sentence."""
    last, norms = recent[-STEPS:], [record["grad_norm"] for record in recent]

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
    now, usual, clipped = norms[-1], median(norms[:-1]), min(norms[-STEPS:]) / clip_grad
    said = f"the gradient norm is {now:.3g}, the median of the steps before is {usual:.3g}: if "
    yield "grad_norm", now > 10 * usual > 0, now, said + "this happens often, lower --lr"
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
