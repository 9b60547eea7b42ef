"""`python -m bench.train_step`: a training step of the default job by stage, and the same step padded and prompt-repeated.

Both sides compute the same loss and gradients from the same rollouts, in one process, in turn. The floor is the time of the
step's matrix products alone at the rate measured here. The last line is one JSON document.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from maxrl_fast.batching import micro_batches
from maxrl_fast.config import check, parse, resolve
from maxrl_fast.learner import Learner, LossSettings
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.model.policy import build_policy
from maxrl_fast.ops import group_advantage, policy_gradient_loss
from maxrl_fast.options import Config
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.rollout import Sampling
from maxrl_fast.rollout.native import NativeEngine
from maxrl_fast.run_files import versions
from maxrl_fast.screen import Screen
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.registry import build_task


def padded_update(
    model: Decoder, prompts: Prompts, rollouts: Rollouts, advantages: Tensor, token_budget: int, denominator: float
) -> float:
    """The usual way: every response with its own copy of the prompt, all padded to one length. Prompts of equal length."""
    num_rollouts = len(rollouts.lengths) // len(prompts)
    prompt_length = int(prompts.lengths[0])
    responses = rollouts.padded_tokens(0)  # [S, L]
    sequences = torch.cat([prompts.tokens.view(len(prompts), -1).repeat_interleave(num_rollouts, 0), responses], 1)
    width = sequences.shape[1]
    rows = max(1, token_budget // width)
    loss = 0.0
    for start in range(0, len(sequences), rows):
        part = sequences[start : start + rows]
        lengths = rollouts.lengths[start : start + rows]

        def attention(layer: int, q: Tensor, k: Tensor, v: Tensor, batch: int = len(part)) -> Tensor:
            q, k, v = (x.view(batch, width, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
            repeats = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)

        positions = torch.arange(width).repeat(len(part))
        hidden = model(part.flatten(), positions, attention, torch.arange(part.numel()), torch.float32)
        logits = model.logits(hidden).view(len(part), width, -1)[:, prompt_length - 1 : -1]  # [rows, L, V]
        mask = torch.arange(responses.shape[1]) < lengths[:, None]
        cu_seqlens = torch.arange(len(part) + 1) * responses.shape[1]
        value, _ = policy_gradient_loss(
            logits.flatten(0, 1),
            part[:, prompt_length:].flatten(),
            advantages[start : start + rows],
            cu_seqlens,
            loss="reinforce",
            mask=mask.flatten(),
            denominator=denominator,
        )
        value.backward()
        loss += float(value.detach())
    return loss


def shared_update(learner: Learner, prompts: Prompts, rollouts: Rollouts, advantages: Tensor, denominator: float) -> float:
    """Our way, every rollout computed, so that both sides do the same work."""
    loss = 0.0
    for batch in micro_batches(prompts, rollouts, advantages, torch.arange(len(advantages)), learner.token_budget):
        value, _ = learner.loss(batch, denominator)
        value.backward()
        loss += float(value.detach())
    return loss


def median_seconds(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median wall time of each, the functions in turn, after one call of each that is not counted."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for repeat in range(repeats + 1):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            if repeat:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def matrix_rate(rows: int, width: int) -> float:
    """Measured float32 FLOP/s of the step's commonest product, [rows, width] x [width, 2 width]."""
    a, b = torch.randn(rows, width), torch.randn(2 * width, width)
    seconds = median_seconds({"product": lambda: F.linear(a, b)}, 20)["product"]
    return 2 * rows * width * 2 * width / seconds


def warm_policy(config: Config, task: Task) -> Decoder:
    """A policy after 40 steps of the warm start: rollouts of realistic length."""
    from maxrl_fast.control import StopSignal
    from maxrl_fast.warm_start import warm_start

    model = build_policy(config, task)
    screen = Screen()
    warm_start(config, task, model, screen, StopSignal(screen.say))
    return model


