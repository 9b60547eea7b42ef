"""The learner makes one optimizer step, AdamW on float32 weights, on the loss of a whole batch."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Literal, NoReturn

import torch
from torch import Tensor, nn

from maxrl_fast.algorithms.losses import highest_entropies, near_responses, nucleus_entropy, siren
from maxrl_fast.algorithms.options import DERIVED, BelowOne, Code, Limit, NotNegative, Share
from maxrl_fast.algorithms.tokens import Tokens
from maxrl_fast.errors import NonFiniteError, TeacherError
from maxrl_fast.model.attention import has_kernel
from maxrl_fast.model.linear import full_tensor
from maxrl_fast.model.policy_model import Change, PolicyModel, find_nonfinite
from maxrl_fast.ops import linear_divergence
from maxrl_fast.ops.divergence import BETA
from maxrl_fast.ops.logit_chunks import by_chunks
from maxrl_fast.ops.loss import loss_of_hidden
from maxrl_fast.ops.loss_kernel import Aggregation, LossInputs, LossSums, LossTerms
from maxrl_fast.records import Rollouts, Samples, sequence_sums
from maxrl_fast.runtime.device import to_host
from maxrl_fast.runtime.ranks import Ranks
from maxrl_fast.training.packing import MicroBatch, Packer
from maxrl_fast.training.passes import Kept, Passes, run_batch
from maxrl_fast.training.schedule import seed_of


@dataclass(frozen=True)
class LearningRate:
    """Linear warm-up to `peak`, then constant, or cosine decay to a tenth of the peak; steps count
    from 1."""

    peak: float
    steps: int
    warmup_steps: int
    schedule: str = "cosine"  # or "constant"

    def at(self, step: int) -> float:
        if step <= self.warmup_steps:
            return self.peak * step / self.warmup_steps
        if self.schedule == "constant":
            return self.peak
        progress = (step - self.warmup_steps) / max(self.steps - self.warmup_steps, 1)
        return self.peak * (0.55 + 0.45 * math.cos(math.pi * progress))


def make_optimizer(model: nn.Module, beta2: float, weight_decay: float) -> torch.optim.AdamW:
    """Build a fused AdamW with weight decay on matrices only, all in float32, so that changes too
    small for bfloat16 add up."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, beta2), fused=True)


def take_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    lr: float,
    clip_grad: float,
    refuse: Callable[[float, float], NoReturn],
    *numbers: Tensor,
) -> tuple[float, list[Tensor]]:
    """Clip the gradients and take the optimizer's step. Return the norm before clipping, and the
    numbers on the host. The first is the loss: where it or the norm is not finite, `refuse` is
    called with both, and the weights are unchanged."""
    for p in model.parameters():
        if p.requires_grad and p.grad is None:  # of no sample: the optimizer would skip it
            p.grad = torch.zeros_like(p)
    norm = full_tensor(nn.utils.clip_grad_norm_(model.parameters(), clip_grad))
    # one read before the step: values that are not finite must not change the weights
    norm, *read = to_host(norm, *numbers)
    loss, grad_norm = float(read[0].flatten()[0]), float(norm)
    if not (math.isfinite(loss) and math.isfinite(grad_norm)):
        refuse(loss, grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return grad_norm, read


class ValueHead(nn.Module):
    """The last layer of a critic: value = hidden state @ `weight` [H], which starts at 0."""

    def __init__(self, size: int, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, device=device))


def critic_model(policy: PolicyModel, make: Change = None) -> PolicyModel:
    """Copy an unsharded policy, with a value head as last layer; both train the same weights."""
    critic: PolicyModel = policy.copied(make, policy.lm_head)
    critic.set_output(ValueHead(policy.config.hidden_size, policy.lm_head.weight.device))
    return critic


@dataclass
class Critic:
    """Trained in place; `module` (passes.distribute) runs its training passes."""

    model: PolicyModel
    optimizer: torch.optim.Optimizer
    lr: float
    value_clip: float
    module: nn.Module

    @torch.no_grad()
    def start_from(self, policy: PolicyModel) -> None:
        weights = dict(policy.named_parameters())
        for name, own in self.model.named_parameters():
            if own is not self.model.lm_head.weight and own is not weights[name]:
                own.copy_(weights[name])


Template = Annotated[str, Limit("text with {text}", lambda x: "{text}" in x)]


