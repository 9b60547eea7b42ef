"""How many rollouts each prompt of a step gets, and which prompts it keeps.

A schedule is asked for the rollouts of a step in rounds:

    more(step, rewards, drawn)  how many each prompt gets in the next round, int64, the same on all
                                ranks; 0 for all: none. Given the rewards [n, N] of the n prompts so
                                far, NaN where not drawn or not known, and how many each has,
                                `drawn` [n]; it asks for further prompts by more than n numbers.
    metrics(...)                of the step, which replace those of the same name
    chosen(step, rewards)       the indices of the prompts that are learned from, ascending [G]
"""

from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from maxrl_fast.algorithms.estimator import Group
from maxrl_fast.algorithms.options import Code, Count, CountOrZero, NotNegative
from maxrl_fast.errors import InputError
from maxrl_fast.runtime.loading import is_code, load_code

Rule = TypeVar("Rule")


@dataclass(frozen=True)
class StdFilter:
    """RLPR's filter, with the constants of its code: docs/tasks.md, "Dynamic sampling"."""

    share: float
    average: Tensor  # [1] float64, of the learner's state; NaN at the start

    def bound(self, step: int) -> float:
        return self.share * float(self.average) if step > 10 else 0.0

    def observe(self, rewards: Tensor, step: int) -> None:
        own = deviations(rewards)
        mean = own[own.isfinite()].mean().cpu()
        if step > 5 and mean.isfinite():
            weight = 1 / (step - 5) if step <= 10 else 0.01
            self.average.nan_to_num_(float(mean)).lerp_(mean, weight)


@dataclass(frozen=True)
class DynamicSampling:
    """Replaces groups whose known rewards are all equal (DAPO, Yu et al. 2025), in at most
    `max_batches` batches of prompts; then some of them fill up the step."""

    num_prompts: int  # G
    num_rollouts: int  # N
    max_batches: int
    std_filter: StdFilter | None = None

    def is_mixed(self, step: int, rewards: Tensor) -> Tensor:
        return is_mixed(rewards, self.std_filter.bound(step) if self.std_filter else 0.0)

    def more(self, step: int, rewards: Tensor, drawn: Tensor) -> Tensor:
        is_full = int(self.is_mixed(step, rewards).sum()) >= self.num_prompts
        if is_full or len(rewards) >= self.num_prompts * self.max_batches:
            return torch.zeros_like(drawn)
        return pad(torch.zeros_like(drawn), (0, self.num_prompts), value=self.num_rollouts)

    def chosen(self, step: int, rewards: Tensor) -> Tensor:
        # Mixed groups are preferred, then earlier ones; they stay in the order of sampling.
        mixed = self.is_mixed(step, rewards)
        if self.std_filter:
            self.std_filter.observe(rewards, step)
        return torch.argsort(~mixed, stable=True)[: self.num_prompts].sort().values

    def metrics(self, step: int, rewards: Tensor, drawn: Tensor) -> dict[str, float]:
        alive = self.is_mixed(step, rewards).float().mean()
        return {"num_prompts_sampled": len(rewards), "frac_prompts_alive": float(alive)}


@dataclass
class Stopping:
    """Draws rollouts of a prompt until it has `stop_at` successes, or `most` rollouts
    (docs/objectives/maxrl.md): `block`, then each time as many as before, so that batches stay
    large.

    A class of --schedule has another `more`: a rule without bias sees of a prompt's own rollouts
    only the rewards, and does not stop before the first success."""

    num_prompts: int
    block: int
    most: int
    stop_at: int
    # of checkpoints, by name; these tensors change in place
    state: dict[str, Tensor] = field(default_factory=dict)

    def more(self, step: int, rewards: Tensor, drawn: Tensor) -> Tensor:
        if not len(drawn):
            return drawn.new_full((self.num_prompts,), self.block)
        goes_on = (rewards > 0.5).sum(1) < self.stop_at
        return torch.where(goes_on, torch.minimum(drawn, self.most - drawn), 0)

    def chosen(self, step: int, rewards: Tensor) -> Tensor:
        return torch.arange(len(rewards), device=rewards.device)

    def metrics(self, step: int, rewards: Tensor, drawn: Tensor) -> dict[str, float]:
        """Means over rollouts, and pass rates, are of the first round, which all prompts have."""
        known = rewards[:, : self.block]
        rates = (known > 0.5).float().mean(1)  # [n]
        known = known[~known.isnan()]
        draws = {"draws_mean": drawn}
        for low, high in ((-1, 0), (0, 0.25), (0.25, 0.5), (0.5, 1)):
            draws[f"draws_to_{high:g}"] = drawn[(rates > low) & (rates <= high)]
        return {
            "reward_mean": float(known.double().mean()),
            "pass_at_1": float((known > 0.5).float().mean()),
            **{name: float(own.float().mean()) for name, own in draws.items() if len(own)},
        }


