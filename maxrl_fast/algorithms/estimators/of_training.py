"""Estimators for training alone: they learn from what only a run has."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from maxrl_fast.algorithms.estimator import Ddof, Eps, Group, estimator
from maxrl_fast.algorithms.estimators.moments import OF_PROXIES, grpo
from maxrl_fast.algorithms.options import Count, CountOrZero, Help, Positive

Beta = Annotated[Positive, OF_PROXIES]
Score = Annotated[
    Literal["rloo", "grpo", "dr_grpo", "naive"],
    Help("Score of a rollout in its group whose cross-entropy PACS minimises."),
]
ClassWeight = Annotated[
    Literal["balanced", "none"],
    Help("PACS's weights of correct and wrong rollouts: balanced in every group, or none."),
]
_PACS: dict[str, Any] = {
    "of_run": True,
    "needs": "rewards 0 or 1, N >= 2 (N >= 1 with --score naive)",
    "weight": "depends on the policy",
    "binary": True,
    "centred": True,
    "min_rollouts": 1,
}


def has_teacher(options: Any) -> bool:
    """Whether the reference policy is not the policy, or reads something else."""
    return options.reference is not None or options.teacher_prompt is not None


@estimator("PACS, eq. 8, code", **_PACS)
def pacs(
    g: Group,
    old_log_ratios: Tensor,
    metrics: dict[str, Tensor],
    *,
    beta: Beta = 1.0,
    score: Score = "rloo",
    class_weight: ClassWeight = "balanced",
) -> Tensor:
    """-B beta dL/dr_i, where L is the cross-entropy of R under sigmoid(score) and r = beta
    (log-ratio to the reference); the reference is the sampling policy."""
    return -beta * _slopes(g, beta * old_log_ratios, metrics, score, class_weight)[0]


@estimator(
    "PACS, eqs. 5, 8",
    **_PACS,
    refuses={
        "pacs_paper with --reference or --teacher-prompt needs --ref-reset-interval 0, got "
        "{ref_reset_interval}": lambda c: c.ref_reset_interval and has_teacher(c),
    },
)
def pacs_paper(
    g: Group,
    ref_log_ratios: Tensor,
    metrics: dict[str, Tensor],
    *,
    beta: Beta = 1.0,
    score: Score = "rloo",
    class_weight: ClassWeight = "balanced",
    ref_reset_interval: Annotated[
        CountOrZero,
        Help(
            "Steps after which the policy becomes the reference policy of pacs_paper and the "
            "optimizer restarts; 0: never."
        ),
    ] = 50,
    baseline: Annotated[
        Literal["none", "rloo"],
        Help("Of pacs_paper's actor term: none, as printed, or the mean of the other rollouts."),
    ] = "none",
) -> Tensor:
    """-B beta dL/dr_i, where L is the cross-entropy of R under sigmoid(score) and r = beta
    (log-ratio to the reference); plus the log-likelihood of R, less --baseline; the reference is
    reset every --ref-reset-interval steps.

    The log-likelihood has no class weights: with them it would push rare correct rollouts down by
    more than the critic's term pushes them up."""
    slopes, cross_entropy = _slopes(g, beta * ref_log_ratios, metrics, score, class_weight)
    if baseline == "rloo":
        cross_entropy = g.centre(cross_entropy) * g.n / (g.n - 1).clamp_min(1)
    return -beta * slopes - cross_entropy


