"""`python -m bench.profiles`: where the time of a rollout and of an update goes, kernel by kernel,
by PyTorch's profiler.

    maze        a rollout and an update of the MaxRL paper's maze job, 17x17, 32 x 128, in which
                every rollout has a gradient
    qwen-0.5b   an update of a Qwen-shaped policy, as in bench.train_step

Each is profiled once, after calls that capture graphs and fill caches. On a GPU the table has its
kernels, copies and fills, and `busy` is their share of the time that passed; on a CPU it has
PyTorch's operators. The last line is one JSON document.

`make gpu-profile` gives it 75 seconds.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.layouts import LayoutUpdates
from bench.measure import (
    argument_parser,
    describe,
    keep,
    machine,
    prepare,
    run_command,
    synchronize,
)
from bench.train_step import qwen, step17
from bench.whole_step import FIRST_PROMPT, RandomAdvantages, timed_trainer, warm_started
from maxrl_fast.runtime.device import resolve_dtype

LINES = 25  # of a table, and kernels in the JSON document
WARM_UP = 3  # calls before the profiled one


def profiled(function: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Return the milliseconds of a call, and calls and microseconds of each kernel, the longest
    first.
    """
    for _ in range(WARM_UP):
        function()
    synchronize(device)
    on_gpu = device.type == "cuda"
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    ) as profiler:
        start = time.perf_counter()
        function()
        synchronize(device)
        milliseconds = (time.perf_counter() - start) * 1e3
    averages = profiler.key_averages()
    if on_gpu:  # neither the operators' own events nor an annotation around several kernels
        kernels = [x for x in averages if x.device_type.name == "CUDA" and not x.is_user_annotation]
        times = [(x.key, x.count, x.self_device_time_total) for x in kernels]
    else:
        times = [(x.key, x.count, x.self_cpu_time_total) for x in averages]
    total = sum(time for _, _, time in times)
    longest = sorted(times, key=lambda entry: -entry[2])[:LINES]
    return {
        "milliseconds": milliseconds,
        "busy": total / 1e3 / milliseconds,
        "launches": sum(count for _, count, _ in times),
        "kernels": [
            {"name": name, "calls": n, "microseconds": us, "share": us / max(total, 1e-9)}
            for name, n, us in longest
        ],
    }


def maze(
    device: torch.device, dtype: torch.dtype, num_prompts: int, num_rollouts: int
) -> dict[str, Any]:
    """Return the profiles of the maze job's rollout, with its rewards, and update, after a short
    warm start.
    """
    config, task, model = warm_started(
        step17(num_prompts, num_rollouts, 20 if device.type == "cuda" else 1, device, dtype)
    )
    trainer = timed_trainer(config, task, model, trains=False).trainer
    trainer.objective = RandomAdvantages("grpo", {})
    collected = trainer.collector.collect(1, FIRST_PROMPT)
    step = trainer.objective.begin(collected, trainer.learner)
    (sequences,) = collected.minibatches(1)
    advantages = step.advantages(sequences)
    update = partial(
        trainer.learner.update, collected, advantages, sequences, when="the profile", lr=0.0
    )
    return {
        "maze rollout": profiled(lambda: trainer.collector.collect(1, FIRST_PROMPT), device),
        "maze update": profiled(update, device),
    }


def qwen_update(
    device: torch.device, dtype: torch.dtype, num_prompts: int, num_rollouts: int
) -> dict[str, Any]:
    updates = LayoutUpdates.on_device(
        qwen("qwen-0.5b", num_prompts, num_rollouts, device), device, dtype
    )
    return {"qwen-0.5b update": profiled(partial(updates.update, "shared"), device)}


CASES = {"maze": (maze, (32, 128)), "qwen-0.5b": (qwen_update, (4, 16))}


def report(name: str, figures: dict[str, Any]) -> None:
    print(
        f"\n{name}: {figures['milliseconds']:,.1f} ms, {figures['busy']:.0%} busy, "
        f"{figures['launches']:,} launches"
    )
    for kernel in figures["kernels"]:
        us, share = kernel["microseconds"], kernel["share"]
        print(f"  {us / 1e3:9.2f} ms {share:6.1%} {kernel['calls']:7,} x {kernel['name']:.110}")


def main() -> int:
    parser = argument_parser("profiles", __doc__, has_dtype=True)
    parser.add_argument(
        "--cases", nargs="+", choices=list(CASES), default=list(CASES), help="default: all"
    )
    parser.add_argument("--prompts", type=int, help="prompts per step (default: the case's)")
    parser.add_argument("--rollouts", type=int, help="rollouts per prompt (default: the case's)")
    options = parser.parse_args()
    device = prepare(options)
    dtype = resolve_dtype(options.dtype, device)
    result: dict[str, Any] = {
        "benchmark": "profiles",
        "machine": machine(device, dtype),
        "profiles": {},
    }
    print(describe(result["machine"]))
    for name in options.cases:
        make, (prompts, rollouts) = CASES[name]
        for title, figures in make(
            device, dtype, options.prompts or prompts, options.rollouts or rollouts
        ).items():
            result["profiles"][title] = figures
            report(title, figures)
            keep(result)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(run_command(main))