@dataclass
class Carried:
    """The prompts of a step where one without a success keeps its place in the next step, for at
    most `rounds` rounds of N rollouts (docs/objectives/maxrl.md#carried-prompts).

    table: [G, 2] int64, of each place the prompt's index and its rounds so far; 0: the next prompt
    comes. It is the same on all ranks, and changes in place: checkpoints keep it.
    """

    table: Tensor
    rounds: int

    def places(self, next_prompt: int, step: int) -> tuple[list[int], int]:
        """Return the index of each place's prompt, and how many prompts are new."""
        index, rounds = self.table.T
        free = rounds == 0
        index[free] = next_prompt + torch.arange(int(free.sum()))
        return index.tolist(), int(free.sum())

    def observe(self, rewards: Tensor) -> dict[str, float]:
        """Count a round with these rewards [G, N], NaN where not known. Return metrics."""
        rounds = self.table[:, 1] + 1
        solved = (rewards > 0.5).any(1).cpu()
        ends = solved | (rounds >= self.rounds)
        self.table[:, 1] = rounds.masked_fill(ends, 0)
        means = {"rounds_mean": float(rounds[ends].float().mean())} if ends.any() else {}
        return {"carried": float((~ends).sum()), "given_up": float((ends & ~solved).sum()), **means}


