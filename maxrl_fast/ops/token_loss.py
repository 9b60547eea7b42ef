"""Token-level policy-gradient losses over packed responses, and log-probabilities, from logits."""

from dataclasses import replace

import torch
from torch import Tensor

from maxrl_fast.ops import token_loss_kernel as kernels
from maxrl_fast.ops._gate import has_kernels
from maxrl_fast.ops.arguments import check_flag, check_tensor
from maxrl_fast.ops.in_place import overwrite
from maxrl_fast.ops.token_batch import TokenBatch, check_rows, prepare, real_dtype
from maxrl_fast.ops.token_loss_kernel import DTYPES, LossSums, loss_arguments, split_temperature
from maxrl_fast.ops.token_loss_reference import token_logprobs_reference, token_loss_reference

_MEANS = ("ratio", "clipped_low", "clipped_high", "kl", "entropy", "logprob_diff")  # over the tokens with a gradient


def token_logprobs(logits: Tensor, targets: Tensor, *, temperature: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each row of softmax(logits / temperature), in nats.

    Differentiable in both; the logits are read once, and in the backward pass read once more and their gradient written.
    Under torch.no_grad (old and reference policies) nothing is kept.

    Args:
        logits: [T, V] float32, bfloat16, float16 or float64, computed in float32 (float64 for float64).
        targets: [T] whole numbers below V.
        temperature: a number, or [T].

    Returns:
        logprobs [T] and entropy [T], float32 (float64 for float64 logits).

    Raises:
        ValueError: on shapes, dtypes and devices that do not fit, and, on a CPU, on a target that is not in the vocabulary
            and a temperature that is not above 0; on a GPU, where looking would wait for the device, its numbers become NaN.
        TypeError: on what should be a tensor and is none.
    """
    check_rows(_shape(logits), targets, temperature, logits.device)
    if not has_kernels(logits.device):
        return token_logprobs_reference(logits, targets.long(), temperature)
    if isinstance(temperature, Tensor):
        temperature = temperature.detach().to(real_dtype(logits.dtype)).contiguous()
    logprobs, entropy = kernels.token_logprobs(_rows(logits), targets.long().contiguous(), *split_temperature(temperature))
    return logprobs, entropy


def policy_gradient_loss(
    logits: Tensor,
    targets: Tensor,
    advantages: Tensor,
    cu_seqlens: Tensor,
    *,
    advantages_per_token: bool | None = None,
    old_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    importance_weights: Tensor | None = None,
    importance_weights_per_token: bool | None = None,
    loss: str = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl: str = "k3",
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
    temperature: float | Tensor = 1.0,
    aggregation: str = "token_mean",
    mask: Tensor | None = None,
    denominator: float | Tensor | None = None,
    in_place: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Policy-gradient loss of packed responses, and its metrics.

    With logp the log-probability of a target under softmax(logits / temperature) and rho = exp(logp - old):

        reinforce   -A logp
        ppo         max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high)); with `dual_clip` c, at most -A c for A < 0
                    (PPO, Schulman et al. 2017, eq. 7; dual clip, Ye et al. 2020)
        cispo       -stop_gradient(clip(rho)) A logp (MiniMax-M1 2025)
        gspo        ppo with the sequence's ratio exp(mean_t log rho_t) (Zheng et al. 2025); with advantages per token,
                    their GSPO-token

    plus kl_coef KL(policy || reference), estimated per token, minus entropy_coef times the entropy.

    The gradient is written while the logits are read for the loss: one read and one write of the logits, for gspo one more
    read. Tokens that cannot teach (masked, or advantage 0 with neither divergence nor entropy term) are not read, and get
    zeros. Arithmetic is in float32, float64 for float64 logits.

    Args:
        logits: [T, V] float32, bfloat16, float16 or float64; rows may lie at any distance.
        targets: [T] whole numbers.
        advantages: [S], one a response, or [T].
        cu_seqlens: [S+1] whole numbers, from 0 to T.
        advantages_per_token: whether advantages are one a token. Default: by their length. With T = S it must be given, except
            on a CPU where every response has one token.
        old_logprobs: [T] of the sampling policy; absent, the ratio is exactly 1 and its gradient that of logp.
        ref_logprobs: [T] of the reference policy, needed when kl_coef is not 0.
        importance_weights: [S] or [T], at least 0: factors of the policy-gradient term, which correct for rollouts that were
            sampled by another policy or engine.
        importance_weights_per_token: likewise for importance_weights.
        kl: "k1", "k2", "k3" (Schulman 2020), or "k3+", k3's value with k2's gradient.
        temperature: a number, or [T].
        aggregation: "token_mean" divides the sum over tokens by the number of tokens, "seq_mean_token_mean" takes each
            response's mean, then the mean over responses, "seq_mean_token_sum" sums each response, then takes the mean
            over responses, "seq_sum_constant" divides the sum by `denominator` (Dr. GRPO).
        mask: [T] bool, the tokens that count. What is masked is not read, whatever it holds.
        denominator: what the sum is divided by, a number or [], so that micro-batches and ranks add up to the loss of the
            whole batch: its tokens for "token_mean", its responses for the other means. Default: those given here.
        in_place: write the gradient where the logits are, which then are gone, instead of into as much new memory. Whatever
            else needs the logits for its gradient fails in the backward pass, with an error.

    Returns:
        The loss, a scalar, float32 (float64 for float64 logits), and metrics, detached scalars on the device, float64:
        tokens (that count), dropped_tokens (those of them that cannot teach), and means over the others: ratio, clipped_low
        and clipped_high (whether the clip limited the ratio), kl, entropy, logprob_diff (|logp - old|). 0 where there are none.

    Raises:
        ValueError: on an unknown name, on shapes, dtypes, devices and numbers that do not fit, where reference log-probs or
            a denominator are needed and absent, and, on a CPU, on a target that counts and is not in the vocabulary, on a
            temperature or denominator that is not above 0, an importance weight below 0, or on cu_seqlens that do not rise
            from 0 to T. On a GPU, where looking would wait for the device, the loss becomes NaN for such a target or
            temperature.
        TypeError: on what should be a tensor and is none.
        RuntimeError: from the backward pass, where in_place overwrote what something else needs. On a GPU, and with
            in_place, the backward pass can run only once.
    """
    shape = _shape(logits)
    check_flag("in_place", in_place)
    batch, terms = prepare(
        logits.dtype,
        logits.device,
        shape,
        targets,
        advantages,
        cu_seqlens,
        advantages_per_token=advantages_per_token,
        old_logprobs=old_logprobs,
        ref_logprobs=ref_logprobs,
        importance_weights=importance_weights,
        importance_weights_per_token=importance_weights_per_token,
        loss=loss,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        kl=kl,
        kl_coef=kl_coef,
        entropy_coef=entropy_coef,
        temperature=temperature,
        aggregation=aggregation,
        mask=mask,
        denominator=denominator,
    )
    needs_gradient = logits.requires_grad and torch.is_grad_enabled()
    if in_place and needs_gradient and (logits.is_leaf or (logits._base is not None and logits._base.is_leaf)):
        raise ValueError("in_place needs logits that were computed, got a leaf or a view of one, a parameter's own value")
    if not has_kernels(logits.device):
        return loss_and_metrics(token_loss_reference(logits, batch, terms), logits)
    if terms.loss == "gspo" and batch.old_logprobs is not None:
        batch = with_sequence_ratios(batch, _counted_logprobs(logits.detach(), batch))
    arguments = loss_arguments(batch, terms)
    if in_place and needs_gradient:
        sums = overwrite(logits, arguments)
    else:
        sums, _ = kernels.token_loss(_rows(logits), **arguments, needs_gradient=needs_gradient)
    return loss_and_metrics(sums, logits)


def with_sequence_ratios(batch: TokenBatch, logprobs: Tensor) -> TokenBatch:
    """The batch for gspo's kernel, from the log-probabilities [T] of its targets."""
    return replace(batch, sequence_log_ratio=batch.mean_log_ratio(logprobs))


def _counted_logprobs(logits: Tensor, batch: TokenBatch) -> Tensor:
    """Log-probabilities [T]; of a target that does not count, and may be anything, some number or NaN."""
    targets = batch.targets if batch.mask is None else batch.targets.where(batch.mask, 0)
    logprobs: Tensor = kernels.token_logprobs(_rows(logits), targets, *split_temperature(batch.temperature))[0]
    return logprobs


def loss_and_metrics(sums: Tensor, like: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return what policy_gradient_loss returns, from LossSums [9]."""
    named = LossSums(*sums.detach().unbind())
    read = (named.tokens - named.dropped_tokens).clamp_min(1)
    means = {name: getattr(named, name) / read for name in _MEANS}
    metrics = {"tokens": named.tokens, "dropped_tokens": named.dropped_tokens, **means}
    return sums[0].to(real_dtype(like.dtype)), metrics


def _shape(logits: Tensor) -> tuple[int, int]:
    check_tensor("logits", logits)
    if logits.dim() != 2 or logits.dtype not in DTYPES:
        raise ValueError(f"logits must be [T, V] of {', '.join(DTYPES.values())}, got {logits.dtype} {tuple(logits.shape)}")
    return logits.shape[0], logits.shape[1]


def _rows(logits: Tensor) -> Tensor:
    """The logits with the elements of a row side by side."""
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()
