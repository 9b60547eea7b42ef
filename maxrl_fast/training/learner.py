"""The learner makes one optimizer step on the loss of a whole batch."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from maxrl_fast.algorithms.losses.entropy import highest_entropies, nucleus_entropy, siren
from maxrl_fast.algorithms.losses.registry import call_rows
from maxrl_fast.algorithms.losses.sequence_ratios import far_responses
from maxrl_fast.errors import NonFiniteError, TeacherError
from maxrl_fast.model.attention import has_kernel
from maxrl_fast.model.linear import full_tensor
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.ops import linear_divergence, linear_token_logprobs
from maxrl_fast.ops.function_loss import function_loss, linear_rows, tokens_of
from maxrl_fast.ops.loss import loss_of_hidden
from maxrl_fast.ops.loss_kernel import LossInputs, LossSums
from maxrl_fast.records import Rollouts, Samples, gather_sequences
from maxrl_fast.runtime.device import to_device, to_host
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.training.critic import Critic
from maxrl_fast.training.loss_settings import LossSettings
from maxrl_fast.training.optimizer import moment_variance, zero_gradients
from maxrl_fast.training.packing import MicroBatch, Packer
from maxrl_fast.training.passes import Passes, run_batch
from maxrl_fast.training.sharding import exchange_gradients

TOKEN_METRICS = ("ratio", "ratio_clamped", "clipped_low", "clipped_high", "kl", "logprob_diff")


@dataclass(frozen=True)
class UpdateMetrics:
    """Metrics of one update; from `ratio` to `logprob_diff` sums over the tokens trained on."""

    loss: float
    grad_norm: float  # before clipping
    num_sequences: int  # run through the model
    num_tokens: int  # computed, of their prompts and responses
    num_tokens_alone: int  # the same if no two of them shared any
    num_targets: int  # response tokens trained on
    ratio: float
    ratio_clamped: float
    clipped_low: float
    clipped_high: float
    kl: float
    logprob_diff: float  # |logp - sampled logp|
    moment_variance: float = 0.0  # after the step
    # of losses that compare tokens across the update
    own: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class UpdatePlan:
    """What the micro-batches of an update share.

    If a token's loss depends on other responses (`over_batch`), a forward pass first computes the
    whole loss. The micro-batches then backpropagate sum(gradients x token values).
    """

    sequences: Tensor  # int64, ascending, on the host: those with a gradient
    denominator: float
    # [T, 2 + R] float32, of each token's log-prob, entropy and R numbers of its row
    gradients: Tensor | None = None
    sums: Tensor | None = None  # LossSums [10] of the update
    own: dict[str, Tensor] = field(default_factory=dict)  # metrics of the loss function, scalars


@dataclass(frozen=True)
class Accumulated:
    """A pass that has added to the gradient since the last optimizer step."""

    packer: Packer
    plan: UpdatePlan
    settings: LossSettings
    # [3 + len(TOKEN_METRICS)] float64: tokens computed, loss, tokens trained on, TOKEN_METRICS
    sums: Tensor


@dataclass
class Learner:
    """A policy, its optimizer and its loss, computed in `dtype`; weights, gradients and moments are
    float32.

    `reference` is for settings.kl_coef and objectives that need one. Checkpoints store
    `objective_state`. `module` runs the policy's passes (sharding.distribute); None: the model.
    """

    model: PolicyModel
    optimizer: torch.optim.Optimizer
    settings: LossSettings
    clip_grad: float
    token_budget: int
    dtype: torch.dtype
    reference: PolicyModel | None = None
    ranks: Ranks = field(default_factory=Ranks)
    module: nn.Module | None = None
    objective_state: dict[str, Tensor] = field(default_factory=dict)
    critic: Critic | None = None
    copies_policy: bool = True  # the reference is the policy at an earlier time, not a teacher

    def __post_init__(self) -> None:
        self._module = self.model if self.module is None else self.module
        # one kernel attends to a whole forest; elsewhere each level is a call, which is slow
        device, head_dim = self.model.lm_head.weight.device, self.model.config.head_dim
        self.passes = Passes(
            self.ranks,
            self.token_budget,
            self.dtype,
            self.settings.temperature,
            shares_all=has_kernel(device, torch.float32, head_dim),
            shares_weights=bool(self.model.bare),
        )
        self.accumulated: list[Accumulated] = []

    def update(
        self,
        samples: Samples,
        advantages: Tensor,
        sequences: Tensor,
        *,
        when: str,
        lr: float,
        draw: tuple[int, int] = (0, 0),
    ) -> UpdateMetrics:
        """Take one optimizer step on some of the samples. All ranks must call this.

        Args:
            advantages: [S] of all samples.
            sequences: int64, ascending: the samples of this update, over which the loss is
                averaged, also those without a gradient, which are not computed.
            when: for messages, such as "step 3".
            draw: the step and the update within it, for losses that draw tokens.

        Raises:
            NonFiniteError: naming step, prompt and what was not finite; the weights are unchanged.
        """
        self.accumulated = []
        self.forward_backward(samples, advantages, sequences, draw)
        return self.optim_step(when=when, lr=lr)

    def forward_backward(
        self,
        samples: Samples,
        advantages: Tensor,
        sequences: Tensor,
        draw: tuple[int, int] = (0, 0),
    ) -> None:
        """Add the gradient of an `update` to that of earlier calls since the last step; a call that
        fails or is interrupted discards the sum. All ranks must call this."""
        earlier, self.accumulated = self.accumulated, []
        if not earlier:
            zero_gradients(self.model)
        for parameter in (p for p in self.model.parameters() if p.requires_grad and p.grad is None):
            # not None, with which the optimizer takes no step
            parameter.grad = torch.zeros_like(parameter)
        packer = self.packer(samples, advantages)
        plan = self.plan(packer, samples, sequences, draw)
        # float64 keeps sums of integers exact
        sums = torch.zeros(len(TOKEN_METRICS) + 3, dtype=torch.float64, device=advantages.device)
        for batch, is_padding, is_last in self.passes.micro_batches(packer, plan.sequences):
            exchange_gradients(self._module, is_last)
            part, metrics = self.loss(batch, plan)
            (0 * part if is_padding else part).backward()
            if not is_padding:
                num_read = metrics["tokens"] - metrics["dropped_tokens"]
                totals = [metrics[name] * num_read for name in TOKEN_METRICS]
                computed = num_read.new_full((), len(batch.tokens))
                sums += torch.stack([computed, part.detach() / self.ranks.size, num_read, *totals])
        self.accumulated = [*earlier, Accumulated(packer, plan, self.settings, sums)]

    def optim_step(self, *, when: str, lr: float) -> UpdateMetrics:
        """Clip the sum of the gradients and take the optimizer's step. All ranks must call this.
        Raises what `update` does."""
        accumulated, self.accumulated = self.accumulated, []
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # one read before the step: values that are not finite must not change the weights
        norm = full_tensor(nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad))
        sums, *more = map(self._sums_over_ranks, accumulated)
        sums = sum(more, sums)
        of_loss = accumulated[-1].plan.own
        sums, norm, *numbers = to_host(sums, norm, *of_loss.values())
        own = {name: value.item() for name, value in zip(of_loss, numbers, strict=True)}
        (num_tokens, loss, num_targets, *of_tokens), grad_norm = sums.tolist(), float(norm)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            found = (
                replace(self, settings=x.settings)._find_non_finite(x, when) for x in accumulated
            )
            none = "the gradient summed over the prompts is not finite, though each prompt's own is"
            raise NonFiniteError(f"{when}: {next(filter(None, found), none)}")
        if self.settings.siren:
            self.objective_state["siren_anchor"].fill_(own["siren_anchor"])
        self.optimizer.step()
        variance = moment_variance(self.optimizer)
        if self.passes.shares_weights:
            own_part = torch.tensor(
                variance, dtype=torch.float64, device=self.model.lm_head.weight.device
            )
            variance = float(self.ranks.sum(own_part))
        return UpdateMetrics(
            loss=loss,
            grad_norm=grad_norm,
            num_sequences=sum(len(x.plan.sequences) for x in accumulated),
            num_tokens=int(num_tokens),
            num_tokens_alone=sum(
                int(x.packer.rows.lengths[x.plan.sequences.numpy()].sum()) for x in accumulated
            ),
            num_targets=int(num_targets),
            **dict(zip(TOKEN_METRICS, of_tokens, strict=True)),
            moment_variance=max(0.0, variance),
            own=own,
        )

    def _sums_over_ranks(self, x: Accumulated) -> Tensor:
        sums, plan = self.ranks.sum(x.sums), x.plan
        if plan.sums is None:
            return sums
        whole = LossSums(*plan.sums.unbind())  # of the whole update, the same on all ranks
        totals = [getattr(whole, name) for name in TOKEN_METRICS]
        return torch.stack([sums[0], whole.loss, whole.tokens - whole.dropped_tokens, *totals])

    def packer(self, samples: Samples, advantages: Tensor) -> Packer:
        # broadcast: ranks must agree on which samples have a gradient
        packer = self.passes.packer(samples, self.ranks.from_first(advantages.clone()))
        if samples.teacher_prompts is None or not self.settings.divergence_coef:
            return packer
        teacher = self.passes.packer(Samples(samples.teacher_prompts, samples.rollouts))
        return replace(packer, teacher=teacher)

    def plan(
        self, packer: Packer, samples: Samples, sequences: Tensor, draw: tuple[int, int] = (0, 0)
    ) -> UpdatePlan:
        """All ranks must call this."""
        sequences = sequences.cpu()
        lengths = packer.lengths[sequences]
        denominator = self.settings.denominator(lengths)
        if not self.settings.over_batch or not int(lengths.sum()):
            has_gradient = self.settings.has_gradient(packer.host_advantages[sequences])
            own, device = {}, packer.advantages.device
            if self.settings.siren:  # an update without tokens keeps the anchor
                anchor = self.objective_state["siren_anchor"][0].to(device)
                own = {"siren_entropy": torch.zeros((), device=device), "siren_anchor": anchor}
            if self.settings.sequence_mask is not None:
                own["frac_sequences_masked"] = torch.zeros((), device=device)
            return UpdatePlan(sequences[has_gradient & (lengths > 0)], denominator, own=own)
        return self._plan_over_batch(packer, samples, sequences, denominator, draw)

    def _plan_over_batch(
        self,
        packer: Packer,
        samples: Samples,
        sequences: Tensor,
        denominator: float,
        draw: tuple[int, int],
    ) -> UpdatePlan:
        settings, rollouts = self.settings, samples.rollouts
        device = rollouts.tokens.device
        # The update has T' of the rollouts' T tokens, at `index` [T'].
        index, cu_seqlens = gather_sequences(rollouts.cu_seqlens.cpu(), sequences)
        index, cu_seqlens, chosen = to_device(device, index, cu_seqlens, sequences)
        # [T', 2 + R]
        values = self.passes.compute(self._token_values, self.model, samples, sequences)
        values.requires_grad_()
        advantages = torch.repeat_interleave(
            packer.advantages[chosen], cu_seqlens.diff(), output_size=len(index)
        )  # [T']
        if rollouts.importance_weights is not None:  # negative if the objective weights tokens
            advantages = advantages * rollouts.importance_weights[index]
        reference = rollouts.ref_logprobs if settings.kl_coef else None
        batch = LossInputs(
            settings,
            (len(index), self.model.config.vocab_size),
            device,
            rollouts.tokens[index],
            advantages,
            cu_seqlens,
            advantages_per_token=True,
            old_logprobs=rollouts.logprobs[index],
            ref_logprobs=None if reference is None else reference[index],
            denominator=denominator,
        ).batch()
        if rollouts.sampler_weights is not None:
            batch = batch._replace(importance_weights=rollouts.sampler_weights[index])
        rows = values[:, 2:-1] if settings.siren else values[:, 2:]
        tokens = tokens_of(batch, values[:, 0], values[:, 1], rows if rows.shape[1] else None)
        tokens.generator = torch.Generator().manual_seed(_seed(settings.seed, *draw))
        if settings.sequence_mask is not None:
            tokens.advantages = tokens.advantages * ~far_responses(tokens, settings.sequence_mask)
        if settings.top_entropy < 1:
            tokens.advantages = tokens.advantages * highest_entropies(tokens, settings.top_entropy)
        sums = function_loss(settings, batch, tokens)
        total = sums[0]
        if settings.siren:
            total = total + siren(
                tokens, values[:, -1], settings.siren, self.objective_state["siren_anchor"]
            )
        (of_values,) = torch.autograd.grad(total, values)  # [T', 2 + R]
        # broadcast: all ranks must run the same passes
        of_values = self.ranks.from_first(of_values)
        gradients = of_values.new_zeros(len(rollouts.tokens), values.shape[1])
        gradients[index] = of_values
        (is_not_zero,) = to_host((of_values != 0).any(1).cumsum(0))
        # [S'+1] tokens with a gradient before each
        before = torch.nn.functional.pad(is_not_zero, (1, 0))[cu_seqlens.cpu()]
        trained = sequences[before.diff() > 0]
        sums = torch.cat([total[None], sums[1:]]).detach()
        return UpdatePlan(trained, denominator, gradients, sums, tokens.metrics)

    def _token_values(self, model: PolicyModel, batch: MicroBatch, hidden: Tensor) -> Tensor:
        """Return each token's log-prob, entropy and R numbers of its row, [T, 2 + R]."""
        values = self.passes.logprobs_and_entropies(model, batch, hidden)
        if self.settings.spec.rows is None and not self.settings.siren:
            return values
        scaling = model.scaling(self.settings.temperature)
        rows = linear_rows(hidden, model.output_matrix, batch.targets, self._rows, **scaling)
        return torch.cat([values, rows.float()], 1)

    def _rows(self, log_p: Tensor, targets: Tensor) -> Tensor:
        """Return the numbers [C, R] that the loss and SIREN's term read from rows log_p [C, V]."""
        parts, settings = [], self.settings
        if settings.spec.rows is not None:
            parts.append(call_rows(settings.spec, dict(settings.options), log_p, targets))
        if settings.siren:
            parts.append(nucleus_entropy(log_p)[:, None])
        return torch.cat(parts, 1)

    def loss(self, batch: MicroBatch, plan: UpdatePlan) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this micro-batch's share of the loss times the number of ranks, over which
        gradients are averaged, and its metrics, means over its tokens."""
        settings = self.settings
        teacher_hidden = self._teacher_hidden(batch) if settings.divergence_coef else None
        hidden = run_batch(self._module, batch, self.dtype)  # [T, H]
        if plan.gradients is not None:
            loss = self._surrogate(batch, plan.gradients[batch.target_index], hidden)
            none = torch.zeros((), dtype=torch.float64, device=loss.device)
            metrics = dict.fromkeys((*TOKEN_METRICS, "tokens", "dropped_tokens"), none)
            return loss * self.ranks.size, metrics
        advantages = batch.advantages
        if batch.importance_weights is not None:
            advantages = batch.by_token(advantages) * batch.importance_weights
        weight, scaling = self.model.output_matrix, self.model.scaling(settings.temperature)
        # scaling the loss would cost a pass over its gradients
        denominator = plan.denominator / self.ranks.size
        inputs = LossInputs(
            settings,
            (len(hidden), len(weight)),
            hidden.device,
            batch.targets,
            advantages,
            batch.cu_seqlens,
            advantages_per_token=batch.importance_weights is not None,
            old_logprobs=batch.old_logprobs,
            ref_logprobs=batch.ref_logprobs if settings.kl_coef else None,
            temperature=scaling["temperature"],
            denominator=denominator,
        )
        loss, metrics = loss_of_hidden(
            *(hidden, weight, inputs, scaling["softcap"]),
            importance_weights=batch.sampler_weights,
        )
        if teacher_hidden is not None:
            divergence, mean = self._divergence(batch, hidden, teacher_hidden, denominator)
            loss = loss + divergence
            # the token loss drops tokens with the advantage 0, unlike the divergence
            num_tokens = metrics["tokens"].clamp_min(1)
            share = 1 - metrics["dropped_tokens"] / num_tokens
            metrics = {name: metrics[name] * share for name in TOKEN_METRICS} | {
                "tokens": metrics["tokens"],
            }
            metrics |= {"kl": mean, "dropped_tokens": torch.zeros_like(share)}
        return loss, metrics

    @torch.no_grad()
    def _teacher_hidden(self, batch: MicroBatch) -> Tensor:
        """Return the reference policy's hidden states [T, K] of the batch's targets."""
        teacher = self.reference or self.model
        hidden = run_batch(teacher, batch.teacher or batch, self.dtype)
        if self.reference is None:
            teacher.reshard()
        return hidden * teacher.logit_scale

    def _divergence(
        self, batch: MicroBatch, hidden: Tensor, teacher_hidden: Tensor, denominator: float
    ) -> tuple[Tensor, Tensor]:
        teacher, settings = self.reference or self.model, self.settings
        coefficients = torch.full_like(batch.old_logprobs, settings.divergence_coef)
        if settings.aggregation == "seq_mean_token_mean":
            coefficients /= batch.by_token(batch.cu_seqlens.diff())
        loss, metrics = linear_divergence(
            hidden * self.model.logit_scale,
            self.model.output_matrix,
            teacher_hidden,
            teacher.output_matrix,
            settings.divergence,
            beta=settings.beta,
            temperature=settings.temperature,
            softcap=self.model.softcap,
            teacher_softcap=teacher.softcap,
            coefficients=coefficients,
            denominator=denominator,
        )
        if self.reference is not None:
            teacher.reshard()  # after its output matrix has been read
        return loss, metrics["divergence"].mean()

    def _surrogate(self, batch: MicroBatch, gradients: Tensor, hidden: Tensor) -> Tensor:
        """Return sum(gradients [T, 2 + R] x token values) over tokens with a gradient."""
        weight, targets = self.model.output_matrix, batch.targets
        scaling = self.model.scaling(self.settings.temperature)
        index = (gradients[:, :2] != 0).any(1).nonzero()[:, 0]
        logprobs, entropy = linear_token_logprobs(hidden[index], weight, targets[index], **scaling)
        loss = (gradients[index, 0] * logprobs + gradients[index, 1] * entropy).sum()
        if gradients.shape[1] > 2:
            index = (gradients[:, 2:] != 0).any(1).nonzero()[:, 0]
            rows = linear_rows(hidden[index], weight, targets[index], self._rows, **scaling)
            loss = loss + (gradients[index, 2:] * rows).sum()
        return loss

    def with_reference(self, samples: Samples, num_updates: int = 1) -> Rollouts:
        """Return the rollouts with their log-probs under the reference policy, if there is one,
        packed as by the updates, so that both policies round nearly alike. All ranks must call
        this."""
        if self.reference is None and samples.teacher_prompts is None:
            return samples.rollouts
        read = Samples(samples.teacher_prompts or samples.prompts, samples.rollouts)
        shares = samples.sequences.chunk(num_updates)
        ref_logprobs = self.passes.logprobs(self.reference or self.model, read, *shares)
        return replace(samples.rollouts, ref_logprobs=ref_logprobs)

    def copy_policy(self) -> None:
        self.set_reference()
        if self.critic is not None:
            self.critic.start_from(self.model)

    def set_reference(self) -> None:
        """Copy the current policy into the reference policy, unless that is a teacher."""
        if self.reference is not None and self.copies_policy:
            self.reference.load_state_dict(self.model.state_dict())

    def _find_non_finite(self, accumulated: Accumulated, when: str) -> str:
        """Return what is not finite, and for which prompt, or ""; raise TeacherError if that came
        from the reference policy. All ranks must call this."""
        packer, plan = accumulated.packer, accumulated.plan
        for name, parameter in self.model.named_parameters():
            if not full_tensor(parameter.detach()).isfinite().all():
                return f"the weight {name} is not finite"
        sequences, group = plan.sequences, plan.sequences // packer.num_rollouts
        for g in group.unique().tolist():
            where = f"for prompt {int(packer.prompts.ids[g])}"
            own = sequences[group == g]
            if not packer.advantages[own.to(packer.advantages.device)].isfinite().all():
                return f"an advantage is not finite {where}"
            zero_gradients(self.model)
            for part in packer.split(own, self.token_budget):
                batch = packer.pack(part)
                loss, _ = self.loss(batch, plan)
                if not loss.isfinite():
                    if not self._is_teacher_finite(batch):
                        wrong = f"the reference policy's numbers are not finite {where}"
                        raise TeacherError(f"{when}: {wrong}")
                    return f"the loss is {float(loss.detach())} {where}"
                loss.backward()
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None and not full_tensor(parameter.grad).isfinite().all():
                    return f"the gradient of {name} is not finite {where}"
        return ""

    def _is_teacher_finite(self, batch: MicroBatch) -> bool:
        """A policy that is its own teacher counts as the policy."""
        read = [batch.ref_logprobs] if self.settings.kl_coef else []
        if self.reference is not None and self.settings.divergence_coef:
            rows = self._teacher_hidden(batch), self.reference.output_matrix, batch.targets
            read += linear_token_logprobs(*rows, softcap=self.reference.softcap)
        return self.reference is None or all(x is None or bool(x.isfinite().all()) for x in read)


def _seed(*numbers: int) -> int:
    """Return a seed of these numbers alone, so that a resumed run draws the same tokens."""
    (mixed,) = np.random.SeedSequence(numbers).generate_state(1, np.uint64).tolist()
    return int(mixed >> 1)