class Learnability:
    """Draws prompts in proportion to p (1 - p) of the pass rate p so far, a tenth of them
    uniformly; those that were never drawn come first. A class of --draw-prompts has another
    `draw`."""

    def draw(self, table: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """Return the indices, int64 [count], of different prompts. table: [P, 2] float64, the
        rollouts and the successes of each prompt, which are halved in each epoch."""
        rollouts, successes = table.T
        rates = (successes / rollouts).nan_to_num()
        weights = rates * (1 - rates)
        shares = 0.9 * weights / weights.sum().clamp_min(1e-9) + 0.1 / len(table)
        # the first of a race at these rates is drawn by them, the next by those that are left
        speeds = shares / torch.empty_like(shares).exponential_(generator=generator)
        speeds[rollouts == 0] = torch.inf
        return speeds.argsort(descending=True, stable=True)[:count]


@dataclass
class Drawn:
    """The prompts of a step are drawn from those of the task, an epoch of P prompts at a time
    (docs/tasks.md, "Prompts drawn by their pass rate"). table: of `draw`, the same on all ranks; it
    changes in place: checkpoints keep it."""

    table: Tensor
    rule: Learnability
    num_prompts: int  # G
    seed: int

    def places(self, next_prompt: int, step: int) -> tuple[list[int], int]:
        size, count = len(self.table), self.num_prompts
        self.table *= 0.5 ** (next_prompt // size - (next_prompt - count) // size)
        generator = torch.Generator().manual_seed(seed_of(self.seed, step))
        self.index = self.rule.draw(self.table.clone(), count, generator)
        drawn = self.index.tolist()
        if not set(drawn) <= {*range(size)} or len({*drawn}) != count:
            raise InputError(
                f"--draw-prompts must return {count} different indices below {size}, got "
                f"{drawn!s:.200}"
            )
        return drawn, count

    def observe(self, rewards: Tensor) -> dict[str, float]:
        """Count rollouts with these rewards [G, N], NaN where not known, which are no success: a
        prompt whose rewards always fail is not new for ever. Return metrics."""
        counts = torch.stack([torch.ones_like(rewards), rewards > 0.5], 2).sum(1).cpu()
        seen, rates = self.table[:, 0] > 0, self.table[self.index, 1] / self.table[self.index, 0]
        self.table[self.index] += counts
        means = {"drawn_pass_rate": float(rates.nanmean())} if not rates.isnan().all() else {}
        return {"prompts_seen": float(seen.double().mean()), **means}


def seed_of(*numbers: int) -> int:
    """Mix numbers to a seed: a resumed run draws the same."""
    (mixed,) = np.random.SeedSequence(numbers).generate_state(1, np.uint64).tolist()
    return int(mixed >> 1)


Schedule = DynamicSampling | Stopping


@dataclass(frozen=True)
class ScheduleOptions:
    """How many rollouts each prompt of a step gets, and which prompts it has."""

    prompts: Count = 32
    """Prompts per step (G)."""
    rollouts: Count = 16
    """Rollouts per prompt (N)."""
    stop_at: CountOrZero = 0
    """Draw rollouts of a prompt until this many succeed, with the same gradient of MaxRL of order
    N; 0: all."""
    first_rollouts: Count = 8
    """Rollouts of every prompt at first; then as many again, up to --rollouts."""
    carry: CountOrZero = 0
    """Keep a prompt without a success for the next step, up to this many steps (R), which is
    MaxRL of order N R; 0: every step has new prompts."""
    draw_prompts: Code = "uniform"
    """How a data set's prompts are drawn: uniform, each once an epoch; learnability, by the
    variance p (1 - p) of their pass rate so far; or FILE:CLASS, a
    maxrl_fast.training.schedule.Learnability with another rule."""
    schedule: Code | None = None
    """FILE:CLASS, a maxrl_fast.training.schedule.Stopping with another rule."""
    dynamic_sampling: CountOrZero = 0
    """Most batches a step to replace groups of equal rewards (DAPO); 0: one."""
    std_filter: NotNegative = 0.0
    """Replace groups too whose rewards' standard deviation is below this share of its average over
    steps (RLPR: 0.5)."""

    def build(
        self, num_prompts: int, seed: int
    ) -> tuple[Schedule | None, Carried | Drawn | None, dict[str, Tensor]]:
        """Return how many rollouts each prompt gets (None: N), which prompts a step has (None: the
        next ones), and what checkpoints keep of both. `num_prompts`: of the task."""
        if self.carry:
            table = torch.zeros(self.prompts, 2, dtype=torch.int64)
            return None, Carried(table, self.carry), {"carried": table}
        if self.draw_prompts != "uniform":
            rule = Learnability
            if self.draw_prompts != "learnability":
                rule = _class("--draw-prompts", self.draw_prompts, rule, "uniform, learnability, ")
            table = torch.zeros(num_prompts, 2, dtype=torch.float64)
            return None, Drawn(table, rule(), self.prompts, seed), {"drawn": table}
        if self.stop_at:
            kind = _class("--schedule", self.schedule, Stopping) if self.schedule else Stopping
            stopping = kind(self.prompts, self.first_rollouts, self.rollouts, self.stop_at)
            return stopping, None, stopping.state
        if self.dynamic_sampling < 2:
            return None, None, {}
        average = torch.full((1,), torch.nan, dtype=torch.float64)
        own = StdFilter(self.std_filter, average) if self.std_filter else None
        sizes = self.prompts, self.rollouts, self.dynamic_sampling
        return DynamicSampling(*sizes, own), None, {"reward_std": average} if own else {}


def _class(flag: str, name: str, base: type[Rule], others: str = "") -> type[Rule]:
    rule: Any = load_code(flag[2:], name, "CLASS") if is_code(name) else None
    if not (isinstance(rule, type) and issubclass(rule, base)):
        wanted = f"{others}FILE.py:CLASS or package.module:CLASS"
        base_name = f"{base.__module__}.{base.__name__}"
        raise InputError(f"{flag} must be {wanted}, a class of {base_name}, got {name!r:.80}")
    return rule


def deviations(rewards: Tensor) -> Tensor:
    """Return the standard deviation [G] of groups' known rewards; inf of fewer than two."""
    group = Group(rewards.double().nan_to_num(), ~rewards.isnan())  # 0 exactly where float32 agree
    return group.std(group.rewards, 1)[:, 0]


def is_mixed(rewards: Tensor, bound: float = 0.0) -> Tensor:
    """Return the groups [G] whose known rewards [G, N] differ, with this standard deviation."""
    own = deviations(rewards)
    return own.isfinite() & (own > 0) & (own >= bound)
