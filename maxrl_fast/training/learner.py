"""The learner: samples and their advantages in, one optimizer step on the loss of the whole batch."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from maxrl_fast.distributed.ranks import Ranks
from maxrl_fast.errors import NonFiniteError
from maxrl_fast.model.formed_attention import PLAIN, AttentionForm, formed_attention
from maxrl_fast.model.linear import own_part, whole
from maxrl_fast.model.packed_kernels import choose_rows
from maxrl_fast.model.policy_model import PolicyModel
from maxrl_fast.ops import linear_policy_gradient_loss, linear_row_statistics, linear_token_logprobs
from maxrl_fast.ops.losses import LOSSES, loss_numbers
from maxrl_fast.ops.nucleus_entropy import linear_nucleus_entropy
from maxrl_fast.ops.row_statistics import RowStatistics
from maxrl_fast.ops.token_batch import has_term_of_chosen, has_term_without_advantage
from maxrl_fast.records import Samples
from maxrl_fast.training.critic import Critic
from maxrl_fast.training.optimizer import moment_variance, zero_gradients
from maxrl_fast.training.packing import MicroBatch, Packer, merge_cost
from maxrl_fast.training.sharding import gradients_stay
from maxrl_fast.transfers import to_host

SIREN_NUCLEUS = 0.8  # the probability of the tokens whose entropy SIREN is about


@dataclass(frozen=True)
class LossSettings:
    """The arguments of ops.policy_gradient_loss that stay the same over a run."""

    loss: str
    aggregation: str
    clip_low: float = 0.2
    clip_high: float = 0.2
    kl: str = "k3"
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    temperature: float = 1.0
    max_new_tokens: int = 1  # the constant of seq_sum_constant
    loss_options: Mapping[str, float] = field(default_factory=dict)
    siren: float = 0.0  # coefficient of SIREN's term, whose slopes the samples have

    def denominator(self, lengths: Tensor) -> float:
        """Return what the summed loss of responses of these lengths [S] is divided by, however they are split into
        micro-batches."""
        if self.aggregation == "token_mean":
            return float(lengths.sum())
        return float(len(lengths) * (self.max_new_tokens if self.aggregation == "seq_sum_constant" else 1))

    @property
    def numbers(self) -> list[float]:
        """Return the loss's own numbers, in the order of ops.LOSSES."""
        return loss_numbers(self.loss, self.loss_options)

    @property
    def own_options(self) -> dict[str, float]:
        """Return the loss's own numbers by name."""
        return dict(zip(LOSSES[self.loss].options, self.numbers, strict=True))

    def has_gradient(self, advantages: Tensor) -> Tensor:
        """Return which sequences [S] have a gradient at all, given their advantages [S] and no token_statistics."""
        own = has_term_without_advantage(self.loss, self.numbers)
        if self.kl_coef or self.entropy_coef or self.siren or own:
            return torch.ones_like(advantages, dtype=torch.bool)
        return advantages != 0


TOKEN_METRICS = ("ratio", "ratio_clamped", "clipped_low", "clipped_high", "kl", "logprob_diff")


@dataclass(frozen=True)
class UpdateMetrics:
    """What one update did. From `ratio` to `logprob_diff` the numbers are sums over the tokens trained on."""

    loss: float
    grad_norm: float  # before clipping
    num_sequences: int  # that went through the model
    num_tokens: int  # of their prompts, each once, and of their responses
    num_targets: int  # response tokens trained on
    ratio: float
    ratio_clamped: float
    clipped_low: float
    clipped_high: float
    kl: float
    logprob_diff: float  # |logp - sampled logp|
    moment_variance: float = 0.0  # after the step


def run_batch(
    module: nn.Module, batch: MicroBatch, dtype: torch.dtype, finish: Callable[[Tensor, Tensor], Any] | None = None
) -> Any:
    """Return the hidden states [T, H] that predict the batch's targets, in `dtype`, or what `finish` makes of them and the
    output matrix [V, H]."""

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        return formed_attention(q, k, v, batch.layout, form)

    def of_targets(hidden: Tensor, weight: Tensor) -> Any:
        hidden = choose_rows(hidden, batch.target_rows)
        return hidden if finish is None else finish(hidden, weight)

    return module(batch.tokens, batch.positions, attention, batch.rows, dtype, of_targets)


