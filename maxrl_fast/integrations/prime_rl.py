"""prime-rl: `[trainer.loss]` with `type = "custom"` and `import_path = "maxrl_fast.integrations.prime_rl.policy_loss"`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from maxrl_fast import _C
from maxrl_fast.ops.losses import LOSSES, summands
from maxrl_fast.ops.token_batch import loss_terms
from maxrl_fast.ops.token_loss_reference import TokenTerms, clamped, kl_estimates, surrogate


def policy_loss(
    inputs: Any,
    loss: str = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl: str = "k3",
    kl_coef: float = 0.0,
    loss_options: Mapping[str, float] | None = None,
) -> Any:
    """Return prime-rl's LossOutputs: the loss of one sequence, summed over its tokens, and means over them.

    The formulas and options are those of `ops.policy_gradient_loss`; the keywords come from `[trainer.loss.kwargs]`.

    Args:
        inputs: prime-rl's LossInputs of a sequence, [T] each. The ratio is to inference_logprobs, the divergence to
            ref_logprobs; loss_weights scale the loss of each token.

    Raises:
        ValueError: if an option is wrong, if kl_coef is not 0 and there are no ref_logprobs, or if the loss needs
            token_statistics.
    """
    from prime_rl.trainer.rl.loss import LossOutputs

    terms = loss_terms(loss, clip_low, clip_high, dual_clip, kl, kl_coef, 0.0, loss_options)
    if kl_coef and inputs.ref_logprobs is None:
        raise ValueError("kl_coef is not 0, so prime-rl must have ref_logprobs")
    if LOSSES[loss].statistic is not None:
        raise ValueError(f"loss {loss} needs numbers of the tokens of a whole batch, and prime-rl gives one sequence at a time")
    keep = inputs.loss_mask
    logp, advantage = inputs.trainer_logprobs[keep].float(), inputs.advantages[keep].float()
    difference = logp - inputs.inference_logprobs[keep].float()
    log_ratio = difference
    if terms.by_sequence:  # one number for the sequence, with the gradient of each token
        added = summands(loss, terms.options, difference.detach(), advantage, _C.MAX_LOG_RATIO)
        log_ratio = (added.sum() if LOSSES[loss].sequence == "sum" else _mean(added)) + (logp - logp.detach())
    log_ratio = clamped(log_ratio)[0]
    ratio = log_ratio.exp()
    value, low, high = surrogate(terms, TokenTerms(advantage, logp, difference.detach(), log_ratio, ratio, None))
    if kl_coef:
        value = value + kl_coef * kl_estimates(clamped(logp - inputs.ref_logprobs[keep].float())[0], kl)
    if inputs.loss_weights is not None:
        value = value * inputs.loss_weights[keep]
    is_outside = (ratio < 1 - clip_low) | (ratio > 1 + clip_high) if LOSSES[loss].clips else low | high
    metrics = {"ratio": ratio.detach(), "outside_clip": is_outside.float(), "logprob_diff": difference.detach().abs()}
    return LossOutputs(loss=value.sum(), metrics={name: _mean(values) for name, values in metrics.items()})


def _mean(values: Tensor) -> Tensor:
    """Return the mean, and 0 of no values."""
    return values.sum() / max(len(values), 1)
