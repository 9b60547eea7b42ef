"""`python -m bench.train_step`: a training step of the default job by stage, and the update in three layouts.

The layouts compute the same loss, gradients and optimizer step from the same rollouts, in one process, in turn, and their
gradients are compared first:

    shared     packed, each prompt once for all its responses: what the trainer does
    repeated   packed, each response with its own copy of the prompt
    padded     each response with its own copy of the prompt, all padded to one length: what is usual

Cases: `job`, the default job after a short warm start, with rollouts of its own; `maze17`, the MaxRL paper's maze, 32
prompts of 17x17 and 128 rollouts about as long as solutions; `qwen-0.5b` and `qwen-1.5b`, layers and vocabulary of those
sizes with random weights, of which a CPU takes two layers. The floor of an update is the operations its products need, at the
machine's measured matrix rate; model FLOPs utilisation is floor over time. The last line is one JSON document.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bench.measure import matrix_rate, milliseconds, peak_bytes, synchronize
from maxrl_fast.batching import Batch, Packer
from maxrl_fast.checks import check
from maxrl_fast.config import parse, resolve
from maxrl_fast.errors import InputError
from maxrl_fast.hardware import resolve_device, resolve_dtype, versions
from maxrl_fast.learner import Learner, LossSettings, make_optimizer
from maxrl_fast.model.decoder import Decoder, DecoderConfig
from maxrl_fast.model.policy import build_policy
from maxrl_fast.objectives import OBJECTIVES
from maxrl_fast.ops import group_advantage, linear_policy_gradient_loss
from maxrl_fast.options import Config, OptimizerOptions
from maxrl_fast.records import Prompts, Rollouts, cumulative, gather_sequences
from maxrl_fast.rollout import Sampling
from maxrl_fast.rollout.native import NativeEngine
from maxrl_fast.screen import Screen
from maxrl_fast.tasks.maze import MazeTask
from maxrl_fast.tasks.registry import build_task
from maxrl_fast.warm_start import warm_start

SETTINGS = LossSettings(loss="reinforce", aggregation="token_mean")


@dataclass
class Case:
    """A policy, rollouts to learn from, and how many tokens go through the model at a time."""

    model: Decoder
    prompts: Prompts
    rollouts: Rollouts
    token_budget: int
    checkpoint_activations: bool = False


def job(config: Config) -> tuple[Case, dict[str, Any]]:
    """The default job, or what its flags make of it, and the figures of its stages."""
    task = build_task(config.task, config.run.seed)
    config = resolve(config, task)
    estimator = OBJECTIVES[config.objective.objective].estimator
    if estimator is None:
        raise InputError(f"--objective must be a group advantage here, got {config.objective.objective}")
    device, dtype = torch.device(config.run.device), getattr(torch, config.run.dtype)
    model = build_policy(config, task).to(device)
    warm_start(config, task, model, Screen())
    num_prompts, num_rollouts = config.rollout.prompts, config.rollout.rollouts
    engine, sampling = NativeEngine(model, dtype), Sampling.of(config, task)
    prompts = task.prompts("train", 10**6, num_prompts).to(device)
    rollouts = engine.generate(prompts, num_rollouts, sampling, seed=0, step=1)
    rewards = task.score(prompts, rollouts).view(num_prompts, num_rollouts)

    def advantage() -> Tensor:
        return group_advantage(rewards, estimator, k=config.objective.k, order=config.objective.order).flatten()

    advantages = advantage()
    everything = torch.arange(len(advantages))
    learner = Learner.of(config, copy.deepcopy(model), LossSettings.of(config))
    stages = milliseconds(
        {
            "prompts": lambda: task.prompts("train", 10**6, num_prompts),
            "rollout": lambda: engine.generate(prompts, num_rollouts, sampling, seed=0, step=1),
            "reward": lambda: task.score(prompts, rollouts),
            "advantage": advantage,
            "update": lambda: learner.update(prompts, rollouts, advantages, everything, when="bench", lr=0.0),
            "weights to rollout": lambda: engine.load_weights(model),
        },
        5,
        device,
    )
    repeated = repeat_prompts(prompts, num_rollouts)
    rollout_ways = milliseconds(
        {
            "shared": lambda: engine.generate(prompts, num_rollouts, sampling, seed=0, step=1),
            "repeated": lambda: engine.generate(repeated, 1, sampling, seed=0, step=1),
        },
        3,
        device,
    )
    figures = {
        "milliseconds_by_stage": stages,
        "rollouts_that_teach": int((advantages != 0).sum()),
        "rollout_tokens_per_second": len(rollouts.tokens) / stages["rollout"] * 1e3,
        "step_tokens_per_second": len(rollouts.tokens) / sum(stages.values()) * 1e3,
        "rollout_milliseconds": rollout_ways,
        "rollout_ratio": rollout_ways["repeated"] / rollout_ways["shared"],
    }
    return Case(model, prompts, rollouts, config.optimizer.token_budget), figures


def repeat_prompts(prompts: Prompts, times: int) -> Prompts:
    """Every prompt `times` times, each with an id of its own: the engine then computes each of them."""
    copies = torch.arange(len(prompts), device=prompts.ids.device).repeat_interleave(times)
    index, cu_seqlens = gather_sequences(prompts.cu_seqlens, copies)
    return Prompts(prompts.tokens[index], cu_seqlens, torch.arange(len(copies), device=copies.device))


def maze17(num_prompts: int, num_rollouts: int) -> Case:
    """The MaxRL paper's policy and batch. Responses are solutions, shortened by up to a third so that lengths differ."""
    task = MazeTask(17, 0)
    config = DecoderConfig(32, 256, 1024, 4, 4, 2, 64, max_position_embeddings=512, rope_theta=1e6)
    model = Decoder(config)
    model.initialise(0)
    prompts, solutions = task.demonstrations(0, num_prompts)
    generator = torch.Generator().manual_seed(0)
    lengths = solutions.lengths.repeat_interleave(num_rollouts)
    lengths = (lengths * (1 - torch.rand(len(lengths), generator=generator) / 3)).long()
    starts = solutions.cu_seqlens[:-1].repeat_interleave(num_rollouts)
    cu_seqlens = cumulative(lengths)
    index = torch.arange(int(cu_seqlens[-1])) + (starts - cu_seqlens[:-1]).repeat_interleave(lengths)
    return Case(model, prompts, made_up(solutions.tokens[index], cu_seqlens), 16384)