def measure(config: Config, repeats: int) -> dict[str, Any]:
    """All figures of one configuration."""
    task = build_task(config.task, config.run.seed)
    config = resolve(config, task)
    torch.set_num_threads(config.run.threads or 1)
    model = warm_policy(config, task)
    num_prompts, num_rollouts = config.rollout.prompts, config.rollout.rollouts
    engine = NativeEngine(model, torch.float32)
    sampling = Sampling.of(config, task)
    prompts = task.prompts("train", 10**6, num_prompts)
    rollouts = engine.generate(prompts, num_rollouts, sampling, seed=0, step=1)
    rewards = task.score(prompts, rollouts).view(num_prompts, num_rollouts)
    advantages = group_advantage(rewards, "maxpo", k=config.objective.k).flatten()

    trained = copy.deepcopy(model)
    learner = Learner.of(config, trained, LossSettings.of(config))
    everything = torch.arange(len(advantages))
    stages = median_seconds(
        {
            "prompts": lambda: task.prompts("train", 10**6, num_prompts),
            "rollout": lambda: engine.generate(prompts, num_rollouts, sampling, seed=0, step=1),
            "reward": lambda: task.score(prompts, rollouts),
            "advantage": lambda: group_advantage(rewards, "maxpo", k=config.objective.k),
            "update": lambda: learner.update(prompts, rollouts, advantages, everything, step=1, lr=0.0),
            "weights to rollout": lambda: engine.load_weights(model),
        },
        repeats,
    )
    num_taught = int((advantages != 0).sum())

    # The same loss two ways, on all rollouts and with advantages that are nowhere 0.
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(len(advantages), generator=generator)
    denominator = float(len(rollouts.tokens))
    ours, theirs = copy.deepcopy(model), copy.deepcopy(model)
    all_learner = Learner.of(config, ours, LossSettings(loss="reinforce", aggregation="token_mean"))
    losses: dict[str, float] = {}

    def shared() -> None:
        ours.zero_grad()
        losses["shared"] = shared_update(all_learner, prompts, rollouts, weights, denominator)

    def padded() -> None:
        theirs.zero_grad()
        losses["padded"] = padded_update(theirs, prompts, rollouts, weights, config.optimizer.token_budget, denominator)

    updates = median_seconds({"shared": shared, "padded": padded}, repeats)
    gradients = [torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]) for m in (ours, theirs)]
    difference = float((gradients[0] - gradients[1]).norm() / gradients[1].norm())
    assert difference < 1e-3, f"the two ways disagree: relative difference of the gradients {difference}"

    stream_tokens = len(prompts.tokens) + len(rollouts.tokens) - len(rollouts.lengths)
    padded_tokens = len(rollouts.lengths) * (int(prompts.lengths[0]) + int(rollouts.lengths.max()))
    layers = model.model.layers
    products = sum(p.numel() for p in layers.parameters() if p.dim() == 2)
    rate = matrix_rate(min(stream_tokens, config.optimizer.token_budget), model.config.hidden_size)
    return {
        "benchmark": "train_step",
        "machine": versions() | {"threads": torch.get_num_threads()},
        "prompts": num_prompts,
        "rollouts": num_rollouts,
        "prompt_tokens": len(prompts.tokens),
        "response_tokens": len(rollouts.tokens),
        "seconds_by_stage": stages,
        "rollouts_that_teach": num_taught,
        "rollout_tokens_per_second": len(rollouts.tokens) / stages["rollout"],
        "step_tokens_per_second": len(rollouts.tokens) / sum(stages.values()),
        "update_all": {
            "shared_seconds": updates["shared"],
            "padded_repeated_seconds": updates["padded"],
            "ratio": updates["padded"] / updates["shared"],
            "shared_tokens": stream_tokens,
            "padded_repeated_tokens": padded_tokens,
            "shared_tokens_per_second": stream_tokens / updates["shared"],
            "floor_seconds": 6 * products * stream_tokens / rate,
            "matrix_gflops": rate / 1e9,
            "gradient_relative_difference": difference,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.train_step", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="timed repetitions (default: 5)")
    options, flags = parser.parse_known_args()
    config = parse(["--sft-steps", "40", "--dtype", "float32", "--device", "cpu", "--out", "unused", *flags])
    check(config)
    result = measure(config, options.repeats)
    machine, update = result["machine"], result["update_all"]
    print(f"{machine['platform']}, {machine['processor']}, {machine['threads']} threads, torch {machine['torch']}")
    print(
        f"{result['prompts']} prompts x {result['rollouts']} rollouts: {result['prompt_tokens']:,} prompt tokens, "
        f"{result['response_tokens']:,} response tokens; {result['rollouts_that_teach']} rollouts can teach"
    )
    for name, seconds in result["seconds_by_stage"].items():
        print(f"  {name:<20}{seconds * 1e3:9.1f} ms")
    print(
        f"  response tokens/s: {result['rollout_tokens_per_second']:,.0f} in rollout, "
        f"{result['step_tokens_per_second']:,.0f} in the whole step"
    )
    print("loss and gradients of all rollouts, forward and backward (tokens counted without padding):")
    print(f"  prompt shared, packed   {update['shared_seconds'] * 1e3:9.1f} ms, {update['shared_tokens']:,} tokens")
    print(
        f"  prompt repeated, padded {update['padded_repeated_seconds'] * 1e3:9.1f} ms, "
        f"{update['padded_repeated_tokens']:,} tokens"
    )
    print(
        f"  ratio {update['ratio']:.2f}; floor of the shared way's layer products "
        f"{update['floor_seconds'] * 1e3:.1f} ms at {update['matrix_gflops']:.0f} GFLOP/s"
    )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
