"""PACS's Proposition A.2 on enumerated bandits: the policy that minimizes the loss, exactly.

    python examples/papers/pacs_bandit.py

The proposition: with a score psi = beta log(pi / pi_ref) the minimum is the Gibbs policy
pi_ref exp(logit(R) / beta), R the mean label. For labels of 0 and 1 logit(R) is infinite. Here all
groups of N actions are enumerated, and the loss is minimized over groups of the reference, as the
paper's code does, and over groups of the policy itself, as its expectations say.
"""

import sys
from dataclasses import dataclass
from functools import partial
from itertools import combinations_with_replacement, product
from typing import Any

import torch
from matplotlib.figure import Figure
from runner import Settings, cell, run
from torch import Tensor

from maxrl_fast.errors import InputError
from maxrl_fast.ops import pacs_loss

SAMPLERS, SCORES = ("reference", "policy"), ("rloo", "dr_grpo", "naive", "grpo")
FLIPS = (0.0, 0.1)  # probabilities that a label is flipped
CORRECT = 2  # actions


@dataclass(frozen=True)
class PacsBanditSettings(Settings):
    """Minima of PACS's loss on enumerated bandits: a minute on one core."""

    seeds: int = 5
    """Bandits, with reference logits ~ N(0, 1)."""
    actions: int = 5
    """Actions; the first two are correct."""
    rollouts: int = 3
    """N: actions ** N groups are enumerated."""
    beta: float = 1.0
    """beta of the score."""


@dataclass(frozen=True)
class Problem:
    reference: Tensor  # [A] float64, log-probabilities
    groups: Tensor  # [G, N], all of them
    beta: float
    sampler: str
    score: str
    flip: float

    def loss(self, policy: Tensor) -> Tensor:
        """Return the expected loss of log-probabilities [A]; the gradient of pacs_loss, a mean over
        groups, is scaled to each group's probability."""
        chance = (policy if self.sampler == "policy" else self.reference)[self.groups].sum(1).exp()
        proxies = self.beta * (policy - self.reference)[self.groups].flatten()
        labels, n = (self.groups < CORRECT).double().flatten(), self.groups.shape[1]
        parts = list[Tensor]()
        for part, outcomes in ((1 - self.flip, labels), (self.flip, 1 - labels)):
            r = proxies.detach().requires_grad_()
            loss, metrics = pacs_loss(r, outcomes, n, score=self.score, weight="none")
            (slopes,) = torch.autograd.grad(loss, r)
            slopes = slopes * (len(chance) * chance.detach()).repeat_interleave(n)
            linear = (slopes * (proxies - proxies.detach())).sum()  # 0, with the gradient
            parts.append(part * (chance @ metrics["cross_entropy"].view(-1, n).mean(1) + linear))
        return torch.stack(parts).sum()

    def descend(self, start: Tensor) -> Tensor:
        logits = start.clone().requires_grad_()
        exact: dict[str, Any] = {"tolerance_grad": 1e-10, "tolerance_change": 1e-13}
        search = torch.optim.LBFGS([logits], line_search_fn="strong_wolfe", max_iter=100, **exact)

        def closure() -> Tensor:
            search.zero_grad()
            loss = self.loss(logits.log_softmax(-1))
            loss.backward()
            return loss

        search.step(closure)
        return logits.detach().log_softmax(-1)

    def minimum(self) -> dict[str, Any]:
        starts = [self.reference]
        if self.sampler == "policy":  # which has several minima
            peaks = combinations_with_replacement(4 * torch.eye(len(self.reference)), 2)
            starts += [self.reference + x + y for x, y in peaks]
        policy = min(map(self.descend, starts), key=self.loss)
        labels = (torch.arange(len(policy)) < CORRECT).double()
        x = torch.stack([policy, self.reference])
        gap = -(x[:, :CORRECT].logsumexp(1) - x[:, CORRECT:].logsumexp(1)).diff()
        logit = -torch.tensor(max(self.flip, 1e-12)).logit() * (2 * labels - 1)
        found = {
            "loss": self.loss(policy),
            "correct": policy.exp() @ labels,
            "gap": self.beta * gap,
        }
        # the reference with the minimum's odds of a correct action, and the proposition's policy
        for name, x in (("from_tilt", gap * labels), ("from_gibbs", logit / self.beta)):
            found[name] = (policy.exp() - (self.reference + x).softmax(-1)).abs().sum() / 2
        return {"policy": policy.exp().tolist()} | {name: float(x) for name, x in found.items()}


def experiment(settings: PacsBanditSettings) -> dict[str, Any]:
    if settings.actions <= CORRECT:
        raise InputError(f"--actions must be above {CORRECT}, got {settings.actions}")
    groups = torch.cartesian_prod(*[torch.arange(settings.actions)] * settings.rollouts)
    draws = torch.Generator().manual_seed(settings.seed)
    shape = settings.seeds, settings.actions
    references = torch.randn(shape, generator=draws, dtype=torch.float64).log_softmax(-1)
    minima = dict[str, list[dict[str, Any]]]()
    for case in product(SAMPLERS, SCORES, FLIPS):
        problems = (Problem(x, groups, settings.beta, *case) for x in references)
        minima[" ".join(map(str, case))] = [x.minimum() for x in problems]
    for label, found in minima.items():
        means = {
            x: cell(torch.tensor([one[x] for one in found])) for x in found[0] if x != "policy"
        }
        print(f"{label:<22}", *(f"{name} {mean:<15}" for name, mean in means.items()))
    return {"references": references.exp(), "minima": minima}


def draw(record: dict[str, Any]) -> Figure:
    """Draw the first bandit's policies, for exact labels."""
    results, figure = record["results"], Figure(figsize=(11, 4), layout="constrained")
    for axes, sampler in zip(figure.subplots(1, 2, sharey=True), SAMPLERS, strict=True):
        for i, score in enumerate(SCORES):
            policy = results["minima"][f"{sampler} {score} 0.0"][0]["policy"]
            x = [action + 0.2 * (i - 1.5) for action in range(len(policy))]
            axes.bar(x, policy, 0.2, label=score)
        axes.plot(results["references"][0], "k_", markersize=40, label="reference")
        axes.set(title=f"groups of the {sampler}", xlabel="action; 0 and 1 are correct")
        axes.legend(markerscale=0.4)
    return figure


main = partial(run, "pacs_bandit", PacsBanditSettings, experiment, draw)

if __name__ == "__main__":
    sys.exit(main())
