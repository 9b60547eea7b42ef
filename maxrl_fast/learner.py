"""The learner: rollouts and advantages in, one optimizer step on the loss of the whole batch."""

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from maxrl_fast.batching import Batch, micro_batches
from maxrl_fast.errors import NonFiniteError
from maxrl_fast.model.attention import shared_prompt_attention
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.ops import linear_policy_gradient_loss, linear_token_logprobs
from maxrl_fast.options import Config, OptimizerOptions
from maxrl_fast.records import Prompts, Rollouts


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


TOKEN_METRICS = ("ratio", "clipped_low", "clipped_high", "kl", "mismatch")


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
    mismatch: float  # |logp - sampled logp|


def make_optimizer(model: nn.Module, options: OptimizerOptions) -> torch.optim.AdamW:
    """AdamW with decay on matrices only, in one fused kernel; `Learner.update` sets the learning rate."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": options.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=options.lr, betas=(options.beta1, options.beta2), fused=True)


def learning_rate(step: int, options: OptimizerOptions) -> float:
    """Of step 1, 2, ...: linear warm-up, then constant or a cosine that ends at a tenth of the peak."""
    if step <= options.warmup_steps:
        return options.lr * step / options.warmup_steps
    if options.lr_schedule == "constant":
        return options.lr
    progress = (step - options.warmup_steps) / max(options.steps - options.warmup_steps, 1)
    return options.lr * (0.55 + 0.45 * math.cos(math.pi * progress))


def response_hidden(model: Decoder, batch: Batch, dtype: torch.dtype) -> Tensor:
    """Hidden states [T, H] that predict the batch's targets, in `dtype`."""

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return shared_prompt_attention(q, k, v, batch.layout)

    hidden = model(batch.tokens, batch.positions, attention, batch.rows, dtype)
    return hidden.index_select(0, batch.target_rows)


@dataclass
class Learner:
    """A policy, its optimizer and its loss.

    Args:
        model: the policy, trained in place.
        clip_grad: largest gradient norm.
        token_budget: most tokens in one forward and backward pass.
        dtype: of the computation; weights, gradients and moments are float32.
        reference: the policy that settings.kl_coef holds this one close to, and that PACS may refer to.
    """

    model: Decoder
    optimizer: torch.optim.Optimizer
    settings: LossSettings
    clip_grad: float
    token_budget: int
    dtype: torch.dtype
    reference: Decoder | None = None

    @classmethod
    def of(cls, config: Config, model: Decoder, settings: LossSettings, needs_reference: bool = False) -> "Learner":
        """A learner with a new optimizer; the model as it is now becomes the reference policy where one is needed."""
        return cls(
            model,
            make_optimizer(model, config.optimizer),
            settings,
            config.optimizer.clip_grad,
            config.optimizer.token_budget,
            getattr(torch, config.run.dtype),
            copy.deepcopy(model).requires_grad_(False) if settings.kl_coef or needs_reference else None,
        )

    def update(
        self, prompts: Prompts, rollouts: Rollouts, advantages: Tensor, sequences: Tensor, *, when: str, lr: float
    ) -> UpdateMetrics:
        """One optimizer step on some of the rollouts.

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
        for parameter in self.model.parameters():
            # Zeros, not None: when no rollout can teach, the step is still that of a zero gradient.
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
        learning = sequences[self.settings.can_teach(advantages[sequences])]
        denominator = self.settings.denominator(rollouts.lengths[sequences])
        loss, num_tokens = torch.zeros((), device=advantages.device), 0
        sums: dict[str, Tensor] = {}
        for batch in micro_batches(prompts, rollouts, advantages, learning, self.token_budget):
            part, metrics = self.loss(batch, denominator)
            part.backward()
            loss += part.detach()
            num_tokens += len(batch.tokens)
            num_read = metrics["tokens"] - metrics["dropped_tokens"]
            totals = {name: metrics[name] * num_read for name in TOKEN_METRICS} | {"tokens": num_read}
            sums = {name: sums[name] + value if sums else value for name, value in totals.items()}
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad)
        if not (loss.isfinite() and grad_norm.isfinite()):
            raise NonFiniteError(f"{when}: {self._find_non_finite(prompts, rollouts, advantages, learning, denominator)}")
        self.optimizer.step()

        return UpdateMetrics(
            loss=float(loss),
            grad_norm=float(grad_norm),
            num_sequences=len(learning),
            num_tokens=num_tokens,
            num_targets=int(sums.get("tokens", 0)),
            **{name: float(sums.get(name, 0.0)) for name in TOKEN_METRICS},
        )

    def loss(self, batch: Batch, denominator: float) -> tuple[Tensor, dict[str, Tensor]]:
        """This micro-batch's share of the loss, and its metrics: means over its tokens."""
        settings, ref_logprobs = self.settings, None
        if settings.kl_coef:
            assert self.reference is not None
            ref_logprobs = self._batch_logprobs(self.reference, batch)
        return linear_policy_gradient_loss(
            response_hidden(self.model, batch, self.dtype),
            self.model.lm_head.weight,
            batch.targets,
            batch.advantages,
            batch.cu_seqlens,
            old_logprobs=batch.old_logprobs,
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

    def logprobs(self, model: Decoder, prompts: Prompts, rollouts: Rollouts, sequences: Tensor) -> Tensor:
        """Log-probs of the tokens of the chosen rollouts, ascending, end to end, under `model` at the loss's temperature."""
        none = torch.zeros_like(rollouts.lengths, dtype=torch.float32)
        batches = micro_batches(prompts, rollouts, none, sequences, self.token_budget)
        return torch.cat([none[:0], *(self._batch_logprobs(model, batch) for batch in batches)])

    @torch.no_grad()
    def _batch_logprobs(self, model: Decoder, batch: Batch) -> Tensor:
        hidden = response_hidden(model, batch, self.dtype)
        temperature = self.settings.temperature
        return linear_token_logprobs(hidden, model.lm_head.weight, batch.targets, temperature=temperature)[0]

    def reset_reference(self) -> None:
        """Make the policy as it is now the reference, and forget the optimizer's moments."""
        assert self.reference is not None
        self.reference.load_state_dict(self.model.state_dict())
        self.optimizer.state.clear()

    def _find_non_finite(
        self, prompts: Prompts, rollouts: Rollouts, advantages: Tensor, sequences: Tensor, denominator: float
    ) -> str:
        """What became non-finite, and for which prompt: every prompt again, alone."""
        for name, parameter in self.model.named_parameters():
            if not parameter.isfinite().all():
                return f"the weight {name} is not finite"
        group = sequences // (len(rollouts.lengths) // len(prompts))
        for g in group.unique().tolist():
            where = f"for prompt {int(prompts.ids[g])}"
            if not advantages[sequences[group == g]].isfinite().all():
                return f"an advantage is not finite {where}"
            self.model.zero_grad()
            for batch in micro_batches(prompts, rollouts, advantages, sequences[group == g], self.token_budget):
                loss, _ = self.loss(batch, denominator)
                if not loss.isfinite():
                    return f"the loss is {float(loss.detach())} {where}"
                loss.backward()
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None and not parameter.grad.isfinite().all():
                    return f"the gradient of {name} is not finite {where}"
        return "the gradient summed over the prompts is not finite, though each prompt's own is"
