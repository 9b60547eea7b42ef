"""prime-rl: `[trainer.loss]` with `type = "custom"` and `import_path =
"maxrl_fast.integrations.prime_rl.policy_loss"`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from maxrl_fast.algorithms.losses.registry import find_loss
from maxrl_fast.algorithms.tokens import Tokens, limited
from maxrl_fast.ops.function_loss import kl_estimates
from maxrl_fast.ops.token_batch import loss_terms


def policy_loss(
    inputs: Any,
    loss: str | Callable[..., Tensor] = "ppo",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    kl: str = "k3",
    kl_coef: float = 0.0,
    loss_options: Mapping[str, float] | None = None,
) -> Any:
    """Return prime-rl's LossOutputs: one sequence's loss, summed over its tokens, and token means.

    Formulas and options are those of `ops.policy_gradient_loss`, from `[trainer.loss.kwargs]`.

    Args:
        inputs: prime-rl's LossInputs of a sequence, [T] each. Ratios use inference_logprobs, the KL
            term ref_logprobs; loss_weights scale each token's loss.

    Raises:
        ValueError: if an option is wrong, kl_coef is not 0 and there are no ref_logprobs, or the
            loss compares tokens of several sequences.
    """
    from prime_rl.trainer.rl.loss import LossOutputs

    row = find_loss(loss)
    terms = loss_terms(row.name, clip_low, clip_high, dual_clip, kl, kl_coef, 0.0)
    if kl_coef and inputs.ref_logprobs is None:
        raise ValueError("kl_coef is not 0, so prime-rl must have ref_logprobs")
    if row.over_batch:
        raise ValueError(
            f"loss {row.name} compares the tokens of a whole batch, and prime-rl gives one "
            "sequence at a time"
        )
    keep = inputs.loss_mask

    def kept(x: Tensor) -> Tensor:
        return x[keep].double()

    logprobs, old = kept(inputs.trainer_logprobs), kept(inputs.inference_logprobs)
    ones, lengths = torch.ones_like(old), torch.tensor([0, len(old)], device=old.device)
    tokens = Tokens(
        logprobs=logprobs,
        entropy=torch.zeros_like(old),
        old_logprobs=old,
        ref_logprobs=old if inputs.ref_logprobs is None else kept(inputs.ref_logprobs),
        advantages=kept(inputs.advantages),
        importance_weights=ones,
        mask=ones.bool(),
        cu_seqlens=lengths,
    )
    clips = {"clip_low": terms.clip_low, "clip_high": terms.clip_high, "dual_clip": terms.dual_clip}
    value = row.bind(row.resolve(loss_options), **clips)(tokens)
    if kl_coef:
        value = value + kl_coef * kl_estimates(limited(logprobs - tokens.ref_logprobs), kl)
    if inputs.loss_weights is not None:
        value = value * inputs.loss_weights[keep]
    difference = (logprobs - old).detach()
    ratio = limited(difference if tokens.measured is None else tokens.measured).exp()
    is_outside = tokens.clipped_low | tokens.clipped_high
    if row.clips:
        is_outside = (ratio < 1 - clip_low) | (ratio > 1 + clip_high)
    metrics = {"ratio": ratio, "outside_clip": is_outside.float(), "logprob_diff": difference.abs()}
    return LossOutputs(
        loss=value.sum().float(),
        metrics={name: _mean(values.float()) for name, values in metrics.items()},
    )


def _mean(values: Tensor) -> Tensor:
    return values.sum() / max(len(values), 1)