def _slopes(
    g: Group, proxies: Tensor, metrics: dict[str, Tensor], score: str, class_weight: str
) -> tuple[Tensor, Tensor]:
    """Return B dL/dr_i and the cross-entropy of R, [G, N] each, of proxies r [G, N]."""
    if score != "naive" and g.valid.shape[1] < 2:
        raise ValueError(f"--score {score} needs at least 2 rollouts per prompt, got 1")
    labels, is_correct, others = g.rewards, g.rewards > 0, (g.n - 1).clamp_min(1)
    psi = proxies = torch.where(g.valid, proxies, 0.0)
    factor: float | Tensor = g.n / others if score == "rloo" else 1.0
    if score != "naive":
        centred = torch.where(g.valid, g.centre(proxies), 0.0)
        if score == "grpo":
            std = (centred.square().sum(1, keepdim=True) / others).sqrt()
            factor = 1 / (std + 1e-6)
        psi = centred * factor
    correct, weights = labels.sum(1, keepdim=True), torch.ones_like(labels)
    if class_weight == "balanced":
        of_class = torch.where(is_correct, correct, g.n - correct)
        weights = torch.where((correct > 0) & (correct < g.n), g.n / (2 * of_class), 1.0)
    cross_entropy = binary_cross_entropy_with_logits(psi, labels, reduction="none")
    slopes = torch.where(g.valid, weights * (psi.sigmoid() - labels), 0.0) * factor
    if score == "grpo":  # the factor depends on the proxies too
        along = (slopes * centred).sum(1, keepdim=True) * factor / (others * std)
        slopes = slopes - torch.where(std > 0, along * centred, 0.0)
    number, num_correct, of_correct = g.n.sum(), correct.sum(), (psi * labels).sum()
    metrics |= {
        "pacs_loss": torch.where(g.valid, weights * cross_entropy, 0.0).sum().float() / number,
        "pacs_accuracy": (((psi > 0) == is_correct) & g.valid).sum() / number,
        "pacs_reward_proxy": proxies.sum() / number,
        "pacs_score_correct": of_correct / num_correct.clamp_min(1),
        "pacs_score_wrong": (psi.sum() - of_correct) / (number - num_correct).clamp_min(1),
    }
    return slopes if score == "naive" else g.centre(slopes), cross_entropy


@estimator(
    "on-policy distillation: GKD, Agarwal et al. 2024, arXiv:2306.13649; Lu et al. (Thinking "
    "Machines) 2025",
    needs="N >= 1; --reference or --teacher-prompt; no rewards",
    weight="is 0",
    of_run=True,
    loss="reinforce",
    min_rollouts=1,
    presets={"kl": "k2", "kl_coef": 1.0, "rollouts": 1},
    refuses={
        "distill needs --kl-coef above 0 and a teacher, --reference or --teacher-prompt, got "
        "kl_coef {kl_coef:g}, reference {reference} and teacher_prompt {teacher_prompt}": (
            lambda c: not (c.kl_coef and has_teacher(c))
        ),
    },
)
def distill(g: Group) -> Tensor:
    """0: only the divergence from the teacher is learned (--kl-coef)."""
    return torch.zeros_like(g.rewards)


@estimator(
    "RL-ZVP, Le et al. 2025, arXiv:2509.21880 (from the paper; no code found)",
    needs="rewards 0 or 1, N >= 1; one more forward pass over these groups",
    weight="depends on the entropies",
    of_run=True,
    binary=True,
    min_rollouts=1,
)
def rl_zvp(
    g: Group,
    lengths: Tensor,
    entropies: Callable[[Tensor], Tensor],
    *,
    alpha: Annotated[Positive, Help("Weight of the tokens' entropies, per nat.")] = 0.1,
    eps: Eps = 1e-6,
    ddof: Ddof = 1,
) -> Tensor:
    """grpo; token t of a group with equal rewards: alpha H_t where all r = 1, -alpha (max H - H_t)
    where all r = 0, H_t its entropy, max over its response.

    H_t is the entropy, in nats, of the policy's distribution of token t. Other groups have the
    advantages of grpo, with its eps and ddof."""
    is_alike = g.valid & (g.largest(g.rewards) == g.smallest(g.rewards))
    values, sizes = entropies(is_alike).double(), lengths.flatten()  # [T], [G N]

    def of_tokens(x: Tensor) -> Tensor:
        return x.flatten().repeat_interleave(sizes, output_size=len(values))

    largest = torch.segment_reduce(values, "max", lengths=sizes, unsafe=True)
    pushed = alpha * torch.where(of_tokens(g.rewards == 1), values, values - of_tokens(largest))
    return torch.where(of_tokens(is_alike), pushed, of_tokens(grpo(g, eps=eps, ddof=ddof)))


