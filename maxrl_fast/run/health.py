"""Signs that training goes wrong while every number is finite: each with its value, and what to do."""

from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, median

STEPS = 10  # over which a sign must last
Record = dict[str, float]


@dataclass(frozen=True)
class Sign:
    kind: str
    value: float
    message: str


@dataclass
class Health:
    """Reads the records of metrics.jsonl in turn, and looks at the last ten against the first ten of the run."""

    _first: list[Record] = field(default_factory=list)
    _recent: list[Record] = field(default_factory=list)
    _absent: dict[str, int] = field(default_factory=dict)  # steps since a sign was there

    def observe(self, record: Record) -> list[Sign]:
        """The signs that begin with this step; one that lasts, or comes back within ten steps, is told once."""
        self._first = [*self._first, record][:STEPS]
        self._recent = [*self._recent, record][-2 * STEPS :]
        if len(self._recent) < STEPS:
            return []
        found = {kind: rule(self._first, self._recent) for kind, rule in SIGNS.items()}
        present = {kind: sign for kind, sign in found.items() if sign is not None}
        begun = [Sign(kind, *sign) for kind, sign in present.items() if self._absent.get(kind, STEPS) >= STEPS]
        self._absent = {kind: steps + 1 for kind, steps in self._absent.items()} | dict.fromkeys(present, 0)
        return begun


def _mean(name: str, records: list[Record]) -> float:
    return fmean(record[name] for record in records)


def _no_reward(first: list[Record], recent: list[Record]) -> tuple[float, str] | None:
    if any(record["reward_mean"] != 0 or record["frac_groups_dead"] < 1 for record in recent[-STEPS:]):
        return None
    return 0.0, (
        f"every reward of the last {STEPS} steps was 0, so nothing is learned: look at some responses, raise --rollouts, take "
        "easier prompts or a longer warm start"
    )


def _all_solved(first: list[Record], recent: list[Record]) -> tuple[float, str] | None:
    if any(record["pass_at_1"] < 1 or record["frac_groups_dead"] < 1 for record in recent[-STEPS:]):
        return None
    return 1.0, f"every rollout of the last {STEPS} steps was solved, so nothing is learned: take harder prompts"


def _truncated(first: list[Record], recent: list[Record]) -> tuple[float, str] | None:
    truncated = _mean("truncated", recent[-STEPS:])
    if truncated <= 0.5:
        return None
    return truncated, (
        f"{truncated:.0%} of the responses of the last {STEPS} steps were cut at --max-new-tokens: raise it, or shorten what "
        "the prompts ask for"
    )


def _dead_groups(first: list[Record], recent: list[Record]) -> tuple[float, str] | None:
    dead, reward = _mean("frac_groups_dead", recent[-STEPS:]), _mean("reward_mean", recent[-STEPS:])
    if dead <= 0.9 or _no_reward(first, recent) or _all_solved(first, recent):
        return None
    return dead, (
        f"{dead:.0%} of the prompts of the last {STEPS} steps had rollouts of equal reward and taught nothing (mean reward "
        f"{reward:.3f}): raise --rollouts, or take prompts of the policy's level"
    )


def _entropy(first: list[Record], recent: list[Record]) -> tuple[float, str] | None:
    entropy, start = _mean("entropy", recent[-STEPS:]), _mean("entropy", first)
    if entropy >= 0.1 * start:
        return None
    return entropy, (
        f"the entropy fell to {entropy:.3g} nats a token from {start:.3g} in the first steps, so rollouts hardly differ: lower "
        "--lr, or set --entropy-coef or --kl-coef"
    )


def _logprob_diff(first: list[Record], recent: list[Record]) -> tuple[float, str] | None:
    logprob_diff, start = _mean("logprob_diff", recent[-STEPS:]), _mean("logprob_diff", first)
    if logprob_diff <= max(0.02, 3 * start):
        return None
    return logprob_diff, (
        f"log-probs of rollout and training differ by {logprob_diff:.3g} nats a token, {start:.3g} in the first steps: set "
        "--importance-cap 2, or --dtype float32"
    )


def _grad_norm(first: list[Record], recent: list[Record]) -> tuple[float, str] | None:
    *before, norm = (record["grad_norm"] for record in recent)
    usual = median(before)
    if not norm > 10 * usual > 0:
        return None
    return norm, (
        f"the gradient's norm is {norm:.3g}, {norm / usual:.0f} times the median of the {len(before)} steps before; it is "
        "clipped, but if this comes often, lower --lr"
    )


SIGNS: dict[str, Callable[[list[Record], list[Record]], tuple[float, str] | None]] = {
    "no_reward": _no_reward,
    "all_solved": _all_solved,
    "truncated": _truncated,
    "dead_groups": _dead_groups,
    "entropy": _entropy,
    "logprob_diff": _logprob_diff,
    "grad_norm": _grad_norm,
}
