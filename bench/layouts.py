"""The update of a training step in two layouts of its batch, for bench.train_step."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.measure import gemm_throughput, milliseconds, peak_bytes, synchronize
from maxrl_fast.model.attention import Forest
from maxrl_fast.model.policy_model import PolicyModel, PolicySizes
from maxrl_fast.ops import linear_policy_gradient_loss
from maxrl_fast.records import Prompts, Rollouts, Samples
from maxrl_fast.training.learner import Learner, LossSettings, Plan, make_optimizer
from maxrl_fast.training.packing import MicroBatch, Packer

SETTINGS = LossSettings(loss="reinforce", aggregation="token_mean")
LAYOUTS = ("shared", "padded")


@dataclass
class Case:
    """A policy, rollouts to learn from, and the token limit of one forward and backward pass."""

    model: PolicyModel
    prompts: Prompts
    rollouts: Rollouts
    token_budget: int
    checkpoint_activations: bool = False


def padded_passes(case: Case, advantages: Tensor, dtype: torch.dtype, denominator: float) -> None:
    """Accumulate the gradients in the padded layout, for prompts of equal length."""
    model, prompts, rollouts = case.model, case.prompts, case.rollouts
    num_rollouts, prompt_length = len(rollouts) // len(prompts), int(prompts.lengths[0])
    device = rollouts.tokens.device
    responses = rollouts.padded_tokens(0)  # [S, L]
    sequences = torch.cat(
        [prompts.tokens.view(len(prompts), -1).repeat_interleave(num_rollouts, 0), responses], 1
    )
    width = sequences.shape[1]
    rows = max(1, case.token_budget // width)
    predicting = torch.arange(prompt_length - 1, width - 1, device=device)
    for start in range(0, len(sequences), rows):
        part = sequences[start : start + rows]
        lengths = rollouts.lengths[start : start + rows]

        def attention(
            layer: int, q: Tensor, k: Tensor, v: Tensor, batch: int = len(part)
        ) -> Tensor:
            q, k, v = (x.view(batch, width, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
            return (
                F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                .transpose(1, 2)
                .flatten(0, 1)
            )

        length = responses.shape[1]
        positions = torch.arange(width, device=device).repeat(len(part))
        asked = (predicting + torch.arange(len(part), device=device)[:, None] * width).flatten()
        loss, _ = linear_policy_gradient_loss(
            model(part.flatten(), positions, attention, asked, dtype),
            model.output_matrix,
            targets=part[:, prompt_length:].flatten(),
            advantages=advantages[start : start + rows],
            cu_seqlens=torch.arange(len(part) + 1, device=device) * length,
            advantages_per_token=False,
            mask=(torch.arange(length, device=device) < lengths[:, None]).flatten(),
            loss="reinforce",
            denominator=denominator,
        )
        loss.backward()


def num_pairs(forest: Forest) -> int:
    """Return the number of pairs of a token and a token that it attends to."""
    levels = (spec for *_, spec in forest.parts[1:])
    above = sum(int((x.q_lengths * x.k_lengths).sum()) for x in levels)
    return above + int((forest.lengths * (forest.lengths + 1) // 2).sum())


def update_flops(config: PolicySizes, batch: MicroBatch) -> int:
    """Return the FLOPs of the matrix multiplications of a forward and a backward pass, without
    recomputation.
    """
    heads, keys = (
        config.num_attention_heads * config.head_dim,
        config.num_key_value_heads * config.head_dim,
    )
    before, after = (
        config.hidden_size * (heads + 2 * keys),
        config.hidden_size * (heads + 3 * config.intermediate_size),
    )
    streamed = config.num_hidden_layers * before + (config.num_hidden_layers - 1) * after
    # the last layer computes only rows that predict
    weights = streamed * len(batch.tokens) + after * len(batch.rows)
    pairs = num_pairs(batch.forest)
    attention = 2 * heads * pairs * config.num_hidden_layers
    return 6 * (weights + attention + config.vocab_size * config.hidden_size * len(batch.targets))


class LayoutUpdates:
    """The same update of a policy in each layout, with learning rate 0 so that every call starts
    from the same weights.
    """

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case, self.dtype = case, dtype
        rollouts = case.rollouts
        generator = torch.Generator().manual_seed(0)
        self.advantages = torch.randn(len(rollouts), generator=generator).to(rollouts.tokens.device)
        self.denominator = float(len(rollouts.tokens))
        self.optimizer = make_optimizer(case.model, beta2=0.99, weight_decay=0.01)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
        self.learner = Learner(case.model, self.optimizer, SETTINGS, 1.0, case.token_budget, dtype)
        passes = self.learner.passes
        self.packer = passes.packer(Samples(case.prompts, rollouts), self.advantages)
        for parameter in case.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()  # allocates the moments, before memory is measured

    @classmethod
    def on_device(cls, case: Case, device: torch.device, dtype: torch.dtype) -> "LayoutUpdates":
        """Build the updates of a case, whose policy and batch this moves to the device."""
        case.model.to(device).checkpoint_activations = case.checkpoint_activations
        case.prompts, case.rollouts = case.prompts.to(device), case.rollouts.to(device)
        return cls(case, dtype)

    def update(self, layout: str) -> None:
        model, budget = self.case.model, self.case.token_budget
        model.zero_grad()
        if layout == "shared":
            self._packed(self.packer, budget)
        else:
            padded_passes(self.case, self.advantages, self.dtype, self.denominator)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        self.optimizer.step()

    def _packed(self, packer: Packer, num_tokens: int) -> None:
        plan = Plan(packer, torch.arange(len(self.advantages)), self.denominator, SETTINGS)
        for part in packer.split(plan.sequences, num_tokens):
            self.learner.loss(plan, packer.pack(part))[0].backward()

    def gradient(self) -> Tensor:
        """The last update's clipped gradient, flat."""
        return torch.cat(
            [p.grad.flatten() for p in self.case.model.parameters() if p.grad is not None]
        )

    def work(self) -> tuple[int, int]:
        """Return the FLOPs and tokens of an update in the layout "shared"."""
        batch = self.packer.pack(torch.arange(len(self.advantages)))
        return update_flops(self.case.model.config, batch), len(batch.tokens)