LOW, HIGH = 0.2, 0.9  # the levels of the quantiles
_MIX, _RATE, _EPS = 1.5, 0.1, 1e-6
_LEAST_SPREAD = 1e-3  # a smaller standard deviation of rewards or scores counts as 0


@estimator(
    "RiskPO, Ren et al. 2025, arXiv:2510.00911, as the authors' script sets it",
    needs="N >= 2; --prompts a multiple of --bundle-size",
    weight="depends on the batch",
    of_run=True,
    state={"quantiles": (torch.nan, torch.nan)},
    refuses={
        "prompts must be a multiple of bundle_size, got {prompts} and {bundle_size}": (
            lambda c: c.prompts % c.bundle_size
        )
    },
)
def riskpo(
    g: Group,
    state: dict[str, Tensor],
    metrics: dict[str, Tensor],
    *,
    bundle_size: Annotated[Count, Help("Prompts in a bundle of riskpo; it divides --prompts.")] = 5,
) -> Tensor:
    """(1.5 c + x)/2.5, over the stds of s in the bundle and of r in the group; s: sum of the n-th
    rewards of 5 prompts, a and b its tracked .2 and .9 quantiles; x = ((s - a)+ - (s - b)+ + a -
    b)/.7, c = -(a - s)+/.2.

    A bundle is `bundle_size` consecutive prompts; its n-th paper is the n-th rollout of each
    prompt, and the paper's score s the sum of their rewards. A standard deviation of 0 counts as 1.
    The authors' code (RTkenny/RiskPO) does so only for r, which gives a bundle of equal scores
    advantages of 1e6. The first step sets a and b to the quantiles of its own scores; every step
    ends with q += .1 (level - share of scores below q)."""
    rewards, known = g.rewards.cpu(), g.valid.cpu()  # they are few, and the quantiles are there
    bundles = rewards.view(-1, int(bundle_size), rewards.shape[1])  # [G/B, B, N]
    has_score, scores = known.view(bundles.shape).all(1), bundles.sum(1)  # [G/B, N]
    of_papers, quantiles = scores[has_score], state["quantiles"]
    levels = quantiles.new_tensor([LOW, HIGH])
    if bool(quantiles.isnan().any()) and len(of_papers):
        quantiles.copy_(torch.quantile(of_papers, levels))
    low, high = quantiles.clone()
    within = ((scores - low).clamp_min(0) - (scores - high).clamp_min(0) + low - high) / (
        HIGH - LOW + _EPS
    )
    below = -(low - scores).clamp_min(0) / (LOW + _EPS)
    mixed = (_MIX * below + within) / (_MIX + 1) / (_spread(scores, has_score) + _EPS)
    spreads = _spread(rewards, known).view(*bundles.shape[:2], 1)  # [G/B, B, 1]
    values = (mixed[:, None] / (spreads + _EPS)).masked_fill(~has_score[:, None], 0.0)
    if len(of_papers):
        quantiles += _RATE * (levels - (of_papers < quantiles[:, None]).double().mean(1))
    if not quantiles.isnan().any():  # a paper of the run has had a score
        metrics |= {"riskpo_quantile_low": quantiles[0], "riskpo_quantile_high": quantiles[1]}
    return values.view(rewards.shape).to(g.rewards.device)


def _spread(values: Tensor, known: Tensor) -> Tensor:
    """Return the sample standard deviation [..., 1] of each row's known values, 1 if it is 0 or
    undefined."""
    std = Group(values, known).std(values, 1)
    return torch.where((std > _LEAST_SPREAD) & std.isfinite(), std, 1.0)
