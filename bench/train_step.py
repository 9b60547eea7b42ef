"""`python -m bench.train_step`: a training step of the default job by stage, and the same step padded and prompt-repeated.

Both ways sample as many responses and compute the same loss, gradients and optimizer step from the same rollouts, in one
process, in turn; the gradients are compared. The floor of an update is the time of its layers' matrix products alone, at the
rate measured here. Takes every option of the trainer besides --repeats. The last line is one JSON document.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from maxrl_fast.batching import gather_sequences, micro_batches
from maxrl_fast.config import check, parse, resolve
from maxrl_fast.control import StopSignal
from maxrl_fast.errors import InputError
from maxrl_fast.hardware import versions
from maxrl_fast.learner import Learner, LossSettings
from maxrl_fast.model.decoder import Decoder
from maxrl_fast.model.policy import build_policy
from maxrl_fast.objectives import OBJECTIVES
from maxrl_fast.ops import group_advantage, policy_gradient_loss
from maxrl_fast.options import Config
from maxrl_fast.records import Prompts, Rollouts
from maxrl_fast.rollout import Sampling
from maxrl_fast.rollout.native import NativeEngine
from maxrl_fast.screen import Screen
from maxrl_fast.tasks import Task
from maxrl_fast.tasks.registry import build_task
from maxrl_fast.warm_start import warm_start


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
    """A policy after a short warm start: rollouts of realistic length."""
    model = build_policy(config, task)
    warm_start(config, task, model, Screen(), StopSignal())
    return model


def repeat_prompts(prompts: Prompts, times: int) -> Prompts:
    """Every prompt `times` times, each with an id of its own: the engine then computes each of them."""
    copies = torch.arange(len(prompts)).repeat_interleave(times)
    index, cu_seqlens = gather_sequences(prompts.cu_seqlens, copies)
    return Prompts(prompts.tokens[index], cu_seqlens, torch.arange(len(copies)))


def measure(config: Config, repeats: int) -> dict[str, Any]:
    """All figures of one configuration."""
    task = build_task(config.task, config.run.seed)
    config = resolve(config, task)
    torch.set_num_threads(config.run.threads or 1)
    model = warm_policy(config, task)
    num_prompts, num_rollouts = config.rollout.prompts, config.rollout.rollouts
    estimator = OBJECTIVES[config.objective.objective].estimator
    if estimator is None:
        raise InputError(f"--objective must be a group advantage here, got {config.objective.objective}")
    engine = NativeEngine(model, torch.float32)
    sampling = Sampling.of(config, task)
    prompts = task.prompts("train", 10**6, num_prompts)
    rollouts = engine.generate(prompts, num_rollouts, sampling, seed=0, step=1)
    rewards = task.score(prompts, rollouts).view(num_prompts, num_rollouts)

    def advantage() -> Tensor:
        return group_advantage(rewards, estimator, k=config.objective.k, order=config.objective.order).flatten()

    advantages = advantage()
    everything = torch.arange(len(advantages))
    learner = Learner.of(config, copy.deepcopy(model), LossSettings.of(config))
    stages = median_seconds(
        {
            "prompts": lambda: task.prompts("train", 10**6, num_prompts),
            "rollout": lambda: engine.generate(prompts, num_rollouts, sampling, seed=0, step=1),
            "reward": lambda: task.score(prompts, rollouts),
            "advantage": advantage,
            "update": lambda: learner.update(prompts, rollouts, advantages, everything, when="bench", lr=0.0),
            "weights to rollout": lambda: engine.load_weights(model),
        },
        repeats,
    )

    # The same step two ways: all rollouts sampled, then learned from, with advantages that are nowhere 0.
    weights = torch.randn(len(advantages), generator=torch.Generator().manual_seed(0))
    denominator = float(len(rollouts.tokens))
    settings = LossSettings(loss="reinforce", aggregation="token_mean")
    ours, theirs = (Learner.of(config, copy.deepcopy(model), settings) for _ in range(2))
    repeated = repeat_prompts(prompts, num_rollouts)

    def update(learner: Learner, accumulate: Callable[[], object]) -> None:
        learner.model.zero_grad()
        accumulate()
        for group in learner.optimizer.param_groups:
            group["lr"] = 0.0  # the step is done, and every repetition meets the same weights
        learner.optimizer.step()

    budget = config.optimizer.token_budget
    pair = median_seconds(
        {
            "shared rollout": lambda: engine.generate(prompts, num_rollouts, sampling, seed=0, step=1),
            "repeated rollout": lambda: engine.generate(repeated, 1, sampling, seed=0, step=1),
            "shared update": lambda: update(ours, lambda: shared_update(ours, prompts, rollouts, weights, denominator)),
            "repeated update": lambda: update(
                theirs, lambda: padded_update(theirs.model, prompts, rollouts, weights, budget, denominator)
            ),
        },
        repeats,
    )
    gradients = [torch.cat([p.grad.flatten() for p in x.model.parameters() if p.grad is not None]) for x in (ours, theirs)]
    difference = float((gradients[0] - gradients[1]).norm() / gradients[1].norm())
    if not difference < 1e-3:
        raise RuntimeError(f"the two ways disagree: their gradients differ by {difference}, relatively")

    stream_tokens = len(prompts.tokens) + len(rollouts.tokens) - len(rollouts.lengths)
    padded_tokens = len(rollouts.lengths) * (int(prompts.lengths[0]) + int(rollouts.lengths.max()))
    products = sum(p.numel() for p in model.model.layers.parameters() if p.dim() == 2)
    rate = matrix_rate(min(stream_tokens, budget), model.config.hidden_size)
    shared_seconds = pair["shared rollout"] + pair["shared update"]
    repeated_seconds = pair["repeated rollout"] + pair["repeated update"]
    return {
        "benchmark": "train_step",
        "machine": versions() | {"threads": torch.get_num_threads()},
        "prompts": num_prompts,
        "rollouts": num_rollouts,
        "prompt_tokens": len(prompts.tokens),
        "response_tokens": len(rollouts.tokens),
        "rollouts_that_teach": int((advantages != 0).sum()),
        "seconds_by_stage": stages,
        "rollout_tokens_per_second": len(rollouts.tokens) / stages["rollout"],
        "step_tokens_per_second": len(rollouts.tokens) / sum(stages.values()),
        "two_ways": {
            "seconds": pair,
            "ratio_rollout": pair["repeated rollout"] / pair["shared rollout"],
            "ratio_update": pair["repeated update"] / pair["shared update"],
            "ratio": repeated_seconds / shared_seconds,
            "update_tokens_shared": stream_tokens,
            "update_tokens_repeated": padded_tokens,
            "update_tokens_per_second_shared": stream_tokens / pair["shared update"],
            "update_floor_seconds": 6 * products * stream_tokens / rate,
            "matrix_gflops": rate / 1e9,
            "gradient_relative_difference": difference,
        },
    }


def report(result: dict[str, Any]) -> None:
    """The figures for people."""
    machine, ways = result["machine"], result["two_ways"]
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
    print("two ways, all rollouts learned from         shared     repeated and padded   ratio")
    for stage in ("rollout", "update"):
        ours, theirs = (ways["seconds"][f"{way} {stage}"] * 1e3 for way in ("shared", "repeated"))
        print(f"  {stage:<35}{ours:10.1f} ms{theirs:16.1f} ms{ways[f'ratio_{stage}']:10.2f}")
    print(f"  {'both':<35}{'':31}{ways['ratio']:10.2f}")
    print(f"  {'tokens of the update':<35}{ways['update_tokens_shared']:10,}{ways['update_tokens_repeated']:19,}")
    print(
        f"  update: {ways['update_tokens_per_second_shared']:,.0f} tokens/s without padding; floor, the layers' products "
        f"at the {ways['matrix_gflops']:.0f} GFLOP/s measured: {ways['update_floor_seconds'] * 1e3:.1f} ms"
    )


def main() -> int:
    """The command line: --repeats, and every option of the trainer."""
    parser = argparse.ArgumentParser(prog="python -m bench.train_step", description=__doc__, add_help=False)
    parser.add_argument("--repeats", type=int, default=5, help="timed repetitions (default: 5)")
    options, flags = parser.parse_known_args()
    try:
        config = parse(["--sft-steps", "40", "--dtype", "float32", "--device", "cpu", "--out", "unused", *flags])
        check(config)
        result = measure(config, options.repeats)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report(result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
