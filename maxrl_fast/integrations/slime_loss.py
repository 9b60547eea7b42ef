"""slime: its policy loss in one pass over the logits, without a copy of them, by `--loss-type
custom_loss --custom-loss-function-path maxrl_fast.integrations.slime_loss.policy_loss`."""

from typing import Any

import torch
from torch import Tensor

from maxrl_fast import ops

# Options that this loss does not support, with the values that turn them off.
_NEEDED = {
    **dict.fromkeys(("tensor_model_parallel_size", "context_parallel_size", "rollout_top_p"), 1),
    **dict.fromkeys(("use_tis", "use_opsm", "get_mismatch_metrics"), False),
    **{"entropy_coef": 0, "custom_pg_loss_reducer_function_path": None},
}


def policy_loss(
    args: Any, batch: dict[str, Any], logits: Tensor, _: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return slime's loss (PPO, CISPO or GSPO, by --advantage-estimator), summed over samples.

    Args:
        batch: slime's batch: lists with a tensor per sample.
        logits: [1, T, V] float32, samples end to end, then padding.

    Raises:
        ValueError: if slime's options ask for parallel logits, or for an unsupported term.
    """
    _check(args)
    (logits,) = logits  # [T, V]
    lengths = batch["response_lengths"]
    ends = torch.tensor(batch["total_lengths"]).cumsum(0).tolist()
    parts = [torch.arange(end - n - 1, end - 1) for end, n in zip(ends, lengths, strict=True)]
    rows = torch.cat(parts).to(logits.device)
    weights = torch.cat(batch["loss_masks"]).float()  # [response tokens]
    # divide by the tokens of the sample's rollout, as slime's sum_of_sample_mean
    if not args.calculate_per_token_loss:
        pairs = zip(batch["rollout_mask_sums"], lengths, strict=True)
        weights = weights / torch.cat([count.clamp_min(1).expand(n) for count, n in pairs])
    pairs = zip(batch["unconcat_tokens"], lengths, strict=True)
    targets = torch.cat([tokens[len(tokens) - n :] for tokens, n in pairs])
    old = batch["rollout_log_probs"] if args.use_rollout_logprobs else batch.get("log_probs")

    def place(values: Tensor) -> Tensor:
        return values.new_zeros(len(logits)).index_copy(0, rows, values)

    loss, means = ops.policy_gradient_loss(
        logits,
        place(targets),
        place(torch.cat(batch["advantages"]) * weights),
        torch.tensor([0, *ends] + [len(logits)] * (len(logits) > ends[-1]), device=logits.device),
        advantages_per_token=True,
        old_logprobs=place(torch.cat(old)) if old else None,
        loss=args.advantage_estimator if args.advantage_estimator in ("cispo", "gspo") else "ppo",
        clip_low=args.eps_clip,
        clip_high=args.eps_clip if args.eps_clip_high is None else args.eps_clip_high,
        dual_clip=args.eps_clip_c,
        temperature=args.rollout_temperature,
        aggregation="seq_sum_constant",
        mask=place(weights) != 0,
        denominator=1.0,
    )
    # slime divides the sum of a metric by this
    count = means["tokens"] if args.calculate_per_token_loss else len(ends)
    return loss, {
        "loss": loss.detach(),
        "pg_clipfrac": (means["clipped_low"] + means["clipped_high"]) * count,
    }


def _check(args: Any) -> None:
    given = {name: getattr(args, name, value) for name, value in _NEEDED.items()}
    wrong = {name: value for name, value in given.items() if value != _NEEDED[name]}
    if getattr(args, "use_kl_loss", False) and args.kl_loss_coef:
        wrong["kl_loss_coef"] = args.kl_loss_coef
    if wrong:
        names = ", ".join(f"{name}={value}" for name, value in wrong.items())
        raise ValueError(f"maxrl_fast's loss has no {names}")