def first_updates(
    updates: LayoutUpdates, layouts: Sequence[str], device: torch.device
) -> tuple[dict[str, float], dict[str, int | None], dict[str, float]]:
    """Return each layout's first update time (ms), its peak memory, and its gradient's relative
    difference from the last layout's.

    Raises:
        RuntimeError: if the gradients differ in float32.
    """
    times: dict[str, float] = {}
    memory: dict[str, int | None] = {}
    gradients: dict[str, Tensor] = {}
    for layout in layouts:
        updates.case.model.zero_grad()  # frees the gradient of the layout before
        start = time.perf_counter()
        memory[layout] = peak_bytes(partial(updates.update, layout), device)
        synchronize(device)
        times[layout] = (time.perf_counter() - start) * 1e3
        gradients[layout] = updates.gradient()
    truth = gradients.pop(layouts[-1])
    differences = {
        layout: float((gradient - truth).norm() / truth.norm())
        for layout, gradient in gradients.items()
    }
    if updates.dtype == torch.float32 and not agree(differences, updates.dtype):
        raise RuntimeError(
            f"the layouts disagree: the relative differences of their gradients are {differences}"
        )
    return times, memory, differences


def agree(differences: dict[str, float], dtype: torch.dtype) -> bool:
    # each of two gradients in bfloat16 is .03 to .05 away from that in float32
    limit = 1e-3 if dtype == torch.float32 else 1e-1
    return all(difference < limit for difference in differences.values())


def update_in_layouts(
    case: Case,
    rounds: int,
    device: torch.device,
    dtype: torch.dtype,
    layouts: Sequence[str] = LAYOUTS,
) -> Iterator[dict[str, Any]]:
    """Yield the figures of the update in each layout, of its first call and of timed rounds; every
    rollout has a gradient.

    Args:
        layouts: must include "shared", by whose tokens and FLOPs both are counted.
    """
    updates = LayoutUpdates.on_device(case, device, dtype)
    model = case.model
    times, memory, differences = first_updates(updates, layouts, device)
    throughput = gemm_throughput(4096, model.config.hidden_size, dtype, device)

    flops, tokens = updates.work()

    def figures(layout: str) -> dict[str, Any]:
        ms, peak = times[layout], memory[layout]
        return {
            "milliseconds": ms,
            "tokens": tokens,
            "tokens_per_second": tokens / ms * 1e3,
            "floor_milliseconds": flops / throughput * 1e3,
            "model_flops_utilisation": flops / throughput / ms * 1e3,
            "peak_mib": None if peak is None else peak / 2**20,
            "times_shared": ms / times["shared"],
        }

    sizes = {
        "prompts": len(case.prompts),
        "rollouts": updates.packer.num_rollouts,
        "prompt_tokens": len(case.prompts.tokens),
        "response_tokens": len(case.rollouts.tokens),
        "parameters": sum(p.numel() for p in model.parameters()),
        "matrix_gflops": throughput / 1e9,
        "gradient_relative_difference": differences,
        "gradients_agree": agree(differences, dtype),
    }
    yield sizes | {"layouts": {layout: figures(layout) for layout in layouts}}
    calls = {layout: partial(updates.update, layout) for layout in layouts}
    times = milliseconds(calls, rounds, device)
    yield sizes | {"layouts": {layout: figures(layout) for layout in layouts}}
