"""Token-level policy-gradient losses over packed responses, in plain PyTorch."""

import torch
from torch import Tensor

LOSSES = ("reinforce", "ppo", "cispo", "gspo")
KL_ESTIMATORS = ("k1", "k2", "k3", "k3+")
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_sum_constant")


def token_logprobs(logits: Tensor, targets: Tensor, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each row of softmax(logits / temperature), in nats.

    Shapes: logits [T, V], targets [T] int64 -> logprobs [T], entropy [T], float32 (float64 for float64 logits).
    Differentiable in both.
    """
    log_p = torch.log_softmax(logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature, -1)
    # A token masked out by -inf logits has p log p = 0, not NaN.
    entropy = -(log_p.exp() * log_p.clamp_min(torch.finfo(log_p.dtype).min)).sum(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], entropy


def policy_gradient_loss(
    logits: Tensor,
    targets: Tensor,
    advantages: Tensor,
    cu_seqlens: Tensor,
    *,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    loss: str = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl: str = "k3",
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    temperature: float = 1.0,
    aggregation: str = "token_mean",
    mask: Tensor | None = None,
    denominator: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy-gradient loss of packed responses and the sums of its metrics.

    With logp the log-probability of a target under softmax(logits / temperature) and rho = exp(logp - old):

        reinforce   -A logp
        ppo         max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)); with `dual_clip` c, at most -A c for A < 0
                    (PPO, Schulman et al. 2017, eq. 7; dual clip, Ye et al. 2020)
        cispo       -stop_gradient(clip(rho)) A logp (MiniMax-M1 2025)
        gspo        ppo with the sequence's ratio exp(mean_t log rho_t) (Zheng et al. 2025)

    plus kl_coef KL(policy || reference), estimated per token, minus entropy_coef times the entropy.

    Args:
        logits: [T, V].
        targets: [T] int64.
        advantages: [S], one a response, or [T].
        cu_seqlens: [S+1] int64.
        old_logprobs: [T] of the sampling policy; absent, the ratio is exactly 1 and its gradient that of logp.
        ref_logprobs: [T] of the reference policy, needed when kl_coef is not 0.
        kl: "k1", "k2", "k3" (Schulman 2020), or "k3+", k3's value with k2's gradient.
        aggregation: "token_mean" divides the sum over tokens by the number of tokens, "seq_mean_token_mean" takes each
            response's mean, then the mean over responses, "seq_mean_token_sum" sums each response, then takes the mean
            over responses, "seq_sum_constant" divides the sum by `denominator` (Dr. GRPO).
        mask: [T] bool, the tokens that count.
        denominator: what the sum is divided by, so that micro-batches and ranks add up to the loss of the whole batch:
            its tokens for "token_mean", its responses for the other means. Default: those given here.

    Returns:
        The loss, a scalar, and metrics summed over the tokens that count, detached scalars: tokens, ratio, clipped_low and
        clipped_high (tokens whose ratio the clip limited), entropy, kl, mismatch (|logp - old|, of each token).

    Raises:
        ValueError: on an unknown name, or where reference log-probs or a denominator are needed and absent.
    """
    for option, given, allowed in (
        ("loss", loss, LOSSES),
        ("kl", kl, KL_ESTIMATORS),
        ("aggregation", aggregation, AGGREGATIONS),
    ):
        if given not in allowed:
            raise ValueError(f"{option} must be one of {', '.join(allowed)}, got {given!r}")
    if kl_coef and ref_logprobs is None:
        raise ValueError("kl_coef is not 0, so ref_logprobs must be given")
    if aggregation == "seq_sum_constant" and denominator is None:
        raise ValueError("aggregation 'seq_sum_constant' needs a denominator")

    lengths = cu_seqlens.diff()
    sequence = torch.repeat_interleave(lengths)  # [T]
    logp, entropy = token_logprobs(logits, targets, temperature=temperature)
    keep = torch.ones_like(logp, dtype=torch.bool) if mask is None else mask
    counts = torch.zeros_like(lengths).index_add(0, sequence, keep.long())  # [S] tokens that count
    advantage = (advantages[sequence] if len(advantages) == len(lengths) else advantages).to(logp.dtype)

    log_ratio = logp - (logp.detach() if old_logprobs is None else old_logprobs)
    log_ratio = torch.where(keep, log_ratio, 0.0)  # before exp: a masked position must not leak an infinity
    mismatch = log_ratio.abs()
    if loss == "gspo":
        sums = logp.new_zeros(len(lengths)).index_add(0, sequence, log_ratio)
        log_ratio = (sums / counts.clamp_min(1))[sequence]
    ratio = log_ratio.exp()
    value = _surrogate(loss, advantage, ratio, logp, clip_low, clip_high, dual_clip) - entropy_coef * entropy
    divergence = torch.zeros_like(logp)
    if ref_logprobs is not None:
        divergence = _divergence(logp, ref_logprobs, kl)
        value = value + kl_coef * divergence
    value = torch.where(keep, value, 0.0)

    if aggregation == "seq_mean_token_mean":
        value = value / counts.clamp_min(1)[sequence]
    if denominator is None:
        denominator = max(int(counts.sum()) if aggregation == "token_mean" else len(lengths), 1)

    def total(x: Tensor) -> Tensor:
        return torch.where(keep, x.detach(), 0.0).sum()

    has_clip = loss != "reinforce"
    metrics = {
        "tokens": counts.sum(),
        "ratio": total(ratio),
        "clipped_low": total(((advantage < 0) & (ratio < 1 - clip_low) & has_clip).to(logp.dtype)),
        "clipped_high": total(((advantage > 0) & (ratio > 1 + clip_high) & has_clip).to(logp.dtype)),
        "entropy": total(entropy),
        "kl": total(divergence),
        "mismatch": total(mismatch),
    }
    return value.sum() / denominator, metrics


def _surrogate(
    loss: str, advantage: Tensor, ratio: Tensor, logp: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> Tensor:
    """The policy-gradient part of each token's loss [T]."""
    if loss == "reinforce":
        return -advantage * logp
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    if loss == "cispo":
        return -clipped.detach() * advantage * logp
    value = torch.maximum(-advantage * ratio, -advantage * clipped)
    if dual_clip is not None:
        value = torch.where(advantage < 0, torch.minimum(value, -advantage * dual_clip), value)
    return value


def _divergence(logp: Tensor, ref: Tensor, kind: str) -> Tensor:
    """Per-token estimates [T] of KL(policy || reference) from samples of the policy (Schulman 2020)."""
    d = logp - ref
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    k3 = torch.expm1(-d) + d
    if kind == "k3":
        return k3
    k2 = d.square() / 2
    return k2 + (k3 - k2).detach()
