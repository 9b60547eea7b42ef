"""The update of a training step in three layouts of its batch, for bench.train_step."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.measure import matrix_rate, milliseconds, peak_bytes, synchronize
from maxrl_fast.config.options import OptimizerOptions
from maxrl_fast.model.decoder import Decoder, DecoderConfig
from maxrl_fast.ops import linear_policy_gradient_loss
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.training.learner import Learner, LossSettings, make_optimizer
from maxrl_fast.training.packing import Batch, Packer

SETTINGS = LossSettings(loss="reinforce", aggregation="token_mean")
LAYOUTS = ("shared", "repeated", "padded")


@dataclass
class Case:
    """A policy, rollouts to learn from, and how many tokens go through the model at a time."""

    model: Decoder
    prompts: Prompts
    rollouts: Rollouts
    token_budget: int
    checkpoint_activations: bool = False


def padded_passes(case: Case, advantages: Tensor, dtype: torch.dtype, denominator: float) -> None:
    """Every response with its own copy of the prompt, all padded to one length. Prompts of equal length."""
    model, prompts, rollouts = case.model, case.prompts, case.rollouts
    num_rollouts, prompt_length = len(rollouts.lengths) // len(prompts), int(prompts.lengths[0])
    device = rollouts.tokens.device
    responses = rollouts.padded_tokens(0)  # [S, L]
    sequences = torch.cat([prompts.tokens.view(len(prompts), -1).repeat_interleave(num_rollouts, 0), responses], 1)
    width = sequences.shape[1]
    rows = max(1, case.token_budget // width)
    predicting = torch.arange(prompt_length - 1, width - 1, device=device)
    for start in range(0, len(sequences), rows):
        part = sequences[start : start + rows]
        lengths = rollouts.lengths[start : start + rows]

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor, batch: int = len(part)) -> Tensor:
            q, k, v = (x.view(batch, width, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(0, 1)

        length = responses.shape[1]
        finish = partial(
            loss_of,
            targets=part[:, prompt_length:].flatten(),
            advantages=advantages[start : start + rows],
            cu_seqlens=torch.arange(len(part) + 1, device=device) * length,
            mask=(torch.arange(length, device=device) < lengths[:, None]).flatten(),
            loss="reinforce",
            denominator=denominator,
        )
        positions = torch.arange(width, device=device).repeat(len(part))
        asked = (predicting + torch.arange(len(part), device=device)[:, None] * width).flatten()
        model(part.flatten(), positions, attention, asked, dtype, finish).backward()


def loss_of(hidden: Tensor, weight: Tensor, **arguments: Any) -> Tensor:
    """The loss alone from hidden states and the output matrix."""
    return linear_policy_gradient_loss(hidden, weight, **arguments)[0]


def update_flops(config: DecoderConfig, batch: Batch) -> int:
    """Operations of the products of a forward and a backward pass: weights, attention, output matrix; nothing twice."""
    heads, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    before, after = config.hidden_size * (heads + 2 * keys), config.hidden_size * (heads + 3 * config.intermediate_size)
    streamed = config.num_hidden_layers * before + (config.num_hidden_layers - 1) * after
    weights = streamed * len(batch.tokens) + after * len(batch.rows)  # the last layer ends with the rows that predict
    spans = (batch.layout.sequences, batch.layout.to_prompts, batch.layout.responses)
    pairs = sum(
        int((x.q_lengths * (x.q_lengths + 1) // 2 if x.causal else x.q_lengths * x.k_lengths).sum()) for x in spans if x
    )
    attention = 2 * heads * pairs * config.num_hidden_layers
    return 6 * (weights + attention + config.vocab_size * config.hidden_size * len(batch.targets))


def update_in_layouts(
    case: Case, rounds: int, device: torch.device, dtype: torch.dtype, layouts: Sequence[str] = LAYOUTS
) -> dict[str, Any]:
    """The update in each layout, all rollouts learned from; `shared` must be among them."""
    case.model.to(device)
    case.model.checkpoint_activations = case.checkpoint_activations
    case.prompts, case.rollouts = case.prompts.to(device), case.rollouts.to(device)
    model, prompts, rollouts = case.model, case.prompts, case.rollouts
    advantages = torch.randn(len(rollouts.lengths), generator=torch.Generator().manual_seed(0)).to(device)
    denominator = float(len(rollouts.tokens))
    optimizer = make_optimizer(model, OptimizerOptions())
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = 0.0  # every repetition meets the same weights
    learner = Learner(model, optimizer, SETTINGS, 1.0, case.token_budget, dtype)
    everything = torch.arange(len(advantages))
    shared, repeated = (Packer(prompts, rollouts, advantages, cost) for cost in (0.0, float("inf")))

    def packed(packer: Packer, num_tokens: int) -> None:
        for part in packer.split(everything, num_tokens):
            learner.loss(packer.pack(part), denominator)[0].backward()

    # `split` counts shared prompts, of which a repeated micro-batch has as many copies as responses.
    per_response = int(prompts.lengths[0]) + len(rollouts.tokens) / len(rollouts.lengths)
    share = case.token_budget // per_response * (per_response - int(prompts.lengths[0]))
    passes: dict[str, Callable[[], None]] = {
        "shared": lambda: packed(shared, case.token_budget),
        "repeated": lambda: packed(repeated, int(share) + int(prompts.lengths[0])),
        "padded": lambda: padded_passes(case, advantages, dtype, denominator),
    }
    passes = {name: passes[name] for name in layouts}

    def update(name: str) -> None:
        model.zero_grad()
        passes[name]()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # the moments are there before memory is measured
    # The first call of each gives the gradient to compare, and memory; where it takes minutes, its time too.
    times: dict[str, float] = {}
    memory: dict[str, int | None] = {}
    gradients: dict[str, Tensor] = {}
    for name in passes:
        model.zero_grad()
        start = time.perf_counter()
        memory[name] = peak_bytes(partial(update, name), device)
        synchronize(device)
        times[name] = (time.perf_counter() - start) * 1e3
        gradients[name] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])  # clipped
    truth = gradients.pop(layouts[-1])
    differences = {name: float((gradients[name] - truth).norm() / truth.norm()) for name in gradients}
    limit = 1e-3 if dtype == torch.float32 else 5e-2
    if dtype == torch.float32 and not all(difference < limit for difference in differences.values()):
        raise RuntimeError(f"the layouts disagree: their gradients differ by {differences}, relatively")
    del gradients, truth
    if rounds:
        times = milliseconds({name: partial(update, name) for name in passes}, rounds, device)
    flops, tokens = {}, {}
    for name, packer in (("shared", shared), ("repeated", repeated)):
        batch = packer.pack(everything)
        flops[name], tokens[name] = update_flops(model.config, batch), len(batch.tokens)
    flops["padded"], tokens["padded"] = flops["repeated"], tokens["repeated"]  # padding is no use
    rate = matrix_rate(4096, model.config.hidden_size, dtype, device)
    return {
        "prompts": len(prompts),
        "rollouts": shared.num_rollouts,
        "prompt_tokens": len(prompts.tokens),
        "response_tokens": len(rollouts.tokens),
        "parameters": sum(p.numel() for p in model.parameters()),
        "matrix_gflops": rate / 1e9,
        "gradient_relative_difference": differences,
        "gradients_agree": all(difference < limit for difference in differences.values()),
        "layouts": {
            name: {
                "milliseconds": times[name],
                "tokens": tokens[name],
                "tokens_per_second": tokens[name] / times[name] * 1e3,
                "floor_milliseconds": flops[name] / rate * 1e3,
                "model_flops_utilisation": flops[name] / rate / times[name] * 1e3,
                "peak_mib": None if memory[name] is None else (memory[name] or 0) / 2**20,
                "times_shared": times[name] / times["shared"],
            }
            for name in passes
        },
    }