@dataclass(frozen=True)
class LossOptions:
    """Terms of the loss."""

    aggregation: Aggregation = DERIVED
    """How token losses are averaged: token_mean over the batch, seq_mean_token_mean (grpo),
    seq_mean_token_sum (pacs, luspo) or seq_sum_constant (dr_grpo). By default the objective's."""
    top_entropy: Share = 1.0
    """Share of tokens, those of highest entropy, with a policy gradient (80/20 paper: 0.2)."""
    entropy_coef: NotNegative = 0.0
    """Coefficient of the entropy bonus, per nat."""
    siren: NotNegative = 0.0
    """Penalty that keeps the entropy of uncertain tokens near its start (paper: 0.005)."""
    kl_coef: NotNegative = 0.0
    """Coefficient of the divergence from the reference policy, per nat."""
    kl: Literal["k1", "k2", "k3", "k3+", "full"] = "k3"
    """Its estimator; full: the exact one, of the whole vocabulary."""
    divergence: Literal["reverse", "forward", "jsd"] = "reverse"
    """Of --kl full: KL(policy || teacher), KL(teacher || policy) or Jensen-Shannon's."""
    jsd_beta: Annotated[float, BETA] = 0.5
    """The teacher's weight in --divergence jsd."""
    reference: str | None = None
    """Reference policy or teacher: a checkpoint with the policy's tokenizer. By default the policy
    when reinforcement learning begins."""
    teacher_prompt: Code | None = None
    """What the reference policy, by default that of each step, reads in place of the prompt: the
    question and its answer, a correct response of the group (sibling) or what the check of the
    response said (feedback); or FILE.py:f(prompt, **columns) -> text or messages."""
    teacher_template: Template | None = None
    """Text of answer, sibling or feedback, with {prompt} and {text}, in place of the default."""
    teacher_ema: BelowOne = 0.0
    """With --teacher-prompt the teacher is a copy that moves this share towards the policy in each
    update (SDPO: 0.05); 0: the policy itself."""


@dataclass(frozen=True)
class LossSettings(LossTerms):
    temperature: float = 1.0  # of the policy whose log-probs the loss is about
    max_new_tokens: int = 1  # the constant of seq_sum_constant
    divergence: str = "reverse"  # of linear_divergence, with its beta
    jsd_beta: float = 0.5
    divergence_coef: float = 0.0  # of the exact divergence from the reference policy
    top_entropy: float = 1.0  # part of an update's tokens, by entropy, with a policy gradient
    siren: float = 0.0  # coefficient of SIREN's term; 0: none
    # delta of near_responses, whose tokens have a policy gradient; None: all have
    sequence_mask: float | None = None
    seed: int = 0  # of losses that draw tokens
    teacher_ema: float = 0.0  # by which the reference follows the policy in each update

    def denominator(self, lengths: Tensor) -> float:
        if self.aggregation == "token_mean":
            return float(lengths.sum())
        per_response = self.max_new_tokens if self.aggregation == "seq_sum_constant" else 1
        return float(len(lengths) * per_response)

    @property
    def masks(self) -> list[Callable[[Tokens], Tensor]]:
        """What returns which tokens [T] bool keep their advantage."""
        found = list[Callable[[Tokens], Tensor]]()
        if self.sequence_mask is not None:
            found.append(partial(near_responses, delta=self.sequence_mask))
        if self.top_entropy < 1:
            found.append(partial(highest_entropies, share=self.top_entropy))
        if self.spec.masks:
            found.append(partial(self.spec.compare, options=dict(self.options)))
        return found

    @property
    def over_batch(self) -> bool:
        """Whether a token's loss depends on other responses of the update."""
        return bool(self.masks or self.spec.statistics or self.siren)


REFERENCE = "the reference policy's numbers are"
Draw = tuple[int, int]  # the step and the update within it, for losses that draw tokens
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
    own: dict[str, float] = field(default_factory=dict)  # of what compares an update's tokens


@dataclass
class Plan:
    packer: Packer
    sequences: Tensor  # int64, ascending, on the host: those with a gradient
    denominator: float
    settings: LossSettings
    statistics: Tensor | None = None  # [T, ...], of the loss
    siren: Tensor | None = None  # [T] float64, the derivative of SIREN's term by nucleus entropies
    own: dict[str, Tensor] = field(default_factory=dict)  # metrics, scalars
    # of each micro-batch its sequences and [11] float64: LossSums, and the tokens computed
    done: Kept = field(default_factory=list)


