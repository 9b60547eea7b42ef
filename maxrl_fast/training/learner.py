"""The learner: rollouts and advantages in, one optimizer step on the loss of the whole batch."""

import contextlib
import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from maxrl_fast.config.options import Config, OptimizerOptions
from maxrl_fast.distributed.ranks import Ranks, gradients_stay
from maxrl_fast.errors import NonFiniteError
from maxrl_fast.model.attention import shared_prompt_attention
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.model.linear import whole
from maxrl_fast.ops import linear_policy_gradient_loss, linear_token_logprobs
from maxrl_fast.records import Prompts, Rollouts, gather_sequences
from maxrl_fast.training.diagnostics import find_non_finite
from maxrl_fast.training.packing import Batch, Packer, merge_cost


@dataclass(frozen=True)
class LossSettings:
    """The options of ops.policy_gradient_loss that stay the same over a run."""

    loss: str
    aggregation: str
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl: str = "k3"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    temperature: float = 1.0
    max_new_tokens: int = 1  # the constant of seq_sum_constant

    @classmethod
    def of(cls, config: Config) -> "LossSettings":
        """That of reinforcement learning, from a resolved configuration."""
        assert config.loss.aggregation is not None
        assert config.rollout.max_new_tokens is not None
        return cls(**vars(config.loss), temperature=config.rollout.temperature, max_new_tokens=config.rollout.max_new_tokens)

    def denominator(self, lengths: Tensor) -> float:
        """What the summed loss of responses of these lengths [S] is divided by, however they are split into micro-batches."""
        if self.aggregation == "token_mean":
            return float(lengths.sum())
        return float(len(lengths) * (self.max_new_tokens if self.aggregation == "seq_sum_constant" else 1))

    def can_teach(self, advantages: Tensor) -> Tensor:
        """Which sequences [S] have a gradient at all, given their advantages [S]."""
        if self.kl_coef or self.entropy_coef:
            return torch.ones_like(advantages, dtype=torch.bool)
        return advantages != 0


TOKEN_METRICS = ("ratio", "clipped_low", "clipped_high", "kl", "logprob_diff")


@dataclass(frozen=True)
class UpdateMetrics:
    """From `ratio` on, sums over the tokens that were trained on."""

    loss: float
    grad_norm: float  # before clipping
    num_sequences: int  # that went through the model
    num_tokens: int  # of their prompts, each once, and of their responses
    num_targets: int  # response tokens trained on
    ratio: float
    clipped_low: float
    clipped_high: float
    kl: float
    logprob_diff: float  # |logp - sampled logp|
    moment_variance: float = 0.0  # after the step


def make_optimizer(model: nn.Module, options: OptimizerOptions) -> torch.optim.AdamW:
    """AdamW with decay on matrices only, in one fused kernel; `Learner.update` sets the learning rate.

    Weights, gradients and moments are float32, whatever the dtype of the computation: changes too small for bfloat16 add up.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.dim() >= 2]
    vectors = [p for p in trained if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=options.lr, betas=(options.beta1, options.beta2), fused=True)


@torch.no_grad()
def moment_variance(optimizer: torch.optim.Optimizer) -> Tensor:
    """What Adam's moments say of the gradient's variance (MaxPO paper): the sum over parameters of v_hat - m_hat^2.

    A scalar; where ranks share the weights, of this rank's part.
    """
    total = torch.zeros((), dtype=torch.float64)
    for group in optimizer.param_groups:
        states = [optimizer.state[p] for p in group["params"] if "exp_avg" in optimizer.state[p]]
        if not states:
            continue
        beta1, beta2 = group["betas"]
        step = float(states[0]["step"])
        first, second = ([_local(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq"))
        squares = torch.stack(torch._foreach_norm(first)).double().square().sum()
        sums = torch.stack([x.sum(dtype=torch.float64) for x in second]).sum()
        total = total.to(sums.device) + sums / (1 - beta2**step) - squares / (1 - beta1**step) ** 2
    return total


def _local(x: Tensor) -> Tensor:
    """This rank's part of a tensor that ranks may share."""
    local: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return local


def learning_rate(step: int, options: OptimizerOptions) -> float:
    """Of step 1, 2, ...: linear warm-up, then constant or a cosine that ends at a tenth of the peak."""
    if step <= options.warmup_steps:
        return options.lr * step / options.warmup_steps
    if options.lr_schedule == "constant":
        return options.lr
    progress = (step - options.warmup_steps) / max(options.steps - options.warmup_steps, 1)
    return options.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


