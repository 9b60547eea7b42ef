"""Warnings about training that goes wrong although all numbers are finite."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from maxrl_fast.evaluation.scores import PASS, label_of, score_of

STEPS = 10  # a condition must hold over this many steps
MOST_CLIPPED = 50  # times --clip-grad
FIRST_STEPS = 3  # after which a reward that never differs is reported
EQUAL = (
    f"in each group of the first {FIRST_STEPS} steps all rewards were equal, so nothing is learned "
    "yet: look at some responses and their rewards"
)
OF_REWARDS = ("no_reward", "all_solved", "zero_variance_groups")
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
        is_third = len(self._recent) == FIRST_STEPS and not self.needs_no_rewards
        if is_third and _has_equal_rewards(self._recent):
            return [HealthWarning("equal_rewards", record["reward_mean"], EQUAL)]
        if len(self._recent) < STEPS:
            return []
        present = broken_rules(self._first, self._recent, self.clip_grad)
        if self.needs_no_rewards:
            present = {kind: x for kind, x in present.items() if kind not in OF_REWARDS}
        begun = [kind for kind in present if self._absent.get(kind, STEPS) >= STEPS]
        self._absent = {kind: steps + 1 for kind, steps in self._absent.items()}
        self._absent |= dict.fromkeys(present, 0)
        return [HealthWarning(kind, *present[kind]) for kind in begun]


# steps until slow rewards are reported, and their least seconds per step
SLOW_STEPS, SLOW_SECONDS = 2, 1.0
MOST_TIMES = 16.0  # the largest speed-up that is proposed


@dataclass
class SlowRewards:
    """Reports once that rewards take most of the time of the steps.

    `faster` returns the option that speeds rewards up by a factor; "" if there is none."""

    faster: Callable[[float], str]
    _seconds: Record = field(default_factory=dict)  # total by stage
    _num_steps: int = 0

    def observe(self, before: Record, after: Record) -> HealthWarning | None:
        """Return a warning, at most once, from the seconds before and after a step."""
        if self._num_steps < 0:
            return None
        self._num_steps += 1
        for stage, seconds in after.items():
            self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds - before.get(stage, 0.0)
        total, reward = sum(self._seconds.values()), self._seconds.get("reward", 0.0)
        is_slow = reward >= SLOW_SECONDS * self._num_steps and reward > total / 2
        if self._num_steps < SLOW_STEPS or not is_slow:
            return None
        cure = self.faster(min(max(reward / max(total - reward, 1e-9), 2.0), MOST_TIMES))
        self._num_steps = -1
        if not cure:
            return None
        share = reward / total
        return HealthWarning("slow_rewards", share, f"{share:.0%} of the time is reward: {cure}")


def _has_equal_rewards(records: list[Record]) -> bool:
    return all(record["frac_groups_zero_variance"] >= 1 for record in records)


def broken_rules(
    first: list[Record], recent: list[Record], clip_grad: float = float("inf")
) -> dict[str, tuple[float, str]]:
    last = recent[-STEPS:]

    def mean(name: str, records: list[Record] = last) -> float:
        return fmean(record[name] for record in records)

    found: dict[str, tuple[float, str]] = {}
    has_equal_rewards = _has_equal_rewards(last)
    if has_equal_rewards and all(record["reward_mean"] == 0 for record in last):
        found["no_reward"] = (
            0.0,
            f"every reward of the last {STEPS} steps was 0, so nothing is learned: look at some "
            "responses, raise --rollouts, use easier prompts or a longer warm start",
        )
    if has_equal_rewards and all(record["pass_at_1"] >= 1 for record in last):
        found["all_solved"] = (
            1.0,
            f"every rollout of the last {STEPS} steps was correct, so nothing is learned: use "
            "harder prompts",
        )
    truncated = mean("truncated")
    if truncated > 0.5:
        found["truncated"] = (
            truncated,
            f"{truncated:.0%} of the responses of the last {STEPS} steps were truncated at "
            "--max-new-tokens: raise it, or use prompts with shorter solutions",
        )
    fraction = mean("frac_groups_zero_variance")
    if fraction > 0.9 and not {"no_reward", "all_solved"} & found.keys():
        found["zero_variance_groups"] = (
            fraction,
            f"{fraction:.0%} of the groups of the last {STEPS} steps had equal rewards and zero "
            f"advantage (mean reward {mean('reward_mean'):.3f}): raise --rollouts, or use prompts "
            "that are neither too easy nor too hard for the policy",
        )
    entropy, start = mean("entropy"), mean("entropy", first)
    if entropy < 0.1 * start:
        found["entropy"] = (
            entropy,
            f"the entropy fell to {entropy:.3g} nats per token from {start:.3g} in the first "
            "steps, so rollouts hardly differ: lower --lr, or set --entropy-coef or --kl-coef",
        )
    difference, start = mean("logprob_diff"), mean("logprob_diff", first)
    if difference > max(0.02, 3 * start):
        found["logprob_diff"] = (
            difference,
            f"log-probs of rollout and training differ by {difference:.3g} nats per token, "
            f"{start:.3g} in the first steps: set --correction tis, or --dtype float32",
        )
    *before, norm = (record["grad_norm"] for record in recent)
    usual = median(before)
    if norm > 10 * usual > 0:
        found["grad_norm"] = (
            norm,
            f"the gradient norm is {norm:.3g}, {norm / usual:.0f} times the median of the "
            f"{len(before)} steps before; it is clipped, but if this happens often, lower --lr",
        )
    least = min(record["grad_norm"] for record in last) / clip_grad
    if least > MOST_CLIPPED:
        found["grad_clipped"] = (
            least,
            f"in each of the last {STEPS} steps the gradient norm was at least {least:.0f} times "
            f"--clip-grad {clip_grad:g}, so its size no longer counts: lower --lr, or raise "
            "--clip-grad",
        )
    return found


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