@dataclass
class Learner:
    """A policy, its optimizer and its loss.

    Args:
        model: the policy, trained in place.
        clip_grad: largest gradient norm.
        token_budget: largest number of tokens in one forward and backward pass.
        dtype: of the computation; weights, gradients and moments are float32.
        reference: the reference policy, of settings.kl_coef and of objectives that need one.
        objective_state: tensors of the objective that checkpoints keep, by name.
        critic: of objectives that need one; checkpoints keep it too.
        module: what runs the policy's passes (sharding.distribute); the model itself with one process.
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

    def __post_init__(self) -> None:
        self._module = self.model if self.module is None else self.module
        # Whether each rank holds only its part of every weight (FSDP2).
        self.shares_weights = own_part(self.model.lm_head.weight) is not self.model.lm_head.weight
        self._merge_cost = merge_cost(self.model.config, own_part(self.model.lm_head.weight).device)

    def update(self, samples: Samples, advantages: Tensor, sequences: Tensor, *, when: str, lr: float) -> UpdateMetrics:
        """Take one optimizer step on some of the samples, the same step on all ranks.

        Args:
            advantages: [S] of all samples.
            sequences: int64, ascending: the samples of this update. The loss is averaged over all of these; those without a
                gradient count in the average and are not computed.
            when: for messages, such as "step 3".
            lr: learning rate.

        Raises:
            NonFiniteError: naming the step, the prompt and what was not finite; the weights are left as they were.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.zero_gradients()
        for parameter in (p for p in self.model.parameters() if p.requires_grad and p.grad is None):
            # Zeros, not None: where no sample has a gradient, the optimizer still takes a step with a zero gradient.
            parameter.grad = torch.zeros_like(parameter)
        # Bitwise identical on all ranks, which must agree on the samples that have a gradient.
        packer = self.packer(samples, self.ranks.from_first(advantages.clone()))
        learning, denominator = self.select(packer, sequences)
        # In float64, so that sums of integers stay exact: loss, tokens computed, then sums over the trained tokens.
        sums = torch.zeros(len(TOKEN_METRICS) + 3, dtype=torch.float64, device=advantages.device)
        for batch, is_own, is_last in self.passes(packer, learning):
            with contextlib.nullcontext() if is_last else gradients_stay(self._module):
                # Gradients become means over the ranks. A factor of the loss would be another pass over its gradients.
                part, metrics = self.loss(batch, denominator / self.ranks.size)
                (part if is_own else 0 * part).backward()  # a pass that only keeps step with the others adds nothing
            if is_own:
                num_read = metrics["tokens"] - metrics["dropped_tokens"]
                totals = [metrics[name] * num_read for name in TOKEN_METRICS]
                computed = num_read.new_full((), len(batch.tokens))
                sums += torch.stack([part.detach() / self.ranks.size, computed, num_read, *totals])
        # One read, which waits for the backward pass: the weights must not change if something is not finite.
        norm = whole(nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad))
        sums, norm = to_host(self.ranks.sum(sums), norm)
        (loss, num_tokens, num_targets, *of_tokens), grad_norm = sums.tolist(), float(norm)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise NonFiniteError(f"{when}: {self._find_non_finite(packer, learning, denominator)}")
        self.optimizer.step()
        variance = moment_variance(self.optimizer)
        if self.shares_weights:
            variance = float(self.ranks.sum(torch.full((), variance, dtype=torch.float64, device=advantages.device)))
        return UpdateMetrics(
            loss=loss,
            grad_norm=grad_norm,
            num_sequences=len(learning),
            num_tokens=int(num_tokens),
            num_targets=int(num_targets),
            **dict(zip(TOKEN_METRICS, of_tokens, strict=True)),
            moment_variance=max(0.0, variance),
        )

    def select(self, packer: Packer, sequences: Tensor) -> tuple[Tensor, float]:
        """Return which of the sequences have a gradient, on the host, and the denominator of the loss over all of them."""
        sequences = sequences.cpu()
        lengths = packer.lengths[sequences]
        has_gradient = self.settings.has_gradient(packer.host_advantages[sequences])
        if has_term_of_chosen(self.settings.loss, self.settings.numbers):
            has_gradient = has_gradient | packer.has_statistic[sequences]
        return sequences[has_gradient & (lengths > 0)], self.settings.denominator(lengths)

    def packer(self, samples: Samples, advantages: Tensor | None = None) -> Packer:
        """Return what cuts these samples into micro-batches, with their advantages [S] if there are any."""
        none = torch.zeros(len(samples.rollouts), device=samples.rollouts.tokens.device)
        return Packer(samples.prompts, samples.rollouts, none if advantages is None else advantages, self._merge_cost)

    def passes(self, packer: Packer, sequences: Tensor) -> Iterator[tuple[MicroBatch, bool, bool]]:
        """Give this rank's micro-batches of the chosen sequences: (batch, whether it is its own, whether it is the last).

        All ranks make the same number of passes, since they exchange gradients, and sharded weights, in them; a rank with
        less to do repeats the shortest response.
        """
        parts = [packer.split(share, self.token_budget) for share in packer.share(sequences, self.ranks.size)]
        own, num_passes = parts[self.ranks.rank], max(len(part) for part in parts)
        for i in range(num_passes):
            is_own = i < len(own)
            yield packer.pack(own[i] if is_own else packer.shortest(sequences)), is_own, i == num_passes - 1

    def loss(self, batch: MicroBatch, denominator: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Return this micro-batch's share of the loss, and its metrics, which are means over its tokens."""
        settings, ref_logprobs, advantages = self.settings, None, batch.advantages
        if batch.importance_weights is not None:
            advantages = batch.by_token(advantages) * batch.importance_weights
        if settings.kl_coef:
            assert self.reference is not None
            ref_logprobs = self._batch_logprobs(self.reference, batch)

        temperature, softcap = self._scaled(self.model)

        def finish(hidden: Tensor, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss, metrics = linear_policy_gradient_loss(
                hidden,
                weight,
                batch.targets,
                advantages,
                batch.cu_seqlens,
                advantages_per_token=batch.importance_weights is not None,
                old_logprobs=batch.old_logprobs,
                ref_logprobs=ref_logprobs,
                token_statistics=batch.token_statistics,
                top_tokens=batch.top_tokens,
                loss=settings.loss,
                clip_low=settings.clip_low,
                clip_high=settings.clip_high,
                kl=settings.kl,
                kl_coef=settings.kl_coef,
                entropy_coef=settings.entropy_coef,
                loss_options=settings.loss_options,
                temperature=temperature,
                softcap=softcap,
                aggregation=settings.aggregation,
                denominator=denominator,
            )
            if batch.entropy_slopes is not None:
                loss = loss + self._entropy_term(batch, hidden, weight) / denominator
            return loss, metrics

        loss, metrics = run_batch(self._module, batch, self.dtype, finish)
        return loss, metrics

    def _entropy_term(self, batch: MicroBatch, hidden: Tensor, weight: Tensor) -> Tensor:
        """Return 0 with the gradient of the sum of slopes times the entropies of nuclei."""
        assert batch.entropy_slopes is not None
        index = batch.entropy_slopes.nonzero()[:, 0]
        entropies = self._nucleus_entropies_of(self.model, hidden[index], weight)
        return (batch.entropy_slopes[index] * (entropies - entropies.detach())).sum()

    def _nucleus_entropies_of(self, model: PolicyModel, hidden: Tensor, weight: Tensor) -> Tensor:
        temperature, softcap = self._scaled(model)
        return linear_nucleus_entropy(hidden, weight, top_p=SIREN_NUCLEUS, temperature=temperature, softcap=softcap)

    def _scaled(self, model: PolicyModel) -> tuple[float, float]:
        """Return temperature and softcap for logits hidden @ weight.T, which lack the model's logit_scale."""
        return self.settings.temperature / model.logit_scale, model.softcap / model.logit_scale

    def logprobs(self, model: PolicyModel, samples: Samples, sequences: Tensor) -> Tensor:
        """Return the log-probs of the tokens of the chosen samples, ascending, packed, under `model` at the loss's
        temperature."""
        return self.of_tokens(self._batch_logprobs, model, samples, sequences)

    def entropies(self, model: PolicyModel, samples: Samples, sequences: Tensor) -> Tensor:
        """Return the entropies, in nats, of the distributions of the same tokens, as `logprobs`."""
        return self.of_tokens(self._batch_entropies, model, samples, sequences)

    def row_statistics(self, model: PolicyModel, samples: Samples, *, top_k: int, min_p: float) -> RowStatistics:
        """Return ops.row_statistics of the tokens of all samples under `model` at the loss's temperature."""
        tokens, packer = samples.rollouts.tokens, self.packer(samples)
        per_token, per_top = tokens.new_zeros(len(tokens), dtype=torch.float32), tokens.new_zeros(len(tokens), top_k)
        results = [per_token, per_token.clone(), per_top, per_top.float(), per_token.clone()]
        compute = partial(self._batch_row_statistics, top_k=top_k, min_p=min_p)
        return RowStatistics(*self._filled(compute, model, packer, samples.sequences, results))

    @torch.no_grad()
    def _batch_row_statistics(self, model: PolicyModel, batch: MicroBatch, top_k: int, min_p: float) -> RowStatistics:
        temperature, softcap = self._scaled(model)

        def finish(hidden: Tensor, weight: Tensor) -> RowStatistics:
            return linear_row_statistics(
                hidden, weight, batch.targets, top_k=top_k, min_p=min_p, temperature=temperature, softcap=softcap
            )

        values: RowStatistics = run_batch(model, batch, self.dtype, finish)
        return values

    def nucleus_entropies(self, model: PolicyModel, samples: Samples, sequences: Tensor) -> Tensor:
        """Return the entropies, in nats, of the nuclei of the same tokens' distributions that have SIREN_NUCLEUS of the
        probability, as `logprobs`."""

        @torch.no_grad()
        def compute(model: PolicyModel, batch: MicroBatch) -> Tensor:
            entropies: Tensor = run_batch(model, batch, self.dtype, partial(self._nucleus_entropies_of, model))
            return entropies

        return self.of_tokens(compute, model, samples, sequences)

    def of_tokens(
        self, compute: Callable[[PolicyModel, MicroBatch], Tensor], model: PolicyModel, samples: Samples, sequences: Tensor
    ) -> Tensor:
        """Return what `compute` gives for the tokens of the chosen samples, ascending, packed, float32; all ranks must call
        this."""
        tokens, packer, sequences = samples.rollouts.tokens, self.packer(samples), sequences.cpu()
        zeros = torch.zeros(len(tokens), device=tokens.device)
        (results,) = self._filled(lambda *given: (compute(*given),), model, packer, sequences, [zeros])
        return results if len(sequences) == len(samples.rollouts) else results[packer.positions(sequences)]

    def _filled(
        self,
        compute: Callable[[PolicyModel, MicroBatch], Sequence[Tensor]],
        model: PolicyModel,
        packer: Packer,
        sequences: Tensor,
        results: list[Tensor],
    ) -> list[Tensor]:
        """Return the results [T, ...] with what `compute` gives for the tokens of each micro-batch, the same on all ranks."""
        for batch, is_own, _ in self.passes(packer, sequences):
            if is_own or self.shares_weights:
                values = compute(model, batch)
            if is_own:
                for result, value in zip(results, values, strict=True):
                    result[batch.target_index] = value
        return [self.ranks.sum(result) for result in results]

    def _batch_logprobs(self, model: PolicyModel, batch: MicroBatch) -> Tensor:
        return self._logprobs_and_entropies(model, batch)[0]

    def _batch_entropies(self, model: PolicyModel, batch: MicroBatch) -> Tensor:
        return self._logprobs_and_entropies(model, batch)[1]

    @torch.no_grad()
    def _logprobs_and_entropies(self, model: PolicyModel, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        temperature, softcap = self._scaled(model)

        def finish(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return linear_token_logprobs(hidden, weight, batch.targets, temperature=temperature, softcap=softcap)

        values: tuple[Tensor, Tensor] = run_batch(model, batch, self.dtype, finish)
        return values

    def copy_policy(self) -> None:
        """Copy the policy as it is now into the reference policy and the critic, where there are any."""
        self.set_reference()
        if self.critic is not None:
            self.critic.start_from(self.model)

    def set_reference(self) -> None:
        """Make the policy as it is now the reference policy, where there is one."""
        if self.reference is not None:
            self.reference.load_state_dict(self.model.state_dict())

    def restart_from_reference(self) -> None:
        """Make the policy as it is now the reference policy, and forget the optimizer's moments."""
        self.set_reference()
        self.optimizer.state.clear()

    def zero_gradients(self) -> None:
        """Set all gradients that there are to zero."""
        zero_gradients(self.model)

    def _find_non_finite(self, packer: Packer, sequences: Tensor, denominator: float) -> str:
        """Say what became non-finite, and for which prompt: compute every prompt again, alone, on all ranks alike."""
        for name, parameter in self.model.named_parameters():
            if not whole(parameter.detach()).isfinite().all():
                return f"the weight {name} is not finite"
        group = sequences // packer.num_rollouts
        for g in group.unique().tolist():
            where = f"for prompt {int(packer.prompts.ids[g])}"
            own = sequences[group == g]
            if not packer.advantages[own.to(packer.advantages.device)].isfinite().all():
                return f"an advantage is not finite {where}"
            self.zero_gradients()
            for part in packer.split(own, self.token_budget):
                loss, _ = self.loss(packer.pack(part), denominator)
                if not loss.isfinite():
                    return f"the loss is {float(loss.detach())} {where}"
                loss.backward()
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None and not whole(parameter.grad).isfinite().all():
                    return f"the gradient of {name} is not finite {where}"
        return "the gradient summed over the prompts is not finite, though each prompt's own is"


def frozen_copy(model: PolicyModel) -> PolicyModel:
    """Return a frozen copy of the policy. Weights that are never trained, as under adapters, are shared."""
    shared = {id(p): p for p in model.parameters() if not p.requires_grad}
    return copy.deepcopy(model, shared).requires_grad_(False)