def run_batch(
    module: nn.Module, batch: Batch, dtype: torch.dtype, finish: Callable[[Tensor, Tensor], Any] | None = None
) -> Any:
    """Hidden states [T, H] that predict the batch's targets, in `dtype`, or what `finish` makes of them and the output
    matrix [V, H]."""

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return shared_prompt_attention(q, k, v, batch.layout)

    def of_targets(hidden: Tensor, weight: Tensor) -> Any:
        hidden = hidden.index_select(0, batch.target_rows)
        return hidden if finish is None else finish(hidden, weight)

    return module(batch.tokens, batch.positions, attention, batch.rows, dtype, of_targets)


@dataclass
class Learner:
    """A policy, its optimizer and its loss.

    Args:
        model: the policy, trained in place.
        clip_grad: largest gradient norm.
        token_budget: most tokens in one forward and backward pass.
        dtype: of the computation; weights, gradients and moments are float32.
        reference: the policy that settings.kl_coef holds this one close to, and that PACS may refer to.
        module: what runs the policy's passes, of parallel.distribute; the model itself with one process.
    """

    model: Decoder
    optimizer: torch.optim.Optimizer
    settings: LossSettings
    clip_grad: float
    token_budget: int
    dtype: torch.dtype
    reference: Decoder | None = None
    ranks: Ranks = field(default_factory=Ranks)
    module: nn.Module | None = None

    @classmethod
    def of(
        cls,
        config: Config,
        model: Decoder,
        settings: LossSettings,
        *,
        ranks: Ranks | None = None,
        module: nn.Module | None = None,
        reference: Decoder | None = None,
    ) -> "Learner":
        """A learner with a new optimizer; the model as it is now becomes the reference policy, in `reference`, of its kind."""
        if reference is not None:
            reference.load_state_dict(model.state_dict())
        return cls(
            model,
            make_optimizer(model, config.optimizer),
            settings,
            config.optimizer.clip_grad,
            config.optimizer.token_budget,
            getattr(torch, config.run.dtype),
            reference,
            ranks or Ranks(),
            module,
        )

    def __post_init__(self) -> None:
        self._module = self.model if self.module is None else self.module
        # Whether each rank holds only its part of every weight (FSDP2).
        self.shares_weights = _local(self.model.lm_head.weight) is not self.model.lm_head.weight
        self._merge_cost = merge_cost(self.model.config, _local(self.model.lm_head.weight).device)

    def update(
        self, prompts: Prompts, rollouts: Rollouts, advantages: Tensor, sequences: Tensor, *, when: str, lr: float
    ) -> UpdateMetrics:
        """One optimizer step on some of the rollouts, the same on all ranks.

        Args:
            advantages: [S] of all rollouts.
            sequences: int64, ascending, the rollouts of this update. The loss is averaged over these, those included that
                cannot teach and are not computed.
            when: for messages, such as "step 3".
            lr: learning rate.

        Raises:
            NonFiniteError: naming the step, the prompt and what was not finite; the weights are left as they were.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for parameter in (p for p in self.model.parameters() if p.requires_grad):
            # Zeros, not None: when no rollout can teach, the step is still that of a zero gradient.
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
        # To the last bit the same on all ranks, who must agree on what is learned from.
        advantages, sequences = self.ranks.from_first(advantages.clone()), sequences.to(advantages.device)
        lengths = rollouts.lengths[sequences]
        denominator = self.settings.denominator(lengths)
        learning = sequences[self.settings.can_teach(advantages[sequences]) & (lengths > 0)]
        packer = self.packer(prompts, rollouts, advantages)
        # In float64, so that sums of whole numbers stay exact: loss, tokens computed, then sums over the trained tokens.
        sums = torch.zeros(len(TOKEN_METRICS) + 3, dtype=torch.float64, device=advantages.device)
        for batch, is_own, is_last in self._passes(packer, learning):
            with contextlib.nullcontext() if is_last else gradients_stay(self._module):
                part, metrics = self.loss(batch, denominator)
                # Gradients become means over the ranks; a pass that only keeps step with the others adds nothing.
                (part * (self.ranks.size if is_own else 0)).backward()
            if is_own:
                num_read = metrics["tokens"] - metrics["dropped_tokens"]
                totals = [metrics[name] * num_read for name in TOKEN_METRICS]
                sums += torch.stack([part.detach(), num_read.new_tensor(len(batch.tokens)), num_read, *totals])
        loss, num_tokens, num_targets, *totals = self.ranks.sum(sums)
        grad_norm = whole(nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad))
        if not (loss.isfinite() and grad_norm.isfinite()):
            raise NonFiniteError(f"{when}: {find_non_finite(self, packer, learning, denominator)}")
        self.optimizer.step()
        variance = moment_variance(self.optimizer)
        return UpdateMetrics(
            loss=float(loss),
            grad_norm=float(grad_norm),
            num_sequences=len(learning),
            num_tokens=int(num_tokens),
            num_targets=int(num_targets),
            **{name: float(total) for name, total in zip(TOKEN_METRICS, totals, strict=True)},
            moment_variance=max(0.0, float(self.ranks.sum(variance) if self.shares_weights else variance)),
        )

    def packer(self, prompts: Prompts, rollouts: Rollouts, advantages: Tensor | None = None) -> Packer:
        """What cuts these rollouts into micro-batches; advantages [S] or none."""
        none = torch.zeros(len(rollouts.lengths), device=rollouts.tokens.device)
        return Packer(prompts, rollouts, none if advantages is None else advantages, self._merge_cost)

    def _passes(self, packer: Packer, sequences: Tensor) -> Iterator[tuple[Batch, bool, bool]]:
        """This rank's micro-batches of the chosen sequences: (batch, whether it is its own, whether it is the last).

        All ranks make as many passes, since gradients, and sharded weights, are exchanged in them; one with less to do
        repeats the shortest response.
        """
        sequences = sequences.cpu()
        parts = [packer.split(share, self.token_budget) for share in packer.share(sequences, self.ranks.size)]
        own, num_passes = parts[self.ranks.rank], max(len(part) for part in parts)
        for i in range(num_passes):
            is_own = i < len(own)
            yield packer.pack(own[i] if is_own else packer.shortest(sequences)), is_own, i == num_passes - 1

    def loss(self, batch: Batch, denominator: float) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's share of the loss, and its metrics: means over its tokens."""
        settings, ref_logprobs = self.settings, None
        if settings.kl_coef:
            assert self.reference is not None
            ref_logprobs = self._batch_logprobs(self.reference, batch)

        def finish(hidden: Tensor, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            return linear_policy_gradient_loss(
                hidden,
                weight,
                batch.targets,
                batch.advantages,
                batch.cu_seqlens,
                advantages_per_token=False,
                old_logprobs=batch.old_logprobs,
                importance_weights=batch.importance_weights,
                importance_weights_per_token=True,
                ref_logprobs=ref_logprobs,
                loss=settings.loss,
                clip_low=settings.clip_low,
                clip_high=settings.clip_high,
                dual_clip=settings.dual_clip,
                kl=settings.kl,
                kl_coef=settings.kl_coef,
                entropy_coef=settings.entropy_coef,
                temperature=settings.temperature,
                aggregation=settings.aggregation,
                denominator=denominator,
            )

        loss, metrics = run_batch(self._module, batch, self.dtype, finish)
        return loss, metrics

    def logprobs(self, model: Decoder, prompts: Prompts, rollouts: Rollouts, sequences: Tensor) -> Tensor:
        """Log-probs of the tokens of the chosen rollouts, ascending, end to end, under `model` at the loss's temperature."""
        logprobs = torch.zeros(len(rollouts.tokens), device=rollouts.tokens.device)
        for batch, is_own, _ in self._passes(self.packer(prompts, rollouts), sequences):
            if is_own or self.shares_weights:
                values = self._batch_logprobs(model, batch)
            if is_own:
                logprobs[batch.target_index] = values
        return self.ranks.sum(logprobs)[gather_sequences(rollouts.cu_seqlens, sequences)[0]]

    def corrected(self, prompts: Prompts, rollouts: Rollouts, cap: float) -> tuple[Rollouts, dict[str, float]]:
        """Rollouts whose log-probs differ from this policy's, by rounding or by tokens that sampling left out.

        Log-probs become this policy's, and every token is weighed by its probability under this policy over that with which it
        was sampled, at most `cap`: truncated importance sampling (Yao et al. 2025). And what is to be reported of it.
        """
        everything = torch.arange(len(rollouts.lengths), device=rollouts.tokens.device)
        logprobs = self.logprobs(self.model, prompts, rollouts, everything)
        difference = logprobs - rollouts.logprobs
        weights = difference.exp().clamp_max(cap)
        metrics = {"logprob_diff": float(difference.abs().mean()), "importance_weight": float(weights.mean())}
        return dataclasses.replace(rollouts, logprobs=logprobs, importance_weights=weights), metrics

    @torch.no_grad()
    def _batch_logprobs(self, model: Decoder, batch: Batch) -> Tensor:
        temperature = self.settings.temperature

        def finish(hidden: Tensor, weight: Tensor) -> Tensor:
            return linear_token_logprobs(hidden, weight, batch.targets, temperature=temperature)[0]

        values: Tensor = run_batch(model, batch, self.dtype, finish)
        return values

    def reset_reference(self) -> None:
        """Make the policy as it is now the reference, and forget the optimizer's moments."""
        assert self.reference is not None
        self.reference.load_state_dict(self.model.state_dict())
        self.optimizer.state.clear()


def frozen_copy(model: Decoder) -> Decoder:
    """The policy as it is now, for reference. Weights that are never trained, as under adapters, are not copied."""
    shared = {id(p): p for p in model.parameters() if not p.requires_grad}
    return copy.deepcopy(model, shared).requires_grad_(False)