QWEN = {"qwen-0.5b": (896, 4864, 24, 14, 2, 64), "qwen-1.5b": (1536, 8960, 28, 12, 2, 128)}


def qwen(name: str, num_prompts: int, num_rollouts: int, device: torch.device) -> Case:
    """Prompts of 512 tokens, responses of 256 to 1024 on a GPU; a quarter of both, and two layers, on a CPU."""
    hidden, intermediate, layers, heads, kv_heads, head_dim = QWEN[name]
    small = device.type == "cpu"
    config = DecoderConfig(
        *(151936, hidden, intermediate, 2 if small else layers, heads, kv_heads, head_dim), max_position_embeddings=32768
    )
    model = Decoder(config)
    model.initialise(0)
    generator = torch.Generator().manual_seed(0)
    prompt, longest = (128, 256) if small else (512, 1024)
    lengths = torch.randint(longest // 4, longest + 1, (num_prompts * num_rollouts,), generator=generator)
    tokens = torch.randint(0, 151936, (num_prompts * prompt + int(lengths.sum()),), generator=generator)
    prompt_tokens, response_tokens = tokens.split([num_prompts * prompt, int(lengths.sum())])
    prompts = Prompts(prompt_tokens, torch.arange(num_prompts + 1) * prompt, torch.arange(num_prompts))
    return Case(model, prompts, made_up(response_tokens, cumulative(lengths)), 2048 if small else 16384, not small)


def made_up(tokens: Tensor, cu_seqlens: Tensor) -> Rollouts:
    """Rollouts that no policy sampled."""
    return Rollouts(tokens, cu_seqlens, torch.zeros(len(tokens)), torch.zeros(len(cu_seqlens) - 1, dtype=torch.bool))


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


def three_layouts(case: Case, rounds: int, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The update in each layout, all rollouts learned from."""
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
    truth = gradients["padded"]
    differences = {name: float((gradients[name] - truth).norm() / truth.norm()) for name in ("shared", "repeated")}
    if not max(differences.values()) < (1e-3 if dtype == torch.float32 else 5e-2):
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


def report(name: str, case: dict[str, Any]) -> None:
    """The figures for people."""
    print(
        f"\n{name}: {case['parameters']:,} parameters, {case['prompts']} prompts x {case['rollouts']} rollouts, "
        f"{case['prompt_tokens']:,} prompt and {case['response_tokens']:,} response tokens; "
        f"products at {case['matrix_gflops']:,.0f} GFLOP/s"
    )
    for stage, value in case.get("milliseconds_by_stage", {}).items():
        print(f"  {stage:<20}{value:9.1f} ms")
    if "milliseconds_by_stage" in case:
        print(
            f"  response tokens/s: {case['rollout_tokens_per_second']:,.0f} in rollout, {case['step_tokens_per_second']:,.0f} "
            f"in the whole step; {case['rollouts_that_teach']} rollouts can teach; "
            f"rollout with prompts repeated takes {case['rollout_ratio']:.2f} times as long"
        )
    print(f"  {'update':<12}{'ms':>10}{'x shared':>10}{'tokens':>12}{'tokens/s':>12}{'floor ms':>10}{'MFU':>7}{'peak MiB':>10}")
    for layout, x in case["layouts"].items():
        peak = "" if x["peak_mib"] is None else f"{x['peak_mib']:,.0f}"
        print(
            f"  {layout:<12}{x['milliseconds']:10,.1f}{x['times_shared']:10.2f}{x['tokens']:12,}{x['tokens_per_second']:12,.0f}"
            f"{x['floor_milliseconds']:10,.1f}{x['model_flops_utilisation']:7.1%}{peak:>10}"
        )


def main() -> int:
    """The command line: the cases, and for `job` every option of the trainer."""
    cases = ["job", "maze17", *QWEN]
    parser = argparse.ArgumentParser(
        prog="python -m bench.train_step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=cases, default=["job", "maze17"], help="default: job maze17")
    parser.add_argument("--rounds", type=int, help="calls after the first (default: 3; maze17: 0, the first is timed)")
    parser.add_argument("--prompts", type=int, help="prompts of a step (default: the case's)")
    parser.add_argument("--rollouts", type=int, help="rollouts of each prompt (default: the case's)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    options, flags = parser.parse_known_args()
    try:
        device = resolve_device(options.device)
        dtype = resolve_dtype(options.dtype, device)
        machine = versions() | {"threads": torch.get_num_threads(), "device": str(device), "dtype": str(dtype)}
        print(f"{machine['platform']}, {machine['processor']}, {machine['threads']} threads, torch {machine['torch']}, {dtype}")
        result: dict[str, Any] = {"benchmark": "train_step", "machine": machine, "cases": {}}
        for name in options.cases:
            figures: dict[str, Any] = {}
            sizes = {"maze17": (32, 128), "qwen-0.5b": (4, 16), "qwen-1.5b": (4, 16)}.get(name, (32, 16))
            prompts, rollouts = options.prompts or sizes[0], options.rollouts or sizes[1]
            if name == "job":
                given = ["--prompts", str(prompts), "--rollouts", str(rollouts), "--sft-steps", "40", "--out", "unused"]
                given += ["--dtype", str(dtype).removeprefix("torch."), "--device", device.type]
                config = parse([*given, *flags])
                check(config)
                case, figures = job(config)
            else:
                case = maze17(prompts, rollouts) if name == "maze17" else qwen(name, prompts, rollouts, device)
            rounds = (0 if name == "maze17" else 3) if options.rounds is None else options.rounds
            result["cases"][name] = figures | three_layouts(case, rounds, device, dtype)
            report(name, result["cases"][name])
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