@dataclass
class Learner:
    """A policy, its optimizer and its loss, computed in `dtype`; weights, gradients and moments are
    float32. Checkpoints store `objective_state`. All ranks must call its methods together."""

    model: PolicyModel
    optimizer: torch.optim.Optimizer
    settings: LossSettings
    clip_grad: float
    token_budget: int
    dtype: torch.dtype
    reference: PolicyModel | None = None
    ranks: Ranks = field(default_factory=Ranks)
    module: nn.Module | None = None  # of passes.distribute; None: the model
    objective_state: dict[str, Tensor] = field(default_factory=dict)
    critic: Critic | None = None
    copies_policy: bool = True  # the reference is the policy at an earlier time, not a teacher

    def __post_init__(self) -> None:
        self._module = self.model if self.module is None else self.module
        # one kernel attends to a whole forest; elsewhere each level is a call, which is slow
        head_dim = self.model.config.head_dim
        self.passes = Passes(
            self.ranks,
            self.token_budget,
            self.dtype,
            self.settings.temperature,
            shares_all=has_kernel(self.device, torch.float32, head_dim),
            shares_weights=bool(self.model.bare),
        )
        self.accumulated: list[Plan] = []

    def forward_backward(
        self, samples: Samples, advantages: Tensor, sequences: Tensor, draw: Draw = (0, 0)
    ) -> None:
        """Add the gradient of the loss of some samples, with the advantages [S] of all, to that of
        earlier calls since the last step; a call that fails or is interrupted discards the sum.
        sequences: int64, ascending: those over which the loss is averaged, also the ones without a
        gradient, which are not computed."""
        earlier, self.accumulated = self.accumulated, []
        if not earlier:
            # DDP's stand in its buckets
            self.optimizer.zero_grad(set_to_none=self._module is self.model)
        plan = self.plan(samples, advantages, sequences, draw)
        for part in self.passes.with_gradients(self._module, plan.packer, plan.sequences):
            part.add(plan.done, *self.loss(plan, part.batch))
        self.accumulated = [*earlier, plan]

    def optim_step(self, *, when: str, lr: float) -> UpdateMetrics:
        """Clip the sum of the gradients and take the optimizer's step. NonFiniteError says `when`,
        names the prompts and leaves the weights unchanged."""
        plans, self.accumulated = self.accumulated, []
        done = [done for x in plans for done in x.done]
        sums = self.passes.total(done, 1 + len(LossSums._fields), self.device)
        of_loss, refuse = plans[-1].own, partial(self._refuse, plans, when)
        how = self.model, self.optimizer, lr, self.clip_grad, refuse
        grad_norm, (found, *read) = take_step(*how, sums, *of_loss.values())
        if self.settings.teacher_ema:
            self.set_reference(self.settings.teacher_ema)
        *of_tokens, num_tokens = found.tolist()
        own = {name: value.item() for name, value in zip(of_loss, read, strict=True)}
        if "siren_anchor" in own:
            self.objective_state["siren_anchor"].fill_(own["siren_anchor"])
        total = dict(zip(LossSums._fields, of_tokens, strict=True))
        return UpdateMetrics(
            loss=total["loss"],
            grad_norm=grad_norm,
            num_sequences=sum(len(x.sequences) for x in plans),
            num_tokens=int(num_tokens),
            num_tokens_alone=sum(
                int(x.packer.rows.lengths[x.sequences.numpy()].sum()) for x in plans
            ),
            num_targets=int(total["tokens"] - total["dropped_tokens"]),
            **{name: total[name] for name in TOKEN_METRICS},
            own=own,
        )

    @property
    def device(self) -> torch.device:
        return self.model.lm_head.weight.device

    def plan(self, samples: Samples, advantages: Tensor, sequences: Tensor, draw: Draw) -> Plan:
        sequences, settings = sequences.cpu(), self.settings
        found, own = dict[str, Any](), dict[str, Tensor]()
        if settings.over_batch:
            samples, advantages, found, own = self._compare(samples, advantages, sequences, draw)
            settings = settings.of_masked if settings.spec.masks else settings
        # broadcast: ranks must agree on which samples have a gradient
        packer = self.passes.packer(samples, self.ranks.from_first(advantages.clone()))
        learns = packer.host_advantages != 0
        all_learn = settings.siren or settings.needs_every_token
        if samples.teacher_prompts is None:
            all_learn = all_learn or settings.divergence_coef
        elif settings.divergence_coef:
            given = samples.teacher_weights  # in the place of advantages
            given = torch.ones_like(advantages) if given is None else given
            teacher = self.passes.packer(Samples(samples.teacher_prompts, samples.rollouts), given)
            packer = replace(packer, teacher=teacher)
            learns |= teacher.host_advantages != 0
        lengths = packer.lengths[sequences]
        has_gradient = (learns[sequences] | bool(all_learn)) & (lengths > 0)
        denominator = settings.denominator(lengths)
        return Plan(packer, sequences[has_gradient], denominator, settings, **found, own=own)

    def _compare(
        self, samples: Samples, advantages: Tensor, sequences: Tensor, draw: Draw
    ) -> tuple[Samples, Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Return samples and advantages after the masks, what the loss reads of the tokens, and
        metrics, by a first pass."""
        settings, rollouts = self.settings, samples.rollouts
        index, cu_seqlens, chosen = rollouts.at(sequences)  # [T'] of the rollouts' T tokens
        if not len(index):  # which keeps SIREN's anchor
            return samples, advantages, {}, {}
        values = self.passes.compute(self._values, self.model, samples, sequences).double()
        lengths = cu_seqlens.diff()
        of_tokens = advantages[chosen].double().repeat_interleave(lengths, output_size=len(index))
        if rollouts.importance_weights is not None:
            of_tokens = of_tokens * rollouts.importance_weights[index]
        old, keeps = rollouts.logprobs[index].double(), torch.ones_like(index, dtype=torch.bool)
        tokens = Tokens(values[:, 0], values[:, 1], old, old, of_tokens, keeps, cu_seqlens)
        tokens.generator = torch.Generator().manual_seed(seed_of(settings.seed, *draw))
        found = dict[str, Tensor]()
        for mask in settings.masks:
            keeps = keeps & mask(tokens)
            tokens.advantages = tokens.advantages * keeps
        if settings.spec.statistics is not None:
            found["statistics"] = settings.spec.compare(tokens, dict(settings.options))
        if settings.siren:
            anchor = self.objective_state["siren_anchor"]
            found["siren"] = siren(tokens, values[:, 2], settings.siren, anchor)
        for name, x in found.items():
            found[name] = x.new_zeros(len(rollouts.tokens), *x.shape[1:])
            found[name][index] = x
        if settings.masks:
            kept = torch.ones_like(rollouts.logprobs).index_copy_(0, index, keeps.float())
            samples, advantages = samples.weighted(kept), advantages.clone()
            advantages[chosen] *= sequence_sums(keeps.float(), lengths) > 0
        return samples, advantages, found, tokens.metrics

    def _values(self, model: PolicyModel, batch: MicroBatch, hidden: Tensor) -> Tensor:
        values = self.passes.logprobs_and_entropies(model, batch, hidden)
        more = [self._nucleus_entropies(hidden)[:, None].float()] if self.settings.siren else []
        return torch.cat([values, *more], 1)

    def _nucleus_entropies(self, hidden: Tensor) -> Tensor:
        scaling = self.model.scaling(self.settings.temperature)
        tau = hidden.new_full((len(hidden),), scaling["temperature"], dtype=torch.float64)
        given = hidden, self.model.output_matrix, lambda _, x: nucleus_entropy(x), tau
        return torch.cat(by_chunks(*given, scaling["softcap"]))

    def loss(self, plan: Plan, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return the micro-batch's loss times the number of ranks, over which gradients are
        averaged; and [11] float64: the LossSums, and the tokens computed."""
        settings, num_ranks = plan.settings, self.ranks.size
        teacher_hidden = self._teacher_hidden(batch) if settings.divergence_coef else None
        hidden = run_batch(self._module, batch, self.dtype)  # [T, H]
        advantages, weights = batch.advantages, batch.importance_weights
        if weights is not None:
            advantages = batch.by_token(advantages) * weights
        matrix, scaling = self.model.output_matrix, self.model.scaling(settings.temperature)
        # scaling the loss would cost a pass over its gradients
        denominator = plan.denominator / num_ranks
        inputs = LossInputs(
            *((len(hidden), len(matrix)), hidden.device, batch.targets, scaling["temperature"]),
            mask=None,
            terms=settings,
            advantages=advantages,
            cu_seqlens=batch.cu_seqlens,
            advantages_per_token=weights is not None,
            old_logprobs=batch.old_logprobs,
            ref_logprobs=batch.ref_logprobs if settings.kl_coef else None,
            denominator=denominator,
        )
        at, statistics = batch.target_index, plan.statistics
        loss, computed = loss_of_hidden(
            *(hidden, matrix, inputs, scaling["softcap"]),
            importance_weights=batch.sampler_weights,
            statistics=None if statistics is None else statistics[at],
        )
        loss, sums = loss.float(), LossSums(*computed.unbind())
        if teacher_hidden is not None:
            divergence, kl = self._divergence(batch, hidden, teacher_hidden, denominator)
            loss = loss + divergence
            # the token loss drops tokens with the advantage 0, unlike the divergence
            sums = sums._replace(kl=kl, dropped_tokens=torch.zeros_like(kl))
        sums = sums._replace(loss=loss.detach() / num_ranks)
        if plan.siren is not None:
            slopes = plan.siren[at]
            read = slopes.nonzero()[:, 0]
            of_siren = (slopes[read] * self._nucleus_entropies(hidden[read])).sum()
            loss = loss + (num_ranks * of_siren).float()
        return loss, torch.stack([*sums, sums.kl.new_full((), len(batch.tokens))])

    @torch.no_grad()
    def _teacher_hidden(self, batch: MicroBatch) -> Tensor:
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
        if batch.teacher is not None:
            coefficients *= batch.by_token(batch.teacher.advantages)
        if settings.aggregation == "seq_mean_token_mean":
            coefficients /= batch.by_token(batch.cu_seqlens.diff())
        loss, metrics = linear_divergence(
            hidden * self.model.logit_scale,
            self.model.output_matrix,
            teacher_hidden,
            teacher.output_matrix,
            settings.divergence,
            beta=settings.jsd_beta,
            temperature=settings.temperature,
            softcap=self.model.softcap,
            teacher_softcap=teacher.softcap,
            coefficients=coefficients,
            denominator=denominator,
        )
        if self.reference is not None:
            teacher.reshard()  # after its output matrix has been read
        return loss, metrics["divergence"].double().sum()

    def with_reference(self, samples: Samples, num_updates: int = 1) -> Rollouts:
        """Return the rollouts with log-probs under the reference policy, if there is one, packed as
        by the updates, so that both policies round nearly alike."""
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

    @torch.no_grad()
    def set_reference(self, share: float = 1.0) -> None:
        """Move the reference policy by this share of the way to the policy, unless it is another
        checkpoint."""
        if self.reference is not None and self.copies_policy:
            pairs = zip(self.reference.parameters(), self.model.parameters(), strict=True)
            for own, new in pairs:
                if new.requires_grad:  # the others are the policy's
                    own.copy_(new if share == 1 else own.add(new - own, alpha=share))

    def _refuse(self, plans: list[Plan], when: str, loss: float, grad_norm: float) -> NoReturn:
        name = find_nonfinite(dict(self.model.named_parameters()))
        wrong = "" if name is None else f"the weight {name} is not finite"
        wrong = wrong or next(filter(None, map(_wrong_loss, plans)), "")
        found = next(filter(None, self.ranks.values(wrong)), "")
        if found.startswith(REFERENCE):
            raise TeacherError(f"{when}: {found}")
        none = f"the loss is {loss:g} and the norm of its gradient {grad_norm:g}"
        raise NonFiniteError(f"{when}: {found or none}")


def _wrong_loss(plan: Plan) -> str:
    for sequences, sums in plan.done:
        of_batch = LossSums(*sums[:-1].tolist())
        if not math.isfinite(of_batch.loss):
            is_policy = math.isfinite(of_batch.kl) or not math.isfinite(of_batch.logprob_diff)
            wrong = f"the loss is {of_batch.loss:g}" if is_policy else f"{REFERENCE} not finite"
            ids = plan.packer.prompts.ids.cpu()[(sequences // plan.packer.num_rollouts).unique()]
            several = "one of the prompts" if len(ids) > 1 else "prompt"
            return f"{wrong} for {several} {', '.join(map(str, ids.tolist()))}"
    return ""
